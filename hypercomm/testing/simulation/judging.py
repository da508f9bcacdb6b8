"""Finds the calls of the ranks of a simulated job that differ, and those that would never end."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence

import attrs

from hypercomm.layout.text import some_of
from hypercomm.testing.simulation.records import Collective, Creation, Step
from hypercomm.tools.blame.analysis import find_differences, find_waits
from hypercomm.tools.blame.calls import Call, Evidence, Group, Record

_SHOWN_RANKS, _SHOWN_KINDS = 4, 3
_CREATE = "create"
_NEVER = {_CREATE: "never creates it", "send": "never receives it", "recv": "never sends it"}


@attrs.frozen
class Disagreement:
    """Calls of a process group that differ or would not end; str() describes them.

    Attributes:
        group: The process group, as the first of the ranks knows it.
        number: The number of the call among the collectives of this group on each rank, or among
            the messages from one rank to another, from 1; of the creation of the group, 0.
        calls: The calls by rank; of a creation, the group as each rank creates it.
        absent: Why each other member is missing, by rank.
        differs: How the calls differ; "" if they do not.
    """

    group: Creation
    number: int
    calls: Mapping[int, Creation | Collective]
    absent: Mapping[int, str]
    differs: str = ""

    @property
    def waiting(self) -> tuple[int, ...]:
        """The ranks that made the call."""
        return tuple(self.calls)

    def __str__(self) -> str:
        what = f"call {self.number} on {self.group}" if self.number else str(self.group)
        if self.differs:
            return f"{what}: {self.differs}"
        if self.number:
            what += f", {self.calls[self.waiting[0]]}"
        rank, why = next(iter(self.absent.items()))
        more = f", and for {len(self.absent) - 1} more" if len(self.absent) > 1 else ""
        who = _ranks_that(self.waiting, "waits", "wait")
        return f"{what}: {who} for rank {rank}, which {why}{more}"


Steps = list[tuple[bool, Call]]
"""The calls of one rank, and whether it waits for the call there."""

Point = tuple[Group, str, int]
"""A group, a channel and a number: the calls that meet."""


def judge(programs: Mapping[int, Sequence[Step]]) -> tuple[Disagreement, ...]:
    """Find the calls that differ, and those that would never end.

    A rank waits in a creation, in a collective until all members have called it, in a receive
    until it is sent, and for an asynchronous call where it waits for the work. A send never waits.
    After the first calls of a group that differ, no rank waits in that group: later differences
    there are consequences.

    Args:
        programs: The steps of each simulated rank; the calls of other ranks are taken to be right.

    Returns:
        The differences, then the waits; first those for a call that a member never makes.
    """
    groups: dict[str, Group] = {}
    steps = {rank: _as_calls(rank, own, groups, programs) for rank, own in programs.items()}
    every = _evidence(steps)
    differences = [each.calls for each in find_differences(every)]
    found = [_disagreement(calls, {}, _describe(calls)) for calls in differences]
    known = {call.group for calls in differences for call in calls.values() if not call.channel}
    for (group, channel), by_rank in every.lanes.items():
        if not channel and group not in known:
            for calls, differs in _uneven(by_rank):
                differences.append(calls)
                found.append(_disagreement(calls, {}, differs))
                break
    first = {
        (call.group, call.channel): call.number for calls in differences for call in calls.values()
    }
    at = _run(steps, first)
    stuck = list(_stuck(steps, every, at))
    stuck.sort(key=lambda one: (not any(map(_is_never, one.absent.values())), one.waiting))
    return (*found, *stuck)


def _as_calls(
    rank: int, program: Sequence[Step], groups: dict[str, Group], ranks: Collection[int]
) -> Steps:
    """Convert steps to calls, without messages from and to ranks that are not simulated."""
    counts: Counter[tuple[Group, str]] = Counter()
    calls: list[Call] = []
    steps: Steps = []
    for item in program:
        if isinstance(item, int):
            call = calls[item]
        else:
            is_creation = isinstance(item, Creation)
            creation = item if isinstance(item, Creation) else item.group
            name = f"{_CREATE} {creation.name}" if is_creation else creation.name
            if name not in groups:
                groups[name] = Group(name, tuple(one for one in creation.ranks if one in ranks))
            call = Call(_CREATE, groups[name], 0, len(calls), "started", item, source=item)
            if isinstance(item, Collective):
                _read_collective(rank, call, item)
            counts[call.group, call.channel] += 1
            call.number = counts[call.group, call.channel]
        calls.append(call)
        if not call.channel or call.peer is None or call.peer in ranks:
            steps.append((isinstance(item, (int, Creation)), call))
    return steps


def _read_collective(rank: int, call: Call, item: Collective) -> None:
    call.op, call.peer = item.op, item.peer
    call.terms = (item.op, item.shapes, item.dtype, item.peer, item.reduction)
    way = item.op[:4]
    if way in {"send", "recv"}:
        source, to = (rank, item.peer) if way == "send" else (item.peer, rank)
        call.channel = f"{way} {source}->{to} tag {item.tag}"
        call.terms = ("message", item.shapes, item.dtype)
        if item.peer is None:
            call.channel, call.state = "recv anybody", "finished"


def _evidence(steps: Mapping[int, Steps]) -> Evidence:
    records = {rank: Record(rank) for rank in steps}
    for rank, own in steps.items():
        for call in {id(call): call for _, call in own}.values():
            records[rank].add(call)
    return Evidence(records, len(records))


def _point(call: Call) -> Point:
    return call.group, call.channel, call.number


def _other_end(point: Point) -> Point:
    """Return the other end of a message; of a collective, the same point."""
    group, channel, number = point
    way, _, route = channel.partition(" ")
    other = {"send": f"recv {route}", "recv": f"send {route}"}.get(way, channel)
    return group, other, number


def _run(steps: Mapping[int, Steps], first: Mapping[tuple[Group, str], int]) -> dict[int, int]:
    """Advance each rank until it waits for ever; return its step, and set the states of calls."""
    at = dict.fromkeys(steps, 0)
    arrived: Counter[Point] = Counter()
    waiting: dict[Point, list[int]] = {}
    has_arrived: set[int] = set()

    def is_over(call: Call) -> bool:
        is_free = call.number >= first.get((call.group, call.channel), math.inf)
        return is_free or arrived[_other_end(_point(call))] >= _needed(call)

    ready = sorted(steps, reverse=True)
    while ready:
        rank = ready.pop()
        while at[rank] < len(steps[rank]):
            does_wait, call = steps[rank][at[rank]]
            point = _point(call)
            if id(call) not in has_arrived:
                has_arrived.add(id(call))
                arrived[point] += 1
                if arrived[point] >= _needed(call):
                    ready += waiting.pop(point, ())
            can_wait = does_wait and call.state == "started" and call.op[:4] != "send"
            if can_wait and not is_over(call):
                waiting.setdefault(_other_end(point), []).append(rank)
                break
            at[rank] += 1
    for own in steps.values():
        for _, call in own:
            call.state = "finished" if call.state == "finished" or is_over(call) else "started"
    return at


def _needed(call: Call) -> int:
    return 1 if call.channel else len(call.group.ranks)


def _stuck(
    steps: Mapping[int, Steps], every: Evidence, at: Mapping[int, int]
) -> Iterator[Disagreement]:
    """Yield the first call of each lane that never ends."""
    reached = _evidence({rank: own[: at[rank] + 1] for rank, own in steps.items()})
    seen = set()
    for wait in sorted(
        find_waits(reached), key=lambda wait: next(iter(wait.calls.values())).number
    ):
        call = next(iter(wait.calls.values()))
        if (call.group, call.channel) in seen:
            continue
        seen.add((call.group, call.channel))
        way = call.channel[:4] or call.op
        absent = {}
        for rank in wait.absent:
            absent[rank] = _NEVER.get(way, "never calls it")
            group, channel, number = _other_end(_point(call))
            if len(every.lanes.get((group, channel), {}).get(rank, ())) >= number:
                absent[rank] = f"waits in {steps[rank][at[rank]][1].source.called}"
        if absent and (way != "send" or all(map(_is_never, absent.values()))):
            yield _disagreement(wait.calls, absent)


def _is_never(why: str) -> bool:
    return why.startswith("never")


def _disagreement(
    calls: Mapping[int, Call], absent: Mapping[int, str], differs: str = ""
) -> Disagreement:
    sources = {rank: calls[rank].source for rank in sorted(calls)}
    call = next(iter(calls.values()))
    is_creation = call.op == _CREATE
    group = next(iter(sources.values())) if is_creation else call.source.group
    return Disagreement(group, 0 if is_creation else call.number, sources, absent, differs)


def _describe(calls: Mapping[int, Call]) -> str:
    """Describe calls that differ, those of the fewest ranks first."""
    kinds: dict[object, list[int]] = {}
    for rank in sorted(calls):
        kinds.setdefault(calls[rank].terms, []).append(rank)
    words = []
    for ranks in sorted(kinds.values(), key=lambda ranks: (len(ranks), ranks)):
        source, verb = calls[ranks[0]].source, "call"
        if isinstance(source, Creation):
            source, verb = source.options, "create"
        words.append(f"{_ranks_that(ranks, f'{verb}s', verb)} {source}")
    left = len(words) - _SHOWN_KINDS
    return "; ".join([*words[:_SHOWN_KINDS], *([f"and {left} more calls"] if left > 0 else [])])


def _uneven(by_rank: Mapping[int, Sequence[Call]]) -> Iterator[tuple[dict[int, Call], str]]:
    """Yield each all-to-all in which a size differs between its two ends, with the difference."""
    for together in zip(*by_rank.values(), strict=False):
        if not getattr(together[0].source, "sends", ()):
            continue
        calls = dict(zip(by_rank, together, strict=True))
        ranks = together[0].source.group.ranks
        sizes = {size for call in together for size in (*call.source.sends, *call.source.receives)}
        if len(sizes) < 2 or len(calls) < len(ranks):
            continue
        for (place, sender), (index, receiver) in itertools.product(enumerate(ranks), repeat=2):
            sent = calls[sender].source.sends[index]
            taken = calls[receiver].source.receives[place]
            if sent != taken:
                what = calls[receiver].source
                why = f"rank {sender} sends {sent} to rank {receiver}, which receives {taken}"
                yield calls, f"{what}: {why}"


def _ranks_that(ranks: Sequence[int], one: str, many: str) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} {one}"
    return f"ranks {some_of(ranks, _SHOWN_RANKS)} {many}"
