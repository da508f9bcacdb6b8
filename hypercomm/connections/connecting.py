"""Connecting: all ranks meet and compare, then communicate once over all that each has.

What is missing is found in the job's store: a rank that waits for long says at what, and a rank
that says nothing is the one that the others wait for.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial

import attrs
import torch.distributed as dist

from hypercomm.connections.connections import Connection, Connections
from hypercomm.connections.items import Item, Plans, is_live, items_of
from hypercomm.connections.progress import Show, showing
from hypercomm.errors import (
    ConnectTimeout,
    CreationError,
    GroupCreationTimeout,
    HyperCommError,
    OutcomeUnknownError,
    PlanMismatchError,
    UnknownDimError,
)
from hypercomm.layout.checks import as_names
from hypercomm.layout.text import did_you_mean, shown, some_of
from hypercomm.process_groups import c10d
from hypercomm.process_groups.agreement.arrival import absent
from hypercomm.process_groups.agreement.driver import hold
from hypercomm.process_groups.agreement.steps import Step, Steps, limit_of
from hypercomm.process_groups.agreement.together import NOTHING, all_or_none, refusing
from hypercomm.process_groups.agreement.whereabouts import name_late
from hypercomm.process_groups.c10d.store import LateError, in_time
from hypercomm.process_groups.job import Job, current
from hypercomm.process_groups.options import check_timeout
from hypercomm.process_groups.planned import PlannedGroup

CALL = "connect()"
PIPELINES = ("pp",)
"""The dims whose neighbours are connected, where a grid has them."""

_GRACE_S = 2.0
"""How long the others may take to say that they wait, once a collective has failed."""

_TELLING_S = 1.0
_POLL_S = 0.1
_MOST_NAMED = 3


def read_pipelines(pipelines: str | Iterable[str], known: Iterable[str]) -> tuple[str, ...]:
    """Read the names of dims; the default is left out where no grid has it.

    Raises:
        UnknownDimError: No grid has one.
        LayoutError: They are no names.
    """
    names = as_names((pipelines,) if isinstance(pipelines, str) else pipelines, "pipeline")
    known = list(dict.fromkeys(known))
    for name in names:
        if name not in known and name not in PIPELINES:
            raise UnknownDimError(
                f"unknown dim {shown(name)} in pipelines; the grid has {shown(known)}"
                f"{did_you_mean(name, known)}"
            )
    return tuple(name for name in names if name in known)


def connect(
    steps: Steps,
    plans: Callable[[], Plans],
    pipelines: tuple[str, ...],
    timeout: timedelta | None,
    progress: bool | None,
) -> Connections:
    """Connect groups that exist, after all ranks have met and compared which.

    Args:
        steps: What all ranks of the groups do in one order.
        plans: Returns the groups.
        pipelines: The dims whose neighbours are connected.
        timeout: For all of it; default: the timeout of WORLD.
        progress: Whether a bar is shown; None: where a terminal looks on.

    Raises:
        PlanMismatchError: Ranks have different groups; nothing was connected.
        ConnectTimeout: Ranks did not come, or did not go on; names them, and a group.
        OutcomeUnknownError: The store is gone.
        CreationError: A collective failed, what came back is wrong, or the others gave up on this
            rank.
    """
    check_timeout(timeout)
    show = Show.read(progress)
    job, begin, limit_s = current(), time.monotonic(), limit_of(timeout)
    with refusing(steps, CALL):
        every = plans()
        items = items_of(every, pipelines, job)
        entries = [f"{CALL} with edges along {', '.join(pipelines) or 'no dim'}"]
        for title, planned in every.items():
            entries.append(title.removesuffix(str(planned.key)) + planned.describe())
    try:
        met = all_or_none(steps, entries, limit_s, CALL, *NOTHING)
        with refusing(steps, CALL):
            met.get()
        met_s = time.monotonic() - begin
        if not is_live():
            return Connections(tuple(item.blank for item in items), met_s)
        if job.rank not in steps.agreement.layout:
            return Connections()
        course = _Course(steps, job, items, begin)
        left_s = max(0.0, limit_s - met_s)
        is_first = job.rank == steps.agreement.layout.ranks[0]
        with showing(show, len(items), is_first=is_first) as course.tell:
            return Connections(_go_on(steps, course, left_s, every), met_s)
    except ConnectTimeout:
        raise
    except PlanMismatchError as error:
        if f" failed in {CALL}: " not in str(error):
            raise
        kind = ConnectTimeout if f" {ConnectTimeout.__name__}: " in str(error) else CreationError
        raise kind(str(error)) from error  # they had the same groups
    except GroupCreationTimeout as error:
        raise _as_timeout(error, every, job) from error


def _go_on(steps: Steps, course: _Course, left_s: float, plans: Plans) -> tuple[Connection, ...]:
    """Connect all of it, and wait for each other, by the last group where all ranks are in it."""
    entries = [f"{CALL} goes on"]
    if not course.ends_with(list(plans.values())[-1:]):
        work = course.run, course.take_back
        return all_or_none(steps, entries, left_s, CALL, *work, follows=True).get()
    step = attrs.evolve(steps.enter(entries), deadline=time.monotonic() + left_s)
    try:
        rows = course.run(step)
    except BaseException as error:
        steps.abandon(step, error, CALL)
        course.take_back()
        raise
    steps.obey(step.number)
    return rows


def _as_timeout(error: GroupCreationTimeout, plans: Plans, job: Job) -> ConnectTimeout:
    """Say in which groups the ranks are that did not come."""
    told, first = [], ""
    for rank in error.missing[:_MOST_NAMED]:
        within = {
            title: planned.groups.of(rank)
            for title, planned in plans.items()
            if planned.groups.group_size > 1 and planned.groups.has_member(rank)
        }
        mine = [title for title, ranks in within.items() if job.rank in ranks]
        first = first or (mine[0] if mine else "")
        if within:
            places = [f"{title} of ranks {ranks}" for title, ranks in within.items()]
            told.append(f"rank {rank} is in {some_of(places, 8)}")
    return ConnectTimeout(
        "; ".join([str(error), *told]), missing=error.missing, waited=error.waited, group=first
    )


@attrs.define
class _Course:
    """What the calling rank connects, one after the other, in a thread that may hang.

    Attributes:
        at: The position of what is connected now.
        is_over: Whether nothing more is to be begun.
        tell: Called after each, for the progress bar.
    """

    steps: Steps
    job: Job
    items: list[Item]
    begin: float
    at: int = 0
    is_over: bool = False
    tell: Callable[[], None] = attrs.field(default=lambda: None)
    _rows: list[Connection] = attrs.field(factory=list)
    _looked_at: int = -1
    _look: Callable[[list[int], float], None] | None = None
    _said: set[str] = attrs.field(factory=set)

    def run(self, step: Step) -> tuple[Connection, ...]:
        """Connect all of it, at a step that all ranks are at.

        Raises:
            ConnectTimeout: It was not done in time, or a member is gone.
            CreationError: As for `connect`.
        """
        if not self.items:
            return ()
        left_s = max(0.0, step.deadline - time.monotonic())
        try:
            in_time(self._connect, left_s, partial(self._watch, step))
        except LateError as error:
            raise self._error(step, error) from None
        except dist.DistNetworkError as error:
            raise OutcomeUnknownError(
                f"{CALL} failed: the job's store is gone ({str(error).splitlines()[0]}); restart "
                f"the job"
            ) from error
        except HyperCommError:
            raise
        except RuntimeError as error:
            raise self._error(step, error) from error
        if self._said:
            with contextlib.suppress(RuntimeError):
                self._say(step, len(self.items) - 1)  # whoever is slower sees that this one is done
        return tuple(self._rows)

    def ends_with(self, last: list[PlannedGroup]) -> bool:
        """Tell whether what comes last on all ranks is a group of all of them: it is a meeting."""
        size = self.steps.agreement.layout.size
        return (
            bool(self.items)
            and [self.items[-1].planned] == last
            and (len(self.items[-1].blank.ranks) == size > 1 and not self.items[-1].blank.is_edge)
        )

    def take_back(self) -> None:
        """Begin nothing more, and end what hangs."""
        self.is_over = True
        if self.at < len(self.items):
            self.items[self.at].give_up()

    def _connect(self) -> None:
        for at, item in enumerate(self.items):
            self.at = at
            if self.is_over:
                return
            self._rows.append(item.connect(self.job.rank))
            self.tell()
        self.at = len(self.items)

    # ---- who is waited for ----------------------------------------------------------------------

    def _watch(self, step: Step) -> None:
        """Say what this rank waits in, and for whom; raise where another has failed."""
        if not step.register:
            return
        at = min(self.at, len(self.items) - 1)
        item = self.items[at]
        self._say(step, at)
        if at != self._looked_at:
            self._looked_at = at
            self._look = self.steps.lookout(self.job, f"{CALL}: {item.title}", is_met=True)
        if self._look is not None:
            self._look(self._behind(step, item), time.monotonic() - self.begin)

    def _say(self, step: Step, at: int) -> None:
        """Say that this rank has come to an item, and so to all before."""
        new = [
            f"{_place(step, item)}/here/{self.job.rank}"
            for item in self.items[: at + 1]
            if f"{_place(step, item)}/here/{self.job.rank}" not in self._said
        ]
        if new:
            c10d.answer(lambda: c10d.set_all(dict.fromkeys(new, "1")))
            self._said.update(new)
            self.steps.agreement.registers.update(new)

    def _behind(self, step: Step, item: Item) -> list[int]:
        """Return the members that have not come to an item, the first ones."""
        if not step.register:
            return []
        others = [rank for rank in item.blank.ranks if rank != self.job.rank]
        found = hold(absent(_place(step, item), others))
        done = {rank: f"{step.register}/here/{rank}" for rank in found}
        return [rank for rank in found if not c10d.answer(partial(c10d.is_set, [done[rank]]))]

    def _error(self, step: Step, error: Exception) -> CreationError:
        """Name who is missing in what this rank is at."""
        item = self.items[min(self.at, len(self.items) - 1)]
        is_late = isinstance(error, LateError)
        layout = item.planned.spec.layout
        why = "" if is_late else f" ({_first_line(error)})"
        behind: list[int] = []
        named, late = "", tuple[int, ...]()
        with contextlib.suppress(dist.DistNetworkError):
            until = time.monotonic() + (0.0 if is_late else _GRACE_S)
            while True:
                self._watch(step)
                behind = self._behind(step, item)
                if not behind or time.monotonic() >= until:
                    break
                time.sleep(_POLL_S)
            late, named = hold(name_late(self.job, behind, item.blank.ranks, layout), _TELLING_S)
        waited = time.monotonic() - self.begin
        what = f"{CALL} of the grid {self.steps.agreement.layout}"
        if not behind:
            if is_late:
                return ConnectTimeout(
                    f"{what} waited {waited:.1f} s in {item.title}, which all of its members have "
                    f"come to, and which has not ended; allow more with timeout=, or see whether "
                    f"they can reach each other",
                    waited=timedelta(seconds=waited),
                    group=item.blank.keys[0],
                )
            return CreationError(f"{what} failed in {item.title}{why}")
        return ConnectTimeout(
            f"{what} waited {waited:.1f} s in {item.title} for {named}{why}; see what they do, or "
            f"whether they are alive",
            missing=late,
            waited=timedelta(seconds=waited),
            group=item.blank.keys[0],
        )


def _first_line(error: Exception) -> str:
    """Return what torch says, without the advice that gloo adds."""
    line = next(iter(str(error).splitlines()), "")
    return line.partition(". This is typically")[0] or type(error).__name__


def _place(step: Step, item: Item) -> str:
    """Where the members of what is connected say that they have come to it."""
    blank = item.blank
    return f"{step.register}/{blank.title} {blank.backend} of {','.join(map(str, blank.ranks))}"
