"""Several groups in one call, and lazy connections, on real gloo processes."""

import json
import os
import signal
import socket
import threading
import time
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from busy import late_s
from group_facts import all_reduce_of, registered, sum_over
from mortal_ranks import exit_codes

from hypercomm import HyperCommGrid
from hypercomm.testing import run_ranks

EVERY = ["tp", "cp", "dp", ["tp", "cp"], ["tp", "dp"], ["cp", "dp"], ["tp", "cp", "dp"]]

HOST = socket.gethostname()


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


def one_rank_differs():
    """Rank 3 asks for the same groups in another order; then all ask alike."""
    rank, before = dist.get_rank(), registered()
    grid = HyperCommGrid([2, 2], ["tp", "dp"])
    batch = ["tp", "dp", ["tp", "dp"]]
    said, begin = None, time.monotonic()
    if rank == 3:
        time.sleep(0.5)  # comes after the others
    try:
        grid.create_pgs(batch[::-1] if rank == 3 else batch, timeout=timedelta(seconds=30))
    except RuntimeError as error:
        said = f"{type(error).__name__}: {error}"
    waited, clean = time.monotonic() - begin, registered() == before and not grid.pgs
    dist.barrier()
    with grid:
        return said, waited, clean, [sum_over(group) for group in grid.create_pgs(batch)]


# A rank whose list differs says so at once, with the place; the others end before the timeout with
# the same words, and all of them can try again.
def test_a_rank_that_differs():
    got = run_ranks(one_rank_differs, 4, timeout=90)
    tp, dp = {0: 11, 1: 11, 2: 1100, 3: 1100}, {0: 101, 1: 1010, 2: 101, 3: 1010}
    for rank, (said, waited, is_clean, sums) in enumerate(got):
        assert is_clean
        assert sums == [tp[rank], dp[rank], 1111]
        assert said.startswith(
            "PlanMismatchError: create_pgs(): ranks differ at position 0: rank 3 "
        )
        assert "tp+dp over <1 groups of 4" in said
        assert "tp over <2 groups of 2" in said
        assert waited < late_s(2)  # not the 30 s of the timeout


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


def other_members():
    """One rank derives groups that differ far inside."""
    rank, grid = dist.get_rank(), HyperCommGrid([8], ["dp"])
    left_out = 5 if rank == 4 else 4

    def most(groups):
        return groups.pick(lambda ranks: tuple(r for r in ranks if r != left_out))

    try:
        request = {"dims": "dp", "name": "most", "derive": most}
        grid.create_pgs([request], timeout=timedelta(seconds=3))
    except RuntimeError as error:
        return f"{type(error).__name__}: {error}"
    return None


# Groups that differ where no text shows them differ all the same.
def test_members_that_differ_far_inside():
    got = run_ranks(other_members, 8, timeout=60)
    told = [rank for rank, said in enumerate(got) if said is not None]
    assert told in ([4], [*range(8)])  # the others need rank 4 only if it came first
    for rank in told:
        assert got[rank].startswith("PlanMismatchError: ")
        assert "ranks differ at position 0" in got[rank]


def foreign_value():
    """Something else has written where a batch is compared."""
    store = dist.distributed_c10d._get_default_store()
    grid = HyperCommGrid([2], ["dp"])
    name = grid.create_pg("dp").group_name.rpartition("/dp/")[0]
    said, place = [], f"{name}/calls"
    for value in ["{", "[]", '{"rank": "x", "plan": []}', '{"rank": 0}']:
        store.set(place, value)
        dist.barrier()
        try:
            grid.create_pgs([{"dims": "dp", "name": "twin"}])
        except RuntimeError as error:
            said.append(str(error))
        dist.barrier()
    store.delete_key(place)
    dist.barrier()
    with grid:
        (twin,) = grid.create_pgs([{"dims": "dp", "name": "twin"}])
        return said, sum_over(twin)


# What is no plan of ours, where plans are compared, is an error that names the key.
def test_a_foreign_value():
    for said, total in run_ranks(foreign_value, 2):
        assert len(said) == 4
        for words in said:
            assert "/calls' holds" in words
            assert "hypercomm did not write" in words
        assert total == 11


def dies_in_a_batch(rank, port, folder, timeout_s):
    """Create a batch on four ranks, where rank 2 is killed after its first group."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
    before = registered()
    grid = HyperCommGrid([2, 2], ["tp", "dp"])
    if rank == 2:
        helper = dist.distributed_c10d._new_process_group_helper

        def dying(*args, **kwargs):
            if kwargs["group_name"].endswith("/1"):
                return helper(*args, **kwargs)
            os.kill(os.getpid(), signal.SIGKILL)
            return None

        dying.__wrapped__ = helper  # keeps the signature, which is probed
        dist.distributed_c10d._new_process_group_helper = dying
    said, begin = None, time.monotonic()
    try:
        grid.create_pgs(["tp", "dp", ["tp", "dp"]], timeout=timedelta(seconds=timeout_s))
    except RuntimeError as error:
        said = f"{type(error).__name__}: {error}"
    told = [said, time.monotonic() - begin, registered() == before, len(grid.pgs)]
    Path(folder, f"{rank}.json").write_text(json.dumps(told))
    os._exit(0)  # the world is broken: nobody waits for it


# A rank killed in the middle of a batch: each other ends with an error within the timeout and
# two seconds, names it if it waited for it, and has nothing left.
@pytest.mark.full
def test_a_rank_that_dies(tmp_path, timeout_s):
    codes = exit_codes(dies_in_a_batch, 4, str(tmp_path), timeout_s)
    assert codes == [0, 0, -signal.SIGKILL, 0]
    for rank in (0, 1, 3):
        said, waited, is_clean, left = json.loads((tmp_path / f"{rank}.json").read_text())
        assert said.startswith("GroupCreationTimeout: create_pgs(): timed out: rank 2 (tp=0, dp=1)")
        assert waited < timeout_s + late_s(2)
        assert is_clean
        assert left == 0


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


def lazy_cycles(count):
    """Create lazily, communicate in every way, and destroy at once."""
    rank, right = dist.get_rank(), 0
    for _ in range(count):
        with HyperCommGrid([2, 2], ["tp", "dp"], lazy_init=True) as grid:
            tp, both = grid.create_pgs(["tp", ["tp", "dp"]])
            right += sum_over(both) == 1111
            parts = [torch.empty(1) for _ in range(2)]
            dist.all_gather(parts, torch.tensor([float(rank)]), group=tp)
            right += [int(part) for part in parts] == [rank - rank % 2, rank - rank % 2 + 1]
            value = torch.tensor([float(rank)])
            dist.broadcast(value, src=3, group=both)
            right += int(value) == 3
    return right, len(registered())


# Created, used and destroyed at once, again and again: nothing breaks, and nothing is left.
@pytest.mark.full
def test_lazy_cycles():
    assert run_ranks(lazy_cycles, 4, args=(40,), timeout=120) == [(120, 1)] * 4
