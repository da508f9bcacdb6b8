"""Test the laws of RankLayout against numpy in Fortran order.

The layouts are of every kind: dense, with gaps, with any strides, and with a list of ranks.
"""

import json
import math
import pickle
import re

import numpy as np
import pytest
from drawn_layouts import (
    divisors,
    in_layout_order,
    index_at,
    layouts_with_tables,
    partial_coords,
    table_by_strides,
    table_of,
)
from example_counts import examples
from hypothesis import given, settings, strategies as st

from hypercomm import RankLayout
from hypercomm.errors import LayoutError, RankOutsideError, WorldSizeError
from hypercomm.testing import dim_subsets, layouts, orders, ranks_of

pytestmark = pytest.mark.torch_free

NAMES = ("tp", "cp", "ep", "dp", "pp")

offsets = st.integers(0, 9)
sizes_by_name = st.fixed_dictionaries(dict.fromkeys(NAMES, st.integers(1, 4)))
many = settings(max_examples=examples(400))


# ---- ranks --------------------------------------------------------------------------------------


# coords() is the inverse of rank(). The rank at given coordinates is the element of numpy's table
# at the same index.
@many
@given(layouts_with_tables())
def test_coords_and_rank_are_inverse(case):
    layout, table = case
    assert np.array_equal(table_of(layout), table)
    for index, rank in np.ndenumerate(table):
        assert layout.coords(int(rank)) == dict(zip(layout.dim_names, index, strict=True))


# A layout contains exactly the ranks of the table, in its order.
@many
@given(layouts_with_tables())
def test_layout_contains_exactly_its_ranks(case):
    layout, table = case
    inside = in_layout_order(table)
    assert list(layout.ranks) == inside
    assert (layout.rank_offset, layout.last_rank) == (min(inside), max(inside))
    assert layout.size == len(inside)
    for rank in range(min(inside) - 2, max(inside) + 3):
        assert (rank in layout) == (rank in inside)
        if rank not in inside:
            with pytest.raises(RankOutsideError, match=f"rank {rank} .*{layout}"):
                layout.coords(rank)


# A periodic shift rolls the table along one axis. Otherwise a shift beyond an edge returns None.
@many
@given(layouts_with_tables(), st.integers(-9, 9), st.data())
def test_shift_agrees_with_roll(case, by, data):
    layout, table = case
    rank = data.draw(ranks_of(layout))
    (dim,) = data.draw(dim_subsets(layout, max_dims=1))
    axis = layout.dim_names.index(dim)
    here = np.argwhere(table == rank)[0]
    assert layout.shift(rank, dim, by, periodic=True) == np.roll(table, -by, axis)[tuple(here)]
    here[axis] += by
    inside = 0 <= here[axis] < table.shape[axis]
    assert layout.shift(rank, dim, by) == (table[tuple(here)] if inside else None)


# Any positive strides make a layout if all ranks are distinct. Otherwise the error names two
# coordinates with the same rank.
@settings(max_examples=examples(800))
@given(
    st.lists(st.tuples(st.integers(1, 4), st.integers(1, 12)), min_size=1, max_size=4),
    st.integers(0, 3),
)
def test_strides_are_accepted_unless_they_overlap(axes, offset):
    shape, strides = zip(*axes, strict=True)
    names = [f"d{axis}" for axis in range(len(axes))]
    table = table_by_strides(shape, strides, offset)
    if len({*table.flat}) == table.size:
        layout = RankLayout(shape, names, offset, strides=strides)
        assert np.array_equal(table_of(layout), table)
        assert layout == RankLayout(shape, names, ranks=in_layout_order(table))
        return
    with pytest.raises(LayoutError, match="overlap") as caught:
        RankLayout(shape, names, offset, strides=strides)
    named = re.findall(r"\(((?:d\d=\d(?:, )?)+)\)", str(caught.value))
    places = [tuple(map(int, re.findall(r"=(\d)", text))) for text in named]
    rank = int(str(caught.value).rpartition("rank ")[2])
    assert len({*places}) == 2
    assert {int(table[place]) for place in places} == {rank}


# numpy integers are accepted in place of int, and results are plain ints.
@given(layouts(), st.sampled_from([np.int16, np.uint16, np.int64]), st.data())
def test_numpy_integers_are_accepted_and_ints_returned(layout, dtype, data):
    rank = data.draw(ranks_of(layout))
    twin = RankLayout(np.array(layout.shape, dtype), layout.dim_names, dtype(layout.rank_offset))
    assert twin == RankLayout(layout.shape, layout.dim_names, ranks=map(dtype, layout.ranks))
    assert dtype(rank) in twin
    coords = {name: dtype(coord) for name, coord in layout.coords(rank).items()}
    answers = [twin.rank(**coords), *twin.ranks_where(**coords)]
    for dim in layout.dim_names:
        answers.append(twin.shift(dtype(rank), dim, dtype(0)))
        answers.append(twin.groups(dim).of(dtype(rank))[layout.coords(rank)[dim]])
    assert {*answers} == {rank}
    numbers = [*answers, *twin.shape, twin.rank_offset, *twin.coords(dtype(rank)).values()]
    assert {type(number) for number in numbers} == {int}


# ranks_where() lists the elements of numpy's table at the given indices, in the order of the
# layout. select() returns a layout with this part of the table.
@many
@given(layouts_with_tables(), st.data())
def test_ranks_where_and_select_agree_with_indexing(case, data):
    layout, table = case
    coords = data.draw(partial_coords(layout, layout.dim_names))
    part = table[index_at(layout, coords)]
    assert list(layout.ranks_where(**coords)) == in_layout_order(part)
    if len(coords) < len(layout.dim_names):
        selected = layout.select(**coords)
        assert selected.dim_names == tuple(name for name in layout.dim_names if name not in coords)
        assert np.array_equal(table_of(selected), part)


# ---- layouts derived from another ---------------------------------------------------------------


# split() reshapes the table, even if one size is inferred. renumber() reverses the split.
@many
@given(layouts_with_tables(max_dims=3, max_size=12), st.data())
def test_split_reshapes_and_renumber_reverses_it(case, data):
    layout, table = case
    (dim,) = data.draw(dim_subsets(layout, max_dims=1))
    axis = layout.dim_names.index(dim)
    whole = layout.size_of(dim)
    inner = data.draw(st.sampled_from(divisors(whole)))
    parts = {"inner": inner, "outer": whole // inner}
    split = layout.split(dim, **parts | data.draw(st.sampled_from([{}, {"inner": -1}])))
    shape = (*layout.shape[:axis], *parts.values(), *layout.shape[axis + 1 :])
    assert split.dim_names == (*layout.dim_names[:axis], *parts, *layout.dim_names[axis + 1 :])
    assert np.array_equal(table_of(split), table.reshape(shape, order="F"))
    assert split.renumber(layout.shape, layout.dim_names) == layout


# rename() changes only the names. renumber() arranges the same ranks in another shape. JSON has a
# list of ranks only if strides cannot express the ranks.
@many
@given(layouts_with_tables(), st.data())
def test_rename_and_renumber(case, data):
    layout, table = case
    new = {dim: f"new_{dim}" for dim in data.draw(dim_subsets(layout))}
    renamed = layout.rename(**new)
    assert renamed.dim_names == tuple(new.get(dim, dim) for dim in layout.dim_names)
    assert np.array_equal(table_of(renamed), table)
    dims = data.draw(st.permutations(layout.dim_names))
    shape = [layout.size_of(dim) for dim in dims]
    turned = layout.renumber(shape, dims)
    assert turned.dim_names == tuple(dims)
    assert np.array_equal(table_of(turned), np.reshape(in_layout_order(table), shape, order="F"))
    line = layout.renumber([layout.size], ["all"])
    assert list(line.ranks) == in_layout_order(table)
    assert line.renumber(layout.shape, layout.dim_names) == layout
    steps = np.diff(in_layout_order(table)).tolist()
    is_even = len({*steps}) <= 1 and min(steps, default=1) > 0
    assert ("ranks" in json.loads(line.to_json())) == (not is_even)


# The stride of a dim of size 1 is never used, so it causes no gap.
def test_dims_of_size_1_leave_no_gap():
    layout = RankLayout("tp=2,cp=3,dp=1").select(cp=0)
    assert layout == RankLayout("tp=2,dp=1")
    assert layout.renumber([2], ["both"]).strides == (1,)


# ---- equality and serialised forms --------------------------------------------------------------


# A layout equals the layout that is read from its JSON, pickle or repr, and has the same table. For
# a dense layout, this also holds for its text.
@many
@given(layouts_with_tables())
def test_serialised_layouts_read_back(case):
    layout, table = case
    layout.groups(*layout.dim_names).locate(int(table.flat[0]))  # fills lazy attributes
    twins = [RankLayout.from_json(layout.to_json()), pickle.loads(pickle.dumps(layout))]
    twins += [eval(repr(layout)), RankLayout(**layout.to_dict())]
    if isinstance(layout.ranks, range):
        twins.append(RankLayout(str(layout), rank_offset=layout.rank_offset))
    for twin in twins:
        assert twin == layout
        assert hash(twin) == hash(layout)
        assert np.array_equal(table_of(twin), table)
        assert twin.to_json() == layout.to_json() == json.dumps(layout.to_dict())


# Layouts are equal if and only if their dims and their tables are equal.
@many
@given(
    layouts_with_tables(max_dims=2, max_size=2, max_offset=1, dim_names=["tp", "dp"]),
    layouts_with_tables(max_dims=2, max_size=2, max_offset=1, dim_names=["tp", "dp"]),
)
def test_layouts_compare_by_value(one, other):
    (layout, table), (other_layout, other_table) = one, other
    are_equal = layout.dim_names == other_layout.dim_names and np.array_equal(table, other_table)
    assert (layout == other_layout) == are_equal
    assert len({layout, other_layout}) == (1 if are_equal else 2)


# ---- sizes from the world size ------------------------------------------------------------------


# An unspecified size is the world size divided by the other sizes. It can be missing, -1 or a bare
# name.
@given(orders(NAMES), sizes_by_name, st.sampled_from(NAMES), offsets)
def test_unspecified_size_is_inferred(order, sizes, open_name, offset):
    world = {"world_size": math.prod(sizes.values()), "rank_offset": offset}
    names = order.split("-")
    expected = RankLayout([sizes[name] for name in names], names, offset)
    known = {name: size for name, size in sizes.items() if name != open_name}
    text = ",".join(f"{name}={known[name]}" if name in known else name for name in names)
    assert RankLayout({name: known.get(name, -1) for name in names}, **world) == expected
    assert RankLayout(text, **world) == expected
    assert RankLayout(text.replace(open_name, f"{open_name}=-1"), **world) == expected


# fit() returns the best of all layouts that fit. If no layout fits, the error suggests numbers of
# ranks, and a layout fits each of these numbers.
@given(
    st.integers(1, 60),
    st.sets(st.integers(1, 8), min_size=1),
    st.sets(st.integers(1, 4), min_size=1),
)
def test_fit_returns_the_best_layout(world_size, tp, pp):
    shapes = [(a, b) for a in tp for b in pp if world_size % (a * b) == 0]
    if shapes:
        first, second = max(shapes)
        shape = RankLayout.fit(world_size, tp=tp, pp=pp, dp=-1).shape
        assert shape == (first, second, world_size // first // second)
    else:
        with pytest.raises(WorldSizeError) as caught:
            RankLayout.fit(world_size, tp=tp, pp=pp, dp=-1)
        near = str(caught.value).partition("more sizes, or use ")[2].partition(" ranks")[0]
        for number in near.split(" or "):
            assert RankLayout.fit(int(number), tp=tp, pp=pp, dp=-1).size == int(number)
