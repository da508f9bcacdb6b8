"""Test several groups in one call, and lazy connections, on real gloo processes."""

import os
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch.distributed as dist
from group_checks import left_over, sum_over, threads_and_files

from hypercomm import HyperCommGrid
from hypercomm.errors import GroupCreationTimeout, PlanMismatchError
from hypercomm.process_groups import torch_internals as torchdist


# If the rank that serves the store finds a difference and exits, the other ranks raise the same
# error.
@pytest.mark.full
@pytest.mark.ranks(4)
def test_serving_rank_exits_after_a_mismatch():
    rank = dist.get_rank()
    grid = HyperCommGrid("tp=2,dp=2")
    if rank == 0:
        time.sleep(1.5)  # after this time, the other ranks check the store only rarely
    with pytest.raises(PlanMismatchError, match="ranks differ at position 0"):
        grid.create_pgs(["dp"] if rank == 0 else ["tp"])
    if rank == 0:
        dist.destroy_process_group()


# Lazy groups open no connections until they are used, and do not change the environment.
@pytest.mark.ranks(4)
def test_lazy_groups_connect_when_used():
    def sockets():
        return sum(file.is_socket() for file in Path("/proc/self/fd").iterdir())

    os.environ["TORCH_GLOO_LAZY_INIT"] = "0"
    for lazy_init in (False, True):
        before = sockets()
        with HyperCommGrid([4], ["dp"], lazy_init=lazy_init) as grid:
            groups = [grid.create_pg("dp", name=name) for name in "abc"]
            created = sockets() - before
            # an eager group connects a rank to three others; a lazy group only listens
            assert created <= 6 if lazy_init else created >= 3 * 3
            assert [sum_over(group) for group in groups] == [1111] * 3
            assert sockets() - before > created or not lazy_init
            dist.barrier()  # a peer that destroys its groups closes our sockets, too
    assert os.environ["TORCH_GLOO_LAZY_INIT"] == "0"


# A group still works after another group of its call is destroyed. Once no member connects any
# more, destroyed groups and calls that fail leave no threads and no open files.
@pytest.mark.ranks(2)
def test_groups_of_one_call_leave_nothing():
    plan = [{"dims": "dp", "name": name} for name in "abcdefgh"]
    before = threads_and_files()
    with HyperCommGrid([2], ["dp"]) as grid:
        groups = grid.create_pgs(plan)
        grid.destroy_pg("dp", name="a")
        assert [sum_over(group) for group in groups[1:]] == [11] * 7
        groups.clear()
    dist.barrier()
    odd = {"dims": "dp", "timeout": timedelta(seconds=20 + dist.get_rank())}
    with HyperCommGrid([2], ["dp"]) as grid, pytest.raises(PlanMismatchError):
        grid.create_pgs([*plan, odd])
    dist.barrier()
    torchdist.release()
    assert left_over(before) == (0, 0)


# Enumeration needs every rank of the world, even if the grid leaves out a rank. All ranks agree on
# each call, so a call for several groups can follow a call for one group.
@pytest.mark.ranks(3)
def test_enumeration_by_a_grid_without_all_ranks():
    rank = dist.get_rank()
    grid = HyperCommGrid("tp=2", cover="any", creation="enumerate")
    several = grid.create_pgs(["tp", {"dims": "tp", "name": "b"}], timeout=timedelta(seconds=20))
    one = grid.create_pg("tp", name="c", timeout=timedelta(seconds=20))
    assert [sum_over(pg) for pg in (*several, one)] == [11 if rank < 2 else None] * 3
    if rank < 2:  # rank 2 does not make this call
        with pytest.raises(GroupCreationTimeout, match="rank 2"):
            grid.create_pgs([{"dims": "tp", "name": "d"}], timeout=timedelta(seconds=1))
