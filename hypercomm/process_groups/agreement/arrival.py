"""Arrival: a place that all ranks wait for each other at, with few questions however many they are.

Whoever comes last knows it: it finds that those of its family are there, lets those above know,
and looks on there; so nobody asks for all again and again. Who waits asks less and less often how
the place has ended, and one rank alone searches for those that are missing, and names them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from hypercomm.errors import HyperCommError
from hypercomm.process_groups.agreement.meeting import (
    AGREED,
    Check,
    Delete,
    End,
    Exchange,
    Meeting,
    Now,
    Publish,
    Sleep,
    decide,
    end_of,
    give_up,
)

FAN_OUT = 64
"""The size of a family: of so many ranks, the first one asks for all others at once."""

MOST_NAMED = 16
"""The most missing ranks that are looked for."""

_SHORTEST_S = 0.0005
_LONGEST_S = 0.5
_SELDOM = 8
"""How many polls of a rank in a large job lie between two looks at other places."""

_SEARCH_S = 0.5
"""How long the ranks of a large job wait for the one that searches for those that are missing."""
_STAGGER_S = 0.6
"""Over how long they spread their own search, if that one decides nothing."""


def _unnamed(missing: tuple[int, ...]) -> Meeting[End]:
    yield from ()
    return End("missing", missing)


def _nothing() -> Meeting[None]:
    yield from ()


def arrive(
    key: str,
    rank: int,
    ranks: Sequence[int],
    deadline: float,
    elsewhere: Callable[[], Meeting[End | None]] = _nothing,
    explain: Callable[[tuple[int, ...]], Meeting[End]] = _unnamed,
) -> Meeting[tuple[End, BaseException | None]]:
    """Wait until all ranks have arrived at a place that they entered, or one decides otherwise.

    Each rank has up to 64 others below it, which have 64 others each; the first has all of them.

    Args:
        key: The place.
        rank: This rank.
        ranks: All of them.
        deadline: When to give up, as `Now` tells the time.
        elsewhere: Looks, now and then, whether something else ends this place, and how.
        explain: Says how the place ends where some are missing.

    Returns:
        How the place has ended, and what has interrupted this rank, which obeys first.

    Raises:
        RuntimeError: The store is gone, so that it cannot be known how the place has ended.
    """
    wait = _Wait(key, ranks.index(rank), ranks, deadline, elsewhere, explain)
    pending: BaseException | None = None
    try:
        yield Publish({wait.mine[0]: "1"})
        end = yield from wait.hold()
    except GeneratorExit:
        raise
    except BaseException as error:  # noqa: BLE001 - raised by who obeys what stands
        end, pending = yield from give_up(key, rank, error)
    try:
        yield Delete(wait.mine)
    except GeneratorExit:
        raise
    except BaseException as error:  # noqa: BLE001 - what was decided is known, and is obeyed first
        pending = pending or (None if isinstance(error, RuntimeError) else error)
    return end, pending


@attrs.define
class _Wait:
    """One rank that waits at a place.

    Attributes:
        mine: The keys that it deletes when it leaves.
    """

    key: str
    position: int
    ranks: Sequence[int]
    deadline: float
    elsewhere: Callable[[], Meeting[End | None]]
    explain: Callable[[tuple[int, ...]], Meeting[End]]
    mine: list[str] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.mine = [_here(self.key, self.ranks[self.position])]

    @property
    def is_small(self) -> bool:
        """Whether all are of one family."""
        return len(self.ranks) <= FAN_OUT

    def hold(self) -> Meeting[End]:
        """Return how the place ends."""
        begin = yield Now()
        shortest, longest = self._pauses(self.deadline - begin)
        until, polls, climbs = self.deadline, 0, self.position == 0 or not self.is_small
        while True:
            polls, end = polls + 1, None
            try:
                if climbs:
                    end = yield from self._climb()
                    if end is not None:
                        return end
                    climbs = self.is_small  # else who comes later looks
                end = yield from self._look(polls, begin, until)
            except HyperCommError:
                raise
            except RuntimeError:  # one question may fail
                if (yield Now()) >= until:
                    raise
            if end is not None:
                return end
            now = yield Now()
            if now >= until:
                if (
                    self.is_small
                    or until > self.deadline
                    or (yield from self._is_first_to_search())
                ):
                    return (yield from self._give_up())
                until += _SEARCH_S + _STAGGER_S * self.position / len(self.ranks)
            growth = (now - begin) / (2 if self.is_small else 1)
            yield Sleep(min(max(shortest, growth), longest, until - now + _SHORTEST_S))

    def _pauses(self, limit_s: float) -> tuple[float, float]:
        """The shortest and the longest time between two polls."""
        size = len(self.ranks)
        longest = _LONGEST_S if self.is_small else max(size / 2000, min(size / 100, limit_s / 16))
        return max(_SHORTEST_S, size * 1e-5), max(_LONGEST_S, longest)

    def _look(self, polls: int, begin: float, until: float) -> Meeting[End | None]:
        """Return how the place has ended, or another one that this one ends with."""
        end = yield from end_of(self.key)
        if end is not None:
            return end
        now = yield Now()
        is_turn = self.is_small or (polls + self.position) % _SELDOM == 0 or now >= until
        if now - begin > _LONGEST_S / 2 and is_turn:
            end = yield from self.elsewhere()
            if end is not None:
                return (yield from decide(self.key, end))
        return None

    # ---- all have come --------------------------------------------------------------------------

    def _climb(self) -> Meeting[End | None]:
        """Look whether a family is there, and let the next one know; above the first is the end.

        Of those that look after they have come, the last one finds all.
        """
        at = self.position if _below(self.position, self.ranks) else _above(self.position)
        while True:
            family = [_here(self.key, self.ranks[at])] + [
                (_complete if _below(child, self.ranks) else _here)(self.key, self.ranks[child])
                for child in _below(at, self.ranks)
            ]
            if not (yield Check(family)):
                return None
            if at == 0:
                return (yield from decide(self.key, AGREED))
            complete = _complete(self.key, self.ranks[at])
            self.mine.append(complete)  # others may have, and left: whoever says it takes it back
            yield Publish({complete: "1"})
            at = _above(at)

    # ---- some have not --------------------------------------------------------------------------

    def _is_first_to_search(self) -> Meeting[bool]:
        """Tell whether this rank searches; the others wait for what it decides."""
        key, rank = f"{self.key}/search", str(self.ranks[self.position])
        self.mine.append(key)
        is_first = (yield Exchange(key, "", rank)) == rank
        if not is_first:
            self.mine.remove(key)
        return bool(is_first)

    def _give_up(self) -> Meeting[End]:
        """Decide who is missing, unless another rank has decided meanwhile."""
        end = None if self.is_small else (yield from end_of(self.key))
        if end is None:
            missing = yield from absent(self.key, self.ranks)
            end = yield from end_of(self.key)  # who has heard is there no more
            if end is None:
                found = (yield from self.explain(missing)) if missing else AGREED
                end = yield from decide(self.key, found)
        return end


def absent(key: str, ranks: Sequence[int]) -> Meeting[tuple[int, ...]]:
    """Say which ranks have not arrived at a place, the first ones: few questions where few."""
    found: list[int] = []
    yield from _search(key, ranks, range(len(ranks)), found, lacks_some=False)
    return tuple(found)


def _search(
    key: str, ranks: Sequence[int], part: range, found: list[int], *, lacks_some: bool
) -> Meeting[None]:
    if len(found) == MOST_NAMED:
        return
    is_last = len(part) == 1  # which is asked for in any case: the other half may have come since
    if (is_last or not lacks_some) and (yield Check([_here(key, ranks[at]) for at in part])):
        return
    if is_last:
        found.append(ranks[part[0]])
        return
    half, before = len(part) // 2, len(found)
    yield from _search(key, ranks, part[:half], found, lacks_some=False)
    yield from _search(key, ranks, part[half:], found, lacks_some=len(found) == before)


def _below(position: int, ranks: Sequence[int]) -> range:
    """The positions of those below one."""
    first = position * FAN_OUT + 1
    return range(first, min(first + FAN_OUT, len(ranks)))


def _above(position: int) -> int:
    """The position that one is below of."""
    return max(0, position - 1) // FAN_OUT


def _here(key: str, rank: int) -> str:
    return f"{key}/here/{rank}"


def _complete(key: str, rank: int) -> str:
    return f"{key}/complete/{rank}"
