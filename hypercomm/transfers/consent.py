"""Consent: before a transfer, its ranks make sure that all of them mean the same one.

The ranks of both stages meet at places of the job's store that belong to just these ranks, one
after the other. A rank that means a transfer among others meets elsewhere: so a rank that waits
looks where the missing ones are. Where ranks wait for each other, each in another transfer, they
form a circle, and whoever sees it ends all of its places.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import count

import attrs

from hypercomm.errors import TransferMismatchError
from hypercomm.layout import RankMapping
from hypercomm.process_groups.agreement.arrival import absent, arrive
from hypercomm.process_groups.agreement.cards import this_host
from hypercomm.process_groups.agreement.driver import hold_for_all
from hypercomm.process_groups.agreement.meeting import (
    Delete,
    End,
    Meeting,
    Now,
    Publish,
    Read,
    Said,
    compare,
    decide,
    end_of,
    foreign,
    give_up,
    read_register,
)
from hypercomm.process_groups.agreement.steps import limit_of
from hypercomm.process_groups.job import Job, current

_MOST_ASKED = 8
"""Missing ranks of one place that are looked for at most."""


def consent(
    mapping: RankMapping,
    tensor: str,
    refusal: str = "",
    *,
    entries: Sequence[str] = (),
    damage: str = "",
    follows: bool = False,
) -> BaseException | None:
    """Wait until all ranks of a transfer have come, and mean the same one.

    Args:
        mapping: What the transfer follows.
        tensor: What it moves, as all must say alike.
        refusal: Why this rank refuses to: the others hear it, and nobody is waited for.
        entries: What more all must say alike, each a sentence's end; the first difference is told.
        damage: What went wrong after bytes were moved: the others hear it in these words.
        follows: Whether bytes were moved since the ranks met: who is late then does not meet the
            others where they begin anew.

    Returns:
        What has interrupted this rank, though all go on: to be raised after the transfer.

    Raises:
        TransferMismatchError: Ranks mean different transfers, one refuses or leaves, or did not
            come in time.
        OutcomeUnknownError: The store is gone, and with it whether the others go on.
        CreationError: A key of the store holds what this library did not write.

    Example:
        >>> from hypercomm import RankLayout
        >>> from hypercomm.testing import fake_world
        >>> alone = RankLayout([1], ["dp"])
        >>> with fake_world(1):
        ...     consent(RankMapping(alone, alone), "(2, 3) of torch.float32")
    """
    job, ranks = current(), _ranks(mapping)
    if not job.has_store or len(ranks) == 1:
        return None
    meant = (f"{tensor} by {mapping}", _details(mapping), json.dumps(ranks), *entries)
    party, limit_s = _Party(job, ranks, Said(job.rank, this_host(), meant), follows), limit_of(None)
    if refusal:
        damage = (
            f"rank {job.rank} (host {party.said.host}) refused its arguments, and nothing was "
            f"sent: {refusal}"
        )
    meeting = party.fail(damage) if damage else party.meet(limit_s)
    return hold_for_all(meeting, limit_s, "a verified transfer")


@lru_cache(maxsize=128)
def _ranks(mapping: RankMapping) -> tuple[int, ...]:
    """The ranks that take part: those of both stages."""
    return tuple(sorted({*mapping.source_ranks, *mapping.target_ranks}))


@lru_cache(maxsize=128)
def _details(mapping: RankMapping) -> str:
    """What a mapping is, and may not show, the same on every rank."""
    layouts = hashlib.sha256(f"{mapping.source.to_json()} {mapping.target.to_json()}".encode())
    return (
        f"along={mapping.along!r}, batch_axis={mapping.batch_axis}, shards={mapping.shards}, "
        f"pipeline={mapping.pipeline!r}, layouts {layouts.hexdigest()[:12]}"
    )


@attrs.frozen
class _Stop:
    """A place, what the first rank there means, and a rank that has come to it."""

    rank: int
    place: str
    meant: str
    ranks: tuple[int, ...]
    end: End | None


@attrs.frozen
class _Party:
    """One rank on its way through the places of a set of ranks.

    Attributes:
        job: The job.
        ranks: The ranks.
        said: What this one means.
        follows: Whether they have moved bytes since they met.
    """

    job: Job
    ranks: tuple[int, ...]
    said: Said
    follows: bool

    def meet(self, limit_s: float) -> Meeting[BaseException | None]:
        """Wait for all ranks at the next place, and obey how it ends; as `consent` says."""
        begin = yield Now()
        while True:
            number = self._next_number()
            end, left = yield from self._come_to(f"{self._road}/{number}", begin + limit_s)
            if end.kind == "agreed":
                yield from self._forget_before(number)
                return left
            if left is not None and not isinstance(left, Exception):
                raise left
            if self.said.rank in end.ranks:  # the others have given up on this rank
                if not self.follows:
                    continue  # and come to the next place
                raise TransferMismatchError(
                    f"{self._outcome}: the others gave up on rank {self.said.rank} in "
                    f"{self.said.entries[0]}; every rank of both stages must make the call again"
                )
            if end.kind == "missing":
                waited_s = (yield Now()) - begin
                raise TransferMismatchError((yield from self._lateness(end.ranks, waited_s)))
            raise TransferMismatchError(end.words) from left

    def fail(self, words: str) -> Meeting[None]:
        """Let the next place fail, for all ranks."""
        rank = self.said.rank
        while True:
            place = f"{self._road}/{self._next_number()}"
            end = yield from decide(place, End("failed", words=words))
            if self.follows or rank not in end.ranks:
                return

    @property
    def _outcome(self) -> str:
        return "what was sent may not be whole" if self.follows else "nothing was sent"

    # ---- places ---------------------------------------------------------------------------------

    @property
    def _road(self) -> str:
        """What the names of the places begin with."""
        digest = hashlib.sha256(str(self.ranks).encode()).hexdigest()
        return f"{self.job.namespace}/transfers/{digest[:12]}"

    def _next_number(self) -> int:
        """Return the number of the next place; a rank comes to each once, however it leaves."""
        known = self.job.grids.transfers
        number = known[self._road].stop
        known[self._road] = range(known[self._road].start, number + 1)
        return number

    def _forget_before(self, number: int) -> Meeting[None]:
        """Remove earlier places: every rank has come to this one."""
        known = self.job.grids.transfers
        old = range(known[self._road].start, number)
        known[self._road] = range(number, known[self._road].stop)
        if old and self.said.rank == self.ranks[0]:
            with contextlib.suppress(RuntimeError):  # the store is gone
                yield Delete([f"{self._road}/{earlier}" for earlier in old])

    def _come_to(self, place: str, deadline: float) -> Meeting[tuple[End, BaseException | None]]:
        """Return how a place ends, and what has interrupted this rank there."""
        rank = self.said.rank
        try:
            end = yield from compare(place, self.said, _difference, place)
            if end is not None:
                return end, None
            yield Publish({self._last_place_of(rank): place})
            return (yield from arrive(place, rank, self.ranks, deadline, self._look_from(place)))
        except GeneratorExit:
            raise
        except BaseException as error:  # noqa: BLE001 - raised by who obeys what stands
            return (yield from give_up(place, rank, error))

    # ---- where others are -----------------------------------------------------------------------

    def _last_place_of(self, rank: int) -> str:
        return f"{self.job.namespace}/transfers/rank {rank}"

    def _awaited_at(self, rank: int) -> str:
        """Where ranks that wait for one which is elsewhere tell it where they do."""
        return f"{self._last_place_of(rank)} awaited"

    def _stop_in(self, key: str, rank: int) -> Meeting[_Stop | None]:
        place = yield Read(key)
        text = None if place is None else (yield Read(place))
        if text is None:
            return None
        register = read_register(place, text)
        if register.first is None:
            return None
        try:
            meant, _, ranks, *_ = register.first.entries
            return _Stop(rank, place, meant, tuple(json.loads(ranks)), register.end)
        except (ValueError, TypeError) as error:
            raise foreign(place, text) from error

    def _look_from(self, place: str) -> Callable[[], Meeting[End | None]]:
        """Return what looks for a circle, the first, second, fourth, eighth ... time it is asked.

        The last rank of a circle that comes can see all of it; to look again costs little.
        """
        turns = count(1)

        def look() -> Meeting[End | None]:
            turn = next(turns)
            if turn & (turn - 1):
                return None
            circle = yield from self._way_back(place, self.ranks, {place})
            for stop in circle:
                if (yield from end_of(stop.place)) is not None:
                    return None  # its rank was about to go on
            return (yield from self._break(place, circle)) if circle else None

        return look

    def _way_back(self, place: str, ranks: Sequence[int], seen: set[str]) -> Meeting[list[_Stop]]:
        """Follow who is missing at a place, and where that one is, to one that lacks this rank."""
        own = self.said.rank
        for rank in (yield from absent(place, ranks))[:_MOST_ASKED]:
            stop = yield from self._stop_in(self._last_place_of(rank), rank)
            if stop is None or stop.end or stop.place in seen:
                continue
            seen.add(stop.place)
            yield Publish({self._awaited_at(rank): place})
            if own in stop.ranks and (yield from absent(stop.place, [own])):
                return [stop]
            onward = yield from self._way_back(stop.place, stop.ranks, seen)
            if onward:
                return [stop, *onward]
        return []

    def _break(self, place: str, circle: Sequence[_Stop]) -> Meeting[End]:
        """End the places of a circle; the ranks in it come to none of the others'."""
        mine = _Stop(self.said.rank, place, self.said.entries[0], self.ranks, end=None)
        stops = [mine, *circle]
        told = "; ".join(f"rank {stop.rank} is in {stop.meant}" for stop in stops)
        words = (
            f"ranks wait for each other in different transfers, and nothing was sent: {told}; "
            f"every rank must make the same transfers, in one order"
        )
        for stop in reversed(stops):
            others = tuple(other.rank for other in stops if other is not stop)
            end = yield from decide(stop.place, End("differs", others, words))
        return end

    def _lateness(self, missing: Sequence[int], waited_s: float) -> Meeting[str]:
        """Say who did not come, where that one was last, and who waited for this rank elsewhere."""
        own, late, awaited = self.said.rank, [f"rank {rank}" for rank in missing], ""
        with contextlib.suppress(RuntimeError):  # only for the words
            for position, rank in enumerate(missing):
                stop = yield from self._stop_in(self._last_place_of(rank), rank)
                late[position] += f" (last in {stop.meant})" if stop else ""
            stop = yield from self._stop_in(self._awaited_at(own), own)
            if stop and (stop.end is None or stop.end.kind == "missing"):
                awaited = f"; this rank was awaited in {stop.meant}"
            yield Delete([self._awaited_at(own)])
        return (
            f"{self._outcome}: rank {own} waited {waited_s:.1f} s for {', '.join(late)} in "
            f"{self.said.entries[0]}{awaited}; every rank of both stages must make the same call"
        )


def _difference(first: Said, own: Said) -> str | None:
    for mine, theirs in zip(own.entries, first.entries, strict=False):
        if mine != theirs:
            return (
                f"ranks mean different transfers, and nothing was sent: rank {own.rank} (host "
                f"{own.host}) means {mine}, but rank {first.rank} (host {first.host}), which came "
                f"first, means {theirs}"
            )
    return None
