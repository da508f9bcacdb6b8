"""Test `grid["tp"]`: the rank's position, group and neighbours, and sums and seeds."""

import warnings
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed as dist
from drawn_layouts import groups_of
from example_counts import examples
from hypothesis import given, settings, strategies as st
from numpy_oracle import group_of

from hypercomm import HyperCommGrid, RankLayout
from hypercomm.errors import (
    GridDestroyedError,
    NotInitializedError,
    SimulationError,
)
from hypercomm.grid.dims import GridDims
from hypercomm.testing import dim_subsets, fake_world, layouts, ranks_of

SIZES = (2, 2, 2)
NAMES = ["tp", "dp", "pp"]


# A rank has the right position, group and neighbours along dims of any layout. Dims can be given in
# every form. torch registers the members that numpy finds. Two sets of dims share a group if and
# only if all of their groups are the same.
@settings(max_examples=examples(200))
@given(st.data())
def test_position_and_neighbours(data):
    layout = data.draw(layouts(listed=True, max_ranks=64))
    dims, others = (data.draw(dim_subsets(layout)) for _ in range(2))
    rank = data.draw(ranks_of(layout))
    ranks = tuple(group_of(layout.shape, layout.dim_names, [*layout.ranks], dims, rank))
    at, last = ranks.index(rank), len(ranks) - 1
    world_size = layout.last_rank + 1 + data.draw(st.integers(0, 3))
    with fake_world(world_size, rank), HyperCommGrid(layout, share="identical") as grid:
        here = grid[dims]
        assert here is grid[dims]
        assert here.dims == grid["+".join(dims)].dims == grid[[dims]].dims
        assert sorted(here.dims, key=layout.dim_names.index) == [*here.dims]
        assert {*here.dims} == {*dims}
        assert here.group is grid.get_pg(dims) is here.group
        assert str(grid.find(here.group)) == "+".join(here.dims)
        assert dist.get_process_group_ranks(here.group) == list(ranks)
        assert (here.rank, here.size, here.ranks) == (at, len(ranks), ranks)
        assert grid.group_ranks(dims) == ranks
        assert (here.is_first, here.is_last) == (at == 0, at == last)
        assert here.prev() == (ranks[at - 1] if at else None)
        assert here.next() == (ranks[at + 1] if at < last else None)
        assert here.prev(periodic=True) == ranks[at - 1]
        assert here.next(periodic=True) == ranks[(at + 1) % len(ranks)]
        table = np.reshape(layout.ranks, layout.shape, order="F")
        axes = [[layout.dim_names.index(dim) for dim in names] for names in (dims, others)]
        one, other = (groups_of(table, each) for each in axes)
        assert (grid[others].group is here.group) == (sorted(one) == sorted(other))
        longer = grid.create_pg(dims, name="longer", timeout=timedelta(seconds=3))
        assert longer is not here.group


# Cached values are discarded when a group is destroyed or reshaped, and when the grid is destroyed.
def test_destroy_and_reshape_discard_cached_values():
    with fake_world(4, rank=3):
        grid = HyperCommGrid("tp=2,dp=2")
        tp, dp = grid["tp"], grid["dp"]
        first = tp.group
        assert (tp.rank, dp.rank, tp.size) == (1, 1, 2)
        grid.destroy_pg("tp")
        assert tp.group is not first
        grid.reshape("tp=1,dp=4")
        assert (tp.rank, dp.rank, tp.size, dp.size, dp.group.size()) == (0, 3, 1, 4, 4)
        grid.destroy()
        with pytest.raises(GridDestroyedError):
            _ = tp.group


# Sums and means over dims are right. A tensor that is summed is not modified.
@pytest.mark.ranks(4)
def test_sums():
    rank = dist.get_rank()
    tp = rank // 2 * 2
    dp = rank % 2  # the smallest rank of each group
    tensor = torch.tensor([float(rank), 1.0])
    with HyperCommGrid("tp=2,dp=2") as grid:
        assert grid["dp"].sum(rank) == 2 * dp + 2
        assert grid["tp"].mean(float(rank)) == tp + 0.5
        assert grid["tp"].sum(tensor).tolist() == [2 * tp + 1.0, 2.0]
        assert grid["dp"].mean(tensor).tolist() == [dp + 1.0, 1.0]
        assert tensor.tolist() == [float(rank), 1.0]
        check_sums_of_numbers(grid["tp", "dp"])
        check_dtypes_of_sums(grid["dp"])
        check_warning_of_a_missing_gradient(grid["dp"])
        grid["tp", "dp"].barrier()


# Ranks may pass ints and floats. The sum of ints is exact, also beyond 64 bits and for negative
# values. The expected values are computed with Python's own numbers.
def check_sums_of_numbers(four):
    for values in (
        [0, 0, 0, 0.75],
        [1, 0.5, True, -2],
        [2**62, 2**62, 2**63, -1],
        [-(2**63), -5, 3, 2**64 - 1],
        [0.1, 10**6, np.int64(3), np.float32(0.5)],
    ):
        total = four.sum(values[four.rank])
        if all(isinstance(value, int) for value in values):
            assert (type(total), total) == (int, sum(values))
        else:
            assert (type(total), total) == (float, pytest.approx(float(sum(values)), rel=1e-15))
        assert four.mean(values[four.rank]) == pytest.approx(sum(values) / 4, rel=1e-15)
    assert np.isnan(four.sum(float("nan") if four.rank else 1))


# Sums of bool and integer tensors are int64, as for torch.sum. The mean of float16 does not
# overflow if it fits into float16. Other dtypes are kept.
def check_dtypes_of_sums(two):
    for values in (
        torch.tensor([True, False]),
        torch.tensor([200, 255], dtype=torch.uint8),
        torch.tensor([-100, 127], dtype=torch.int8),
        torch.tensor([2**30, 7], dtype=torch.int32),
    ):
        both = torch.stack([values, values])
        torch.testing.assert_close(two.sum(values), both.sum(0))
        torch.testing.assert_close(two.mean(values), both.double().mean(0).float())
    for dtype in (torch.float16, torch.bfloat16):
        large = torch.tensor([60000.0, 1.0 + two.rank], dtype=dtype)
        expected = torch.tensor([60000.0, 1.5], dtype=dtype)
        torch.testing.assert_close(two.mean(large), expected, rtol=0, atol=0)
        assert two.sum(large[1:]).dtype == dtype
    assert two.sum(torch.tensor(1.5, dtype=torch.float64)).dtype == torch.float64
    matrix = torch.arange(6.0).reshape(2, 3)
    transposed = matrix.T.contiguous().T  # the same values with other strides
    assert torch.equal(two.sum(transposed if two.rank else matrix), 2 * matrix)
    assert two.mean(torch.tensor([1j])).tolist() == [1j]


# A tensor that requires a gradient is summed without a gradient, so there is a warning.
def check_warning_of_a_missing_gradient(two):
    weight = torch.ones(2, requires_grad=True)
    with pytest.warns(UserWarning, match=r"no gradient flows .* pass value.detach\(\)"):
        assert not two.sum(weight * 2).requires_grad
    with pytest.warns(UserWarning, match="no gradient flows"):
        two.mean(weight)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")
        two.sum(weight * 2)


# Two ranks have the same seed if and only if they have the same coordinates along the dims.
def test_seeds_differ_with_coordinates():
    got = []
    for rank in range(8):
        with fake_world(8, rank), HyperCommGrid("tp=2,dp=2,pp=2") as grid:
            named = [(), ("tp",), ("dp",), ("pp", "tp"), ("tp+pp",), ("tp", "dp", "pp")]
            got.append([grid.seed(7, *dims) for dims in named])
    dims = [(), ("tp",), ("dp",), ("tp", "pp"), ("tp", "pp"), ("tp", "dp", "pp")]
    for number, named in enumerate(dims):
        seeds = [seeds[number] for seeds in got]
        at = [
            dict(zip(NAMES, np.unravel_index(rank, SIZES, "F"), strict=True)) for rank in range(8)
        ]
        keys = [tuple(coords[dim] for dim in named) for coords in at]
        assert len(set(zip(keys, seeds, strict=True))) == len(set(keys)) == len(set(seeds))
        assert all(0 <= seed < 2**63 for seed in seeds)


# A seed is the same in every run and on every machine. numpy computes the expected value.
def test_seed_is_reproducible(monkeypatch):
    monkeypatch.setenv("RANK", "5")
    grid = HyperCommGrid("tp=2,dp=4", world_size=8)
    entropy = [1234, *b"tp=1,dp=2"]
    right = int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0]) >> 1
    assert grid.seed(1234, "dp", "tp") == right


# A fake world cannot sum, so sum() raises, except for a group of one rank.
def test_sum_in_a_fake_world_raises():
    with fake_world(8), HyperCommGrid("tp=2,dp=4,pp=1") as grid:
        for call in (
            lambda: grid["tp"].sum(3.0),
            lambda: grid["tp"].mean(3),
            grid["tp"].barrier,
        ):
            with pytest.raises(SimulationError, match="fake world"):
                call()
        assert grid["pp"].sum(3) == grid["pp"].mean(3) == 3
        grid["pp"].barrier()


# After destroy_process_group(), every call raises NotInitializedError.
def test_calls_after_torch_was_destroyed():
    with fake_world(8):
        grid = HyperCommGrid("tp=2,dp=4")
        dims = grid["tp"]
        grid.create_pg("tp")
        dist.destroy_process_group()
        for call in (
            lambda: dims.sum(1.0),
            dims.barrier,
            lambda: dims.group,
            lambda: grid.get_pg("tp"),
            lambda: grid.create_pg("dp"),
            lambda: grid.ensure_pg("tp"),
            lambda: grid.create_pgs(["dp"]),
            lambda: grid.device_mesh("tp"),
        ):
            with pytest.raises(NotInitializedError, match=r"hypercomm\.join"):
                call()


# The methods of a DeviceMesh work on a grid and its dims.
def test_device_mesh_methods():
    with fake_world(8, rank=5), HyperCommGrid("tp=2,dp=4") as grid:
        assert grid["dp"].size() == grid["dp"].size == 4
        assert grid.size() == grid["tp", "dp"].size() == 8
        assert grid["tp"].get_local_rank() == 1
        assert grid["tp"].get_group() is grid["tp"].group


# An int tensor of one element is accepted as a rank, a coordinate and a size, like a numpy int.
@pytest.mark.parametrize("rank", [torch.tensor(5), np.int64(5), torch.tensor([5])])
def test_int_tensors_are_accepted(rank):
    layout = RankLayout("tp=2,dp=4")
    assert layout.coords(rank) == {"tp": 1, "dp": 2}
    assert layout.groups("dp").of(rank) == (1, 3, 5, 7)
    assert layout.rank(tp=torch.tensor(1), dp=2) == 5
    assert layout.membership(rank, "tp").position == 1
    assert rank in layout
    assert RankLayout(tp=torch.tensor(2), dp=4) == layout


# If another thread reshapes the grid meanwhile, the group is one of the grid's new groups.
@pytest.mark.parametrize("of_edges", [False, True])
def test_reshape_while_a_group_is_created(of_edges, monkeypatch):
    real_key = GridDims._key
    with fake_world(8), HyperCommGrid("tp=2,dp=4") as grid:

        def key_after_reshape(dims, *args):
            monkeypatch.undo()
            grid.reshape("tp=4,dp=2")
            return real_key(dims, *args)

        monkeypatch.setattr(GridDims, "_key", key_after_reshape)
        group = grid.edges("dp").to_next if of_edges else grid["dp"].group
        assert grid.layout == RankLayout("tp=4,dp=2")
        assert dist.get_process_group_ranks(group) == [0, 4]
        assert grid.find(group) is not None
