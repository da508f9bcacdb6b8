"""Test meetings on a virtual clock: every order of requests, and every kind of fault."""

import itertools
import json
import random
import re
from collections import Counter
from datetime import timedelta
from functools import partial

import pytest
import torch.distributed as dist
from meetings.virtual_ranks import Client, Rank, Server, T, every_order, gate, run

from hypercomm import RankLayout
from hypercomm.errors import (
    CreationError,
    GroupCreationTimeout,
    HyperCommError,
    LateRankError,
    OutcomeUnknownError,
    PlanMismatchError,
)
from hypercomm.process_groups import meeting
from hypercomm.process_groups.meeting import (
    Call,
    first_difference,
    meet,
    missing_in,
    refuse,
    refusing,
    way_up,
)
from hypercomm.process_groups.world import GridIdentity, Scope

QUICK_S = 1.0
"""The longest time until ranks raise an error that needs no timeout, in seconds."""

GRACE_S = 2.0
"""The time after its timeout within which a call ends, in seconds."""

seeds = pytest.mark.parametrize("seed", range(4))


def check_ends(made, limit_s):
    assert max(call.took_s for rank in made.ranks for call in rank.calls) < limit_s, str(made)


# ---- without a fault ----------------------------------------------------------------------------


# All ranks meet, in every order of their requests. The names of a round are equal, and the names of
# two rounds are not.
@pytest.mark.parametrize(("size", "rounds"), [(2, 2), (3, 1)])
def test_every_order(size, rounds):
    count = 0
    for made in every_order(lambda rank: [rank.meet() for _ in range(rounds)], size):
        count += 1
        names = [{call.value for call in made.calls(number)} for number in range(rounds)]
        assert [made.kinds(number) for number in range(rounds)] == [[""] * size] * rounds
        assert [len(one) for one in names] == [1] * rounds
        assert len(set.union(*names)) == rounds
    assert count > 300


# In every order of their requests, ranks that make different calls all raise, and then meet.
def test_every_order_of_a_mistake():
    def program(rank):
        rank.meet(facts=[f"call {rank.number}"])
        rank.meet()

    count = 0
    for made in every_order(program, 2):
        count += 1
        assert [made.kinds(0), made.kinds(1)] == [["PlanMismatchError"] * 2, [""] * 2], str(made)
        if count == 400:
            break
    assert count == 400


# A rank sends three requests, in the first call and in later calls, for any number of ranks. Only
# the ranks that complete a block of 60 send one more.
@pytest.mark.parametrize(("size", "block_ends"), [(2, 0), (60, 0), (61, 2), (150, 3)])
def test_three_requests(size, block_ends):
    counts = []

    def program(rank):
        for _ in range(3):
            rank.requests.clear()
            rank.meet(limit_s=60.0)
            counts.append(len(rank.requests))

    made = run(program, size)
    assert [set(made.kinds(number)) for number in range(3)] == [{""}] * 3
    assert counts.count(3) == 3 * (size - block_ends)
    assert counts.count(4) == 3 * block_ends


# The keys of a round are few, whatever the number of calls, also in scopes of a part of the ranks.
# One rank deletes the bits of each block.
@pytest.mark.parametrize(("size", "calls"), [(2, 80), (62, 24)])
def test_number_of_keys_does_not_grow(size, calls, monkeypatch):
    monkeypatch.setattr(meeting, "_LEAST_STALE", 4)
    monkeypatch.setattr(meeting, "_MOST_STALE", 8)

    def program(rank):
        half = range(2) if rank.number < 2 else range(2, size)
        for number in range(calls):
            rank.meet(f"name {number}" if number % 2 else "verify", limit_s=60.0)
            rank.meet(f"half {number} {half}", half, limit_s=60.0)
            if number % 5 == 0:
                rank.meet("verify", facts=[f"{number} {rank.number == 0}"], limit_s=60.0)

    server = Server()
    run(program, size, server=server)
    assert len(server.held) < 16 + 16 * -(-size // 60), server.held
    assert [key for key in server.missed if re.search(r"/\d\.\d+$", key)] == []


# A single rank meets nobody and sends no request. Neither does a rank outside the scope.
def test_alone():
    def program(rank):
        first, second = rank.meet("a", [rank.number]), rank.meet("a", [rank.number])
        assert (first.value, second.value) == ("job/a/0", "job/a/1")
        assert rank.meet("b", [1 - rank.number]).value == "job/b/0"
        assert rank.requests == []

    def first_of_a_job(rank):
        rank.world.memory.namespace = None
        assert rank.meet("a", [rank.number]).value == "hypercomm/2/a/0"

    assert run(program, 2).kinds(2) == ["", ""]
    assert run(first_of_a_job, 2).kinds(0) == ["", ""]


# The first call of a job reads the address of WORLD, so that keys of an earlier job do not matter.
@pytest.mark.parametrize("address", [b"", b"one", b"two"])
def test_namespace(address):
    server = Server({"cpu//0/0": address} if address else {})

    def program(rank):
        rank.world.memory.namespace = None
        return rank.meet().value

    names = {call.value for call in run(program, 2, server=server).calls(0)}
    expected = {b"": "", b"one": "/7692c3ad", b"two": "/3fc4ccfe"}[address]  # SHA-256
    assert names == {f"hypercomm/2{expected}/tp/0"}


# Ranks that meet a second time within a call wait for each other again.
@pytest.mark.parametrize("comes_again", [True, False])
def test_second_meeting(comes_again):
    def program(rank):
        def call():
            with meet(Scope(rank.world, "tp", range(2)), a_call("first"), T) as meeting:
                rank.sleep(3.0 * rank.number)
                if comes_again or rank.number == 0:
                    meeting.again(a_call("second"))

        rank.attempt(call)

    first = run(program, 2).ranks[0].calls[0]
    assert first.kind == ("" if comes_again else "GroupCreationTimeout")
    assert first.took_s > 3.0


# The wait of a rank may end before there is an outcome. The rank then waits again.
def test_wait_that_ends_early():
    def program(rank):
        client, waits = rank.world.store, Counter()

        def wait(*arguments):
            waits["all"] += 1
            if waits["all"] == 1:
                raise dist.DistStoreError("the wait has ended")
            Client.wait(client, *arguments)

        client.wait = wait
        rank.sleep(float(rank.number))
        rank.meet()

    made = run(program, 2)
    assert made.kinds(0) == ["", ""]
    assert made.ranks[0].calls[0].took_s > 0.9


# ---- differences --------------------------------------------------------------------------------


# If one rank makes another call, all ranks raise immediately, in any order of arrival. The error
# shows both calls. Then all meet at the first try.
@seeds
@pytest.mark.parametrize("size", [2, 4, 70])
@pytest.mark.parametrize("late_s", [0.0, 3.0])
def test_difference(size, late_s, seed):
    if size == 70 and seed:
        return

    def program(rank):
        odd = rank.number == size - 1
        rank.sleep(late_s if odd else 0.01 * (rank.number % 3))
        rank.meet(facts=["same", f"tp over 2 groups\ntimeout: {20 + odd}\nshare: never"])
        rank.meet()

    made = run(program, size, seed=seed)
    assert {*made.kinds(0)} == {"PlanMismatchError"}, str(made)
    check_ends(made, late_s + QUICK_S)
    for call in made.calls(0):
        text = str(call.error)
        assert f"rank {size - 1} (host" in text
        assert "timeout: 2" in text
        assert "position 1" in text
        assert "every rank must make the same calls" in text
    assert {*made.kinds(1)} == {""}, str(made)


# The text of a difference: an option, the headline, one call that is longer.
@pytest.mark.parametrize(
    ("mine", "theirs", "expected"),
    [
        (["a\nx: 1\ny: 2"], ["a\nx: 1\ny: 3"], "y: 2 on A, 3 on B; {}, a"),
        (["same", "a"], ["same", "b"], "{}: A calls a, and B calls b"),
        (["a", "b"], ["a"], "{}: A calls b, and B calls nothing more"),
        (["a\nx: 1"], ["a"], "{}: A calls a, and B calls a"),
    ],
)
def test_text_of_a_difference(mine, theirs, expected):
    at = f"ranks differ at position {len(mine) - 1 if len(mine) > 1 else 0} of the call"
    assert first_difference(mine, theirs, "A", "B") == expected.format(at)


# Ranks that wait for each other in different calls raise immediately, and name both calls.
@seeds
@pytest.mark.parametrize("size", [2, 3])
def test_circle(size, seed):
    def program(rank):
        own = rank.number
        pair = sorted({own, (own + 1) % size})
        rank.meet("together")
        rank.meet(f"{pair} {own if size == 2 else ''}", pair)
        rank.meet("together")

    made = run(program, size, seed=seed)
    check_ends(made, QUICK_S)
    assert {*made.kinds(1)} == {"PlanMismatchError"}, str(made)
    for call in made.calls(1):
        assert "ranks wait for each other in different calls: rank" in str(call.error)
        assert str(call.error).count(" waits in call(") == size
    assert {*made.kinds(0)} == {*made.kinds(2)} == {""}


# A circle is also found by ranks whose own block of 60 ranks is complete.
def test_circle_through_another_block():
    def program(rank):
        if rank.number == 65:
            rank.meet("pair", [0, 65])
        rank.meet("together")

    made = run(program, 70)
    assert made.ranks[65].calls[0].kind == made.ranks[0].calls[0].kind == "PlanMismatchError"
    assert made.ranks[65].calls[0].took_s < QUICK_S


# If ranks have built different grids, the error says in what the grids differ. If all then build
# one of these grids, they meet at the first try, although one rank was not in its first round.
@pytest.mark.parametrize("size", [2, 4])
def test_circle_of_grids(size):
    def program(rank):
        for sizes in (
            "tp=1,dp={}" if rank.number == 1 else "tp={},dp=1",
            "tp={},dp=1",
            "tp=1,dp={}",
        ):
            layout = RankLayout(sizes.format(size))
            scope = GridIdentity.of(layout, "mine", None).scope(rank.world, "calls")

            def call(scope=scope):
                with meet(scope, a_call(), T):
                    pass

            rank.attempt(call)

    made = run(program, size)
    check_ends(made, QUICK_S)
    assert [made.kinds(1), made.kinds(2)] == [[""] * size] * 2, str(made)
    for call in made.calls(0):
        assert "different grids" in str(call.error)
        shapes = re.search(
            r"shape: (\[.*?\]) on rank (\d) \(host .*?\), (\[.*?\]) on rank (\d) ", str(call.error)
        )
        own, here, other, there = shapes.groups()
        assert {own, other} == {f"[1, {size}]", f"[{size}, 1]"}
        assert (here == "1") == (own == f"[1, {size}]") != (there == "1"), str(call.error)
        assert "waits in" in str(call.error)


def a_call(text="a call"):
    return Call.of(text, [text])


def in_two_threads(rank, first, second):
    """Call two functions in two threads of a rank, and wait for both."""
    ended = Counter()

    def other_thread():
        second()
        ended["over"] += 1
        rank.scheduler.notify(ended)

    rank.scheduler.spawn(rank, other_thread)
    first()
    while not ended["over"]:
        rank.scheduler.wait(ended, rank.scheduler.now_s + 1.0)


# A rank with two waiting threads is in no circle, because its other thread may end the wait.
@seeds
def test_two_threads_in_different_orders(seed):
    def program(rank):
        def later(path):
            rank.sleep(0.05)
            rank.meet(path)

        first, second = ("x", "y") if rank.number else ("y", "x")
        in_two_threads(rank, partial(rank.meet, first), partial(later, second))

    made = run(program, 2, seed=seed)
    assert [call.kind for rank in made.ranks for call in rank.calls] == [""] * 4, str(made)


# Rank 0 waits for rank 1, rank 1 for rank 2, and rank 2 for rank 0. This is no circle, because
# another thread of rank 0, which waits for rank 3, then meets rank 2.
@seeds
def test_circle_through_a_rank_with_two_threads(seed):
    def program(rank):
        def other_thread():
            rank.meet("3 to 0", [0, 3])
            rank.meet("2 and 0", [0, 2])

        if rank.number == 0:
            in_two_threads(rank, partial(rank.meet, "0 and 1", [0, 1]), other_thread)
        elif rank.number == 1:
            rank.meet("1 and 2", [1, 2])
            rank.meet("0 and 1", [0, 1])
        elif rank.number == 2:
            rank.meet("2 and 0", [0, 2])
            rank.meet("1 and 2", [1, 2])
        else:
            rank.sleep(3.0)
            rank.meet("3 to 0", [0, 3])

    made = run(program, 4, seed=seed)
    assert {call.kind for rank in made.ranks for call in rank.calls} == {""}, str(made)


# Only one thread of a rank at a time makes calls in a scope.
def test_two_threads_in_one_scope():
    made = run(lambda rank: in_two_threads(rank, rank.meet, rank.meet), 2)
    names = [{call.value for call in rank.calls} for rank in made.ranks]
    assert names == [{"job/tp/0", "job/tp/1"}] * 2
    assert [call.kind for rank in made.ranks for call in rank.calls] == [""] * 4


# ---- missing and late ranks ---------------------------------------------------------------------


# If ranks never arrive, all others raise in time and name exactly these ranks, also in scopes of
# several blocks. Afterwards, all meet at the first try.
@pytest.mark.parametrize(
    ("size", "absent"),
    [(2, [1]), (4, [0, 2]), (60, [59]), (61, [60]), (130, [0, 64, 129]), (130, [*range(60, 120)])],
)
def test_missing(size, absent):
    counts = Counter()

    def program(rank):
        if rank.number not in absent:
            rank.meet()
        gate(rank, "again", counts)
        rank.meet()

    made = run(program, size)
    here = [rank for rank in made.ranks if rank.number not in absent]
    for rank in here:
        error = rank.calls[0].error
        assert isinstance(error, GroupCreationTimeout), str(made)
        assert error.missing == error.absent == tuple(absent)
        assert rank.calls[0].took_s < T + GRACE_S
        assert f"rank {absent[0]}" in str(error)
        assert ("and 52 more did not join" in str(error)) == (len(absent) == 60)
    assert {rank.calls[-1].kind for rank in made.ranks} == {""}, str(made)


# Ranks wait for a rank that arrives in time, and name one that is late. If they call again, the
# late rank meets them. If they do not, its error says that they timed out.
@seeds
@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("late_s", [0.1, 0.5, T - 0.1, T + 0.5, 2 * T + 5])
def test_late(late_s, again, seed):
    def program(rank):
        if rank.number == 2:
            rank.sleep(late_s)
        for _ in range(4 if again else 1):
            if rank.meet().error is None:
                break

    made = run(program, 3, seed=seed)
    check_ends(made, T + GRACE_S)
    is_late = late_s > T
    *others, late = made.ranks
    for rank in others:
        assert rank.calls[0].kind == ("GroupCreationTimeout" if is_late else ""), str(made)
        assert rank.calls[-1].kind == ("" if again or not is_late else "GroupCreationTimeout")
        assert not is_late or rank.calls[0].error.missing == (2,)
    if is_late and not again:
        assert isinstance(late.calls[0].error, LateRankError), str(made)
        assert "timed out on the other ranks before rank 2 arrived" in str(late.calls[0].error)
        assert "repeat the call on all ranks" in str(late.calls[0].error)
    else:
        assert late.calls[0].kind == "", str(made)


# No rank that has arrived is named, although the deadlines of ranks differ.
@seeds
def test_ranks_with_different_deadlines(seed):
    delays_s = dict(enumerate([0.0, 8.0, 16.0, 16.0, 24.0, 0.0]))

    def program(rank):
        rank.sleep(delays_s[rank.number])
        rank.meet()

    made = run(program, 6, seed=seed)
    first, second = (rank.calls[0] for rank in made.ranks[:2])
    assert first.error.missing == second.error.missing == (2, 3, 4)
    assert second.error.waited.total_seconds() == pytest.approx(second.took_s, abs=0.5)


# In a chain of waits, the rank at the end is missing, and each rank knows for whom it waits.
@seeds
def test_chain_of_waits(seed):
    def program(rank):
        for pair in ([2, 3], [1, 2], [0, 1]) if rank.number < 3 else ():
            if rank.number in pair and rank.meet(f"{pair}", pair).error is not None:
                break

    made = run(program, 4, seed=seed)
    errors = [rank.calls[-1].error for rank in made.ranks[:3]]
    assert [error.missing for error in errors] == [(3,)] * 3, str(made)
    assert [error.absent for error in errors] == [(1,), (2,), (3,)]
    assert "waits for it in call([" in str(errors[0])


# The error names the coordinates of a missing rank, and the call in which it waits.
def test_missing_rank_is_described():
    identity = GridIdentity.of(RankLayout("tp=2,dp=2"), None, None)

    def program(rank):
        def call():
            with meet(identity.scope(rank.world, "calls"), a_call("verify()"), T):
                pass

        if rank.number == 3:
            rank.meet("elsewhere", [3, 9], limit_s=3 * T)
        else:
            rank.attempt(call)

    error = run(program, 10).ranks[0].calls[0].error
    assert error.missing == (9,)
    assert error.absent == (3,)
    assert "verify(): timed out: rank 9" in str(error)
    assert "rank 3 (host" in str(error)
    assert "waits for it in call(elsewhere)" in str(error)
    assert error.waited > timedelta(seconds=T - 0.1)

    def missing(rank):
        if rank.number != 3:
            program(rank)

    text = str(run(missing, 4).ranks[0].calls[0].error)
    assert "rank 3 (tp=1, dp=1) did not join; every rank must make this call" in text


# ---- faults of ranks ----------------------------------------------------------------------------


# At whatever request a rank dies, the others meet, or they name this rank and no other one.
@seeds
@pytest.mark.parametrize("victim", [0, 2])
def test_rank_dies(victim, seed):
    kinds = set()
    for at in range(1, 12):
        made = run(lambda rank: rank.meet(), 3, seed=seed, faults=[(victim, at, Rank.die)])
        check_ends(made, T + GRACE_S)
        kinds |= {*made.kinds(0)}
        for call in made.calls(0):
            assert call.error is None or call.error.missing == (victim,), str(made)
    assert kinds == {"", "GroupCreationTimeout"}


# Ctrl-C is raised immediately. The other ranks learn of it, or all have arrived. Then all meet.
@pytest.mark.parametrize("late_s", [0.0, 1.0])
@pytest.mark.parametrize("victim", [0, 2])
def test_interrupt(victim, late_s):
    counts = Counter()

    def program(rank):
        rank.sleep(late_s if rank.number == 1 else 0.0)
        rank.meet()
        gate(rank, "again", counts)
        rank.meet()

    interrupted = 0
    for at in range(1, 12):
        counts.clear()
        made = run(program, 3, seed=at, faults=[(victim, at, Rank.interrupt)])
        first = made.ranks[victim].calls[0]
        others = {rank.calls[0].kind for rank in made.ranks if rank.number != victim}
        if first.kind == "KeyboardInterrupt":
            interrupted += 1
            assert others in ({"CreationError"}, {""}), str(made)
            texts = [str(one.error) for one in made.calls(0) if one.kind == "CreationError"]
            assert all("was interrupted (KeyboardInterrupt)" in text for text in texts)
            assert others == {"CreationError"} or first.took_s >= late_s - 0.1, str(made)
        check_ends(made, late_s + QUICK_S)
        if first.kind == "KeyboardInterrupt" and others == {"CreationError"}:
            assert {*made.kinds(1)} == {""}, (at, str(made))
    assert interrupted >= 3


# A rank that is suspended is a late rank. No rank that was there is named, and all can meet again.
@pytest.mark.parametrize("pause_s", [1.0, T - 1.0, T + 1.0, 3 * T])
def test_suspended_rank(pause_s):
    for at in range(1, 4):  # the requests of the first call
        counts = Counter()

        def program(rank, counts=counts):
            rank.meet()
            gate(rank, "again", counts)
            for _ in range(2):
                if rank.meet().error is None:
                    break

        made = run(program, 3, seed=at, faults=[(1, at, lambda rank: rank.hold(pause_s))])
        for rank in (made.ranks[0], made.ranks[2]):
            error = rank.calls[0].error
            assert error is None or error.missing == (1,), (at, str(made))
        assert {rank.calls[-1].kind for rank in made.ranks} == {""}, (at, str(made))


# The keys of a round stay until all of its ranks have left it, however often the others meet.
@pytest.mark.parametrize("at", [1, 2, 3])
def test_suspended_rank_finds_the_outcome(at):
    def program(rank):
        rank.meet()
        for number in range(40 if rank.number < 2 else 0):
            rank.meet(f"pair {number}", [0, 1])

    made = run(program, 3, faults=[(2, at, lambda rank: rank.hold(3.0))])
    assert {call.kind for rank in made.ranks for call in rank.calls} == {""}, str(made)
    assert made.now_s < T


# A rank that cannot take part fails the call of the others immediately, also of late ranks, and its
# data reach them. Then all meet.
@seeds
@pytest.mark.parametrize("late_s", [0.0, 2.0])
def test_refusal(late_s, seed):
    class OwnError(ValueError):
        data = "what the others need"

    def program(rank):
        scope = Scope(rank.world, "tp", range(3))

        def fail():
            with refusing(scope):
                raise OwnError("my own\nmistake")

        rank.sleep(late_s * (rank.number == 0))
        if rank.number == 1:
            rank.attempt(fail)
        else:
            rank.meet()
        rank.meet()

    made = run(program, 3, seed=seed)
    check_ends(made, late_s + QUICK_S)
    assert made.ranks[1].calls[0].kind == "OwnError"
    for rank in (made.ranks[0], made.ranks[2]):
        error = rank.calls[0].error
        assert type(error) is CreationError
        assert error.data == "what the others need"
        assert "rank 1 (host" in str(error)
        assert "failed: OwnError: my own mistake" in str(error)
    assert {*made.kinds(1)} == {""}


# A rank that was late refuses the round in which the others wait, not the one that it has missed.
def test_refusal_of_a_late_rank():
    def program(rank):
        if rank.number == 1:
            rank.sleep(T + 1.0)
            refuse(Scope(rank.world, "tp", range(2)), ValueError("mistake"))
        else:
            rank.meet()
            rank.meet()
        rank.meet()

    made = run(program, 2)
    first, second, third = made.ranks[0].calls
    assert [first.kind, second.kind, third.kind] == ["GroupCreationTimeout", "CreationError", ""]
    assert second.took_s < 2.0


# ---- fences -------------------------------------------------------------------------------------


# If two sets of ranks each consider the other one lost, at most one of them continues.
@seeds
def test_two_sets_do_not_both_continue(seed):
    def program(rank):
        ranks = (0, 1) if rank.number < 2 else (2, 3)
        rank.sleep(0.05 * ((rank.number + seed) % 4))
        rank.meet("continues", ranks, [f"{ranks}"], is_fenced=True)

    made = run(program, 4, seed=seed)
    kinds = made.kinds(0)
    assert kinds[0] == kinds[1] != kinds[2] == kinds[3], str(made)
    assert {*kinds} == {"", "CreationError"}
    texts = [str(call.error) for call in made.calls(0) if call.error]
    assert all("the other ranks have continued without rank" in text for text in texts)


# This also holds if the ranks that have continued have met often before the others arrive.
def test_outcome_of_a_fence_is_kept():
    def program(rank):
        ranks = (0, 1) if rank.number < 2 else (2, 3)
        if rank.number > 1:
            rank.sleep(5.0)
        rank.meet("continues", ranks, [f"{ranks}"], is_fenced=True)
        for number in range(40 if rank.number < 2 else 0):
            rank.meet(f"tp {number}", ranks)

    kinds = run(program, 4).kinds(0)
    assert kinds == ["", "", "CreationError", "CreationError"]


# A rank that was outside of the ranks that continued, or that made the same mistake as they, can
# continue with them later.
def test_rank_outside_of_a_fence_can_join_later():
    def program(rank):
        def mistake():
            with refusing(Scope(rank.world, "continues", (0, 1), is_fenced=True)):
                raise ValueError("mistake")

        rank.attempt(mistake)
        for ranks in ((0, 1), (0, 1, 2), (0, 1), (0, 1, 2)):
            rank.meet("continues", ranks, [f"{ranks}"], is_fenced=True)

    made = run(program, 3)
    assert [made.kinds(number)[2] for number in range(5)] == ["ValueError", "", "", "", ""]
    assert [made.kinds(number)[0] for number in range(5)] == ["ValueError", "", "", "", ""]


# A rank that was alone in a group has counted no round that the other ranks count later.
def test_rank_that_was_alone_meets_others():
    def program(rank):
        rank.meet(f"dp/{rank.number}", [rank.number])
        rank.meet("dp/0", [0, 1])

    assert run(program, 2).kinds(1) == ["", ""]


# A late rank is excluded from a fenced scope, also if it is alone there.
def test_late_rank_of_a_fence():
    def program(rank):
        if rank.number == 1:
            rank.sleep(T + 1.0)
        rank.meet("survivors", is_fenced=True)

    late = run(program, 2).ranks[1].calls[0]
    assert isinstance(late.error, LateRankError)
    assert late.took_s < QUICK_S

    def alone(rank):
        rank.meet("continues", [rank.number], [f"{rank.number}"], is_fenced=True)

    assert sorted(run(alone, 2).kinds(0)) == ["", "CreationError"]


# ---- the store ----------------------------------------------------------------------------------


# If the store is gone, calls raise immediately. If it does not answer, they raise at the deadline.
@pytest.mark.parametrize("from_s", [0.0, 0.0005, 0.002, 1.0])
@pytest.mark.parametrize("how", ["gone_s", "silent_s"])
def test_lost_store(how, from_s):
    def program(rank):
        if rank.number != 2:
            rank.meet()
        rank.sleep(2.0)
        rank.meet()

    made = run(program, 3, server=Server(**{how: from_s}))
    check_ends(made, T + GRACE_S)
    for number in (0, 1):
        for call in made.calls(number):
            if number or from_s != 0.0005:
                assert isinstance(call.error, HyperCommError), str(made)
            if call.error is not None:
                assert "the job's store" in str(call.error)
                assert ("is gone" if how == "gone_s" else "does not answer") in str(call.error)
            if how == "gone_s":
                assert call.took_s < 1.5, str(made)
    waited = [rank.calls[0].error for rank in made.ranks[:2]]
    assert from_s < 1.0 or {*map(type, waited)} == {OutcomeUnknownError}


# A value that hypercomm did not write raises an error that names the key.
@pytest.mark.parametrize(
    "value", [b"{", b"null", b'[["1"]]', b"[" * 10**5, b'{"kind": 1}', b"x" * 10**6]
)
@pytest.mark.parametrize("key", ["job/tp/0/go", "job/rank 1"])
def test_foreign_value(key, value):
    server = Server({key: value})
    made = run(lambda rank: rank.meet() if rank.number == 0 else rank.sleep(T), 2, server=server)
    error = made.ranks[0].calls[0].error
    assert type(error) is CreationError
    assert f"'{key}'" in str(error)
    assert "hypercomm did not write" in str(error)
    assert len(str(error)) < 500


# The bits of a block are read as a number, or raise.
def test_foreign_bits():
    def spoil(rank):
        held = rank.world.store._server.held
        key = next(name for name in held if name.endswith("/0.0"))
        held[key] = b"x"

    made = run(
        lambda rank: rank.meet() if rank.number == 0 else rank.sleep(T),
        2,
        faults=[(0, 4, spoil)],
    )
    assert "did not write" in str(made.ranks[0].calls[0].error)


# ---- the tree of arrivals -----------------------------------------------------------------------


SIZES = [1, 2, 59, 60, 61, 3599, 3600, 3601]


# Ranks arrive in any order, and some never do. The rank that completes the last block knows that
# all have arrived. A search finds exactly the missing ranks, and reads only incomplete blocks.
@pytest.mark.parametrize(
    ("size", "absent"),
    [*itertools.product(SIZES, [0, 1, 5, 130]), pytest.param(216_001, 5, marks=pytest.mark.full)],
)
def test_tree_of_arrivals(size, absent):
    missing = {*random.Random(size).sample(range(size), min(size, absent))}
    arriving = [*({*range(size)} - missing)]
    random.Random(absent).shuffle(arriving)
    bits = Counter()
    completing = []
    for position in arriving:
        for block, bit, complete in way_up(position, size):
            assert bit < 2**60
            assert not bits[block] & bit
            bits[block] |= bit
            if bits[block] != complete:
                break
        else:
            completing.append(position)
    assert completing == ([] if missing else arriving[-1:])
    read = []

    def look(block):
        read.append(block)
        return bits[block]

    if missing:
        assert [*missing_in(look, size)] == sorted(missing)
        levels = len([*way_up(0, size)])
        assert len(read) <= 1 + (levels - 1) * len(missing)


# A waiting rank in a large world sends few requests, and only a few ranks look for the cause.
def test_requests_of_a_long_wait():
    def program(rank):
        rank.sleep(8.0 if rank.number == 100 else 0.0)
        rank.requests.clear()
        rank.meet(limit_s=60.0)
        return len(rank.requests)

    made = run(program, 130)
    counts = sorted(len(rank.requests) for rank in made.ranks)
    assert {*made.kinds(0)} == {""}
    assert counts[:120][-1] <= 9, counts
    assert counts[-1] < 80, counts


# A rank waits for the first missing ranks of its block of 60. If its block is complete, it waits
# for the first missing ranks of the other blocks. Its status lists eight ranks.
def test_ranks_that_a_status_lists():
    absent = {70, *range(100, 110), 121}
    expected = {0: [70, *range(100, 107)], 60: [70, *range(100, 107)], 120: [121]}
    server = Server()
    found = {}

    def program(rank):
        if rank.number == 70:
            rank.sleep(1.0)
            for number in expected:
                found[number] = json.loads(server.held[f"job/rank {number}"])["waits_for"]
        if rank.number not in absent:
            rank.meet()

    run(program, 130, server=server)
    assert found == expected


# The status of a rank disappears with its next call.
def test_no_status_is_left():
    server = Server()
    counts = Counter()

    def program(rank):
        if rank.number:
            rank.meet()
            assert f"job/rank {rank.number}" in server.held
            status = json.loads(server.held[f"job/rank {rank.number}"])
            assert (status["call"], status["waits_for"]) == ("call(tp)", [0])
        else:
            rank.sleep(T + 3.0)
        gate(rank, "again", counts)
        rank.meet()

    made = run(program, 3, server=server)
    assert {*made.kinds(-1)} == {""}
    assert not [key for key in server.held if "rank" in key]


# A call that differs only in its text is the same call, and one that differs only in its facts is
# not. Errors of other ranks keep their class.
def test_facts_decide():
    def program(rank):
        scope = Scope(rank.world, "tp", range(2))

        def call(facts, text):
            with meet(scope, Call(facts, lambda: text, lambda: [text]), T):
                pass

        rank.attempt(lambda: call(("same", 1), f"text {rank.number}"))
        rank.attempt(lambda: call(("other", rank.number), "text"))

    made = run(program, 2)
    assert made.kinds(0) == ["", ""]
    assert made.kinds(1) == ["PlanMismatchError"] * 2
    assert all("differs from the call of" in str(call.error) for call in made.calls(1))
    assert isinstance(made.calls(1)[0].error, PlanMismatchError)
