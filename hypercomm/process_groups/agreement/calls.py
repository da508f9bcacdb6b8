"""Calls that ranks make together: all of them succeed, or all fail and keep what they had.

`together` runs one. The operations of a call run in a worker thread, because an operation on the
store can hang for a quarter of an hour when a link is cut, whatever its timeout (seen in torch
2.13). The calling thread waits for the worker, and changes state only when it has the result.
"""

from __future__ import annotations

import atexit
import contextlib
import itertools
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, Generic, TypeVar

import attrs
import torch.distributed as dist

from hypercomm.errors import (
    CreationError,
    GroupCreationTimeout,
    HyperCommError,
    LateRankError,
    OutcomeUnknownError,
    PlanMismatchError,
    WorldRestartedError,
)
from hypercomm.layout import RankLayout
from hypercomm.process_groups import torch_internals as c10d
from hypercomm.process_groups.agreement import protocol
from hypercomm.process_groups.agreement.protocol import (
    MOST,
    SAME_CALLS,
    Outcome,
    Proposal,
    Record,
    Status,
    Ticket,
    name_missing,
    read_status,
    status_key,
    this_host,
)
from hypercomm.process_groups.torch_internals.gloo import ConnectionFailedError
from hypercomm.process_groups.torch_internals.store import (
    LateError,
    forget,
    in_time,
    read_bytes,
    workers,
)
from hypercomm.process_groups.world import World

logger = logging.getLogger(__name__)

T = TypeVar("T")
V = TypeVar("V")
Entries = Callable[[], Sequence[str]]

_SHORTEST_S = 0.0005
_LONGEST_S = 0.25
_SLOW_S = 0.2
"""How long a rank waits before it reports so, and looks where missing ranks are."""

_FINISHED_S = 0.6
"""How much longer ranks wait that have finished: those that have not can name who is missing."""

_BEAT_S = 1.0
"""How often the calling thread looks whether the process was stopped, and reports that it lives."""

_STUCK_S = 0.6
"""How long after the deadline the calling thread waits for its worker."""

_LAST_WORD_S = 0.5
"""How long a rank whose worker is stuck tries to end the round."""

_REFUSAL_S = 1.9
"""How long a rank with an error of its own tries to end the round on the others."""

_SILENT_S = 1.0
"""How long a rank that could not connect waits for members to connect or fail."""

_MOST_POLLS = 2000
"""How many ranks of a job may poll in a second, once they have waited for long."""


# ---- the driver ---------------------------------------------------------------------------------


def run(steps: protocol.Steps[V], store: Any) -> V:
    """Run steps of the protocol on a store in this thread, and return their result.

    Raises:
        DistNetworkError: The store is gone.
    """
    reply: Any = None
    while True:
        try:
            operation = steps.send(reply)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]
        reply = perform(operation, store)


def perform(operation: protocol.Operation, store: Any) -> Any:
    """Perform one operation on a store, and return the reply."""
    match operation:
        case protocol.Exchange(key, expected, text):
            return store.compare_set(key, expected, text).decode(errors="replace")
        case protocol.Read(key):
            found = read_bytes(store, key)
            return None if found is None else found.decode(errors="replace")
        case protocol.Add(key):
            return store.add(key, 1)
        case protocol.Append(key, text) if store.has_extended_api():
            return store.append(key, text)
        case protocol.Append(key, text):
            old = perform(protocol.Read(key), store) or ""
            while (found := perform(protocol.Exchange(key, old, old + text), store)) != old + text:
                old = found
            return None
        case protocol.Write(key, text):
            return store.set(key, text)
        case protocol.Delete(keys):
            return forget(store, keys)


# ---- who takes part ----------------------------------------------------------------------------


@attrs.frozen
class Scope:
    """Ranks that make calls together, one after the other, and the record that they use.

    Attributes:
        world: The world that the ranks are of.
        path: The key of the record, within the world's part of the store.
        ranks: The ranks.
        layout: The layout in whose coordinates errors name ranks.
        grid: The grid, as text that is compared where ranks wait for each other; "" without one.
        is_fenced: Whether ranks that agree go on without all others, whose next calls fail.
    """

    world: World
    path: str
    ranks: Sequence[int]
    layout: RankLayout | None = None
    grid: str = ""
    is_fenced: bool = False

    @property
    def key(self) -> str:
        """The key of the record; the first one of a job asks the store."""
        return f"{self.world.namespace}/{self.path}"

    @property
    def is_alone(self) -> bool:
        """Whether the calling rank has nobody to agree with."""
        is_one = len(self.ranks) < 2 and not self.is_fenced
        return not self.world.has_store or is_one or self.world.rank not in self.ranks

    @property
    def seen(self) -> int:
        """The last round that this rank has left; -1 if there is none."""
        return self.world.seen.get(self.path, -1)

    def read(self) -> Record | None:
        """Return what the record holds; None if there is none."""
        return run(protocol.read_record(self.key), self.world.store)

    def leave(self, number: int) -> None:
        """Note that this rank has left a round."""
        self.world.seen[self.path] = max(self.seen, number)

    def refuse(self, proposal: Proposal) -> None:
        """Fail the next round that is open on other ranks, or that they begin."""
        self.leave(run(protocol.refuse(self.key, proposal, self.seen), self.world.store))


def limit_of(timeout: timedelta | None, world: World | None) -> float:
    """Return for how many seconds ranks wait for each other; None is the timeout of the world."""
    if timeout is None and world is not None:
        timeout = world.timeout_of(world.backend)
    return timeout.total_seconds() if timeout else math.inf


@attrs.frozen
class Result(Generic[T]):
    """The result of a call that all ranks have made.

    Attributes:
        value: What the work of this rank returned.
        pending: What interrupted this rank although all agreed; raised once state is changed.
    """

    value: T
    pending: BaseException | None = None

    def get(self) -> T:
        """Return the value, or raise what is pending."""
        if self.pending is not None:
            raise self.pending
        return self.value


# ---- one call ----------------------------------------------------------------------------------


class EndedError(Exception):
    """The call ends on this rank, which leaves its round as it is."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome.text)
        self.outcome = outcome


class Call(Generic[T]):
    """One call of this rank, from its proposal to the outcome.

    Attributes:
        scope: Who takes part.
        title: The call, as users know it.
        deadline: When this rank stops waiting, by `time.monotonic`.
        name: A name for what the call creates, the same on all ranks and new in each round.
    """

    def __init__(self, scope: Scope, title: str, entries: Entries, limit_s: float) -> None:
        self.scope = scope
        self.title = title
        self.began = time.monotonic()
        self.deadline = self.began + limit_s
        self.name = ""
        self._entries = entries
        self._slow_s = min(_SLOW_S, limit_s / 4)
        self._ticket: Ticket | None = None
        """The round, once this rank has proposed."""
        self._waits_for: tuple[int, ...] | None = None
        self._seen: dict[int, Status] = {}
        self._result: T | None = None
        self._outcome: Outcome | None = None
        self._error: BaseException | None = None
        self._beat_s = self.began
        self._stopped_s = 0.0
        self._has_arrived = False
        self._is_finished = False
        self._is_interrupted = False
        self._is_abandoned = False
        self._is_over = False
        self._lock = threading.Lock()
        self._reporting = threading.Lock()

    def _follow(self, steps: protocol.Steps[V]) -> V:
        return run(steps, self.scope.world.store)

    def _perform(self, operation: protocol.Operation) -> Any:
        return perform(operation, self.scope.world.store)

    @property
    def _round(self) -> Ticket:
        if self._ticket is None:
            raise RuntimeError(f"{self.title} has not proposed anything")
        return self._ticket

    def _decide(self, outcome: Outcome) -> Outcome:
        return self._follow(protocol.decide(self._round, outcome))

    # ---- in the calling thread ------------------------------------------------------------------

    def make(self, work: Callable[[Call[T]], T], undo: Callable[[], None]) -> Result[T]:
        """Make the call; arguments, result and errors are those of `together`."""
        self._proposal = _proposal(self.scope.world)
        done, pending = threading.Event(), None
        device = c10d.current_device()
        end = self.deadline + _FINISHED_S + _STUCK_S

        def act() -> None:
            with c10d.on_device(device):
                self._run(work, undo)

        _active.add(self)
        try:
            workers.start(act, done.set)
            while True:
                try:
                    left_s = max(0.0, end - time.monotonic())
                    if done.wait(min(left_s, _BEAT_S)) or left_s == 0.0:
                        break
                    self._beat()
                except BaseException as error:  # noqa: BLE001 - raised once the others know
                    self._is_interrupted, pending = True, pending or error
                    end = min(end, time.monotonic() + _STUCK_S)
        finally:
            _active.discard(self)
        if not done.is_set():
            self._leave_worker(pending)
        if self._ticket is not None:
            self.scope.leave(self._ticket.round)
        if self._outcome is not None and self._outcome.kind == "agreed":
            self.scope.world.agreed[self.scope.path] = self._round.round
            return Result(self._result, pending)  # type: ignore[arg-type]
        if self._outcome is not None:
            _linger(self.scope.world)
        if pending is not None:
            raise pending
        raise self._failure()

    def _beat(self) -> None:
        """Note how long the process was stopped; report for a worker that connects in gloo."""
        now = time.monotonic()
        self._stopped_s += max(0.0, now - self._beat_s - 2 * _BEAT_S)
        self._beat_s = now
        if self._ticket is not None and self._waits_for is None and not self._was_stopped():
            workers.start(self._report_waiting, lambda: None)

    def _was_stopped(self) -> bool:
        """Return whether the process was stopped during the call: others may wait for it."""
        return self._stopped_s > 0.0 or time.monotonic() - self._beat_s > 2 * _BEAT_S

    def _leave_worker(self, pending: BaseException | None) -> None:
        """End the round without the worker, which is stuck in the store or in a backend."""

        def last_word() -> Outcome:
            if pending is None and not self._has_arrived and self._was_stopped():
                return _late(self.scope.world.rank)  # the others do not wait any more
            if self._ticket is None:
                refusal = self._refusal(pending)
                self.scope.refuse(refusal)
                return Outcome("failed", refusal.refusal)
            return self._decide(
                self._interruption() if pending else self._follow(self._timed_out())
            )

        try:
            outcome = in_time(last_word, _LAST_WORD_S)
        except BaseException as error:  # noqa: BLE001 - also a second Ctrl-C
            outcome, self._error = None, self._without_store(error)
        with self._lock:
            if self._outcome is None:
                self._outcome = outcome
            self._is_abandoned = self._outcome is None or self._outcome.kind != "agreed"

    def _failure(self) -> BaseException:
        """Return the error of a call that has failed."""
        rank, outcome = self.scope.world.rank, self._outcome
        name = self.scope.world.title(rank)
        if outcome is None or (self._error is not None and outcome.kind == "failed"):
            return self._error or CreationError(f"{self.title} failed")
        if outcome.token:
            self.scope.world.reported.add(outcome.token)
        waited = timedelta(seconds=time.monotonic() - self.began)
        if outcome.kind == "missing" and rank in outcome.absent:
            return LateRankError(
                f"{self.title} timed out on the other ranks before {name} arrived; call it "
                f"again on all ranks"
            )
        if outcome.kind in ("missing", "unfinished"):
            return GroupCreationTimeout(
                f"{self.title}: {outcome.text}; {name} waited {waited.total_seconds():.1f} s",
                missing=outcome.missing,
                absent=outcome.absent,
                waited=waited,
            )
        kinds = {"differs": PlanMismatchError, "restarted": WorldRestartedError}
        return kinds.get(outcome.kind, CreationError)(f"{self.title}: {outcome.text}")

    # ---- in the worker --------------------------------------------------------------------------

    def _run(self, work: Callable[[Call[T]], T], undo: Callable[[], None]) -> None:
        outcome: Outcome | None = None
        try:
            try:
                outcome = self._propose()
                if outcome is None:
                    self._result = work(self)
                    outcome = self._finish()
            except BaseException as error:  # noqa: BLE001 - raised in the calling thread
                outcome = self._end_with(error)
        except BaseException as error:  # noqa: BLE001 - the store is gone
            self._error = self._without_store(error)
        with self._lock:
            is_left = self._is_abandoned
            if not is_left:
                outcome = self._outcome = self._outcome or outcome
        if is_left or outcome is None or outcome.kind != "agreed":
            try:
                undo()
            except Exception as error:  # noqa: BLE001 - the error at hand matters more
                logger.warning("rolling back %s: %s", self.title, error)
        self._report(outcome)

    def _propose(self) -> Outcome | None:
        world, key = self.scope.world, self.scope.key
        self._proposal = attrs.evolve(self._proposal, entries=tuple(self._entries()))
        if world.is_reporting:
            world.is_reporting = False
            self._perform(protocol.Write(status_key(world.namespace, world.rank), ""))
        steps = protocol.propose(key, self._proposal, self.scope.seen, world.reported)
        self._ticket = ticket = self._follow(steps)
        self.name = f"{key}/{ticket.round}"
        if ticket.record.outcome is not None:
            return ticket.record.outcome
        if self.scope.is_fenced and ticket.record.agreed > world.agreed.get(self.scope.path, -1):
            raise CreationError(
                f"other ranks have continued without {world.title(world.rank)}; end this process, "
                f"or start the job again"
            )
        first = ticket.record.first
        if time.monotonic() > self.deadline:
            late = _late(world.rank)  # the others go on: this rank may join them at its next call
            return self._decide(late) if first == self._proposal else late
        if first.refusal and first is not self._proposal:
            return self._decide(Outcome("failed", first.refusal))
        text = protocol.first_difference(self._proposal, first)
        if text is not None:
            return self._decide(Outcome("differs", f"{text}; {SAME_CALLS}", token=self.name))
        self._has_arrived = True
        self._perform(protocol.Append(ticket.arrivals, f"{world.rank},"))
        if world.stale:
            self._perform(protocol.Delete(world.take_stale()))
        return None

    def _finish(self) -> Outcome:
        ticket = self._round
        self._is_finished = True
        rank, size = self.scope.world.rank, len(self.scope.ranks)
        outcome = self._follow(protocol.finish(ticket, rank, size))
        if outcome is None:
            read = lambda: self._follow(protocol.read_outcome(ticket))  # noqa: E731
            outcome = self.wait(read, self.deadline + _FINISHED_S)
        return outcome

    def _end_with(self, error: BaseException) -> Outcome | None:
        """Adopt the outcome, or decide that the round fails on all ranks because of an error."""
        if isinstance(error, EndedError):
            return error.outcome
        if self._ticket is None:
            self._error = error
            with contextlib.suppress(HyperCommError, RuntimeError):
                self.scope.refuse(self._refusal(error))
            if isinstance(error, dist.DistNetworkError):
                raise error
            return Outcome("failed", str(error))
        if isinstance(error, ConnectionFailedError):
            return self._decide(self._could_not_connect(error))
        if not isinstance(error, dist.DistNetworkError):  # else the store may be back
            self._error = error
        return self._decide(Outcome("failed", _failed(self._proposal, error)))

    def _refusal(self, error: BaseException | None) -> Proposal:
        text = _failed(self._proposal, error or TimeoutError("the store did not answer"))
        return attrs.evolve(self._proposal, entries=(), refusal=text)

    def _interruption(self) -> Outcome:
        return Outcome("failed", f"{self._proposal.name} was interrupted")

    def _could_not_connect(self, error: ConnectionFailedError) -> Outcome:
        """Return the outcome where a backend could not connect: names members that are silent."""
        ticket, until = self._round, time.monotonic() + _SILENT_S
        outcome, silent = self._follow(protocol.read_outcome(ticket)), list(error.ranks)
        if outcome is None:
            self._perform(protocol.Append(ticket.arrivals, f"{self.scope.world.rank}-,"))
        while outcome is None and silent and time.monotonic() <= until:
            time.sleep(0.02)
            states = self._follow(protocol.read_arrivals(ticket))
            silent = [rank for rank in error.ranks if not states.get(rank)]
            outcome = self._follow(protocol.read_outcome(ticket))
        if outcome is not None:
            return outcome
        if silent:
            silent = self._follow(self._silent_of(silent)) or silent
            return self._follow(self._missing(silent, "unfinished", "did not connect"))
        return Outcome("failed", f"members could not connect ({error}); call it again on all ranks")

    def _timed_out(self) -> protocol.Steps[Outcome]:
        ticket, own = self._round, self.scope.world.rank
        states = yield from protocol.read_arrivals(ticket)
        absent = [rank for rank in self.scope.ranks if rank not in states]
        if absent:
            before = (ticket.record.failed or (None,))[-1]
            if before is not None and states.keys() <= {*before.absent}:
                return _late(*states)  # the others have given up on all that are here
            return (yield from self._missing(absent, "missing", "did not join"))
        if self._was_stopped():
            return _late(own)
        unfinished = [rank for rank in self.scope.ranks if not states[rank]]
        if not unfinished:
            if all("+" in state for state in states.values()):
                return protocol.AGREED  # one of them ended before it could count itself
            return Outcome("failed", "members could not connect; call it again on all ranks")
        silent = yield from self._silent_of(unfinished)
        if not silent and not self._is_finished:  # all of them still wait for each other
            return Outcome("unfinished", "timed out before all ranks had finished; call it again")
        return (yield from self._missing(silent or unfinished, "unfinished", "did not finish"))

    def _silent_of(self, ranks: Sequence[int]) -> protocol.Steps[list[int]]:
        """Return the ranks that do not report that they wait in this round."""
        silent, here = [], (self._round.key, self._round.round)
        for rank in ranks:
            status = yield from read_status(self.scope.world.namespace, rank)
            if status is None or (status.key, status.round) != here:
                silent.append(rank)
        return silent

    def _missing(self, ranks: Sequence[int], kind: str, what: str) -> protocol.Steps[Outcome]:
        present = [rank for rank in self.scope.ranks if rank not in ranks]
        named = name_missing(self.scope.world, ranks, present, self.scope.layout, self._seen)
        causes, names = yield from named
        text = f"timed out: {names or 'members'} {what}; every rank must make this call"
        return Outcome(kind, text, causes, tuple(ranks))

    def _without_store(self, error: BaseException) -> BaseException:
        """Return the error of a rank whose store is gone or silent; others as they are."""
        if isinstance(error, HyperCommError) or not isinstance(error, RuntimeError):
            return error
        return _store_failed(self.scope.world, self.title, error, is_finished=self._is_finished)

    # ---- waiting --------------------------------------------------------------------------------

    def wait(self, ready: Callable[[], V | None], deadline: float | None = None) -> V:
        """Poll until there is a value, more and more seldom; other threads may use the store.

        Args:
            ready: Returns the value, or None.
            deadline: By `time.monotonic`; default: that of the call.

        Raises:
            Exception: The round has ended, the deadline has passed, or the caller was interrupted.
        """
        begin = last = time.monotonic()
        deadline = self.deadline if deadline is None else deadline
        longest_s = max(_LONGEST_S, self.scope.world.size / _MOST_POLLS)
        while (value := ready()) is None:
            now = time.monotonic()
            if self._is_interrupted:
                raise EndedError(self._decide(self._interruption()))
            if now > deadline:
                raise EndedError(self._decide(self._follow(self._timed_out())))
            if now - begin > self._slow_s and now - last > self._slow_s / 2:
                self._look()
                last = time.monotonic()
            pause = min(max(_SHORTEST_S, (now - begin) / 4), longest_s)
            time.sleep(min(pause, max(0.0, deadline - now) + _SHORTEST_S))
        return value

    def _look(self) -> None:
        """Report that this rank waits, and look whether it waits in vain."""
        ticket, world = self._round, self.scope.world
        if reason := world.why_ended():
            raise EndedError(Outcome("restarted", reason))
        outcome = self._follow(protocol.read_outcome(ticket))
        if outcome is not None:
            raise EndedError(outcome)
        states = self._follow(protocol.read_arrivals(ticket))
        missing = tuple(rank for rank in self.scope.ranks if rank not in states)
        own = self._status(missing)
        if missing != self._waits_for and not self._was_stopped():
            self._waits_for, world.is_reporting = missing, True
            self._perform(protocol.Write(status_key(world.namespace, world.rank), own.text()))
        known: dict[int, Status | None] = {}
        circle = self._follow(protocol.find_deadlock(world.namespace, own, known))
        self._seen |= {rank: one for rank, one in known.items() if one and one.outcome is None}
        if circle:
            outcome = protocol.explain_deadlock(circle)
            for status in circle[1:]:
                record = self._follow(protocol.read_record(status.key))
                if record is not None and record.round == status.round:
                    self._follow(protocol.decide(Ticket(status.key, record), outcome))
            raise EndedError(self._decide(outcome))
        for rank in missing[:MOST] if own.grid else ():
            peer = self._follow(read_status(world.namespace, rank))
            found = None if peer is None else peer.outcome
            if found and own.grid in found.grids and found.token not in world.reported:
                raise EndedError(self._decide(found))

    def _report_waiting(self) -> None:
        """Report that this rank waits, while its worker is in a backend."""
        world = self.scope.world
        with self._reporting, contextlib.suppress(RuntimeError):
            if self._is_over or self._waits_for is not None:
                return
            self._waits_for, world.is_reporting = (), True
            key, text = status_key(world.namespace, world.rank), self._status(()).text()
            self._perform(protocol.Write(key, text))

    def _status(self, waits_for: tuple[int, ...], outcome: Outcome | None = None) -> Status:
        scope, ticket = self.scope, self._round
        return Status(
            scope.world.rank,
            this_host(),
            self.title,
            scope.grid,
            scope.key,
            ticket.round,
            waits_for[:MOST],
            max(1, sum(call.scope.world is scope.world for call in list(_active))),
            outcome,
            scope.world.title(scope.world.rank),
        )

    def _report(self, outcome: Outcome | None) -> None:
        """Replace the report of this rank, if there is one, by how its call has ended."""
        world, ticket = self.scope.world, self._ticket
        with self._reporting:
            self._is_over = True
        if ticket is None or not (self._waits_for is not None or (outcome and outcome.grids)):
            return
        has_failed = outcome is not None and outcome.kind != "agreed"
        world.is_reporting = has_failed
        waits_for = self._waits_for or ()
        text = self._status(waits_for, outcome).text() if has_failed else ""
        with contextlib.suppress(RuntimeError):
            self._perform(protocol.Write(status_key(world.namespace, world.rank), text))


def _linger(world: World) -> None:
    """Let the others read how a call failed: the process that serves the store may end."""
    if world.serves and world.size > 1:
        time.sleep(_LONGEST_S)


def _proposal(world: World) -> Proposal:
    return Proposal(world.rank, this_host(), number=next(_numbers), title=world.title(world.rank))


def _late(*ranks: int) -> Outcome:
    return Outcome("missing", f"timed out: ranks {list(ranks)} arrived late", ranks, ranks)


def ask(world: World, title: str, question: Callable[[], V], limit_s: float) -> V:
    """Return what `question` reads from the store of a world, within a time limit.

    Raises:
        CreationError: The store is gone, or does not answer.
    """
    try:
        return in_time(question, limit_s)
    except HyperCommError:
        raise
    except RuntimeError as error:
        raise _store_failed(world, title, error, is_finished=False) from error


def _store_failed(
    world: World, title: str, error: RuntimeError, *, is_finished: bool
) -> CreationError:
    reason = (str(error).splitlines() or [""])[0]
    how = "does not answer" if isinstance(error, LateError) else "is gone"
    where = f"{world.served} {how} ({reason}); {world.if_lost}"
    if is_finished:
        text = f"the outcome of {title} on the other ranks is unknown: {where}"
        failure: CreationError = OutcomeUnknownError(text)
    else:
        failure = CreationError(f"{title} failed: {where}")
    failure.__cause__ = error
    return failure


def _failed(proposal: Proposal, error: BaseException) -> str:
    text = " ".join(str(error).split())[:500]
    return f"{proposal.name} failed: {type(error).__name__}: {text}"


# ---- all or none -------------------------------------------------------------------------------


def together(
    scope: Scope,
    title: str,
    entries: Entries,
    limit_s: float,
    work: Callable[[Call[T]], T],
    undo: Callable[[], None] = lambda: None,
) -> Result[T]:
    """Make a call on all ranks of a scope, or on none.

    Args:
        scope: Who takes part.
        title: The call, as users know it.
        entries: Returns what this rank proposes, which must be equal on all ranks.
        limit_s: Within how many seconds all ranks must have finished.
        work: This rank's part; receives the call.
        undo: Undoes the work, as much of it as was done, where the call fails.

    Raises:
        PlanMismatchError: Ranks propose different things, or have built different grids.
        GroupCreationTimeout: Ranks are missing; names them.
        LateRankError: The other ranks have timed out on this one.
        CreationError: A rank failed, or the store is gone.
        OutcomeUnknownError: The store is gone, and the other ranks may have agreed.
    """
    if scope.is_alone:
        call = Call[T](scope, title, entries, limit_s)
        world = scope.world
        key = scope.key if world.is_named else ask(world, title, lambda: scope.key, limit_s)
        call.name = f"{key}/{world.next_number(scope.path)}"
        try:
            return Result(work(call))
        except BaseException:
            undo()
            raise
    lock, began = scope.world.lock_of(scope.path), time.monotonic()
    if not lock.acquire(timeout=min(limit_s, threading.TIMEOUT_MAX)):
        raise CreationError(f"{title} failed: another thread of this rank waits in the same call")
    try:
        limit_s -= time.monotonic() - began
        return Call[T](scope, title, entries, limit_s).make(work, undo)
    finally:
        lock.release()


def agree(scope: Scope, title: str, entries: Entries, limit_s: float) -> Result[None]:
    """Check that all ranks of a scope make the same call; raises as `together`."""
    return together(scope, title, entries, limit_s, lambda _: None)


@contextlib.contextmanager
def refusing(scope: Scope | None) -> Iterator[None]:
    """On an error within a `with` block, fail the next call on the ranks that wait for this one."""
    try:
        yield
    except BaseException as error:
        if scope is not None:
            refuse(scope, error)
        raise


def refuse(scope: Scope, error: BaseException) -> None:
    """Fail the next call on the ranks that wait for this one; raises nothing."""
    if scope.is_alone:
        return
    proposal = _proposal(scope.world)
    proposal = attrs.evolve(proposal, refusal=_failed(proposal, error))
    lock = scope.world.lock_of(scope.path)
    if not lock.acquire(timeout=_REFUSAL_S):
        return  # another thread is in such a call: it must not fail for this one
    try:
        with contextlib.suppress(RuntimeError):
            in_time(lambda: scope.refuse(proposal), _REFUSAL_S)
            _linger(scope.world)
    finally:
        lock.release()


_numbers = itertools.count()
"""Numbers the proposals of this process."""

_active: set[Call[Any]] = set()
"""The calls that threads of this process make now."""


def _end_all() -> None:
    """End all waits: a worker in gloo while the interpreter ends would abort the process."""
    for call in list(_active):
        call._is_interrupted = True
    if _active:
        time.sleep(2 * _LONGEST_S)


atexit.register(_end_all)
