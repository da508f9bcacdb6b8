"""Who waits for whom: the ranks that have not entered what others are in."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence

import attrs

from hypercomm.blame.records import FROM_ANYBODY, WORLD, Call, Evidence, GroupId, RankRecord
from hypercomm.blame.watched import KEPT


@attrs.frozen(eq=False)
class Wait:
    """A call that does not end, and whom it waits for.

    Attributes:
        rank: Who waits.
        group: In which group.
        call: In which call.
        absent: The members that have not entered it.
    """

    rank: int
    group: GroupId
    call: Call
    absent: tuple[int, ...]


def all_waits(evidence: Evidence) -> list[Wait]:
    """Find every call that has not ended, with those that have not entered it.

    A collective that all have entered has nobody absent. Where some have put it into their
    device's queue only, and nobody else is waited for, those count as absent.

    Args:
        evidence: What the ranks left behind.
    """
    found: list[Wait] = []
    for group, members in evidence.members.items():
        ranks = group.ranks or tuple(member.rank for member in members)
        if evidence.title(group) == WORLD and not group.ranks:
            ranks = tuple(range(evidence.world_size))
        found += _collective_waits(evidence, group, members, ranks)
        found += _message_waits(evidence, group, members)
    if not any(wait.absent for wait in found):
        found = [_queued(evidence, wait) for wait in found]
    return found


def _collective_waits(
    evidence: Evidence, group: GroupId, members: list[RankRecord], ranks: Sequence[int]
) -> Iterator[Wait]:
    pending = {m.rank: call for m in members if (call := m.waits_in(group)) is not None}
    if not pending:
        return
    last = {rank: _last(evidence, group, rank) for rank in ranks}
    absent = {
        number: tuple(rank for rank in ranks if last[rank] < number)
        for number in {call.number for call in pending.values()}
    }
    for rank, call in pending.items():
        yield Wait(rank, group, call, absent[call.number])


def _last(evidence: Evidence, group: GroupId, rank: int) -> float:
    """The last collective that a rank is known to have entered; without end where none tells."""
    record = evidence.ranks.get(rank)
    if record is None:
        return 0
    if not record.is_whole and group not in record.calls:
        return float("inf")  # what it did in this group is no longer in its ring
    return record.last(group)


def _message_waits(evidence: Evidence, group: GroupId, members: list[RankRecord]) -> Iterator[Wait]:
    for member in members:
        for channel, calls in member.messages.get(group, {}).items():
            call = next((each for each in calls if not each.is_finished), None)
            if call is not None and call.op == FROM_ANYBODY and is_in(evidence, member.rank, call):
                yield Wait(member.rank, group, call, ())
            if call is None or call.peer is None or call.peer == member.rank:
                continue
            kind, _, route = channel.partition(" ")
            if kind == "send" and member.place and call.where not in member.place:
                continue  # gloo says of no send that it has ended before somebody waits for it
            other = evidence.ranks.get(call.peer)
            if other is not None and not (other.is_whole and member.is_whole):
                continue
            answer = "send" if kind == "recv" else "recv"
            there = other.messages.get(group, {}).get(f"{answer} {route}", []) if other else []
            if not there and other is not None and _may_have_lost(other, group):
                continue
            absent = () if there and there[-1].number >= call.number else (call.peer,)
            yield Wait(member.rank, group, call, absent)


def is_in(evidence: Evidence, rank: int, call: Call) -> bool:
    """Tell whether a rank is at a message's call: gloo says of none that it ended before a wait().

    Args:
        evidence: What the ranks left behind.
        rank: Whose call it is.
        call: The call.
    """
    place = evidence.ranks[rank].place
    return not place or call.where in place


def _may_have_lost(record: RankRecord, group: GroupId) -> bool:
    """Whether messages of a group may be gone from its ring, or came from anybody."""
    channels = record.messages.get(group, {})
    held = len(record.calls.get(group, ())) + sum(map(len, channels.values()))
    return "recv anybody" in channels or (record.source == "watch" and held >= KEPT)


def _queued(evidence: Evidence, wait: Wait) -> Wait:
    """Count as absent those whose device has not started what that of others has."""
    if wait.call.state != "started" or wait.call.is_message:
        return wait
    queued = []
    for rank in wait.group.ranks:
        record = evidence.ranks.get(rank)
        calls = record.calls.get(wait.group, ()) if record else ()
        queued += [rank for c in calls if c.number == wait.call.number and c.state == "queued"]
    return attrs.evolve(wait, absent=tuple(queued))


Graph = Mapping[int, Sequence[int]]


def graph_of(waits: Iterable[Wait]) -> dict[int, list[int]]:
    """Return whom each rank waits for; each rank once, those that nobody waits for too.

    Example:
        >>> call, tp = Call("all_reduce", 1, 1, "started"), GroupId("tp", (0, 1))
        >>> graph_of([Wait(0, tp, call, (1,))])
        {0: [1], 1: []}
    """
    found: dict[int, dict[int, None]] = {}
    for wait in waits:
        found.setdefault(wait.rank, {}).update(dict.fromkeys(wait.absent))
        for rank in wait.absent:
            found.setdefault(rank, {})
    return {rank: list(others) for rank, others in found.items()}


def ends_of(graph: Graph) -> list[list[int]]:
    """Return the ranks at which all waiting ends: one that waits for nobody, or a circle.

    Args:
        graph: Whom each rank waits for.

    Example:
        >>> ends_of({0: [1], 1: [2], 2: [], 3: [4], 4: [3], 5: []})
        [[2], [3, 4]]
    """
    awaited = {rank for others in graph.values() for rank in others}
    parts = _parts(graph)
    part_of = {rank: number for number, part in enumerate(parts) for rank in part}
    ends = [
        sorted(part)
        for number, part in enumerate(parts)
        if all(part_of[other] == number for rank in part for other in graph[rank])
        and awaited.intersection(part)
    ]
    return sorted(ends)


def _parts(graph: Graph) -> list[list[int]]:
    """The strongly connected parts of a graph, by Tarjan's algorithm without recursion.

    R. Tarjan, Depth-first search and linear graph algorithms, SIAM J. Computing 1 (1972).
    """
    index: dict[int, int] = {}
    low: dict[int, int] = {}
    stack: list[int] = []
    on_stack: set[int] = set()
    parts: list[list[int]] = []
    for root in graph:
        if root in index:
            continue
        path = [(root, iter(graph[root]))]
        index[root] = low[root] = len(index)
        stack.append(root)
        on_stack.add(root)
        while path:
            rank, others = path[-1]
            for other in others:
                if other not in index:
                    index[other] = low[other] = len(index)
                    stack.append(other)
                    on_stack.add(other)
                    path.append((other, iter(graph[other])))
                    break
                if other in on_stack:
                    low[rank] = min(low[rank], index[other])
            else:
                path.pop()
                if path:
                    above = path[-1][0]
                    low[above] = min(low[above], low[rank])
                if low[rank] == index[rank]:
                    part: list[int] = []
                    while not part or part[-1] != rank:
                        part.append(stack.pop())
                        on_stack.discard(part[-1])
                    parts.append(part)
    return parts


def circle_in(graph: Graph, part: Sequence[int]) -> list[int]:
    """Return a shortest circle through the first rank of a part in which each waits.

    Example:
        >>> circle_in({0: [1, 2], 1: [2], 2: [0]}, [0, 1, 2])
        [0, 2]
    """
    inside, first = set(part), part[0]
    came: dict[int, int] = {}
    queue = deque([first])
    while queue:
        rank = queue.popleft()
        for other in graph[rank]:
            if other == first:
                path = [rank]
                while path[-1] != first:
                    path.append(came[path[-1]])
                return path[::-1]
            if other in inside and other not in came:
                came[other] = rank
                queue.append(other)
    return list(part)


def who_waits(graph: Graph, targets: Iterable[int]) -> list[int]:
    """Return who waits for some ranks, directly or for one that does.

    Example:
        >>> who_waits({0: [1], 1: [2], 2: [], 3: []}, [2])
        [0, 1]
    """
    back: dict[int, list[int]] = {}
    for rank, others in graph.items():
        for other in others:
            back.setdefault(other, []).append(rank)
    ends = set(targets)
    seen, queue = set(ends), list(ends)
    while queue:
        for rank in back.get(queue.pop(), ()):
            if rank not in seen:
                seen.add(rank)
                queue.append(rank)
    return sorted(seen - ends)
