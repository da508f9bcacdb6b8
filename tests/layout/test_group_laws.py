"""Laws of RankGroups, on layouts with and without gaps. numpy and plain slices are the oracles."""

import itertools
import math
import operator

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

import hypercomm.layout.groups
import hypercomm.layout.layout
from hypercomm import RankLayout
from hypercomm.errors import LayoutError, RankOutsideError
from hypercomm.layout.groups import hosts_touched
from hypercomm.testing import dim_subsets, layouts

pytestmark = pytest.mark.torch_free


def divisors(number):
    return [size for size in range(1, number + 1) if number % size == 0]


@st.composite
def three_factors(draw, number):
    first = draw(st.sampled_from(divisors(number)))
    second = draw(st.sampled_from(divisors(number // first)))
    return [first, second, number // first // second]


def enumerate_by_numpy(ranks, over):
    """Groups over some axes of a table of ranks; the first of these axes varies fastest."""
    size = math.prod(ranks.shape[axis] for axis in over)
    last = np.moveaxis(ranks, over, range(-len(over), 0))
    return [tuple(group) for group in last.reshape(-1, size, order="F").tolist()]


def slice_groups(groups, size, step):
    """Cut each group into runs of `size * step`, and keep every `step`-th rank of a run."""
    return [
        group[start + phase : start + size * step : step]
        for group in groups
        for start in range(0, len(group), size * step)
        for phase in range(step)
    ]


def first_and_last(group):
    return group[0], group[-1]


def every_other_from_the_end(group):
    return group[::-2]


@st.composite
def numbered(draw, **bounds):
    """Draw a layout, dense or with the gaps that select() leaves, and its ranks by numpy alone.

    Element [i, j, ...] of the table is the rank at these coordinates.
    """
    layout = draw(layouts(max_ranks=128, **bounds))
    ranks = np.arange(layout.size).reshape(layout.shape, order="F") + layout.rank_offset
    # Fixing the last dim would leave no gaps.
    fixed = [dim for dim in layout.dim_names[:-1] if draw(st.booleans())]
    coords = {dim: draw(st.integers(0, layout.size_of(dim) - 1)) for dim in fixed}
    index = tuple(coords.get(name, slice(None)) for name in layout.dim_names)
    return layout.select(**coords), ranks[index]


@st.composite
def grouped(draw, **bounds):
    """Draw groups over some dims, and what numpy makes of them."""
    layout, ranks = draw(numbered(**bounds))
    dims = draw(dim_subsets(layout))
    over = sorted(layout.dim_names.index(dim) for dim in dims)
    return layout.groups(*dims), enumerate_by_numpy(ranks, over)


@st.composite
def derived(draw):
    """Draw groups, derived from others up to three times over, and the same by plain slices."""
    groups, expected = draw(grouped(max_size=12) | grouped(max_dims=1, min_size=8, max_size=36))
    for way in draw(st.lists(st.sampled_from(["chunks", "level", "pick"]), max_size=3)):
        if way == "chunks":
            size = draw(st.sampled_from(divisors(len(expected[0]))))
            groups, expected = groups.chunks(size), slice_groups(expected, size, 1)
        elif way == "level":
            sizes, level = draw(three_factors(len(expected[0]))), draw(st.integers(0, 2))
            groups = groups.levels(sizes)[level]
            expected = slice_groups(expected, sizes[level], math.prod(sizes[:level]))
        else:
            keep = draw(st.sampled_from([first_and_last, every_other_from_the_end]))
            groups = groups.pick(keep)
            expected = [tuple(sorted(set(keep(group)))) for group in expected]
    return groups, expected


def assert_reads_as(groups, expected):
    count = len(expected)
    assert (len(groups), groups.group_size) == (count, len(expected[0]))
    assert list(groups) == expected
    assert groups.to_array().tolist() == [list(group) for group in expected]
    assert [groups[index] for index in range(count)] == expected
    assert [groups[index] for index in range(-count, 0)] == expected
    for beyond in (count, -count - 1):
        with pytest.raises(IndexError):
            groups[beyond]
    for index, group in enumerate(expected):
        for position, rank in enumerate(group):
            assert groups.of(rank) == group
            assert groups.index_of(rank) == index
            assert groups.position_of(rank) == position


# ---- groups of dims -----------------------------------------------------------------------------


# The groups of any dims partition the ranks.
@given(numbered(), st.data())
def test_groups_partition_the_ranks(case, data):
    layout, ranks = case
    members = itertools.chain.from_iterable(layout.groups(*data.draw(dim_subsets(layout))))
    assert sorted(members) == sorted(ranks.ravel().tolist())


# Groups of disjoint dims that meet in a rank meet in no other one.
@given(numbered(min_dims=2), st.data())
def test_groups_of_disjoint_dims_meet_at_most_once(case, data):
    layout, _ = case
    some = data.draw(dim_subsets(layout))
    others = [name for name in layout.dim_names if name not in some]
    assume(others)
    one, other = layout.groups(*some), layout.groups(*data.draw(st.permutations(others)))
    for rank in layout.ranks:
        assert set(one.of(rank)) & set(other.of(rank)) == {rank}


# All dims, in any order, make one group, and it is the whole layout.
@given(numbered(), st.data())
def test_groups_of_all_dims_are_the_layout(case, data):
    layout, ranks = case
    dims = data.draw(st.permutations(layout.dim_names))
    assert list(layout.groups(*dims)) == [tuple(sorted(ranks.ravel().tolist()))]


# Enumerated ranks are numpy's transpose with the dims as the caller named them, the last fastest.
@given(numbered(), st.data())
def test_enumerate_ranks_agrees_with_transpose(case, data):
    layout, ranks = case
    dims = data.draw(dim_subsets(layout))
    over = [layout.dim_names.index(dim) for dim in reversed(dims)]
    expected = enumerate_by_numpy(ranks, over)
    assert [tuple(group) for group in layout.enumerate_ranks(dims).tolist()] == expected


# Dims enumerated in reversed layout order give the groups of these dims.
@given(numbered(), st.data())
def test_reversed_dims_enumerate_the_groups(case, data):
    layout, _ = case
    dims = data.draw(dim_subsets(layout))
    backwards = [name for name in reversed(layout.dim_names) if name in dims]
    assert np.array_equal(layout.enumerate_ranks(backwards), layout.groups(*dims).to_array())


# ---- groups of any kind -------------------------------------------------------------------------


# Every way to read groups, as a sequence or by rank, agrees with numpy and plain slices.
@given(derived())
def test_all_ways_to_read_groups_agree(case):
    assert_reads_as(*case)


# So it does for levels of levels, where indices of groups and positions in them interleave.
@pytest.mark.parametrize("outer", range(3))
@pytest.mark.parametrize("inner", range(2))
def test_levels_of_levels_are_slices_of_slices(outer, inner):
    groups = RankLayout.parse("tp=2,cp=64").groups("cp").levels([4, 4, 4])[outer].levels([2, 2])
    expected = [tuple(range(lane, 128, 2)) for lane in range(2)]
    expected = slice_groups(slice_groups(expected, 4, 4**outer), 2, 2**inner)
    assert_reads_as(groups[inner], expected)


# Groups are taken by an int, as from a list: no slices, which would be groups of another kind.
@given(derived(), st.sampled_from([slice(None), 0.0, None, "tp"]))
def test_groups_are_taken_by_int(case, index):
    groups, _ = case
    with pytest.raises((TypeError, LayoutError)):
        groups[index]


# Ranks in no group are no members, and asking for their group is an error.
@given(derived())
def test_only_members_are_members(case):
    groups, expected = case
    members = set().union(*expected)
    around = range(min(members) - 2, max(members) + 3)
    assert {rank for rank in around if groups.has_member(rank)} == members
    for rank in members.symmetric_difference(around):
        with pytest.raises(RankOutsideError):
            groups.of(rank)


# Members of a group ascend, and no rank is a member of two groups.
@given(derived())
def test_members_ascend_and_groups_are_disjoint(case):
    groups, _ = case
    assert (np.diff(groups.to_array(), axis=1) > 0).all()
    members = list(itertools.chain.from_iterable(groups))
    assert len(members) == len(set(members))


# The hosts that a group touches are the distinct host numbers of its members.
@given(derived(), st.integers(1, 20))
def test_hosts_touched_counts_hosts(case, ranks_per_host):
    groups, expected = case
    counts = [len({rank // ranks_per_host for rank in group}) for group in expected]
    assert hosts_touched(groups, ranks_per_host) == (min(counts), max(counts))


# ---- groups from groups -------------------------------------------------------------------------


# Chunks are consecutive slices of every group.
@given(grouped(), st.data())
def test_chunks_are_slices(case, data):
    groups, expected = case
    size = data.draw(st.sampled_from(divisors(len(expected[0]))))
    chunks = [group[at : at + size] for group in expected for at in range(0, len(group), size)]
    assert list(groups.chunks(size)) == chunks


# With every group as an array of the level sizes, the first fastest, a level is its axis.
@given(grouped(), st.data())
def test_levels_are_the_axes_of_a_reshape(case, data):
    groups, expected = case
    sizes = data.draw(three_factors(len(expected[0])))
    for level, sub_groups in enumerate(groups.levels(sizes)):
        tables = [np.array(group).reshape(sizes, order="F") for group in expected]
        by_numpy = [enumerate_by_numpy(table, [level]) for table in tables]
        assert list(sub_groups) == list(itertools.chain.from_iterable(by_numpy))


# Sixteen ranks in levels of 2, 2 and 4 are the groups that Megatron documents for this case.
def test_levels_of_sixteen_ranks():
    levels = RankLayout.parse("cp=16").groups("cp").levels([2, 2, 4])
    assert [[list(group) for group in level] for level in levels] == [
        [[0, 1], [2, 3], [4, 5], [6, 7], [8, 9], [10, 11], [12, 13], [14, 15]],
        [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]],
        [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]],
    ]


# The first and last stage of every pipeline, named in any order, are picked once and ascend.
@given(st.integers(1, 4), st.integers(1, 5), st.booleans())
def test_pick_keeps_the_ends_of_every_pipeline(tp, pp, backwards):
    pipelines = RankLayout([tp, pp], ["tp", "pp"]).groups("pp")
    ends = pipelines.pick(lambda group: first_and_last(group[::-1] if backwards else group))
    last = [lane + (pp - 1) * tp for lane in range(tp)]
    assert list(ends) == [(lane, last[lane]) if pp > 1 else (lane,) for lane in range(tp)]


# A function that picks no rank, a stranger or unevenly is told so, however its groups are asked.
@pytest.mark.parametrize(
    "ask",
    [list, lambda ends: ends.of(5), lambda ends: ends.position_of(5), lambda e: e.has_member(5)],
    ids=["list", "of", "position_of", "has_member"],
)
@pytest.mark.parametrize(
    "function",
    [lambda _: (), lambda _: (-1,), lambda _: (0.5,), lambda group: group[-1 - group[0] :]],
    ids=["none", "stranger", "no rank", "uneven"],
)
def test_pick_refuses_a_wrong_choice(function, ask):
    with pytest.raises(LayoutError):
        ask(RankLayout.parse("tp=2,pp=3").groups("pp").pick(function))


# numpy's integers index and ask as ints do, and plain ints come back.
@given(grouped(max_size=2), st.sampled_from([np.int16, np.uint16, np.int64]))
def test_numpy_integers_are_ints(case, dtype):
    groups, expected = case
    rank = expected[-1][-1]
    answers = [
        *groups[dtype(len(expected) - 1)],
        *groups.of(dtype(rank)),
        groups.index_of(dtype(rank)),
        groups.position_of(dtype(rank)),
    ]
    assert answers == [*expected[-1], *expected[-1], len(expected) - 1, len(expected[0]) - 1]
    assert {type(answer) for answer in answers} == {int}


# ---- a million ranks ----------------------------------------------------------------------------

SIZES = {"tp": 8, "cp": 4, "ep": 8, "dp": 64, "pp": 64}
STRIDES = {"tp": 1, "cp": 8, "ep": 32, "dp": 256, "pp": 256 * 64}

DENSE = RankLayout([*SIZES.values()], [*SIZES])
ODD = RankLayout([2, *SIZES.values()], ["parity", *SIZES]).select(parity=1)

large = pytest.mark.parametrize("layout", [DENSE, ODD], ids=["dense", "odd ranks only"])
some_dims = pytest.mark.parametrize(
    "dims", [["tp"], ["pp"], ["cp", "dp"], ["pp", "tp"], ["tp", "cp", "ep"]], ids="-".join
)


def group_by_hand(number, dims):
    """The group of the `number`-th rank, as numbers."""
    steps = [range(0, SIZES[dim] * STRIDES[dim], STRIDES[dim]) for dim in dims]
    base = number - sum(number // STRIDES[dim] % SIZES[dim] * STRIDES[dim] for dim in dims)
    return sorted(base + sum(walk) for walk in itertools.product(*steps))


def index_by_hand(number, dims):
    """The index of that group: the coordinates along the other dims, the first fastest."""
    others = [dim for dim in SIZES if dim not in dims]
    strides = itertools.accumulate((SIZES[dim] for dim in others), operator.mul, initial=1)
    coords = (number // STRIDES[dim] % SIZES[dim] for dim in others)
    return sum(coord * stride for coord, stride in zip(coords, strides, strict=False))


@pytest.fixture
def no_enumeration(monkeypatch):
    """Make whatever enumerates ranks raise."""

    def refuse(*_):
        raise AssertionError("ranks were enumerated")

    monkeypatch.setattr(np, "arange", refuse)
    for module in (hypercomm.layout.groups, hypercomm.layout.layout):
        monkeypatch.setattr(module, "lattice", refuse)


# The group of one rank, and what is derived from it, is arithmetic: nothing is enumerated.
@large
@some_dims
@pytest.mark.parametrize("number", [0, 777_777, 2**20 - 1])
@pytest.mark.usefixtures("no_enumeration")
def test_one_rank_is_arithmetic(layout, dims, number):
    numbers = group_by_hand(number, dims)
    group = tuple(numbers) if layout is DENSE else tuple(2 * each + 1 for each in numbers)
    index, position = index_by_hand(number, dims), numbers.index(number)
    rank = group[position]
    groups = layout.groups(*dims)
    assert groups.of(rank) == group
    assert (groups.index_of(rank), groups.position_of(rank)) == (index, position)
    assert groups[index] == group
    assert groups.chunks(2).of(rank) == group[position // 2 * 2 :][:2]
    assert groups.levels([2, len(group) // 2])[1].of(rank) == group[position % 2 :: 2]
    assert groups.pick(first_and_last).of(group[0]) == (group[0], group[-1])


# Nor is anything enumerated for the coordinates of one rank, or its neighbours.
@large
@pytest.mark.usefixtures("no_enumeration")
def test_coordinates_of_one_rank_are_arithmetic(layout):
    rank = layout.rank(tp=7, cp=0, ep=1, dp=63, pp=5)
    assert layout.coords(rank) == {"tp": 7, "cp": 0, "ep": 1, "dp": 63, "pp": 5}
    assert layout.coords(layout.shift(rank, "dp", 1, periodic=True))["dp"] == 0
    assert rank in layout


# Nor to find that a rank is outside, which is then said in a message that a person can read.
@large
@pytest.mark.usefixtures("no_enumeration")
def test_a_rank_outside_costs_no_enumeration(layout):
    everyone = layout.groups(*SIZES)
    for rank in (-1, 2**21 - 2, 2**21):  # the second is even
        assert rank not in layout
        assert not everyone.has_member(rank)
        for ask in (layout.coords, everyone.of):
            with pytest.raises(RankOutsideError) as caught:
                ask(rank)
            assert len(str(caught.value)) < 1000


# The trap above can close: what does enumerate raises in it.
@large
@pytest.mark.usefixtures("no_enumeration")
@pytest.mark.parametrize(
    "enumerate_all",
    [
        lambda layout: list(layout.groups("tp")),
        lambda layout: layout.groups("tp").chunks(2).to_array(),
        lambda layout: layout.enumerate_ranks(["tp"]),
        lambda layout: layout.ranks_where(tp=0),
    ],
    ids=["list", "to_array", "enumerate_ranks", "ranks_where"],
)
def test_the_trap_can_close(layout, enumerate_all):
    with pytest.raises(AssertionError, match="enumerated"):
        enumerate_all(layout)
