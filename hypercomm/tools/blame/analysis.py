"""Finds calls that differ, calls that wait, and ranks that leave the common order of calls.

Dumps and simulations are judged by the same functions; they need no file and no text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import attrs

from hypercomm.tools.blame.calls import FROM_ANYBODY, KEPT, Call, Evidence, Group

_ANSWERS = {"send": "recv", "recv": "send"}


@attrs.frozen(eq=False)
class Wait:
    """A call of a rank that has not ended, and the members that have not entered it."""

    rank: int
    call: Call
    absent: tuple[int, ...]


@attrs.frozen(eq=False)
class Difference:
    """The first calls of a group, or of a channel, that do not fit together.

    Attributes:
        calls: The calls by rank; all have the same group and number.
        odd: The ranks that differ from most; empty if there is no majority.
        what: "order", "shape", "dtype", "root" or "other".
        siblings: The ranks of sibling groups whose calls decided it.
    """

    calls: Mapping[int, Call]
    odd: tuple[int, ...]
    what: str
    siblings: tuple[int, ...] = ()

    @property
    def call(self) -> Call:
        """The call of the first rank."""
        return next(iter(self.calls.values()))


@attrs.frozen(eq=False)
class Deviation:
    """A call in the order across groups that one rank has left out, or makes once more.

    Attributes:
        rank: The rank.
        last: Its last call in the common order; None if it deviates at its first call.
        own: The call that it makes next.
        usual: The call that most ranks make there.
        by: One of these ranks.
        votes: How many ranks make the usual call, and how many were compared.
        is_extra: Whether the rank makes a call once more; else it has left one out.
    """

    rank: int
    last: Call | None
    own: Call
    usual: Call
    by: int
    votes: tuple[int, int]
    is_extra: bool


# ---- differences within one group ---------------------------------------------------------------


def find_differences(evidence: Evidence) -> list[Difference]:
    """Find the first difference of each group and of each channel."""
    found = []
    for (group, channel), by_rank in evidence.lanes.items():
        if not channel:
            found.append(_first_difference(evidence, group, by_rank))
        elif channel.startswith("recv "):
            senders = evidence.lanes.get((group, f"send {channel[5:]}"), {})
            found += [
                _message_difference(evidence, (rank, calls), (sender, sent))
                for rank, calls in by_rank.items()
                for sender, sent in senders.items()
            ]
    return [difference for difference in found if difference is not None]


def _first_difference(
    evidence: Evidence, group: Group, by_rank: Mapping[int, list[Call]]
) -> Difference | None:
    called: dict[int, dict[int, Call]] = {}
    for rank, calls in by_rank.items():
        for call in calls:
            called.setdefault(call.number, {})[rank] = call
    for number in sorted(called):
        here = called[number]
        votes = Counter(call.terms for call in here.values())
        if len(votes) > 1:
            return _decide(evidence, group, here, votes)
    return None


def _decide(
    evidence: Evidence, group: Group, here: Mapping[int, Call], votes: Counter[Any]
) -> Difference:
    """Find the odd ranks by the majority of the group, else by that of its sibling groups."""
    what = _what_differs(list(here.values()))
    usual, most = votes.most_common(1)[0]
    siblings: dict[int, Call] = {}
    if 2 * most <= len(here):
        number = next(iter(here.values())).number
        siblings = {
            rank: call
            for rank, call in _sibling_calls(evidence, group, number)
            if call.terms in votes
        }
        votes = votes + Counter(call.terms for call in siblings.values())
        usual, most = votes.most_common(1)[0]
    if 2 * most <= sum(votes.values()):
        return Difference(here, (), what)
    odd = tuple(rank for rank, call in here.items() if call.terms != usual)
    agreeing = tuple(sorted(rank for rank, call in siblings.items() if call.terms == usual))
    return Difference(here, odd, what, agreeing)


def _sibling_calls(evidence: Evidence, group: Group, number: int) -> Iterator[tuple[int, Call]]:
    """Yield the calls of a number in the other groups over the same dims of the same grid."""
    title, own = evidence.title(group), set(group.ranks)
    for (other, channel), by_rank in evidence.lanes.items():
        if channel or evidence.title(other) != title or len(other.ranks) != len(own):
            continue
        if own.isdisjoint(other.ranks):
            for rank, calls in by_rank.items():
                place = number - calls[0].number
                if 0 <= place < len(calls) and calls[place].number == number:
                    yield rank, calls[place]


def _message_difference(
    evidence: Evidence, receiver: tuple[int, list[Call]], sender: tuple[int, list[Call]]
) -> Difference | None:
    records = [evidence.ranks[rank] for rank, _ in (receiver, sender)]
    group = receiver[1][0].group
    is_known = all(record.is_whole for record in records) and records[0] is not records[1]
    if not is_known or (group, "recv anybody") in records[0].lanes:
        return None
    received = {call.number: call for call in receiver[1]}
    for sent in sender[1]:
        other = received.get(sent.number)
        if other is not None and other.terms != sent.terms:
            calls = {sender[0]: sent, receiver[0]: other}
            return Difference(calls, (), _what_differs([sent, other]))
    return None


def _what_differs(calls: Sequence[Call]) -> str:
    columns = zip(
        ("order", "shape", "dtype", "root"), *(call.terms for call in calls), strict=False
    )
    return next((what for what, *values in columns if len(set(values)) > 1), "other")


# ---- waits --------------------------------------------------------------------------------------


def find_waits(evidence: Evidence) -> list[Wait]:
    """Find the first call of each lane that has not ended, with the members that are absent.

    If nobody is absent, members whose device has the call queued only are counted as absent.
    """
    found: list[Wait] = []
    for (group, channel), by_rank in evidence.lanes.items():
        pending = {
            rank: call
            for rank, calls in by_rank.items()
            if (call := next((one for one in calls if one.state != "finished"), None))
        }
        if channel:
            waits = (_message_wait(evidence, rank, call) for rank, call in pending.items())
            found += [wait for wait in waits if wait is not None]
        elif pending:
            last = {rank: _last(evidence, group, rank) for rank in evidence.members(group)}
            absent = {
                number: tuple(rank for rank in last if last[rank] < number)
                for number in {call.number for call in pending.values()}
            }
            found += [Wait(rank, call, absent[call.number]) for rank, call in pending.items()]
    if any(wait.absent for wait in found):
        return found
    return _with_queued(evidence, found)


def _last(evidence: Evidence, group: Group, rank: int) -> float:
    """Return the number of the last call that a rank has entered; infinite if unknown."""
    record = evidence.ranks.get(rank)
    if record is None:
        return 0
    if (group, "") in record.lanes:
        return record.lanes[group, ""][-1].number
    return 0 if record.is_whole else float("inf")


def _message_wait(evidence: Evidence, rank: int, call: Call) -> Wait | None:
    record = evidence.ranks[rank]
    is_at = record.is_at(call)
    if call.peer is None:
        return Wait(rank, call, ()) if call.op == FROM_ANYBODY and is_at else None
    if call.peer == rank or (call.op == "send" and not is_at):
        return None  # gloo reports the end of a send only to a rank that waits for it
    absent = Wait(rank, call, (call.peer,))
    other = evidence.ranks.get(call.peer)
    if other is None:
        return absent
    if not (other.is_whole and record.is_whole):
        return None
    kind, _, route = call.channel.partition(" ")
    answers = other.lanes.get((call.group, f"{_ANSWERS[kind]} {route}"))
    if answers is not None:
        return attrs.evolve(absent, absent=()) if answers[-1].number >= call.number else absent
    held = [len(calls) for (group, _), calls in other.lanes.items() if group == call.group]
    is_lost = other.source == "watch" and sum(held) >= KEPT
    return None if is_lost or (call.group, "recv anybody") in other.lanes else absent


def _with_queued(evidence: Evidence, waits: Iterable[Wait]) -> list[Wait]:
    queued: dict[tuple[Group, int], list[int]] = {}
    for (group, channel), by_rank in evidence.lanes.items():
        for rank, calls in by_rank.items() if not channel else ():
            for call in calls:
                if call.state == "queued":
                    queued.setdefault((group, call.number), []).append(rank)
    return [
        attrs.evolve(wait, absent=tuple(queued.get((wait.call.group, wait.call.number), ())))
        if wait.call.state == "started" and not wait.call.channel
        else wait
        for wait in waits
    ]


def wait_graph(waits: Iterable[Wait]) -> Any:
    """Return a directed graph from ranks over their calls to the ranks that are absent there."""
    import networkx as nx  # comes with torch

    graph = nx.DiGraph()
    for wait in waits:
        if wait.absent:
            place = (wait.call.group, wait.call.channel, wait.call.number)
            if place not in graph:
                graph.add_edges_from((place, rank) for rank in wait.absent)
            graph.add_edge(wait.rank, place, wait=wait)
    return graph


# ---- the order across the groups of one rank ----------------------------------------------------


def find_deviations(
    evidence: Evidence, waits: Sequence[Wait], differences: Sequence[Difference]
) -> dict[int, Deviation]:
    """Find ranks that leave the common order, and for whom others wait because of it.

    Ranks with groups over the same dims run the same program, so most of them make their calls
    in one order: all_reduce over tp, all_reduce over dp, and so on. A rank that leaves this
    order is reported only if a group of the call in question waits or has a difference, and if
    not all compared members of that group leave it together.

    Args:
        evidence: The calls.
        waits: The calls that have not ended.
        differences: The calls that differ.
    """
    for with_messages in (False, True):  # messages differ between the stages of a pipeline
        classes: dict[frozenset[str], dict[int, list[Call]]] = {}
        for record in evidence.ranks.values():
            lanes = (c for (_, channel), c in record.lanes.items() if with_messages or not channel)
            calls = sorted((call for lane in lanes for call in lane), key=lambda call: call.order)
            titles = frozenset(map(evidence.title, record.titles))
            classes.setdefault(titles, {})[record.rank] = calls
        every = [one for ranks in classes.values() for one in _compare_orders(evidence, ranks)]
        if with_messages:
            every = [one for one in every if one.usual.channel and not one.is_extra]
        found = [one for one in every if _matters(evidence, one, every, waits, differences)]
        if found:  # a call that is left out explains more than one that is made twice
            return {one.rank: one for one in sorted(found, key=lambda one: not one.is_extra)}
    return {}


def _compare_orders(evidence: Evidence, calls: Mapping[int, list[Call]]) -> Iterator[Deviation]:
    calls = _from_a_common_start(evidence, calls)
    tokens = {
        rank: [(evidence.title(call.group), call.op) for call in own] for rank, own in calls.items()
    }
    following = dict(tokens)
    left: list[tuple[int, int, int, tuple[int, int]]] = []
    usual: list[tuple[str, str]] = []
    for place in count():
        here = {rank: own[place] for rank, own in following.items() if place < len(own)}
        votes = Counter(here.values())
        if not votes:
            break
        token, most = votes.most_common(1)[0]
        if 2 * most <= len(here):
            break
        usual.append(token)
        by = next(rank for rank in here if here[rank] == token)
        for rank in here if len(votes) > 1 else ():
            if here[rank] != token:
                left.append((rank, place, by, (most, len(here))))
                del following[rank]
    for rank, place, by, share in left:
        own, last = calls[rank], calls[rank][place - 1] if place else None
        left_out = Deviation(rank, last, own[place], calls[by][place], by, share, is_extra=False)
        yield left_out
        rest = zip(tokens[rank][place + 1 :], usual[place:], strict=False)
        if all(mine == theirs for mine, theirs in rest):
            yield attrs.evolve(left_out, is_extra=True)


def _from_a_common_start(
    evidence: Evidence, calls: Mapping[int, list[Call]]
) -> Mapping[int, list[Call]]:
    """Cut the calls where the oldest are lost, so that all ranks start at the same call.

    A watch keeps the last calls of each group, the flight recorder those of all groups together.
    """
    pick = max if evidence.source == "watch" else min
    cut: dict[int, Call] = {}
    for rank, own in calls.items():
        first: dict[Group, Call] = {}
        for call in own:
            first.setdefault(call.group, call)
        lost = [call for call in first.values() if call.number > 1 and not call.channel]
        if lost:
            cut[rank] = pick(lost, key=lambda call: call.order)
    if not cut:
        return calls
    titles = Counter(evidence.title(call.group) for call in cut.values())
    title = titles.most_common(1)[0][0]
    number = max(c.number for c in cut.values() if evidence.title(c.group) == title)
    starts = {
        rank: place
        for rank, own in calls.items()
        for place, call in enumerate(own)
        if call.number == number and not call.channel and evidence.title(call.group) == title
        if rank not in cut or call.order >= cut[rank].order
    }
    return {rank: calls[rank][place:] for rank, place in starts.items()}


def _matters(
    evidence: Evidence,
    one: Deviation,
    every: Iterable[Deviation],
    waits: Iterable[Wait],
    differences: Iterable[Difference],
) -> bool:
    call = one.own if one.is_extra else one.usual
    title = evidence.title(call.group)
    mine = {g for g, name in evidence.ranks[one.rank].titles.items() if name == title}
    leaving = {o.rank for o in every if (o.usual.op, o.own.op) == (one.usual.op, one.own.op)}
    for wait in waits:
        if wait.call.group not in mine:
            continue
        if call.channel:
            if one.rank in wait.absent and wait.call.op == _ANSWERS.get(call.op):
                return True
        elif (wait.rank == one.rank) if one.is_extra else (one.rank in wait.absent):
            return not leaving.issuperset(evidence.members(wait.call.group))
    is_left_out = not one.is_extra and not call.channel
    return is_left_out and any(
        found.call.group in mine and one.rank in found.calls and not leaving.issuperset(found.calls)
        for found in differences
    )
