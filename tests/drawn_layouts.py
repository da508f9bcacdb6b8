"""Strategies for layouts of every kind, each with its table of ranks computed by numpy."""

import math

import numpy as np
from hypothesis import strategies as st

from hypercomm import RankLayout
from hypercomm.testing import dim_subsets, layouts


def divisors(number):
    return [size for size in range(1, number + 1) if number % size == 0]


def in_layout_order(table):
    """List the ranks of a table, or of a part of a table, in the order of the layout."""
    return np.ravel(table, order="F").tolist()


def table_of(layout):
    """Build a table by calling `rank`: element [i, j, ...] is the rank at these coordinates."""
    cells = (dict(zip(layout.dim_names, index, strict=True)) for index in np.ndindex(layout.shape))
    return np.array([layout.rank(**coords) for coords in cells]).reshape(layout.shape)


@st.composite
def partial_coords(draw, layout, dims):
    """Draw coordinates for some of these dims."""
    return {
        dim: draw(st.integers(0, layout.size_of(dim) - 1)) for dim in dims if draw(st.booleans())
    }


def index_at(layout, coords):
    return tuple(coords.get(name, slice(None)) for name in layout.dim_names)


@st.composite
def rank_lists(draw, size):
    """Draw distinct ranks: shuffled, with gaps, or in even steps of another dim order."""
    if draw(st.booleans()):
        return draw(st.permutations(range(size + draw(st.integers(0, 5)))))[:size]
    outer = draw(st.sampled_from(divisors(size)))
    return (np.arange(size).reshape(outer, -1).T.ravel() * draw(st.integers(1, 3))).tolist()


def table_by_strides(shape, strides, offset=0):
    """Return the table of ranks: a rank is the offset plus the sum of coordinates times strides."""
    return sum(np.indices(shape)[axis] * stride for axis, stride in enumerate(strides)) + offset


@st.composite
def nested_strides(draw, shape):
    """Draw strides in any order. Each stride is larger than the span of the smaller strides."""
    strides = [1] * len(shape)
    reached = 0
    for axis in draw(st.permutations(range(len(shape)))):
        strides[axis] = reached + 1 + draw(st.integers(0, 2))
        reached += (shape[axis] - 1) * strides[axis]
    return strides


@st.composite
def layouts_with_tables(draw, kinds=("dense", "gaps", "strided", "listed"), **bounds):
    """Draw a layout and its table. It is dense, has gaps as after select(), strides, or a list."""
    layout = draw(layouts(**{"max_ranks": 64} | bounds))
    table = np.arange(layout.size).reshape(layout.shape, order="F") + layout.rank_offset
    kind = draw(st.sampled_from(kinds))
    if kind == "gaps":
        coords = draw(partial_coords(layout, layout.dim_names[:-1]))
        return layout.select(**coords), table[index_at(layout, coords)]
    if kind == "strided":
        strides = draw(nested_strides(layout.shape))
        table = table_by_strides(layout.shape, strides, layout.rank_offset)
        layout = RankLayout(layout.shape, layout.dim_names, layout.rank_offset, strides=strides)
    if kind == "listed":
        ranks = draw(rank_lists(layout.size))
        table = np.array(ranks).reshape(layout.shape, order="F")
        layout = RankLayout(layout.shape, layout.dim_names, ranks=ranks)
    return layout, table


def groups_of(table, axes):
    """List the groups along some axes, in the layout's order. The first axis varies fastest."""
    others = [axis for axis in range(table.ndim) if axis not in axes]
    turned = np.transpose(table, [*others[::-1], *sorted(axes)[::-1]])
    size = math.prod(table.shape[axis] for axis in axes)
    return [tuple(group) for group in turned.reshape(-1, size).tolist()]


def slice_groups(groups, size, step):
    """Cut each group into runs of `size * step` ranks, and keep every `step`-th rank of a run."""
    return [
        group[start + phase : start + size * step : step]
        for group in groups
        for start in range(0, len(group), size * step)
        for phase in range(step)
    ]


@st.composite
def groups_with_lists(draw, **bounds):
    """Draw groups, derive from them up to three times, and make the same groups by plain slices."""
    layout, table = draw(layouts_with_tables(**bounds))
    dims = draw(dim_subsets(layout))
    groups = layout.groups(*dims)
    expected = groups_of(table, [layout.dim_names.index(dim) for dim in dims])
    for way in draw(st.lists(st.sampled_from(["chunks", "level", "ends"]), max_size=3)):
        whole = len(expected[0])
        size = draw(st.sampled_from(divisors(whole)))
        if way == "chunks":
            groups, expected = groups.chunks(size), slice_groups(expected, size, 1)
        elif way == "level":
            sizes = [size, draw(st.sampled_from(divisors(whole // size)))]
            sizes.append(whole // math.prod(sizes))
            level = draw(st.integers(0, 2))
            groups = groups.levels(sizes)[level]
            expected = slice_groups(expected, sizes[level], math.prod(sizes[:level]))
        else:
            groups = groups.pick(lambda group: {group[-1], group[0]})
            expected = [tuple(dict.fromkeys((group[0], group[-1]))) for group in expected]
    return groups, expected
