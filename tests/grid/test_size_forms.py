"""Test sizes of grids and views in every accepted form."""

import pytest

from hypercomm import HyperCommGrid, RankLayout


# An unspecified size fills the world from the offset on. If all sizes are specified, ranks may be
# left out.
def test_sizes_with_an_offset():
    assert HyperCommGrid("tp=2,dp=-1", rank_offset=4, world_size=12).layout.ranks == range(4, 12)
    assert HyperCommGrid("tp=2", rank_offset=4, world_size=12).layout.ranks == range(4, 6)
    assert HyperCommGrid("tp=2,dp", rank_offset=6, world_size=12, name="a").shape == [2, 3]
    grid = HyperCommGrid(tp=2, dp=-1, world_size=8, backend="gloo")
    assert HyperCommGrid(grid, world_size=12).layout == grid.layout == RankLayout("tp=2,dp=4")


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
