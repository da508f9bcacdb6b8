"""Tests every interleaving of the calls of two or three ranks. A dict replaces the store.

A state consists of the position of each rank in its steps, and the content of the store. Each state
is visited once. The ranks run `Member.call`, as in production and in the simulated job.
"""

from functools import partial
from typing import NamedTuple

import attrs
import pytest
from hypercomm.process_groups.agreement.protocol import Member, find_circle, status_key
from hypercomm.process_groups.agreement.records import (
    AGREED,
    Add,
    Delete,
    Exchange,
    InterruptedCallError,
    Moment,
    Now,
    Outcome,
    Proposer,
    Read,
    Record,
    Status,
    StoreLostError,
    Tree,
    Wait,
    Work,
    Write,
)
from hypercomm.process_groups.agreement.scope import Memory, Scope

from hypercomm.process_groups.torch_internals.gloo import ConnectionFailedError
from hypercomm.process_groups.world import World

DEADLINE_S = 1.0

ERRORS = {
    "fails": lambda: MemoryError("no memory"),
    "cannot connect": lambda: ConnectionFailedError(RuntimeError("refused"), [0, 1]),
    "is interrupted": InterruptedCallError,
    "loses an operation": lambda: StoreLostError("the link is lost"),
}


class Ended(NamedTuple):
    """The end of a call of a rank."""

    round: int
    kind: str


def repeat(rank, size, deed, is_connecting):
    """Make a call in which the rank does `deed`. Repeat the call without the deed until all agree.

    A deed is an item of DEEDS, such as "fails", or "cannot connect". "" stands for a normal call.
    """
    world = World(rank, size, "gloo", has_store=True)
    memory = Memory("job", f"{rank}")
    scope = Scope(world, "record", range(size), memory=memory)
    for turn in range(4):
        does = "" if turn else deed
        lines = ["other" if does == "differs" else "same"]
        member = Member(scope, "call()", lambda lines=lines: lines, 0.0, DEADLINE_S, is_connecting)
        yield member
        if does == "rejects":
            outcome = yield from member.refuse("no such file")
            yield Ended(memory.left["record"], "rejected")
            continue
        try:
            outcome = yield from member.call()
        except StoreLostError:
            continue  # the rank has left no round
        yield Ended(member.ticket.round, outcome.kind)
        if outcome == AGREED:
            return


def perform(held, operation):
    """Perform an operation on a dict, and return the reply."""
    match operation:
        case Exchange(key, expected, text):
            if held.get(key, "") == expected:
                held[key] = text
            return held.get(key, expected)
        case Read(key) | Wait(key):
            return held.get(key)
        case Add(key, amount):
            held[key] = str(int(held.get(key, "0")) + amount)
            return int(held[key])
        case Write(key, text):
            held[key] = text
        case Delete(keys):
            for key in keys:
                held.pop(key, None)
    return None


class Late(NamedTuple):
    """The reply if an operation has not finished by this time."""

    seconds: float


class Raised(NamedTuple):
    """The reply if an operation raises an error."""

    error: str


class Node:
    """The position of a rank: its next operation, and the ends of its calls."""

    def __init__(self, replies, asks, ended):
        self.replies = replies
        self.asks = asks
        self.ended = ended
        self.after = {}


class State(NamedTuple):
    """The positions of ranks, the content of the store, dead ranks, and the remaining faults."""

    nodes: tuple
    items: frozenset
    dead: frozenset
    deaths: int
    late: int
    lost: int


class Search:
    """Visits every state.

    Args:
        deeds: The deed of each rank in its first call. See `repeat`.
        deaths: The number of ranks that may die, each at any operation.
        late: How often a rank may wait for too long.
        lost: How many store operations may fail, with or without effect.
        is_connecting: Whether the work of a call connects to the other ranks.
    """

    def __init__(self, deeds, deaths=0, late=0, lost=0, is_connecting=False):
        self.deeds = deeds
        self.makes = [
            partial(repeat, rank, len(deeds), deed, is_connecting)
            for rank, deed in enumerate(deeds)
        ]
        self.nodes, self.before = {}, {}
        first = tuple(self.node(rank, ()) for rank in range(len(deeds)))
        waiting = [State(first, frozenset(), frozenset(), deaths, late, lost)]
        self.seen = {*waiting}
        self.ends = set()
        while waiting:
            state = waiting.pop()
            after = {*self.after(state)}
            if not after:
                self.ends.add((tuple(node.ended for node in state.nodes), state.dead))
            for one in after - self.seen:
                self.before[one] = state
            waiting += after - self.seen
            self.seen |= after

    def node(self, rank, replies):
        """Return the position of a rank after some replies."""
        run = self.makes[rank]()
        ended = []
        left = [*replies]
        now = 0.0
        member = None
        try:
            asks = next(run)
            while isinstance(asks, (Ended, Member, Now)) or left:
                if isinstance(asks, Ended):
                    ended.append(asks)
                    asks = next(run)
                elif isinstance(asks, Member):
                    member = asks
                    now = 0.0
                    asks = next(run)
                elif isinstance(asks, Now):
                    asks = run.send(Moment(now))
                else:
                    reply = left.pop(0)
                    if isinstance(reply, Late):
                        now = reply.seconds
                        reply = False if isinstance(asks, Work) else None
                    if isinstance(reply, Raised):
                        asks = run.throw(ERRORS[reply.error]())
                    else:
                        asks = run.send(reply)
        except StopIteration:
            asks = None
        frames = []
        at = run
        while at is not None and at.gi_frame is not None:
            values = {name: plain(value) for name, value in at.gi_frame.f_locals.items()}
            frames.append((at.gi_code, at.gi_frame.f_lasti, repr(values)))
            at = at.gi_yieldfrom
        memory = plain(member.scope.memory)
        place = rank, repr(asks), tuple(ended), tuple(frames), now, plain(member), memory
        return self.nodes.setdefault(place, Node(replies, asks, tuple(ended)))

    def after(self, state):
        """Yield the states that may follow a state. If all ranks wait, time passes for all."""
        is_blocked = True
        running = [
            (rank, node)
            for rank, node in enumerate(state.nodes)
            if node.asks is not None and rank not in state.dead
        ]
        for rank, node in running:
            if state.deaths:
                yield state._replace(dead=state.dead | {rank}, deaths=state.deaths - 1)
            for after in self.steps_of(state, rank):
                is_blocked = False
                yield after
            if isinstance(node.asks, (Wait, Work)) and state.late:
                for seconds in {node.asks.until, max(DEADLINE_S, node.asks.until)}:
                    late = state._replace(late=state.late - 1)
                    yield self.answered(late, rank, Late(seconds))
        if is_blocked and running:
            later = state
            for rank, node in running:
                later = self.answered(later, rank, Late(node.asks.until))
            yield later

    def steps_of(self, state, rank):
        """Yield the states after the next operation of a rank, or none if it waits for a key."""
        asks = state.nodes[rank].asks
        deed = "" if state.nodes[rank].ended else self.deeds[rank]
        if isinstance(asks, (Wait, Work)) and deed == "is interrupted":
            yield self.answered(state, rank, Raised(deed))
        if isinstance(asks, Work):
            does = Raised(deed) if deed in ("fails", "cannot connect") else True
            yield self.answered(state, rank, does)
            return
        held = dict(state.items)
        reply = perform(held, asks)
        done = state._replace(items=frozenset(held.items()))
        if state.lost:
            for effect in (state, done):
                lost = effect._replace(lost=state.lost - 1)
                yield self.answered(lost, rank, Raised("loses an operation"))
        if not isinstance(asks, Wait) or reply is not None:
            yield self.answered(done, rank, reply)

    def answered(self, state, rank, reply):
        """Return the state after a rank has received a reply."""
        node = state.nodes[rank]
        nodes = list(state.nodes)
        if reply not in node.after:
            node.after[reply] = self.node(rank, (*node.replies, reply))
        nodes[rank] = node.after[reply]
        return state._replace(nodes=tuple(nodes))

    def broken(self):
        """Return the final states that break a guarantee."""
        found = []
        for ranks, dead in self.ends:
            rounds = {}
            for ended in ranks:
                for round_, kind in ended:
                    if kind != "rejected":
                        rounds.setdefault(round_, set()).add(kind)
                if len({round_ for round_, _ in ended}) < len(ended):
                    found.append((ranks, dead))  # two calls have ended in the same round
            living = [end for rank, end in enumerate(ranks) if rank not in dead]
            all_agree = all(ended and ended[-1].kind == "agreed" for ended in living)
            if any(len(kinds) > 1 for kinds in rounds.values()) or not (dead or all_agree):
                found.append((ranks, dead))
        return found


SKIPPED = {"scope", "entries", "threads", "began", "deadline", "title", "_connections", "_lock"}
"""Fields that are the same in all states, or that no step uses."""


def plain(value):
    """Return the state of an object as text."""
    if isinstance(value, (Member, Memory)):
        fields = [field.name for field in attrs.fields(type(value)) if field.name not in SKIPPED]
        return repr([plain(getattr(value, name)) for name in fields])
    if isinstance(value, Scope) or callable(value):
        return ""
    if attrs.has(type(value)):
        return repr([plain(getattr(value, field.name)) for field in attrs.fields(type(value))])
    return repr(value)


DEEDS = ["", "differs", "fails", "rejects", "is interrupted"]
both = pytest.mark.parametrize("is_connecting", [False, True], ids=["local", "connecting"])


# However the operations of two ranks interleave, each round has the same outcome on both ranks.
# Once both ranks make normal calls, they agree.
@both
@pytest.mark.parametrize("first", DEEDS)
@pytest.mark.parametrize("second", DEEDS)
def test_two_ranks_have_one_outcome(first, second, is_connecting):
    search = Search([first, second], is_connecting=is_connecting)
    assert search.ends
    assert search.broken() == []


# Two ranks that cannot connect to each other also have the same outcome.
@pytest.mark.parametrize("second", ["cannot connect", "fails", "is interrupted"])
def test_two_ranks_that_cannot_connect(second):
    search = Search(["cannot connect", second], late=1, is_connecting=True)
    assert search.ends
    assert search.broken() == []


# Three ranks, one of which does a deed, also have the same outcome.
@both
@pytest.mark.parametrize(
    "deed", ["", *(pytest.param(one, marks=pytest.mark.slow) for one in DEEDS[1:])]
)
def test_three_ranks_have_one_outcome(deed, is_connecting):
    search = Search(["", "", deed], is_connecting=is_connecting)
    assert search.ends
    assert search.broken() == []


# At any operation, a rank may wait for too long, die, or lose the operation. The other ranks have
# the same outcome.
@both
@pytest.mark.parametrize("deed", ["", pytest.param("fails", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("deaths", "late", "lost"),
    [
        (0, 1, 0),
        (0, 0, 1),
        pytest.param(1, 1, 0, marks=pytest.mark.slow),
        pytest.param(0, 2, 0, marks=pytest.mark.slow),
    ],
)
def test_one_outcome_after_faults(deed, deaths, late, lost, is_connecting):
    search = Search(["", deed], deaths, late, lost, is_connecting)
    assert search.ends
    assert search.broken() == []


# Ranks 0 and 1 wait for each other in different calls. This is no circle of waits if the round of
# one call has ended, even if the waiting rank has not noticed the end yet. There is no circle
# either if rank 1 has another thread.
@pytest.mark.parametrize(("ended", "threads"), [("", 1), ("own", 1), ("other", 1), ("", 2)])
def test_circle_of_waits_ignores_ended_rounds(ended, threads):
    own, other = (
        Status(
            rank, f"rank {rank}", "host", name, "", name, 0, (1 - rank,), 1 + rank * (threads - 1)
        )
        for rank, name in enumerate(["own", "other"])
    )
    held = {status_key("job", 1): other.encode()}
    for name in ("own", "other"):
        outcome = AGREED if name == ended else None
        held[name] = Record(0, Proposer(0, "rank 0", "host", "", ""), outcome).encode()
    steps = find_circle("job", own, {})
    reply = found = None
    while found is None:
        try:
            reply = perform(held, steps.send(reply))
        except StopIteration as end:
            found = end.value
    assert found == ([] if ended or threads > 1 else [own, other])


def scope_of(rank):
    """Return a scope of two ranks."""
    world = World(rank, 2, "gloo", has_store=True)
    return Scope(world, "record", range(2), memory=Memory("job", f"{rank}"))


def run_alone(scope, held, seconds=0.0, *, is_connecting=False):
    """Run a call of one rank on a dict, up to its end or to a wait for a key that is not set."""
    member = Member(scope, "call()", lambda: ["same"], 0.0, DEADLINE_S, is_connecting)
    steps = member.call()
    reply = None
    while True:
        try:
            asks = steps.send(reply)
        except StopIteration as end:
            return end.value
        if isinstance(asks, Now):
            reply = Moment(seconds)
        else:
            reply = True if isinstance(asks, Work) else perform(held, asks)
        if isinstance(asks, Wait) and reply is None:
            return None


# If the work of only one of two ranks connects to the other rank, the outcome is "differs".
# Otherwise the ranks would wait for each other.
@pytest.mark.parametrize("first", [False, True])
def test_ranks_differ_if_only_one_connects(first):
    held = {}
    assert run_alone(scope_of(0), held, is_connecting=first) is None
    assert run_alone(scope_of(1), held, is_connecting=not first).kind == "differs"


# If the deadline of a rank has passed by the time it has proposed a round, the rank does not
# arrive.
def test_rank_past_its_deadline_does_not_arrive():
    held = {}
    outcome = run_alone(scope_of(0), held, 2 * DEADLINE_S)
    assert outcome.kind == "missing"
    assert outcome.absent == (0,)
    assert Record.decode("job/record", held["job/record"]).outcome == outcome
    assert not any("/done/" in key for key in held)


# If a rank has entered a round and then left it because of the store, its next call ends this
# round. The rank cannot enter again, because its bit is already set. Adding the bit again would set
# the bit of rank 1.
def test_round_that_was_entered_before_is_ended():
    held = {}
    scope = scope_of(0)
    assert run_alone(scope, held) is None
    assert run_alone(scope, held) is None
    record = Record.decode("job/record", held["job/record"])
    assert record.round == 1
    assert record.outcome is None
    assert [outcome.kind for outcome in record.failed] == ["failed"]


def reject_alone(scope, held):
    """Run `Member.refuse` of one rank on a dict."""
    steps = Member(scope, "call()", list, 0.0, DEADLINE_S).refuse("no such file")
    reply = None
    while True:
        try:
            reply = perform(held, steps.send(reply))
        except StopIteration as end:
            return end.value


# If an outcome has a token, a rank raises this outcome only once. Its next call begins a new round.
def test_outcome_with_a_token_is_raised_once():
    held = {}
    scope = scope_of(1)
    differs = Outcome("differs", "the same mistake", token="a circle")
    first = Proposer(0, "rank 0", "host", "digest", "token")
    held["job/record"] = Record(0, first, differs).encode()
    scope.memory.reported.add("a circle")
    assert run_alone(scope, held) is None
    assert Record.decode("job/record", held["job/record"]).round == 1


# If a rank rejects a call on which the others have timed out, it begins no round, because then the
# next call of the others would fail.
def test_rejection_after_a_timeout_begins_no_round():
    held = {}
    first = Proposer(0, "rank 0", "host", "digest", "token")
    missing = Outcome("missing", "rank 1 did not join", (1,), (1,))
    held["job/record"] = Record(0, first, missing).encode()
    assert reject_alone(scope_of(1), held) == missing
    assert Record.decode("job/record", held["job/record"]).round == 0


# Ranks that continue without a rank can make several calls. The calls of the excluded rank fail.
def test_fenced_calls():
    held = {}
    scopes = [attrs.evolve(scope_of(rank), is_fenced=True) for rank in (0, 1)]
    for number in range(2):
        assert run_alone(scopes[0], held) is None
        assert run_alone(scopes[1], held) == AGREED
        for scope in scopes:
            scope.memory.leave("record", number)
        scopes[0].memory.agreed["record"] = number  # as in a call, once the rank is woken
    late = attrs.evolve(scope_of(0), is_fenced=True)
    outcome = run_alone(late, held)
    assert outcome.kind == "failed"
    assert "have continued without rank 0" in outcome.text


# If a round has agreed, the record of the next round lists no failures. If a round has failed, the
# record of the next round lists that failure and the earlier failures.
def test_next_record():
    first = Proposer(0, "rank 0", "host", "digest", "token")
    failed = Outcome("failed", "no memory")
    agreed = Record(2, first, AGREED, (failed,), 0).next(first)
    assert (agreed.round, agreed.failed, agreed.agreed_before) == (3, (), 2)
    again = Record(2, first, failed, (failed,), 0).next(first)
    assert (again.round, again.failed, again.agreed_before) == (3, (failed, failed), 0)


# The key of a block is deleted once all ranks of the block are marked. These ranks do not count as
# missing.
def test_complete_block_has_no_missing_ranks():
    tree = Tree("tree", 130)
    held = {}

    def run(steps):
        reply = None
        while True:
            try:
                reply = perform(held, steps.send(reply))
            except StopIteration as end:
                return end.value

    for position in range(60):
        is_last, complete = run(tree.mark(position))
        assert not is_last
        for key in complete:
            del held[key]
    assert run(tree.unmarked(3)) == [60, 61, 62]
    assert run(tree.look_around(7)) == ([], 7)
    assert run(tree.unmarked()) == [*range(60, 130)]
