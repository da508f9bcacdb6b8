"""Tests the outcome of situations in which ranks have to agree."""

import re
from datetime import timedelta
from functools import partial

import pytest
import torch
import torch.distributed as dist

from hypercomm import GridSet, HyperCommGrid, RankLayout, RankMapping, transfer_state
from hypercomm.errors import GroupCreationTimeout, HyperCommError
from simulated_job.cases import GRACE_S, T, square
from simulated_job.job import (
    Fault,
    JobGroup,
    Server,
    attempt,
    gate,
    interrupt_in,
    mark,
    simulate_job,
    sleep,
    this_rank,
    thread,
)

QUICK_S = 1.0
"""The longest time until ranks raise an error that needs no timeout."""

seeds = pytest.mark.parametrize("seed", range(3))


def seconds(count):
    return timedelta(seconds=count)


def check_time(job, limit_s):
    assert job.is_stuck == ""
    assert [rank.error for rank in job.living()] == [None] * len(job.living()), job
    assert max(call.took_s for rank in job.living() for call in rank.calls) < limit_s, job


def check_missing(job, ranks, missing, limit_s):
    """Check that calls of some ranks have failed in time, and that they name the missing ranks."""
    for rank in ranks:
        assert job.ranks[rank].calls, job
        for call in job.ranks[rank].calls:
            assert isinstance(call.error, GroupCreationTimeout), job
            assert call.error.missing == missing, job
            assert call.took_s < limit_s + GRACE_S, job


def before_connecting(monkeypatch, act, method="connect"):
    """Make each rank call `act()` before a method of a simulated gloo group."""
    connect = getattr(JobGroup, method)

    def act_and_connect(group, *args):
        act()
        connect(group, *args)

    monkeypatch.setattr(JobGroup, method, act_and_connect)


def create_with_late_rank(late_s):
    """Create a group of all ranks, for which rank 0 is late."""
    grid = square()
    if dist.get_rank() == 0:
        sleep(late_s)
    attempt(grid.create_pg, ["tp", "dp"])
    return grid


# ---- the simulated job itself --------------------------------------------------------------------


# Equal seeds give equal runs, whatever has run before. Different seeds give different runs.
def test_same_seed_gives_the_same_run():
    def program():
        return square().create_pgs(["tp", "dp"])

    traces = [simulate_job(program, 4, seed=seed).scheduler.trace for seed in range(6)]
    assert len({str(trace) for trace in traces}) == 6
    for seed in reversed(range(6)):
        assert simulate_job(program, 4, seed=seed).scheduler.trace == traces[seed]


# A run in which all ranks wait for each other is ended early.
def test_endless_run_is_ended():
    assert simulate_job(lambda: gate(f"{dist.get_rank()}"), 2).is_stuck == "all wait for each other"
    assert simulate_job(lambda: [sleep(0.1) for _ in range(10**6)], 2, most_steps=999).is_stuck


# Grids with equal sizes but different gaps between their ranks are different grids.
@seeds
def test_grids_with_different_gaps_are_different(seed):
    def program():
        near, far = (RankLayout(dp=2, strides=[stride]) for stride in (1, 2))
        for layout in (near, far):
            grid = HyperCommGrid(layout, cover="any")
            sleep(0.05 * ((dist.get_rank() + seed) % 3))
            attempt(grid.create_pg, "dp")

    job = simulate_job(program, 4, seed=seed)
    check_time(job, QUICK_S)
    assert {call.kind for rank in job.ranks for call in rank.calls} == {""}, job


# If a rank has built a grid with another order of dims, the other ranks may have all their groups,
# so nobody waits for them. The errors of the ranks that wait name both grids.
@seeds
def test_grids_with_another_order_of_dims(seed):
    def program():
        order = "dp=2,tp=2" if dist.get_rank() == 0 else "tp=2,dp=2"
        grid = HyperCommGrid(order)
        attempt(grid.create_pg, "tp")
        return grid

    job = simulate_job(program, 4, seed=seed, timeout_s=T)
    check_time(job, T + GRACE_S)
    first, second, *others = job.calls(0)
    assert [call.kind for call in others] == ["", ""]
    assert (
        "rank 2 (dp=0, tp=1; it has made calls with other ranks only in other grids: tp=2,dp=2)"
        in (str(first.error))
    )
    wrong = r"rank 2 .*rank 0 \(host .*\) waits for it in create_pg\('tp'\) of dp=2,tp=2\)"
    assert re.search(wrong, str(second.error)), second


# A late rank is not described as a rank of other grids if it has made calls in the grid before, or
# in many grids. The scope of a transfer has no grid.
@pytest.mark.parametrize("case", ["all ranks first", "all ranks later", "many grids", "transfer"])
def test_late_rank_of_several_grids(case):
    def program():
        grid = square()
        if case == "all ranks first":
            grid.create_pgs(["tp", "dp"])
        if case == "many grids":
            for number in range(20):
                HyperCommGrid(f"a{number}=2,b=2").create_pg("b")
        HyperCommGrid("x=2,y=2").create_pg("x")
        if case == "all ranks later":
            grid.create_pgs(["tp", "dp"])
        gate("all but one call")
        if dist.get_rank() == 1:
            return
        if case == "transfer":
            halves = RankLayout("tp=2"), RankLayout([2], ["tp"], 2)
            tensors = {"w": torch.zeros(2)}
            given = {"state": tensors} if dist.get_rank() < 2 else {"into": tensors}
            attempt(transfer_state, RankMapping(*halves, along=None), **given)
        else:
            attempt(grid.create_pg, "tp", name="late")

    job = simulate_job(program, 4, timeout_s=T)
    texts = [str(rank.calls[0].error) for rank in job.ranks if rank.calls]
    assert any("rank 1" in text and "timed out" in text for text in texts), texts
    assert not any("other grids" in text for text in texts), texts


# ---- mistakes ------------------------------------------------------------------------------------


def failing(_groups):
    return 1 / 0


def same(groups):
    return groups


def viewed(usual, odd):
    def create(grid, is_odd):
        grid.register_view("expert", *(odd if is_odd else usual))
        grid.create_pg(grid.view("expert").dim_names, view="expert")

    return create


VIEW = [2, 2], ["ep", "x"]
MISTAKES = {
    "batch": lambda grid, is_odd: grid.create_pgs(["tp"] if is_odd else ["dp"]),
    "option": lambda grid, is_odd: grid.create_pg("tp+dp", timeout=seconds(20 + is_odd)),
    "target": lambda grid, is_odd: grid.reshape("tp=4,dp=1" if is_odd else "tp=1,dp=4"),
    "call": lambda grid, is_odd: grid.verify() if is_odd else grid.create_pgs(["tp"]),
    "view of other sizes": viewed(VIEW, ([4, 1], ["ep", "x"])),
    "view in another order": viewed(VIEW, ([2, 2], ["x", "ep"])),
    "view that shares": viewed(([2, 2], ["ep", "dp"], ["dp"]), ([2, 2], ["ep", "dp"])),
    "argument": lambda grid, is_odd: grid.create_pgs(
        ["tp", {"dims": "dp", "name": "own", "derive": failing if is_odd else same}]
    ),
}
"""Calls that one rank makes differently."""


# If one rank differs or fails before it joins, all ranks raise immediately, including ranks that
# arrive later. No group is left, and the next call succeeds.
@seeds
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistake_fails_all_ranks_immediately(mistake, seed):
    def program():
        grid = square()
        rank = dist.get_rank()
        sleep(0.05 * ((rank + seed) % 4))
        attempt(MISTAKES[mistake], grid, rank == 3)
        left = len(grid.pgs)
        gate("all have raised")
        attempt(grid.create_pgs, [{"dims": "dp", "name": "next"}])
        return left, grid

    job = simulate_job(program, 4, seed=seed)
    check_time(job, QUICK_S)
    own = {"CreationError", "ZeroDivisionError"}
    assert {*job.kinds(0)} == (own if mistake == "argument" else {"PlanMismatchError"}), job
    assert all("rank 3 (host" in str(call.error) for call in job.calls(0)[:3]), job
    assert [left for left, _ in job.values()] == [0] * 4
    assert {*job.kinds(1)} == {""}, job


# Ranks that wait for each other in different calls raise immediately. The error names both calls.
@seeds
@pytest.mark.parametrize("size", [2, 3])
def test_circle_of_waits_raises(size, seed):
    def program():
        rank = dist.get_rank()
        grid = HyperCommGrid([size], ["tp"])
        pair = sorted({rank, (rank + 1) % size})
        groups = RankLayout([2], ["tp"], ranks=pair).groups("tp")
        name = f"{pair} {rank if size == 2 else ''}"
        attempt(grid.create_pg, "tp", name=name, derive=lambda _: groups)
        gate("all have raised")
        attempt(grid.create_pg, "tp", name="together")
        return grid

    job = simulate_job(program, size, seed=seed)
    check_time(job, QUICK_S)
    assert {*job.kinds(0)} == {"PlanMismatchError"}, job
    assert all("wait for each other" in str(call.error) for call in job.calls(0)), job
    assert {*job.kinds(1)} == {""}, job


# Two ranks that wait for each other are not deadlocked if another thread of one of them may end the
# wait.
@seeds
def test_two_threads_in_different_orders(seed):
    def program():
        rank = dist.get_rank()
        grid = HyperCommGrid([2], ["tp"])
        waits = []
        for name in "xy" if rank else "yx":
            lazily = None if name == "x" else False
            create = partial(grid.create_pg, "tp", name=name, lazy_init=lazily)
            waits.append(thread(partial(attempt, create)))
            sleep(0.05)
        for wait in waits:
            wait()
        return sorted(map(str, grid.pgs)), grid

    job = simulate_job(program, 2, seed=seed)
    assert [keys for keys, _ in job.values()] == [["tp (x)", "tp (y)"]] * 2
    check_time(job, 2 * QUICK_S)


# Two threads call ensure_pg for one group, and the call of the first thread times out. The call of
# the second thread creates and keeps a new group.
@seeds
def test_two_threads_ensure_one_group(seed):
    def program():
        rank = dist.get_rank()
        grid = HyperCommGrid([2], ["tp"])
        found = []
        ensure = lambda: found.append(attempt(grid.ensure_pg, "tp"))  # noqa: E731
        if rank == 1:
            sleep(T + 1)
            ensure()
        else:
            waits = [thread(ensure)]
            sleep(T / 2)
            waits.append(thread(ensure))
            for wait in waits:
                wait()
        kept = grid.get_pg("tp")
        return [call.value is kept for call in found], [call.kind for call in found], grid

    job = simulate_job(program, 2, seed=seed, timeout_s=T)
    (first, kinds, _), (second, others, _) = job.values()
    assert kinds == ["GroupCreationTimeout", ""], job
    assert first[1:] == second == [True], job
    assert others == [""], job
    assert [len(rank.held) for rank in job.ranks] == [1, 1], job


# ---- missing ranks -------------------------------------------------------------------------------


# In a chain of waits, the error names only the rank at the end of the chain as missing. On each
# rank, `absent` contains the rank for which this rank waits.
@seeds
def test_chain_of_waits_names_the_last_rank(seed):
    def program():
        rank = dist.get_rank()
        grid = HyperCommGrid([4], ["tp"])
        for pair in ([2, 3], [1, 2], [0, 1]) if rank < 3 else ():
            groups = RankLayout([2], ["tp"], ranks=pair).groups("tp")
            call = attempt(grid.create_pg, "tp", name=f"{pair}", derive=lambda _, g=groups: g)
            if call.error is not None:
                break
        return grid

    job = simulate_job(program, 4, seed=seed, timeout_s=T)
    check_time(job, T + GRACE_S)
    last = [rank.calls[-1] for rank in job.ranks[:3]]
    assert [call.kind for call in last] == ["GroupCreationTimeout"] * 3, job
    assert [call.error.missing for call in last] == [(3,)] * 3, job
    assert [call.error.absent for call in last] == [(1,), (2,), (3,)], job


# Ranks wait for a slow rank. If a rank never arrives, all other ranks name it, even in a large job.
@pytest.mark.parametrize(("size", "missing"), [(4, 3), (4, 0), (40, 17)])
def test_missing_rank_is_named_by_all(size, missing):
    def program():
        rank = dist.get_rank()
        grid = HyperCommGrid([size], ["dp"])
        if rank == missing:
            sleep(T / 2)
        attempt(grid.verify)
        gate("all have called")
        if rank != missing:
            attempt(grid.verify)
        return grid

    job = simulate_job(program, size, timeout_s=T)
    check_time(job, T + GRACE_S)
    assert {*job.kinds(0)} == {""}
    assert {call.error.missing for call in job.calls(1)} == {(missing,)}, job


def has_finished(job, rank):
    """Return whether a rank has set its "done" bit, and has made another step since."""
    steps = [what for _, owner, what in job.scheduler.trace if owner == f"rank {rank}"]
    return any(what.startswith("add") and "/done/" in what for what in steps[:-1])


def others_connect_at_death(job, rank):
    """Return whether another rank was connecting at the last step of a rank."""
    owners = [owner for _, owner, _ in job.scheduler.trace]
    last = len(owners) - owners[::-1].index(f"rank {rank}")
    step_of = {owner: what for _, owner, what in job.scheduler.trace[:last]}
    return "gloo connects" in step_of.values()


# If a rank waits for a slow rank and then dies at any step before it has finished, all other ranks
# name it.
@pytest.mark.parametrize("late_s", [0.0, 1.0])
def test_rank_that_waited_and_died_is_named(late_s):
    def program():
        mark()
        return create_with_late_rank(late_s)

    for at in range(1, 60):
        job = simulate_job(program, 4, faults=[Fault(2, at, "dies")], timeout_s=T)
        check_time(job, T + late_s + GRACE_S)
        if has_finished(job, 2):
            break
        assert {call.error.missing for call in job.calls(0)} == {(2,)}, (at, job)
    assert at > 10


# If a rank has worked for long and is then lost at any step before it has finished, all other ranks
# name it, although it has published that it works.
@pytest.mark.parametrize("late_s", [0.0, 1.0])
@pytest.mark.parametrize("kind", ["dies", "pauses"])
def test_rank_that_worked_for_long_and_is_lost_is_named(monkeypatch, kind, late_s):
    def be_slow():
        if dist.get_rank() == 2:
            sleep(0.6)
            mark()

    before_connecting(monkeypatch, be_slow)

    program = partial(create_with_late_rank, late_s)
    for at in range(1, 60):
        job = simulate_job(program, 4, faults=[Fault(2, at, kind, 100.0)], timeout_s=T)
        if has_finished(job, 2):
            break
        check_missing(job, [0, 1, 3], (2,), T)
    assert at > 1


# If ranks are too slow to connect, but alive, no error names a rank, although a rank arrived late.
# If one of them is lost, all errors name it.
@seeds
@pytest.mark.parametrize("lost", [(), (3,)])
@pytest.mark.parametrize(
    ("limit_s", "late_s"), [(1.0, 0.0), (1.0, 0.3), (1.0, 0.9), (T, 0.3), (T, 9.3), (60.0, 57.0)]
)
def test_only_lost_ranks_are_named(monkeypatch, limit_s, late_s, lost, seed):
    def be_slow():
        if dist.get_rank() in lost:
            mark()
        sleep(limit_s)

    before_connecting(monkeypatch, be_slow)

    def program():
        grid = HyperCommGrid("tp=4")
        sleep({1: 0.05, 2: late_s}.get(dist.get_rank(), 0.0))
        attempt(grid.create_pg, "tp")
        return grid

    faults = [Fault(rank, 1, "pauses", 200.0) for rank in lost]
    job = simulate_job(program, 4, faults=faults, timeout_s=limit_s, seed=seed)
    check_missing(job, range(3), lost, limit_s)


# A call that has waited long for another thread of its rank gives the other ranks as much time to
# answer as any call.
def test_rank_that_waited_for_a_thread_names_no_rank(monkeypatch):
    def be_slow():
        if this_rank().groups():
            sleep(3.0)

    before_connecting(monkeypatch, be_slow)

    def program():
        grid = HyperCommGrid("tp=4")
        sleep(T - 0.5 if dist.get_rank() else 0.0)
        create = partial(attempt, grid.create_pgs)
        first = thread(lambda: create([{"dims": "tp", "name": "first"}]))
        sleep(0.001)
        second = thread(lambda: create([{"dims": "tp", "name": "second"}]))
        first()
        second()
        return grid

    job = simulate_job(program, 4, timeout_s=T)
    assert {call.kind for call in job.calls(0)} == {""}, job
    assert {call.error.missing for call in job.calls(1)} == {()}, job


# If the store is silent while the ranks have to answer, no rank is named.
@seeds
@pytest.mark.parametrize(("begin_s", "silent_s"), [(8.0, 2.0), (8.1, 1.9), (8.6, 2.0), (9.5, 1.0)])
def test_silent_store_during_a_roll_call(monkeypatch, begin_s, silent_s, seed):
    monkeypatch.setattr(JobGroup, "connect", lambda *_: sleep(3 * T))

    def program():
        grid = HyperCommGrid("tp=4")
        attempt(grid.create_pg, "tp")
        return grid

    server = Server(silent_s=begin_s, back_s=begin_s + silent_s)
    job = simulate_job(program, 4, timeout_s=T, seed=seed, server=server)
    check_missing(job, range(4), (), T)


# If a rank is lost while it connects, and one of its threads waits for another rank in another
# call, the lost rank is named, and not the other one.
def test_lost_rank_whose_thread_waits_is_named(monkeypatch):
    def be_slow():
        if dist.get_rank() == 3:
            sleep(1.0)
            mark()
            sleep(0.1)

    before_connecting(monkeypatch, be_slow)

    def program():
        first, second = (
            HyperCommGrid(RankLayout(tp=len(ranks), ranks=ranks), cover="any", name=str(ranks))
            for ranks in ([0, 1, 3], [2, 3])
        )
        waits = [thread(lambda: attempt(first.create_pg, "tp"))] if dist.get_rank() != 2 else []
        if dist.get_rank() == 3:
            waits.append(thread(lambda: attempt(second.create_pg, "tp")))
        for wait in waits:
            wait()
        sleep(3 * T)  # rank 2 is alive
        return first, second

    job = simulate_job(program, 4, timeout_s=T, faults=[Fault(3, 1, "pauses", 200.0)])
    check_missing(job, [0, 1], (3,), T)


# If the ranks connect just before their deadline, the call succeeds, and the next call deletes the
# keys of the roll call.
def test_keys_of_a_roll_call_are_deleted(monkeypatch):
    def be_slow():
        if not this_rank().groups():
            sleep(T - 0.5 - 0.1 * dist.get_rank())

    before_connecting(monkeypatch, be_slow)

    def program():
        grid = square()
        for name in ("slow", "first", "second"):
            grid.create_pg(["tp", "dp"], name=name)
        grid.destroy()

    server = Server()
    job = simulate_job(program, 4, timeout_s=T, server=server)
    assert job.values() == [None] * 4
    assert any("/roll" in what for _, _, what in job.scheduler.trace)
    assert any("/alive/" in what for _, _, what in job.scheduler.trace)
    assert not [key for key in server.held if "/roll" in key or "/alive" in key], server.held


# The deadline of a rank may pass while all ranks connect, because the last one arrived late. Ranks
# that have waited for it are not named.
def test_deadline_while_ranks_connect(monkeypatch):
    def be_slow():
        sleep(1.0)

    before_connecting(monkeypatch, be_slow, "wait_for_peers")

    def program():
        grid = HyperCommGrid("tp=3")
        if dist.get_rank() == 2:
            sleep(T - 0.1)
        attempt(grid.create_pg, "tp")

    job = simulate_job(program, 3, timeout_s=T)
    errors = [call.error for call in job.calls(0)]
    assert {type(error) for error in errors} == {GroupCreationTimeout}, job
    assert {error.missing for error in errors} <= {(), (2,)}, job


# If a rank dies after it has set its "done" bit, and its peers have connected to it, the calls of
# the other ranks do not fail.
@pytest.mark.parametrize("victim", [0, 3])
def test_death_of_a_finished_rank_fails_nobody(victim):
    def program():
        mark()
        grid = square()
        attempt(grid.create_pgs, ["tp", "dp"])
        return grid

    finished = 0
    for at in range(1, 60):
        job = simulate_job(program, 4, faults=[Fault(victim, at, "dies")], timeout_s=T)
        if len(job.living()) == 4:
            break
        if has_finished(job, victim) and not others_connect_at_death(job, victim):
            finished += 1
            assert {*job.kinds(0)} == {""}, (at, job)
    assert finished > 0


# Ranks with different deadlines have the same outcome. The outcome names only ranks that had not
# arrived when the first deadline passed.
@seeds
def test_ranks_with_different_deadlines(seed):
    delays_s = dict(enumerate([0.0, 8.0, 16.0, 16.0, 24.0, 0.0]))

    def program():
        grids = GridSet.colocated(6, a="tp=6", b="x=6")
        sleep(delays_s[dist.get_rank()])
        attempt(grids.create_pgs, {"a": ["tp"], "b": ["x"]}, timeout=seconds(T))
        return grids

    job = simulate_job(program, 6, seed=seed, timeout_s=T)
    check_time(job, T + GRACE_S)
    named = {one for call in job.calls(0) for one in getattr(call.error, "missing", ())}
    assert "" not in job.kinds(0), job
    assert named <= {2, 3, 4}, job


# If one rank stalls, only one call of the other ranks fails, even if these ranks repeat the call
# immediately.
@pytest.mark.parametrize("step", [15, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("pause_s", [T - 0.3, T, T + 2.0])
def test_stall_costs_one_call(pause_s, step):
    def program():
        grid = square()
        for _ in range(6):
            if attempt(grid.create_pgs, ["tp", "dp"]).error is None:
                break
        return grid

    for at in range(1, 45, step):
        for rank in range(4):
            fault = Fault(rank, at, "pauses", pause_s)
            job = simulate_job(_marked, 4, args=(program,), seed=at, faults=[fault], timeout_s=T)
            assert {*job.kinds(-1)} == {""}, (fault, job)
            others = [one for one in job.ranks if one.number != rank]
            assert max(len(one.calls) for one in others) <= 2, (fault, job)


def _marked(program):
    mark()
    return program()


# A failure wakes ranks that wait to connect or to finish, so that these ranks do not have to poll.
@seeds
@pytest.mark.parametrize("lazily", [False, True])
def test_failure_wakes_all_ranks(lazily, seed):
    def program():
        grid = HyperCommGrid([4], ["tp"], lazy_init=lazily)
        rank = dist.get_rank()
        sleep(0.05 if rank == 3 else 0.0)
        attempt(grid.create_pg, "tp", timeout=seconds(20 + (rank == 3)))
        return grid

    job = simulate_job(program, 4, seed=seed)
    check_time(job, QUICK_S)
    assert max(call.took_s for call in job.calls(0)[1:]) < 0.15, job  # rank 0 waits for the others
    assert {*job.kinds(0)} == {"PlanMismatchError"}, job


# If a rank has waited or failed, its next call clears its status.
@seeds
def test_no_status_is_left(seed):
    def program():
        grid = square()
        rank = dist.get_rank()
        if rank != 1:
            attempt(grid.verify, seconds(2))
        gate("all have failed")
        sleep(0.1)
        held = {**this_rank().job.server.held}
        gate("all have read")
        attempt(grid.verify)
        gate("all have succeeded")
        both = held, this_rank().job.server.held
        return [{name[-6:]: bool(one[name]) for name in one if "/rank " in name} for one in both]

    job = simulate_job(program, 4, seed=seed)
    for before, after in job.values():
        assert before == {"rank 0": True, "rank 2": True, "rank 3": True}
        assert {*after.values()} == {False}


# Ctrl-C on a waiting rank also makes the call fail on ranks that arrive later.
@seeds
@pytest.mark.parametrize("call", ["create_pgs", "reshape"])
def test_interrupted_call_fails_ranks_that_arrive_later(call, seed):
    def program():
        grid = square()
        action = {
            "create_pgs": lambda: grid.create_pgs(["tp"]),
            "reshape": lambda: grid.reshape("tp=4,dp=1"),
        }[call]
        if dist.get_rank() == 0:
            interrupt_in(1.0)
        else:
            sleep(2.0)
        attempt(action)
        shape = str(grid.layout)
        gate("again")
        attempt(action)
        return shape, grid

    job = simulate_job(program, 4, seed=seed)
    check_time(job, 1.0 + QUICK_S)
    assert job.kinds(0) == ["KeyboardInterrupt", *["CreationError"] * 3], job
    assert job.calls(0)[0].took_s < 1.5, job
    assert {shape for shape, _ in job.values()} == {"tp=2,dp=2"}
    assert {*job.kinds(1)} == {""}, job


# ---- the store -----------------------------------------------------------------------------------


# If the store is lost or silent, each call ends in time with a HyperCommError, and so does the next
# call.
@pytest.mark.parametrize("from_s", [0.0, 0.002, 0.004, 1.0])
@pytest.mark.parametrize("how", ["gone_s", "silent_s"])
def test_lost_store_ends_all_calls(how, from_s):
    def program():
        grid = square()
        attempt(grid.create_pgs, ["tp", "dp"])
        sleep(1.5)
        attempt(grid.verify)
        attempt(grid.create_pg, "tp", name="more")
        return grid

    job = simulate_job(program, 4, server=Server(**{how: from_s}), timeout_s=T)
    check_time(job, T + GRACE_S)
    for number in (1, 2):
        assert "" not in job.kinds(number), job
        assert all(isinstance(call.error, HyperCommError) for call in job.calls(number)), job


# Failed calls and destroyed groups and grids do not add keys to the store.
def test_number_of_keys_does_not_grow():
    def program(attempts):
        rank = dist.get_rank()
        with square() as grid:
            for _ in range(attempts):
                attempt(grid.create_pgs, ["tp"] if rank == 3 else ["dp"])
                gate("failed")
                if rank != 3:
                    attempt(grid.verify, seconds(1))
                gate("timed out")
        for _ in range(attempts):
            with square() as grid:
                attempt(grid.verify)
                attempt(grid.create_pg, "tp")
                grid.destroy_pg("tp")

    counts = {len(simulate_job(program, 4, args=(attempts,)).server.held) for attempts in (2, 5)}
    assert len(counts) == 1, counts


# If a name is used again and again, only two of its keys stay in the store: the record, and the end
# of the last round.
@pytest.mark.parametrize("lazily", [False, True])
def test_keys_of_a_reused_name(lazily):
    def program():
        grid = HyperCommGrid([3], ["tp"], lazy_init=lazily)
        for _ in range(4):
            grid.create_pg("tp", name="mine")
            grid.destroy_pg("tp", name="mine")
        sleep(1.0)
        held = this_rank().job.server.held
        return [name.partition("(mine)/")[2] for name in held if "(mine)/" in name]

    for kept in simulate_job(program, 3).values():
        assert sorted(name for name in kept if "//" not in name) == ["0", "0/3/end"]


# If a job starts on the store of a lost job, the keys of the lost job do not affect it.
@pytest.mark.parametrize("at", [3, 8, 12, 14])
def test_restart_on_the_store_of_a_lost_job(at):
    def program():
        grid = square()
        attempt(grid.create_pgs, ["tp", "dp"])
        return grid

    lost = simulate_job(_marked, 4, args=(program,), faults=[Fault(2, at, "dies")], timeout_s=T)
    assert lost.happened
    again = simulate_job(program, 4, server=lost.server, timeout_s=T)
    check_time(again, QUICK_S)
    assert again.kinds(0) == [""] * 4, again


# ---- survivors -----------------------------------------------------------------------------------


# At whatever step a rank dies, the other ranks find the same survivors and continue with a grid of
# these survivors.
@pytest.mark.parametrize("step", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_survivors_agree_after_a_death(step):
    def program():
        grid = square()
        grid.create_pgs(["tp", "dp"])
        gate("created")
        mark()
        found = attempt(grid.survivors, seconds(T + 1))
        if found.error is not None:
            gate("once more")
            found = attempt(grid.survivors, seconds(T + 1))
        ranks = found.value
        attempt(grid.reshape, f"tp={len(ranks)},dp=1", ranks=ranks)
        return ranks, str(grid.layout), grid

    for victim in (0, 3):
        for at in range(1, 30, step):
            job = simulate_job(program, 4, seed=at, faults=[Fault(victim, at, "dies")], timeout_s=T)
            check_time(job, 2 * T + GRACE_S)
            left = job.living()
            values = {rank.value[:2] for rank in left}
            assert len(values) == 1, job
            ((ranks, _),) = values
            kinds = {rank.calls[-1].kind for rank in left}
            is_whole = victim not in ranks or len(left) == 4  # otherwise it died after survivors()
            late = ({"GroupCreationTimeout"}, {"CreationError"})  # died before or after arriving
            assert kinds == {""} or (kinds in late and not is_whole), job


# If two sets of ranks each consider the other set lost, at most one set continues.
@seeds
def test_two_sets_do_not_both_continue(seed):
    def program():
        rank = dist.get_rank()
        grid = square()
        mine = (0, 1) if rank < 2 else (2, 3)
        sleep(0.05 * ((rank + seed) % 4))
        attempt(grid.reshape, "tp=2,dp=1", ranks=mine)
        return grid

    job = simulate_job(program, 4, seed=seed, timeout_s=T)
    check_time(job, T + GRACE_S)
    kinds = job.kinds(0)
    assert not ("" in kinds[:2] and "" in kinds[2:]), job
    assert kinds[0] == kinds[1] or "" not in kinds[:2], job
