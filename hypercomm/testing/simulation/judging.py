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
from hypercomm.tools.blame.calls import FROM_ANYBODY, Call, Evidence, Group, Record

_CREATE = "create"
_NEVER = {_CREATE: "never creates it", "send": "never receives it", "recv": "never sends it"}
_OTHER_WAYS = {"send": "recv", "recv": "send"}


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
"""What a rank does: it enters a call (False), or waits until the call has ended (True)."""

Point = tuple[Group, str, int]
"""A group, a channel and a number: the calls that belong together."""


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
    steps = {rank: _read(rank, own, groups, programs) for rank, own in programs.items()}
    evidence = _evidence(steps)
    different = [(calls, _describe(calls)) for calls in find_differences(evidence)]
    known = {call.group for calls, _ in different for call in calls.values() if not call.channel}
    for (group, channel), by_rank in evidence.lanes.items():
        if not channel and group not in known:
            different += itertools.islice(_uneven(by_rank), 1)
    first = {
        (one.group, one.channel): one.number for calls, _ in different for one in calls.values()
    }
    at = _advance(steps, first)
    stuck = list(_stuck(steps, evidence, at))
    stuck.sort(key=lambda one: (not any(map(_is_never, one.absent.values())), one.waiting))
    return (*(_disagreement(calls, {}, differs) for calls, differs in different), *stuck)


def _read(
    rank: int, program: Sequence[Step], groups: dict[str, Group], simulated: Collection[int]
) -> Steps:
    """Return the steps of a rank, without messages from and to ranks that are not simulated."""
    counts: Counter[tuple[Group, str]] = Counter()
    calls: list[Call] = []
    steps: Steps = []
    for item in program:
        if isinstance(item, int):
            calls.append(calls[item])
        else:
            creation = item if isinstance(item, Creation) else item.group
            name = creation.name if creation is not item else f"{_CREATE} {creation.name}"
            if name not in groups:
                members = tuple(one for one in creation.ranks if one in simulated)
                groups[name] = Group(name, members)
            call = Call(_CREATE, groups[name], 0, len(calls), "started", item, source=item)
            if isinstance(item, Collective):
                _read_collective(rank, call, item)
            counts[call.group, call.channel] += 1
            call.number = counts[call.group, call.channel]
            calls.append(call)
        call = calls[-1]
        if not call.channel or call.peer is None or call.peer in simulated:
            steps += [(False, call)] if not isinstance(item, int) else []
            steps += [(True, call)] if not isinstance(item, Collective) else []
    return steps


def _read_collective(rank: int, call: Call, item: Collective) -> None:
    call.op, call.peer = item.op, item.peer
    call.terms = (item.op, item.shapes, item.dtype, item.peer, item.reduction)
    way = item.op[:4]
    if way in _OTHER_WAYS:
        source, to = (rank, item.peer) if way == "send" else (item.peer, rank)
        call.channel = f"{way} {source}->{to} tag {item.tag}"
        call.terms = ("message", item.shapes, item.dtype)
        if item.peer is None:
            call.channel, call.state = FROM_ANYBODY, "finished"


def _evidence(steps: Mapping[int, Steps]) -> Evidence:
    records = {rank: Record(rank) for rank in steps}
    for rank, own in steps.items():
        for does_wait, call in own:
            if not does_wait:
                records[rank].add(call)
    return Evidence(records, len(records))


def _point(call: Call) -> Point:
    return call.group, call.channel, call.number


def _other_end(call: Call) -> Point:
    """Return the other end of a message; of a collective, the same point."""
    way, _, route = call.channel.partition(" ")
    other = f"{_OTHER_WAYS[way]} {route}" if way in _OTHER_WAYS else call.channel
    return call.group, other, call.number


def _needed(call: Call) -> int:
    return 1 if call.channel else len(call.group.ranks)


def _advance(steps: Mapping[int, Steps], first: Mapping[tuple[Group, str], int]) -> dict[int, int]:
    """Return the step in which each rank stops for ever, and mark the calls that have ended."""
    at = dict.fromkeys(steps, 0)
    entered: Counter[Point] = Counter()
    waiting: dict[Point, list[int]] = {}

    def has_ended(call: Call) -> bool:
        is_free = call.number >= first.get((call.group, call.channel), math.inf)
        return is_free or entered[_other_end(call)] >= _needed(call)

    ready = sorted(steps, reverse=True)
    while ready:
        rank = ready.pop()
        while at[rank] < len(steps[rank]):
            does_wait, call = steps[rank][at[rank]]
            if not does_wait:
                point = _point(call)
                entered[point] += 1
                if entered[point] >= _needed(call):
                    ready += waiting.pop(point, ())
            elif call.state != "finished" and call.op[:4] != "send" and not has_ended(call):
                waiting.setdefault(_other_end(call), []).append(rank)
                break
            at[rank] += 1
    for own in steps.values():
        for does_wait, call in own:
            if not does_wait and has_ended(call):
                call.state = "finished"
    return at


def _stuck(
    steps: Mapping[int, Steps], every: Evidence, at: Mapping[int, int]
) -> Iterator[Disagreement]:
    """Yield the first call of each lane that never ends."""
    reached = _evidence({rank: own[: at[rank]] for rank, own in steps.items()})
    seen = set()
    for wait in sorted(find_waits(reached), key=lambda wait: wait.call.number):
        call = wait.call
        if (call.group, call.channel) in seen:
            continue
        seen.add((call.group, call.channel))
        absent = {}
        for rank in wait.absent:
            absent[rank] = _NEVER.get(call.channel[:4] or call.op, "never calls it")
            group, channel, number = _other_end(call)
            if len(every.lanes.get((group, channel), {}).get(rank, ())) >= number:
                absent[rank] = f"waits in {steps[rank][at[rank]][1].source.called}"
        is_send = call.channel.startswith("send")
        if absent and (not is_send or all(map(_is_never, absent.values()))):
            yield _disagreement(wait.calls, absent)


def _is_never(why: str) -> bool:
    return why.startswith("never")


def _disagreement(
    calls: Mapping[int, Call], absent: Mapping[int, str], differs: str = ""
) -> Disagreement:
    sources = {rank: calls[rank].source for rank in sorted(calls)}
    call = next(iter(calls.values()))
    if call.op == _CREATE:
        return Disagreement(next(iter(sources.values())), 0, sources, absent, differs)
    return Disagreement(call.source.group, call.number, sources, absent, differs)


def _describe(calls: Mapping[int, Call]) -> str:
    """Describe calls that differ, those of the fewest ranks first."""
    kinds: dict[object, list[int]] = {}
    for rank in sorted(calls):
        kinds.setdefault(calls[rank].terms, []).append(rank)
    texts = []
    for ranks in sorted(kinds.values(), key=lambda ranks: (len(ranks), ranks)):
        made = calls[ranks[0]].source
        if isinstance(made, Creation):
            who = _ranks_that(ranks, "creates", "create")
            texts.append(f"{who} {made} with {made.backend} and a timeout of {made.timeout}")
        else:
            texts.append(f"{_ranks_that(ranks, 'calls', 'call')} {made}")
    more = [f"and {len(texts) - 3} more calls"] if len(texts) > 3 else []
    return "; ".join([*texts[:3], *more])


def _uneven(by_rank: Mapping[int, Sequence[Call]]) -> Iterator[tuple[dict[int, Call], str]]:
    """Yield each all-to-all in which a size differs between its two ends, with the difference."""
    for together in zip(*by_rank.values(), strict=False):
        calls, made = dict(zip(by_rank, together, strict=True)), together[0].source
        if not getattr(made, "sends", ()) or len(calls) < len(made.group.ranks):
            continue
        pairs = itertools.product(enumerate(made.group.ranks), repeat=2)
        for (place, sender), (index, receiver) in pairs:
            sent = calls[sender].source.sends[index]
            taken = calls[receiver].source.receives[place]
            if sent != taken:
                why = f"rank {sender} sends {sent} to rank {receiver}, which receives {taken}"
                yield calls, f"{calls[receiver].source}: {why}"


def _ranks_that(ranks: Sequence[int], one: str, many: str) -> str:
    return f"rank {ranks[0]} {one}" if len(ranks) == 1 else f"ranks {some_of(ranks, 4)} {many}"
