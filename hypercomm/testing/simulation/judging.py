"""Whether what the ranks of a simulated job create and call fits together."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import attrs

from hypercomm.layout.text import some_of
from hypercomm.testing.simulation.records import (
    BEGIN,
    CREATE,
    WAIT,
    Collective,
    Creation,
    Step,
)
from hypercomm.tools.blame.analysis import Wait, find_differences, find_waits
from hypercomm.tools.blame.calls import Call, Evidence, Group, Lane, Record

_SHOWN_RANKS, _SHOWN_KINDS = 4, 3

_NEVER = {CREATE: "never creates it", "send": "never receives it", "recv": "never sends it"}


@attrs.frozen
class Disagreement:
    """A process group whose creation would not end; str() describes it.

    Attributes:
        creation: The group, as the first of its ranks creates it.
        waiting: The ranks that wait in it, or that create it differently.
        absent: Why each other member is missing, by rank.
        differs: How the ranks create it differently; "" if they do not.
    """

    creation: Creation
    waiting: tuple[int, ...]
    absent: Mapping[int, str]
    differs: str = ""

    def __str__(self) -> str:
        return f"{self.creation}: {self.differs or _who_waits(self.waiting, self.absent)}"


@attrs.frozen
class CallDisagreement:
    """A collective that would not end, or a message without its other end; str() describes it.

    Attributes:
        group: The process group.
        number: The number of the call: among the collectives of this group on each rank, or among
            the messages from one rank to another, from 1.
        calls: The calls by rank.
        absent: Why each other member is missing, by rank.
        differs: How the calls differ; "" if they do not.
    """

    group: Creation
    number: int
    calls: Mapping[int, Collective]
    absent: Mapping[int, str]
    differs: str = ""

    @property
    def waiting(self) -> tuple[int, ...]:
        """The ranks that called."""
        return tuple(sorted(self.calls))

    def __str__(self) -> str:
        what = f"call {self.number} on {self.group}"
        if self.differs:
            return f"{what}: {self.differs}"
        call = self.calls[self.waiting[0]]
        return f"{what}, {call}: {_who_waits(self.waiting, self.absent)}"


Steps = list[tuple[str, Call]]
"""The kinds and calls of one rank; a wait for a call has the call again."""


def judge(
    programs: Mapping[int, Sequence[Step]],
) -> tuple[Disagreement | CallDisagreement, ...]:
    """Find the calls that differ, and those that would never end.

    A rank waits in a creation, in a collective until all members have called it, in a receive
    until it is sent, and for an asynchronous call where it waits for the work. A send never waits.
    After the first calls of a group that differ, no rank waits in that group: what comes later
    there is a consequence.

    Args:
        programs: The steps of each simulated rank; the calls of other ranks are taken to be right.

    Returns:
        The differences, then the waits; first those for a call that a member never makes.
    """
    groups: dict[str, Group] = {}
    steps = {rank: _as_calls(rank, own, groups, programs) for rank, own in programs.items()}
    every = _evidence(steps)
    differing = [each.calls for each in find_differences(every)]
    known = {call.group for calls in differing for call in calls.values() if not call.channel}
    for (group, channel), by_rank in every.lanes.items():
        if not channel and group not in known:
            differing += _uneven(group, by_rank)
    first = {
        (call.group, call.channel): call.number for calls in differing for call in calls.values()
    }
    at = _run(steps, first)
    reached = every
    if any(at[rank] < len(own) for rank, own in steps.items()):
        reached = _evidence({rank: own[: at[rank] + 1] for rank, own in steps.items()})
    stuck = list(_stuck(find_waits(reached), every, steps, at))
    stuck.sort(key=lambda one: (not any(map(_is_never, one.absent.values())), one.waiting))
    return (*(_disagreement(calls, {}, _describe(calls)) for calls in differing), *stuck)


def _as_calls(
    rank: int, program: Sequence[Step], groups: dict[str, Group], ranks: Collection[int]
) -> Steps:
    """Convert steps to calls, without messages from and to ranks that are not simulated."""
    counts: Counter[Lane] = Counter()
    calls: list[Call] = []
    for kind, item in program:
        if kind == WAIT:
            calls.append(calls[item])
            continue
        creation = item if kind == CREATE else item.group
        name = f"{kind} {creation.name}" if kind == CREATE else creation.name
        group = groups.get(name)
        if group is None:
            members = tuple(one for one in creation.ranks if one in ranks)
            group = groups[name] = Group(name, members)
        call = Call(CREATE, group, 0, len(calls), "started", (CREATE, *item), source=item)
        if kind != CREATE:
            _read_collective(rank, call, item)
        counts[group, call.channel] += 1
        call.number = counts[group, call.channel]
        calls.append(call)
    return [
        (kind, call)
        for (kind, _), call in zip(program, calls, strict=True)
        if not call.channel or call.peer is None or call.peer in ranks
    ]


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
        for kind, call in own:
            if kind != WAIT:
                records[rank].add(call)
    return Evidence(records, len(records))


def _run(steps: Mapping[int, Steps], first: Mapping[Lane, int]) -> dict[int, int]:
    """Advance each rank until it waits for ever; return its step, and set the states of calls."""
    at = dict.fromkeys(steps, 0)
    arrived: Counter[tuple[Lane, int]] = Counter()
    waiting: dict[tuple[Lane, int], list[int]] = {}
    has_arrived: set[int] = set()

    def is_over(call: Call) -> bool:
        lane = (call.group, call.channel)
        needed = 1 if call.channel else len(call.group.ranks)
        is_free = call.number >= first.get(lane, math.inf)
        return is_free or arrived[_answer(lane), call.number] >= needed

    ready = sorted(steps, reverse=True)
    while ready:
        rank = ready.pop()
        while at[rank] < len(steps[rank]):
            kind, call = steps[rank][at[rank]]
            point = (call.group, call.channel), call.number
            if id(call) not in has_arrived:
                has_arrived.add(id(call))
                arrived[point] += 1
                if arrived[point] >= (1 if call.channel else len(call.group.ranks)):
                    ready += waiting.pop(point, ())
            does_wait = kind != BEGIN and call.state == "started" and call.op[:4] != "send"
            if does_wait and not is_over(call):
                waiting.setdefault((_answer(point[0]), call.number), []).append(rank)
                break
            at[rank] += 1
    for own in steps.values():
        for _, call in own:
            call.state = "finished" if call.state == "finished" or is_over(call) else "started"
    return at


def _answer(lane: Lane) -> Lane:
    """Return the lane of the other end of a message; of a collective, the same lane."""
    group, channel = lane
    way, _, route = channel.partition(" ")
    return group, {"send": f"recv {route}", "recv": f"send {route}"}.get(way, channel)


def _stuck(
    waits: Iterable[Wait], every: Evidence, steps: Mapping[int, Steps], at: Mapping[int, int]
) -> Iterator[Disagreement | CallDisagreement]:
    """Yield the first call of each lane that never ends."""
    first: dict[Lane, Wait] = {}
    for wait in waits:
        known = first.setdefault((wait.call.group, wait.call.channel), wait)
        if wait.call.number < known.call.number:
            first[wait.call.group, wait.call.channel] = wait
    for lane, wait in first.items():
        calls, number = wait.calls, wait.call.number
        absent = {}
        way = lane[1][:4] or wait.call.op
        for rank in wait.absent:
            absent[rank] = _NEVER.get(way, "never calls it")
            if len(every.lanes.get(_answer(lane), {}).get(rank, ())) >= number:
                source = steps[rank][at[rank]][1].source
                where = source.called if isinstance(source, Creation) else source.where
                absent[rank] = f"waits in {where}"
        if absent and (way != "send" or all(map(_is_never, absent.values()))):
            yield _disagreement(calls, absent)


def _is_never(why: str) -> bool:
    return why.startswith("never")


def _disagreement(
    calls: Mapping[int, Call], absent: Mapping[int, str], differs: str = ""
) -> Disagreement | CallDisagreement:
    first = next(iter(calls.values()))
    if first.op == CREATE:
        return Disagreement(first.source, tuple(sorted(calls)), absent, differs)
    sources = {rank: call.source for rank, call in sorted(calls.items())}
    return CallDisagreement(first.source.group, first.number, sources, absent, differs)


def _describe(calls: Mapping[int, Call]) -> str:
    kinds: dict[tuple[object, ...], list[int]] = {}
    for rank in sorted(calls):
        kinds.setdefault(calls[rank].terms, []).append(rank)
    if len(kinds) == 1:
        return _describe_uneven(calls)
    odd, *others = sorted(kinds.values(), key=lambda ranks: (len(ranks), ranks))
    one, other = calls[odd[0]].source, calls[others[0][0]].source
    if isinstance(one, Creation):
        rank, other_rank = sorted([odd[0], others[0][0]])
        one, other = calls[rank].source, calls[other_rank].source
        fields = "; ".join(
            f"{field} {mine!r} on rank {rank}, {theirs!r} on rank {other_rank}"
            for field, mine, theirs in zip(Creation._fields, one, other, strict=True)
            if mine != theirs
        )
        return f"the ranks create it differently: {fields}"
    words = [
        f"{_ranks_that(ranks, 'calls', 'call')} {calls[ranks[0]].source}"
        for ranks in [odd, *others][:_SHOWN_KINDS]
    ]
    left = len(kinds) - len(words)
    return "; ".join([*words, *([f"and {left} more calls"] if left else [])])


def _uneven(group: Group, by_rank: Mapping[int, Sequence[Call]]) -> list[dict[int, Call]]:
    """Return the first all-to-all of a group in which a size differs between its two ends."""
    for number in range(min(map(len, by_rank.values()))):
        calls = {rank: by_rank[rank][number] for rank in group.ranks if rank in by_rank}
        source = next(iter(calls.values())).source
        is_whole = len(calls) == len(
            source.ranks if isinstance(source, Creation) else source.group.ranks
        )
        if is_whole and getattr(source, "sends", None) is not None and _describe_uneven(calls):
            return [calls]
    return []


def _describe_uneven(calls: Mapping[int, Call]) -> str:
    ranks = next(iter(calls.values())).source.group.ranks
    if len({(calls[rank].source.sends, calls[rank].source.receives) for rank in ranks}) == 1:
        only = calls[ranks[0]].source
        if len({*only.sends, *only.receives}) == 1:
            return ""
    table = zip(*(calls[rank].source.sends for rank in ranks), strict=True)
    for taker, sent in zip(ranks, table, strict=True):
        taken = calls[taker].source.receives
        for rank, one, other in zip(ranks, sent, taken, strict=True):
            if one != other:
                sizes = [size if isinstance(size, int) else list(size) for size in (one, other)]
                return (
                    f"{calls[taker].source}: rank {rank} sends {sizes[0]} to rank {taker}, which "
                    f"takes {sizes[1]}"
                )
    return ""


def _ranks_that(ranks: Sequence[int], one: str, many: str) -> str:
    if len(ranks) == 1:
        return f"rank {ranks[0]} {one}"
    return f"ranks {some_of(ranks, _SHOWN_RANKS)} {many}"


def _who_waits(waiting: Sequence[int], absent: Mapping[int, str]) -> str:
    rank, why = next(iter(absent.items()))
    more = f", and for {len(absent) - 1} more" if len(absent) > 1 else ""
    return f"{_ranks_that(waiting, 'waits', 'wait')} for rank {rank}, which {why}{more}"
