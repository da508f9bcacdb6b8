"""Finds the calls of the ranks of a simulated job that differ, and those that would never end."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

import attrs

from hypercomm.layout.text import some_of
from hypercomm.testing.simulation.records import CREATE, Collective, Creation, Step
from hypercomm.tools.blame.analysis import find_differences, find_waits
from hypercomm.tools.blame.calls import Call, Evidence, Group, Record

_NEVER = {CREATE: "never creates it", "send": "never receives it", "recv": "never sends it"}
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


# The steps of each rank.
Programs = Mapping[int, Sequence[Step]]

# A group, a channel and a number: the calls that belong together.
Point = tuple[Group, str, int]


def judge(programs: Programs) -> tuple[Disagreement, ...]:
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
    known = {None, *programs}  # messages from and to ranks that are not simulated are left out
    steps = {}
    for rank, own in programs.items():
        steps[rank] = [step for step in own if not step[1].channel or step[1].peer in known]
    evidence = _evidence(steps)
    different = find_differences(evidence)
    every = [call for calls in different for call in calls.values()]
    first = {(call.group, call.channel): call.number for call in every}
    at = _advance(steps, first)
    stuck = list(_stuck(steps, evidence, at))
    stuck.sort(key=lambda one: (not any(map(_is_never, one.absent.values())), one.waiting))
    return (*(_disagreement(calls, {}, _describe(calls)) for calls in different), *stuck)


def _evidence(steps: Programs) -> Evidence:
    records = {rank: Record(rank) for rank in steps}
    for rank, own in steps.items():
        for does_wait, call in own:
            if not does_wait:
                records[rank].add(call)
    return Evidence(records, len(records))


def _other_end(call: Call) -> Point:
    """Return the other end of a message; of a collective, the same point."""
    way, _, route = call.channel.partition(" ")
    other = f"{_OTHER_WAYS[way]} {route}" if way in _OTHER_WAYS else call.channel
    return call.group, other, call.number


def _needed(call: Call) -> int:
    return 1 if call.channel else len(call.group.ranks)


def _advance(steps: Programs, first: Mapping[tuple[Group, str], int]) -> dict[int, int]:
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
                point = (call.group, call.channel, call.number)
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


def _stuck(steps: Programs, every: Evidence, at: Mapping[int, int]) -> Iterator[Disagreement]:
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
    if call.op == CREATE:
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


def _ranks_that(ranks: Sequence[int], one: str, many: str) -> str:
    return f"rank {ranks[0]} {one}" if len(ranks) == 1 else f"ranks {some_of(ranks, 4)} {many}"
