"""Tests a fault of one rank at every step of every call, and random programs with a mistake."""

import itertools
import random

import pytest

from simulated_job.cases import CASES, T, broken, broken_by_fault, points_of, program
from simulated_job.job import Fault, simulate_job
from simulated_job.programs import Program, broken_by

FAULTS = [
    ("dies", 0.0),
    ("is interrupted", 0.0),
    ("loses a request", 0.0),
    ("loses a reply", 0.0),
    *[("pauses", seconds) for seconds in (T - 0.5, T, T + 0.5, 3 * T)],
]


def check(case, seed, rank, at, kind, seconds):
    fault = Fault(rank, at, kind, seconds)
    job = simulate_job(
        program, CASES[case].size, args=(case,), seed=seed, faults=[fault], timeout_s=T
    )
    assert broken_by_fault(job, case) == [], (seed, job)


# Interrupts of join_world and rejoin are left out. If a rank is interrupted after all ranks have
# joined, this rank has no world, but the other ranks have one.
PAIRS = [
    (case, fault)
    for case, fault in itertools.product(CASES, FAULTS)
    if case not in {"join_world", "rejoin"} or fault[0] != "is interrupted"
]


# After any fault of one rank, the other ranks have the same outcome in time. Errors name only the
# rank that had the fault. A failed call leaves nothing behind, and one retry by all ranks succeeds.
@pytest.mark.parametrize("case", CASES)
def test_sample_of_faults(case):
    drawn = random.Random(case)
    points = points_of(case)
    faults = [fault for one, fault in PAIRS if one == case]
    for seed in range(12):
        rank = drawn.randrange(CASES[case].size)
        at = drawn.randint(1, points)
        check(case, seed, rank, at, *faults[seed % len(faults)])


@pytest.mark.slow
@pytest.mark.parametrize(("case", "fault"), PAIRS, ids=str)
def test_every_fault(case, fault):
    points = points_of(case)
    for rank, at in itertools.product(range(CASES[case].size), range(1, points + 4)):
        check(case, 31 * at + rank, rank, at, *fault)


# Without a fault, every call succeeds on all ranks, in any schedule.
@pytest.mark.parametrize("case", CASES)
def test_calls_without_a_fault(case):
    for seed in range(5):
        job = simulate_job(program, CASES[case].size, args=(case,), seed=seed, timeout_s=T)
        assert broken(job) == [], job
        assert {*job.kinds(0)} == {""}, job


def check_program(seed, *, odd):
    drawn = Program.draw(seed, odd=odd)
    job = drawn.run(seed)
    assert broken_by(drawn, job) == [], (seed, drawn, job)


# Ranks that run the same program raise no error. If one rank makes a mistake, errors name no other
# rank. Collective calls have the same outcome on all ranks in time, and all ranks can continue.
@pytest.mark.full
@pytest.mark.parametrize("odd", [False, True])
def test_sample_of_programs(odd):
    for seed in range(30):
        check_program(seed, odd=odd)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 3000, 150))
def test_many_programs(first):
    for seed in range(first, first + 150):
        check_program(seed, odd=seed % 4 > 0)
