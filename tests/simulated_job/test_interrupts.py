"""Test that after Ctrl-C at any moment of a creation, all ranks have the group, or none has."""

import sys
from datetime import timedelta
from pathlib import Path
from unittest import mock

import torch.distributed as dist
from hypercomm.process_groups.agreement.system import system

from hypercomm import HyperCommGrid
from simulated_job.job import Fault, attempt, mark, simulate_job, this_rank

FILES = {"creation.py", "driver.py", "grid.py", "protocol.py", "reshape.py", "table.py"}


def create(profile=None):
    """Create a group of all ranks, and return the grid and its keys on this rank."""
    grid = HyperCommGrid("tp=2")
    sys.setprofile(profile)
    attempt(grid.create_pg, "tp", timeout=timedelta(seconds=5))
    sys.setprofile(None)
    return grid, [*grid.pgs]


def check_all_or_none(job):
    """Check that the group is in the grid and in torch on both ranks, or on neither."""
    keys = [rank.value[1] for rank in job.ranks]
    names = [[group.name for group in rank.held] for rank in job.ranks]
    assert keys[0] == keys[1], job
    assert names[0] == names[1], job
    assert len(keys[0]) == len(names[0]), job


def interrupt_at(number):
    """Return a profile function that raises KeyboardInterrupt in the call with this number."""
    seen = 0

    def profile(frame, event, _argument):
        nonlocal seen
        code = frame.f_code
        is_counted = Path(code.co_filename).name in FILES and "<genexpr>" not in code.co_name
        if event == "call" and is_counted:
            seen += 1
            if seen == number:
                raise KeyboardInterrupt

    return profile


# Python may raise KeyboardInterrupt whenever the main thread calls a function.
def test_an_interrupt_at_each_call_of_the_main_thread():
    def program(number):
        return create(None if dist.get_rank() else interrupt_at(number))

    number = 0
    kinds = ["KeyboardInterrupt"]
    while kinds == ["KeyboardInterrupt"]:
        number += 1
        job = simulate_job(program, 2, args=(number,), seed=number)
        check_all_or_none(job)
        kinds = job.kinds(0)[:1]
    assert number > 20


# The second interrupt is raised when the driver of the call reads the clock while it handles the
# first interrupt.
def test_an_interrupt_while_another_one_is_handled():
    def program():
        rank, now = this_rank(), system.now
        left = ["second"]

        def interrupted_now():
            job = rank.job
            if job.happened and job.scheduler.current is rank.main and left:
                left.clear()
                raise KeyboardInterrupt
            return now()

        if rank.number > 0:
            return create()
        mark()
        with mock.patch.object(system, "now", interrupted_now):
            return create()

    step = 0
    happened = True
    while happened:
        step += 1
        job = simulate_job(program, 2, seed=step, faults=[Fault(0, step, "is interrupted")])
        check_all_or_none(job)
        happened = job.happened
    assert step > 10


# If a rank is interrupted during a reshape, both ranks have the same layout and keys. An old group
# may stay in torch on this rank if the interrupt stops the destruction of the old groups.
def test_an_interrupt_at_each_call_of_a_reshape():
    def program(number):
        grid = HyperCommGrid("tp=2,dp=1")
        group = grid.create_pg("tp")
        sys.setprofile(None if dist.get_rank() else interrupt_at(number))
        attempt(grid.reshape, "dp=2,tp=1", timeout=timedelta(seconds=5))
        sys.setprofile(None)
        return grid, str(grid.layout), [str(key) for key in grid.pgs], group

    number = 0
    kinds = ["KeyboardInterrupt"]
    layouts = set()
    while kinds == ["KeyboardInterrupt"]:
        number += 1
        job = simulate_job(program, 2, args=(number,), seed=number)
        first, second = (rank.value[1:3] for rank in job.ranks)
        assert first == second, (number, job)
        assert len(job.ranks[1].held) == 1, (number, job)
        layouts.add(first[0])
        kinds = job.kinds(0)[:1]
    assert layouts == {"tp=2,dp=1", "dp=2,tp=1"}
    assert number > 20
