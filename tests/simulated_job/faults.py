"""Faults: what may happen to a rank at any place where it can be stopped, and to the store."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import TypeAlias

import attrs


@attrs.frozen
class RankFault:
    """Something that happens to one rank.

    Attributes:
        rank: The rank.
        at: Which of its scheduling points it happens at, counted from 1; or words that stand in
            what it is about to do, the first time.
    """

    rank: int
    at: int | str


@attrs.frozen
class Dies(RankFault):
    """The rank ends, and what it listens at closes."""


@attrs.frozen
class IsInterrupted(RankFault):
    """KeyboardInterrupt is raised in the main thread of the rank."""


@attrs.frozen
class Pauses(RankFault):
    """No thread of the rank runs for a while."""

    seconds: float = 30.0


@attrs.frozen
class AnswersLate(RankFault):
    """What the rank asks the store is done, but the answer takes a while."""

    seconds: float = 61.0


@attrs.frozen
class DelayedWrite(RankFault):
    """The next thing that the rank sets is on its way for a while, and all that it sends later."""

    seconds: float = 3.0


@attrs.frozen
class AsksLate(RankFault):
    """What the rank asks the store is on its way for a while, and all that it asks later."""

    seconds: float = 61.0


@attrs.frozen
class LostRequest(RankFault):
    """The rank's link to the store breaks at one question, which the store does not hear."""


@attrs.frozen
class StoreIsSlow:
    """Every answer of the store takes a while.

    Attributes:
        from_s: The virtual time from which on.
        seconds: How long.
        until_s: Until when.
    """

    from_s: float
    seconds: float
    until_s: float = 1e9


@attrs.frozen
class StoreGoes:
    """Nobody answers any more.

    Attributes:
        from_s: The virtual time from which on.
    """

    from_s: float


Fault: TypeAlias = RankFault | StoreIsSlow | StoreGoes

KINDS: tuple[type[RankFault], ...] = (
    *(Dies, IsInterrupted, Pauses, AnswersLate, DelayedWrite, AsksLate, LostRequest),
)


def draw_faults(
    seed: int,
    nprocs: int,
    kinds: Sequence[type[RankFault]] = KINDS,
    *,
    most: int = 1,
    points: int = 60,
) -> list[Fault]:
    """Draw faults of ranks.

    Args:
        seed: The same one draws the same.
        nprocs: The number of ranks.
        kinds: What may happen.
        most: How often it may at most.
        points: At which scheduling point of a rank at the latest.
    """
    drawn = random.Random(seed)
    return [
        drawn.choice(kinds)(drawn.randrange(nprocs), drawn.randint(1, points))
        for _ in range(drawn.randint(1, most))
    ]
