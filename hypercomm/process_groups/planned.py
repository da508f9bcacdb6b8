"""Groups that are planned, why they are created as they are, and the pool of those that exist."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Protocol
from weakref import WeakKeyDictionary, WeakSet, ref

import attrs
from torch.distributed import ProcessGroup

from hypercomm.errors import GroupOptionsError
from hypercomm.layout import RankGroups
from hypercomm.process_groups import world
from hypercomm.process_groups.agreement.meeting import as_entry
from hypercomm.process_groups.agreement.steps import Step
from hypercomm.process_groups.creation import CreatedGroup
from hypercomm.process_groups.options import GroupOptions
from hypercomm.process_groups.spec import GroupKey, GroupSpec, same_for_caller
from hypercomm.process_groups.strategies import Attempt, Choice, alternatives, split_turns
from hypercomm.process_groups.torch_internals.gloo import AttemptGivenUpError


class Owner(Protocol):
    """What plans groups, and creates and files them."""

    def obtain(self, planned: PlannedGroup, begin: float) -> CreatedGroup:
        """Take the group of a plan from the pool, or create it there."""
        ...

    def make(self, planned: PlannedGroup, begin: float) -> CreatedGroup:
        """Create the group of a plan."""
        ...

    def file(self, planned: PlannedGroup) -> None:
        """File a plan whose group exists."""
        ...

    def unfile(self, planned: PlannedGroup) -> None:
        """Forget that the group of a plan exists, but not the plan."""
        ...


@attrs.define(eq=False, repr=False)
class PlannedGroup:
    """A process group of the calling rank that a grid has planned; made by `grid.plan_pg`.

    Everything is checked by then, and nothing is created: `create` does that, once. What can be
    asked of a process group before it exists, `size` and `rank`, a plan answers.

    Attributes:
        spec: What was asked for.
        options: The options as filled in from the live world.
        choice: How it will be created, and why so.
        owner: What creates it.
        attempt: The one attempt to create it, where it is one of several at a step.
        step: That at which it was compared, if it was.
        pooled: The group that it has, perhaps together with other keys, or is to have.
        is_filed: Whether its grid has it: it was created, and not destroyed since.
        is_obtained: Whether a call for this very key was given it.
    """

    spec: GroupSpec
    options: GroupOptions
    choice: Choice
    owner: Owner
    attempt: Attempt | None = None
    step: Step | None = None
    pooled: PooledGroup | None = None
    is_filed: bool = False
    is_obtained: bool = False

    def create(self) -> ProcessGroup | None:
        """Create the group, at the first call, and return it; None where this rank has none.

        Every member of the group must call this (with creation "split" or "enumerate", every rank
        of the world), in the same order among the groups that they share.

        Raises:
            CreationError, GridDestroyedError: As for `HyperCommGrid.create_pg`.
        """
        begin = time.monotonic()  # all attempts together have to keep the timeout
        while True:
            try:
                return self.owner.obtain(self, begin).group
            except AttemptGivenUpError:
                continue  # under the next name

    @property
    def groups(self) -> RankGroups:
        """The groups that it is one of."""
        return self.spec.groups

    @property
    def key(self) -> GroupKey:
        """What it is filed under."""
        return self.spec.key

    @property
    def group(self) -> ProcessGroup | None:
        """The process group; None before it is created, and where this rank is in none."""
        created = None if self.pooled is None else self.pooled.created
        return None if created is None else created.group

    @property
    def is_adopted(self) -> bool:
        """Whether somebody else created the group, and owns it."""
        created = None if self.pooled is None else self.pooled.created
        return created is not None and not created.owned

    def has_member(self) -> bool:
        """Tell whether the calling rank is in one of the groups."""
        return self.groups.has_member(world.rank())

    def size(self) -> int:
        """Return the number of members."""
        return self.groups.group_size

    def rank(self) -> int:
        """Return the position of the calling rank among the members.

        Raises:
            RankOutsideError: It is none of them.
        """
        return self.groups.position_of(world.rank())

    def __repr__(self) -> str:
        return f"<{'created' if self.is_filed else 'planned'} group of {self.groups!r}>"

    # ---- what is compared -----------------------------------------------------------------------

    def describe(self) -> str:
        """Say what is planned in words that all ranks of the grid find alike."""
        spec, options, members = self.spec, self.options, ""
        if spec.derive is not None:  # else the dims tell all
            digest = hashlib.sha256(spec.groups.to_array().tobytes()).hexdigest()[:12]
            members = f" (members {digest})"
        return as_entry(
            f"{spec.key} over {spec.groups!r}{members}",
            {
                "backend": options.backend,
                "timeout": options.timeout,
                "pg_options": type(options.pg_options).__name__,
                "group_desc": repr(options.group_desc),
                "share": spec.share,
                "creation": self.choice.strategy,
                "lazy_init": options.lazy_init,
            },
        )

    def check_same(self, spec: GroupSpec) -> None:
        """Refuse what is not what was asked for when this was planned.

        Raises:
            GroupOptionsError: Options or groups differ.
        """
        key, has = spec.key.as_call(), self.spec
        if spec.given != has.given and self.is_adopted:
            raise GroupOptionsError(
                f"the process group over {key} is that of a DeviceMesh, and cannot be had with "
                f"{spec.given}; leave the options out, or use another name=..."
            )
        if spec.given != has.given:
            raise GroupOptionsError(
                f"the process group over {key} was created with {has.given}, and cannot be had "
                f"with {spec.given}; use the same options, or another name=..."
            )
        if not same_for_caller(spec.groups, has.groups):
            raise GroupOptionsError(
                f"the process group over {key} was created for {has.groups!r}, and cannot be had "
                f"for {spec.groups!r}; derive the same groups, or use another name=..."
            )

    def may_share(self, other: PlannedGroup) -> bool:
        """Tell whether one group can be the group of both, as both want it."""
        return self.spec.share == other.spec.share == "identical" and self.can_serve(other)

    def can_serve(self, other: PlannedGroup) -> bool:
        """Tell whether the group is what another plan needs: same ranks and options.

        Only the default description may differ. With "local" the caller's own group must match:
        all of its members see the same. With "split" and "enumerate" every rank takes part in a
        creation, so all groups must.
        """
        one, two, given, others = self.options, other.options, self.spec.given, other.spec.given
        if (
            (one.backend, one.timeout, one.lazy_init) != (two.backend, two.timeout, two.lazy_init)
            or given.pg_options is not others.pg_options
            or (given.group_desc, given.creation) != (others.group_desc, others.creation)
        ):
            return False
        if other.choice.strategy != "local":
            return self.groups == other.groups
        is_member = self.groups.has_member(world.rank())
        return is_member and same_for_caller(self.groups, other.groups)


_pooled: WeakSet[PooledGroup] = WeakSet()
"""All that exist: torch tells of a group the caller's ranks only, not those of its kind."""


@attrs.define(eq=False)
class PooledGroup:
    """A process group of the calling rank, and the keys that are to have it.

    Attributes:
        namer: The plan whose name is the group's; it stays so when its own creation fails.
        created: What came of it; None until it is created.
        lock: Held while it is created.
        plans: Those of the keys, which nothing here keeps alive.
    """

    namer: PlannedGroup
    created: CreatedGroup | None = None
    lock: threading.Lock = attrs.field(factory=lambda: threading.Lock())  # noqa: PLW0108 - looked up
    plans: list[ref[PlannedGroup]] = attrs.field(factory=list)

    def __attrs_post_init__(self) -> None:
        _pooled.add(self)

    def users(self) -> Iterator[PlannedGroup]:
        """List the plans of the keys that are to have it."""
        plans = [plan() for plan in self.plans]
        return (plan for plan in plans if plan is not None)

    def is_held(self) -> bool:
        """Tell whether some key has it."""
        return any(planned.is_filed for planned in self.users())


class Pool:
    """The process groups that the keys of one grid have, and those that they may share.

    Args:
        lender: The pool of the grid whose groups may serve keys of this one.

    Attributes:
        lock: Held while keys come and go, here and at the lender's.
    """

    def __init__(self, lender: Pool | None = None) -> None:
        self.lock: threading.RLock = threading.RLock() if lender is None else lender.lock
        self._lender = lender
        self._shared: WeakKeyDictionary[PooledGroup, None] = WeakKeyDictionary()  # plans keep them

    def find(self, planned: PlannedGroup) -> PooledGroup | None:
        """Return the group of another key that can be this one's, too, a lender's first."""
        if planned.spec.share != "identical":
            return None
        found = None if self._lender is None else self._lender.find(planned)
        if found is not None:
            return found
        for pooled in self._shared:
            others = (other for other in pooled.users() if other is not planned)
            if any(other.may_share(planned) for other in others):
                return pooled
        return None

    def join(self, planned: PlannedGroup, pooled: PooledGroup | None = None) -> PooledGroup:
        """Let a key have a group: the one given, else one that it can share, else a new one."""
        with self.lock:
            if planned.pooled is None:
                planned.pooled = pooled or self.find(planned) or PooledGroup(planned)
                planned.pooled.plans.append(ref(planned))
                if planned.spec.share == "identical":
                    self._shared[planned.pooled] = None
            return planned.pooled

    def leave(self, planned: PlannedGroup) -> CreatedGroup | None:
        """Take its group from a key; return what is to be destroyed, as no key has it any more."""
        with self.lock:
            pooled, planned.pooled, planned.is_filed = planned.pooled, None, False
            if pooled is None:
                return None
            users = [one for one in pooled.users() if one is not planned]
            pooled.plans = [ref(one) for one in users]
            if pooled.namer is planned and users:
                pooled.namer = users[0]
            return self.end(pooled)

    def end(self, pooled: PooledGroup) -> CreatedGroup | None:
        """Return what is to be destroyed of a group that no key has."""
        with self.lock:
            if pooled.is_held():
                return None
            created, pooled.created = pooled.created, None
            return created if created is not None and created.owned else None


# ---- why a group is created as it is ------------------------------------------------------------


@attrs.frozen(repr=False)
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

    @classmethod
    def of(cls, planned: PlannedGroup, pooled: PooledGroup | None) -> Explanation:
        """Explain a plan whose key has a group, or would have it."""
        (strategy, reason), backend = planned.choice, planned.options.backend
        others = {}
        if not planned.is_adopted:
            lazily = planned.spec.given.lazy_init
            others = alternatives(strategy, backend, planned.groups, lazily=lazily)
        turns = len(split_turns(planned.groups)) if strategy == "split" else 1
        if turns > 1:
            reason += f", in {turns} turns, because torch's colours of some groups are equal"
        first = None if pooled is None else pooled.namer
        served_by = None
        if first is not None and first is not planned:
            served_by = str(first.key) if first.owner is planned.owner else "another grid"
        return cls(planned.key, planned.groups, backend, strategy, reason, others, served_by)

    @property
    def _headline(self) -> str:
        backend = f", {self.backend}" if self.backend else ""
        return f"{self.key}: {len(self.groups)} of {self.groups.group_size} ranks{backend}"

    def __repr__(self) -> str:
        return f"<Explanation of {self._headline}: {self.strategy}>"

    def __str__(self) -> str:
        lines = [self._headline]
        if self.served_by is not None:
            lines.append(f"  served by the group over {self.served_by}: same ranks and options")
        lines.append(f"  {self.strategy}: {self.reason}")
        lines += [f"  not {name}: {reason}" for name, reason in self.alternatives.items()]
        return "\n".join(lines)
