"""GroupOwner: the process groups of one grid, by key: planned, created, shared, destroyed once."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import threading
import time
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Protocol

import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypercomm.errors import (
    CreationError,
    ForkedError,
    GridDestroyedError,
    GroupExistsError,
    GroupMissingError,
    GroupOptionsError,
)
from hypercomm.layout import RankGroups, RankLayout
from hypercomm.layout.views import Views
from hypercomm.process_groups import c10d
from hypercomm.process_groups.agreement import Agreement
from hypercomm.process_groups.assembly import Assembly, limit_of
from hypercomm.process_groups.c10d.gloo_store import ENDLESS, AttemptGivenUpError, Patience
from hypercomm.process_groups.c10d.time_limits import answer
from hypercomm.process_groups.creation import (
    BATCH_PATIENCE_S,
    abort,
    create,
    destroy,
    give_up,
    together,
)
from hypercomm.process_groups.group_plan import CreatedGroup, GroupPlan
from hypercomm.process_groups.keys import Explanation, GroupKey, GroupRequest, describe
from hypercomm.process_groups.options import GroupOptions, check_backend
from hypercomm.process_groups.planned import PlannedGroup, find_twin, same_for_caller
from hypercomm.process_groups.progress import Progress
from hypercomm.process_groups.strategies import Choice, alternatives, choose, split_turns

logger = logging.getLogger(__name__)

Alike = dict[tuple[object, ...], tuple[Choice, GroupOptions]]
"""What was decided for groups of one call, by what was asked for."""

_ADOPTED = Choice("adopted", "a DeviceMesh created it, and stays its owner")


class SharesWith(Protocol):
    """What knows the present owner of a grid's groups: the grid may get another one."""

    owner: GroupOwner


class GroupOwner:
    """Plans, creates, looks up and destroys the process groups of one grid.

    Args:
        layout: The grid's.
        creation: How groups are created: "auto", or the name of a strategy.
        share_with: What knows the owner of another grid, whose groups may serve this one's keys.
        agreement: What the ranks of the grid have told each other.
        is_verified: Whether each creation is compared with those of the other ranks.

    Attributes:
        layout: The grid's.
        created: What exists, by key, in the order of creation.
        planned: What is planned, by key; all that exists is.
        progress: What all ranks count alike.
    """

    def __init__(
        self,
        layout: RankLayout,
        creation: str,
        share_with: SharesWith | None,
        agreement: Agreement,
        is_verified: bool,
    ) -> None:
        self.created: dict[GroupKey, CreatedGroup] = {}
        self.planned: dict[GroupKey, PlannedGroup] = {}
        self.is_destroyed = False
        self.layout = layout
        self._agreement = agreement
        self._assembly = Assembly(agreement, layout)
        self.progress = Progress(agreement, is_verified)
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._creation = creation
        self._share_with = share_with
        self._batching = threading.Lock()
        self._is_reshaping = False
        self._told: set[str] = set()

    @property
    def is_verified(self) -> bool:
        """Whether each creation is compared with those of the other ranks."""
        return self.progress.is_verified

    # ---- one group ------------------------------------------------------------------------------

    def plan(
        self, request: GroupRequest, batch: str = "", alike: Alike | None = None
    ) -> PlannedGroup:
        """Check everything, and file what is to be created, alone or with others of a batch."""
        key = request.key
        self._check_steady()
        if key in self.planned:
            has, how = (
                ("created", f"get it with get_pg({key.as_call()}), create it once with ensure_pg")
                if key in self.created
                else ("planned", f"call create() of the plan, or ensure_pg({key.as_call()})")
            )
            raise GroupExistsError(
                f"the process group over {key.as_call()} has already been {has}; {how}, or create "
                f"another over the same dims under a name of its own, name=..."
            )
        planned = self.draft(request, batch, alike)
        is_live = c10d.is_live()
        if is_live and planned.resolved.backend != c10d.default_backend():
            check_backend(planned.resolved.backend)
        strategy, reason = planned.choice
        asked_for = request.given.creation or self._creation
        if strategy == "enumerate" and asked_for == "auto" and reason not in self._told:
            self._told.add(reason)
            logger.warning("creating groups by enumeration: %s", reason)
        if is_live:
            _ = self._agreement.name  # compares the grid while all ranks are at the same place
            if request.view is not None:
                self._agreement.compare_view(request.view)
        if self.progress.is_verified and not batch:
            self.progress.compare([describe(planned)])
        self.planned[key] = planned
        return planned

    def draft(
        self, request: GroupRequest, batch: str = "", alike: Alike | None = None
    ) -> PlannedGroup:
        """Check everything, and change nothing."""
        given, groups = request.given, self._groups(request)
        given.check()
        wish = (given.backend, given.timeout, given.lazy_init, given.creation)
        is_usual = given.pg_options is None and groups.is_sorted
        if alike is None or not is_usual or wish not in alike:
            choice, resolved = self._decide(given, groups, str(request.key))
        else:
            choice, resolved = alike[wish]
            resolved = resolved.described(given.group_desc or str(request.key))
        if alike is not None and is_usual:
            alike[wish] = choice, resolved
        make = partial(self._make, request, batch)
        planned = PlannedGroup(
            str(request.key),
            groups,
            request.derive,
            given,
            resolved,
            choice,
            request.share,
            None,
            make,
        )
        planned.twin = find_twin(planned, self._shareable())
        return planned

    def _decide(
        self, given: GroupOptions, groups: RankGroups, group_desc: str
    ) -> tuple[Choice, GroupOptions]:
        """Choose how groups are created, and with what."""
        is_live = c10d.is_live()
        choice = choose(
            given.creation or self._creation,
            given.backend,
            groups,
            lazily=given.lazy_init,
            by_all=is_live and self.layout.size == dist.get_world_size(),
        )
        return choice, given.resolve(group_desc) if is_live else given

    def create(self, request: GroupRequest) -> ProcessGroup | None:
        """Plan and create a group, or leave everything as it was."""
        begin, key = time.monotonic(), request.key
        while True:
            with self._lock:
                planned = self.plan(request)
            try:
                group = planned.attempt(begin).group
            except BaseException as error:
                with self._lock:
                    if self.planned.get(key) is planned and planned.created is None:
                        del self.planned[key]
                    self.progress.uncount(1, error)
                if not isinstance(error, AttemptGivenUpError):
                    raise
            else:
                self._agreement.retract()
                return group

    def ensure(self, request: GroupRequest) -> ProcessGroup | None:
        """Create a group on the first call, and return it afterwards, if it is the same."""
        key, given = request.key, request.given
        while (first := self.planned.get(key)) is None:
            try:
                return self.create(request)
            except GroupExistsError:
                logger.debug("another thread creates %s", key)
        groups = self._groups(request)
        if given != first.given and first.is_adopted:
            raise GroupOptionsError(
                f"the process group over {key.as_call()} is that of a DeviceMesh, and cannot be "
                f"had with {given}; leave the options out, or use another name=..."
            )
        if given != first.given:
            raise GroupOptionsError(
                f"the process group over {key.as_call()} was created with {first.given}, and "
                f"cannot be had with {given}; use the same options, or another name=..."
            )
        if not same_for_caller(groups, first.groups):
            raise GroupOptionsError(
                f"the process group over {key.as_call()} was created for {first.groups!r}, and "
                f"cannot be had for {groups!r}; derive the same groups, or use another name=..."
            )
        return first.create()

    def get(self, key: GroupKey) -> ProcessGroup | None:
        """Look up a group that was created."""
        if key not in self.created:
            exist = ", ".join(map(str, self.created)) or "none yet"
            raise GroupMissingError(
                f"the process group over {key.as_call()} has not been created; call "
                f"create_pg({key.as_call()}) first, on every rank of the grid; created so far: "
                f"{exist}"
            )
        return self.created[key].group

    def adopt(self, dim: str, group: ProcessGroup | None) -> None:
        """File a group that somebody else owns."""
        options = GroupOptions(backend=None if group is None else c10d.backend_of(group))
        created = CreatedGroup(group, owned=False)
        key, groups = GroupKey((dim,)), self.layout.groups(dim)
        self.planned[key] = PlannedGroup(
            str(key),
            groups,
            None,
            GroupOptions(),
            options,
            _ADOPTED,
            "never",
            None,
            lambda *_: created,
            created,
        )
        self.created[key] = created

    # ---- several groups -------------------------------------------------------------------------

    def create_all(self, requests: Sequence[GroupRequest]) -> list[ProcessGroup | None]:
        """Create several groups in the order given, all or none."""
        if not self._batching.acquire(blocking=False):
            raise CreationError(
                "another thread calls create_pgs() of this grid; ranks tell such calls apart by "
                "their order, so let one thread make them, or use create_pg, which tells its calls "
                "apart by their keys"
            )
        try:
            while True:
                try:
                    groups = self._create_batch(requests, self.progress.batch)
                except BaseException as error:
                    self.progress.end_batch(failed=True)
                    if not isinstance(error, AttemptGivenUpError):  # this rank came too late
                        raise
                else:
                    self.progress.end_batch(failed=False)
                    self._agreement.retract()
                    return groups
        finally:
            self._batching.release()

    def _create_batch(
        self, requests: Sequence[GroupRequest], batch: str
    ) -> list[ProcessGroup | None]:
        keys = [request.key for request in requests]
        for position, key in enumerate(keys):
            if key in keys[:position]:
                raise GroupExistsError(
                    f"{key.as_call()} is asked for twice in one call, at positions "
                    f"{keys.index(key)} and {position}; leave one out, or give it a name of its "
                    f"own, name=..."
                )
        alike: Alike = {}
        mine: list[PlannedGroup] = []
        plans: list[tuple[PlannedGroup, GroupPlan]] = []
        counted = 0
        waiting = [planned for planned in self._shareable() if planned.created is None]
        try:
            with self._lock:
                for request in requests:
                    mine.append(self.plan(request, batch, alike))  # noqa: PERF401 - the others are kept
                words: Iterator[str] = map(describe, mine)
                if any(planned.derive is not None for planned in mine):
                    words = iter(list(words))  # reads the groups, and what is wrong with them
                self.progress.compare(words)
                counted = len(mine)
            if c10d.has_store():  # else there is nobody to tell that this rank gives up
                plans = [
                    (planned, self._group_plan(request, batch, planned))
                    for request, planned in zip(requests, mine, strict=True)
                ]
            begin = time.monotonic()
            with together():
                return [planned.attempt(begin).group for planned in mine]
        except BaseException as error:
            tried = [planned for planned in (*waiting, *mine) if planned.twin is None]
            created = [planned.created for planned in tried if planned.created is not None]
            with self._lock:
                for planned in waiting:
                    self._uncreate(planned)  # planned before, it served one of these
                for key in keys[: len(mine)]:
                    self.planned.pop(key, None)
                    self.created.pop(key, None)
                self.progress.uncount(counted, error)
            with contextlib.suppress(RuntimeError):  # the store is gone
                give_up(
                    plan
                    for planned, plan in plans
                    if planned.created is None and planned.twin is None
                )
            destroy(dict.fromkeys(reversed(created)), BATCH_PATIENCE_S)
            raise

    def _uncreate(self, planned: PlannedGroup) -> None:
        """Forget that a group was created, but not that it was planned."""
        if planned.created is None:
            return
        for key, own in self.planned.items():
            if own is planned:
                planned.created = None
                del self.created[key]
                self.progress.next_name(key)  # a retry gets another name
        if self._share_with is not None:
            self._share_with.owner._uncreate(planned)

    def remove(self, key: GroupKey) -> None:
        """Destroy one group, unless it serves other keys too, of this grid or another."""
        self.get(key)  # refuses what was not created
        with self._lock:
            self._check_steady()
            created = self.created.pop(key)
            planned = self.planned.pop(key, None)
            self.progress.next_name(key)  # the next has another name
            heirs = [one for one in self.planned.values() if one.twin is planned]
            heirs.sort(key=lambda one: one.created is None)
            for one in heirs:  # the first that exists serves the rest now
                one.twin = None if one is heirs[0] else heirs[0]
        if planned is not None:
            planned.created, planned.is_void = None, True
        if created.owned and not created.is_held():
            destroy([created])

    def destroy(self) -> None:
        """Destroy what was created here, the last one first; may be called twice."""
        own = self.release()
        if os.getpid() == self._process:
            destroy(own)

    def abort(self) -> None:
        """Abort what was created here, the last one first; waits for nobody."""
        own = self.release()
        if os.getpid() == self._process:
            abort(own)

    def release(self) -> list[CreatedGroup]:
        """Forget all groups, and return those that no other grid has, the last one first."""
        with self._lock:
            self.is_destroyed = True
            every = dict.fromkeys(reversed(self.created.values()))  # shared ones once
            for planned in self.planned.values():
                planned.is_void = True
            self.planned, self.created = {}, {}
            return [item for item in every if item.owned and not item.is_held()]

    def live(self) -> list[GroupKey]:
        """Return the keys of the groups that exist and that this owner must end."""
        if os.getpid() != self._process or c10d.is_other_world():
            return []
        return [
            key
            for key, item in self.created.items()
            if item.owned and item.group is not None and c10d.is_registered(item.group)
        ]

    def verify(self, timeout: timedelta | None) -> None:
        """Compare all that is planned with the other ranks, and wait for them."""
        self.check_alive()
        with self._lock:
            plan = [describe(planned) for planned in self.planned.values()]
        self.meet(plan, timeout, "verify()")

    def meet(self, plan: Sequence[str], timeout: timedelta | None, call: str) -> None:
        """Compare a plan with the other ranks, and wait for them."""
        if self.progress.is_verified and self.layout.size > 1:
            with self._lock:
                self.progress.compare([call])
        if self._is_alone():
            return
        limit_s = limit_of(timeout)
        try:
            answer(lambda: self._assembly.meet(plan, limit_s, call), limit_s + 1)
        except BaseException as error:
            self.progress.uncount(1, error)
            if self.progress.is_verified:
                self.progress.withdraw()
            raise
        self._agreement.retract()

    def decline(self, words: str) -> None:
        """Keep the other ranks from waiting in `meet` for this one, which cannot come."""
        if not self._is_alone():
            told = answer(lambda: self._assembly.decline(f"rank {dist.get_rank()} {words}"))
            if told:
                self.progress.mismatch()  # as on those that come

    def _is_alone(self) -> bool:
        alone = self.layout.size < 2 or not c10d.has_store()
        return alone or dist.get_rank() not in self.layout

    @contextlib.contextmanager
    def reshaping(self) -> Iterator[None]:
        """Let nothing be planned or destroyed for the length of a `with` block.

        Raises:
            CreationError: Another thread reshapes the grid.
        """
        with self._lock:
            self._check_steady()
            self._is_reshaping = True
        try:
            yield
        finally:
            self._is_reshaping = False

    def check_settled(self) -> None:
        """Refuse a reshape while something is planned that was not created.

        Raises:
            CreationError: Names it.
        """
        waiting = [str(key) for key in self.planned if key not in self.created]
        if waiting:
            raise CreationError(
                f"the process groups over {', '.join(waiting)} are planned, and a reshape would "
                f"void their plans; call create() of each, then reshape()"
            )

    def _check_steady(self) -> None:
        if self._is_reshaping:
            raise CreationError(
                "another thread reshapes this grid; wait until it is done, and use its new dims"
            )

    # ---- another owner's groups -----------------------------------------------------------------

    def successor(self, layout: RankLayout, agreement: Agreement) -> GroupOwner:
        """Return an owner like this one, without groups, for another layout; nothing is compared.

        Ranks that keep different groups create different ones until both are settled.
        """
        return GroupOwner(layout, self._creation, self._share_with, agreement, False)

    def requests(self, views: Views) -> Iterator[GroupRequest]:
        """Ask for all that was created, of other views and their base; what has no dims is left."""
        for key, planned in self.planned.items():
            view = None if key.view is None else views[key.view]
            layout = views.base if view is None else view.layout
            if set(key.dims) <= set(layout.dim_names):
                found, dims = views.find(key.dims, key.view)
                new = GroupKey(dims, key.name, None if found is None else found.name)
                yield GroupRequest(new, view, planned.given, planned.share, planned.derive)

    def file(self, key: GroupKey, planned: PlannedGroup, created: CreatedGroup) -> None:
        """File a group that another owner has created, which hands it over."""
        planned.twin = next((one for one in self._shareable() if one.created is created), None)
        planned.created = created
        self.planned[key] = planned
        self._hold(key, created)

    def _hold(self, key: GroupKey, created: CreatedGroup) -> None:
        self.created[key] = created
        created.hold(self)

    def settle(self, keys: Sequence[GroupKey], is_verified: bool) -> None:
        """Bring what is filed into an order that all ranks have alike, and compare from now on."""
        self.progress.is_verified = is_verified
        self.planned = {key: self.planned[key] for key in keys}
        self.created = {key: self.created[key] for key in keys}

    def tell(self, words: str) -> None:
        """Leave word for the ranks that wait for this one."""
        if c10d.has_store():
            who = f"rank {dist.get_rank()}"
            answer(lambda: self._agreement.tell(f"word of {who}", f"{who} {words}"))

    # ---- what a caller should know --------------------------------------------------------------

    def explain(self, request: GroupRequest) -> Explanation:
        """Say how a group was created, or would be."""
        planned = self.planned.get(request.key) or self.draft(request)
        strategy, reason = planned.choice
        backend = planned.resolved.backend
        others = {}
        if not planned.is_adopted:
            lazily = planned.given.lazy_init
            others = alternatives(strategy, backend, planned.groups, lazily=lazily)
        turns = len(split_turns(planned.groups)) if strategy == "split" else 1
        if turns > 1:
            reason += f", in {turns} turns, because torch's colours of some groups are equal"
        served_by = None
        if planned.twin is not None:
            keys = [str(key) for key, other in self.planned.items() if other is planned.twin]
            served_by = keys[0] if keys else "another grid"
        return Explanation(
            request.key, planned.groups, backend, strategy, reason, others, served_by
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

    # ---- how a group is made --------------------------------------------------------------------

    def _layout_of(self, request: GroupRequest) -> RankLayout:
        """The layout whose dims the key of a request names."""
        shared = request.key.view is None
        return self.layout if shared or request.view is None else request.view.layout

    def _groups(self, request: GroupRequest) -> RankGroups:
        """The groups that a request is about."""
        key, derive = request.key, request.derive
        groups = self._layout_of(request).groups(*key.dims)
        if derive is None:
            return groups
        if not callable(derive):
            raise GroupOptionsError(f"derive must be a function of RankGroups, got {derive!r}")
        if key.name is None:
            raise GroupOptionsError(
                f"derive= makes other groups than those over {key.as_call()}; file them under a "
                f"name of their own, name=..."
            )
        derived = derive(groups)
        if not isinstance(derived, RankGroups):
            raise GroupOptionsError(f"derive must return RankGroups, but it returned {derived!r}")
        return derived

    def _make(
        self, request: GroupRequest, batch: str, planned: PlannedGroup, begin: float
    ) -> CreatedGroup:
        self.check_alive()
        key = request.key
        if planned.resolved is planned.given and c10d.is_live():  # planned before there was a job
            decided = self._decide(planned.given, planned.groups, str(key))
            check_backend(decided[1].backend)
            planned.choice, planned.resolved = decided
        if planned.twin is not None and planned.twin.is_gone:
            planned.twin = None
        if planned.twin is not None:
            created = planned.twin.attempt(begin)
        else:
            plan = self._group_plan(request, batch, planned, begin)
            try:
                created = create(plan, planned.choice.strategy)
            except BaseException:
                if not batch:
                    self.progress.next_name(key)
                raise
        with self._lock:
            if not self.is_destroyed:
                self._hold(key, created)
                self.planned.setdefault(key, planned)  # another thread's attempt may have failed
                return created
        if planned.twin is None:
            destroy([created])
        self.check_alive()
        return created

    def _group_plan(
        self, request: GroupRequest, batch: str, planned: PlannedGroup, begin: float = 0.0
    ) -> GroupPlan:
        timeout = planned.resolved.timeout
        alone = timeout is not None and not batch  # in a batch, each group has its time
        deadline = begin + timeout.total_seconds() if timeout and alone else math.inf
        look = self._agreement.look if c10d.has_store() else ENDLESS.look
        return GroupPlan(
            self.progress.name_of(request.key, batch),
            self._layout_of(request),
            planned.groups,
            planned.resolved,
            str(request.key),
            Patience(look, deadline),
        )

    def _shareable(self) -> Iterator[PlannedGroup]:
        """What may serve a second key: the other grid's groups, then this one's."""
        if self._share_with is not None:
            yield from self._share_with.owner._shareable()
        yield from self.planned.values()
