"""Compare the difference between two layouts with sets of tuples, built by visiting all ranks."""

import itertools
import re

import numpy as np
import pytest
from drawn_layouts import in_layout_order, layouts_with_tables
from hypothesis import given, strategies as st

from hypercomm import RankLayout
from hypercomm.errors import LayoutError
from hypercomm.layout.difference import MOST_DIMS, Lost, difference
from hypercomm.testing import layouts

pytestmark = pytest.mark.torch_free


def dense_case(layout):
    """Return a dense layout and its table of ranks, computed by numpy."""
    return layout, np.arange(layout.size).reshape(layout.shape, order="F") + layout.rank_offset


def coordinates_of(case):
    """Map each rank to its coordinates, in the layout's order."""
    layout, table = case
    at = np.stack(np.unravel_index(np.arange(table.size), table.shape, order="F"), axis=1).tolist()
    coords = [dict(zip(layout.dim_names, index, strict=True)) for index in at]
    return dict(zip(in_layout_order(table), coords, strict=True))


def groups_by_dims(case):
    """Map sets of dims to their groups. A set is omitted if a smaller set has the same groups."""
    layout = case[0]
    coords = coordinates_of(case)
    found = {}
    for count in range(1, len(layout.dim_names) + 1):
        for dims in itertools.combinations(layout.dim_names, count):
            groups = {}
            for rank, at in coords.items():
                others = tuple(at[dim] for dim in layout.dim_names if dim not in dims)
                groups.setdefault(others, []).append(rank)
            sets = frozenset(tuple(group) for group in groups.values())
            if sets not in found.values() and max(map(len, sets)) > 1:
                found[dims] = sets
    return found


@st.composite
def neighbours(draw):
    """Draw two layouts with another dim order, offset or size, which probably share groups."""
    before = draw(layouts(max_ranks=64, max_offset=4))
    names = draw(st.permutations(before.dim_names))
    shape = [before.size_of(dim) for dim in names]
    shape[-1] = draw(st.sampled_from([shape[-1], 1, 2, 4]))
    names[0] = draw(st.sampled_from([names[0], names[0], "new"]))
    offset = before.rank_offset + draw(st.sampled_from([0, 0, 1, 2, 4]))
    return dense_case(before), dense_case(RankLayout(shape, names, offset))


@st.composite
def listed_layouts(draw):
    """Draw layouts over a list of 8 ranks, sorted or with a few ranks swapped."""
    ranks = list(range(8))
    for _ in range(draw(st.integers(0, 3))):
        one, other = draw(st.tuples(st.integers(0, 7), st.integers(0, 7)))
        ranks[one], ranks[other] = ranks[other], ranks[one]
    sizes = draw(st.permutations(draw(st.sampled_from([(8,), (2, 4), (2, 2, 2)]))))
    names = draw(st.permutations(["tp", "cp", "dp"]))[: len(sizes)]
    return RankLayout(sizes, names, ranks=ranks), np.reshape(ranks, sizes, order="F")


gappy_layouts = layouts_with_tables(kinds=("dense", "gaps"), max_offset=4)
PAIRS = st.one_of(
    neighbours(),
    st.tuples(gappy_layouts, gappy_layouts),
    st.tuples(listed_layouts(), listed_layouts()),
)


# Every combination of dims appears in a change. The combination is paired with each combination of
# the other layout that has some of the same groups. The number and the size of the groups, and the
# number of groups that both layouts have, match sets of tuples. So do the totals. A rank moves if
# its index along some dim changes. Along a dim that a layout lacks, the index is 0.
@given(PAIRS)
def test_changes_match_sets_of_groups(pair):
    before, after = map(groups_by_dims, pair)
    changes = difference(pair[0][0], pair[1][0])
    named = [change.before for change in changes.changes if change.before]
    assert list(dict.fromkeys(named)) == list(before)
    assert {change.after for change in changes.changes if change.after} == set(after)
    pairs = [(change.before, change.after) for change in changes.changes if change.kept]
    shared = [pair for pair in itertools.product(before, after) if before[pair[0]] & after[pair[1]]]
    assert sorted(pairs) == sorted(shared)
    alone = [{*side} - {pair[at] for pair in shared} for at, side in enumerate((before, after))]
    assert len(changes.changes) == len(shared) + sum(map(len, alone))
    for change in changes.changes:
        ours = before.get(change.before, frozenset())
        theirs = after.get(change.after, frozenset())
        assert (change.groups_before, change.groups_after) == (len(ours), len(theirs))
        assert {len(group) for group in ours | theirs} == {change.size}
        assert change.kept == len(ours & theirs)
        known = {"kept": ours == theirs, "partly": bool(ours & theirs) and ours != theirs}
        known |= {"gone": not change.after, "new": not change.before}
        assert [result for result, is_so in known.items() if is_so] == [change.result]
    before, after = (set().union(*groups.values()) for groups in (before, after))
    assert (changes.groups_before, changes.groups_after) == (len(before), len(after))
    assert changes.groups_kept == len(before & after)
    assert (changes.groups_gone, changes.groups_new) == (len(before - after), len(after - before))
    here, there = map(coordinates_of, pair)
    dims = {*pair[0][0].dim_names, *pair[1][0].dim_names}
    shared = here.keys() & there.keys()
    assert changes.ranks_moved == sum(
        any(here[rank].get(dim, 0) != there[rank].get(dim, 0) for dim in dims) for rank in shared
    )
    assert changes.ranks_shared == len(shared)
    assert changes.ranks_gone == len(here.keys() - shared)
    assert changes.ranks_new == len(there.keys() - shared)


def test_str_prints_a_table():
    before, after = RankLayout("tp=2,cp=1,dp=3"), RankLayout("tp=2,dp=3", rank_offset=2)
    *table, _ = str(difference(before, after)).splitlines()
    assert [re.split("  +", line) for line in table] == [
        ["before", "after", "groups x size", "result"],
        ["tp", "tp", "3 x 2", "partly: 2 of 3 kept"],
        ["dp", "-", "2 x 3", "gone"],
        ["tp+dp", "-", "1 x 6", "gone"],
        ["-", "dp", "2 x 3", "new"],
        ["-", "tp+dp", "1 x 6", "new"],
    ]


BINARY = RankLayout([2] * (MOST_DIMS + 1), [f"d{index}" for index in range(MOST_DIMS + 1)])


# Dims of size 1 do not count towards MOST_DIMS, the number of dims that can be compared.
@pytest.mark.full
def test_dims_of_size_1_do_not_count_towards_the_limit():
    sizes = [2, 1] * MOST_DIMS
    layout = RankLayout(sizes, [f"d{index}" for index in range(len(sizes))])
    changes = difference(layout, layout)
    assert [change.result for change in changes.changes] == ["kept"] * (2**MOST_DIMS - 1)
    assert changes.groups_kept == 3**MOST_DIMS - 2**MOST_DIMS


# ---- lost ranks ---------------------------------------------------------------------------------


@st.composite
def layouts_and_survivors(draw):
    layout = draw(layouts(max_size=48))
    left = draw(st.sets(st.sampled_from(list(layout.ranks)), min_size=1))
    order = draw(st.permutations(sorted(left)))
    return layout, RankLayout([len(order)], ["rest"], ranks=order), left


# For any dims, the lost shards are the coordinates along these dims that no surviving rank has.
@given(layouts_and_survivors(), st.data())
def test_lost_shards_match_a_walk_over_ranks(case, data):
    layout, after, left = case
    lost = difference(layout, after).lost
    assert lost == Lost(layout, after)
    assert lost.ranks == tuple(sorted({*layout.ranks} - left))
    names = layout.dim_names
    for count in range(1, len(names) + 1):
        for dims in itertools.combinations(names, count):
            held = {tuple(layout.coords(rank)[dim] for dim in dims) for rank in left}
            every = itertools.product(*(range(layout.size_of(dim)) for dim in reversed(dims)))
            gone = [dict(zip(dims, at[::-1], strict=True)) for at in every if at[::-1] not in held]
            assert list(lost.shards(*data.draw(st.permutations(dims)))) == gone


# The summary names the lost ranks, and identifies the lost shards by as few dims as possible.
def test_lost_summary():
    layout = RankLayout("tp=2,dp=4")
    lost = Lost(layout, RankLayout([7], ["dp"], ranks=[0, 1, 2, 3, 4, 6, 7]))
    assert lost.summary == "5 (no other rank has tp=1,dp=2)"
    assert Lost(layout, layout).summary == "none"
    assert (
        Lost(BINARY, RankLayout("dp=4")).summary
        == "4..8191 (no other rank has d2=1; d3=1; d4=1; d5=1; ...)"
    )
    for dims in (["pp"], []):
        with pytest.raises(LayoutError):
            lost.shards(*dims)


# A million ranks that lose a host of eight are compared without listing all shards.
@pytest.mark.full
def test_lost_shards_of_a_million_ranks():
    layout = RankLayout("tp=8,cp=4,dp=1024,pp=32")
    left = [rank for rank in range(layout.size) if rank // 8 != 5]
    lost = Lost(layout, RankLayout([len(left)], ["rank"], ranks=left))
    assert lost.summary == "40..47 (no other rank has cp=1,dp=1,pp=0)"
