"""Groups that are planned: checked in full, and created, or served by another's, when asked for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable

import attrs
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypercomm.layout import RankGroups
from hypercomm.process_groups import world
from hypercomm.process_groups.c10d.gloo_store import AttemptGivenUpError
from hypercomm.process_groups.group_plan import CreatedGroup
from hypercomm.process_groups.options import GroupOptions
from hypercomm.process_groups.strategies import Choice


@attrs.define(eq=False, repr=False)
class PlannedGroup:
    """A process group of the calling rank that a grid has planned; made by `grid.plan_pg`.

    Everything is checked by then, and nothing is created: `create` does that, once. What can be
    asked of a process group before it exists, `size` and `rank`, a plan answers.

    Attributes:
        title: The dims, and the name if it has one.
        groups: The groups that it is one of.
        derive: What made them of those over the dims, if anything did.
        given: The options as given.
        resolved: The options as filled in from the live world.
        choice: How it will be created, and why so.
        share: Whether it may serve other keys.
        twin: The planned group that serves this key, if another's does.
        created: What came of it; None until it is created.
        is_void: Whether its grid does not have it any more.
    """

    title: str
    groups: RankGroups
    derive: Callable[[RankGroups], RankGroups] | None
    given: GroupOptions
    resolved: GroupOptions
    choice: Choice
    share: str
    twin: PlannedGroup | None
    make: Callable[[PlannedGroup, float], CreatedGroup]
    created: CreatedGroup | None = None
    is_void: bool = False
    _lock: threading.Lock = attrs.field(factory=threading.Lock, init=False)

    def create(self) -> ProcessGroup | None:
        """Create the group, at the first call, and return it; None where this rank has none.

        Every member of the group must call this (with creation "split" or "enumerate", every rank
        of the world), in the same order among the groups that they share.

        Raises:
            CreationError, GridDestroyedError: As for `HyperCommGrid.create_pg`.
        """
        begin = time.monotonic()
        while True:
            try:
                return self.attempt(begin).group
            except AttemptGivenUpError:
                continue  # under the next name

    def attempt(self, begin: float) -> CreatedGroup:
        """Do what `create` does, once, and return all that came of it.

        Args:
            begin: When the first attempt began: all of them have to keep the timeout.

        Raises:
            AttemptGivenUpError: The other members had given up; try again.
        """
        with self._lock:
            if self.created is None:
                self.created = self.make(self, begin)
            return self.created

    @property
    def is_adopted(self) -> bool:
        """Whether somebody else created the group, and owns it."""
        return self.created is not None and not self.created.owned

    @property
    def is_gone(self) -> bool:
        """Whether its grid has destroyed it since it was planned, and no other one has it."""
        return self.is_void and not (self.created is not None and self.created.is_held())

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
        state = "planned" if self.created is None else "created"
        return f"<{state} group of {self.groups!r}>"


def find_twin(planned: PlannedGroup, candidates: Iterable[PlannedGroup]) -> PlannedGroup | None:
    """Find the first candidate that is to be shared, with the same ranks and options."""
    if planned.share != "identical":
        return None
    for candidate in candidates:
        if candidate.share == "identical" and can_serve(candidate, planned):
            return candidate
    return None


def can_serve(one: PlannedGroup, other: PlannedGroup) -> bool:
    """Tell whether the group of one plan is what the other needs: same ranks and options."""
    return _same_options(one, other) and _same_ranks(
        one.groups, other.groups, other.choice.strategy
    )


def _same_options(one: PlannedGroup, other: PlannedGroup) -> bool:
    """Only the default description may differ."""
    return (
        one.resolved.backend == other.resolved.backend
        and one.resolved.timeout == other.resolved.timeout
        and one.resolved.lazy_init == other.resolved.lazy_init
        and one.given.pg_options is other.given.pg_options
        and one.given.group_desc == other.given.group_desc
        and one.given.creation == other.given.creation
    )


def _same_ranks(one: RankGroups, other: RankGroups, strategy: str) -> bool:
    """Where a rank creates only its own group, that one counts: all of its members see the same.

    Where every rank takes part in a creation, those outside must decide alike: all groups count.
    """
    if strategy != "local":
        return one == other
    return one.has_member(dist.get_rank()) and same_for_caller(one, other)


def same_for_caller(one: RankGroups, other: RankGroups) -> bool:
    """Tell whether the calling rank is in the same group of both, or in none of either."""
    if one == other:
        return True
    rank = world.rank()
    if not (one.has_member(rank) and other.has_member(rank)):
        return one.has_member(rank) == other.has_member(rank)
    return one.group_size == other.group_size and one.of(rank) == other.of(rank)
