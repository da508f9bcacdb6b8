"""Several groups in one call, and lazy connections, on real gloo processes."""

import json
import signal
import socket
import time

import numpy as np
import pytest
import torch.distributed as dist
from busy import late_s
from ranks import batch_ranks
from ranks.mortal_ranks import exit_codes

from hypercomm import HyperCommGrid
from hypercomm.errors import PlanMismatchError
from hypercomm.testing import run_ranks

HOST = socket.gethostname()


# Every group of a batch carries an all-reduce, and all are gone with the grid.
@pytest.mark.parametrize("lazy_init", [None, True])
def test_a_batch_communicates(lazy_init):
    table = np.arange(8).reshape(2, 2, 2, order="F")
    axes = {"tp": 0, "cp": 1, "dp": 2}
    got = run_ranks(batch_ranks.sums_of_a_batch, 8, args=(lazy_init,))
    for rank, (sums, is_clean) in enumerate(got):
        where = np.argwhere(table == rank)[0]
        expected = []
        for dims in batch_ranks.EVERY:
            free = {axes[dim] for dim in ([dims] if isinstance(dims, str) else dims)}
            place = tuple(slice(None) if axis in free else where[axis] for axis in range(3))
            expected.append(sum(10 ** int(member) for member in table[place].ravel()))
        assert sums == expected
        assert is_clean


# A rank whose list differs says so at once, with the place; the others end before the timeout with
# the same words, and all of them can try again.
def test_a_rank_that_differs():
    got = run_ranks(batch_ranks.one_rank_differs, 4, timeout=90)
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


# A mistake on one rank alone fails that batch on all ranks, and the next ones are in step again.
@pytest.mark.long
def test_a_local_mistake():
    got = run_ranks(batch_ranks.local_mistake, 2, timeout=60)
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


# Groups that differ where no text shows them differ all the same.
def test_members_that_differ_far_inside():
    got = run_ranks(batch_ranks.other_members, 8, timeout=60)
    told = [rank for rank, said in enumerate(got) if said is not None]
    assert told in ([4], [*range(8)])  # the others need rank 4 only if it came first
    for rank in told:
        assert got[rank].startswith("PlanMismatchError: ")
        assert "ranks differ at position 0" in got[rank]


# What is no plan of ours, where plans are compared, is an error that names the key.
def test_a_foreign_value():
    for said, total in run_ranks(batch_ranks.foreign_value, 2):
        assert len(said) == 4
        for words in said:
            assert "/calls' holds" in words
            assert "hypercomm did not write" in words
        assert total == 11


# A rank killed in the middle of a batch: each other ends with an error within the timeout and
# two seconds, names it if it waited for it, and has nothing left.
@pytest.mark.long
def test_a_rank_that_dies(tmp_path, timeout_s):
    codes = exit_codes(batch_ranks.dies_in_a_batch, 4, str(tmp_path), timeout_s)
    assert codes == [0, 0, -signal.SIGKILL, 0]
    for rank in (0, 1, 3):
        said, waited, is_clean, left = json.loads((tmp_path / f"{rank}.json").read_text())
        assert said.startswith("GroupCreationTimeout: create_pgs(): timed out: rank 2 (tp=0, dp=1)")
        assert waited < timeout_s + late_s(2)
        assert is_clean
        assert left == 0


# Threads that create groups at the same time do not get in each other's way.
def test_another_thread_creates_meanwhile():
    assert (
        run_ranks(batch_ranks.another_thread_meanwhile, 2, timeout=60)
        == [([1, 4] * 20, [11] * 20, True)] * 2
    )


# Lazy groups have no connections until they are used, and leave the environment as it was.
def test_lazy_groups_connect_when_used():
    for (eager, lazy), used, sums, left in run_ranks(batch_ranks.lazy_sockets, 4):
        assert eager >= 3 * 3  # each group connects each rank to three others
        assert lazy <= 6  # what each group listens at
        assert used > lazy
        assert sums == [1111] * 3
        assert left == "0"


# Created, used and destroyed at once, again and again: nothing breaks, and nothing is left.
@pytest.mark.long
def test_lazy_cycles():
    assert run_ranks(batch_ranks.lazy_cycles, 4, args=(40,), timeout=120) == [(120, 1)] * 4
