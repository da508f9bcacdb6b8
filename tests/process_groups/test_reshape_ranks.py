"""Test reshape on real gloo processes. The sum over a group shows which ranks took part."""

import contextlib
import time
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from group_checks import sum_over
from numpy_oracle import group_of
from time_limits import scaled_s
from torch.distributed.tensor import DTensor, Shard

from hypercomm import GridSet, HyperCommGrid
from hypercomm.errors import CreationError
from hypercomm.process_groups import torch_internals as torchdist
from hypercomm.testing import registered_groups

START, OTHER = "tp=2,cp=2,dp=2", "tp=4,dp=2"
KEYS = [("tp",), ("cp",), ("dp",), ("tp", "cp"), ("cp", "dp"), ("tp", "cp", "dp")]
ERROR = ZeroDivisionError("on purpose")
LIMIT = timedelta(seconds=3)


def numpy_sums(layout, keys):
    """Return the sum of 10**member over each group of this rank, by dims, computed with numpy."""
    sizes = {name: int(size) for name, size in (part.split("=") for part in layout.split(","))}
    place = [*sizes.values()], [*sizes], 0
    groups = {dims: group_of(*place, dims, dist.get_rank()) for dims in keys if {*dims} <= {*sizes}}
    return {dims: sum(10**member for member in group) for dims, group in groups.items()}


def sums(grid):
    """Return the sum over each group of a grid, by the dims of its key."""
    return {key.dims: sum_over(group) for key, group in grid.pgs.items() if group is not None}


# Reshape to another layout and back, twice. After each reshape, every key sums over the ranks that
# numpy finds, and kept groups are the same objects. This is tested with and without verify, and
# with one call for each group or one call for all groups.
@pytest.mark.parametrize(
    ("verify", "batched"), [(False, True), pytest.param(True, False, marks=pytest.mark.full)]
)
@pytest.mark.ranks(8, timeout=180)
def test_reshape_there_and_back(verify, batched):
    # tp has the ranks of tp+cp; dp keeps its ranks: (0, 4), (1, 5), ...
    survivors = {OTHER: {("tp",): ("tp", "cp"), ("dp",): ("dp",)}, START: {("dp",): ("dp",)}}
    with HyperCommGrid(START, verify=verify) as grid:
        if batched:
            grid.create_pgs(KEYS)
        else:
            for dims in KEYS:
                grid.create_pg(dims)
        for target in (OTHER, START) * 2:
            before = dict(grid.pgs)
            result = grid.reshape(target)
            assert str(grid.layout) == target
            assert {new.dims: old.dims for new, old in result.kept} == survivors[target]
            assert all(grid.pgs[new] is before[old] for new, old in result.kept)
            assert sums(grid) == numpy_sums(target, [key.dims for key in grid.pgs])
            grid.verify()
            if target == START:
                grid.create_pgs([dims for dims in KEYS if "cp" in dims])  # reshape() destroyed them
        assert sums(grid) == numpy_sums(START, KEYS)
    assert registered_groups() == {dist.group.WORLD}


# ---- a rank that fails --------------------------------------------------------------------------


# If one rank fails in the creation, it raises its error. Ranks that have created their groups raise
# and name this rank, and a rank that waits for it inside torch raises at the timeout of the group.
# No group is lost or added, and a retry succeeds. One key uses a group of another grid. A
# reshape that fails does not destroy this group. A reshape that succeeds uses the group, and the
# other grid keeps the group.
@pytest.mark.full
@pytest.mark.ranks(4)
def test_failed_reshape_changes_nothing():
    sizes = {"lender": "tp=2,dp=2", "grid": "tp=2,dp=2"}
    with GridSet(sizes, share="identical") as grids:
        lender, grid = grids.values()
        lent = lender.create_pg(["tp", "dp"], timeout=LIMIT)
        with grid:
            ends = {"derive": lambda groups: groups.pick(lambda ranks: (ranks[0], ranks[-1]))}
            grid.create_pgs(["tp", {"dims": "tp", "name": "ends", **ends}], timeout=LIMIT)
            is_here = dist.get_rank() == 0
            before = dict(grid.pgs)
            begin = time.monotonic()
            dist.barrier()  # a rank that still waits in create_pgs would raise there
            fails = mock.patch.object(torchdist, "new_group", side_effect=ERROR)
            with (
                fails if is_here else contextlib.nullcontext(),
                pytest.raises(ZeroDivisionError if is_here else CreationError) as caught,
            ):
                grid.reshape("tp=4,dp=1")
            assert time.monotonic() - begin < scaled_s(8)
            reason = "ranks had arrived" if dist.get_rank() == 3 else "rank 0 (host"
            assert is_here or reason in str(caught.value)
            dist.barrier()
            assert [*grid.pgs.items()] == [*before.items()]
            assert registered_groups() == {dist.group.WORLD, lent, *filter(None, before.values())}
            assert sum_over(lent) == 1111
            grid.destroy_pg("tp", name="ends")
            grid.reshape("tp=4,dp=1")
            assert str(grid.explain("tp").served_by) == "another grid"
            assert grid.get_pg("tp") is lent
            grid.reshape("tp=2,dp=2")
        assert sum_over(lent) == 1111


# DTensor has a cache of meshes in each thread. After two reshapes, the new mesh equals a cached
# mesh whose groups have ended. DTensor uses the groups of the new mesh.
@pytest.mark.ranks(2)
def test_dtensors_after_two_reshapes():
    grid = HyperCommGrid("tp=2")

    def whole():
        mesh = grid.device_mesh()
        own = torch.full((1,), float(dist.get_rank()))
        sharded = DTensor.from_local(own, mesh, [Shard(0)])
        return (sharded + sharded).full_tensor().tolist()  # torch caches the mesh of the sum

    assert whole() == [0.0, 2.0]
    for target in ("dp=2", "tp=2"):
        grid.reshape(target)
    assert whole() == [0.0, 2.0]
