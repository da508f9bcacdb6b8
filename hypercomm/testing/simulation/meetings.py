"""Whether what the ranks create and call, each in its own order, would all meet."""

from __future__ import annotations

from array import array
from collections import defaultdict
from collections.abc import Mapping, Sequence

from hypercomm.testing.simulation.calls import CallDisagreement, Kind, Ledger
from hypercomm.testing.simulation.creations import (
    Creation,
    Disagreement,
    difference,
    ranks_that,
)
from hypercomm.testing.simulation.messages import Channel, Messages, channel_of

Point = tuple[int, int] | tuple[Channel, int]
"""Where ranks wait: the call of a number on a group, or the message of a number on a channel."""

_KINDS = 3
"""Calls of one meeting that a text tells apart."""


def find_disagreements(
    creations: Mapping[int, Sequence[Creation]], ledger: Ledger | None = None
) -> tuple[Disagreement | CallDisagreement, ...]:
    """Let the ranks do all in order, each waiting for all members, and see who waits.

    A rank waits in a creation, in a collective until all members have called it, and in a receive
    until it is sent; what is asynchronous, where it is waited for. A send never waits. After the
    first calls of a group that differ, nobody waits in that group any more: what comes later
    there would only follow from it.

    Args:
        creations: By rank, what it creates; members that are no keys are taken to come.
        ledger: What the ranks call, and when they create; without it, they only create.

    Returns:
        What ranks see or call differently, then where ranks wait for ever: first what a member
        never creates or calls.
    """
    return _Meetings(creations, ledger).found()


class _Meetings:
    def __init__(self, creations: Mapping[int, Sequence[Creation]], ledger: Ledger | None) -> None:
        self._creations = creations
        self._ledger = ledger or Ledger()
        self._streams: Mapping[int, array[int]] = self._ledger.streams
        if ledger is None:
            self._streams = {
                rank: array("q", [number << 2 | Kind.CREATES for number in range(len(made))])
                for rank, made in creations.items()
            }
        self._at = dict.fromkeys(creations, 0)
        self._moving = sorted(creations, reverse=True)
        self._differing: list[Disagreement | CallDisagreement] = []
        # creations
        self._arrived: dict[str, dict[int, Creation]] = {}
        self._expected: dict[str, set[int]] = {}
        # collectives
        self._counts: dict[int, dict[int, int]] = {rank: {} for rank in creations}
        self._here: dict[tuple[int, int], dict[int, int]] = {}
        self._met: dict[int, int] = defaultdict(int)
        self._given_up: set[int] = set()
        self._members: dict[int, list[int]] = {}
        self._waiters: dict[Point, list[int]] = {}
        self._begun: dict[int, dict[int, Point]] = {rank: {} for rank in creations}
        self._messages = Messages(self._ledger, self._creations.keys())

    def found(self) -> tuple[Disagreement | CallDisagreement, ...]:
        while self._moving:
            while self._moving:
                self._advance(self._moving.pop())
            self._compare_who_came()
        self._differing += self._messages.differing()
        stuck: list[tuple[bool, Disagreement | CallDisagreement]] = [
            *self._stuck_creations(),
            *self._stuck_calls(),
            *self._stuck_messages(),
        ]
        stuck.sort(key=lambda item: (item[0], item[1].waiting))
        return (*self._differing, *(disagreement for _, disagreement in stuck))

    # ---- what a rank does next

    def _advance(self, rank: int) -> None:
        """Let a rank go on until it waits."""
        stream = self._streams[rank]
        while self._at[rank] < len(stream):
            place = self._at[rank]
            value, kind = stream[place] >> 2, stream[place] & 3
            if kind == Kind.CREATES:
                self._create(rank, self._creations[rank][value])
                return
            if kind == Kind.WAITS:
                point = self._begun[rank].pop(value, None)
            else:
                point = self._call(rank, value)
                if kind == Kind.BEGINS:
                    if point is not None:
                        self._begun[rank][place] = point
                    point = None
            if point is not None and not self._is_met(point):
                self._waiters.setdefault(point, []).append(rank)
                return
            self._at[rank] += 1

    def _create(self, rank: int, creation: Creation) -> None:
        here = self._arrived.setdefault(creation.name, {})
        first = next(iter(here.values()), creation)
        if creation != first:
            self._differing.append(difference(first, next(iter(here)), creation, rank))
        here[rank] = creation
        if creation.name not in self._expected:
            self._expected[creation.name] = {
                rank for rank in creation.ranks if rank in self._creations
            }
        if here.keys() >= self._expected[creation.name]:
            del self._arrived[creation.name]
            for member in here:
                self._at[member] += 1
                self._moving.append(member)

    def _call(self, rank: int, record: int) -> Point | None:
        """Let a rank call; return where it waits, if it does."""
        key = self._ledger.key(record)
        channel = channel_of(key, rank)
        if channel is not None:
            return self._message(channel, rank)
        group = key.group
        if group in self._given_up:
            return None
        number = self._counts[rank].get(group, 0)
        self._counts[rank][group] = number + 1
        point = (group, number)
        here = self._here.setdefault(point, {})
        here[rank] = record
        if len(here) == len(self._members_of(group)):
            del self._here[point]
            self._met[group] = number + 1
            self._compare(point, here)
            self._wake(point)
            return None
        return point

    def _message(self, channel: Channel, rank: int) -> Point | None:
        if rank == channel.to:
            number = self._messages.receive(channel)
            return None if number is None else (channel, number)
        self._wake((channel, self._messages.send(channel)))
        return None

    def _is_met(self, point: Point) -> bool:
        where, number = point
        if isinstance(where, Channel):
            return self._messages.is_sent(where, number)
        return where in self._given_up or number < self._met[where]

    def _wake(self, point: Point) -> None:
        for rank in self._waiters.pop(point, ()):
            self._at[rank] += 1
            self._moving.append(rank)

    def _members_of(self, group: int) -> list[int]:
        if group not in self._members:
            ranks = self._ledger.groups[group].ranks
            self._members[group] = [rank for rank in ranks if rank in self._creations]
        return self._members[group]

    # ---- what does not fit together

    def _compare_who_came(self) -> None:
        """Compare the calls of those that wait for others, too: the first ones of each group."""
        for point, here in sorted(self._here.items()):
            if point[0] not in self._given_up:
                self._compare(point, here)

    def _compare(self, point: tuple[int, int], here: Mapping[int, int]) -> None:
        group, number = point
        if group in self._given_up or not (differs := self._difference(group, here)):
            return
        calls = {rank: self._ledger.collective(record) for rank, record in sorted(here.items())}
        told = self._ledger.groups[group]
        self._differing.append(CallDisagreement(told, number + 1, calls, {}, differs))
        self._given_up.add(group)
        for waiting in [point for point in self._waiters if point[0] == group]:
            self._wake(waiting)

    def _difference(self, group: int, here: Mapping[int, int]) -> str:
        ranks_of: dict[tuple[object, ...], list[int]] = {}
        agrees = {record: self._ledger.key(record).agrees for record in set(here.values())}
        if len(set(agrees.values())) == 1:
            return self._splits(group, here)
        for rank in sorted(here):
            ranks_of.setdefault(agrees[here[rank]], []).append(rank)
        kinds = sorted(ranks_of.values(), key=lambda ranks: (len(ranks), ranks))
        words = [
            f"{ranks_that(ranks, 'calls', 'call')} {self._ledger.collective(here[ranks[0]])}"
            for ranks in kinds[:_KINDS]
        ]
        left = len(kinds) - len(words)
        return "; ".join([*words, *([f"and {left} more calls"] if left else [])])

    def _splits(self, group: int, here: Mapping[int, int]) -> str:
        """Say which part of an all-to-all has another size for who sends it and who takes it."""
        ranks = self._ledger.groups[group].ranks
        keys = {record: self._ledger.key(record) for record in set(here.values())}
        if next(iter(keys.values())).sends is None or len(here) < len(ranks):
            return ""
        if len({(key.sends, key.receives) for key in keys.values()}) == 1:
            key = next(iter(keys.values()))
            if len({*(key.sends or ()), *(key.receives or ())}) == 1:
                return ""
        table = zip(*(keys[here[rank]].sends or () for rank in ranks), strict=True)
        for taker, sent in zip(ranks, table, strict=True):
            taken = keys[here[taker]].receives or ()
            if sent != taken:
                place = next(i for i, size in enumerate(sent) if size != taken[i])
                op = self._ledger.collective(here[taker])
                return (
                    f"{op}: rank {ranks[place]} sends {_size(sent[place])} to rank {taker}, "
                    f"which takes {_size(taken[place])}"
                )
        return ""

    # ---- who waits for ever

    def _stuck_creations(self) -> list[tuple[bool, Disagreement]]:
        stuck = []
        for name, here in self._arrived.items():
            absent = {}
            for rank in sorted(self._expected[name] - here.keys()):
                left = self._streams[rank][self._at[rank] :]
                made = self._creations[rank]
                comes = any(
                    token & 3 == Kind.CREATES and made[token >> 2].name == name for token in left
                )
                absent[rank] = self._whereabouts(rank) if comes else "never creates it"
            first = next(iter(here.values()))
            stuck.append((_none_never(absent), Disagreement(first, tuple(sorted(here)), absent)))
        return stuck

    def _stuck_calls(self) -> list[tuple[bool, CallDisagreement]]:
        stuck: dict[int, tuple[bool, CallDisagreement]] = {}
        for (group, number), here in sorted(self._here.items()):
            if group in self._given_up or group in stuck:
                continue
            absent = {
                rank: self._whereabouts(rank)
                if self._calls(rank, group, number)
                else "never calls it"
                for rank in sorted(set(self._members_of(group)) - here.keys())
            }
            calls = {rank: self._ledger.collective(record) for rank, record in sorted(here.items())}
            told = CallDisagreement(self._ledger.groups[group], number + 1, calls, absent)
            stuck[group] = (_none_never(absent), told)
        return list(stuck.values())

    def _stuck_messages(self) -> list[tuple[bool, CallDisagreement]]:
        """Find the messages without an end, and those that are sent only after something else."""
        late = [
            self._messages.told(channel, number, self._whereabouts(channel.source))
            for channel, number in self._waiters
            if isinstance(channel, Channel) and self._messages.is_ever_sent(channel, number)
        ]
        return [
            *((False, one) for one in self._messages.unmatched()),
            *((True, one) for one in late),
        ]

    def _calls(self, rank: int, group: int, number: int) -> bool:
        """Tell whether a rank ever makes the call of a number on a group."""
        stream = self._streams[rank]
        made = sum(
            key.group == group and channel_of(key, rank) is None
            for token in stream
            if token & 3 in (Kind.CALLS, Kind.BEGINS)
            for key in [self._ledger.key(token >> 2)]
        )
        return made > number

    def _whereabouts(self, rank: int) -> str:
        stream = self._streams[rank]
        token = stream[self._at[rank]]
        if token & 3 == Kind.CREATES:
            return f"waits in {self._creations[rank][token >> 2].called}"
        if token & 3 == Kind.WAITS:
            token = stream[token >> 2]
        return f"waits in {self._ledger.collective(token >> 2).where}"


def _size(size: object) -> str:
    return str(size if isinstance(size, int) else list(size))  # type: ignore[call-overload]


def _none_never(absent: Mapping[int, str]) -> bool:
    return not any(why.startswith("never") for why in absent.values())
