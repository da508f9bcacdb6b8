"""Attempt: one try to create the groups of some dims, as the calling rank sees it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import NamedTuple

import attrs
from torch.distributed import ProcessGroup

from hypercomm.errors import RankOutsideError
from hypercomm.layout import RankGroups, RankLayout
from hypercomm.process_groups import c10d, world
from hypercomm.process_groups.c10d.gloo_store import Patience
from hypercomm.process_groups.job import Job
from hypercomm.process_groups.options import GroupOptions


@attrs.frozen(slots=False)
class Attempt:
    """One attempt to create the groups of some dims: their name, members and options.

    Attributes:
        name: What all ranks know the groups by.
        layout: The grid's.
        groups: All of them.
        options: With defaults filled in.
        title: What a user knows the groups by.
        patience: For how long ranks are waited for.
        job: The job in which it is made; None before there is one.
        is_met: Whether all ranks of the grid meet afterwards, and hear there who has failed.
    """

    name: str
    layout: RankLayout
    groups: RankGroups
    options: GroupOptions
    title: str
    patience: Patience
    job: Job | None
    is_met: bool = False

    @cached_property
    def own(self) -> OwnGroup | None:
        """The group of the calling rank; None where it is no member."""
        rank, groups = world.rank() if self.job is None else self.job.rank, self.groups
        try:
            index, _ = groups.locate(rank)
        except RankOutsideError:
            return None
        ranks = groups.members(index, range(groups.group_size))
        return OwnGroup(f"{self.name}/{index}", rank, ranks)

    @property
    def own_patience(self) -> Patience | None:
        """The patience with members of the caller's group, by their positions.

        It refers to the attempt, which therefore does not keep it: neither would end before the
        collector looks. None where there is no store to meet in.
        """
        if self.job is None or not self.job.has_store:
            return None

        def look(positions: Sequence[int], waited_s: float) -> None:
            if self.own is not None:
                self.patience.look([self.own.ranks[position] for position in positions], waited_s)

        return Patience(look, self.patience.deadline)

    @cached_property
    def connecting(self) -> OwnGroup | None:
        """The group of the calling rank, if its members meet while it is created: gloo's do."""
        job, backend = self.job, self.options.backend
        if job is None or not job.has_store or backend is None or self.options.lazy_init:
            return None
        if "gloo" not in c10d.single_backends(backend):
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
    """The result of an attempt on the calling rank: no group where it is no member."""

    group: ProcessGroup | None
    connecting: OwnGroup | None = None
    """The group whose members say in the store that they are connected, if they must be."""
    owned: bool = True
    """Whether a grid created it; the last key that has it destroys it."""
