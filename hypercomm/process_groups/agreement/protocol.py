"""The agreement protocol, written sans-I/O. One generator makes the call of one rank.

The protocol follows three rules:

1. A round has one outcome, which one compare-and-set writes. Every rank adopts this outcome.
2. A rank leaves a round only after it has read or written the outcome of the round.
3. A rank reads the number of the next round from the record, and counts no rounds itself. Ranks
   that failed or were late therefore join the same round as the others.

`Member.call` yields operations and is sent the replies. `driver.Driver` performs the operations in
a job. In tests, a simulated job or a search through all schedules performs them.

Without a fault, a rank sends three requests: to join the round, to set its bit in the tree of
finished ranks, and to wait for the end of the round. If the work connects ranks, a rank first sets
its bit in the tree of arrived ranks and waits until all bits are set. The backend therefore never
waits for a missing rank. Before the first call that only some ranks of a grid make, a rank also
publishes the layout of the grid.

A rank that waits for long publishes its status: the call, and the ranks for which it waits. Errors
can then name the missing ranks, and describe deadlocks. After a failure, the status stays until the
next call of the rank, so that ranks which time out together can read the status of each other.

Shortly before its deadline, or if it could not connect, a rank calls the roll: the ranks that still
work set a bit in a tree. The error names the ranks that have not answered. If a rank answers and is
then lost before the round ends, only the error of the next call names it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import zip_longest

import attrs

from hypercomm.errors import CreationError, HyperCommError
from hypercomm.layout.text import format_coords
from hypercomm.process_groups.agreement.records import (
    AGREED,
    AGREED_TEXT,
    WIDTH,
    Delete,
    Entries,
    Exchange,
    InterruptedCallError,
    MarkedTwiceError,
    Moment,
    Now,
    Outcome,
    Proposer,
    Read,
    Record,
    Status,
    Steps,
    StoreLostError,
    Ticket,
    Tree,
    Wait,
    Work,
    Write,
)
from hypercomm.process_groups.agreement.scope import MOST, MOST_LAYOUTS, Scope, this_host
from hypercomm.process_groups.torch_internals import ConnectionFailedError

_SLOW_S = 0.2
"""Delay before a waiting rank publishes its status and checks the round, in seconds."""

_SLOW_RANKS = 4000
"""The delay in seconds is the world size divided by this number, but at least `_SLOW_S`."""

_FINISHED_S = 0.9
"""Extra wait of finished ranks, in seconds, so that unfinished ranks name the missing ranks."""

_FOLLOW_S = 0.3
"""Extra wait of ranks that search for no deadlocks, in seconds, so that few ranks read trees."""

_SEARCHERS = 16
"""Number of ranks that search for deadlocks in a scope of one block. Otherwise one per block."""

_PULSE_S = 0.5
"""Interval at which a rank that connects checks the round, in seconds."""

_PULSE_RANKS = 1000
"""The interval in seconds is the world size divided by this number, but at least `_PULSE_S`."""

_ROLL_PULSES = 4
"""A rank calls the roll this many intervals before its deadline."""

_ANSWER_PULSES = 1.5
"""A rank that has not answered the roll call after this many intervals is named.

An alive rank answers within 1.25 intervals, because its driver notices with a delay of up to a
quarter of an interval that it must check the round.
"""

_EXTRA_S = 0.8
"""Longest time by which a rank exceeds its deadline to wait for answers, in seconds."""

_FIRST_S = 1.0
"""Longest wait, in seconds, for the first proposal if the proposal of this rank differs."""

SAME_CALLS = "every rank must make the same calls in the same order"

_GO = "go"

_CONNECTING = "members connect at the creation"
"""The last entry of a proposal, if the work needs the other ranks."""


class EndedCallError(Exception):
    """Raised to end the call on this rank. The round does not change, except with `ends_own`.

    Args:
        outcome: The outcome of the call.
        ends_own: Whether this rank also ends the round with this outcome if it began the round.
    """

    def __init__(self, outcome: Outcome, *, ends_own: bool = False) -> None:
        super().__init__(outcome.text)
        self.outcome = outcome
        self.ends_own = ends_own


# ---- one round ----------------------------------------------------------------------------------


def _delete_before(ended: Ticket) -> Steps[None]:
    """Delete the keys of the round before `ended`, because all ranks have left that round."""
    if ended.round == 0:
        return
    before = ended.before
    is_agreed = ended.record.outcome == AGREED
    # The ranks of an agreed round have deleted the keys of this round, except `end`. They have also
    # deleted `end` of the previous round.
    keys = [] if is_agreed else [before.end]
    if ended.record.failed:
        trees = (before.arrived, before.done, before.alive)
        keys += [before.first, before.go, before.roll]
        keys += [key for tree in trees for key in tree.all_keys()]
    if keys:
        yield Delete(keys)


def decide(ticket: Ticket, outcome: Outcome) -> Steps[Outcome]:
    """End a round and wake its ranks, unless the round has already ended. Return its outcome."""
    record = ticket.record
    while True:
        expected = record.encode()
        wanted = attrs.evolve(record, outcome=outcome).encode()
        text = yield Exchange(ticket.key, expected, wanted)
        if text == wanted:
            break
        if text == expected:
            raise CreationError(f"the store has lost its key {ticket.key!r}; restart the job")
        record = Record.decode(ticket.key, text)
        found = record.outcome_of(ticket.round)
        if found is not None:
            outcome = found
            break
    if record.round == ticket.round:
        yield Write(ticket.end, outcome.encode())
        if outcome.kind != "agreed":
            yield Write(ticket.go, outcome.encode())
    return outcome


def read_record(key: str) -> Steps[Record | None]:
    """Return the record that a key holds, or None if it is not set."""
    text = yield Read(key)
    return None if text is None else Record.decode(key, text)


def read_outcome(ticket: Ticket) -> Steps[Outcome | None]:
    """Return the outcome of a round, or None while it is open."""
    record = yield from read_record(ticket.key)
    return None if record is None else record.outcome_of(ticket.round)


# ---- differences --------------------------------------------------------------------------------


def as_entry(headline: str, options: dict[str, object]) -> str:
    r"""Return one entry of a proposal as text, which ranks compare.

    >>> as_entry("tp over 2 groups", {"timeout": "0:00:20", "share": "never"})
    'tp over 2 groups\ntimeout: 0:00:20\nshare: never'
    """
    return "\n".join([headline, *(f"{name}: {value}" for name, value in options.items())])


def digest_of(lines: Iterable[str]) -> str:
    """Return a short digest that is equal for equal entries."""
    return hashlib.sha256(json.dumps(list(lines)).encode()).hexdigest()[:16]


def first_difference(own: Sequence[str], theirs: Sequence[str], here: str, there: str) -> str:
    """Describe the first entry in which the proposals of two ranks differ.

    Args:
        own: The entries of this rank.
        theirs: The entries of the first rank.
        here: The name of this rank.
        there: The name of the first rank.
    """
    pairs = zip_longest(own, theirs, fillvalue="nothing more")
    for position, (mine, other) in enumerate(pairs):
        if mine == other:
            continue
        headline, *options = mine.split("\n")
        other_headline, *others = other.split("\n")
        if headline != other_headline or len(options) != len(others):
            return (
                f"ranks differ at position {position}: {here} calls {headline}, and {there}, "
                f"which arrived first, calls {other_headline}"
            )
        fields = differing(zip(options, others, strict=True), here, there)
        return f"{fields}; ranks differ at position {position}, {headline}"
    return f"the call of {here} differs from the call of {there}, which arrived first"


def differing(pairs: Iterable[tuple[str, str]], here: str, there: str) -> str:
    """Describe the options that differ between two ranks.

    >>> differing([("share: a", "share: a"), ("timeout: 1", "timeout: 2")], "rank 0", "rank 1")
    'timeout: 1 on rank 0, 2 on rank 1'
    """
    return "; ".join(
        f"{mine} on {here}, {theirs.partition(': ')[2]} on {there}"
        for mine, theirs in pairs
        if mine != theirs
    )


# ---- ranks that wait for each other --------------------------------------------------------------


def status_key(namespace: str, rank: int) -> str:
    """Return the key that holds the status of a rank."""
    return f"{namespace}/rank {rank}"


def read_status(namespace: str, rank: int) -> Steps[Status | None]:
    """Return the status of a rank, or None if the rank has published none or has continued since.

    Raises:
        CreationError: The key does not hold a status.
    """
    key = status_key(namespace, rank)
    text = yield Read(key)
    return Status.decode(key, text) if text else None


def layouts_key(namespace: str, rank: int) -> str:
    """Return the key that holds the layouts of the grids in which a rank has made calls."""
    return f"{namespace}/layouts/{rank}"


def find_circle(
    namespace: str, own: Status, known: dict[int, Status | None]
) -> Steps[list[Status]]:
    """Return a circle of ranks that wait for each other in different rounds, or [].

    The circle contains one rank of each round. Each rank waits for the next rank in the circle. The
    first rank is in the same round as the calling rank.

    The result is [] if a rank in the circle has several waiting threads, because another thread of
    this rank may end the wait. Every status is read twice, because a rank may be about to continue.

    Args:
        namespace: The prefix of all keys.
        own: The status of this rank.
        known: Receives each status that was read, by rank.
    """
    known[own.rank] = own
    circle = yield from _find_way_back(namespace, [own], known)
    if any(status.threads > 1 for status in circle):
        return []
    for status in circle:
        record = yield from read_record(status.key)
        if record is None or record.outcome_of(status.round) is not None:
            return []
        if status is not own and (yield from read_status(namespace, status.rank)) != status:
            return []
    return circle


def _find_way_back(
    namespace: str, path: list[Status], known: dict[int, Status | None]
) -> Steps[list[Status]]:
    """Extend a path of waiting ranks to a circle. Return the circle, or [] if there is none."""
    for rank in path[-1].waits_for[:MOST]:
        if rank not in known:
            known[rank] = yield from read_status(namespace, rank)
        status = known[rank]
        if status is None or status.outcome is not None or len(path) == MOST:
            continue
        if len(path) > 1 and status.place == path[0].place:
            return [status, *path[1:]]
        if any(status.place == one.place for one in path):
            continue
        found = yield from _find_way_back(namespace, [*path, status], known)
        if found:
            return found
    return []


def explain_circle(circle: Sequence[Status]) -> Outcome:
    """Return the outcome with which every round of a circle ends."""
    own, *others = circle
    waits = "; ".join(
        f"{status.name} waits in {status.call} for {ahead.title}"
        for status, ahead in zip(circle, [*others, own], strict=True)
    )
    token = min(f"{status.key}#{status.round}" for status in circle)
    different = [one for one in others if one.grid not in ("", own.grid)]
    if not different or not own.grid:
        text = f"ranks wait for each other in different calls: {waits}; {SAME_CALLS}"
        return Outcome("differs", text, token=token)
    mine = json.loads(own.grid)
    theirs = json.loads(different[0].grid)
    fields = [(f"{name}: {mine[name]}", f"{name}: {theirs.get(name)}") for name in mine]
    text = (
        f"{differing(fields, own.name, different[0].name)}; ranks have built different grids; "
        f"every rank must build the same grids in the same order, or give each grid a name=...; "
        f"{waits}"
    )
    grids = dict.fromkeys(status.grid for status in circle if status.grid)
    return Outcome("differs", text, grids=tuple(grids), token=token)


# ---- the call of one rank -----------------------------------------------------------------------


@attrs.define(eq=False)
class Member:
    """The calling rank in one call of a scope.

    Args:
        scope: The ranks that make the call together.
        title: The call, as users know it.
        entries: Returns the proposal of this rank, which must be equal on all ranks.
        began: The time at which the call began.
        deadline: The time at which this rank stops waiting.
        is_connecting: Whether the work needs the other ranks. If so, the work begins once all
            ranks have arrived.
        threads: Returns how many threads of this process wait for other ranks of the world.
        limit_s: The timeout of the call in seconds, which is equal on all ranks. Default: the time
            from `began` to `deadline`, which is shorter if this rank has waited for a lock.

    Attributes:
        ticket: The round, or None before this rank has made its proposal.
        is_working: Whether this rank has begun its work.
        is_finished: Whether this rank has finished its work.
        error: An error of this rank, which this rank raises in place of the outcome.
    """

    scope: Scope
    title: str
    entries: Callable[[], Sequence[str]]
    began: float
    deadline: float
    is_connecting: bool = False
    threads: Callable[[], int] = attrs.field(default=lambda: 1, repr=False)
    limit_s: float = attrs.field()
    ticket: Ticket | None = None
    is_working: bool = False
    is_finished: bool = False
    error: BaseException | None = None
    _is_first: bool = False
    _roll_seen_s: float = math.inf
    _has_answered: bool = False
    _reports: tuple[int, ...] | None = None
    _peers: dict[int, Status] = attrs.field(factory=dict)

    @limit_s.default
    def _time_left(self) -> float:
        return self.deadline - self.began

    def call(self) -> Steps[Outcome]:
        """Join the round, do the work, and return the outcome, which is the same on all ranks."""
        try:
            yield from self._join()
            if self.is_connecting:
                yield from self._gather(self._round.arrived, self._round.go)
            self.is_working = True
            yield from self._do_work()
            self.is_finished = True
            yield from self._gather(self._round.done, self._round.end)
            outcome = AGREED
        except EndedCallError as ended:
            outcome = ended.outcome
            if ended.ends_own and self._is_first:
                yield from self._decide(outcome)
        except GeneratorExit:
            raise
        except BaseException as error:  # noqa: BLE001 - other ranks must not wait for this rank
            outcome = yield from self._fail(error)
        yield from self._report_end(outcome)
        self.leave(outcome)
        return outcome

    def leave(self, outcome: Outcome | None) -> None:
        """Remember that this rank has left the round. The outcome is None if it is unknown."""
        memory = self.scope.memory
        path = self.scope.path
        if outcome is not None and outcome.token:
            memory.reported.add(outcome.token)
        if self.ticket is not None:
            memory.leave(path, self.ticket.round)
            if outcome == AGREED:
                memory.agreed[path] = self.ticket.round
                if self._roll_seen_s < math.inf:
                    alive = self.ticket.alive.keys_of(self.scope.position)
                    memory.stale += [self.ticket.roll, *(alive if self._has_answered else [])]

    def interrupt(self, reason: str) -> Steps[Outcome]:
        """End the round because this rank was interrupted.

        If the steps of `call` are stuck, another thread may run these steps.
        """
        if self.ticket is None:
            return (yield from self.refuse(reason))
        return (yield from self._decide(Outcome("failed", reason)))

    def end_by(self, steps: Steps[Outcome]) -> Steps[Outcome]:
        """End the round with `steps`, because the worker of `call` is stuck, and report the end."""
        outcome = yield from steps
        yield from self._report_end(outcome)
        return outcome

    def time_out(self, moment: Moment) -> Steps[Outcome]:
        """End the round at the deadline.

        If the steps of `call` are stuck, another thread may run these steps.
        """
        scope = self.scope
        ticket = self.ticket
        entered = scope.memory.entered.get(scope.path)
        if moment.was_stopped and (ticket is None or ticket.round != entered):
            return self._late(scope.world.rank)  # the others have stopped waiting
        no_reply = Outcome("failed", f"{scope.name} failed: the store did not answer")
        if ticket is None:
            return no_reply  # `refuse` could fail the next call of the other ranks
        key = ticket.end if self.is_working else ticket.go
        tree = ticket.done if self.is_working else ticket.arrived
        outcome = yield from self._find_missing(tree, key, moment)
        return (yield from self._decide(outcome or no_reply))

    def refuse(self, reason: str, data: str = "") -> Steps[Outcome]:
        """Fail the open round, or the next one that the other ranks begin, without waiting."""
        scope = self.scope
        key = yield from scope.read_key()
        first = self._proposer("")
        refusal = Outcome("failed", reason, data=data, token=first.token)
        scope.memory.reported.add(first.token)  # even if the reply of the store is lost
        ticket = yield from self._propose(key, first, refusal)
        outcome = ticket.record.outcome
        if outcome is None:
            outcome = yield from decide(ticket, refusal)
        scope.memory.leave(scope.path, ticket.round)
        return outcome

    @property
    def _round(self) -> Ticket:
        if self.ticket is None:
            raise RuntimeError(f"{self.title} has not proposed anything")
        return self.ticket

    def _decide(self, outcome: Outcome) -> Steps[Outcome]:
        return (yield from decide(self._round, outcome))

    def _end(self, outcome: Outcome) -> Steps[None]:
        """End the round, and end the call with the final outcome of the round."""
        raise EndedCallError((yield from self._decide(outcome)))

    # ---- joining --------------------------------------------------------------------------------

    def _proposer(self, digest: str) -> Proposer:
        world = self.scope.world
        memory = self.scope.memory
        token = f"{memory.process}-{memory.next_number('proposals')}"
        return Proposer(world.rank, world.title(world.rank), this_host(), digest, token)

    def _propose(self, key: str, first: Proposer, refusal: Outcome | None = None) -> Steps[Ticket]:
        """Join the open round of a record, or begin the next one.

        If a round failed before this rank arrived, the ticket is for that round, with its outcome.
        After a timeout, the late rank and the other ranks join the next round.

        Args:
            key: The key of the record.
            first: This rank, which may be the first rank of the round.
            refusal: The outcome of the round, if this rank cannot take part.

        Returns:
            The ticket. The caller compares the proposal of this rank with the first one.
        """
        scope = self.scope
        memory = scope.memory
        size = len(scope.ranks)
        left = memory.left.get(scope.path, -1)
        entered = memory.entered.get(scope.path, -1)
        record = Record(0, first, refusal)
        own = record.encode()
        text = yield Exchange(key, "", own)
        while text != own:
            found = Record.decode(key, text)
            missed = found.failed_since(left, memory.reported)
            if missed is not None:
                return Ticket(key, missed, size)
            if found.outcome is None:
                is_own = found.first.is_same_rank(first, in_process=scope.is_claimed)
                is_adopted = found.first.is_same_call(first) and found.round != entered
                if refusal is not None or is_adopted or not (is_own or found.round == entered):
                    return Ticket(key, found, size)
                # This rank was in the round, and left it because of an error of the store.
                again = Outcome("failed", f"{first.name} began the call again")
                yield from decide(Ticket(key, found, size), again)
                left = found.round
                text = (yield Read(key)) or ""
                continue
            if refusal is not None and found.round > left and first.rank in found.outcome.absent:
                return Ticket(key, found, size)  # the others have stopped waiting for this rank
            record = attrs.evolve(found.next(first), outcome=refusal)
            own = record.encode()
            text = yield Exchange(key, text, own)
            if text == own:
                yield from _delete_before(Ticket(key, found, size))
        return Ticket(key, record, size)

    def _join(self) -> Steps[None]:
        """Join the round, and compare the proposal of this rank with the first one."""
        scope = self.scope
        memory = scope.memory
        key = yield from scope.read_key()
        lines = tuple(self.entries())
        if self.is_connecting:  # ranks must not differ in this, or they would wait for ever
            lines = (*lines, _CONNECTING)
        if memory.is_reporting:
            memory.is_reporting = False
            yield Write(status_key(memory.namespace or "", scope.world.rank), "")
        yield from self._publish_layout()
        own = self._proposer(digest_of(lines))
        self.ticket = ticket = yield from self._propose(key, own)
        first = ticket.record.first
        self._is_first = first == own
        if ticket.record.outcome is not None:
            raise EndedCallError(ticket.record.outcome)
        if scope.is_fenced and ticket.record.agreed > memory.agreed.get(scope.path, -1):
            raise CreationError(
                f"other ranks have continued without {scope.world.title(scope.world.rank)}; end "
                f"this process, or start the job again"
            )
        moment = yield Now()
        if moment.seconds > self.deadline:
            late = self._late(scope.world.rank)
            if self._is_first:
                yield from self._end(late)
            raise EndedCallError(late)  # this rank may join the others in its next call
        if first.is_same_call(own):
            yield Write(ticket.first, Entries(lines).encode())
        elif first.digest != own.digest:
            yield from self._differ(lines, own, moment)

    def _publish_layout(self) -> Steps[None]:
        """Publish the layout of the grid before the first call that only some of its ranks make.

        If the grids of ranks differ, some ranks may have all their groups. They wait for nobody and
        publish no status, but the errors of the other ranks can then name the layouts. In a call of
        all ranks of a grid this cannot happen, so a rank publishes the layouts of such calls only
        if it has published layouts before.
        """
        scope = self.scope
        memory = scope.memory
        if scope.layout is None:
            return
        is_partial = len(scope.ranks) < scope.layout.size
        is_needed = memory.note_layout(scope.grid, scope.layout, is_partial=is_partial)
        while is_needed:
            layouts = tuple(memory.layouts.values())
            key = layouts_key(memory.namespace or "", scope.world.rank)
            yield Write(key, Entries(layouts).encode())
            is_needed = len(layouts) < len(memory.layouts)  # another thread has added a layout

    def _differ(self, lines: Sequence[str], own: Proposer, moment: Moment) -> Steps[None]:
        """End the round, because the proposal of this rank differs from the first one."""
        ticket = self._round
        text = yield Wait(ticket.first, moment.seconds + _FIRST_S)
        theirs = () if text is None else Entries.decode(ticket.first, text).lines
        reason = first_difference(lines, theirs, own.name, ticket.record.first.name)
        yield from self._end(Outcome("differs", f"{reason}; {SAME_CALLS}", token=ticket.name))

    # ---- waiting for the others -----------------------------------------------------------------

    def _gather(self, tree: Tree, key: str) -> Steps[None]:
        """Set the bit of this rank in a tree, and wait until all bits are set.

        Args:
            tree: The tree of the ranks that have arrived, or of the ranks that have finished.
            key: The key that is written once all bits are set, or the round has failed.

        Raises:
            EndedCallError: The round has failed.
        """
        scope = self.scope
        ticket = self._round
        scope.memory.entered[scope.path] = ticket.round
        is_end = key == ticket.end
        try:
            is_last, complete = yield from tree.mark(scope.position)
        except MarkedTwiceError:
            again = Outcome("restarted", f"{scope.name} has begun again")
            raise EndedCallError((yield from self._decide(again))) from None
        if not is_last:
            stale = [*complete, *scope.memory.take_stale()]
            if stale:
                yield Delete(stale)
            text = yield from self._wait(tree, key)
            if text not in (_GO, AGREED_TEXT):
                outcome = Outcome.decode(key, text)
                if outcome.kind != "agreed":
                    raise EndedCallError(outcome)
        elif is_end:
            outcome = yield from self._decide(AGREED)
            if outcome.kind != "agreed":
                raise EndedCallError(outcome)
            unneeded = [*complete, ticket.first]
            if self.is_connecting:
                unneeded.append(ticket.go)
            if ticket.round > 0:
                unneeded.append(ticket.before.end)  # all ranks have left that round
            yield Delete([*unneeded, *scope.memory.take_stale()])
        else:
            yield Write(key, _GO)
            yield Delete(complete)

    def _wait(self, tree: Tree, key: str) -> Steps[str]:
        """Wait for the key that is written once all bits of a tree are set; return its value."""
        slow_s = self.slow_s
        end = self.deadline + (_FINISHED_S if self.is_finished else 0.0)
        moment = yield Now()
        until = moment.seconds + slow_s
        while True:
            text: str | None = yield Wait(key, until)
            if text is not None:
                return text
            moment = yield Now()
            if moment.seconds >= end:
                outcome = yield from self._find_missing(tree, key, moment)
                if outcome is not None:
                    yield from self._end(outcome)
                until = moment.seconds + slow_s  # all bits are set, so the key will follow soon
                continue
            searches = yield from self._check(tree)
            if searches:
                waited_s = moment.seconds - self.began
                until = min(end, moment.seconds + max(slow_s / 2, waited_s / 4))
            else:
                end = max(end, self.deadline + _FOLLOW_S)
                until = end
            if self.is_finished and self.is_connecting:
                yield from self._call_roll_in_time(moment)
                if moment.seconds < self._roll_s:
                    until = min(until, self._roll_s)

    @property
    def slow_s(self) -> float:
        """The delay before this rank publishes its status, in seconds."""
        size = self.scope.world.size
        return min((self.deadline - self.began) / 4, max(_SLOW_S, size / _SLOW_RANKS))

    @property
    def pulse_s(self) -> float:
        """The interval at which ranks that connect check the round, in seconds.

        The interval is equal on all ranks, so that each rank knows when the others must answer.
        """
        size = self.scope.world.size
        return min(self.limit_s / (2 * _ROLL_PULSES), max(_PULSE_S, size / _PULSE_RANKS))

    @property
    def _roll_s(self) -> float:
        """The time at which this rank calls the roll, to have the answers at its deadline."""
        return self.deadline - _ROLL_PULSES * self.pulse_s

    def _check(self, tree: Tree) -> Steps[bool]:
        """Publish the status of this rank, and end the round if the round can no longer succeed.

        Returns:
            Whether this rank is one of the few that search for deadlocks and check again later.
        """
        scope = self.scope
        ticket = self._round
        outcome = yield from read_outcome(ticket)
        if outcome is not None:
            raise EndedCallError(outcome)
        missing, before = yield from tree.look_around(scope.position)
        if not missing and ticket.size > WIDTH:
            missing = yield from tree.unmarked(MOST)
        waits_for = tuple(scope.ranks[position] for position in missing[:MOST])
        own = yield from self._report(waits_for)
        searchers = _SEARCHERS if ticket.size <= WIDTH else 1
        if before >= searchers:
            return False
        reason = "" if scope.is_claimed else (yield from scope.world.why_ended())
        if reason:
            yield from self._end(Outcome("restarted", reason))
        yield from self._find_deadlock(own)
        return True

    def _find_deadlock(self, own: Status) -> Steps[None]:
        """End the round if this rank is in a deadlock, or waits for a rank that was in a deadlock.

        Args:
            own: The status of this rank.
        """
        memory = self.scope.memory
        namespace = memory.namespace or ""
        known: dict[int, Status | None] = {}
        circle = yield from find_circle(namespace, own, known)
        for rank, status in known.items():
            if status is not None and status.outcome is None:
                self._peers[rank] = status
        if circle:
            outcome = explain_circle(circle)
            for other in circle[1:]:
                record = yield from read_record(other.key)
                if record is not None and record.round == other.round:
                    yield from decide(Ticket(other.key, record, 0), outcome)
            yield from self._end(outcome)
        if not own.grid:
            return
        for rank in own.waits_for:
            peer = yield from read_status(namespace, rank)
            found = None if peer is None else peer.outcome
            if found and own.grid in found.grids and found.token not in memory.reported:
                yield from self._end(found)

    # ---- the work -------------------------------------------------------------------------------

    def _do_work(self) -> Steps[None]:
        """Do the work of this rank, unless the round ends before the work is done."""
        moment = yield Now()
        began = moment.seconds
        end = self.deadline
        first_s = self.slow_s
        if self.is_connecting:
            yield from self._call_roll_in_time(moment)
            # If the work begins late, the answers come after the deadline.
            answered_s = began + _ANSWER_PULSES * self.pulse_s
            end = max(end, min(answered_s, end + _EXTRA_S))
            first_s = min(first_s, self.pulse_s)
        until = min(end, began + first_s)
        while not (yield Work(until)):
            moment = yield Now()
            if moment.seconds >= end:
                raise EndedCallError((yield from self.time_out(moment)))
            yield from self._report(())
            outcome = yield from read_outcome(self._round)
            if outcome is not None:
                raise EndedCallError(outcome)
            if self.is_connecting:
                yield from self._call_roll_in_time(moment)
                yield from self._answer(moment)
                yield from self._allow_for_delay(moment)
                until = min(end, moment.seconds + self.pulse_s)
            else:
                until = min(end, began + 2 * (moment.seconds - began))

    # ---- the roll call --------------------------------------------------------------------------

    def _call_roll(self, moment: Moment) -> Steps[None]:
        """Ask the ranks that still work to set their bits in the tree of alive ranks."""
        if self._roll_seen_s == math.inf:
            self._roll_seen_s = moment.seconds
            yield Write(self._round.roll, _GO)

    def _call_roll_in_time(self, moment: Moment) -> Steps[None]:
        """Call the roll if the deadline is near."""
        if moment.seconds >= self._roll_s:
            yield from self._call_roll(moment)

    def _answer(self, moment: Moment) -> Steps[None]:
        """Set the bit of this rank if a rank has called the roll."""
        ticket = self._round
        if self._has_answered or (yield Read(ticket.roll)) is None:
            return
        self._roll_seen_s = min(self._roll_seen_s, moment.seconds)
        self._has_answered = True
        yield from ticket.alive.mark(self.scope.position)

    def _allow_for_delay(self, began: Moment) -> Steps[None]:
        """Begin to wait for answers again if the store was slow, because they may be late too.

        Args:
            began: The time before the requests of this rank.
        """
        moment = yield Now()
        if self._roll_seen_s < math.inf and moment.seconds - began.seconds > self.pulse_s / 4:
            self._roll_seen_s = moment.seconds

    def _unanswered(self, unfinished: Sequence[int], moment: Moment) -> Steps[list[int]]:
        """Return the ranks that have had time to answer the roll call, and have not answered.

        Args:
            unfinished: The positions of the ranks that have not finished.
            moment: The current time.
        """
        if moment.seconds < self._roll_seen_s + _ANSWER_PULSES * self.pulse_s:
            return []
        unmarked = {*(yield from self._round.alive.unmarked())}
        return [self.scope.ranks[one] for one in unfinished if one in unmarked]

    # ---- failures -------------------------------------------------------------------------------

    def _fail(self, error: BaseException) -> Steps[Outcome]:
        """End the round because of an error of this rank."""
        name = self.scope.name
        if isinstance(error, InterruptedCallError):
            return (yield from self.interrupt(f"{name} was interrupted"))
        if isinstance(error, StoreLostError):
            reason = f"{name} failed: an operation on the store was lost ({error.__cause__})"
            if self.ticket is not None:  # the store may reply again
                return (yield from self._decide(Outcome("failed", reason)))
            with contextlib.suppress(HyperCommError, StoreLostError):
                yield from self.refuse(reason)
            raise error
        if isinstance(error, ConnectionFailedError):
            return (yield from self._decide((yield from self._could_not_connect(error))))
        self.error = error
        outcome = Outcome("failed", failure_of(name, error), data=getattr(error, "data", ""))
        if self.ticket is not None:
            return (yield from self._decide(outcome))
        with contextlib.suppress(HyperCommError, StoreLostError):
            yield from self.refuse(outcome.text, outcome.data)
        return outcome

    def _could_not_connect(self, error: Exception) -> Steps[Outcome]:
        """Return the outcome after a failed connection. The outcome names the lost members."""
        ticket = self._round
        moment = yield Now()
        yield from self._call_roll(moment)
        yield from self._answer(moment)
        while True:
            yield from self._allow_for_delay(moment)
            outcome = yield from read_outcome(ticket)
            if outcome is not None:
                return outcome
            unfinished = yield from ticket.done.unmarked()
            unmarked = {*(yield from ticket.alive.unmarked())}
            moment = yield Now()
            # This is longer than a rank needs to answer: it may only now begin its work.
            answered_s = self._roll_seen_s + _ROLL_PULSES * self.pulse_s
            until = min(answered_s, self.deadline + _EXTRA_S)
            if unmarked.isdisjoint(unfinished) or moment.seconds >= until:
                break
            try:
                yield Wait(ticket.end, moment.seconds + self.pulse_s / 8)
            except InterruptedCallError:
                return Outcome("failed", f"{self.scope.name} was interrupted")
            moment = yield Now()
        lost = yield from self._unanswered(unfinished, moment)
        if lost:
            return (yield from self._unfinished(lost, "did not connect"))
        return Outcome(
            "failed", f"members could not connect ({error}); repeat the call on all ranks"
        )

    def _find_missing(self, tree: Tree, key: str, moment: Moment) -> Steps[Outcome | None]:
        """Return the outcome at the deadline.

        Returns:
            The outcome, or None if the key `go` is set, because all ranks have arrived or the round
            has failed.
        """
        scope = self.scope
        ticket = self._round
        positions = yield from tree.unmarked()
        if key == ticket.go and (yield Read(key)) is not None:
            return None
        if not positions:
            if key == ticket.end:
                return AGREED  # the rank that set the last bit died before it wrote the outcome
            yield Write(key, _GO)
            return None
        absent = [scope.ranks[position] for position in positions]
        own = scope.world.rank
        if self.is_working and not self.is_finished and not self.is_connecting:
            text = f"timed out: {scope.name} did not finish its own work"
            return Outcome("unfinished", text, (own,), (own,))
        if key == ticket.go or not self.is_connecting:
            if ticket.record.failed:
                here = {*scope.ranks} - {*absent}
                if here and here <= {*ticket.record.failed[-1].absent}:
                    return self._late(*sorted(here))  # the other ranks no longer wait for `here`
            return (yield from self._missing(absent))
        if moment.was_stopped:
            return self._late(own)
        return (yield from self._name_unfinished(positions, moment))

    def _name_unfinished(self, positions: Sequence[int], moment: Moment) -> Steps[Outcome]:
        """Return the outcome at the deadline if all ranks have arrived, but not all have finished.

        The outcome names the ranks that had time to answer the roll call, and have not answered. If
        there are none, it names no rank.
        """
        lost = yield from self._unanswered(positions, moment)
        if lost:
            return (yield from self._unfinished(lost, "did not finish"))
        return Outcome("unfinished", "timed out before all ranks had finished; repeat the call")

    @staticmethod
    def _late(*ranks: int) -> Outcome:
        return Outcome("missing", f"timed out: ranks {list(ranks)} arrived late", ranks, ranks)

    def _missing(self, ranks: Sequence[int]) -> Steps[Outcome]:
        """Return the outcome if ranks have not arrived."""
        causes = yield from self._find_causes(ranks)
        names = yield from self._name(causes)
        text = f"timed out: {names or 'members'} did not join; every rank must make this call"
        return Outcome("missing", text, tuple(causes), tuple(ranks))

    def _unfinished(self, lost: Sequence[int], what: str) -> Steps[Outcome]:
        """Return the outcome if ranks have arrived, and were lost while they connected."""
        names = yield from self._name(dict.fromkeys(lost))
        text = f"timed out: {names} {what}; every rank must make this call"
        return Outcome("unfinished", text, tuple(lost), tuple(lost))

    def _find_causes(self, missing: Sequence[int]) -> Steps[dict[int, Status | None]]:
        """Return the ranks that caused a timeout, and the status of a rank that waits for each.

        A missing rank is not the cause if it waits in another call, or has just timed out there.
        The cause is then the rank for which it waits.
        """
        here = {*self.scope.ranks} - {*missing}
        causes: dict[int, Status | None] = {}
        for rank in missing[:MOST]:
            at = rank
            behind = None
            passed = {rank}
            for _ in range(MOST):
                status = yield from self._try_status(at)
                ahead = status.waits_for if status is not None and self._waits(status) else ()
                others = [one for one in ahead if not (one in here or one in passed)]
                if not others:
                    break
                at = others[0]
                passed.add(at)
                behind = status
            causes[at] = behind or causes.get(at)
        return causes | dict.fromkeys(missing[MOST:])

    def _try_status(self, rank: int) -> Steps[Status | None]:
        """Return the status of a rank. Without it, an error only has less information."""
        with contextlib.suppress(CreationError, StoreLostError):
            return (yield from read_status(self.scope.memory.namespace or "", rank))
        return None

    def _name(self, causes: Mapping[int, Status | None]) -> Steps[str]:
        """Return a text that names the first ranks that caused a timeout.

        The text contains coordinates, host and call, and tells whether a rank has made calls only
        in other grids than this one.
        """
        names = []
        for rank, behind in [*causes.items()][:MOST]:
            status = yield from self._try_status(rank)
            layouts = yield from self._other_layouts(rank)
            names.append(self._describe(rank, status, layouts, behind))
        more = len(causes) - len(names)
        text = ", ".join(names)
        return f"{text} and {more} more" if more else text

    def _waits(self, status: Status) -> bool:
        """Return whether a rank waits, or has only just timed out in a call in which it waited."""
        if status.outcome is None:
            return True
        waited = self._peers.get(status.rank)
        is_same = waited is not None and waited.place == status.place
        return is_same and status.outcome.kind in ("missing", "unfinished")

    def _other_layouts(self, rank: int) -> Steps[tuple[str, ...]]:
        """Return the layouts of a rank's grids, or () if this grid is or may be one of them."""
        if self.scope.layout is None:
            return ()
        key = layouts_key(self.scope.memory.namespace or "", rank)
        layouts: tuple[str, ...] = ()
        # Without the layouts, the text has less information.
        with contextlib.suppress(CreationError, StoreLostError):
            text = yield Read(key)
            layouts = () if text is None else Entries.decode(key, text).lines
        is_complete = len(layouts) < MOST_LAYOUTS
        if not is_complete or str(self.scope.layout) in layouts:
            return ()
        return tuple(dict.fromkeys(layouts))

    def _describe(
        self,
        rank: int,
        status: Status | None,
        layouts: Sequence[str] = (),
        behind: Status | None = None,
    ) -> str:
        """Describe a rank that caused a timeout.

        Args:
            rank: The rank.
            status: Its status, if it has one.
            layouts: The layouts of its grids if this grid is not one of them.
            behind: The status of a rank that waits for it in another call, if there is one.
        """
        layout = self.scope.layout
        notes = []
        if layout is not None and rank in layout:
            notes.append(format_coords(layout.coords(rank)))
        if status is not None:
            notes.append(f"host {status.host}")
            is_elsewhere = status.place != (self._round.key, self._round.round)
            if status.outcome is None and is_elsewhere:
                others = ", ".join(map(str, status.waits_for))
                ahead = f" for rank {others}" if others else ""
                notes.append(f"it waits in {status.call}{ahead}")
        if behind is not None:
            notes.append(f"{behind.name} waits for it in {behind.call}")
        if layouts:
            others = " and ".join(layouts)
            notes.append(f"it has made calls with other ranks only in other grids: {others}")
        title = self.scope.world.title(rank)
        return f"{title} ({'; '.join(notes)})" if notes else title

    # ---- reports --------------------------------------------------------------------------------

    def _status(self, waits_for: tuple[int, ...], outcome: Outcome | None = None) -> Status:
        scope = self.scope
        ticket = self._round
        rank = scope.world.rank
        return Status(
            rank,
            scope.world.title(rank),
            this_host(),
            self.title,
            scope.grid,
            ticket.key,
            ticket.round,
            waits_for,
            self.threads(),
            outcome,
        )

    def _report(self, waits_for: tuple[int, ...]) -> Steps[Status]:
        """Publish the status of this rank if the status has changed. Return the status."""
        memory = self.scope.memory
        rank = self.scope.world.rank
        own = self._status(waits_for)
        if waits_for != self._reports:
            self._reports = waits_for
            memory.is_reporting = True
            yield Write(status_key(memory.namespace or "", rank), own.encode())
        return own

    def _report_end(self, outcome: Outcome) -> Steps[None]:
        """Add a failed outcome to the status of this rank, or clear the status after success.

        A rank without a published status publishes one only if the ranks have different grids.
        """
        if self.ticket is None or not (self._reports is not None or outcome.grids):
            return
        memory = self.scope.memory
        has_failed = outcome.kind != "agreed"
        memory.is_reporting = has_failed
        text = self._status(self._reports or (), outcome).encode() if has_failed else ""
        key = status_key(memory.namespace or "", self.scope.world.rank)
        with contextlib.suppress(StoreLostError):
            yield Write(key, text)


def failure_of(name: str, error: BaseException) -> str:
    """Return the text of a rank's failure, for the errors of the other ranks."""
    text = " ".join(str(error).split())[:500]
    return f"{name} failed: {type(error).__name__}: {text}"
