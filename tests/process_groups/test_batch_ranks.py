"""Several groups in one call, and lazy connections, on real gloo processes."""

import os
import threading
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch.distributed as dist
from group_facts import all_reduce_of, registered, sum_over

from hypercomm import HyperCommGrid
from hypercomm.errors import PlanMismatchError
from hypercomm.testing import run_ranks

EVERY = ["tp", "cp", "dp", ["tp", "cp"], ["tp", "dp"], ["cp", "dp"], ["tp", "cp", "dp"]]


def sums_of_a_batch(lazy_init):
    """All-reduce over every group of a batch, with lazy connections or not; then all are gone."""
    before = registered()
    with HyperCommGrid([2, 2, 2], ["tp", "cp", "dp"], lazy_init=lazy_init) as grid:
        sums = [sum_over(group) for group in grid.create_pgs(EVERY)]
    return sums, registered() == before


# Every group of a batch carries an all-reduce, and all are gone with the grid.
@pytest.mark.parametrize("lazy_init", [None, True])
def test_a_batch_communicates(lazy_init):
    table = np.arange(8).reshape(2, 2, 2, order="F")
    axes = {"tp": 0, "cp": 1, "dp": 2}
    got = run_ranks(sums_of_a_batch, 8, args=(lazy_init,))
    for rank, (sums, is_clean) in enumerate(got):
        where = np.argwhere(table == rank)[0]
        expected = []
        for dims in EVERY:
            free = {axes[dim] for dim in ([dims] if isinstance(dims, str) else dims)}
            place = tuple(slice(None) if axis in free else where[axis] for axis in range(3))
            expected.append(sum(10 ** int(member) for member in table[place].ravel()))
        assert sums == expected
        assert is_clean


def local_mistake():
    """One rank's own code fails in a batch; then all ranks call alike, twice."""
    rank, grid, said = dist.get_rank(), HyperCommGrid([2], ["dp"]), []

    def fails(groups):
        if rank == 1 and not said:
            raise ValueError("a mistake of rank 1")
        return groups

    batch = [{"dims": "dp", "name": "x", "derive": fails}]
    for names in (["x"], ["x"], ["y"]):
        try:
            requests = [{**batch[0], "name": name} for name in names]
            groups = grid.create_pgs(requests, timeout=timedelta(seconds=2))
            said.append(sum_over(groups[0]))
        except (RuntimeError, ValueError) as error:
            said.append(type(error).__name__)
        dist.barrier()
    grid.destroy()
    return said


# A mistake on one rank alone fails that batch on all ranks, and the next ones are in step again.
@pytest.mark.full
def test_a_local_mistake():
    got = run_ranks(local_mistake, 2, timeout=60)
    assert got == [["CreationError", 11, 11], ["ValueError", 11, 11]]


# The rank that serves the store finds a difference, and ends: the others have heard of it.
def test_the_serving_rank_ends():
    def program():
        rank, grid = dist.get_rank(), HyperCommGrid("tp=2,dp=2")
        time.sleep(1.5 * (rank == 0))  # by now the others look only now and then
        with pytest.raises(PlanMismatchError, match="ranks differ at position 0"):
            grid.create_pgs(["dp"] if rank == 0 else ["tp"])
        if rank == 0:
            dist.destroy_process_group()

    run_ranks(program, 4, timeout=60)


def another_thread_meanwhile():
    """A thread creates groups of one rank, torch's and ours, while this one creates a batch.

    Groups of several ranks would wait for each other: a store serves one waiting thread at a time.
    """
    outcomes, rank = [], dist.get_rank()

    def other():
        for _ in range(20):
            group = dist.new_group([rank], use_local_synchronization=True)
            outcomes.append(group.size())
            dist.destroy_process_group(group)
            with HyperCommGrid([1], ["dp"], rank_offset=rank) as grid:
                outcomes.append(all_reduce_of(4, grid.create_pgs(["dp"])[0]))

    gloo = dist.distributed_c10d.ProcessGroupGloo
    thread = threading.Thread(target=other)
    thread.start()
    with HyperCommGrid([2], ["dp"], name="own") as grid:
        batch = [{"dims": "dp", "name": f"{position}"} for position in range(20)]
        sums = [sum_over(group) for group in grid.create_pgs(batch)]
        thread.join()
    return outcomes, sums, dist.distributed_c10d.ProcessGroupGloo is gloo


# Threads that create groups at the same time do not get in each other's way.
@pytest.mark.full
def test_another_thread_creates_meanwhile():
    assert (
        run_ranks(another_thread_meanwhile, 2, timeout=60) == [([1, 4] * 20, [11] * 20, True)] * 2
    )


def lazy_sockets():
    """How many sockets eager and lazy groups add when they are created, and lazy ones when used."""

    def sockets():
        return sum(file.is_socket() for file in Path("/proc/self/fd").iterdir())

    added, names = [], ("first", "second", "third")
    os.environ["TORCH_GLOO_LAZY_INIT"] = "0"
    for lazy_init in (False, True):
        before = sockets()
        with HyperCommGrid([4], ["dp"], lazy_init=lazy_init) as grid:
            groups = [grid.create_pg("dp", name=name) for name in names]
            added.append(sockets() - before)
            sums = [sum_over(group) for group in groups]
            used = sockets() - before
            dist.barrier()  # a peer that destroys its groups closes our sockets, too
    return added, used, sums, os.environ["TORCH_GLOO_LAZY_INIT"]


# Lazy groups have no connections until they are used, and leave the environment as it was.
def test_lazy_groups_connect_when_used():
    for (eager, lazy), used, sums, left in run_ranks(lazy_sockets, 4):
        assert eager >= 3 * 3  # each group connects each rank to three others
        assert lazy <= 6  # what each group listens at
        assert used > lazy
        assert sums == [1111] * 3
        assert left == "0"
