"""What to create, as the calling rank knows it, and what came of it."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol
from weakref import ref

import attrs
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypercomm.errors import RankOutsideError
from hypercomm.layout import RankGroups, RankLayout
from hypercomm.process_groups import c10d
from hypercomm.process_groups.c10d.gloo_store import Patience
from hypercomm.process_groups.options import GroupOptions


@attrs.frozen(slots=False)
class GroupPlan:
    """What to create: the groups of some dims, their common name and their options.

    Attributes:
        name: What all ranks know the groups by.
        layout: The grid's.
        groups: All of them.
        options: With defaults filled in.
        title: What a user knows the groups by.
        patience: For how long ranks are waited for.
    """

    name: str
    layout: RankLayout
    groups: RankGroups
    options: GroupOptions
    title: str
    patience: Patience

    @cached_property
    def own(self) -> OwnGroup | None:
        """The group of the calling rank; None where it is no member."""
        rank = dist.get_rank()
        try:
            index = self.groups.index_of(rank)
        except RankOutsideError:
            return None
        return OwnGroup(f"{self.name}/{index}", rank, self.groups[index])

    @property
    def own_patience(self) -> Patience:
        """The patience with members of the caller's group, by their positions.

        It refers to the plan, which therefore does not keep it: neither would end before the
        collector looks.
        """

        def look(positions: Sequence[int], waited_s: float) -> None:
            if self.own is not None:
                self.patience.look([self.own.ranks[position] for position in positions], waited_s)

        return Patience(look, self.patience.deadline)

    @cached_property
    def meeting(self) -> OwnGroup | None:
        """The group of the calling rank, if its members meet while it is created: gloo's do."""
        if self.options.backend is None or self.options.lazy_init or not c10d.has_store():
            return None
        if "gloo" not in c10d.single_backends(self.options.backend):
            return None
        return self.own if self.own is not None and len(self.own.ranks) > 1 else None


class OwnGroup(NamedTuple):
    """One group as its members know it: the name is the same on all of them."""

    name: str
    rank: int
    ranks: tuple[int, ...]

    @property
    def position(self) -> int:
        """Where `rank` stands among the members."""
        return self.ranks.index(self.rank)

    def keys(self, word: str) -> list[str]:
        """Return the keys under which all members say a word."""
        return [self.key(word, rank) for rank in self.ranks]

    def key(self, word: str, rank: int) -> str:
        """Return the key under which `rank` says a word about this group in the store."""
        return f"{self.name}/{word}/{rank}"


@attrs.frozen(eq=False)
class CreatedGroup:
    """What came of a plan on the calling rank: None for the group where it is no member."""

    group: ProcessGroup | None
    meeting: OwnGroup | None = None
    """The group whose members say in the store that they are connected, if they must be."""
    owned: bool = True
    """Whether a grid created it; the last one that has it destroys it."""
    holders: list[ref[Holder]] = attrs.field(factory=list, init=False, repr=False)
    """What may have it under a key; a WeakSet is nine objects for the collector to look at."""

    def hold(self, holder: Holder) -> None:
        """File that something has it under a key."""
        own = ref(holder)
        for one in tuple(self.holders):
            if one() is None:
                with contextlib.suppress(ValueError):  # another thread was faster
                    self.holders.remove(one)
        if own not in self.holders:
            self.holders.append(own)

    def is_held(self, besides: Holder | None = None) -> bool:
        """Tell whether some grid, or another one than that given, has it under a key."""
        holders = (one() for one in self.holders)
        others = (holder for holder in holders if holder is not None and holder is not besides)
        return any(self in holder.created.values() for holder in others)


class Holder(Protocol):
    """What has groups by key."""

    created: dict[Any, CreatedGroup]
