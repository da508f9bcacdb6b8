"""Every schedule of one meeting: its generators are driven on a dict, in all orders there are.

Each operation is a place where any other rank may come first, the clock may tick, a rank may die,
be interrupted, or lose its link. What an interrupted rank had asked may still be done, later or
never. A state is what each rank has been answered, what the store holds, and the time; each is
looked at once; where there are millions, a drawn part of them is.
"""

import math
from collections import Counter
from functools import lru_cache, partial
from random import Random
from typing import NamedTuple

import attrs
import pytest
from hypercomm.process_groups.agreement.arrival import arrive
from hypercomm.process_groups.agreement.meeting import (
    Check,
    Delete,
    End,
    Exchange,
    Now,
    Publish,
    Read,
    Said,
    Sleep,
    compare,
    decide,
    end_of,
)

from hypercomm.process_groups.agreement import arrival, meeting

pytestmark = pytest.mark.any_torch

PLACE, SLOT = "step 0", "slot"
PART = 300_000  # states, in about 20 s; all of the largest search take some minutes
INTERRUPT, BREAK = "is interrupted", "loses its link"
ELSEWHERE = End("differs", words="another grid", about=SLOT)

# ---- what a rank does -----------------------------------------------------------------------


def differ(first, own):
    return None if first.entries == own.entries else f"{first.entries} {own.entries}"


def member(rank, size, deed, deadline):
    """Compare, work, and wait for all; gives the end, and what is raised once it is obeyed."""
    said = Said(rank, "host", ("other" if deed == "differs" else "same",))
    try:
        end = yield from compare(f"{PLACE}/0", said, differ, PLACE)
    except (RuntimeError, KeyboardInterrupt):
        return None, "has not entered"
    if end is None and deed == "fails":
        end = yield from decide(PLACE, End("failed", words="no such file"))
    if end is not None:
        return end, None
    end, pending = yield from arrive(PLACE, rank, range(size), deadline, lambda: end_of(SLOT))
    return end, pending and type(pending).__name__


@attrs.define(eq=False)
class Node:
    """Where a rank is: what it asks next, or how it has ended; and how it has come there once."""

    answers: tuple
    asks: object = None
    end: object = None
    after: dict = attrs.field(factory=dict)


class Graph:
    """All that a rank may come to: a generator's state is where each frame is, and its locals.

    An operation is the last thing in all expressions that have one, so that nothing is lost.
    """

    def __init__(self, make):
        self.make = make
        self.nodes = {}
        self.root = self.node(())

    def node(self, answers):
        run, asks, end = self.make(), None, None
        try:
            asks = next(run)
            for answer in answers:
                if answer == INTERRUPT:
                    asks = run.throw(KeyboardInterrupt())
                elif answer == BREAK:
                    asks = run.throw(RuntimeError("the link broke"))
                else:
                    asks = run.send(answer)
        except StopIteration as stop:
            asks, end = None, stop.value
        except BaseException as error:  # noqa: BLE001 - it is how the rank ends
            asks, end = None, ("raised", type(error).__name__)
        place = repr(end) if asks is None else tuple(frames(run))
        return self.nodes.setdefault(place, Node(answers, asks, end))

    def after(self, node, answer):
        key = type(answer), answer
        if key not in node.after:
            node.after[key] = self.node((*node.answers, answer))
        return node.after[key]


def frames(run):
    while run is not None:
        yield run.gi_code, run.gi_frame.f_lasti, repr(run.gi_frame.f_locals)
        run = run.gi_yieldfrom


# ---- all that may happen ----------------------------------------------------------------------


class State(NamedTuple):
    """Where all are; a tuple, as there are hundreds of thousands.

    Attributes:
        ranks: The node of each rank; None: it has died.
        awake: Whether anything has changed since a rank woke: else it need not look again.
        held: What the store holds.
        sent: What interrupted ranks had asked, and the store has not heard so far.
        came: When each rank arrived, None: it has not.
        clock: The time.
        left: How often each fault may still happen.
    """

    ranks: tuple
    awake: tuple
    held: frozenset
    sent: tuple
    came: tuple
    clock: int
    left: tuple


FAULTS = "kills", "interrupts", "breaks", "slots"


@attrs.define(slots=False)
class Search:
    """Looks at every state that ranks can come to.

    Attributes:
        deeds: What each rank does.
        deadline: When all give up, in ticks of the clock.
        faults: How often each may happen at most.
        is_coarse: Whether the clock is read together with the answer before it.
        most: How many states are looked at.
    """

    deeds: tuple
    deadline: int = 1
    faults: dict = attrs.field(factory=dict)
    is_coarse: bool = False
    most: float = math.inf
    ends: Counter = attrs.field(factory=Counter)
    wrong: list = attrs.field(factory=list)
    known: dict = attrs.field(factory=dict)

    def run(self):
        """Return how many states there are."""
        size = len(self.deeds)
        self.graphs = [
            Graph(partial(member, rank, size, deed, self.deadline))
            for rank, deed in enumerate(self.deeds)
        ]
        ranks = tuple(graph.root for graph in self.graphs)
        left = tuple(self.faults.get(name, 0) for name in FAULTS)
        first = State(ranks, (True,) * size, frozenset(), (), (None,) * size, 0, left)
        seen, waiting, drawn = {first}, [first], Random(0)
        while waiting and len(seen) < self.most and len(self.wrong) < 3:
            at = drawn.randrange(len(waiting))
            waiting[at], waiting[-1] = waiting[-1], waiting[at]
            state = waiting.pop()
            after = list(self.moves(state))
            if not after or all(node is None or node.asks is None for node in state.ranks):
                self.check_end(state)
            for one in after:
                if one not in seen:
                    seen.add(one)
                    waiting.append(one)
        return len(seen)

    def moves(self, state):
        """Give every state that may come next."""
        goes_on = [rank for rank, node in enumerate(state.ranks) if node and node.asks is not None]
        for rank in goes_on:
            if state.awake[rank] or not isinstance(state.ranks[rank].asks, Sleep):
                yield self.asked(state, rank)
            yield from self.strokes(state, rank)
        if not goes_on:
            return
        for at, asked in enumerate(state.sent):
            rest = state.sent[:at] + state.sent[at + 1 :]
            yield self.done(state._replace(sent=rest), self.known[asked])[0]
        if state.clock < self.deadline + (len(self.deeds) > arrival.FAN_OUT):
            awake = (True,) * len(self.deeds)
            yield state._replace(clock=state.clock + 1, awake=awake)
        for rest in one_less(state, "slots"):
            yield self.done(rest, Publish({SLOT: meeting.Register(end=ELSEWHERE).text()}))[0]

    def strokes(self, state, rank):
        """Give what may befall a rank."""
        asked = state.ranks[rank].asks
        for rest in one_less(state, "kills"):
            yield rest._replace(ranks=put(state.ranks, rank, None))
        for rest in one_less(state, "interrupts"):
            for sent in (state.sent, *self.still_sent(state, asked)):
                yield self.told(rest._replace(sent=sent), rank, INTERRUPT)
        if not isinstance(asked, (Now, Sleep)):
            for rest in one_less(state, "breaks"):  # before it was heard, or after
                yield self.told(rest, rank, BREAK)
                yield self.told(self.done(rest, asked)[0], rank, BREAK)

    def still_sent(self, state, asked):
        """What a worker may still ask for a rank that was interrupted."""
        if isinstance(asked, (Exchange, Publish, Delete)):
            self.known[repr(asked)] = asked
            yield (*state.sent, repr(asked))

    def asked(self, state, rank):
        """A rank's operation is done, and it hears the answer."""
        after, answer = self.done(state, state.ranks[rank].asks)
        if isinstance(state.ranks[rank].asks, Sleep):
            after = after._replace(awake=put(after.awake, rank, False))
        return self.told(after, rank, answer)

    def told(self, state, rank, answer):
        """A rank is answered."""
        node = self.graphs[rank].after(state.ranks[rank], answer)
        while self.is_coarse and isinstance(node.asks, Now):
            node = self.graphs[rank].after(node, float(state.clock))
        after = state._replace(ranks=put(state.ranks, rank, node))
        if node.asks is None:
            after = after._replace(awake=put(after.awake, rank, False))
            self.check_left(after, rank)
        return after

    def done(self, state, asked):
        """An operation is done in the store: what is then, and the answer."""
        held, answer = dict(state.held), None
        match asked:
            case Now():
                answer = float(state.clock)
            case Read(key):
                answer = held.get(key)
            case Check(keys):
                answer = all(key in held for key in keys)
            case Publish(texts):
                held.update(texts)
            case Delete(keys):
                for key in keys:
                    held.pop(key, None)
            case Exchange(key, expected, text):
                if held.get(key, "") == expected:
                    held[key] = text
                answer = held.get(key, expected)
        after = frozenset(held.items())
        if after == state.held:
            return state, answer
        came = tuple(
            state.clock if then is None and f"{PLACE}/here/{rank}" in held else then
            for rank, then in enumerate(state.came)
        )
        self.check_once(state, after)
        awake = tuple(node is not None and node.asks is not None for node in state.ranks)
        return state._replace(held=after, came=came, awake=awake), answer

    # ---- what must hold ---------------------------------------------------------------------

    def check(self, is_so, law, state):
        if not is_so:
            ranks = [node and (node.answers, node.asks, node.end) for node in state.ranks]
            self.wrong.append((law, ranks, sorted(state.held), state.clock, state.came))

    def check_once(self, state, after):
        """A place ends once, and as the ranks are."""
        before, now = (end_in(held) for held in (state.held, after))
        if now == before:
            return
        self.check(before is None, f"a place ended twice: {before}, {now}", state)
        if now is not None:
            came = state.came
            self.ends[now.kind] += 1
            if now.kind == "agreed":
                self.check(None not in came, "agreed before all had come", state)
            elif now == ELSEWHERE:
                self.check(self.faults.get("slots") != state.left[3], "no slot ended", state)
            elif now.kind == "differs":
                self.check(
                    len({deed == "differs" for deed in self.deeds}) > 1, "none differs", state
                )
            elif now.kind == "missing":
                self.check(now.ranks, "nobody is missing", state)
                late = [came[rank] is None or came[rank] >= self.deadline for rank in now.ranks]
                self.check(all(late), f"{now} names who came in time", state)
            elif now.words == "no such file":
                self.check("fails" in self.deeds, "nobody has failed", state)
            else:
                may = self.faults.get("interrupts", 0) + self.faults.get("breaks", 0)
                self.check(may, f"nobody was interrupted: {now}", state)

    def check_left(self, state, rank):
        """Nobody leaves without the end that stands, unless its link broke, or it never came."""
        end, pending = state.ranks[rank].end
        if pending == "has not entered":
            self.check(state.came[rank] is None, "came, and has not entered", state)
        elif end == "raised":
            self.check(self.faults.get("breaks") and pending == "RuntimeError", pending, state)
        else:
            self.check(end == end_in(state.held), f"rank {rank} left by {end}", state)

    def check_end(self, state):
        """Nobody waits for ever; and where nothing has happened, nothing is left."""
        for rank, node in enumerate(state.ranks):
            self.check(node is None or node.asks is None, f"rank {rank} waits for ever", state)
        if not self.faults and None not in state.came:
            keys = {key for key, _ in state.held}
            self.check(keys <= {PLACE, f"{PLACE}/0"}, f"left: {keys}", state)


def one_less(state, fault):
    """The state in which a fault may happen once less, if it still may."""
    at = FAULTS.index(fault)
    if state.left[at]:
        yield state._replace(left=put(state.left, at, state.left[at] - 1))


def put(values, at, value):
    return (*values[:at], value, *values[at + 1 :])


def end_in(held):
    for key, text in held:
        if key == PLACE:
            return end_said(text)
    return None


@lru_cache(1000)
def end_said(text):
    return meeting.read_register(PLACE, text).end


# ---- the searches -----------------------------------------------------------------------------


ARRIVES, DIFFERS, FAILS = "arrives", "differs", "fails"
ENDS = {ARRIVES: {"agreed", "missing"}, DIFFERS: {"differs", "missing"}}
ENDS[FAILS] = {"failed", "missing"}


def search(deeds, least, kinds, **options):
    """Search all, which must be many, and come to every end that there may be."""
    made = Search(deeds, **options)
    count = made.run()
    print(f"{deeds}, {made.faults}: {count:,} states, {dict(made.ends)}")
    assert made.wrong == []
    assert count >= least
    assert made.ends.keys() == kinds


# Two ranks that mean the same, or of which one differs or fails: all leave by one end.
@pytest.mark.parametrize(("deed", "least"), [(ARRIVES, 4_000), (DIFFERS, 500), (FAILS, 400)])
def test_two_ranks(deed, least):
    search((ARRIVES, deed), least, ENDS[deed])
    search((deed, ARRIVES), least, ENDS[deed])


# The same where one dies and one is interrupted, whenever it may be.
@pytest.mark.parametrize(
    ("deed", "least"), [pytest.param(ARRIVES, 20_000, marks=pytest.mark.slow), (DIFFERS, 2_500)]
)
def test_two_ranks_a_kill_and_an_interrupt(deed, least):
    faults = {"kills": 1, "interrupts": 1}
    search((ARRIVES, deed), least, ENDS[deed] | {"failed"}, faults=faults)


# The same where a question is lost, or its answer; and where a place that is watched ends.
@pytest.mark.parametrize(
    ("fault", "least", "deadline"),
    [("breaks", 15_000, 1), pytest.param("slots", 40_000, 2, marks=pytest.mark.slow)],
)
def test_two_ranks_and_another_fault(fault, least, deadline):
    kinds = ENDS[ARRIVES] | {"failed" if fault == "breaks" else "differs"}
    search((ARRIVES, ARRIVES), least, kinds, faults={fault: 1}, deadline=deadline)


# Three ranks.
@pytest.mark.long
@pytest.mark.parametrize(
    ("deed", "least"),
    [
        pytest.param(ARRIVES, PART, marks=pytest.mark.slow),
        (DIFFERS, 10_000),
        pytest.param(FAILS, 15_000, marks=pytest.mark.slow),
    ],
)
def test_three_ranks(deed, least):
    search((ARRIVES, ARRIVES, deed), least, ENDS[deed], is_coarse=True, most=PART)


# Three ranks of which one dies or is interrupted; and two, with all that may happen.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "faults", "least"),
    [
        (3, {"kills": 1}, PART),
        (3, {"interrupts": 1}, PART),
        (3, {"breaks": 1}, PART),
        (2, {"kills": 1, "interrupts": 1, "slots": 1}, 50_000),
        (2, {"kills": 1, "breaks": 1, "slots": 1}, 30_000),
    ],
)
def test_faults_of_three_ranks(size, faults, least):
    kinds = ENDS[ARRIVES] | ({"failed"} if {"interrupts", "breaks"} & faults.keys() else set())
    kinds |= {"differs"} if "slots" in faults else set()
    search((ARRIVES,) * size, least, kinds, faults=faults, is_coarse=size > 2, most=PART)


# Three ranks in a chain, each of which waits for the next one only.
@pytest.mark.slow
def test_a_chain_of_three_ranks(monkeypatch):
    monkeypatch.setattr(arrival, "FAN_OUT", 1)
    search((ARRIVES,) * 3, PART, ENDS[ARRIVES], is_coarse=True, most=PART)


# The search can fail: without the last look, a rank that has come is named, itself even.
def test_the_search_finds_what_is_wrong(monkeypatch):
    def hasty(key, ranks, part, found, *, lacks_some):
        if not lacks_some and (yield Check([arrival._here(key, ranks[at]) for at in part])):
            return
        if len(part) == 1:
            found.append(ranks[part[0]])
            return
        half, before = len(part) // 2, len(found)
        yield from hasty(key, ranks, part[:half], found, lacks_some=False)
        yield from hasty(key, ranks, part[half:], found, lacks_some=len(found) == before)

    monkeypatch.setattr(arrival, "_search", hasty)
    made = Search((ARRIVES, ARRIVES))
    made.run()
    assert "names who came in time" in made.wrong[0][0]
