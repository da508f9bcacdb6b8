"""The process groups that ranks of a simulated job create, and those that would not come about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

import attrs

from hypercomm.layout.text import some_of

_SHOWN = 4
"""Ranks of a group that a text shows."""


@attrs.frozen
class Creation:
    """A process group that a rank would create.

    Attributes:
        name: What its members know it by.
        ranks: The members, in group order.
        backend: Its backend.
        timeout: Its timeout.
        description: What torch's logs call it; of a grid's group, the dims.
    """

    name: str
    ranks: Sequence[int]
    backend: str
    timeout: timedelta
    description: str

    @property
    def called(self) -> str:
        """The description; where there is none, the name."""
        return self.name if self.description == "undefined" else self.description

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.ranks[:_SHOWN]))
        more = "" if len(self.ranks) <= _SHOWN else f", ..., {self.ranks[-1]}"
        return f"{self.called} of ranks ({shown}{more})"


@attrs.frozen
class Disagreement:
    """A process group that would not come about; str() says why.

    Attributes:
        creation: The group, as the first of those ranks sees it.
        waiting: The ranks that wait in it, or that see it in another way than the first.
        absent: Why each other member does not come, by rank.
        differs: How ranks that came see it differently; "" if they do not.
    """

    creation: Creation
    waiting: tuple[int, ...]
    absent: Mapping[int, str]
    differs: str = ""

    def __str__(self) -> str:
        if self.differs:
            return f"{self.creation}: {self.differs}"
        return f"{self.creation}: {who_waits(self.waiting, self.absent)}"


def difference(one: Creation, rank: int, other: Creation, other_rank: int) -> Disagreement:
    """Say how two ranks see a group differently."""
    words = ", ".join(
        f"{field} {ours!r} on rank {rank}, {theirs!r} on rank {other_rank}"
        for field, ours in attrs.asdict(one, recurse=False).items()
        if (theirs := getattr(other, field)) != ours
    )
    return Disagreement(one, (rank, other_rank), {}, f"ranks see it differently: {words}")


def ranks_that(ranks: Sequence[int], one: str, many: str) -> str:
    """Name ranks with what they do: in words for one of them, and for many."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} {one}"
    return f"ranks {some_of(ranks, _SHOWN)} {many}"


def who_waits(waiting: Sequence[int], absent: Mapping[int, str]) -> str:
    """Say which ranks wait for which, and why the first of those does not come."""
    rank, why = next(iter(absent.items()))
    others = len(absent) - 1
    more = f", and for {others} more" if others else ""
    return f"{ranks_that(waiting, 'waits', 'wait')} for rank {rank}, which {why}{more}"
