"""Layouts over a list of ranks. The oracle is numpy: the list reshaped, the first dim fastest."""

import inspect
import itertools
import json
import math
import pickle

import attrs
import bound_world
import hypothesis
import numpy as np
import pytest
import torch.distributed as dist
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from test_group_laws import slice_groups
from test_layout_laws import index_at, some_coords

import hypercomm.layout.groups
import hypercomm.layout.layout
from hypercomm import HyperCommGrid, RankLayout
from hypercomm.errors import CreationError, LayoutError, RankOutsideError
from hypercomm.layout.groups import hosts_touched
from hypercomm.process_groups import torch_internals as c10d
from hypercomm.process_groups.strategies import alternatives, choose
from hypercomm.testing import dim_subsets, fake_world, layouts, ranks_of

NAMES = ("tp", "cp", "dp", "pp")
SOME = [3, 1, 7, 5]  # is no lattice, with gaps


def place(shape, ranks):
    """Arrange a list by numpy alone: element [i, j, ...] is the rank at these coordinates."""
    return np.array(ranks).reshape(shape[::-1]).transpose()


@st.composite
def lists(draw, size):
    """Draw distinct ranks: shuffled, whole hosts shuffled or left out, or steps in other orders."""
    way = draw(st.sampled_from(["shuffled", "hosts", "left out", "other order"]))
    if way == "shuffled":
        return draw(st.permutations(range(size + draw(st.integers(0, 5)))))[:size]
    if way == "other order":
        outer = draw(st.sampled_from([n for n in range(1, size + 1) if size % n == 0]))
        return (np.arange(size).reshape(outer, -1).T.ravel() * draw(st.integers(1, 3))).tolist()
    per_host = draw(st.sampled_from([1, 2, 4]))
    hosts = draw(st.permutations(range(math.ceil(size / per_host) + draw(st.integers(0, 2)))))
    hosts = hosts[: math.ceil(size / per_host)]
    hosts = sorted(hosts) if way == "left out" else hosts
    return [host * per_host + local for host in hosts for local in range(per_host)][:size]


@st.composite
def listed(draw, max_dims=4, max_size=4):
    """Draw a layout over a list, and its ranks by numpy alone."""
    shape = draw(st.lists(st.integers(1, max_size), min_size=1, max_size=max_dims))
    ranks = draw(lists(math.prod(shape)))
    names = draw(st.permutations(NAMES))[: len(shape)]
    return RankLayout(shape, names, ranks=ranks), place(shape, ranks)


def read(layout):
    """Ask a layout for the same table."""
    cells = (dict(zip(layout.dim_names, index, strict=True)) for index in np.ndindex(layout.shape))
    return np.array([layout.rank(**coords) for coords in cells]).reshape(layout.shape)


def in_order(table):
    """Read a table, or a part of it, in the order of the list."""
    return np.ravel(table, order="F").tolist()


def group_by_numpy(table, dims):
    """Groups along some axes, in the layout's order: other axes first, each first one fastest."""
    others = [axis for axis in range(table.ndim) if axis not in dims]
    turned = np.transpose(table, [*others[::-1], *sorted(dims)[::-1]])
    size = math.prod(table.shape[axis] for axis in dims)
    return [tuple(group) for group in turned.reshape(-1, size).tolist()]


def enumerate_by_numpy(table, dims):
    """Groups with members in the order of these axes, the last one fastest."""
    others = [axis for axis in range(table.ndim) if axis not in dims]
    size = math.prod(table.shape[axis] for axis in dims)
    return np.transpose(table, [*others[::-1], *dims]).reshape(-1, size).tolist()


def divisors(number):
    return [size for size in range(1, number + 1) if number % size == 0]


@st.composite
def grouped(draw):
    """Draw groups of a listed layout, derived from others or not, and the same by plain slices."""
    layout, table = draw(listed())
    dims = draw(dim_subsets(layout))
    groups = layout.groups(*dims)
    expected = group_by_numpy(table, [layout.dim_names.index(dim) for dim in dims])
    for way in draw(st.lists(st.sampled_from(["chunks", "level", "pick"]), max_size=2)):
        whole = len(expected[0])
        size = draw(st.sampled_from(divisors(whole)))
        if way == "chunks":
            groups, expected = groups.chunks(size), slice_groups(expected, size, 1)
        elif way == "level":
            level = draw(st.integers(0, 1))
            sizes = [size, whole // size]
            groups = groups.levels(sizes)[level]
            expected = slice_groups(expected, sizes[level], size if level else 1)
        else:
            groups = groups.pick(lambda group: {group[-1], group[0]})
            expected = [tuple(dict.fromkeys((group[0], group[-1]))) for group in expected]
    return groups, expected


# ---- one rank -----------------------------------------------------------------------------------


# Position p of the dense numbering has rank ranks[p]; coordinates and ranks are inverse.
@settings(max_examples=examples(400))
@given(listed())
def test_coords_and_rank_are_inverse(case):
    layout, table = case
    assert np.array_equal(read(layout), table)
    for index, rank in np.ndenumerate(table):
        assert layout.coords(int(rank)) == dict(zip(layout.dim_names, index, strict=True))


# A layout holds the ranks of its list, in that order, and no others.
@settings(max_examples=examples(400))
@given(listed())
def test_a_layout_holds_its_ranks_and_no_others(case):
    layout, table = case
    inside = in_order(table)
    assert list(layout.ranks) == inside
    assert (layout.rank_offset, layout.last_rank) == (min(inside), max(inside))
    assert layout.size == len(inside)
    for rank in range(min(inside) - 2, max(inside) + 3):
        assert (rank in layout) == (rank in inside)
        if rank not in inside:
            with pytest.raises(RankOutsideError):
                layout.coords(rank)


# A shift rolls the table along one axis, or ends at its edges.
@settings(max_examples=examples(400))
@given(listed(), st.integers(-9, 9), st.data())
def test_shift_walks_the_table(case, by, data):
    layout, table = case
    rank = data.draw(ranks_of(layout))
    (dim,) = data.draw(dim_subsets(layout, max_dims=1))
    axis = layout.dim_names.index(dim)
    here = np.argwhere(table == rank)[0]
    rolled = np.roll(table, -by, axis=axis)
    assert layout.shift(rank, dim, by, periodic=True) == rolled[tuple(here)]
    here[axis] += by
    inside = 0 <= here[axis] < table.shape[axis]
    assert layout.shift(rank, dim, by) == (table[tuple(here)] if inside else None)


# ---- several ranks ------------------------------------------------------------------------------


# The ranks where some coordinates are given are the indexed table's, in the order of the list.
@settings(max_examples=examples(400))
@given(listed(), st.data())
def test_ranks_where_and_select_agree_with_indexing(case, data):
    layout, table = case
    coords = data.draw(some_coords(layout, layout.dim_names))
    part = table[index_at(layout, coords)]
    assert list(layout.ranks_where(**coords)) == in_order(part)
    if len(coords) < len(layout.dim_names):
        selected = layout.select(**coords)
        assert selected.dim_names == tuple(name for name in layout.dim_names if name not in coords)
        assert np.array_equal(read(selected), part)


# Every way to read groups agrees with numpy and plain slices: members keep the layout's order.
@settings(max_examples=examples(600))
@given(grouped())
def test_all_ways_to_read_groups_agree(case):
    groups, expected = case
    assert (len(groups), groups.group_size) == (len(expected), len(expected[0]))
    assert list(groups) == expected
    assert groups.to_array().tolist() == [list(group) for group in expected]
    assert [groups[index] for index in range(len(expected))] == expected
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
    repr(groups)


# The groups of any dims partition the ranks.
@settings(max_examples=examples(300))
@given(listed(), st.data())
def test_groups_partition_the_ranks(case, data):
    layout, table = case
    members = itertools.chain.from_iterable(layout.groups(*data.draw(dim_subsets(layout))))
    assert sorted(members) == sorted(table.ravel().tolist())


# Enumerated ranks are numpy's transpose with the dims as named; reversed ones give the groups.
@settings(max_examples=examples(400))
@given(listed(), st.data())
def test_enumerate_ranks_agrees_with_transpose(case, data):
    layout, table = case
    dims = data.draw(dim_subsets(layout))
    over = [layout.dim_names.index(dim) for dim in dims]
    assert layout.enumerate_ranks(dims).tolist() == enumerate_by_numpy(table, over)
    backwards = [name for name in reversed(layout.dim_names) if name in dims]
    assert np.array_equal(layout.enumerate_ranks(backwards), layout.groups(*dims).to_array())


# The hosts that a group touches are the distinct host numbers of its members, in any order.
@settings(max_examples=examples(300))
@given(grouped(), st.integers(1, 9))
def test_hosts_touched_counts_hosts(case, ranks_per_host):
    groups, expected = case
    counts = [len({rank // ranks_per_host for rank in group}) for group in expected]
    assert hosts_touched(groups, ranks_per_host) == (min(counts), max(counts))


# ---- other layouts from one ---------------------------------------------------------------------


# Splitting a dim reshapes the table.
@settings(max_examples=examples(300))
@given(listed(max_dims=3, max_size=12), st.data())
def test_split_moves_no_rank(case, data):
    layout, table = case
    (dim,) = data.draw(dim_subsets(layout, max_dims=1))
    axis, whole = layout.dim_names.index(dim), layout.size_of(dim)
    inner = data.draw(st.sampled_from(divisors(whole)))
    split = layout.split(dim, inner=inner, outer=-1)
    shape = (*table.shape[:axis], inner, whole // inner, *table.shape[axis + 1 :])
    assert np.array_equal(read(split), table.reshape(shape, order="F"))


# Merging neighbours reshapes the table, and splitting them again undoes it; also where the list
# turned out to be steps with gaps, which no stride joins.
@settings(max_examples=examples(300))
@given(listed(), st.data())
def test_merge_moves_no_rank_and_split_undoes_it(case, data):
    layout, table = case
    first = data.draw(st.integers(0, len(layout.shape) - 1))
    last = data.draw(st.integers(first + 1, len(layout.shape)))
    dims, sizes = layout.dim_names[first:last], layout.shape[first:last]
    shape = (*table.shape[:first], math.prod(sizes), *table.shape[last:])
    merged = layout.merge(data.draw(st.permutations(dims)), "merged")
    assert np.array_equal(read(merged), table.reshape(shape, order="F"))
    assert merged.split("merged", **dict(zip(dims, sizes, strict=True))) == layout


# Renaming moves no rank; reordering reads the same list over the dims in another order.
@settings(max_examples=examples(300))
@given(listed(), st.data())
def test_rename_and_reorder(case, data):
    layout, table = case
    new = {dim: f"new_{dim}" for dim in data.draw(dim_subsets(layout))}
    renamed = layout.rename(**new)
    assert renamed.dim_names == tuple(new.get(dim, dim) for dim in layout.dim_names)
    assert np.array_equal(read(renamed), table)
    dims = data.draw(st.permutations(layout.dim_names))
    reordered = layout.reorder(*dims)
    shape = [layout.size_of(dim) for dim in dims]
    assert reordered.dim_names == tuple(dims)
    assert np.array_equal(read(reordered), place(shape, in_order(table)))


# A layout with gaps that a selection made is merged and reordered as any list is: to numpy it is
# one. What splits and merges again is as before.
@settings(max_examples=examples(300))
@given(layouts(max_ranks=128), st.data())
def test_gaps_are_merged_and_reordered(whole, data):
    kept = data.draw(dim_subsets(whole))
    layout = whole.select(**dict.fromkeys(set(whole.dim_names) - set(kept), 0))
    table = read(layout)
    dims = data.draw(st.permutations(layout.dim_names))
    reordered = layout.reorder(*dims)
    shape = [layout.size_of(dim) for dim in dims]
    assert np.array_equal(read(reordered), place(shape, in_order(table)))
    merged = layout.merge(layout.dim_names, "merged")
    assert list(merged.ranks) == in_order(table)
    sizes = dict(zip(layout.dim_names, layout.shape, strict=True))
    assert merged.split("merged", **sizes) == layout
    assert merged.split("merged", **sizes).merge(layout.dim_names, "merged") == merged


# ---- values -------------------------------------------------------------------------------------


# What was written as JSON, pickle or repr reads back as an equal layout that answers alike.
@settings(max_examples=examples(400))
@given(listed())
def test_written_layouts_read_back(case):
    layout, table = case
    layout.groups(*layout.dim_names).locate(int(table.flat[0]))  # makes what is made lazily
    for twin in (
        RankLayout.from_json(layout.to_json()),
        pickle.loads(pickle.dumps(layout)),
        eval(repr(layout)) if layout.size < 64 else layout,
    ):
        assert twin == layout
        assert hash(twin) == hash(layout)
        assert np.array_equal(read(twin), table)
        assert twin.to_json() == layout.to_json()


# A list is pickled as such, whatever was asked of the layout before.
def test_pickles_stay_small():
    layout = RankLayout([8, 512], ["tp", "dp"], ranks=range(4095, -1, -1))
    before = len(pickle.dumps(layout))
    layout.coords(7)
    layout.groups("dp").to_array()
    assert len(pickle.dumps(layout)) == before < 5 * 4096
    groups = pickle.loads(pickle.dumps(layout.groups("tp")))
    assert groups == layout.groups("tp")
    assert groups[0] == tuple(range(4095, 4087, -1))


# A list that strides can make, dense or with gaps, is the ordinary layout, in every respect.
@settings(max_examples=examples(400))
@given(layouts(max_ranks=128), st.data())
def test_a_list_of_even_steps_is_no_list(layout, data):
    kept = data.draw(st.sampled_from(layout.dim_names))
    coords = data.draw(some_coords(layout, [name for name in layout.dim_names if name != kept]))
    layout = layout.select(**coords)
    twin = RankLayout(layout.shape, layout.dim_names, ranks=in_order(read(layout)))
    assert twin == layout
    assert (hash(twin), repr(twin), twin.to_json()) == (
        hash(layout),
        repr(layout),
        layout.to_json(),
    )
    assert (twin.rank_offset, twin.strides) == (layout.rank_offset, layout.strides)
    assert "ranks" not in json.loads(twin.to_json())
    for dim in layout.dim_names:
        assert twin.groups(dim) == layout.groups(dim)


# Layouts are equal exactly when dims and tables are.
@settings(max_examples=examples(400))
@given(*2 * [listed(max_dims=2, max_size=2)])
def test_layouts_compare_by_value(one, other):
    values = [
        (layout.shape, layout.dim_names, tuple(in_order(table))) for layout, table in (one, other)
    ]
    assert (one[0] == other[0]) == (values[0] == values[1])
    assert len({one[0], other[0]}) == len(set(values))


# Groups are equal exactly when they hold the same ranks in the same order, whatever numbering they
# were made by: other dims, another order of dims over another list, or no list at all.
@settings(max_examples=examples(600))
@given(listed(max_dims=3, max_size=3), listed(max_dims=2, max_size=3), st.data())
def test_groups_compare_by_value(one, other, data):
    layout, table = one
    dims = data.draw(dim_subsets(layout))
    turned = data.draw(st.permutations(range(table.ndim)))
    twin = RankLayout(
        [layout.shape[axis] for axis in turned],
        [layout.dim_names[axis] for axis in turned],
        ranks=in_order(table.transpose(turned)),
    )
    candidates = [
        layout.groups(*dims),
        twin.groups(*dims),
        other[0].groups(*data.draw(dim_subsets(other[0]))),
        RankLayout([layout.size], ["all"]).groups("all"),
        RankLayout([layout.size], ["all"], ranks=in_order(table)).groups("all"),
    ]
    for left, right in itertools.combinations(candidates, 2):
        assert (left == right) == (list(left) == list(right))
        assert left != right or hash(left) == hash(right)


# numpy's integers, ranges and iterators list ranks as a list does; plain ints come back.
@pytest.mark.parametrize(
    "ranks", [np.array(SOME, np.uint16), iter(SOME), tuple(SOME), map(np.int64, SOME)]
)
def test_any_sequence_lists_ranks(ranks):
    layout = RankLayout([2, 2], ["tp", "dp"], ranks=ranks)
    assert layout == RankLayout([2, 2], ["tp", "dp"], ranks=SOME)
    answers = [*layout.ranks, layout.rank(tp=1, dp=1), layout.shift(np.int16(3), "tp", 1)]
    answers += [layout.rank_offset, layout.last_rank, *layout.groups("dp").of(np.int8(3))]
    assert answers == [3, 1, 7, 5, 5, 1, 1, 7, 3, 7]
    assert {type(answer) for answer in answers} == {int}


# After the list is read once, a question about one rank enumerates nothing.
def test_one_rank_is_a_lookup(monkeypatch):
    layout = RankLayout([8, 64], ["tp", "dp"], ranks=range(511, -1, -1))
    groups = layout.groups("dp")
    pairs = groups.chunks(2)

    def refuse(*_, **__):
        raise AssertionError("ranks were enumerated")

    monkeypatch.setattr(np, "arange", refuse)
    for module in (hypercomm.layout.groups, hypercomm.layout.layout):
        monkeypatch.setattr(module, "lattice", refuse)
    assert layout.coords(500) == {"tp": 3, "dp": 1}
    assert layout.shift(500, "dp", 1) == 492
    assert groups.of(500) == tuple(range(508, -1, -8))
    assert groups.position_of(500) == 1
    assert pairs.of(500) == (508, 500)
    assert 512 not in layout
    with pytest.raises(AssertionError, match="enumerated"):
        layout.ranks_where(tp=0)


# ---- bad calls ----------------------------------------------------------------------------------


def make(ranks, shape=(2, 2), **arguments):
    return RankLayout(shape, ["tp", "dp"], ranks=ranks, **arguments)


# Each mistake is an error of its class that names the value.
@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (lambda: make([0, 1, 1, 3]), LayoutError, "ranks .*rank 1 comes twice"),
        (lambda: make([0, 1, 2]), LayoutError, "ranks holds 3 ranks, .* 4 positions"),
        (lambda: make([]), LayoutError, "ranks .*empty"),
        (lambda: make([0, 1, 2, -3]), LayoutError, "ranks .*got -3"),
        (lambda: make([0, 1, 2, 2**31]), LayoutError, "ranks .*got 2147483648"),
        (lambda: make(SOME, rank_offset=4), LayoutError, "rank_offset 4 .*is 1"),
        (lambda: make(SOME, strides=[1, 4]), LayoutError, "strides .1, 4."),
        (lambda: make({0, 1}), LayoutError, "ranks .*a set has no order"),
        (lambda: make("0123"), LayoutError, "ranks .*got '0123'"),
        (lambda: make(4), LayoutError, "ranks .*got 4"),
        (lambda: make({0: 1}), LayoutError, "ranks .*got {0: 1}"),
        (lambda: make([0, 1, 2, 3.5]), LayoutError, "ranks .*got 3.5"),
        (lambda: make([0, 1, 2, True]), LayoutError, "ranks .*got True"),
        (lambda: make(SOME).coords(4), RankOutsideError, "rank 4 .*tp=2,dp=2.* 3, 1, 7, 5"),
        (
            lambda: make(range(63, -1, -1), (8, 8)).coords(64),
            RankOutsideError,
            "rank 64 .*63, 62.* 48 and 48 more",
        ),
        (lambda: make(SOME).coords(1.0), RankOutsideError, "got 1.0"),
        (lambda: make(SOME).groups("tp").of(4), RankOutsideError, "rank 4 .*2 groups of 2"),
        (lambda: make(SOME).select(tp=0, dp=1), LayoutError, "the rank there is 7"),
    ],
)
def test_bad_calls(call, error, words):
    with pytest.raises(error, match=words):
        call()


# ---- drawn by others ----------------------------------------------------------------------------


# Drawn lists keep their bounds, and some of them need a list.
@given(layouts(listed=True, max_ranks=32, max_offset=5))
def test_drawn_lists_keep_their_bounds(layout):
    assert layout.size <= 32
    assert 0 <= layout.rank_offset <= layout.last_rank < layout.size + 5
    assert len(set(layout.ranks)) == layout.size


# They shrink to an ordinary layout, and among those with a list, to two ranks turned round.
def test_drawn_lists_shrink():
    def find(condition):
        return hypothesis.find(layouts(listed=True), condition, settings=settings(database=None))

    assert find(lambda _: True) == RankLayout([1], ["tp"])
    turned = find(lambda layout: list(layout.ranks) != sorted(layout.ranks))
    assert turned == RankLayout([2], ["tp"], ranks=[1, 0])


# ---- process groups in a fake world -------------------------------------------------------------

LISTED = RankLayout([2, 2, 2], ["tp", "cp", "dp"], ranks=[7, 6, 2, 3, 0, 9, 5, 8])


# A mesh of a listed layout has its ranks in the layout's order, and so have its groups.
@pytest.mark.parametrize("dims", [[], ["tp"], ["dp", "tp"], [("dp", "cp"), "tp"]])
@pytest.mark.parametrize("rank", LISTED.ranks)
def test_device_mesh(rank, dims):
    table = place([2, 2, 2], LISTED.ranks)
    with fake_world(10, rank=rank), HyperCommGrid.from_layout(LISTED) as grid:
        flat = dims or ["dp", "cp", "tp"]
        for each in flat:
            grid.create_pg(each)
        mesh = grid.device_mesh(*dims)
        here = dict(zip(LISTED.dim_names, np.argwhere(table == rank)[0], strict=True))
        names = [name for each in flat for name in ([each] if isinstance(each, str) else each)]
        kept = [name for name in LISTED.dim_names if name in names]
        part = table[tuple(slice(None) if name in kept else here[name] for name in here)]
        part = part.transpose([kept.index(name) for name in names])
        shape = [2 if isinstance(each, str) else 2 ** len(each) for each in flat]
        wanted = part.reshape(shape)
        assert np.array_equal(mesh.mesh.numpy(), wanted)
        at = np.argwhere(wanted == rank)[0]
        assert list(mesh.get_coordinate()) == list(at)
        for axis, name in enumerate(mesh.mesh_dim_names):
            line = wanted[tuple(slice(None) if axis == i else at[i] for i in range(len(at)))]
            assert dist.get_process_group_ranks(mesh.get_group(name)) == line.tolist()
            assert mesh.get_local_rank(name) == at[axis]


def old_new_group(**_ranks_and_options):
    """A `new_group` without `sort_ranks`, as in torch 2.10."""


# What cannot keep the order of members is refused, with what can; "auto" takes that.
def test_choices(monkeypatch):
    unsorted, ascending = LISTED.groups("cp"), RankLayout.parse("tp=2,dp=4").groups("tp")
    assert (unsorted.is_sorted, ascending.is_sorted) == (False, True)
    with fake_world(10):
        assert choose("auto", None, unsorted).strategy == "local"
        assert choose("local", None, unsorted).strategy == "local"
        if "sort_ranks" in inspect.signature(dist.new_group).parameters:
            assert choose("enumerate", None, unsorted).strategy == "enumerate"
        monkeypatch.setattr(dist, "new_group", old_new_group)
        assert choose("enumerate", None, ascending).strategy == "enumerate"
        assert choose("enumerate", None).strategy == "enumerate"
        with pytest.raises(CreationError) as caught:
            choose("enumerate", None, unsorted)
        assert str(caught.value) == (
            "creation='enumerate' cannot create groups of backend 'fake' here: new_group of this "
            "torch sorts the ranks of each group, unlike <4 groups of 2: (7, 2), (6, 3), ...>; "
            "use one of ['auto', 'local']"
        )


# Where WORLD is bound to a device, groups that ascend are split off, and others are not.
def test_no_split_of_unsorted_groups(monkeypatch):
    bound_world.bind(monkeypatch)
    monkeypatch.setattr(c10d, "keeps_order", lambda: False)
    monkeypatch.setattr(c10d, "why_not_alone", lambda _: "all ranks must come")
    with fake_world(10):
        assert choose("auto", "fake", RankLayout.parse("tp=2").groups("tp")).strategy == "split"
        unsorted = LISTED.groups("cp")
        with pytest.raises(CreationError, match="split_group of this torch sorts the ranks"):
            choose("split", "fake", unsorted)
        assert "split_group of this torch sorts" in alternatives("local", "fake", unsorted)["split"]
        monkeypatch.setattr(dist, "new_group", old_new_group)
        with pytest.raises(CreationError) as caught:
            choose("auto", "fake", unsorted)
        assert str(caught.value).startswith("nothing can create groups of backend 'fake' here: ")
        assert str(caught.value).endswith("use a layout whose ranks ascend along each dim")


# A copy with one field changed keeps the others: strides and listed ranks.
def test_evolved_layouts():
    dense, listed = RankLayout(tp=2, dp=4), RankLayout([2, 2], ["tp", "dp"], ranks=[9, 8, 0, 1])
    assert attrs.evolve(dense) == dense
    assert attrs.evolve(dense, rank_offset=4) == RankLayout("tp=2,dp=4", rank_offset=4)
    gaps = dense.select(tp=1)
    assert attrs.evolve(gaps, rank_offset=4).ranks == (4, 6, 8, 10)
    assert attrs.evolve(listed) == listed
    assert attrs.evolve(listed, dim_names=("a", "b")) == listed.rename(tp="a", dp="b")
    assert attrs.evolve(listed, strides=None, ranks=[3, 1, 2, 0]).ranks == (3, 1, 2, 0)
    with pytest.raises(LayoutError, match="rank_offset 4"):
        attrs.evolve(listed, rank_offset=4)
