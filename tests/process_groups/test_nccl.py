"""Test NCCL with several ranks on one GPU. The tests run only where a GPU is found (-m gpu).

test_nccl_calls.py records the calls of NCCL without a GPU.
"""

import os
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from group_checks import all_reduce_of, registered, restart_world, store_of_world

from hypercomm import HyperCommGrid
from hypercomm.testing import run_ranks

ASLEEP_S = 20.0
"""NCCL takes seconds to start."""

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="NCCL needs a GPU"),
]

SUMS = {0: [11, 101], 1: [11, 1010], 2: [1100, 101], 3: [1100, 1010]}


def on_one_card(function, *args):
    """Run four ranks that NCCL treats as four hosts."""
    return run_ranks(function, 4, args=args, timeout=180)


def sum_over(group, device="cuda"):
    return all_reduce_of(10 ** dist.get_rank(), group, device)


def begin(backend="nccl", *, bound):
    """Initialise WORLD again with NCCL, which otherwise rejects two ranks of one host on a GPU."""
    host = f"host-{dist.get_rank()}"
    os.environ |= {"NCCL_HOSTID": host, "NCCL_SOCKET_IFNAME": "lo", "LOCAL_RANK": "0"}
    torch.cuda.set_device(0)
    options = {"device_id": torch.device("cuda", 0)} if bound else {}
    rank = restart_world(backend, timeout=timedelta(seconds=120), **options)
    sum_over(dist.group.WORLD)  # NCCL connects all ranks
    return rank


def sums_of_groups(bound, creation):
    """Return the sums over the groups of a grid, and whether destroying them leaves nothing."""
    begin(bound=bound)
    before = registered()
    with HyperCommGrid([2, 2], ["tp", "dp"], creation=creation) as grid:
        sums = [sum_over(group) for group in grid.create_pgs(["tp", "dp"])]
    is_clean = registered() == before
    dist.destroy_process_group()
    return sums, is_clean


# Every strategy creates groups whose sums are right, whether WORLD is bound to a device or not, and
# leaves nothing.
@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("creation", ["auto", "local", "enumerate"])
def test_groups_have_right_sums(bound, creation):
    for rank, (sums, is_clean) in enumerate(on_one_card(sums_of_groups, bound, creation)):
        assert sums == SUMS[rank]
        assert is_clean


def create_while_others_sleep(bound, lazy_init):
    """Create a group of ranks 2 and 3 and use the group, while the other ranks sleep."""
    rank = begin(bound=bound)
    start = time.monotonic()
    total = None
    grid = None
    if rank >= 2:
        grid = HyperCommGrid([2], ["tp"], rank_offset=2, lazy_init=lazy_init)
        total = sum_over(grid.create_pg("tp"))
    else:
        time.sleep(ASLEEP_S)
    took_s = time.monotonic() - start
    every = sum_over(dist.group.WORLD)
    if grid is not None:
        grid.destroy()
    dist.destroy_process_group()
    return total, took_s, every


# The ranks of a grid at an offset create their group while the ranks outside the grid sleep.
@pytest.mark.parametrize("bound", [False, True])
@pytest.mark.parametrize("lazy_init", [None, True, False])
def test_creation_does_not_wait_for_other_ranks(bound, lazy_init):
    got = on_one_card(create_while_others_sleep, bound, lazy_init)
    for rank, (total, took_s, every) in enumerate(got):
        assert total == (1100 if rank >= 2 else None)
        assert every == 1111
        assert rank < 2 or took_s < ASLEEP_S


def mixed():
    """Sum on the CPU and the GPU over groups with both backends of WORLD, or with one backend."""
    begin("cpu:gloo,cuda:nccl", bound=True)
    with HyperCommGrid([2, 2], ["tp", "dp"]) as grid:
        both = grid.create_pg("dp", name="both")
        nccl = grid.create_pg("dp", name="nccl", backend="nccl")
        gloo = grid.create_pg("dp", name="gloo", backend="gloo")
        found = {
            "both": [sum_over(both, "cpu"), sum_over(both)],
            "nccl": [None, sum_over(nccl)],
            "gloo": [sum_over(gloo, "cpu"), None],
        }
    dist.destroy_process_group()
    return found


# On a WORLD with gloo and NCCL, a group can have both backends or only one.
def test_mixed_world():
    for rank, found in enumerate(on_one_card(mixed)):
        own = [101, 1010][rank % 2]
        assert found == {"both": [own, own], "nccl": [None, own], "gloo": [own, None]}


def abort():
    """Start a collective that waits for rank 0 on all other ranks, and abort the grid there."""
    rank = begin(bound=True)
    store = store_of_world()
    before = registered()
    grid = HyperCommGrid([4], ["dp"])
    group = grid.create_pg("dp")
    sum_over(group)
    if rank == 0:
        store.wait([f"aborted by {other}" for other in range(1, 4)], timedelta(seconds=100))
        return 0.0, True, 0
    work = dist.all_reduce(torch.ones(1, device="cuda"), group=group, async_op=True)
    time.sleep(1)
    is_pending = not work.is_completed()
    start = time.monotonic()
    grid.abort()
    took_s = time.monotonic() - start
    left = len(registered() - before)
    store.set(f"aborted by {rank}", "1")
    return took_s, is_pending, left


# abort() ends a grid while a collective waits for a rank that never joins.
def test_abort_during_a_collective():
    for took_s, was_pending, left in on_one_card(abort)[1:]:
        assert was_pending
        assert took_s < 10
        assert left == 0
