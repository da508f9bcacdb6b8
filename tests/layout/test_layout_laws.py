"""Laws of RankLayout. The oracle is numpy in Fortran order, whose first axis varies fastest too."""

import itertools
import json
import math
import pickle

import numpy as np
import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from hypercomm import RankLayout
from hypercomm.errors import LayoutError, RankOutsideError
from hypercomm.testing import dim_subsets, layouts, orders, ranks_of

pytestmark = pytest.mark.torch_free

NAMES = ("tp", "cp", "ep", "dp", "pp")

offsets = st.integers(0, 9)
sizes_by_name = st.fixed_dictionaries(dict.fromkeys(NAMES, st.integers(1, 4)))


def count_ranks(shape, offset):
    """Number the ranks by numpy alone: element [i, j, ...] is the rank at these coordinates."""
    return np.arange(math.prod(shape)).reshape(shape, order="F") + offset


def read(layout):
    """Ask a layout for the same table."""
    cells = (dict(zip(layout.dim_names, index, strict=True)) for index in np.ndindex(layout.shape))
    return np.array([layout.rank(**coords) for coords in cells]).reshape(layout.shape)


@st.composite
def some_coords(draw, layout, dims):
    """Draw coordinates for some of these dims of a layout, or for none."""
    return {
        dim: draw(st.integers(0, layout.size_of(dim) - 1)) for dim in dims if draw(st.booleans())
    }


def index_at(layout, coords):
    return tuple(coords.get(name, slice(None)) for name in layout.dim_names)


@st.composite
def numbered(draw, **bounds):
    """Draw a layout, dense or with the gaps that select() leaves, and its ranks by numpy alone."""
    layout = draw(layouts(**bounds))
    ranks = count_ranks(layout.shape, layout.rank_offset)
    # Fixing the last dim would leave no gaps.
    coords = draw(some_coords(layout, layout.dim_names[:-1]))
    return layout.select(**coords), ranks[index_at(layout, coords)]


# ---- one rank -----------------------------------------------------------------------------------


# Coordinates and ranks are inverse, and the rank at some coordinates is numpy's element there.
@given(numbered())
def test_coords_and_rank_are_inverse(case):
    layout, ranks = case
    assert np.array_equal(read(layout), ranks)
    for index, rank in np.ndenumerate(ranks):
        assert layout.coords(int(rank)) == dict(zip(layout.dim_names, index, strict=True))


# The coordinates of a rank are what numpy unravels from its distance to the offset.
@given(layouts(), st.data())
def test_coords_agree_with_unravel_index(layout, data):
    rank = data.draw(ranks_of(layout))
    index = np.unravel_index(rank - layout.rank_offset, layout.shape, order="F")
    assert tuple(layout.coords(rank).values()) == index


# The strides are those of a Fortran-ordered array of bytes.
@given(layouts())
def test_strides_agree_with_numpy(layout):
    assert layout.strides == np.empty(layout.shape, dtype=np.int8, order="F").strides


# A layout holds the ranks of numpy's table, in ascending order, and no others.
@given(numbered())
def test_a_layout_holds_its_ranks_and_no_others(case):
    layout, ranks = case
    inside = sorted(ranks.ravel().tolist())
    around = range(inside[0] - 2, inside[-1] + 3)
    assert layout.size == len(inside)
    assert list(layout.ranks) == inside
    assert [rank for rank in around if rank in layout] == inside
    for rank in set(around).difference(inside):
        with pytest.raises(RankOutsideError):
            layout.coords(rank)


# A periodic shift rolls the table along one axis, and going back the same way leads home.
@given(numbered(), st.integers(-9, 9), st.data())
def test_periodic_shift_rolls_the_table(case, by, data):
    layout, ranks = case
    rank = data.draw(ranks_of(layout))
    (dim,) = data.draw(dim_subsets(layout, max_dims=1))
    rolled = np.roll(ranks, -by, axis=layout.dim_names.index(dim))
    there = layout.shift(rank, dim, by, periodic=True)
    assert there == rolled[ranks == rank].item()
    assert layout.shift(there, dim, -by, periodic=True) == rank


# A shift that is not periodic adds to one coordinate, and is None exactly beyond the edges.
@given(numbered(), st.integers(-5, 5), st.data())
def test_open_shift_ends_at_the_edges(case, by, data):
    layout, ranks = case
    (dim,) = data.draw(dim_subsets(layout, max_dims=1))
    axis = layout.dim_names.index(dim)
    for index, rank in np.ndenumerate(ranks):
        there = index[axis] + by
        inside = 0 <= there < ranks.shape[axis]
        expected = ranks[(*index[:axis], there, *index[axis + 1 :])] if inside else None
        assert layout.shift(int(rank), dim, by) == expected


# numpy's integers are accepted wherever an int is, and plain ints come back.
@given(layouts(), st.sampled_from([np.int16, np.uint16, np.int64]), st.data())
def test_numpy_integers_are_ints(layout, dtype, data):
    rank = data.draw(ranks_of(layout))
    (dim,) = data.draw(dim_subsets(layout, max_dims=1))
    shape, offset = np.array(layout.shape, dtype), dtype(layout.rank_offset)
    twin = RankLayout(shape, layout.dim_names, offset)
    coords = {name: dtype(coord) for name, coord in layout.coords(rank).items()}
    answers = [
        twin.rank(**coords),
        twin.shift(dtype(rank), dim, dtype(1), periodic=True),
        *twin.coords(dtype(rank)).values(),
        *twin.ranks_where(**coords),
    ]
    assert twin == layout
    assert dtype(rank) in twin
    assert answers[0] == rank
    numbers = [*twin.shape, *twin.strides, twin.rank_offset, *answers]
    assert {type(number) for number in numbers} == {int}


# ---- several ranks ------------------------------------------------------------------------------


# The ranks where some coordinates are given are numpy's, indexed by them, in ascending order.
@given(numbered(), st.data())
def test_ranks_where_agrees_with_indexing(case, data):
    layout, ranks = case
    coords = data.draw(some_coords(layout, layout.dim_names))
    expected = sorted(ranks[index_at(layout, coords)].ravel().tolist())
    assert layout.ranks_where(**coords) == tuple(expected)


# A selection is numpy's table indexed by the coordinates: the ranks keep their numbers.
@given(numbered(), st.data())
def test_select_agrees_with_indexing(case, data):
    layout, ranks = case
    kept = data.draw(st.sampled_from(layout.dim_names))
    coords = data.draw(some_coords(layout, [name for name in layout.dim_names if name != kept]))
    selected = layout.select(**coords)
    assert selected.dim_names == tuple(name for name in layout.dim_names if name not in coords)
    assert np.array_equal(read(selected), ranks[index_at(layout, coords)])


# ---- other layouts from one ---------------------------------------------------------------------


# Splitting a dim, with one size open or none, reshapes the table; merging the parts undoes it.
@given(layouts(max_dims=3, max_size=12), st.data())
def test_split_moves_no_rank_and_merge_undoes_it(layout, data):
    (dim,) = data.draw(dim_subsets(layout, max_dims=1))
    axis, whole = layout.dim_names.index(dim), layout.size_of(dim)
    inner = data.draw(st.sampled_from([size for size in range(1, whole + 1) if not whole % size]))
    parts = {"inner": inner, "outer": whole // inner}
    given_sizes = parts | data.draw(st.sampled_from([{}, {"inner": -1}, {"outer": -1}]))

    split = layout.split(dim, **given_sizes)
    shape = (*layout.shape[:axis], *parts.values(), *layout.shape[axis + 1 :])
    assert split.dim_names == (*layout.dim_names[:axis], *parts, *layout.dim_names[axis + 1 :])
    assert np.array_equal(read(split), count_ranks(shape, layout.rank_offset))
    assert split.merge(data.draw(st.permutations(["inner", "outer"])), dim) == layout


# Merging neighbours reshapes the table, and splitting them again undoes it.
@given(layouts(), st.data())
def test_merge_moves_no_rank_and_split_undoes_it(layout, data):
    first = data.draw(st.integers(0, len(layout.shape) - 1))
    last = data.draw(st.integers(first + 1, len(layout.shape)))
    dims, sizes = layout.dim_names[first:last], layout.shape[first:last]

    merged = layout.merge(data.draw(st.permutations(dims)), "merged")
    shape = (*layout.shape[:first], math.prod(sizes), *layout.shape[last:])
    assert np.array_equal(read(merged), count_ranks(shape, layout.rank_offset))
    assert merged.split("merged", **dict(zip(dims, sizes, strict=True))) == layout


# Neighbours merge whatever their gaps are; it takes a list of the ranks where their steps differ.
@settings(max_examples=examples(400))
@given(numbered(min_dims=3, max_size=2), st.data())
def test_merge_lists_exactly_the_gaps(case, data):
    layout, ranks = case
    first = data.draw(st.integers(0, len(layout.shape) - 1))
    last = data.draw(st.integers(first + 1, len(layout.shape)))
    dims = layout.dim_names[first:last]
    line = ranks[index_at(layout, dict.fromkeys(set(layout.dim_names).difference(dims), 0))]
    merged = layout.merge(dims, "merged")
    assert list(merged.ranks) == list(layout.ranks)
    is_even = len(set(np.diff(line.ravel(order="F")).tolist())) <= 1
    assert ("ranks" in json.loads(merged.to_json())) == (not is_even)


# A dim of size 1 takes no step, so its stride leaves no gap beside other dims.
def test_dims_of_size_1_leave_no_gap():
    layout = RankLayout.parse("tp=2,cp=3,dp=1").select(cp=0)
    assert list(layout.ranks) == [0, 1]
    assert list(layout.merge(["tp", "dp"], "merged").ranks) == [0, 1]
    assert list(layout.reorder("dp", "tp").ranks) == [0, 1]


# Renaming changes names and nothing else, and renaming back restores the layout.
@given(numbered(), st.data())
def test_rename_moves_no_rank(case, data):
    layout, ranks = case
    new = {dim: f"new_{dim}" for dim in data.draw(dim_subsets(layout))}
    renamed = layout.rename(**new)
    assert renamed.dim_names == tuple(new.get(dim, dim) for dim in layout.dim_names)
    assert np.array_equal(read(renamed), ranks)
    assert renamed.rename(**{name: dim for dim, name in new.items()}) == layout


# Reordering counts the ranks afresh, in the order given; the old order restores the layout.
@given(layouts(), st.data())
def test_reorder_counts_afresh(layout, data):
    dims = data.draw(st.permutations(layout.dim_names))
    reordered = layout.reorder(*dims)
    shape = [layout.size_of(dim) for dim in dims]
    assert reordered.dim_names == tuple(dims)
    assert np.array_equal(read(reordered), count_ranks(shape, layout.rank_offset))
    assert reordered.reorder(*layout.dim_names) == layout


# ---- values and their written forms -------------------------------------------------------------


# What was written as JSON or pickle reads back as an equal layout, gaps included.
@given(numbered())
def test_written_layouts_read_back(case):
    layout, _ = case
    assert RankLayout.from_json(layout.to_json()) == layout
    assert pickle.loads(pickle.dumps(layout)) == layout


# The text of a layout holds its sizes and names: parsed at the same offset, it is that layout.
@given(layouts())
def test_text_reads_back(layout):
    assert RankLayout.parse(str(layout), rank_offset=layout.rank_offset) == layout


# Two dense layouts are equal exactly when shape, names and offset are, and then hash equally.
@given(*2 * [layouts(max_dims=2, max_size=2, max_offset=1, dim_names=["tp", "dp"])])
def test_layouts_compare_by_value(one, other):
    values = [(layout.shape, layout.dim_names, layout.rank_offset) for layout in (one, other)]
    assert (one == other) == (values[0] == values[1])
    assert len({one, other}) == len(set(values))


# ---- from an order, from a world size -----------------------------------------------------------


# Each dim strides over the sizes before it in the order, however the keywords are ordered.
@given(orders(NAMES), sizes_by_name, offsets)
def test_from_order_strides_over_the_sizes_before(order, sizes, offset):
    layout = RankLayout.from_order(order, rank_offset=offset, **sizes)
    stride = 1
    for name in order.split("-"):
        assert layout.rank(**dict.fromkeys(NAMES, 0) | {name: sizes[name] - 1}) == (
            offset + (sizes[name] - 1) * stride
        )
        stride *= sizes[name]
    assert layout.dim_names == tuple(order.split("-"))
    assert layout.size == stride


# The one unspecified size is what the others leave of the world, be it missing, -1 or a bare name.
@given(orders(NAMES), sizes_by_name, st.sampled_from(NAMES), offsets)
def test_one_open_size_is_inferred(order, sizes, open_name, offset):
    world = {"world_size": math.prod(sizes.values()), "rank_offset": offset}
    names = order.split("-")
    expected = RankLayout([sizes[name] for name in names], names, offset)
    known = {name: size for name, size in sizes.items() if name != open_name}
    text = ",".join(f"{name}={known[name]}" if name in known else name for name in names)
    assert RankLayout.from_order(order, **known, **world) == expected
    assert RankLayout.from_order(order, **known, **{open_name: -1}, **world) == expected
    assert RankLayout.parse(text, **world) == expected
    assert RankLayout.parse(text.replace(open_name, f"{open_name}=-1"), **world) == expected


# suggest() lists exactly the shapes that trying them all finds, the first dim slowest.
@given(
    st.integers(1, 24),
    st.lists(
        st.integers(1, 8)
        | st.just(-1)
        | st.lists(st.integers(1, 8) | st.just(-1), min_size=1, max_size=4),
        min_size=1,
        max_size=3,
    ),
    offsets,
)
def test_suggest_finds_what_brute_force_finds(world_size, wanted, offset):
    choices = [{choice} if isinstance(choice, int) else set(choice) for choice in wanted]
    fitting = [
        shape
        for shape in itertools.product(range(1, world_size + 1), repeat=len(wanted))
        if math.prod(shape) == world_size
        and all(choice & {size, -1} for choice, size in zip(choices, shape, strict=True))
    ]
    names = NAMES[: len(wanted)]
    suggested = RankLayout.suggest(
        world_size, rank_offset=offset, **dict(zip(names, wanted, strict=True))
    )
    assert suggested == [RankLayout(shape, names, offset) for shape in fitting]


# A size of 0 is refused as what it is, whatever else is unspecified or does not fit.
@pytest.mark.parametrize(
    "call",
    [
        lambda: RankLayout([2, 0], ["tp", "dp"]),
        lambda: RankLayout.parse("tp=0,dp", world_size=8),
        lambda: RankLayout.from_order("tp-dp", tp=0, dp=-1, world_size=8),
        lambda: RankLayout.parse("cp=8").split("cp", inner=0, outer=-1),
        lambda: RankLayout.suggest(8, tp=2, dp=0),
        lambda: RankLayout.suggest(8, tp=3, dp=0),
    ],
    ids=["init", "parse", "from_order", "split", "suggest", "suggest after a misfit"],
)
def test_no_size_is_zero(call):
    with pytest.raises(LayoutError):
        call()


# The same ranks are numbered in the same order by whatever dims, and back; no other number is.
@given(numbered())
def test_renumber(case):
    layout, ranks = case
    assert layout.sizes == dict(zip(layout.dim_names, ranks.shape, strict=True))
    flat = layout.renumber([layout.size], ["all"])
    assert list(flat.ranks) == ranks.ravel(order="F").tolist()
    assert flat.renumber(layout.shape, layout.dim_names) == layout
    with pytest.raises(LayoutError, match="ranks"):
        layout.renumber([layout.size + 1], ["all"])
