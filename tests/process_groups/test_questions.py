"""What calls ask the store: nothing twice at one instant; and what they leave there."""

import re
import sys
import threading
import time
from collections import Counter
from datetime import timedelta
from functools import partial
from itertools import pairwise

import pytest
import torch.distributed as dist
from simulated_job import (
    attempt,
    gate,
    interrupt_in,
    simulate_job,
    sleep,
)
from simulated_job.invariants import errors, keys_left, late_calls
from simulated_job.store import Client, Server

from hypercomm import GridSet, HyperCommGrid
from hypercomm.process_groups.agreement import arrival
from hypercomm.process_groups.torch_internals import store
from hypercomm.process_groups.torch_internals.gloo import world_address_key

VERBS = ["set", "multi_set", "multi_get", "check", "compare_set", "add", "delete_key"]
SHORT = timedelta(seconds=2)


@pytest.fixture
def asked(monkeypatch):
    """Every question: when, by which rank, and what."""
    found = []

    def recorded(verb, ask):
        def act(self, *args):
            current = self._scheduler.current
            words = repr(sorted(args[0].items()) if isinstance(args[0], dict) else args)
            found.append((self._scheduler.now_s, current.process.rank, verb, words))
            return ask(self, *args)

        return act

    for verb in VERBS:
        monkeypatch.setattr(Client, verb, recorded(verb, getattr(Client, verb)))
    return found


def grid_of(size, **keywords):
    return HyperCommGrid([size], ["tp"], **keywords)


# ---- what ranks do ----------------------------------------------------------------------------


def creates():
    with grid_of(2) as grid:
        grid.create_pg("tp")
        gate("created")


def compares():
    with grid_of(2, verify=True) as grid:
        grid.create_pg("tp")
        grid.verify()
        gate("verified")


def batches():
    with grid_of(2) as grid:
        for name in ("one", "two", "three"):
            grid.create_pgs([{"dims": "tp", "name": name}])
        gate("created")


def sets():
    grids = GridSet.colocated(2, a="tp=2", b="dp=2")
    grids.create_pgs({"a": ["tp"], "b": ["dp"]})
    gate("created")
    grids.destroy()


def views():
    with grid_of(2) as grid:
        grid.register_view("e", [2, 1], ["ep", "rest"])
        grid.create_pg("ep", view="e")
        gate("created")


def reshapes():
    with HyperCommGrid([2, 1], ["tp", "dp"]) as grid:
        grid.create_pg("tp")
        grid.reshape("tp=1,dp=2")
        gate("reshaped")


def comes_late():
    rank, grid = dist.get_rank(), grid_of(3)
    if rank == 2:
        sleep(5.0)
    attempt(grid.create_pg, "tp", timeout=SHORT)
    gate("all have tried")
    attempt(grid.create_pg, "tp", timeout=SHORT)
    attempt(grid.verify, SHORT) if rank else None
    gate("all have verified")
    grid.destroy()


def fails_in_a_batch():
    rank, grid = dist.get_rank(), grid_of(2)

    def derive(_):
        raise OSError("no such file")

    given = {"derive": derive} if rank else {}
    attempt(grid.create_pgs, ["tp", {"dims": "tp", "name": "own", **given}], timeout=SHORT)
    if rank:
        sleep(1.0)
    attempt(grid.create_pgs, ["tp"])
    gate("all have tried")
    grid.destroy()


def gives_up_in_a_batch():
    rank, grid = dist.get_rank(), grid_of(2)
    if rank:
        sleep(0.5)
        interrupt_in(0.0)
        attempt(grid.create_pgs, ["tp"])
    else:
        attempt(grid.create_pgs, ["tp"])
    gate("all have tried")
    attempt(grid.create_pgs, ["tp"])
    grid.destroy()


def differs_in_a_view():
    rank, grid = dist.get_rank(), HyperCommGrid([2, 1], ["tp", "dp"])
    grid.register_view("e", [2, 1] if rank else [1, 2], ["ep", "rest"])
    attempt(grid.create_pg, ["ep", "rest"], view="e")
    grid.destroy()


def differs_in_a_plan():
    rank, grid = dist.get_rank(), grid_of(2, verify=True)
    attempt(grid.create_pg, "tp", name="mine" if rank else "yours")
    attempt(grid.verify)
    gate("all have tried")
    grid.destroy()


def differs_in_the_grid():
    rank, shape = dist.get_rank(), [2, 1]
    if rank:
        sleep(1.0)
        shape = [1, 2]
    grid = HyperCommGrid(shape, ["tp", "dp"])
    attempt(grid.create_pg, ["tp", "dp"])
    grid.destroy()


def is_astray():
    rank = dist.get_rank()
    grid = HyperCommGrid([2], ["tp"], rank_offset=1 if rank == 0 else 0)
    attempt(grid.create_pg, "tp")
    grid.destroy()


SOUND = [(creates, 2), (compares, 2), (batches, 2), (sets, 2), (views, 2), (reshapes, 2)]
FAILING = [
    *[(comes_late, 3), (fails_in_a_batch, 2), (gives_up_in_a_batch, 2), (differs_in_a_view, 2)],
    *[(differs_in_a_plan, 2), (differs_in_the_grid, 2), (is_astray, 3)],
]


def ends_near(run, now_s):
    calls = [call for rank in run.ranks for call in rank.calls]
    return any(0 <= call.began_s + call.took_s - now_s < 0.01 for call in calls)


# Nobody asks one thing twice at one instant: a rank that waits asks again, later.
@pytest.mark.parametrize(("program", "size"), SOUND)
def test_nothing_is_asked_twice(program, size, asked):
    run = simulate_job(program, size, schedule="first")
    assert errors(run) == []
    assert len(asked) > 10
    assert [words for words, count in Counter(asked).items() if count > 1] == []


IS_WHERE = re.compile(r"/rank \d+', 'absent'")
TWICE = ("gave up", "/step 0', 'absent'")
"""What a batch that fails tells and asks for each group and once more for all."""


# Where something fails, nobody asks twice in a row, but where a rank is, for the words of an error.
@pytest.mark.parametrize(("program", "size"), FAILING)
def test_nothing_is_asked_twice_in_a_row(program, size, asked):
    run = simulate_job(program, size, schedule="first")
    assert errors(run) != []
    twice = []
    for rank in range(size):
        own = [question for question in asked if question[1] == rank]
        twice += [one for one, other in pairwise(own) if one == other]
        twice += [one for one, other in zip(own, own[2:], strict=False) if one == other]
    told = [one for one in twice if not (IS_WHERE.search(one[3]) and ends_near(run, one[0]))]
    if "batch" in program.__name__:
        told = [one for one in told if not any(words in one[3] for words in TWICE)]
    assert told == [], run


# What is destroyed leaves the slot of its grid, so that nobody takes it again, and nothing else.
@pytest.mark.parametrize(("program", "size"), SOUND)
def test_what_is_left(program, size):
    for seed in range(5):
        run = simulate_job(program, size, seed=seed)
        assert all(
            key.rpartition("/")[2].isdecimal() or key == "hypercomm/store" for key in run.store.held
        ), sorted(run.store.held)
        assert keys_left(run) <= 4, sorted(run.store.held)


# ---- what is heard ------------------------------------------------------------------------------

QUICK_S = 3.0


# A rank that is outside its own grid, which is another's moved elsewhere, is told of long before T.
@pytest.mark.parametrize("seed", range(4))
def test_a_rank_astray_is_told_of(seed):
    run = simulate_job(is_astray, 3, seed=seed)
    assert run.ranks[1].calls[0].kind == "GridMismatchError", run
    assert late_calls(run, QUICK_S) == [], run


# Who waits in a slot hears of a rank of the same grid that has met others in a slot before.
@pytest.mark.parametrize("seed", range(4))
def test_what_was_told_in_another_slot_is_heard(seed):
    def program():
        rank = dist.get_rank()
        sleep(0.1 * rank)
        grid = grid_of(3 if rank < 2 else 4)
        attempt(grid.create_pg, "tp")
        return grid

    run = simulate_job(program, 4, seed=seed)
    assert [call.kind for call in run.calls(0)] == ["GridMismatchError"] * 4, run
    assert late_calls(run, QUICK_S) == [], run


# Where each rank waits for one other only, as ranks of a large job do for 64, all hear at once.
@pytest.mark.parametrize("schedule", ["first", "random"])
def test_a_chain_of_ranks(schedule, asked, monkeypatch):
    monkeypatch.setattr(arrival, "FAN_OUT", 1)

    def program():
        with grid_of(3) as grid:
            grid.verify()
            gate("verified")

    run = simulate_job(program, 3, schedule=schedule)
    assert errors(run) == []
    assert run.took_s < QUICK_S
    assert keys_left(run) == 2, sorted(run.store.held)
    again = [one for one in Counter(asked).values() if one > 1]
    assert schedule != "first" or again == []


def address_on(host):
    return len(host).to_bytes(8, sys.byteorder) + host.encode() + b":29500"


# A rank that has never said where it is has a host: gloo's WORLD has left it in the store.
def test_the_host_of_a_rank_that_never_came():
    def program():
        grid = grid_of(2)
        if dist.get_rank() == 0:
            attempt(grid.create_pg, "tp", timeout=SHORT)
        return grid

    store = Server({world_address_key(1): address_on("node7")})
    (call,) = simulate_job(program, 2, store=store).calls(0)
    assert "host node7" in str(call.error)


# A job on the store of one before has keys of its own, by the address that its rank 0 has left.
def test_a_job_has_keys_of_its_own():
    def keys(address):
        run = simulate_job(creates, 2, store=Server({world_address_key(0): address}))
        assert errors(run) == []
        return {key for key in run.store.held if "grids from" in key}

    one, other = keys(address_on("node1")), keys(address_on("node2"))
    assert len(one) == len(other) == 1
    assert one != other


# Who comes after another has given up finds that out, and meets it where it tries again.
@pytest.mark.parametrize("seed", range(4))
def test_who_comes_late_meets_who_tries_again(seed):
    def program():
        grid = grid_of(2)
        if dist.get_rank():
            sleep(3.0)
        else:
            attempt(grid.create_pg, "tp", timeout=SHORT)
        return attempt(grid.create_pg, "tp", timeout=2 * SHORT).kind, grid

    run = simulate_job(program, 2, seed=seed)
    assert [kind for kind, _ in run.values()] == ["", ""], run
    assert run.took_s < 3.0 + 1.0, run


class SlowToAppend(list):
    def append(self, item):
        time.sleep(0.02)
        super().append(item)


# Who asks one thing after the other needs one thread, also where that is slow to be idle again.
def test_one_thread_answers(monkeypatch):
    workers = store.Workers()
    monkeypatch.setattr(workers, "_idle", SlowToAppend())
    monkeypatch.setattr(store, "workers", workers)
    before = threading.active_count()
    assert [store.in_time(partial(abs, -number), 5) for number in range(5)] == list(range(5))
    assert threading.active_count() == before + 1
