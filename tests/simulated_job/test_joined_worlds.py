"""Tests processes that join a world, join it again, or never join. Process 3 restarts rank 2."""

import math

import pytest
import torch.distributed as dist

from hypercomm import HyperCommGrid
from hypercomm.errors import HyperCommError, WorldRestartedError
from simulated_job.cases import GRACE_S, PARTS, T, a_consent, a_state, joined
from simulated_job.job import Fault, Server, attempt, gate, mark, simulate_job, sleep, this_rank
from simulated_job.test_scenarios import QUICK_S, check_time, seeds

FACTS = {
    "parts": {"parts": {**PARTS, "engine": 2}},
    "order": {"parts": dict(reversed(PARTS.items()))},
    "backend": {"backend": "cpu:gloo"},
}
"""Arguments with which one process differs from the others."""


# If one process passes a value that differs from the others', all processes raise immediately, in
# whatever order they arrive. Afterwards all can join. Only the process that differed may have to
# retry twice, because it may raise a second time.
@seeds
@pytest.mark.parametrize("fact", FACTS)
def test_different_facts_fail_all_processes(fact, seed):
    def program():
        rank = dist.get_rank()
        sleep(0.05 * ((rank + seed) % 3))
        attempt(joined, **(FACTS[fact] if rank == 2 else {}))
        gate("all have raised")
        if attempt(joined).error is not None:
            attempt(joined)

    job = simulate_job(program, 3, seed=seed)
    check_time(job, QUICK_S)
    assert {*job.kinds(0)} == {"PlanMismatchError"}, job
    assert [[call.kind for call in rank.calls[1:]] for rank in job.ranks[:2]] == [[""]] * 2, job
    assert {*job.kinds(-1)} == {""}, job


# If a process dies at any step while it joins, it can be started again within the timeout. If the
# first process is still running, the first process raises.
@pytest.mark.parametrize("step", [4, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("first_s", [0.0, 0.5])
def test_process_is_restarted_while_it_joins(first_s, step):
    def program():
        number = dist.get_rank()
        sleep([first_s, 3.0, 0.1, 1.0][number])
        mark()
        attempt(joined, min(number, 2))

    for at in range(1, 100, step):
        job = simulate_job(program, 4, seed=at, faults=[Fault(2, at, "dies")], timeout_s=T)
        check_time(job, T)
        others = {rank.calls[0].kind for rank in job.ranks if rank.number != 2}
        assert others == {""}, (at, job)
        if not job.happened:
            assert job.ranks[2].calls[0].kind == "WorldRestartedError", job
            return
    raise AssertionError("the first process has never learned of the second one")


WAKES_S = {"before": 0.5, "within": 1.5, "after": 3.5}
"""When a paused process continues. The second process joins from 1 s to 2 s."""


# A process is paused at one of its first requests, and a second process replaces it. The first
# process continues before, while or after the second process joins. The other ranks raise no error,
# or they raise one error and then succeed after one rejoin().
@pytest.mark.parametrize("wakes", WAKES_S)
def test_replaced_process_continues(wakes):
    def program(order):
        number = dist.get_rank()
        sleep([0.9, 2.0, 0.0, 1.0][number])
        mark()
        world = attempt(joined, min(number, 2)).value
        this_rank().points = -math.inf
        if world is None:
            return None
        grid = HyperCommGrid([3], ["tp"], world=world)
        turn = 0
        while turn < 12:
            sleep(0.5 if number == turn % 2 else 0.0)
            name = f"{world.incarnation} {turn}"
            turn += 1
            if attempt(grid.create_pg, "tp", name=name).error is not None:
                turn = 0
                sleep(0.3 * number if order % 2 else 0.0)
                if attempt(world.rejoin).error is not None:
                    break
        return grid

    stopped = 0
    for at in range(1, 15):
        fault = Fault(2, at, "pauses", WAKES_S[wakes])
        job = simulate_job(program, 4, args=(at,), seed=at, faults=[fault], timeout_s=T)
        if not job.happened:
            break
        stopped += 1
        check_time(job, T + GRACE_S)
        kinds = [[call.kind for call in rank.calls if call.kind] for rank in job.ranks]
        assert all(one in ([], ["WorldRestartedError"]) for one in kinds[:2]), (at, job)
        ended = [one for one in job.ranks[2:] if one.calls[-1].kind == "WorldRestartedError"]
        assert len(ended) == 1, (
            at,
            job,
        )  # the second process ends if the first process had not claimed the rank before the pause
        assert "another process has joined" in str(ended[0].calls[-1].error), (at, job)
        assert {*kinds[5 - ended[0].number]} <= {"WorldRestartedError"}, (at, job)
        assert len(job.ranks[0].calls) >= 13, (at, job)
    assert stopped >= 10


CALLS = {
    "create_pg": lambda grid, _: grid.create_pg("tp", name="more"),
    "verify": lambda grid, _: grid.verify(),
    "consent": lambda _, world: a_consent(world).make(),
}


# When a rank joins again, calls in progress raise immediately. Once all other ranks have called
# rejoin(), all calls succeed, and the store has no keys of the former world. The calls of the
# process that had the rank before fail.
@seeds
@pytest.mark.parametrize("name", CALLS)
def test_rank_joins_again(name, seed):
    def program():
        number = dist.get_rank()
        call = CALLS[name]
        if number < 3:
            world = joined()
            grid = HyperCommGrid([3], ["tp"], world=world)
            grid.create_pg("tp")
        gate("all have joined")
        if number == 3:
            world = attempt(joined, 2).value
            grid = HyperCommGrid([3], ["tp"], world=world)
        elif number < 2:
            attempt(call, grid, world)
            attempt(world.rejoin)
        if number != 2:
            attempt(grid.create_pg, "tp")
            attempt(call, grid, world)
        keys = [*this_rank().job.server.held]
        gate("all can call")
        if number == 2:
            attempt(call, grid, world)
            attempt(world.rejoin)
        return [key for key in keys if key.startswith(f"{FORMER}/")], grid

    job = simulate_job(program, 4, seed=seed)
    check_time(job, QUICK_S)
    kinds = [[call.kind for call in rank.calls] for rank in job.ranks]
    assert kinds[0] == kinds[1] == ["WorldRestartedError", "", "", ""], job
    assert kinds[2] == ["WorldRestartedError", "WorldRestartedError"], job
    assert kinds[3] == ["", "", ""], job
    assert all("engine rank 0 of 1" in str(call.error) for call in job.calls(0) if call.error), job
    assert job.values()[0][0] == [], job
    count = 3 if name == "create_pg" else 2
    assert [len(rank.held) for rank in job.ranks] == [count, count, 0, count], job


# If ranks wait for a rank that never joins, they time out, and the error names that rank.
@seeds
def test_rank_never_joins(seed):
    def program():
        if dist.get_rank() < 2:
            attempt(joined)

    job = simulate_job(program, 3, seed=seed)
    check_time(job, T + GRACE_S)
    assert [call.kind for call in job.calls(0)] == ["GroupCreationTimeout"] * 2, job
    assert [call.error.missing for call in job.calls(0)] == [(2,)] * 2, job


# Process 3 joins as the engine again, and process 4 as trainer 1 again. Process 4 dies after it has
# claimed its rank but before it arrives, so the error does not name it. The error names the engine,
# which has arrived.
@pytest.mark.parametrize("pause_at", range(1, 9))
def test_process_dies_before_it_arrives(pause_at):
    def program():
        number = dist.get_rank()
        if number < 3:
            world = joined()
            grid = HyperCommGrid([3], ["tp"], world=world)
            grid.create_pg("tp")
        gate("all have joined")
        if number == 0:
            attempt(grid.create_pg, "tp", name="more")
        elif number > 2:
            sleep([1.0, 1.2][number - 3])
            mark()
            attempt(joined, [2, 1][number - 3])

    for dies_at in range(1, 9):
        faults = [Fault(3, pause_at, "pauses", 0.5), Fault(4, dies_at, "dies")]
        job = simulate_job(program, 5, seed=dies_at, faults=faults, timeout_s=T)
        steps = [what for _, owner, what in job.scheduler.trace if owner == "rank 4"][:-1]
        claimed = [at for at, what in enumerate(steps) if what.endswith("/again")]
        after = steps[claimed[0] + 1 :] if claimed else []
        if not any(what.startswith("compare_set") for what in after):  # process 4 began no round
            text = str(job.ranks[0].calls[0].error)
            assert "engine rank 0 of 1 (host" in text, (dies_at, job)


# Trainer 1 calls rejoin(), and process 3 joins as the engine again. The error of trainer 0 names
# the engine as soon as the new process has claimed that rank, even if it has not joined the round
# yet. Until then, the error says that trainer 1 has called rejoin(). It names only the layouts of
# the state, because the mapping's shards may not be the shards of the state.
@pytest.mark.parametrize(
    ("pause_at", "who", "call"),
    [
        (None, "trainer rank 1 of 2", "rejoin"),
        (2, "trainer rank 1 of 2", "rejoin"),
        (8, "engine rank 0 of 1", "join_world"),
    ],
)
def test_error_names_the_call_of_a_rank(pause_at, who, call):
    def program():
        number = dist.get_rank()
        if number < 3:
            world = joined()
        gate("all have joined")
        if number == 0:
            sleep(1.0)
            attempt(a_state(world).make)
            attempt(world.rejoin)
        elif number == 1:
            attempt(world.rejoin)
        elif number == 3 and pause_at:
            sleep(0.5)
            mark()
            attempt(joined, 2)

    faults = [Fault(3, pause_at, "pauses", 4.0)] if pause_at else []
    job = simulate_job(program, 4, faults=faults, timeout_s=T)
    error = job.ranks[0].calls[0].error
    assert isinstance(error, WorldRestartedError), job
    title = "nothing was sent: transfer of a state from tp=2 at 0 to tp=1 at 2: "
    assert f"{title}{who} (host" in str(error), error
    assert f" has called {call}() for world 'weights'; call rejoin() on" in str(error), error


# A rank that has been restarted once is in the next incarnation. If trainer 1 then calls rejoin(),
# the error does not name the rank that was restarted earlier.
def test_error_ignores_earlier_restarts():
    def program():
        number = dist.get_rank()
        if number < 3:
            world = joined()
        gate("all have joined")
        if number < 2:
            world.rejoin()
        elif number == 3:
            world = joined(2)
        gate("the engine has joined again")
        if number == 1:
            attempt(world.rejoin)
        elif number == 0:
            sleep(1.0)
            attempt(HyperCommGrid([3], ["tp"], world=world).create_pg, "tp")

    job = simulate_job(program, 4, timeout_s=T)
    error = str(job.ranks[0].calls[0].error)
    assert "trainer rank 1 of 2 (host" in error, job
    assert " has called rejoin() for world 'weights'" in error, job


FORMER = "hypercomm/worlds/weights/0"


# If the store is gone or silent, all calls end in time with a HyperCommError.
@pytest.mark.parametrize("from_s", [0.0, 0.002, 0.004, 1.0])
@pytest.mark.parametrize("how", ["gone_s", "silent_s"])
def test_lost_store_while_joining(how, from_s):
    def program():
        world = attempt(joined).value
        sleep(1.5)
        attempt(joined if world is None else world.rejoin)

    job = simulate_job(program, 3, server=Server(**{how: from_s}))
    check_time(job, T + GRACE_S)
    assert all(isinstance(call.error, HyperCommError) for call in job.calls(1)), job
