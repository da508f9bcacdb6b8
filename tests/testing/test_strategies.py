"""The published strategies: they keep their bounds, reach them, refuse impossible ones, shrink."""

import hypothesis
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument, NoSuchExample

from hypercomm import RankLayout
from hypercomm.errors import LayoutError
from hypercomm.testing import dim_subsets, layouts, orders, ranks_of

pytestmark = pytest.mark.torch_free

LAYOUT = RankLayout.parse("tp=2,cp=3,dp=4", rank_offset=5)
GAPS = LAYOUT.select(cp=1)


def find(strategy, condition=lambda _: True):
    """Shrink without the database, which files examples under the text of the condition."""
    unfiled = settings(max_examples=2000, database=None)
    return hypothesis.find(strategy, condition, settings=unfiled)


@st.composite
def bounds(draw):
    """Draw bounds that some layout satisfies."""
    min_dims, min_size = draw(st.integers(1, 4)), draw(st.integers(1, 3))
    max_dims = draw(st.integers(min_dims, 5))
    return {
        "min_dims": min_dims,
        "max_dims": max_dims,
        "min_size": min_size,
        "max_size": draw(st.integers(min_size, 5)),
        "max_ranks": draw(st.integers(min_size**min_dims, 200)),
        "max_offset": draw(st.integers(0, 5)),
        "dim_names": draw(st.permutations("abcdefg"))[: draw(st.integers(max_dims, 7))],
    }


# A drawn layout keeps all the bounds that were asked for.
@given(bounds(), st.data())
def test_layouts_keep_their_bounds(asked, data):
    layout = data.draw(layouts(**asked))
    assert asked["min_dims"] <= len(layout.dim_names) <= asked["max_dims"]
    assert set(layout.dim_names) <= set(asked["dim_names"])
    assert asked["min_size"] <= min(layout.shape)
    assert max(layout.shape) <= asked["max_size"]
    assert layout.size <= asked["max_ranks"]
    assert 0 <= layout.rank_offset <= asked["max_offset"]


# Without bounds, layouts have one to five of Megatron's dims, of 1 to 4 ranks, at most 512 in all.
@given(layouts())
def test_layouts_keep_the_default_bounds(layout):
    assert set(layout.dim_names) <= {"tp", "cp", "ep", "dp", "pp"}
    assert max(layout.shape) <= 4
    assert layout.size <= 512
    assert layout.rank_offset <= 16


# Each bound can be reached, so none is tighter than it says.
@pytest.mark.long
@pytest.mark.parametrize(
    ("asked", "reached"),
    [
        ({}, lambda layout: len(layout.dim_names) == 5),
        ({}, lambda layout: layout.dim_names == ("pp", "tp")),
        ({}, lambda layout: layout.rank_offset == 16),
        ({"max_dims": 2}, lambda layout: layout.shape == (4, 4)),
        ({"min_dims": 2}, lambda layout: layout.shape == (1, 1)),
        ({"min_size": 2, "max_ranks": 16}, lambda layout: layout.shape == (2, 2, 2, 2)),
        ({"max_dims": 1, "max_size": 9, "max_ranks": 7}, lambda layout: layout.size == 7),
        ({"max_dims": 2, "max_size": 6, "max_ranks": 12}, lambda layout: layout.shape == (2, 6)),
    ],
)
def test_layouts_reach_their_bounds(asked, reached):
    assert reached(find(layouts(**asked), reached))


# Layouts shrink towards few dims, small sizes, the first names and offset 0.
@pytest.mark.parametrize(
    ("asked", "condition", "smallest"),
    [
        ({}, lambda _: True, RankLayout([1], ["tp"])),
        ({}, lambda layout: layout.size > 2, RankLayout([3], ["tp"])),
        ({}, lambda layout: layout.size > 4, RankLayout([2, 3], ["tp", "cp"])),
        ({}, lambda layout: layout.rank_offset > 2, RankLayout([1], ["tp"], 3)),
        ({"min_dims": 2, "min_size": 2}, lambda _: True, RankLayout([2, 2], ["tp", "cp"])),
        ({"dim_names": ["x", "y"]}, lambda _: True, RankLayout([1], ["x"])),
    ],
)
def test_layouts_shrink_to_the_smallest(asked, condition, smallest):
    assert find(layouts(**asked), condition) == smallest


# Bounds that no layout satisfies are refused, in hypothesis's own way.
@pytest.mark.parametrize(
    "asked",
    [
        {"min_dims": 0},
        {"min_dims": 3, "max_dims": 2},
        {"min_dims": 6},
        {"max_dims": 0},
        {"max_dims": 6},
        {"min_dims": 2, "dim_names": ["tp"]},
        {"dim_names": []},
        {"min_dims": 2, "dim_names": ["tp", "tp"]},
        {"min_size": 0},
        {"min_size": 3, "max_size": 2},
        {"max_size": 0},
        {"max_ranks": 0},
        {"min_dims": 2, "min_size": 3, "max_ranks": 8},
        {"max_offset": -1},
        {"dims_required": ["tp", "tp"]},
    ],
    ids=str,
)
def test_layouts_refuse_impossible_bounds(asked):
    with pytest.raises(InvalidArgument):
        find(layouts(**asked))


# A word is not a flag.
def test_layouts_refuse_words():
    with pytest.raises(LayoutError, match="listed must be True or False, got 'no'"):
        find(layouts(listed="no"))


# Subsets of dims keep their bounds, and name each dim once.
@given(layouts(), st.data())
def test_dim_subsets_keep_their_bounds(layout, data):
    least = data.draw(st.integers(0, len(layout.dim_names)))
    most = data.draw(st.integers(least, len(layout.dim_names)))
    dims = data.draw(dim_subsets(layout, min_dims=least, max_dims=most))
    assert isinstance(dims, tuple)
    assert least <= len(dims) <= most
    assert len(set(dims)) == len(dims)
    assert set(dims) <= set(layout.dim_names)


# By default a subset has one dim at least and all at most, in any order.
@pytest.mark.parametrize("dims", [("tp",), ("dp", "tp"), ("cp", "dp", "tp"), ("tp", "cp", "dp")])
def test_dim_subsets_come_in_any_order(dims):
    assert find(dim_subsets(LAYOUT), lambda drawn: drawn == dims) == dims


# Subsets shrink towards the first dim alone.
def test_dim_subsets_shrink_to_the_first_dim():
    assert find(dim_subsets(LAYOUT)) == ("tp",)
    assert find(dim_subsets(LAYOUT, min_dims=2)) == ("tp", "cp")
    assert find(dim_subsets(LAYOUT.select(cp=0)), lambda dims: "dp" in dims) == ("dp",)


# More dims than there are, or bounds the wrong way round, are refused.
@pytest.mark.parametrize(
    "asked",
    [{"min_dims": 4}, {"min_dims": 2, "max_dims": 1}, {"min_dims": -1}, {"max_dims": 0}],
    ids=str,
)
def test_dim_subsets_refuse_impossible_bounds(asked):
    with pytest.raises(InvalidArgument):
        find(dim_subsets(LAYOUT, **asked))


# Every rank of a layout can be drawn, also where it has gaps, and no other.
@pytest.mark.parametrize("layout", [LAYOUT, GAPS], ids=["dense", "gaps"])
def test_ranks_of_draws_the_ranks(layout):
    for rank in layout.ranks:
        assert find(ranks_of(layout), lambda drawn, rank=rank: drawn == rank) == rank
    with pytest.raises(NoSuchExample):
        find(ranks_of(layout), lambda drawn: drawn not in layout.ranks)


# Ranks shrink towards the smallest.
@pytest.mark.parametrize(("layout", "smallest", "above_9"), [(LAYOUT, 5, 10), (GAPS, 7, 13)])
def test_ranks_of_shrinks_to_the_smallest(layout, smallest, above_9):
    assert find(ranks_of(layout)) == smallest
    assert find(ranks_of(layout), lambda rank: rank > 9) == above_9


# An order names every dim once, and a layout can be made of it.
@given(
    st.lists(st.sampled_from(["tp", "cp", "ep", "dp", "pp"]), min_size=1, unique=True), st.data()
)
def test_orders_name_every_dim_once(names, data):
    order = data.draw(orders(names))
    assert sorted(order.split("-")) == sorted(names)
    assert RankLayout.from_order(order).dim_names == tuple(order.split("-"))


# Orders shrink towards the order given; by default that is Megatron's.
def test_orders_shrink_to_the_order_given():
    assert find(orders()) == "tp-cp-ep-dp-pp"
    assert find(orders(["pp", "tp"])) == "pp-tp"


# What hypothesis prints of a layout can be pasted back.
@given(layouts(listed=True, max_ranks=64) | layouts())
def test_layouts_print_as_python(layout):
    text = hypothesis.vendor.pretty.pretty(layout)
    assert "_listing" not in text
    assert eval(text) == layout
