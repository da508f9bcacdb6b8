"""The process groups of one grid, by key: planned, created, shared, and destroyed once.

`GroupOwner` creates one group; a `Batch` creates several in one call, all of them or none.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING

import attrs
from torch.distributed import ProcessGroup

from hypercomm.errors import (
    CreationError,
    ForkedError,
    GridDestroyedError,
    GroupExistsError,
    GroupMissingError,
)
from hypercomm.layout import RankLayout
from hypercomm.process_groups import torch_internals as c10d
from hypercomm.process_groups.agreement.steps import NOTHING, Step, Steps, all_or_none, limit_of
from hypercomm.process_groups.creation import (
    BATCH_PATIENCE_S,
    CreatedGroup,
    create,
    destroy,
    give_up,
    together,
)
from hypercomm.process_groups.job import Job, current_or_none
from hypercomm.process_groups.options import GroupOptions, check_backend
from hypercomm.process_groups.planned import Explanation, PlannedGroup, Pool, PooledGroup
from hypercomm.process_groups.spec import GroupKey, GroupSpec, check_once, specify
from hypercomm.process_groups.strategies import NOT_YET, Attempt, Choice, choose
from hypercomm.process_groups.torch_internals.gloo import ENDLESS, AttemptGivenUpError, Patience

if TYPE_CHECKING:
    from hypercomm.process_groups.agreement.survivors import Successions

logger = logging.getLogger(__name__)

Decided = tuple[Choice, GroupOptions]
Alike = dict[tuple[object, ...], Decided]
"""What was decided for groups of one call, by what was asked for."""

_ADOPTED = Choice("adopted", "a DeviceMesh created it, and stays its owner")


class GroupOwner:
    """Plans, creates, looks up and destroys the process groups of one grid.

    Args:
        layout: The grid's.
        creation: How groups are created: "auto", or the name of a strategy.
        pool: Where groups are that keys may share, also with other grids.
        steps: What the ranks of the grid do in one order, and have told each other.
        is_verified: Whether each creation is compared with those of the other ranks.
        shape: What tells its groups apart from those that the grid had before a reshape.

    Attributes:
        layout: The grid's.
        pool: Where its groups are.
        planned: What is planned, by key; all that exists is.
        created: What exists, by key, in the order of creation.
        steps: What its ranks do in one order.
        calls: Held by the thread that makes a step.
        is_verified, shape: As given.
        job: Whose numbers its ranks have; None before there is one.
        is_reshaping: Whether nothing may be planned or destroyed, as a reshape would lose it.
    """

    def __init__(
        self,
        layout: RankLayout,
        creation: str,
        pool: Pool,
        steps: Steps,
        *,
        is_verified: bool,
        shape: str = "",
    ) -> None:
        self.layout = layout
        self.pool = pool
        self.planned: dict[GroupKey, PlannedGroup] = {}
        self.created: dict[GroupKey, PlannedGroup] = {}
        self.is_destroyed = False
        self.steps = steps
        self.agreement = steps.agreement
        self.is_verified = is_verified
        self.shape = shape
        self.job = current_or_none()
        self.calls = threading.Lock()
        self._tries: Counter[GroupKey] = Counter()
        self._process = os.getpid()
        self._creation = creation
        self.is_reshaping = False
        self._told: set[str] = set()

    @cached_property
    def successions(self) -> Successions:
        """What its ranks may continue as, without those that are lost."""
        from hypercomm.process_groups.agreement.survivors import Successions

        return Successions(self.agreement, are_all=self.is_verified)

    # ---- one group ------------------------------------------------------------------------------

    def create(self, spec: GroupSpec) -> ProcessGroup | None:
        """Plan and create a group, or leave everything as it was."""
        begin = time.monotonic()
        while True:
            planned = self.plan(spec)
            try:
                group = self.obtain(planned, begin).group
            except BaseException as error:
                self.forget([planned])
                if not isinstance(error, AttemptGivenUpError):
                    raise
            else:
                return group

    def plan(self, spec: GroupSpec) -> PlannedGroup:
        """Reserve the key of a group that is to be created, once all ranks agree."""
        with self.pool.lock:
            planned = self.reserve(spec)
            try:
                if self.is_verified:
                    planned.step = self.steps.enter([planned.describe()])
            except BaseException:
                self.forget([planned])
                raise
            return planned

    def reserve(self, spec: GroupSpec, alike: Alike | None = None) -> PlannedGroup:
        """Reserve the key of a group, after comparing the grid, and its view, with other ranks."""
        self.check_steady()
        if spec.key in self.planned:
            raise GroupExistsError(spec.key.says_exists(is_created=spec.key in self.created))
        job = current_or_none()
        planned = self.draft(spec, job, alike)
        strategy, reason = planned.choice
        asked_for = spec.given.creation or self._creation
        if strategy == "enumerate" and asked_for == "auto" and reason not in self._told:
            self._told.add(reason)
            logger.warning("creating groups by enumeration: %s", reason)
        if job is not None:
            if planned.options.backend != job.backend:
                check_backend(planned.options.backend)
            self.agreement.join(job)  # while all ranks are at the same place
            if spec.view is not None:
                self.steps.compare_view(spec.view, self.shape)
        self.pool.join(planned)
        self.planned[spec.key] = planned
        return planned

    def draft(self, spec: GroupSpec, job: Job | None, alike: Alike | None = None) -> PlannedGroup:
        """Decide how a group is to be created, and with what; reserves nothing.

        Args:
            spec: What is asked for.
            job: The job, once there is one.
            alike: What was decided for others of the same call, and now is for this one.
        """
        given = spec.given
        if alike is None or given.pg_options is not None or not spec.groups.is_sorted:
            choice, options = self._decide(spec, job)
            return PlannedGroup(spec, options, choice, self)
        wish = (given.backend, given.timeout, given.lazy_init, given.creation)
        if wish not in alike:
            alike[wish] = self._decide(spec, job)
        choice, options = alike[wish]
        options = options.described(given.group_desc or str(spec.key))
        return PlannedGroup(spec, options, choice, self)

    def _decide(self, spec: GroupSpec, job: Job | None) -> Decided:
        given = spec.given
        if job is None:
            return NOT_YET, given
        by_all, creation = self.layout.size == job.size, given.creation or self._creation
        choice = choose(creation, given.backend, spec.groups, lazily=given.lazy_init, by_all=by_all)
        return choice, given.resolve(str(spec.key), job)

    def obtain(self, planned: PlannedGroup, begin: float) -> CreatedGroup:
        """Take the group of a plan from the pool, or create it there, and file both.

        Args:
            planned: What was planned.
            begin: When the first attempt began: all of them have to keep the timeout.

        Raises:
            AttemptGivenUpError: The other members had given up; try again.
        """
        self.check_alive()
        if planned.is_filed and planned.pooled and planned.pooled.created:
            return planned.pooled.created
        if planned.options is planned.spec.given:
            self._resolve(planned)
        pooled = self.pool.join(planned)
        with pooled.lock:
            created = pooled.created
            if created is None:
                created = pooled.namer.owner.make(pooled.namer, begin)
            try:
                with self.pool.lock:
                    pooled.created = created
                    if pooled.namer is not planned:
                        pooled.namer.owner.file(pooled.namer)
                    self.file(planned)
                    planned.is_obtained = True
            finally:
                if not planned.is_filed:  # its grid may have been destroyed meanwhile
                    self._end(self.pool.end(pooled))
        self.check_alive()
        return created

    def make(self, planned: PlannedGroup, begin: float) -> CreatedGroup:
        """Create the group of a plan."""
        self.check_alive()
        if planned.options is planned.spec.given:
            self._resolve(planned)
        try:
            attempt = planned.attempt or self.attempt(planned, begin=begin)
            created = create(attempt, planned.choice.strategy)
        except BaseException:
            if planned.attempt is None:
                self._tries[planned.key] += 1
            raise
        self.agreement.stop_waiting()
        return created

    def _resolve(self, planned: PlannedGroup) -> None:
        """Decide what could not be decided when it was planned, without a job."""
        job = current_or_none()
        if job is not None:
            planned.choice, planned.options = self._decide(planned.spec, job)
            check_backend(planned.options.backend)

    def attempt(
        self, planned: PlannedGroup, step: Step | None = None, begin: float = 0.0
    ) -> Attempt:
        """Name an attempt to create a group, alone or at a step, and say who is waited for."""
        timeout, spec, title = planned.options.timeout, planned.spec, str(planned.spec.key)
        job = current_or_none()
        if job is None:
            return Attempt(title, spec.layout, spec.groups, planned.options, title, ENDLESS, None)
        grid, tries = self.agreement.join(job).name, self._tries[spec.key]
        if step is not None:  # no dim name holds a space, so that no key looks like this
            steps, deadline, name = step.steps, step.deadline, f"{grid}/{step.name}/{title}"
        else:
            steps, deadline = self.steps, begin + timeout.total_seconds() if timeout else math.inf
            within = [grid, self.shape, f"try {tries + 1}" if tries else "", title]
            name = "/".join(filter(None, within))
        look = steps.lookout(job, title, is_met=step is not None) if job.has_store else ENDLESS.look
        patience = Patience(look, deadline)
        given = planned.options, title, patience, job, step is not None
        return Attempt(name, spec.layout, spec.groups, *given)

    def file(self, planned: PlannedGroup) -> None:
        """File a plan whose group exists, unless the grid is destroyed by now."""
        with self.pool.lock:
            if self.is_destroyed or planned.is_filed:
                return
            if planned.key in self.created:  # by another thread, after this one's plan had failed
                self.created[planned.key].is_filed = False
            planned.is_filed = True
            self.created[planned.key] = planned
            self.planned.setdefault(planned.key, planned)

    def unfile(self, planned: PlannedGroup) -> None:
        """Forget that the group of a plan exists, but not the plan."""
        planned.is_filed = False
        self.created.pop(planned.key, None)
        if planned.attempt is None:  # at a step, all get other names
            self._tries[planned.key] += 1

    def forget(self, plans: Sequence[PlannedGroup]) -> None:
        """Take back what was planned, and was not created."""
        with self.pool.lock:
            for planned in plans:
                if self.planned.get(planned.key) is not planned or planned.is_filed:
                    continue
                del self.planned[planned.key]
                if planned.step is not None:
                    self.steps.give_back(planned.step)
                users = planned.pooled.users() if planned.pooled else ()
                if all(user in plans for user in users):  # else others wait, under its name
                    self.pool.leave(planned)

    def ensure(self, spec: GroupSpec) -> ProcessGroup | None:
        """Create a group on the first call, and return it afterwards, if it is the same."""
        while (first := self.planned.get(spec.key)) is None:
            try:
                return self.create(spec)
            except GroupExistsError:
                logger.debug("another thread creates %s", spec.key)
        first.check_same(spec)
        return first.create()

    def get(self, key: GroupKey) -> ProcessGroup | None:
        """Look up a group that was created."""
        if key not in self.created:
            raise GroupMissingError(key.says_missing(self.created))
        return self.created[key].group

    def adopt(self, dim: str, group: ProcessGroup | None) -> None:
        """File a group that somebody else owns."""
        options = GroupOptions(backend=None if group is None else c10d.backend_of(group))
        spec = specify(GroupKey((dim,)), None, self.layout, None, GroupOptions(), "never")
        planned = PlannedGroup(spec, options, _ADOPTED, self)
        self.take(planned, PooledGroup(planned, CreatedGroup(group, owned=False)))

    def take(self, planned: PlannedGroup, pooled: PooledGroup) -> None:
        """File a group that exists."""
        self.pool.join(planned, pooled)
        self.file(planned)

    def explain(self, planned: PlannedGroup) -> Explanation:
        """Say how a group was created, or would be."""
        return Explanation.of(planned, planned.pooled or self.pool.find(planned))

    # ---- the end --------------------------------------------------------------------------------

    def remove(self, key: GroupKey) -> None:
        """Destroy one group, unless it serves other keys too, of this grid or another."""
        self.get(key)  # refuses what was not created
        with self.pool.lock:
            self.check_steady()
            planned = self.created.pop(key)
            del self.planned[key]
            self._tries[key] += 1  # the next has another name
        self._end(self.pool.leave(planned))

    def _end(self, created: CreatedGroup | None) -> None:
        if created is not None:
            destroy([created])

    def end(self, way: Callable[[list[CreatedGroup]], None]) -> None:
        """Destroy or abort what was created here, the last one first; may be called twice."""
        own = self.release()
        if os.getpid() == self._process:
            way(own)

    def leave(self) -> None:
        """Remove what the grid has left in the store."""
        if os.getpid() == self._process:
            with contextlib.suppress(RuntimeError):  # the store is gone
                self.agreement.leave()

    def release(self) -> list[CreatedGroup]:
        """Forget all groups, and return those that no other grid has, the last one first."""
        with self.pool.lock:
            self.is_destroyed = True
            leaving = dict.fromkeys([*reversed(self.created.values()), *self.planned.values()])
            self.planned, self.created = {}, {}
            gone = [self.pool.leave(planned) for planned in leaving]
            return [item for item in gone if item is not None]

    def live(self) -> list[GroupKey]:
        """Return the keys of the groups that this owner must end."""
        if os.getpid() != self._process or c10d.is_other_world():
            return []
        return [
            key
            for key, planned in self.created.items()
            if not planned.is_adopted and planned.group and c10d.is_registered(planned.group)
        ]

    # ---- with the other ranks -------------------------------------------------------------------

    def verify(self, timeout: timedelta | None) -> None:
        """Compare all that is planned with the other ranks, and wait for them."""
        self.check_alive()
        with self.pool.lock:
            plan = [planned.describe() for planned in self.planned.values()]
        plan.insert(0 if self.is_verified else len(plan), "verify()")
        limit_s = limit_of(timeout)
        all_or_none(self.steps, plan, limit_s, "verify()", *NOTHING).get()

    # ---- what is refused ------------------------------------------------------------------------

    def check_steady(self) -> None:
        """Refuse what another thread's reshape would lose."""
        if self.is_reshaping:
            raise CreationError(
                "another thread reshapes this grid; wait until it is done, and use its new dims"
            )

    def check_alive(self) -> None:
        """Refuse what needs a grid that is not destroyed, and that this process has made."""
        if os.getpid() != self._process:
            raise ForkedError(
                f"this grid ({self.layout}) belongs to process {self._process}, of which this one "
                f"is a fork: its process groups do not work here; build what this process needs "
                f"after torch.distributed.init_process_group() of its own"
            )
        if self.is_destroyed:
            raise GridDestroyedError(f"this grid ({self.layout}) was destroyed; build a new one")

    def check_numbers(self, job: Job) -> None:
        """Refuse a job whose ranks have other numbers than those of the grid."""
        self.job = self.job or job
        if job is not self.job and job.numbers_in(self.job) is not None:
            raise CreationError(
                f"this grid ({self.layout}) has numbers of ranks from before WORLD was renewed; "
                f"call reshape(target, ranks=...) with those of the new one"
            )


# ---- several groups in one call -----------------------------------------------------------------


CALL = "create_pgs()"


@attrs.define(eq=False)
class Batch:
    """Groups of one grid that one call creates.

    Attributes:
        owner: Whose they are.
        specs: What is asked for.
        plans: What was planned for them.
        new: Those that the call has created, rather than found.
    """

    owner: GroupOwner
    specs: Sequence[GroupSpec]
    plans: list[PlannedGroup] = attrs.field(factory=list)
    new: list[PooledGroup] = attrs.field(factory=list)

    def plan(self) -> None:
        """Reserve the keys of the groups."""
        alike: Alike = {}
        try:
            with self.owner.pool.lock:
                for spec in self.specs:
                    self.plans.append(self.owner.reserve(spec, alike))
        except BaseException:
            self.forget()
            raise

    def words(self) -> list[str]:
        """Say what is planned, as all ranks must alike."""
        return [planned.describe() for planned in self.plans]

    def limit_s(self) -> float:
        """Return within how many seconds all of it must be created: the longest timeout."""
        return max(limit_of(planned.options.timeout) for planned in self.plans)

    def create(self, step: Step) -> list[ProcessGroup | None]:
        """Create the groups, in the order of the call."""
        if not self.plans:
            self.plan()
        owner = self.owner
        with owner.pool.lock:
            for planned in self.plans:
                planned.attempt = owner.attempt(planned, step)
            pooled = dict.fromkeys(one.pooled for one in self.plans if one.pooled is not None)
            self.new = [one for one in pooled if one.created is None]
        begin = time.monotonic()
        with together():
            return [owner.obtain(planned, begin).group for planned in self.plans]

    def take_back(self) -> None:
        """Destroy what was created, and forget all: it has failed, here or elsewhere."""
        namers = [one.namer for one in self.new if one.created is None]
        attempts = [namer.attempt for namer in namers if namer.attempt is not None]
        created = self._unfile()
        self.forget()
        with contextlib.suppress(RuntimeError):  # the store is gone
            give_up(attempts)
        destroy(reversed(created), BATCH_PATIENCE_S)

    def forget(self) -> None:
        """Give the keys back; those that are asked for again are planned anew."""
        self.owner.forget(self.plans)
        self.plans, self.new = [], []

    def _unfile(self) -> list[CreatedGroup]:
        """Take groups back that were created; plans that they served from before stay plans."""
        with self.owner.pool.lock:
            for pooled in list(self.new):
                if any(one.is_obtained for one in pooled.users() if one not in self.plans):
                    self.new.remove(pooled)  # another thread was given it meanwhile
            for planned in (*self.plans, *(one for new in self.new for one in new.users())):
                if planned.is_filed:
                    planned.owner.unfile(planned)
            created = [pooled.created for pooled in self.new if pooled.created is not None]
            for pooled in self.new:
                pooled.created = None
            return created


@contextlib.contextmanager
def only_call(owner: GroupOwner) -> Iterator[None]:
    """Let one thread at a time make a step of a grid, as ranks tell steps apart by their order.

    Raises:
        CreationError: Another thread makes one.
    """
    if not owner.calls.acquire(blocking=False):
        raise CreationError(
            "another thread calls create_pgs() of this grid; ranks tell such calls apart by "
            "their order, so let one thread make them, or use create_pg, which tells its calls "
            "apart by their keys"
        )
    try:
        yield
    finally:
        owner.calls.release()


def create_all(owner: GroupOwner, specs: Sequence[GroupSpec]) -> list[ProcessGroup | None]:
    """Create several groups in the order given, on all ranks of the grid or on none.

    Raises:
        CreationError: Another thread does so, or as for `GroupOwner.create`.
        GroupExistsError: A key is there twice, or was planned before.
        PlanMismatchError: Another rank creates something else, or failed.
        GroupCreationTimeout: A rank did not come in time.
    """
    check_once(specs)
    batch = Batch(owner, specs)
    if not specs:
        return []
    with only_call(owner):
        batch.plan()
        try:
            is_compared = owner.agreement.compares()
            entries = batch.words() if is_compared else [str(one.key) for one in specs]
            return all_or_none(
                owner.steps, entries, batch.limit_s(), CALL, batch.create, batch.take_back
            ).get()
        except BaseException:
            batch.forget()
            raise
