"""Makes calls together with other ranks: all ranks succeed, or all fail and change nothing.

`agree` makes one such call. The steps of the protocol run in a worker thread, because an operation
on the store can hang for a quarter of an hour when a link is cut, even with a timeout (seen in
torch 2.13). The calling thread waits for the worker. Once all ranks have agreed, the worker commits
the result, because Ctrl-C cannot interrupt a worker.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import math
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
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
from hypercomm.process_groups import torch_internals as torchdist
from hypercomm.process_groups.agreement.protocol import Member, failure_of
from hypercomm.process_groups.agreement.records import (
    Add,
    Delete,
    Exchange,
    InterruptedCallError,
    Moment,
    Now,
    Operation,
    Outcome,
    Read,
    Steps,
    StoreLostError,
    Wait,
    Work,
    Write,
)
from hypercomm.process_groups.agreement.scope import Scope, client_of
from hypercomm.process_groups.agreement.system import LateError, in_time, system
from hypercomm.process_groups.world import World

logger = logging.getLogger(__name__)

T = TypeVar("T")
V = TypeVar("V")

_BEAT_S = 1.0
"""Longest interval at which the calling thread checks whether the process was stopped or a worker
is blocked, in seconds. It is at most a quarter of `Member.pulse_s`.
"""

_STUCK_S = 1.2
"""Time after the deadline for which the calling thread waits for its worker, in seconds."""

_INTERRUPTED_S = 0.6
"""Time for which an interrupted calling thread waits for its worker, in seconds."""

_LAST_S = 0.5
"""Limit for ending the round without the workers, in seconds."""

_REFUSAL_S = 1.9
"""Time limit of `refuse`, in seconds."""

_LINGER_S = 0.25
"""Time for which the process that serves the store stays after a failure, in seconds."""

_SLICE_S = 10.0
"""Longest wait in one request, in seconds. As in torch's barrier, 1 s per 1,000 ranks is added."""


# ---- operations ---------------------------------------------------------------------------------


def run(steps: Steps[V], store: Any, until: float = math.inf) -> V:
    """Run steps that yield no `Wait` or `Work`, in this thread, and return their result.

    Args:
        steps: The steps.
        store: A client of the store.
        until: The time after which no operation begins.

    Raises:
        LateError: The time `until` has passed.
        RuntimeError: The store is gone. This is an error of torch, such as DistNetworkError.
    """
    reply: Any = None
    while True:
        try:
            operation = steps.send(reply)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]
        now = system.now()
        if now > until:
            raise LateError("the time limit has passed")
        reply = Moment(now) if isinstance(operation, Now) else perform(operation, store)


def perform(operation: Operation, store: Any) -> Any:
    """Perform one operation on a store, and return the reply."""
    match operation:
        case Exchange(key, expected, text):
            return store.compare_set(key, expected, text).decode(errors="replace")
        case Read(key):
            found = torchdist.read_bytes(store, key)
            return None if found is None else found.decode(errors="replace")
        case Add(key, amount):
            return store.add(key, amount)
        case Write(key, text):
            return store.set(key, text)
        case Delete(keys):
            for key in keys:
                store.delete_key(key)
            return None
    raise TypeError(f"{operation} is not an operation on a store")


def _wait(store: Any, key: str, until: float, slice_s: float) -> str | None:
    """Wait for a key, and return its value, or None if it is not set in time.

    A request occupies the client of the store. Each request ends after `slice_s` seconds, so that
    other threads of the process can use the client in between.
    """
    while True:
        left_s = until - system.now()
        if left_s <= 0.0:
            return None
        try:
            store.wait([key], timedelta(seconds=min(left_s, slice_s)))
        except dist.DistStoreError:
            system.sleep(0.001)
            continue
        reply: str | None = perform(Read(key), store)
        return reply


# ---- the result ---------------------------------------------------------------------------------


@attrs.frozen
class Round:
    """The round of a call, as seen by the work of the call.

    Attributes:
        name: A name for the objects that the work creates. The name is the same on all ranks, and
            different in each round.
        number: The number of the round.
        store: A client of the world's store that only this call uses.
        stale: Receives keys that no rank needs any more. A later call deletes these keys.
        left_s: Seconds until the deadline.
        has_failed: Returns whether the call has failed since the work began.
    """

    name: str
    number: int
    store: Any
    stale: list[str]
    left_s: float = math.inf
    has_failed: Callable[[], bool] = lambda: False

    def check(self) -> None:
        """Raise if the call has failed. Work that has several steps calls this before each step.

        Raises:
            CreationError: The call has failed; the calling thread raises the reason.
        """
        if self.has_failed():
            raise CreationError("the call has failed on this or another rank")


@attrs.frozen
class Result(Generic[T]):
    """The result of a call that all ranks have made.

    Attributes:
        value: The return value of this rank's work.
        pending: The exception, such as KeyboardInterrupt, that interrupted this rank although all
            ranks agreed. The caller raises this exception once its own state is complete.
    """

    value: T
    pending: BaseException | None = None

    def get(self) -> T:
        """Return the value, or raise the pending exception."""
        if self.pending is not None:
            raise self.pending
        return self.value


# ---- the threads of one call --------------------------------------------------------------------


@attrs.define(eq=False)
class _Blocked:
    """An operation that blocks a worker.

    Attributes:
        operation: The operation, in the form in which the steps yielded it last.
        changed: An event that is set when the operation is complete or the call is interrupted.
        is_continued: Whether another worker continues the steps.
        is_over: Whether the operation is complete.
        reply: The reply of the operation.
        error: The error that the operation raised.
    """

    operation: Wait | Work
    changed: Any
    is_continued: bool = False
    is_over: bool = False
    reply: Any = None
    error: BaseException | None = None

    def is_same(self, operation: Wait | Work) -> bool:
        """Return whether another operation differs from this one at most in its limit."""
        return attrs.evolve(operation, until=self.operation.until) == self.operation

    def result(self) -> Any:
        """Return the reply, or raise the error."""
        if self.error is not None:
            raise self.error
        return self.reply


class _LeftError(BaseException):
    """Raised to stop a worker, because another worker continues or the call has ended."""


class Driver(Generic[T]):
    """The threads of one call of this rank.

    A worker runs the steps of the protocol. If an operation blocks the worker for longer than the
    steps allow, a second worker continues the steps with its own client of the store. The first
    worker stays blocked, so that a rank sends only one request even if it waits for long.

    Args:
        member: The protocol of this rank.
        work: The work of this rank.
        undo: Undoes the work, or the part of it that was done, if the call fails.
        commit: Changes the state of this rank once all ranks have agreed. It does not wait for
            other ranks.
    """

    def __init__(
        self,
        member: Member,
        work: Callable[[Round], T],
        undo: Callable[[], None],
        commit: Callable[[], None],
    ) -> None:
        self._member = member
        self._work = work
        self._undo = undo
        self._commit = commit
        self._steps = member.call()
        self._store = member.scope.world.store
        self._device = torchdist.current_device()
        self._lock = threading.Lock()  # no thread holds this lock while it waits for another rank
        self._undoing = system.lock()
        self._ended = system.event()
        self._blocked: _Blocked | None = None
        self._is_started = False
        self._is_interrupted = False
        self._is_over = False
        self._has_failed = False
        self._is_working = False
        self._is_to_undo = False
        self._result: T | None = None
        self._outcome: Outcome | None = None
        self._error: BaseException | None = None
        self._end = member.deadline + _STUCK_S
        self._beat = member.began
        self._was_stopped = False

    # ---- in the calling thread ------------------------------------------------------------------

    def make(self) -> Result[T]:
        """Make the call and return its result, or raise an error that `agree` documents."""
        pending: BaseException | None = None
        _active.add(self)
        try:
            while True:
                try:
                    self._wait_for_end(is_interrupted=pending is not None)
                    break
                except BaseException as error:  # noqa: BLE001 - raised once the call has ended
                    # Make no calls here, so that a second Ctrl-C is only raised in the `try` block.
                    pending = pending or error
        finally:
            _active.discard(self)
        if not self._ended.is_set():
            self._abandon(pending)
        return self._conclude(pending)

    def _wait_for_end(self, *, is_interrupted: bool) -> None:
        """Start a worker if there is none, and wait for the end of the call or of its time limit.

        An interrupted thread calls this method again, and then waits only for a short time.
        """
        until = self._member.began + self._member.slow_s
        if is_interrupted:
            self._is_interrupted = True
            self._end = min(self._end, system.now() + _INTERRUPTED_S)
            until = 0.0
        if not self._is_started:
            self._is_started = True
            self._start(None, None)
        while True:
            now = self._note_time()
            wake = min(until, now + min(_BEAT_S, self._member.pulse_s / 4), self._end)
            if self._ended.wait(max(0.0, wake - now)) or self._note_time() >= self._end:
                return
            until = self._continue_elsewhere()

    def _note_time(self) -> float:
        """Return the time, and note whether the process was suspended when the deadline passed."""
        now = system.now()
        self._was_stopped |= self._is_stopped_until(now)
        self._beat = now
        return now

    def _is_stopped_until(self, now: float) -> bool:
        """Return whether the process was stopped after the last check until its deadline passed."""
        return now - self._beat > 2 * _BEAT_S and now >= self._member.deadline

    def _moment(self) -> Moment:
        now = system.now()
        return Moment(now, self._was_stopped or self._is_stopped_until(now))

    def _continue_elsewhere(self) -> float:
        """Start another worker for the steps if the current one is blocked beyond the limit.

        Returns:
            The time at which to call this method again.
        """
        now = system.now()
        with self._lock:
            blocked = self._blocked
            if blocked is None or blocked.is_over:
                return math.inf
            if blocked.is_continued:  # the other worker observes the limit
                if self._is_interrupted:
                    blocked.changed.set()
                return math.inf
            if now < blocked.operation.until and not self._is_interrupted:
                return blocked.operation.until
            blocked.is_continued = True
        if self._is_interrupted:
            self._start(None, InterruptedCallError())
        else:
            self._start(None if isinstance(blocked.operation, Wait) else False, None)
        return math.inf

    def is_of(self, world: World) -> bool:
        """Return whether ranks of `world` make this call."""
        return self._member.scope.world is world

    def interrupt(self) -> None:
        """End the call from another thread."""
        self._is_interrupted = True
        self._continue_elsewhere()

    def _abandon(self, pending: BaseException | None) -> None:
        """End the round without the workers, which are stuck in the store or in a backend."""
        member = self._member
        moment = self._moment()
        with self._lock:
            if self._outcome is not None or self._error is not None:
                return  # a worker has ended the steps just now
            self._is_over = True
        steps = member.time_out(moment)
        if pending is not None:
            steps = member.interrupt(f"{member.scope.name} was interrupted")
        # If the store replies after the limit, the thread still ends the round that this rank has
        # joined. If this rank has joined no round, the thread stops, because it might end a later
        # call.
        until = system.now() + _LAST_S if member.ticket is None else math.inf
        outcome = failure = None
        try:
            last = member.end_by(steps)
            outcome = in_time(lambda: _run_once(last, self._store, until), _LAST_S)
        except BaseException as error:  # noqa: BLE001 - also a second Ctrl-C
            failure = self._explain(error)
        member.leave(outcome)
        with self._lock:
            self._note_end(outcome, failure)
        system.start(self._roll_back, lambda: None)

    def _note_end(self, outcome: Outcome | None, error: BaseException | None) -> None:
        """Note how the call has ended, and commit if all ranks agreed.

        The caller of this method holds the lock. The thread that makes the call cannot return
        before the commit, because that thread waits for the lock or for `_ended`.
        """
        self._outcome = outcome
        self._error = error
        self._has_failed = outcome is None or outcome.kind != "agreed"
        if not self._has_failed:
            try:
                self._commit()
            except BaseException as raised:  # noqa: BLE001 - raised in the calling thread
                self._error = raised

    def _conclude(self, pending: BaseException | None) -> Result[T]:
        """Return the result of a call that has ended, or raise its error."""
        outcome = self._outcome
        if outcome is not None and outcome.kind == "agreed":
            return Result(self._result, pending or self._error)  # type: ignore[arg-type]
        if outcome is not None:
            _linger(self._member.scope.world)
        if pending is not None:
            raise pending
        raise self._failure()

    def _failure(self) -> BaseException:
        """Return the error of a call that has failed."""
        member = self._member
        title = member.title
        outcome = self._outcome
        own = member.error or self._error
        if outcome is None or (own is not None and outcome.kind == "failed"):
            return own or CreationError(f"{title} failed")
        world = member.scope.world
        name = world.title(world.rank)
        waited = timedelta(seconds=system.now() - member.began)
        if outcome.kind == "missing" and world.rank in outcome.absent:
            return LateRankError(
                f"{title} timed out on the other ranks before {name} arrived; repeat the call on "
                f"all ranks"
            )
        if outcome.kind in ("missing", "unfinished"):
            return GroupCreationTimeout(
                f"{title}: {outcome.text}; {name} waited {waited.total_seconds():.1f} s",
                missing=outcome.missing,
                absent=outcome.absent,
                waited=waited,
            )
        kinds = {"differs": PlanMismatchError, "restarted": WorldRestartedError}
        error = kinds.get(outcome.kind, CreationError)(f"{title}: {outcome.text}")
        error.data = outcome.data
        return error

    def _explain(self, error: BaseException) -> BaseException:
        """Return the error to raise. An error about the lost store replaces an error of torch."""
        cause = error.__cause__ if isinstance(error, StoreLostError) else error
        if isinstance(cause, HyperCommError) or not isinstance(cause, RuntimeError):
            return error
        member = self._member
        return _store_failed(
            member.scope.world, member.title, cause, is_finished=member.is_finished
        )

    # ---- in the workers -------------------------------------------------------------------------

    def _start(self, reply: object, error: BaseException | None) -> None:
        """Start a worker, which sends a reply or an error to the steps and continues them."""

        def note_idle() -> None:
            if self._is_over:
                self._ended.set()

        system.start(lambda: self._run(reply, error), note_idle)

    def _run(self, reply: object, error: BaseException | None) -> None:
        outcome = failure = None
        try:
            with client_of(self._store) as client:
                outcome = self._follow(client, reply, error)
        except _LeftError:
            return
        except BaseException as raised:  # noqa: BLE001 - raised in the calling thread
            failure = self._explain(raised)
        with self._lock:
            if self._is_over:
                return
            self._note_end(outcome, failure)
        if self._is_working:  # the work may still occupy the store, which the roll-back needs
            system.start(self._roll_back, lambda: None)
        else:
            self._roll_back()
        self._is_over = True

    def _follow(self, client: Any, reply: object, error: BaseException | None) -> Outcome:
        """Run the steps to their end."""
        steps = self._steps
        while True:
            if self._is_over:
                raise _LeftError
            try:
                operation = steps.send(reply) if error is None else steps.throw(error)
            except StopIteration as stop:
                return stop.value  # type: ignore[no-any-return]
            reply = error = None
            try:
                if isinstance(operation, Now):
                    reply = self._moment()
                elif isinstance(operation, (Wait, Work)):
                    reply = self._block(operation, client)
                else:
                    with _as_lost_store():
                        reply = perform(operation, client)
            except _LeftError:
                raise
            except BaseException as raised:  # noqa: BLE001 - the steps handle it
                error = raised

    def _block(self, operation: Wait | Work, client: Any) -> Any:
        """Perform a blocking operation, or wait for the worker that already performs it."""
        with self._lock:
            if self._is_interrupted:
                raise InterruptedCallError
            blocked = self._blocked
            is_new = blocked is None or not blocked.is_same(operation)
            if blocked is None or is_new:
                blocked = self._blocked = _Blocked(operation, system.event())
            blocked.operation = operation
        if is_new:
            self._perform_blocking(blocked, client)
        else:
            left_s = min(operation.until - system.now(), system.longest_s)
            blocked.changed.wait(max(0.0, left_s))
        with self._lock:
            if is_new and blocked.is_continued:
                raise _LeftError
            if not blocked.is_over:
                if self._is_interrupted:
                    raise InterruptedCallError
                return blocked.reply
            self._blocked = None
        return blocked.result()

    def _perform_blocking(self, blocked: _Blocked, client: Any) -> None:
        """Perform an operation, and note its result for the worker that continues the steps."""
        member = self._member
        operation = blocked.operation
        try:
            if isinstance(operation, Work):
                blocked.reply = False
                self._do_work(client)
                reply: Any = True
            else:
                slice_s = _SLICE_S + member.scope.world.size / 1000
                with _as_lost_store():
                    reply = _wait(client, operation.key, member.deadline + _STUCK_S, slice_s)
            error = None
        except BaseException as raised:  # noqa: BLE001 - raised where the steps continue
            reply = None
            error = raised
        with self._lock:
            blocked.reply = reply
            blocked.error = error
            blocked.is_over = True
            blocked.changed.set()

    def _do_work(self, client: Any) -> None:
        """Do the work of this rank, and undo it if the call has failed before the work ended."""
        member = self._member
        if member.ticket is None:
            raise RuntimeError(f"{member.title} has not proposed anything")
        left_s = member.deadline - system.now()
        ticket = member.ticket
        stale = member.scope.memory.stale
        current = Round(ticket.name, ticket.round, client, stale, left_s, lambda: self._has_failed)
        self._is_working = self._is_to_undo = True
        try:
            with torchdist.on_device(self._device):
                self._result = self._work(current)
        finally:
            with self._lock:
                self._is_working = False
            self._roll_back()

    def _roll_back(self) -> None:
        """Undo the work, or the part of it that is done, if the call has failed.

        A worker that is stuck in a backend undoes the rest of its work once the backend returns.
        """
        with self._undoing:
            with self._lock:
                if not (self._has_failed and self._is_to_undo):
                    return
                self._is_to_undo = self._is_working
            try:
                self._undo()
            except Exception as error:  # noqa: BLE001 - the error of the call matters more
                logger.warning("rolling back %s: %s", self._member.title, error)


@contextlib.contextmanager
def _as_lost_store() -> Iterator[None]:
    """Convert an error of torch in a `with` block to StoreLostError, which the steps handle."""
    try:
        yield
    except RuntimeError as error:
        raise StoreLostError(str(error)) from error


def _linger(world: World) -> None:
    """Keep the process that serves the store alive, so that other ranks can read the outcome."""
    if world.serves and world.size > 1:
        system.sleep(_LINGER_S)


def _store_failed(
    world: World, title: str, error: BaseException, *, is_finished: bool
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


# ---- the functions for other modules ------------------------------------------------------------


def limit_of(timeout: timedelta | None, world: World | None) -> float:
    """Return a timeout in seconds. None stands for the timeout of the world, if it has one."""
    if timeout is None and world is not None:
        timeout = world.timeout_of(world.backend)
    return timeout.total_seconds() if timeout else math.inf


def ask(world: World, title: str, steps: Steps[V], limit_s: float) -> V:
    """Run steps on the store of a world in another thread, and return their result.

    Args:
        world: The world.
        title: The call, as users know it, for the error.
        steps: The steps.
        limit_s: The limit for the steps in seconds.

    Raises:
        CreationError: The store is gone, or does not answer.
    """
    try:
        return in_time(lambda: _run_once(steps, world.store), limit_s)
    except HyperCommError:
        raise
    except RuntimeError as error:
        raise _store_failed(world, title, error, is_finished=False) from error


def agree(
    scope: Scope,
    title: str,
    entries: Callable[[], Sequence[str]],
    limit_s: float,
    work: Callable[[Round], T] | None = None,
    undo: Callable[[], None] = lambda: None,
    commit: Callable[[], None] = lambda: None,
    *,
    is_connecting: bool = False,
) -> Result[T]:
    """Make a call together with all ranks of a scope. The call succeeds on all ranks or on none.

    Args:
        scope: The ranks that take part.
        title: The call, as users know it.
        entries: Returns the proposal of this rank, which must be equal on all ranks.
        limit_s: The time within which all ranks must finish, in seconds.
        work: The work of this rank. Default: none, so that ranks only compare their proposals.
        undo: Undoes the work, or the part of it that was done, if the call fails.
        commit: Changes the state of this rank once all ranks have agreed. If there are other
            ranks, `commit` runs in another thread, where Ctrl-C cannot interrupt it.
        is_connecting: Whether the work needs the other ranks. If so, the work begins once all
            ranks have arrived.

    Returns:
        The value of the work, and the exception that interrupted this rank after the agreement,
        if any.

    Raises:
        PlanMismatchError: Ranks make different proposals, or have built different grids.
        GroupCreationTimeout: Ranks are missing. The error names them.
        LateRankError: The other ranks timed out before this rank arrived.
        CreationError: A rank failed, or the store is gone.
        OutcomeUnknownError: The store is gone, and the other ranks may have agreed.
    """
    do = work or _do_nothing
    memory = scope.memory
    world = scope.world
    if scope.is_alone:
        key = f"{memory.namespace}/{scope.path}"
        if memory.namespace is None and world.has_store:
            key = ask(world, title, scope.read_key(), limit_s)
        number = memory.next_number(scope.path)
        try:
            with client_of(world.store) as client:
                value = do(Round(f"{key}/{number}", number, client, memory.stale))
            commit()
        except BaseException:
            undo()
            raise
        return Result(value)
    lock = memory.lock_of(scope.path)
    began = system.now()
    if not lock.acquire(timeout=min(limit_s, system.longest_s)):
        raise CreationError(f"{title} failed: another thread of this rank waits in the same call")
    try:
        now = system.now()
        member = Member(
            scope,
            title,
            entries,
            now,
            began + limit_s,
            is_connecting,
            partial(_count_threads, world),
            limit_s,
        )
        return Driver(member, do, undo, commit).make()
    finally:
        lock.release()


def _do_nothing(_: Round) -> Any:
    return None


def _count_threads(world: World) -> int:
    """Return how many threads of this process make calls in a world."""
    return max(1, sum(one.is_of(world) for one in list(_active)))


@contextlib.contextmanager
def refusing(scope: Scope | None) -> Iterator[None]:
    """Call `refuse` if the `with` block raises an error."""
    try:
        yield
    except BaseException as error:
        if scope is not None:
            refuse(scope, error)
        raise


def refuse(scope: Scope, error: BaseException) -> None:
    """Fail the next call of a scope on the other ranks, because this rank cannot take part.

    The other ranks then do not wait for this rank. This function raises nothing, because its caller
    raises `error`.

    Args:
        scope: The ranks.
        error: The error of this rank. The other ranks raise a CreationError with its text.
    """
    if scope.is_alone:
        return
    lock = scope.memory.lock_of(scope.path)
    world = scope.world
    if not lock.acquire(timeout=_REFUSAL_S):
        return  # the call of another thread must not fail because of this error
    try:
        now = system.now()
        member = Member(scope, "refuse()", list, now, now)
        steps = member.refuse(failure_of(scope.name, error))
        until = now + _REFUSAL_S  # later, the other ranks may be in their next attempt
        with contextlib.suppress(RuntimeError):
            in_time(lambda: _run_once(steps, world.store, until), _REFUSAL_S)
            _linger(world)
    finally:
        lock.release()


def _run_once(steps: Steps[V], store: Any, until: float = math.inf) -> V:
    """Call `run` with a client of a store that no other call uses at the same time."""
    with client_of(store) as client:
        return run(steps, client, until)


_active: set[Driver[Any]] = set()
"""The calls that threads of this process are making."""


def _end_all() -> None:
    """Interrupt all calls, because a worker inside gloo would abort the process at exit."""
    for call in list(_active):
        with contextlib.suppress(RuntimeError):  # threads can no longer be started
            call.interrupt()
    if _active:
        system.sleep(2 * _LINGER_S)


atexit.register(_end_all)
os.register_at_fork(after_in_child=_active.clear)
