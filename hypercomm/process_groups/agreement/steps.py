"""Steps: what the ranks of one grid do in one order, compared; and what they do all or none."""

from __future__ import annotations

import contextlib
import heapq
import logging
import math
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Generic, TypeVar

import attrs

from hypercomm.errors import (
    CreationError,
    GroupCreationTimeout,
    OutcomeUnknownError,
    PlanMismatchError,
)
from hypercomm.layout.views import View
from hypercomm.process_groups import torch_internals as c10d
from hypercomm.process_groups.agreement.agreement import Agreement, Joined
from hypercomm.process_groups.agreement.arrival import arrive
from hypercomm.process_groups.agreement.driver import hold, hold_for_all
from hypercomm.process_groups.agreement.meeting import (
    AGREED,
    End,
    Meeting,
    Now,
    Said,
    Sleep,
    compare,
    decide,
    differ_from,
    end_of,
    in_one_line,
    seen_elsewhere,
    seen_here,
)
from hypercomm.process_groups.agreement.whereabouts import name_late
from hypercomm.process_groups.job import Job, current, current_or_none
from hypercomm.process_groups.torch_internals.gloo import AttemptGivenUpError
from hypercomm.process_groups.torch_internals.store import answer

logger = logging.getLogger(__name__)

_TELLING_S = 0.5
"""How long the store may take to answer when something has failed."""

_DECISION_S = 1.0
"""How long a rank that hears of a failure waits for whoever failed to say why."""


def limit_of(timeout: timedelta | None) -> float:
    """Return how many seconds ranks wait for each other; None stands for the timeout of WORLD."""
    job = current_or_none()
    timeout = timeout or (None if job is None else c10d.world_timeout(job.backend))
    return timeout.total_seconds() if timeout else math.inf


@attrs.frozen
class Step:
    """A step that this rank has entered.

    Attributes:
        steps: Those that it is one of.
        number: The step's.
        turn: Which of the comparisons at it this is.
        name: The step's, within the grid.
        register: Where it is decided; "" where there is nobody to decide with.
        entries: How many entries were compared.
        deadline: When what is done at it must be done, by `time.monotonic`.
    """

    steps: Steps
    number: int
    turn: int
    name: str
    register: str = ""
    entries: int = 0
    deadline: float = math.inf


class Steps:
    """The steps that the ranks of one grid make, one after the other.

    A step ends once: when all ranks have met at it, or when one has failed or differs. Each rank
    obeys that, at its next wait at the latest, and goes on to the next one: so all hear of each
    failure once, and then try again together. What is compared without a meeting is compared in
    turns within a step.

    Args:
        agreement: Of the grid.
        are_all: Whether all that the grid creates is compared, so that positions count on.

    Attributes:
        agreement: As given.
    """

    def __init__(self, agreement: Agreement, *, are_all: bool = False) -> None:
        self.agreement = agreement
        self._are_all = are_all
        self._number = 0
        self._turn = 0
        self._left_out: list[int] = []
        self._position = 0
        self._same_views: set[tuple[str, str, View]] = set()
        self._lock = threading.Lock()

    @property
    def title(self) -> str:
        """What tells them apart from those of other grids."""
        return "/".join(self.agreement.name.split("/")[-2:])

    @property
    def number(self) -> int:
        """How many have ended, as this rank has heard."""
        return self._number

    # ---- what is compared -----------------------------------------------------------------------

    def enter(self, entries: Sequence[str]) -> Step:
        """Compare what this rank does next with what the others do.

        Args:
            entries: What it does, in lines.

        Raises:
            PlanMismatchError: Ranks differ.
            CreationError: A key of the store holds what this library did not write.
        """
        while True:
            with self._lock:
                turn = heapq.heappop(self._left_out) if self._left_out else self._turn
                self._turn = max(self._turn, turn + 1)
                position = self._position if self._are_all else 0
                self._position += len(entries)
                number = self._number
            step = Step(self, number, turn, f"step {number}", self._register(number), len(entries))
            if not step.register:
                return step
            if logger.isEnabledFor(logging.INFO):
                for at, entry in enumerate(entries, start=position):
                    logger.info("%s, position %d: %s", self.title, at, in_one_line(entry))
            try:
                key = f"{step.register}/{turn}"
                end = self._compare(step, key, entries, differ_from(position))
            except BaseException:
                self.give_back(step)
                raise
            if end is None:
                return step
            self.give_back(step)
            self.obey(number)
            if end.kind != "agreed" and current().rank not in end.ranks:
                raise error_of(end)  # else this rank comes late, to the step after

    def give_back(self, step: Step) -> None:
        """Compare again what was compared: it was not done."""
        with self._lock:
            self._position -= step.entries
            if step.number == self._number:
                heapq.heappush(self._left_out, step.turn)

    def compare_view(self, view: View, shape: str = "") -> None:
        """Compare a view with that of the rank that came first to it; asked once for each view.

        Args:
            view: The view.
            shape: What the grid's shape is known by.

        Raises:
            PlanMismatchError: The ranks have registered different views under this name.
            CreationError: The key holds what this library did not write.
        """
        register = self._register(self._number)
        if not register or (self.agreement.name, shape, view) in self._same_views:
            return

        def differ(first: Said, own: Said) -> str | None:
            if first.entries == own.entries:
                return None
            return (
                f"ranks differ in view {view.name!r}: rank {own.rank} (host {own.host}) has "
                f"registered {view}, but rank {first.rank} (host {first.host}), which came "
                f"first, has {', '.join(first.entries)}; every rank must register the same view"
            )

        key = f"{self.agreement.name}/view {view.name}{shape and f' of {shape}'}"
        while True:  # until all hear of this, and not of something else
            step = Step(self, self._number, 0, "", self._register(self._number))
            end = self._compare(step, key, [str(view)], differ)
            if end is None:
                break
            self.obey(step.number)
            if end.about == key:
                raise error_of(end)
        self._same_views.add((self.agreement.name, shape, view))

    def _compare(
        self, step: Step, key: str, entries: Sequence[str], differ: Callable[..., str | None]
    ) -> End | None:
        said = attrs.evolve(self.agreement.said, entries=tuple(entries))
        self.agreement.registers |= {key, step.register}
        return hold(compare(key, said, differ, step.register))

    def next_register(self) -> str:
        """Where the next step is decided; "" where there is nobody to decide with."""
        return self._register(self._number)

    def _register(self, number: int) -> str:
        """Where a step is decided."""
        return _place(self.agreement.join(), number) if self.agreement.compares() else ""

    # ---- how a step ends ------------------------------------------------------------------------

    def obey(self, number: int) -> None:
        """Go on to the next step: this one has ended."""
        with self._lock:
            if number == self._number:
                self._number, self._turn, self._left_out = number + 1, 0, []

    def abandon(self, step: Step, error: BaseException, call: str) -> End | None:
        """Decide that a step fails, or obey what has been decided; None: nobody can tell."""
        self.obey(step.number)
        if not step.register or isinstance(error, OutcomeUnknownError):
            return None
        try:
            if isinstance(error, AttemptGivenUpError):
                return hold(_await_decision(step.register, _failure(error, call)), _TELLING_S)
            return hold(decide(step.register, _failure(error, call)), _TELLING_S)
        except RuntimeError:  # the store is gone
            return None

    def refuse(self, error: BaseException, call: str) -> None:
        """Let the step that is next fail on all ranks: this one cannot make it."""
        register = self.next_register()
        if register:
            self.agreement.registers.add(register)
            self.abandon(Step(self, self._number, 0, "", register), error, call)

    def lookout(
        self, job: Job, title: str, *, is_met: bool
    ) -> Callable[[Sequence[int], float], None]:
        """Return what a rank calls that waits in a creation, with whom it waits for, and how long.

        It raises where ranks differ, or one has failed, and the wait is in vain.

        Args:
            job: The job, in which there is a store.
            title: What it creates, as a user knows it.
            is_met: Whether all ranks meet afterwards, so that those who do give up together.
        """
        agreement, number = self.agreement, self._number
        joined = agreement.join(job)
        register = _place(joined, number) if joined.has_others else ""
        agreement.stop_waiting()

        def look(missing: Sequence[int], waited_s: float) -> None:
            agreement.look(joined, missing, waited_s)
            end = hold(end_of(register)) if register and number == self._number else None
            if end is not None and end.kind != "agreed":
                self.obey(number)
                if is_met or end.kind != "missing":
                    raise error_of(end)
            if missing and not joined.job.grids.waits:
                agreement.publish_whereabouts(title, missing)

        return look

    def conclude(self, step: Step, deadline: float, call: str) -> BaseException | None:
        """Wait until all ranks have got as far as this one, and obey what is decided.

        Args:
            step: The step.
            deadline: When to give up, by `time.monotonic`.
            call: What every rank must call for it, for the error.

        Returns:
            What has interrupted this rank, though all have got here: to be raised once obeyed.

        Raises:
            PlanMismatchError: Ranks differ, or one has failed.
            GroupCreationTimeout: Ranks did not come; names them.
            AttemptGivenUpError: The others have given up on this rank, and may try again.
            OutcomeUnknownError: The store is gone, and with it what was decided.
        """
        begin = time.monotonic()
        end, pending = self.meet(step, deadline, call)
        if end.kind == "agreed":
            return pending
        if pending is not None:
            raise pending
        layout, rank = self.agreement.layout, current().rank
        if end.kind != "missing" or rank in end.ranks:
            raise error_of(end)
        waited = time.monotonic() - begin
        if not end.late or rank in end.late:  # as others see it
            end = hold(self._missing(end.ranks), _TELLING_S)
        raise GroupCreationTimeout(
            f"{call} of the grid {layout} waited {waited:.1f} s for {end.words}; every rank of the "
            f"grid must call it",
            missing=end.late,
            waited=timedelta(seconds=waited),
        )

    def meet(self, step: Step, deadline: float, call: str) -> tuple[End, BaseException | None]:
        """Wait and obey as `conclude` does; return the end, and what has interrupted this rank.

        Raises:
            OutcomeUnknownError: The store is gone, and with it what was decided.
        """
        if not step.register:
            self.obey(step.number)
            return AGREED, None
        layout, joined = self.agreement.layout, self.agreement.join()
        meeting = arrive(
            *(step.register, current().rank, layout.ranks, deadline),
            lambda: self.agreement.elsewhere(joined, step.register),
            self._missing,
        )
        left_s = deadline - time.monotonic()
        end, pending = hold_for_all(meeting, left_s, f"{call} of the grid {layout}")
        self.obey(step.number)
        if end.kind == "agreed":
            self._forget_before(step)
        return end, pending

    def _missing(self, ranks: tuple[int, ...]) -> Meeting[End]:
        """How a step ends that ranks do not come to."""
        layout = self.agreement.layout
        late, words = yield from name_late(current(), ranks, layout.ranks, layout)
        return End("missing", ranks, words, late=late)

    def _forget_before(self, step: Step) -> None:
        """Remove what earlier steps have left: every rank has come to this one."""
        agreement = self.agreement
        place = f"{agreement.name}/step "  # views stay
        old = {key for key in agreement.registers if key.startswith(place)} - {step.register}
        agreement.registers -= old
        if agreement.said.rank == agreement.layout.ranks[0]:
            with contextlib.suppress(RuntimeError):  # the store is gone
                answer(lambda: c10d.forget(sorted(old)))


def _place(joined: Joined, number: int) -> str:
    return f"{joined.name}/step {number}"


def error_of(end: End) -> CreationError | AttemptGivenUpError:
    """Return what is raised on a rank that obeys an end; one that was given up on may try again."""
    if current().rank in end.ranks:
        return AttemptGivenUpError("the others have given up on this rank")
    if end.kind == "missing":
        named = end.words or f"ranks {list(end.ranks)}"
        told = f"others gave up, as {named} did not come; all ranks of the grid must make this call"
        is_told = bool(end.words) and not end.late  # by a rank, in a sentence of its own
        return GroupCreationTimeout(end.words if is_told else told, missing=end.ranks)
    return PlanMismatchError(seen_here(end.words, current().rank))


def _failure(error: BaseException, call: str) -> End:
    """How a place ends where this rank fails."""
    if isinstance(error, GroupCreationTimeout) and error.missing:
        return End("missing", tuple(error.missing), str(error))
    if isinstance(error, PlanMismatchError):
        return End("failed", words=seen_elsewhere(str(error)))
    rank = current().rank
    words = seen_elsewhere(f"{type(error).__name__}: {error}")
    return End("failed", words=f"rank {rank} failed in {call}: {words}")


def _await_decision(register: str, otherwise: End) -> Meeting[End]:
    """Wait for whoever failed to say why; decide instead if nobody does."""
    begin = yield Now()
    while True:
        end = yield from end_of(register)
        if end is not None:
            return end
        if (yield Now()) > begin + _DECISION_S:
            return (yield from decide(register, otherwise))
        yield Sleep(0.01)


# ---- all or none --------------------------------------------------------------------------------


T = TypeVar("T")

_LONGER_S = 0.7
"""How much longer those wait who are done, than those who still create groups."""

NOTHING = (lambda _: None), (lambda: None)
"""What is done where ranks only meet, and how it is taken back."""


@attrs.frozen
class Outcome(Generic[T]):
    """What came of something that all ranks have done.

    Attributes:
        result: What this rank's part has returned.
        pending: What has interrupted this rank though all are done; raised once it has obeyed.
    """

    result: T
    pending: BaseException | None

    def get(self) -> T:
        """Return the result, or raise what is pending."""
        if self.pending is not None:
            raise self.pending
        return self.result


@contextlib.contextmanager
def refusing(steps: Steps, call: str) -> Iterator[None]:
    """Let the ranks that wait hear at once if this one fails before it meets them."""
    before = steps.number
    try:
        yield
    except BaseException as error:
        if steps.number == before:  # else this rank has heard of a failure, and so have they
            with contextlib.suppress(RuntimeError):  # the store is gone
                steps.refuse(error, call)
        raise


def all_or_none(
    steps: Steps,
    entries: Sequence[str],
    limit_s: float,
    call: str,
    work: Callable[[Step], T],
    take_back: Callable[[], None],
    *,
    follows: bool = False,
) -> Outcome[T]:
    """Do something on all ranks of a grid, or on none.

    Args:
        steps: The grid's.
        entries: What is done, as all ranks must say alike.
        limit_s: Seconds within which all must be done.
        call: What every rank must call for it, for errors.
        work: Does this rank's part.
        take_back: Undoes as much of it as was done; raises nothing.
        follows: Whether it follows something that all have done: who is late to it is told to call
            again, as the others do.

    Returns:
        What `work` has returned, and what has interrupted this rank.

    Raises:
        PlanMismatchError: Another rank does something else, or failed.
        GroupCreationTimeout: A rank did not come in time.
        CreationError: The others have given up on this rank.
        OutcomeUnknownError: The store is gone, and with it whether the others have gone on.
    """
    deadline = time.monotonic() + limit_s
    longer_s = 0.0 if work is NOTHING[0] else min(_LONGER_S, limit_s)
    while True:
        step = attrs.evolve(steps.enter(entries), deadline=deadline)
        try:
            result = work(step)
            # Who waits in a creation names who is missing there, a moment before.
            return Outcome(result, steps.conclude(step, deadline + longer_s, call))
        except BaseException as error:
            end = steps.abandon(step, error, call)
            take_back()
            if not isinstance(error, AttemptGivenUpError):
                raise
            if end is not None and end.kind != "agreed" and current().rank not in end.ranks:
                raise error_of(end) from error
            if follows or time.monotonic() > deadline:
                raise CreationError(
                    f"{call} was given up by the other ranks; call it again"
                ) from error
