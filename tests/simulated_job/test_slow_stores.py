"""Test that a store which is slow or silent for a while makes no later call fail."""

import itertools
import math

import pytest
import torch.distributed as dist

from hypercomm import HyperCommGrid
from simulated_job.cases import GRACE_S, T
from simulated_job.job import (
    Fault,
    attempt,
    gate,
    interrupt_in,
    mark,
    simulate_job,
    sleep,
    this_rank,
)

LATE_S = 1.0
"""The delay of the last rank, in seconds. Meanwhile, the other ranks publish that they wait."""

SILENT_S = T + LATE_S + 2.5

EVERY = itertools.product([0, 2], [True, False])

OWN_ERRORS = {
    "",
    "CreationError",
    "GroupCreationTimeout",
    "LateRankError",
    "OutcomeUnknownError",
}


# At one request, one rank or all ranks wait for a reply of the store, so that the call may time
# out. Every request is tried. Once the store replies again, no rank appears to wait in the failed
# call. Therefore the next call succeeds, with the same or another name, even if ranks arrive one by
# one.
@pytest.mark.parametrize(
    ("last", "lazily", "step"),
    [
        (0, True, 3),
        *(pytest.param(last, lazily, 1, marks=pytest.mark.slow) for last, lazily in EVERY),
    ],
)
@pytest.mark.parametrize("next_name", ["other", "same"])
@pytest.mark.parametrize("kind", ["waits for a request", "waits for a reply", "is cut off"])
def test_calls_after_a_slow_store_succeed(kind, next_name, last, lazily, step):
    def program():
        rank = dist.get_rank()
        grid = HyperCommGrid([3], ["tp"], lazy_init=lazily)
        sleep(LATE_S if rank == 2 else 0.0)
        mark()
        attempt(grid.create_pg, "tp", name="same")
        this_rank().points = -math.inf
        gate("all have failed")
        sleep(SILENT_S + 0.5 * abs(2 - last - rank))
        if len(grid.pgs) > 0:
            grid.destroy_pg("tp", name="same")
        attempt(grid.create_pg, "tp", name=next_name)
        return grid

    happened = timed_out = 0
    for rank in range(3):
        for at in range(1, 60, step):
            fault = Fault(rank, at, kind, SILENT_S)
            job = simulate_job(program, 3, seed=at, faults=[fault], timeout_s=T)
            if not job.happened:
                break
            happened += 1
            timed_out += "" not in job.kinds(0)
            assert job.is_stuck == "", (fault, job)
            for call in job.calls(0):
                assert call.took_s < T + GRACE_S, (fault, job)
                assert call.kind in OWN_ERRORS, (fault, job)
                assert {*getattr(call.error, "missing", ())} <= {rank, 2}, (fault, job)
            assert job.kinds(1) == [""] * 3, (fault, job)
    assert happened > 2
    assert timed_out > 0


# A rank with a wrong argument ends the call of the other ranks, but the store replies late to this
# rank. Meanwhile the rank has begun its next call. This call succeeds, unless the store has already
# performed the request whose reply was late.
@pytest.mark.parametrize("kind", ["waits for a request", "waits for a reply"])
def test_a_refusal_that_is_late(kind):
    def program():
        rank, grid = this_rank(), HyperCommGrid([3], ["tp"])
        grid.verify()
        gate("all have verified")
        if rank.number == 0:
            mark()
            attempt(grid.create_pgs, ["pp"])
            rank.points, rank.link = -math.inf, None
        else:
            sleep(4.0)
        return attempt(grid.verify).kind

    late = at = 0
    happened = True
    while happened:
        at += 1
        fault = Fault(0, at, kind, 3.0)
        job = simulate_job(program, 3, seed=at, faults=[fault], timeout_s=T)
        happened = job.happened
        refusal = job.ranks[0].calls[0]
        assert refusal.kind == "UnknownDimError", job
        if refusal.took_s > 1.0:
            late += 1
            was_performed = kind == "waits for a reply" and at > 1
            ended = ["GroupCreationTimeout", *["CreationError"] * 2] if was_performed else [""] * 3
            assert job.values() == ended, (at, job)
    assert late > 0


# The store is silent for all ranks. A rank is interrupted, and begins its next call before the
# store replies again. This call succeeds.
@pytest.mark.parametrize("seed", range(8))
def test_an_interrupt_that_is_late(seed):
    def program():
        rank, grid = this_rank(), HyperCommGrid([3], ["tp"])
        grid.verify()
        gate("all have verified")
        if rank.number == 0:
            mark()
            interrupt_in(1.0)
            attempt(grid.verify)
        else:
            sleep(6.0)
        return attempt(grid.verify).kind

    fault = Fault(0, 1, "is cut off", 5.0)
    job = simulate_job(program, 3, seed=seed, faults=[fault], timeout_s=T)
    assert job.ranks[0].calls[0].kind == "KeyboardInterrupt", job
    assert job.values() == [""] * 3, job
