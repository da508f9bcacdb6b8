"""Test sizes of grids, views and sets in every accepted form."""

import pytest

from hypercomm import GridSet, HyperCommGrid, RankLayout

FORMS = [
    (("tp=2,dp=4",), {}),
    (({"tp": 2, "dp": -1},), {}),
    ((), {"tp": 2, "dp": -1, "backend": "gloo"}),
    ((HyperCommGrid("tp=2,dp=4", world_size=8),), {}),
    (([2, 4], ["tp", "dp"], 0, "gloo"), {}),
    ((RankLayout([2, 4], ["tp", "dp"]),), {"name": "same"}),
    ((iter([2, -1]), iter(["tp", "dp"])), {}),
]


@pytest.mark.parametrize(("args", "keywords"), FORMS)
def test_every_form_of_sizes(args, keywords):
    grid = HyperCommGrid(*args, world_size=8, **keywords)
    assert grid.layout == RankLayout([2, 4], ["tp", "dp"])


# An unspecified size fills the world from the offset on. If all sizes are specified, ranks may be
# left out.
def test_sizes_with_an_offset():
    assert HyperCommGrid("tp=2,dp=-1", rank_offset=4, world_size=12).layout.ranks == range(4, 12)
    assert HyperCommGrid("tp=2", rank_offset=4, world_size=12).layout.ranks == range(4, 6)
    assert HyperCommGrid("tp=2,dp", rank_offset=6, world_size=12, name="a").shape == [2, 3]


# A view accepts its sizes in every form. An unspecified size fills the grid.
@pytest.mark.parametrize(
    "sizes",
    [
        ({"ep": -1, "rest": 2},),
        ([4, -1], ["ep", "rest"]),
        ("ep,rest=2",),
        (RankLayout(ep=4, rest=2),),
    ],
)
def test_sizes_of_views(sizes):
    grid = HyperCommGrid("tp=2,dp=4", rank_offset=4, world_size=12)
    grid.register_view("expert", *sizes)
    assert grid.view("expert").layout == RankLayout([4, 2], ["ep", "rest"], 4)
    assert list(grid) == ["tp", "dp"]


# A grid that leaves out ranks of the world warns and names them. It does not warn with cover="any",
# with an offset, with Megatron's arguments, or with a layout.
def test_ranks_left_out_warn():
    for sizes, keywords in ((("tp=2",), {}), (({"tp": 2},), {}), ((), {"tp": 2})):
        with pytest.warns(UserWarning, match=r"tp=2 leaves out ranks 2..7 .* 8.* cover='any'"):
            HyperCommGrid(*sizes, world_size=8, **keywords)
        HyperCommGrid(*sizes, world_size=8, cover="any", **keywords)
        HyperCommGrid(*sizes, world_size=8, rank_offset=2, **keywords)
    HyperCommGrid([2], ["tp"], world_size=8)
    HyperCommGrid(RankLayout(tp=2), world_size=8)


# A set accepts sizes in every form, also as keywords. A grid given as text starts at rank 0.
def test_sizes_of_sets():
    forms = ("tp=2,dp=4", {"tp": 2, "dp": -1}, RankLayout(tp=2, dp=4))
    for form in forms:
        for grids in (
            GridSet({"a": form, "b": "tp=4"}, world_size=8),
            GridSet(a=form, b="tp=4", world_size=8),
        ):
            assert grids["a"].layout == RankLayout(tp=2, dp=4)
            assert grids["b"].layout == RankLayout(tp=4)
