"""Every interleaving of the calls of two or three ranks: the protocol's generators, on a dict.

A state is what each rank has been answered, and what the store holds; each is visited once.
"""

from functools import partial
from typing import NamedTuple

import pytest

from hypercomm.process_groups.agreement import protocol
from hypercomm.process_groups.agreement.protocol import (
    AGREED,
    Outcome,
    Proposal,
    Record,
    Status,
    find_deadlock,
    status_key,
)

KEY = "record"


class Look(NamedTuple):
    """Wait until the record holds something else; the reply is "late" if that takes too long."""

    text: str


class Ended(NamedTuple):
    """A call of a rank has ended."""

    round: int
    kind: str


def member(rank, size, deed):
    """Make a call as `Call` does, and again without the deed until all agree."""
    heard = -1
    for turn in range(4):
        does = "" if turn else deed
        own = Proposal(rank, "host", ("other" if does == "differs" else "same",))
        if does == "refuses":
            own = Proposal(rank, "host", refusal="no such file")
            heard = yield from protocol.refuse(KEY, own, heard)
            yield Ended(heard, "refused")
            continue
        ticket = yield from protocol.propose(KEY, own, heard)
        heard, outcome = ticket.round, ticket.record.outcome
        if outcome is None and ticket.record.first.refusal:
            outcome = yield from protocol.decide(ticket, Outcome("failed", "refused"))
        if outcome is None and protocol.first_difference(own, ticket.record.first):
            outcome = yield from protocol.decide(ticket, Outcome("differs", "entries"))
        if outcome is None:
            yield protocol.Append(ticket.arrivals, f"{rank},")
            if does == "fails":
                outcome = yield from protocol.decide(ticket, Outcome("failed", "no memory"))
            else:
                outcome = yield from protocol.finish(ticket, rank, size)
        while outcome is None:
            if (yield Look(ticket.record.text())) == "late":
                states = yield from protocol.read_arrivals(ticket)
                absent = tuple({*range(size)} - {one for one in states if "+" in states[one]})
                outcome = yield from protocol.decide(ticket, Outcome("missing", "", absent, absent))
            else:
                outcome = yield from protocol.read_outcome(ticket)
        yield Ended(ticket.round, outcome.kind)
        if outcome.kind == "agreed":
            return


def perform(held, operation):
    """Perform an operation on a dict, and return the reply."""
    match operation:
        case protocol.Exchange(key, expected, text):
            if held.get(key, "") == expected:
                held[key] = text
            return held.get(key, expected)
        case protocol.Read(key):
            return held.get(key)
        case protocol.Add(key):
            held[key] = str(int(held.get(key, "0")) + 1)
            return int(held[key])
        case protocol.Append(key, text):
            held[key] = held.get(key, "") + text
        case protocol.Delete(keys):
            for key in keys:
                held.pop(key, None)
    return None


class Node:
    """Where a rank is: what it asks, how its calls have ended, and replies that lead there."""

    def __init__(self, replies, asks, ended):
        self.replies, self.asks, self.ended = replies, asks, ended
        self.after = {}


class State(NamedTuple):
    """Where ranks are, what the store holds, who has died, and what may still happen."""

    nodes: tuple
    items: frozenset
    dead: frozenset
    deaths: int
    late: int


class Search:
    """Visits every state.

    Args:
        deeds: What each rank does at its first call.
        deaths: How many ranks may die, each at any operation.
        late: How often a rank may wait for too long.
    """

    def __init__(self, deeds, deaths=0, late=0):
        self.makes = [partial(member, rank, len(deeds), deed) for rank, deed in enumerate(deeds)]
        self.nodes = {}
        first = tuple(self.node(rank, ()) for rank in range(len(deeds)))
        waiting = [State(first, frozenset(), frozenset(), deaths, late)]
        self.seen, self.ends = {*waiting}, set()
        while waiting:
            state = waiting.pop()
            after = {*self.after(state)}
            if not after:
                self.ends.add((tuple(node.ended for node in state.nodes), state.dead))
            waiting += after - self.seen
            self.seen |= after

    def node(self, rank, replies):
        """Return where a rank is after some replies."""
        run, ended, left = self.makes[rank](), [], [*replies]
        try:
            asks = next(run)
            while isinstance(asks, Ended) or left:
                if isinstance(asks, Ended):
                    ended.append(asks)
                    asks = next(run)
                else:
                    asks = run.send(left.pop(0))
        except StopIteration:
            asks = None
        frames, at = [], run
        while at is not None and at.gi_frame is not None:
            frames.append((at.gi_code, at.gi_frame.f_lasti, repr(at.gi_frame.f_locals)))
            at = at.gi_yieldfrom
        place = rank, repr(asks), tuple(ended), tuple(frames)
        return self.nodes.setdefault(place, Node(replies, asks, tuple(ended)))

    def after(self, state):
        """Yield the states that may come next."""
        for rank, node in enumerate(state.nodes):
            if node.asks is None or rank in state.dead:
                continue

            def answered(reply, rank=rank, node=node):
                if reply not in node.after:
                    node.after[reply] = self.node(rank, (*node.replies, reply))
                nodes = list(state.nodes)
                nodes[rank] = node.after[reply]
                return state._replace(nodes=tuple(nodes))

            if state.deaths:
                yield state._replace(dead=state.dead | {rank}, deaths=state.deaths - 1)
            held = dict(state.items)
            if isinstance(node.asks, Look):
                if held.get(KEY) != node.asks.text:
                    yield answered("news")
                elif state.late:
                    yield answered("late")._replace(late=state.late - 1)
            else:
                reply = perform(held, node.asks)
                yield answered(reply)._replace(items=frozenset(held.items()))

    def broken(self):
        """Return the ends that break a promise."""
        found = []
        for ranks, dead in self.ends:
            rounds = {}
            for ended in ranks:
                for round_, kind in ended:
                    if kind != "refused":
                        rounds.setdefault(round_, set()).add(kind)
                if len({round_ for round_, _ in ended}) < len(ended):
                    found.append((ranks, dead))  # a call has heard of an end twice
            living = [end for rank, end in enumerate(ranks) if rank not in dead]
            all_agree = all(ended and ended[-1].kind == "agreed" for ended in living)
            if any(len(kinds) > 1 for kinds in rounds.values()) or not (dead or all_agree):
                found.append((ranks, dead))
        return found


DEEDS = ["", "differs", "fails", "refuses"]


# Whatever one of two ranks does, in every order: a round ends alike for both, and both agree at
# once when nobody does otherwise any more.
@pytest.mark.parametrize("first", DEEDS)
@pytest.mark.parametrize("second", DEEDS)
def test_two_ranks(first, second):
    search = Search([first, second])
    assert search.ends
    assert search.broken() == []


# The same of three ranks, of which one does otherwise.
@pytest.mark.parametrize(
    "deed", ["", *(pytest.param(one, marks=pytest.mark.slow) for one in DEEDS[1:])]
)
def test_three_ranks(deed):
    search = Search(["", "", deed])
    assert search.ends
    assert search.broken() == []


# A rank that waits for too long, or dies, at every operation: the living end alike.
@pytest.mark.parametrize("deed", ["", pytest.param("fails", marks=pytest.mark.slow)])
@pytest.mark.parametrize(("deaths", "late"), [(0, 1), (1, 1)])
def test_faults(deed, deaths, late):
    search = Search(["", deed], deaths, late)
    assert search.ends
    assert search.broken() == []


# Rank 1 waits in another call for rank 0, which has not seen yet that its own call has ended: that
# is a circle only while both rounds are open.
@pytest.mark.parametrize("ended", ["", "own", "other"])
def test_a_circle_that_has_ended(ended):
    own, other = (
        Status(rank, "host", name, "", name, 0, waits_for=(1 - rank,))
        for rank, name in enumerate(["own", "other"])
    )
    held = {status_key("job", 1): other.text()}
    for name in ("own", "other"):
        outcome = AGREED if name == ended else None
        held[name] = Record(0, Proposal(0, "host"), outcome).text()
    steps, reply, found = find_deadlock("job", own, {}), None, None
    while found is None:
        try:
            reply = perform(held, steps.send(reply))
        except StopIteration as end:
            found = end.value
    assert found == ([] if ended else [own, other])
