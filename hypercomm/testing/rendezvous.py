"""Whether the process groups that ranks create, each in its own order, would all come about."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

import attrs

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
    ranks: tuple[int, ...]
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
        rank, why = next(iter(self.absent.items()))
        others = len(self.absent) - 1
        more = f", and for {others} more" if others else ""
        return f"{self.creation}: {_ranks(self.waiting)} for rank {rank}, which {why}{more}"


def find_disagreements(creations: Mapping[int, Sequence[Creation]]) -> tuple[Disagreement, ...]:
    """Let the ranks create their groups in order, each waiting for all members, and see who waits.

    Args:
        creations: By rank, what it creates; members that are no keys are taken to come.

    Returns:
        The groups that ranks see differently, then those in which ranks wait for ever: first
        those that a member never creates.
    """
    differing: list[Disagreement] = []
    arrived: dict[str, dict[int, Creation]] = {}
    expected: dict[str, set[int]] = {}
    done = dict.fromkeys(creations, 0)
    moving = sorted(creations, reverse=True)
    while moving:
        rank = moving.pop()
        if done[rank] == len(creations[rank]):
            continue
        creation = creations[rank][done[rank]]
        here = arrived.setdefault(creation.name, {})
        first = next(iter(here.values()), creation)
        if creation != first:
            differing.append(_difference(first, next(iter(here)), creation, rank))
        here[rank] = creation
        if creation.name not in expected:
            expected[creation.name] = {rank for rank in creation.ranks if rank in creations}
        if here.keys() >= expected[creation.name]:
            del arrived[creation.name]
            for member in here:
                done[member] += 1
                moving.append(member)
    stuck = []
    for name, here in arrived.items():
        absent = {
            rank: _whereabouts(creations[rank], done[rank], name)
            for rank in sorted(expected[name] - here.keys())
        }
        never = any(why.startswith("never") for why in absent.values())
        first = next(iter(here.values()))
        stuck.append((not never, Disagreement(first, tuple(sorted(here)), absent)))
    stuck.sort(key=lambda item: (item[0], item[1].waiting))
    return (*differing, *(disagreement for _, disagreement in stuck))


def _whereabouts(creations: Sequence[Creation], done: int, name: str) -> str:
    if all(creation.name != name for creation in creations[done:]):
        return "never creates it"
    return f"waits in {creations[done].called}"


def _difference(one: Creation, rank: int, other: Creation, other_rank: int) -> Disagreement:
    words = ", ".join(
        f"{field} {ours!r} on rank {rank}, {theirs!r} on rank {other_rank}"
        for field, ours in attrs.asdict(one, recurse=False).items()
        if (theirs := getattr(other, field)) != ours
    )
    return Disagreement(one, (rank, other_rank), {}, f"ranks see it differently: {words}")


def _ranks(ranks: Sequence[int]) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} waits"
    shown = ", ".join(map(str, ranks[:_SHOWN])) + (", ..." if len(ranks) > _SHOWN else "")
    return f"ranks {shown} wait"
