"""Test the laws of RankGroups on layouts of every kind, against numpy and slices of lists."""

import itertools
import pickle

import numpy as np
import pytest
from drawn_layouts import groups_with_lists, in_layout_order, layouts_with_tables
from example_counts import examples
from hypothesis import given, settings, strategies as st

import hypercomm.layout.groups
import hypercomm.layout.layout
import hypercomm.layout.numbering
from hypercomm import RankGroups, RankLayout
from hypercomm.errors import LayoutError, RankOutsideError
from hypercomm.testing import dim_subsets
from hypercomm.tools.place.placing import units_of_groups

pytestmark = pytest.mark.torch_free

many = settings(max_examples=examples(600))


# ---- groups of dims -----------------------------------------------------------------------------


# enumerate_ranks returns numpy's transpose with the dims in the given order. With the dims in
# reversed order, its rows are the rows of groups().
@many
@given(layouts_with_tables(), st.data())
def test_enumerate_ranks_agrees_with_transpose(case, data):
    layout, table = case
    dims = data.draw(dim_subsets(layout))
    over = [layout.dim_names.index(dim) for dim in dims]
    others = [axis for axis in range(table.ndim) if axis not in over]
    turned = np.transpose(table, [*others[::-1], *over]).reshape(-1, layout.size_of(*dims))
    assert np.array_equal(layout.enumerate_ranks(dims), turned)
    backwards = [name for name in reversed(layout.dim_names) if name in dims]
    assert np.array_equal(layout.enumerate_ranks(backwards), layout.groups(*dims).to_array())


# ---- groups of any kind -------------------------------------------------------------------------


def check(groups, expected):
    """Compare every way to read groups with lists. Only lists of equal size have an array."""
    count = len(expected)
    sizes = sorted({*map(len, expected)})
    assert len(groups) == count
    assert groups.sizes == tuple(sizes)
    if len(sizes) == 1:
        assert groups.group_size == sizes[0]
        assert np.array_equal(groups.to_array(), expected)
    else:
        for ask in (RankGroups.to_array, lambda one: one.group_size, lambda one: one.chunks(1)):
            with pytest.raises(LayoutError, match="no common size"):
                ask(groups)
        assert f"groups of {sizes[0]}..{sizes[-1]} ranks: {expected[0]}" in repr(groups)
    assert list(groups) == expected
    assert groups.to_lists() == [list(group) for group in expected]
    assert [groups[index] for index in range(-count, count)] == expected * 2
    for beyond in (count, -count - 1):
        with pytest.raises(IndexError):
            groups[beyond]
    assert groups.is_sorted == all(list(group) == sorted(group) for group in expected)
    for index, group in enumerate(expected):
        for position, rank in enumerate(group):
            assert groups.of(rank) == group
            assert (groups.index_of(rank), groups.position_of(rank)) == (index, position)
    members = set().union(*expected)
    around = range(min(members) - 2, max(members) + 3)
    assert {rank for rank in around if groups.has_member(rank)} == members
    for rank in members.symmetric_difference(around):
        with pytest.raises(RankOutsideError):
            groups.of(rank)


# Every way to read groups, by index or by rank, agrees with numpy and slices of lists. A rank that
# is in no group raises RankOutsideError.
@many
@given(groups_with_lists(max_size=12, max_dims=3))
def test_all_ways_to_read_groups_agree(case):
    groups, expected = case
    check(groups, expected)
    with pytest.raises((TypeError, LayoutError)):
        groups[:]


# If the function passed to pick() returns no rank, a rank outside, or groups of unequal size,
# pick() raises LayoutError.
@pytest.mark.parametrize("ask", [list, lambda ends: ends.of(5), lambda ends: ends.has_member(5)])
@pytest.mark.parametrize(
    "function",
    [lambda _: (), lambda _: (-1,), lambda _: (0.5,), lambda group: group[-1 - group[0] :]],
    ids=["none", "outside", "not a rank", "uneven"],
)
def test_pick_rejects_a_wrong_choice(function, ask):
    with pytest.raises(LayoutError, match=r"pick\(\)"):
        ask(RankLayout("tp=2,pp=3").groups("pp").pick(function))


@st.composite
def disjoint_lists(draw):
    """Draw disjoint lists of ranks of several sizes, in any order, with ranks left out."""
    ranks = draw(st.permutations(range(draw(st.integers(1, 20)))))
    cuts = draw(st.lists(st.integers(1, 5), min_size=1, max_size=6))
    bounds = [0, *itertools.accumulate(cuts)]
    found = [tuple(ranks[first:last]) for first, last in itertools.pairwise(bounds)]
    return [group for group in found if group]


# Groups from lists equal these lists.
@many
@given(disjoint_lists())
def test_groups_from_lists(expected):
    groups = RankGroups(expected)
    check(groups, expected)
    for twin in (
        RankGroups(groups),
        RankGroups(groups.to_lists()),
        pickle.loads(pickle.dumps(groups)),
    ):
        assert twin == groups
        assert hash(twin) == hash(groups)
        assert twin.digest() == groups.digest()
        assert twin.locate(expected[0][0]) == (0, 0)


# Groups from different lists are not equal and have different digests, even if the lists have the
# same concatenation.
@many
@given(disjoint_lists(), disjoint_lists())
def test_groups_from_lists_compare_by_value(one, other):
    left, right = RankGroups(one), RankGroups(other)
    assert (left == right) == (left.digest() == right.digest()) == (one == other)


# Groups from lists equal groups over dims with the same members.
@many
@given(groups_with_lists(max_size=6, max_dims=3))
def test_groups_from_lists_equal_groups_over_dims(case):
    groups, expected = case
    assert RankGroups(expected) == groups
    assert RankGroups(np.array(expected)).digest() == groups.digest()


# units_of_groups counts, for each group, the distinct units of its members.
@many
@given(groups_with_lists(), st.integers(1, 20))
def test_units_of_groups_counts_distinct_units(case, ranks_per_host):
    groups, expected = case
    counts = [len({rank // ranks_per_host for rank in group}) for group in expected]
    assert units_of_groups(groups.to_array() // ranks_per_host).tolist() == counts


# Groups are equal if and only if they have the same ranks in the same order. It does not matter
# whether they were made from other dims, from a list with another order of dims, or without a list.
@many
@given(
    layouts_with_tables(max_dims=3, max_size=3),
    layouts_with_tables(max_dims=2, max_size=3),
    st.data(),
)
def test_groups_compare_by_value(one, other, data):
    layout, table = one
    dims = data.draw(dim_subsets(layout))
    turned = data.draw(st.permutations(range(table.ndim)))
    twin = RankLayout(
        [layout.shape[axis] for axis in turned],
        [layout.dim_names[axis] for axis in turned],
        ranks=in_layout_order(table.transpose(turned)),
    )
    candidates = [
        layout.groups(*dims),
        twin.groups(*dims),
        twin.groups(*dims).pick(lambda group: group),
        other[0].groups(*data.draw(dim_subsets(other[0]))),
        RankLayout([layout.size], ["all"]).groups("all"),
        RankLayout([layout.size], ["all"], ranks=in_layout_order(table)).groups("all"),
    ]
    for left, right in itertools.combinations(candidates, 2):
        assert (left == right) == (list(left) == list(right))
        assert left != right or hash(left) == hash(right)


# ---- a million ranks ----------------------------------------------------------------------------

SIZES = {"tp": 8, "cp": 4, "ep": 8, "dp": 64, "pp": 64}
DENSE = RankLayout([*SIZES.values()], [*SIZES])
ODD = RankLayout([2, *SIZES.values()], ["parity", *SIZES]).select(parity=1)
# the dims from the smallest stride to the largest: pp, cp, tp, dp, ep
TURNED = RankLayout([*SIZES.values()], [*SIZES], strides=[256, 64, 2**17, 2048, 1])

large = pytest.mark.parametrize(
    "layout", [DENSE, ODD, TURNED], ids=["dense", "odd ranks only", "strides in another order"]
)


@pytest.fixture
def no_enumeration(monkeypatch):
    """Make functions that enumerate ranks raise."""

    def fail(*_):
        raise AssertionError("ranks were enumerated")

    monkeypatch.setattr(np, "arange", fail)
    for module in (hypercomm.layout.groups, hypercomm.layout.layout, hypercomm.layout.numbering):
        monkeypatch.setattr(module, "lattice", fail)


# Queries for the groups, derived groups, coordinates and neighbours of one rank do not enumerate
# ranks. For a rank outside, no ranks are enumerated either, and the error message is short.
@large
@pytest.mark.parametrize("dims", [["tp"], ["cp", "dp"], ["tp", "pp"]], ids="-".join)
@pytest.mark.usefixtures("no_enumeration")
def test_queries_of_one_rank_enumerate_nothing(layout, dims):
    coords = {"tp": 7, "cp": 0, "ep": 1, "dp": 63, "pp": 5}
    rank = layout.rank(**coords)
    groups = layout.groups(*dims)
    assert layout.coords(rank) == coords
    assert layout.coords(layout.shift(rank, "dp", 1, periodic=True)) == {**coords, "dp": 0}
    group = groups.of(rank)
    index, position = groups.locate(rank)
    assert groups[index] == group
    assert group[position] == rank
    walks = itertools.product(*(range(SIZES[dim]) for dim in reversed(dims)))
    places = [{**coords, **dict(zip(reversed(dims), walk, strict=True))} for walk in walks]
    assert [layout.coords(member) for member in group] == places
    assert groups.chunks(2).of(rank) == group[position // 2 * 2 :][:2]
    assert groups.levels([2, len(group) // 2])[1].of(rank) == group[position % 2 :: 2]
    assert groups.pick(lambda each: (each[0], each[-1])).of(group[0]) == (group[0], group[-1])
    parts = {dim: coords[dim] for dim in SIZES if dim != "dp"} | {"inner": 1, "outer": 31}
    assert layout.split("dp", inner=2, outer=-1).coords(rank) == parts
    assert layout.select(pp=5).coords(rank) == {dim: coords[dim] for dim in SIZES if dim != "pp"}
    for outside in (-1, 2**21 - 2, 2**21):  # 2**21 - 2 is in a gap of ODD
        assert outside not in layout
        assert not groups.has_member(outside)
        for ask in (layout.coords, groups.of):
            with pytest.raises(RankOutsideError) as caught:
                ask(outside)
            assert len(str(caught.value)) < 1000
    with pytest.raises(AssertionError, match="enumerated"):  # shows that the fixture works
        layout.ranks_where(tp=0)


# After the list of ranks has been read once, queries of one rank enumerate nothing.
def test_queries_of_a_listed_rank_enumerate_nothing(request):
    layout = RankLayout([8, 64], ["tp", "dp"], ranks=range(511, -1, -1))
    groups = layout.groups("dp")
    request.getfixturevalue("no_enumeration")
    assert layout.coords(500) == {"tp": 3, "dp": 1}
    assert layout.shift(500, "dp", 1) == 492
    assert groups.of(500) == tuple(range(508, -1, -8))
    assert 512 not in layout
