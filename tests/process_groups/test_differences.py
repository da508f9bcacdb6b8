"""How two plans differ, in words: that first, and no more."""

import logging
import re
from datetime import timedelta

import pytest
import torch.distributed as dist
from hypercomm.process_groups.agreement.meeting import (
    Said,
    as_entry,
    differ_from,
    seen_elsewhere,
    seen_here,
)
from simulated_job import attempt, simulate_job

from hypercomm import HyperCommGrid

TP = as_entry("tp over g", {"backend": "gloo", "timeout": "0:00:20", "share": "never"})
LATER = TP.replace("20", "21")
OTHER = as_entry("dp over g", {"backend": "gloo"})
CURE = "every rank must make the same calls, in one order"


def words(mine, theirs, position=0):
    return differ_from(position)(Said(1, "b", tuple(theirs)), Said(0, "a", tuple(mine)))


@pytest.mark.parametrize(
    ("mine", "theirs", "said"),
    [
        ([TP], [TP], None),
        (
            [TP, TP],
            [TP, LATER],
            (
                "timeout: 0:00:20 on rank 0 (host a), 0:00:21 on rank 1 (host b), which came "
                f"first; ranks differ in what they create at position 4, tp over g; {CURE}"
            ),
        ),
        (
            [TP],
            [LATER.replace("gloo", "nccl")],
            (
                "backend: gloo on rank 0 (host a), nccl on rank 1 (host b); timeout: 0:00:20 on "
                "rank 0 (host a), 0:00:21 on rank 1 (host b), which came first; ranks differ in "
                f"what they create at position 3, tp over g; {CURE}"
            ),
        ),
        (
            [TP],
            [OTHER],
            (
                "ranks differ in what they create at position 3: rank 0 (host a) creates tp over "
                f"g, but rank 1 (host b), which came first, creates dp over g; {CURE}"
            ),
        ),
        (
            [TP],
            [],
            (
                "ranks differ in what they create at position 3: rank 0 (host a) creates tp over "
                f"g, but rank 1 (host b), which came first, creates nothing more; {CURE}"
            ),
        ),
    ],
)
def test_words(mine, theirs, said):
    assert words(mine, theirs, 3) == said


# Each rank reads of itself that it is here, and no other does: rank 1 is not rank 11.
def test_here():
    told = "timeout: 1 on rank 1 (host a), 2 on rank 11 (host b), which came first"
    here = [seen_here(told, rank) for rank in (1, 11, 111)]
    assert here == [
        "timeout: 1 here (rank 1, host a), 2 on rank 11 (host b), which came first",
        "timeout: 1 on rank 1 (host a), 2 here (rank 11, host b), which came first",
        told,
    ]
    assert {seen_elsewhere(one) for one in here} == {told}


def program():
    grid = HyperCommGrid([2, 2], ["tp", "dp"])
    timeout = timedelta(seconds=20 + (dist.get_rank() == 2))
    attempt(grid.create_pgs, [{"dims": "tp", "timeout": timeout}, "dp"])
    return grid


# The sentence has what differs; the log of each rank has its whole plan.
def test_the_log_has_all(caplog):
    with caplog.at_level(logging.INFO, "hypercomm.process_groups.agreement"):
        run = simulate_job(program, 4)
    for rank, call in enumerate(run.calls(0)):
        assert re.match(r"timeout: 0:00:2[01] ", str(call.error)), run
        assert f"here (rank {rank}, " in str(call.error) or rank != 2
    logged = [record.getMessage() for record in caplog.records]
    assert sum("position 0: tp over" in line for line in logged) == 4
    assert sum("timeout: 0:00:21; pg_options" in line for line in logged) == 1
    assert sum("position 1: dp over" in line for line in logged) == 4
