"""Test processes that join a world on a virtual clock, and that take each other's rank."""

from datetime import timedelta
from unittest import mock

import pytest
from meetings.virtual_ranks import Rank, Server, T, run

from hypercomm.errors import HyperCommError, WorldRestartedError
from hypercomm.launch import worlds

PARTS = {"trainer": 2, "engine": 1}
PLACES = [("trainer", 0), ("trainer", 1), ("engine", 0), ("engine", 0)]
"""The part and the rank of each process. Process 3 replaces process 2."""


class Group:
    """Stands for the process group of a world."""


@pytest.fixture(autouse=True)
def _without_torch():
    with mock.patch.object(worlds, "_create", side_effect=lambda *_: Group()):
        yield


def join(process, **options):
    """Join the world, and return the call."""
    part, rank = PLACES[process.number]
    given = {"name": "w", "parts": PARTS, "timeout": timedelta(seconds=T), **options}
    return process.attempt(
        lambda: worlds.join_world(process.world.store, part=part, rank=rank, **given)
    )


def meet(process, world, path="calls"):
    """Meet the other ranks of a joined world."""
    number = process.world
    process.world = world
    try:
        return process.meet(path, range(3))
    finally:
        process.world = number


def work(process, world, turns=8):
    """Make calls in a world, and rejoin after an error. Return whether all calls succeeded."""
    turn = 0
    while turn < turns:
        process.sleep(0.5 if process.number == turn % 2 else 0.0)
        turn += 1
        if meet(process, world, f"{world.incarnation} {turn}").error is not None:
            turn = 0
            if process.attempt(world.rejoin).error is not None:
                return False
    return True


# All processes join the same incarnation, and meet in it. Their store has few keys.
@pytest.mark.parametrize("seed", range(4))
def test_joining(seed):
    def program(process):
        world = join(process).value
        assert world.incarnation == 0
        for _ in range(3):
            assert meet(process, world).value.startswith("hypercomm/worlds/w/0/calls/")
        world.rejoin()
        assert world.incarnation == 1
        assert meet(process, world).value == "hypercomm/worlds/w/1/calls/0"

    made = run(program, 3, seed=seed)
    assert [call.kind for rank in made.ranks for call in rank.calls] == [""] * 15
    assert len(made.server.held) < 24, made.server.held


# If one process has other facts, all processes raise immediately. Then all join.
@pytest.mark.parametrize(
    "facts",
    [
        {"parts": {**PARTS, "engine": 2}},
        {"parts": {"engine": 1, "trainer": 2}},
        {"backend": "cpu:gloo"},
    ],
)
def test_different_facts(facts):
    def program(process):
        join(process, **(facts if process.number == 2 else {}))
        process.sleep(2.0)
        join(process)

    made = run(program, 3)
    assert {*made.kinds(0)} == {"PlanMismatchError"}, str(made)
    assert max(call.took_s for call in made.calls(0)) < 1.0
    assert made.kinds(1) == [""] * 3, str(made)


# If a process has not joined in time, the others name it.
def test_missing_process():
    made = run(lambda process: join(process) if process.number < 2 else None, 3)
    assert [call.error.missing for call in made.calls(0)] == [(2,), (2,)], str(made)
    assert "engine rank 0 of 1 did not join" in str(made.calls(0)[0].error)


# If a process ends at any request while it joins, another process can join as its rank.
@pytest.mark.parametrize("late_s", [0.0, 0.5])
def test_process_is_replaced_while_it_joins(late_s):
    replaced = 0
    for at in range(1, 12):
        ended = []

        def program(process, ended=ended):
            process.sleep([late_s, 0.3, 0.1, 2.0][process.number])
            world = join(process).value
            ended.append(process.number != 2 and work(process, world))

        made = run(program, 3, seed=at, processes=4, faults=[(2, at, Rank.die)])
        if made.ranks[2].is_dead:
            replaced += 1
            assert ended == [True] * 3, (at, str(made))
    assert replaced >= 4


# A pending call raises as soon as a process has joined as one of its ranks. Then all rejoin.
def test_pending_call_of_a_replaced_rank():
    def program(process):
        if process.number == 3:
            process.sleep(1.0)
        world = join(process).value
        if process.number == 2:
            process.die()
            process.sleep(0.1)
        if process.number < 2:
            meet(process, world)
            process.attempt(world.rejoin)
        meet(process, world)

    made = run(program, 3, processes=4)
    for process in made.ranks[:2]:
        kinds = [call.kind for call in process.calls]
        assert kinds == ["", "WorldRestartedError", "", ""], str(made)
        text = str(process.calls[1].error)
        assert "engine rank 0 of 1 (host" in text
        assert "has called join_world() for world 'w'; call rejoin() on all other ranks" in text
        assert process.calls[1].took_s < 2.0
    assert [call.kind for call in made.ranks[3].calls] == ["", ""], str(made)


# A process is suspended at any request after it has claimed its rank, and another process joins as
# this rank. When the first one continues, it raises, and the others go on.
@pytest.mark.parametrize("pause_s", [0.5, 1.5, 3.5, 30.0])
def test_replaced_process_continues(pause_s):
    suspended = 0
    for at in range(3, 13):
        ended = {}

        def program(process, ended=ended):
            process.sleep([0.9, 2.0, 0.0, 1.0][process.number])
            world = join(process).value
            ended[process.number] = world is not None and work(process, world)

        fault = (2, at, lambda process: process.hold(pause_s))
        made = run(program, 3, seed=at, processes=4, faults=[fault])
        if made.ranks[2].held_s:
            suspended += 1
            assert ended == {0: True, 1: True, 2: False, 3: True}, (at, str(made))
            error = made.ranks[2].calls[-1].error
            assert isinstance(error, WorldRestartedError), (at, str(made))
            assert "another process has joined" in str(error), (at, str(made))
    assert suspended >= 9


# If the store is gone or silent, every call ends in time.
@pytest.mark.parametrize("from_s", [0.0, 0.002, 1.0])
@pytest.mark.parametrize("how", ["gone_s", "silent_s"])
def test_lost_store(how, from_s):
    def program(process):
        world = join(process).value
        process.sleep(1.5)
        if world is None:
            join(process)
        else:
            process.attempt(world.rejoin)

    made = run(program, 3, server=Server(**{how: from_s}))
    for call in made.calls(1):
        assert isinstance(call.error, HyperCommError), str(made)
        assert call.took_s < T + 2.0


# A value that hypercomm did not write is named.
def test_foreign_value():
    server = Server({"hypercomm/worlds/w/join": b"who knows"})
    made = run(join, 3, server=server)
    assert all("hypercomm/worlds/w/join" in str(call.error) for call in made.calls(0))
