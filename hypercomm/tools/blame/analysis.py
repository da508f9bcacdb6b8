"""Finds calls that differ, calls that wait, and ranks that leave the common order of calls.

Dumps and simulations are judged by the same functions; they need no file and no text.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import count
from typing import Any

import attrs

from hypercomm.tools.blame.calls import Call, Evidence, Group

_ANSWERS = {"send": "recv", "recv": "send"}


@attrs.frozen(eq=False)
class Wait:
    """A call that has not ended.

    Attributes:
        calls: The call by rank, of the ranks that are in it.
        absent: The members that have not entered it.
    """

    calls: Mapping[int, Call]
    absent: tuple[int, ...]

    @property
    def call(self) -> Call:
        """The call of the first rank."""
        return next(iter(self.calls.values()))


@attrs.frozen(eq=False)
class Difference:
    """The first calls of a group, or of a channel, that do not fit together.

    Attributes:
        calls: The calls by rank; all have the same group and number.
        odd: The ranks that differ from most; empty if there is no majority.
        siblings: The ranks of sibling groups whose calls decided it.
    """

    calls: Mapping[int, Call]
    odd: tuple[int, ...] = ()
    siblings: tuple[int, ...] = ()

    @property
    def call(self) -> Call:
        """The call of the first rank."""
        return next(iter(self.calls.values()))

    @property
    def what(self) -> str:
        """What differs: "order", "shape", "dtype" or "root"."""
        columns = zip(*(call.terms for call in self.calls.values()), strict=False)
        names = ("order", "shape", "dtype", "root")
        return next(
            (name for name, values in zip(names, columns, strict=False) if len(set(values)) > 1),
            "order",
        )


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
        if channel.startswith("recv "):
            ends = {**evidence.lanes.get((group, f"send {channel[5:]}"), {}), **by_rank}
            records = [evidence.ranks[rank] for rank in ends]
            is_known = all(
                record.is_whole and (group, "recv anybody") not in record.lanes
                for record in records
            )
            found.append(_first_difference(evidence, group, ends) if is_known else None)
        elif not channel:
            found.append(_first_difference(evidence, group, by_rank))
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
    usual, most = votes.most_common(1)[0]
    siblings: dict[int, Call] = {}
    if 2 * most <= len(here):
        siblings = {
            rank: call
            for rank, call in _sibling_calls(evidence, group, next(iter(here.values())))
            if call.terms in votes
        }
        votes = votes + Counter(call.terms for call in siblings.values())
        usual, most = votes.most_common(1)[0]
    if 2 * most <= votes.total():
        return Difference(here)
    odd = tuple(rank for rank, call in here.items() if call.terms != usual)
    agreeing = tuple(sorted(rank for rank, call in siblings.items() if call.terms == usual))
    return Difference(here, odd, agreeing)


def _sibling_calls(evidence: Evidence, group: Group, like: Call) -> Iterator[tuple[int, Call]]:
    """Yield the calls of a number in the other groups over the same dims of the same grid."""
    title, own = evidence.title(group), set(group.ranks)
    for (other, channel), by_rank in evidence.lanes.items():
        if channel or like.channel or evidence.title(other) != title:
            continue
        if len(other.ranks) == len(own) and own.isdisjoint(other.ranks):
            for rank, calls in by_rank.items():
                yield from ((rank, call) for call in calls if call.number == like.number)


# ---- waits --------------------------------------------------------------------------------------


def find_waits(evidence: Evidence) -> list[Wait]:
    """Find the first call of each lane that has not ended, with the members that are absent.

    If nobody is absent, members whose device has the call queued only are counted as absent.
    """
    found: list[Wait] = []
    for (group, channel), by_rank in evidence.lanes.items():
        pending: dict[int, dict[int, Call]] = {}
        for rank, calls in by_rank.items():
            call = next((one for one in calls if one.state != "finished"), None)
            if call is not None and channel:
                found += _message_wait(evidence, rank, call)
            elif call is not None:
                pending.setdefault(call.number, {})[rank] = call
        for number, inside in pending.items():
            members = evidence.members(group)
            absent = tuple(rank for rank in members if evidence.last(rank, group) < number)
            found.append(Wait(inside, absent))
    if any(wait.absent for wait in found):
        return found
    return [_on_devices(wait) for wait in found]


def _message_wait(evidence: Evidence, rank: int, call: Call) -> Iterator[Wait]:
    record, other = evidence.ranks[rank], evidence.ranks.get(call.peer)  # type: ignore[arg-type]
    if call.peer == rank or (call.op != "recv" and not record.is_at(call)):
        return  # gloo reports the end of a send only to a rank that waits for it
    if call.peer is None:
        yield Wait({rank: call}, ())
    elif other is None or (record.is_whole and (call.group, "recv anybody") not in other.lanes):
        way, _, route = call.channel.partition(" ")
        answered = evidence.last(call.peer, call.group, f"{_ANSWERS[way]} {route}")
        yield Wait({rank: call}, (call.peer,) if answered < call.number else ())


def _on_devices(wait: Wait) -> Wait:
    started = {rank: call for rank, call in wait.calls.items() if call.state == "started"}
    queued = tuple(rank for rank in wait.calls if rank not in started)
    return Wait(started, queued) if started and queued else wait


def wait_graph(waits: Iterable[Wait]) -> Any:
    """Return a directed graph from ranks over their waits to the ranks that are absent there."""
    import networkx as nx  # comes with torch

    graph = nx.DiGraph()
    for wait in waits:
        if wait.absent:
            graph.add_edges_from((rank, wait) for rank in wait.calls)
            graph.add_edges_from((wait, rank) for rank in wait.absent)
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
    left: list[Deviation] = []
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
        share = most, len(here)
        for rank in [rank for rank in here if here[rank] != token]:
            own, last = calls[rank][place], calls[rank][place - 1] if place else None
            left.append(Deviation(rank, last, own, calls[by][place], by, share, is_extra=False))
            del following[rank]
    for one in left:
        yield one
        place = calls[one.rank].index(one.own)
        rest = zip(tokens[one.rank][place + 1 :], usual[place:], strict=False)
        if all(mine == theirs for mine, theirs in rest):
            yield attrs.evolve(one, is_extra=True)


def _from_a_common_start(
    evidence: Evidence, calls: Mapping[int, list[Call]]
) -> Mapping[int, list[Call]]:
    """Cut the calls where the oldest are lost, so that all ranks start at the same call."""
    cut: list[Call] = []
    for own in calls.values():
        first: dict[Group, Call] = {}
        for call in own:
            if not call.channel:
                first.setdefault(call.group, call)
        cut += [call for call in first.values() if call.number > 1][:1]
    if not cut:
        return calls
    title = Counter(evidence.title(call.group) for call in cut).most_common(1)[0][0]
    number = max(call.number for call in cut if evidence.title(call.group) == title)
    starts = {
        rank: place
        for rank, own in calls.items()
        for place, call in enumerate(own)
        if call.number == number and not call.channel and evidence.title(call.group) == title
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
        concerned = wait.calls if one.is_extra else wait.absent
        if wait.call.group in mine and one.rank in concerned:
            if call.channel:
                return wait.call.op == _ANSWERS.get(call.op)
            return not leaving.issuperset(evidence.members(wait.call.group))
    is_left_out = not one.is_extra and not call.channel
    return is_left_out and any(
        found.call.group in mine and one.rank in found.calls and not leaving.issuperset(found.calls)
        for found in differences
    )
