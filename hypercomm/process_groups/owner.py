"""GroupOwner: the process groups of one grid, by key: planned, created, shared, destroyed once."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial

import attrs
from torch.distributed import ProcessGroup

from hypercomm.errors import (
    CreationError,
    ForkedError,
    GridDestroyedError,
    GroupExistsError,
    GroupMissingError,
    GroupOptionsError,
    PlanMismatchError,
)
from hypercomm.layout import RankGroups, RankLayout
from hypercomm.process_groups import c10d
from hypercomm.process_groups.agreement import Agreement
from hypercomm.process_groups.answers import answer
from hypercomm.process_groups.creation import (
    BATCH_PATIENCE_S,
    abort,
    create,
    destroy,
    give_up,
    together,
)
from hypercomm.process_groups.group_plan import CreatedGroup, GroupPlan
from hypercomm.process_groups.meeting import ENDLESS, AttemptGivenUpError, Patience
from hypercomm.process_groups.options import GroupOptions
from hypercomm.process_groups.planned import PlannedGroup, find_twin, same_for_caller
from hypercomm.process_groups.strategies import Choice, alternatives, choose, split_turns

Derive = Callable[[RankGroups], RankGroups]

logger = logging.getLogger(__name__)

_ADOPTED = Choice("adopted", "a DeviceMesh created it, and stays its owner")


@attrs.frozen
class GroupKey:
    """What a process group is filed under: the dims in layout order, and a name of its own."""

    dims: tuple[str, ...]
    name: str | None = None

    def __str__(self) -> str:
        return "+".join(self.dims) + (f" ({self.name})" if self.name else "")

    def as_call(self) -> str:
        """Return the key as one writes it in a call: "'tp'", "['cp', 'dp'], name='twin'"."""
        dims = repr(self.dims[0]) if len(self.dims) == 1 else repr(list(self.dims))
        return dims + (f", name={self.name!r}" if self.name else "")


@attrs.frozen
class GroupRequest:
    """What one call asks for."""

    key: GroupKey
    given: GroupOptions
    share: str
    derive: Derive | None


@attrs.frozen
class Explanation:
    """How a process group was created, or would be, and why; str() says it in lines of text.

    Attributes:
        key: The dims and the name.
        groups: All the groups over them.
        backend: Their backend; None before torch.distributed is initialised.
        strategy: "local", "split" or "enumerate"; "adopted" where a DeviceMesh made the group.
        reason: Why this strategy.
        alternatives: What speaks against each other strategy, by its name.
        served_by: The key whose group serves this one too, under `share="identical"`.
    """

    key: GroupKey
    groups: RankGroups
    backend: str | None
    strategy: str
    reason: str
    alternatives: Mapping[str, str]
    served_by: str | None

    def __str__(self) -> str:
        backend = f", {self.backend}" if self.backend else ""
        lines = [f"{self.key}: {len(self.groups)} of {self.groups.group_size} ranks{backend}"]
        if self.served_by is not None:
            lines.append(f"  served by the group over {self.served_by}: same ranks and options")
        lines.append(f"  {self.strategy}: {self.reason}")
        lines += [f"  not {name}: {reason}" for name, reason in self.alternatives.items()]
        return "\n".join(lines)


class GroupOwner:
    """Plans, creates, looks up and destroys the process groups of one grid.

    Args:
        layout: The grid's.
        creation: How groups are created: "auto", or the name of a strategy.
        share_with: The owner of another grid, whose groups may serve this one's keys.
        agreement: What the ranks of the grid have told each other.
        is_verified: Whether each creation is compared with those of the other ranks.

    Attributes:
        created: What exists, by key, in the order of creation.
        planned: What is planned, by key; all that exists is.
    """

    def __init__(
        self,
        layout: RankLayout,
        creation: str,
        share_with: GroupOwner | None,
        agreement: Agreement,
        is_verified: bool,
    ) -> None:
        self.created: dict[GroupKey, CreatedGroup] = {}
        self.planned: dict[GroupKey, PlannedGroup] = {}
        self.is_destroyed = False
        self._layout = layout
        self._agreement = agreement
        self._is_verified = is_verified
        self._lock = threading.RLock()
        self._process = os.getpid()
        self._creation = creation
        self._share_with = share_with
        self._failures: dict[GroupKey, int] = {}
        self._batch = 1
        self._batch_failures = 0
        self._batching = threading.Lock()
        self._position = 0
        self._mismatches: Counter[str] = Counter()

    # ---- one group ------------------------------------------------------------------------------

    def plan(self, request: GroupRequest, batch: str = "") -> PlannedGroup:
        """Check everything, and file what is to be created, alone or with others of a batch."""
        key = request.key
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
        planned = self._draft(request, batch)
        if planned.choice.strategy == "enumerate" and self._creation == "auto":
            logger.warning("creating groups by enumeration: %s", planned.choice.reason)
        if c10d.is_live():
            _ = self._agreement.name  # compares the grid while all ranks are at the same place
        if self._is_verified and not batch:
            self._compare([_describe(planned)])
        self.planned[key] = planned
        return planned

    def _draft(self, request: GroupRequest, batch: str = "") -> PlannedGroup:
        """Check everything, and change nothing."""
        given, groups = request.given, self._groups(request)
        given.check()
        choice = choose(self._creation, given.backend)
        resolved = given.resolve(group_desc=str(request.key)) if c10d.is_live() else given
        make = partial(self._make, request.key, batch)
        planned = PlannedGroup(
            str(request.key),
            groups,
            request.derive is not None,
            given,
            resolved,
            choice,
            request.share,
            None,
            make,
        )
        planned.twin = find_twin(planned, self._shareable())
        return planned

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
                    self._uncount(1, error)
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
        if given != first.given and first.choice is _ADOPTED:
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
        key, groups = GroupKey((dim,)), self._layout.groups(dim)
        self.planned[key] = PlannedGroup(
            str(key),
            groups,
            False,
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
                "their order, so let one thread make them, or use create_pg, which has no order"
            )
        try:
            while True:
                try:
                    groups = self._create_batch(requests, self._batch_name)
                except BaseException as error:
                    self._batch_failures += 1
                    if not isinstance(error, AttemptGivenUpError):  # this rank came too late
                        raise
                else:
                    self._batch, self._batch_failures = self._batch + 1, 0
                    self._agreement.retract()
                    return groups
        finally:
            self._batching.release()

    @property
    def _batch_name(self) -> str:
        """What all ranks know the next batch by: only one that has succeeded is counted."""
        failures = self._batch_failures
        return f"batch {self._batch}" + (f" try {failures + 1}" if failures else "")

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
        mine: list[PlannedGroup] = []
        plans: list[tuple[PlannedGroup, GroupPlan]] = []
        counted = 0
        waiting = [planned for planned in self._shareable() if planned.created is None]
        try:
            with self._lock:
                for request in requests:
                    mine.append(self.plan(request, batch))  # noqa: PERF401 - the others are kept
                self._compare([_describe(planned) for planned in mine])
                counted = len(mine)
            if c10d.is_live():
                plans = [
                    (planned, self._group_plan(key, batch, planned))
                    for key, planned in zip(keys, mine, strict=True)
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
                self._uncount(counted, error)
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
                self._failures[key] = self._failures.get(key, 0) + 1  # a retry gets another name
        if self._share_with is not None:
            self._share_with._uncreate(planned)

    def destroy(self) -> None:
        """Destroy what was created here, the last one first; may be called twice."""
        own = self._release()
        if os.getpid() == self._process:
            destroy(own)

    def abort(self) -> None:
        """Abort what was created here, the last one first; waits for nobody."""
        own = self._release()
        if os.getpid() == self._process:
            abort(own)

    def _release(self) -> list[CreatedGroup]:
        """Forget all groups, and return those that this owner must end, the last one first."""
        with self._lock:
            self.is_destroyed = True
            every = list(self.created.values())
            self.planned, self.created = {}, {}
            foreign = {planned.created for planned in self._shareable()}
            own = dict.fromkeys(reversed(every))  # shared ones once
            return [item for item in own if item.owned and item not in foreign]

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
        if self._layout.size > 1 and c10d.has_store():
            with self._lock:
                if self._is_verified:
                    self._compare(["verify()"])
                plan = [_describe(planned) for planned in self.planned.values()]
            timeout = timeout or c10d.world_timeout(c10d.default_backend())
            limit_s = timeout.total_seconds() if timeout else math.inf
            try:
                answer(lambda: self._agreement.meet(plan, limit_s), limit_s + 1)
            except BaseException as error:
                self._uncount(1, error)
                raise
            self._agreement.retract()

    # ---- what a caller should know --------------------------------------------------------------

    def explain(self, request: GroupRequest) -> Explanation:
        """Say how a group was created, or would be."""
        planned = self.planned.get(request.key) or self._draft(request)
        strategy, reason = planned.choice
        backend = planned.resolved.backend
        others = {} if planned.choice is _ADOPTED else alternatives(strategy, backend)
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
                f"this grid ({self._layout}) belongs to process {self._process}, of which this one "
                f"is a fork: its process groups do not work here; build what this process needs "
                f"after torch.distributed.init_process_group() of its own"
            )
        if self.is_destroyed:
            raise GridDestroyedError(f"this grid ({self._layout}) was destroyed; build a new one")

    # ---- how a group is made --------------------------------------------------------------------

    def _groups(self, request: GroupRequest) -> RankGroups:
        """The groups that a request is about."""
        key, derive = request.key, request.derive
        groups = self._layout.groups(*key.dims)
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

    def _make(self, key: GroupKey, batch: str, planned: PlannedGroup, begin: float) -> CreatedGroup:
        self.check_alive()
        if planned.twin is not None:
            created = planned.twin.attempt(begin)
        else:
            plan = self._group_plan(key, batch, planned, begin)
            try:
                created = create(plan, planned.choice.strategy)
            except BaseException:
                if not batch:
                    self._failures[key] = self._failures.get(key, 0) + 1
                raise
        with self._lock:
            if not self.is_destroyed:
                self.created[key] = created
                self.planned.setdefault(key, planned)  # another thread's attempt may have failed
                return created
        if planned.twin is None:
            destroy([created])
        self.check_alive()
        return created

    def _group_plan(
        self, key: GroupKey, batch: str, planned: PlannedGroup, begin: float = 0.0
    ) -> GroupPlan:
        timeout = planned.resolved.timeout
        alone = timeout is not None and not batch  # in a batch, each group has its time
        deadline = begin + timeout.total_seconds() if timeout and alone else math.inf
        look = self._agreement.look if c10d.has_store() else ENDLESS.look
        return GroupPlan(
            self._plan_name(key, batch),
            self._layout,
            planned.groups,
            planned.resolved,
            str(key),
            Patience(look, deadline),
        )

    # ---- what the ranks compare -----------------------------------------------------------------

    def _compare(self, entries: Sequence[str]) -> None:
        """Compare what this call is about to create with what other ranks create."""
        if not c10d.has_store():
            return
        place, tries = self._place, self._mismatches[self._place]
        name = f"{place} try {tries + 1}" if tries else place
        try:
            self._agreement.compare(name, entries, self._position if self._is_verified else 0)
        except PlanMismatchError:
            self._mismatches[place] += 1
            raise
        self._position += len(entries)

    @property
    def _place(self) -> str:
        return f"plan {self._position}" if self._is_verified else f"batch {self._batch}"

    def _uncount(self, entries: int, error: BaseException) -> None:
        """Take back that some entries were counted: a call that fails is made again."""
        if self._is_verified:
            self._position -= entries
        if entries and isinstance(error, PlanMismatchError):  # another rank's: it left word
            self._mismatches[self._place] += 1

    def _plan_name(self, key: GroupKey, batch: str) -> str:
        """The name that all ranks know the groups of a key by.

        A creation that failed is tried again under another name, because the store still holds
        what the failed one left: batches and groups count their failures.
        """
        if not c10d.is_live():
            return str(key)
        if batch:  # no dim name holds a space, so that no key looks like this
            return f"{self._agreement.name}/{batch}/{key}"
        failures, name = self._failures.get(key, 0), self._agreement.name
        return f"{name}/try {failures + 1}/{key}" if failures else f"{name}/{key}"

    def _shareable(self) -> Iterator[PlannedGroup]:
        """What may serve a second key: the other grid's groups, then this one's."""
        if self._share_with is not None:
            yield from self._share_with._shareable()
        yield from self.planned.values()


def _describe(planned: PlannedGroup) -> str:
    """A planned group in words that all ranks of the grid find alike."""
    options, members = planned.resolved, ""
    if planned.is_derived:  # else the dims tell all
        digest = hashlib.sha256(planned.groups.to_array().tobytes()).hexdigest()[:12]
        members = f" (members {digest})"
    return (
        f"{planned.title} over {planned.groups!r}{members}: {planned.choice.strategy}, "
        f"{options.backend}, timeout {options.timeout}, description {options.group_desc!r}, "
        f"lazy_init {options.lazy_init}, options {type(options.pg_options).__name__}, "
        f"share {planned.share!r}"
    )
