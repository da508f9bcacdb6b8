"""The simulated job: the same seed makes the same run, and what holds of runs holds of many."""

import gc
from datetime import timedelta

import pytest
import torch.distributed as dist
from effort import examples
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hypercomm import HyperCommGrid
from hypercomm.errors import SimulationError
from hypercomm.testing import simulate
from simulated_job import (
    AnswersLate,
    DelayedWrite,
    Dies,
    IsInterrupted,
    Pauses,
    StoreGoes,
    StoreIsSlow,
    attempt,
    draw_faults,
    gate,
    new_store,
    now,
    simulate_job,
    sleep,
    thread,
)
from simulated_job.invariants import (
    errors,
    keys_left,
    late_calls,
    partial_groups,
    partial_success,
    unlike_groups,
)
from simulated_job.programs import (
    Program,
    Step,
    accused,
    all_or_none,
    drawn,
    programs,
    run,
    violations,
)

USUAL = Program(
    4,
    (Step("create"), Step("batch", 1, ("tp", "dp")), Step("verify", 2), Step("reshape", 3)),
    verify=False,
)


def pairs():
    grid = HyperCommGrid([2, dist.get_world_size() // 2], ["tp", "dp"])
    group = grid.create_pg("tp")
    return dist.get_process_group_ranks(group), group.rank(), grid


# ---- one run ----------------------------------------------------------------------------------


# torch.distributed answers as on each rank, and after the run as it did before.
def test_ranks_are_apart():
    def program():
        before = dist.get_rank(), dist.get_world_size(), dist.get_backend()
        ranks, own, _ = pairs()
        return before, ranks, own

    values = simulate_job(program, 4).values()
    assert [before for before, *_ in values] == [(rank, 4, "gloo") for rank in range(4)]
    assert [(ranks, own) for _, ranks, own in values] == [
        ([0, 1], 0),
        ([0, 1], 1),
        ([2, 3], 0),
        ([2, 3], 1),
    ]
    assert not dist.is_initialized()


# The same arguments make the same run, whatever else has run before; another seed another one.
@pytest.mark.parametrize("schedule", ["random", "pct"])
def test_the_same_seed_makes_the_same_run(schedule):
    digests = {seed: run(USUAL, seed, schedule).digest for seed in range(12)}
    assert len(set(digests.values())) > 10
    for seed in reversed(range(12)):
        assert run(USUAL, seed, schedule).digest == digests[seed]


# The same with faults.
def test_the_same_faults_make_the_same_run():
    for seed in range(12):
        faults = draw_faults(seed, 4)
        assert run(USUAL, seed, faults=faults).digest == run(USUAL, seed, faults=faults).digest


# Time is virtual: ten minutes pass at once.
def test_virtual_time():
    def program():
        sleep(600.0)
        return now()

    assert simulate_job(program, 2).values() == [600.0, 600.0]


# A rank that does not come is named when the time is over, by all that wait for it.
def test_a_rank_that_does_not_come():
    def program():
        grid = HyperCommGrid([2, 2], ["tp", "dp"])
        if dist.get_rank() != 3:
            attempt(grid.create_pg, ["tp", "dp"])
        return grid

    job = simulate_job(program, 4, timeout=timedelta(seconds=5))
    assert [call.error.missing for call in job.calls(0)] == [(3,)] * 3
    assert all(5.0 <= call.took_s < 5.1 for call in job.calls(0))


# A run in a run is refused, as is what belongs into a program.
def test_what_is_refused():
    with pytest.raises(SimulationError, match="no job is simulated"):
        now()
    job = simulate_job(lambda: simulate_job(pairs, 2), 1)
    assert isinstance(job.ranks[0].error, SimulationError)
    with pytest.raises(SimulationError, match="rank 0 did not return"):
        job.values()


# Ranks that wait for each other for ever end the run, which says so.
def test_a_run_without_end_is_given_up():
    def polls():
        while True:
            sleep(0.1)

    job = simulate_job(lambda: gate(f"of rank {dist.get_rank()}"), 2)
    assert job.is_stuck == "all wait for each other, without end"
    assert simulate_job(polls, 2, most_steps=1000).is_stuck == "no end after 1,000 steps"


# A thread of a rank is one of that rank: it creates its groups, and locks keep it out.
def test_a_second_thread():
    def program():
        grid = HyperCommGrid([2], ["tp"])
        second = thread(lambda: attempt(grid.create_pg, "tp", name="second"))
        attempt(grid.create_pg, "tp")
        second.join()
        return sorted(map(str, grid.pgs)), grid

    for seed in range(10):
        values = simulate_job(program, 2, seed=seed).values()
        assert [keys for keys, _ in values] == [["tp", "tp (second)"]] * 2


# ---- faults -----------------------------------------------------------------------------------


# Whenever a rank dies, the others end in time, and hold no group that differs.
def test_a_rank_dies_anywhere():
    def program():
        grid = HyperCommGrid([3], ["tp"])
        attempt(grid.create_pg, "tp", timeout=timedelta(seconds=3))
        return grid

    points = simulate_job(program, 3).ranks[1].points
    for at in range(1, points + 1):
        job = simulate_job(program, 3, seed=at, faults=[Dies(1, at)])
        if not job.ranks[1].is_dead:
            continue  # it was done before
        assert unlike_groups(job) == late_calls(job, 3) == [], job


# Each fault does what it says.
def test_each_fault():
    def program():
        grid = HyperCommGrid([2], ["tp"])
        attempt(grid.create_pg, "tp", timeout=timedelta(seconds=3))
        return grid

    def ended(fault):
        return [call.kind for call in simulate_job(program, 2, faults=[fault]).calls(0)]

    assert ended(IsInterrupted(0, 4))[0] == "KeyboardInterrupt"
    assert "GroupCreationTimeout" in ended(Pauses(0, 4, seconds=5.0))
    assert ended(DelayedWrite(0, 1, seconds=1.0)) == ["", ""]
    assert ended(AnswersLate(0, 1, seconds=61.0))[0] == "DistNetworkError"
    assert ended(StoreIsSlow(0.0, 0.1)) == ["", ""]
    assert set(ended(StoreGoes(0.0))) == {"DistNetworkError"}


# A second job in one process, on the same store or on another one, and a restart on the old store.
@pytest.mark.parametrize("name", ["", "another"])
def test_other_jobs(name):
    def program():
        first = pairs()[0]
        gate("first")
        dist.destroy_process_group()
        dist.init_process_group("gloo", store=new_store(name))
        return first, pairs()[0]

    job = simulate_job(program, 4)
    assert job.values() == [([0, 1],) * 2] * 2 + [([2, 3],) * 2] * 2
    again = simulate_job(pairs, 4, store=job.store)
    assert unlike_groups(again) == partial_groups(again) == []


# ---- other tools ------------------------------------------------------------------------------


# `simulate`, which runs one rank after the other, gives the same verdict.
@pytest.mark.parametrize("odd", [None, 0, 3])
@pytest.mark.parametrize("deed", ["swaps", "skips"])
def test_simulate_says_the_same(odd, deed):
    def program():
        grid, order = HyperCommGrid([2, 2], ["tp", "dp"]), ["tp", ["tp", "dp"], "dp"]
        if dist.get_rank() == odd:
            order = order[::-1] if deed == "swaps" else order[1:]
        for dims in order:
            grid.create_pg(dims)
        return grid

    agree = not simulate(program, 4, backend="gloo").disagreements
    for seed in range(5):
        job = simulate_job(program, 4, seed=seed)
        assert (errors(job) == []) == agree == (odd is None), job


# ---- all schedules ----------------------------------------------------------------------------


# ---- many programs ----------------------------------------------------------------------------


many = settings(
    max_examples=examples(60),
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)


# Ranks that do the same, undisturbed, hear of no error, and hold the same groups.
@pytest.mark.any_torch
@pytest.mark.long
@many
@given(programs(), st.integers(0, 10**6))
def test_equal_programs(program, seed):
    for turn in range(8):
        check_equal(program, seed + turn)


def check_equal(program, seed):
    job = run(program, seed, ["random", "pct"][seed % 2])
    assert errors(job) == violations(job) == [], job
    assert all(end.can_go_on for end in job.values())


# Where one rank does otherwise, all end in time, nobody else is blamed, and all can go on.
@pytest.mark.any_torch
@pytest.mark.long
@many
@given(programs(odd=True), st.integers(0, 10**6))
def test_one_rank_does_otherwise(program, seed):
    for turn in range(8):
        check_odd(program, seed + turn)


def check_odd(program, seed):
    job = run(program, seed, ["random", "pct"][seed % 2])
    assert violations(job) == accused(program, job, program.culprits) == [], job
    assert all_or_none(program, job, but=program.culprits) == [], job
    assert all(end.can_go_on for end in job.values()), job


# Where one rank dies, pauses, is interrupted or cut off, anywhere, all end in time.
@pytest.mark.any_torch
@pytest.mark.long
@many
@given(programs(), st.integers(0, 10**6))
def test_one_rank_has_a_fault(program, seed):
    for turn in range(8):
        check_fault(program, seed + turn)


def check_fault(program, seed):
    faults = draw_faults(seed, program.ranks)
    job = run(program, seed, ["random", "pct"][seed % 2], faults)
    ranks = {fault.rank for fault in faults}
    assert violations(job, but=ranks) == [], (faults, job)
    assert all_or_none(program, job, but=ranks) == [], (faults, job)


# The same many times: of each four programs one in which all do the same, and one with a fault.
@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 8_000, 1000))
def test_many_programs(first):
    for seed in range(first, first + 1000):
        if seed % 4 == 0:
            check_equal(drawn(seed), seed // 4)
        elif seed % 4 == 1:
            check_fault(drawn(seed), seed // 4)
        else:
            check_odd(drawn(seed, odd=True), seed // 4)
    gc.collect()  # ranks leave cycles, few objects with much behind them: gigabytes after all


# One program under many schedules, all or none.
@pytest.mark.any_torch
@pytest.mark.long
@pytest.mark.parametrize("count", [100, pytest.param(5_000, marks=pytest.mark.slow)])
def test_one_program_under_many_schedules(count):
    usual = Program(3, (Step("set"), Step("verify", 1)), verify=True)
    for seed in range(count):
        job = run(usual, seed, ["random", "pct"][seed % 2])
        assert errors(job) == violations(job) == partial_success(job, 0) == [], job


# What a grid that is destroyed leaves does not grow with the groups that it had.
def test_keys_left():
    def program(count):
        with HyperCommGrid([2], ["tp"]) as grid:
            for number in range(count):
                grid.create_pg("tp", name=f"{number}")

    assert keys_left(simulate_job(program, 2, args=(1,))) == keys_left(
        simulate_job(program, 2, args=(9,))
    )
