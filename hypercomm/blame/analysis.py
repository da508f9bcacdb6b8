"""The analysis of recorded calls: differences, waits, and ranks that leave the common order.

The same functions analyse dumps and simulations. They read no files.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

import attrs

from hypercomm.blame.evidence import Evidence, LoggedCall, LoggedGroup
from hypercomm.layout.text import format_ranks

_T = TypeVar("_T")

ANSWERS = {"send": "recv", "recv": "send"}


@attrs.frozen(eq=False)
class AwaitedRanks:
    """A call that has not ended.

    Attributes:
        calls: Maps each rank that has entered the call to its call.
        absent: The ranks of the group that have not entered the call.
    """

    calls: Mapping[int, LoggedCall]
    absent: tuple[int, ...]

    @property
    def call(self) -> LoggedCall:
        """The call of the first rank."""
        return next(iter(self.calls.values()))

    def to_row(self) -> tuple[str, ...]:
        """Return the wait as a row of the table with the titles `Verdict.COLUMNS`."""
        group = self.call.group
        return (
            group.title,
            format_ranks(group.ranks),
            f"{self.call.op} {self.call.number}",
            format_ranks(sorted(self.calls)),
            format_ranks(self.absent) or "-",
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the wait as a dict for JSON."""
        call = self.call
        return {
            "group": call.group.title,
            "members": call.group.ranks,
            "waiting": sorted(self.calls),
            "absent": self.absent,
            "op": call.op,
            "number": call.number,
            "where": call.where,
        }


@attrs.frozen(eq=False)
class Deviation:
    """A call with which one rank leaves the common order of calls.

    Attributes:
        rank: The rank.
        last: The rank's last call in the common order, or None if its first call deviates.
        own: The call that the rank makes next.
        usual: The call that most ranks make instead.
        by: The ranks that make the usual call.
    """

    rank: int
    last: LoggedCall | None
    own: LoggedCall
    usual: LoggedCall
    by: set[int]


def _majority(values: Iterable[_T]) -> _T | None:
    """Return the value that makes up more than half of `values`, or None if there is none."""
    votes = Counter(values)
    usual, most = votes.most_common(1)[0] if votes else (None, 0)
    return usual if 2 * most > votes.total() else None


# ---- differences within one group ---------------------------------------------------------------


def find_differences(evidence: Evidence) -> list[dict[int, LoggedCall]]:
    """For each group and channel, map ranks to their calls at the first position that differs."""
    found: list[dict[int, LoggedCall]] = []
    for (group, channel), own in evidence.lanes.items():
        ends = own
        if channel.startswith("recv "):
            ends = {**evidence.lanes.get((group, f"send {channel[5:]}"), {}), **own}
        if channel and not all(evidence.has_channels(rank, group) for rank in ends):
            continue
        called: dict[int, dict[int, LoggedCall]] = {}
        for rank, calls in ends.items():
            for call in calls:
                called.setdefault(call.number, {})[rank] = call
        in_order = (called[number] for number in sorted(called))
        differing = (here for here in in_order if len({c.terms for c in here.values()}) > 1)
        found += itertools.islice(differing, 1)
    return found


def _find_odd(evidence: Evidence, calls: Mapping[int, LoggedCall]) -> tuple[list[int], list[int]]:
    """Return the ranks that differ from the majority, and outside ranks that decided the majority.

    If the calls in the group have no majority, calls in other groups over the same dims count, too.
    """
    terms = [call.terms for call in calls.values()]
    siblings = []
    usual = _majority(terms)
    if usual is None:
        siblings = [one for one in _sibling_calls(evidence, calls) if one[1].terms in terms]
        usual = _majority([*terms, *(call.terms for _, call in siblings)])
    odd = [] if usual is None else [r for r, call in calls.items() if call.terms != usual]
    return odd, sorted(rank for rank, call in siblings if call.terms == usual)


def _sibling_calls(
    evidence: Evidence, calls: Mapping[int, LoggedCall]
) -> Iterator[tuple[int, LoggedCall]]:
    """Yield the calls with the same `number` in the other groups over the same dims."""
    like = next(iter(calls.values()))
    members = {*like.group.ranks}
    for (group, channel), by_rank in evidence.lanes.items():
        is_sibling = group.title == like.group.title and not members & {*group.ranks}
        if is_sibling and channel == like.channel == "":
            for rank, own in by_rank.items():
                yield from ((rank, call) for call in own if call.number == like.number)


# ---- waits --------------------------------------------------------------------------------------


def find_waits(evidence: Evidence) -> list[AwaitedRanks]:
    """Find each rank's first unfinished call in each lane, and the ranks absent from that call.

    If no rank is absent from any of these calls, ranks whose device has only queued a call count as
    absent.
    """
    found: list[AwaitedRanks] = []
    for (group, channel), by_rank in evidence.lanes.items():
        pending: dict[int, dict[int, LoggedCall]] = {}
        for rank, calls in by_rank.items():
            call = next((one for one in calls if one.state != "finished"), None)
            if call is not None and channel:
                found += _message_wait(evidence, rank, call)
            elif call is not None:
                pending.setdefault(call.number, {})[rank] = call
        for number, inside in pending.items():
            absent = [rank for rank in group.ranks if evidence.last(rank, group) < number]
            found.append(AwaitedRanks(inside, tuple(absent)))
    if not any(wait.absent for wait in found):
        for place, wait in enumerate(found):
            started = {rank: call for rank, call in wait.calls.items() if call.state == "started"}
            queued = tuple(rank for rank in wait.calls if rank not in started)
            found[place] = AwaitedRanks(started, queued) if started and queued else wait
    return found


def _message_wait(evidence: Evidence, rank: int, call: LoggedCall) -> Iterator[AwaitedRanks]:
    peer = call.peer
    group = call.group
    way, _, route = call.channel.partition(" ")
    if peer == rank or (way == "send" and not evidence.ranks[rank].is_at(call)):
        return  # gloo reports the end of a send only if the rank waits for it
    absent: tuple[int, ...] = ()
    if peer is not None and all(evidence.has_channels(one, group) for one in (rank, peer)):
        answered = evidence.last(peer, group, f"{ANSWERS[way]} {route}")
        absent = (peer,) if answered < call.number else ()
    yield AwaitedRanks({rank: call}, absent)


def _wait_graph(evidence: Evidence, waits: Iterable[AwaitedRanks]) -> Any:
    """Return a directed graph from ranks to their waits, and from waits to absent ranks."""
    import networkx as nx  # a dependency of torch

    graph = nx.DiGraph()
    for wait in waits:
        for rank, call in wait.calls.items():
            is_inside = not call.channel or evidence.ranks[rank].is_at(call)
            if wait.absent or (is_inside and call.state != "queued"):
                graph.add_edge(rank, wait)
        graph.add_edges_from((wait, rank) for rank in wait.absent)
    return graph


def _waiting(graph: Any, ranks: Iterable[int]) -> tuple[int, ...]:
    """Return the ranks that wait for any of `ranks`, directly or through other ranks."""
    found: set[Any] = {rank for rank in ranks if rank in graph}
    ends = set(found)
    nodes = list(found)
    while nodes:
        new = set(graph.predecessors(nodes.pop())) - found
        found |= new
        nodes += new
    return tuple(sorted(node for node in found - ends if isinstance(node, int)))


# ---- the order across the groups of one rank ----------------------------------------------------


class CallOrders:
    """Compares the order in which ranks call their collectives.

    Ranks with groups over the same dims run the same program, so most of these ranks make their
    calls in the same order, such as all_reduce over tp, then all_reduce over dp. Calls under a
    condition are not a mistake: all ranks of a group make them, or none.

    Args:
        evidence: The calls.

    Attributes:
        deviations: The first call of each rank that leaves the common order.
        behind: The ranks that end before the common order: most ranks that follow it go on.
    """

    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self.deviations: dict[int, Deviation] = {}
        self.behind: set[int] = set()
        classes: dict[frozenset[str], dict[int, list[LoggedCall]]] = {}
        for rank, record in evidence.ranks.items():
            lanes = [own for (_, channel), own in record.lanes.items() if not channel]
            calls = sorted((call for own in lanes for call in own), key=lambda call: call.order)
            classes.setdefault(frozenset(g.title for g in record.groups), {})[rank] = calls
        for by_rank in classes.values():
            self._compare(_from_a_common_start(by_rank))

    def _compare(self, following: dict[int, list[LoggedCall]]) -> None:
        for place in itertools.count():
            here = {rank: own[place] for rank, own in following.items() if place < len(own)}
            keys = {rank: (call.group.title, call.op) for rank, call in here.items()}
            usual = _majority(keys.values())
            if usual is None:
                break
            if 2 * len(here) > len(following):
                self.behind |= following.keys() - here.keys()
            by = {rank for rank in keys if keys[rank] == usual}
            for rank in keys.keys() - by:
                own = following.pop(rank)  # later calls of the rank are not compared
                last = own[place - 1] if place else None
                self.deviations[rank] = Deviation(rank, last, own[place], here[min(by)], by)

    def mistake_of(self, rank: int) -> Deviation | None:
        """Return the deviation of a rank if it cannot be a call under a condition.

        It cannot if another member of the rank's group over the usual dims makes the usual call,
        and if the known members of the group of the rank's own call make the usual call, too.
        """
        one = self.deviations.get(rank)
        if one is None:
            return None
        others = (self._evidence.ranks.keys() - {rank}).intersection(one.own.group.ranks)
        skipped = self.group_of(rank, one.usual.group.title)
        is_alone = bool(others) and others <= one.by
        return one if is_alone and one.by.intersection(skipped.ranks) else None

    def group_of(self, rank: int, title: str) -> LoggedGroup:
        """Return the group of a rank over the dims of a title."""
        return next(one for one in self._evidence.ranks[rank].groups if one.title == title)


def _from_a_common_start(calls: Mapping[int, list[LoggedCall]]) -> dict[int, list[LoggedCall]]:
    """Return the calls. If old calls are lost, begin at the first call that all ranks recorded."""
    places = {
        rank: {(call.group.title, call.number): place for place, call in enumerate(own)}
        for rank, own in calls.items()
    }
    if all((title, 1) in own for own in places.values() for title, _ in own):
        return dict(calls)
    common = set.intersection(*map(set, places.values()))
    start = min(common, key=next(iter(places.values())).__getitem__, default=None)
    return {rank: own[places[rank][start] :] for rank, own in calls.items()} if start else {}


# ---- the verdict --------------------------------------------------------------------------------


@attrs.frozen
class Finding:
    """One fault.

    Attributes:
        kind: "absent", "no dump", "unreadable", "unrecorded", "order", "circle", "shape", "dtype"
            or "stuck".
        culprits: The ranks to blame. Empty if the dumps are inconclusive.
        involved: All ranks that the fault concerns.
        waiting: The ranks that wait because of the fault, directly or through other ranks.
        says: A description.
    """

    kind: str
    culprits: tuple[int, ...]
    involved: tuple[int, ...]
    waiting: tuple[int, ...]
    says: str


class Verdict:
    """Finds the ranks that other ranks of a job wait for. `str()` returns a description.

    A rank is blamed if another rank waits in a call that it has not entered, while it waits for no
    rank itself. Such a rank is not blamed if it may wait in a collective that is not recorded, if
    it has no dump and other ranks may be the cause, or if a mistake of another rank explains the
    wait.

    Args:
        evidence: The calls, as `read_folder` returns them.

    Attributes:
        evidence: The calls.
        waits: The calls that have not ended, with the ranks that have not entered each call.
        findings: The faults, the most severe first.

    Example:
        Rank 1 has not entered the second all_reduce.

        >>> from hypercomm.blame.evidence import LoggedGroup, RankLog
        >>> world = LoggedGroup("0", (0, 1), "WORLD")
        >>> first = LoggedCall("all_reduce", world, number=1, order=0, state="finished")
        >>> second = LoggedCall("all_reduce", world, number=2, order=1, state="started")
        >>> ranks = {0: RankLog(0), 1: RankLog(1)}
        >>> for rank, call in [(0, first), (1, first), (0, second)]:
        ...     ranks[rank].add(call)
        >>> print(Verdict(Evidence(ranks, world_size=2)))
        rank 1 has not entered all_reduce number 2 of WORLD (ranks 0..1), in which rank 0 waits
    """

    COLUMNS = ("group", "ranks", "call", "waiting in it", "not entered by")

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self.waits = find_waits(evidence)
        self._graph = _wait_graph(evidence, self.waits)
        self._unexplained = list(self.waits)
        self._explained: set[int] = set()  # ranks whose finding explains why other ranks wait
        self.findings = [*self._mistakes(), *self._ends()] or list(self._unknowns())
        self.findings.sort(key=lambda one: (not one.culprits, -len(one.waiting)))

    @property
    def culprits(self) -> tuple[int, ...]:
        """The ranks to blame, in ascending order."""
        return tuple(sorted({rank for each in self.findings for rank in each.culprits}))

    @property
    def outcome(self) -> str:
        """The outcome: "blamed", "clear", or "unclear" if there is a fault but no rank to blame."""
        return "blamed" if self.culprits else "unclear" if self.findings else "clear"

    def __str__(self) -> str:
        clear = f"no rank waits: the calls of {len(self.evidence.ranks)} ranks agree and have ended"
        return "\n".join(finding.says for finding in self.findings) or clear

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict as a dict for JSON."""
        findings = []
        for each in self.findings:
            culprits = [self.evidence.describe(rank) for rank in each.culprits]
            findings.append({**attrs.asdict(each), "culprits": culprits})
        return {
            "outcome": self.outcome,
            "verdict": str(self),
            "world_size": self.evidence.world_size,
            "no_dump": self.evidence.missing,
            "findings": findings,
            "waits": [wait.to_dict() for wait in self.waits],
            "notes": list(self.evidence.unreadable.values()),
        }

    def _found(
        self, kind: str, says: str, ranks: Iterable[int], blamed: Iterable[int] = ()
    ) -> Finding:
        ranks = tuple(sorted(ranks))
        return Finding(kind, tuple(sorted(blamed)), ranks, _waiting(self._graph, ranks), says)

    # ---- mistakes: calls that differ, or are made in another order -------------------------------

    @cached_property
    def _orders(self) -> CallOrders:
        return CallOrders(self.evidence)

    def _mistakes(self) -> Iterator[Finding]:
        """Yield the calls that differ, and the ranks that leave the common order."""
        mistakes: dict[int, Deviation] = {}
        every_odd: set[int] = set()
        for calls in find_differences(self.evidence):
            odd, siblings = _find_odd(self.evidence, calls)
            every_odd.update(odd)
            found = [] if odd else self._mistakes_of(calls)
            if len(found) == 1:
                self._accept(found[0], mistakes)
            else:
                yield self._difference(calls, odd, siblings)
        while found := self._explaining_deviations():
            self._accept(found[0], mistakes)
        for rank in sorted(mistakes.keys() - every_odd):
            one = mistakes[rank]
            after = f"right after {one.last}{one.last.at}" if one.last else "as its first call"
            says = (
                f"{self.evidence.name(rank)} calls {one.own}{one.own.at} {after}, where most ranks "
                f"call {one.usual.op} over {one.usual.group.title} "
                f"(rank {min(one.by)}{one.usual.at})"
            )
            yield self._found("order", says, [rank], [rank])

    def _accept(self, one: Deviation, mistakes: dict[int, Deviation]) -> None:
        mistakes[one.rank] = one
        skipped = self._orders.group_of(one.rank, one.usual.group.title)
        self._explain([one.own.group, skipped], [one.rank])

    def _explain(self, groups: Collection[LoggedGroup], ranks: Iterable[int]) -> None:
        """Leave out the waits in groups in which a mistake of ranks shifts the numbers of calls."""
        self._explained.update(ranks)
        self._unexplained = [one for one in self._unexplained if one.call.group not in groups]

    def _mistakes_of(self, ranks: Iterable[int]) -> list[Deviation]:
        every = (self._orders.mistake_of(rank) for rank in ranks)
        return [one for one in every if one is not None]

    def _explaining_deviations(self) -> list[Deviation]:
        """Return the deviation that explains a circle or the end of a chain of waits, if any."""
        awaiting = self._awaiting()
        for end in self._find_ends():
            found = self._mistakes_of(end)
            if len(end) == 1:
                waits = awaiting[end[0]]
                titles = {wait.call.group.title for wait in waits}
                found = [one for one in found if one.usual.group.title in titles]
                found = found or self._repetitions(end[0], waits)
            if len(found) == 1:
                return found
        return []

    def _repetitions(self, rank: int, waits: Iterable[AwaitedRanks]) -> list[Deviation]:
        """Return deviations by a call too many, after which ranks wait for one that has ended."""
        if not self._may_be_done(rank) or len(self._orders.deviations) > 1:
            return []
        return [
            one
            for wait in waits
            for one in self._mistakes_of(wait.calls)
            if one.own.group == wait.call.group and one.own.number < wait.call.number
        ]

    def _may_be_done(self, rank: int) -> bool:
        """Return whether a rank may have ended its program without an error."""
        record = self.evidence.ranks[rank]
        return (record.has_left or not record.why) and rank not in self._orders.behind

    def _difference(
        self, calls: Mapping[int, LoggedCall], odd: list[int], siblings: list[int]
    ) -> Finding:
        first = next(iter(odd or calls))
        one = calls[first]
        others = [rank for rank, call in calls.items() if call.terms != one.terms]
        other = calls[others[0]]
        says = (
            f"{self.evidence.name(first)} calls {one}{one.tensors}{one.at}, but "
            f"{_ranks(others, 'calls', 'call')} {other.op}{other.tensors}{other.at}"
        )
        if siblings:
            does = "does" if len(siblings) == 1 else "do"
            says += f"; so {does} {_ranks(siblings)} in the other {one.group.title} groups"
        if not odd:
            says += "; the dumps do not show which call is intended"
        kinds = zip(("order", "shape", "dtype"), one.terms, other.terms, strict=True)
        kind = next(kind for kind, mine, theirs in kinds if mine != theirs)
        if kind == "order":
            self._explain([one.group], calls)
        return self._found(kind, says, calls, odd)

    # ---- the ends of chains of waits -------------------------------------------------------------

    def _awaiting(self) -> dict[int, list[AwaitedRanks]]:
        """Map each rank to the unexplained waits for it."""
        found: dict[int, list[AwaitedRanks]] = {}
        for wait in self._unexplained:
            for rank in wait.absent:
                found.setdefault(rank, []).append(wait)
        return found

    def _find_ends(self) -> list[list[int]]:
        """Return the ranks and circles of ranks that end the chains of unexplained waits."""
        import networkx as nx

        graph = self._graph.copy()
        explained = set(self.waits).difference(self._unexplained)
        graph.remove_edges_from(list(graph.out_edges(explained)))
        graph.remove_nodes_from(self._open_ends)
        parts = nx.attracting_components(graph)
        ends = ([node for node in part if isinstance(node, int)] for part in parts)
        awaiting = self._awaiting()
        return [
            end
            for end in ends
            if self._explained.isdisjoint(end) and not awaiting.keys().isdisjoint(end)
        ]

    @cached_property
    def _open_ends(self) -> set[int]:
        """The awaited ranks of which nothing shows whether they wait for other ranks."""
        known = self.evidence.ranks
        return {
            node
            for node, waits in self._graph.out_degree()
            if isinstance(node, int) and (node not in known or (known[node].region and not waits))
        }

    def _ends(self) -> Iterator[Finding]:
        """Yield the findings about the ends of the chains of waits."""
        ends = self._find_ends()
        yield from self._absent([end[0] for end in ends if len(end) == 1])
        yield from (self._circle(end) for end in ends if len(end) > 1)
        self._explained.update(*ends)
        explained = self._explained.union(_waiting(self._graph, self._explained))
        left = [wait for wait in self._unexplained if not explained.issuperset(wait.calls)]
        open_ends = self._open_ends.intersection(rank for wait in left for rank in wait.absent)
        unrecorded = open_ends & self.evidence.ranks.keys()
        unreadable = open_ends & self.evidence.unreadable.keys()
        if unrecorded:
            yield self._unrecorded(unrecorded)
        if unreadable:
            yield self._unseen("unreadable", unreadable)
        if missing := open_ends - unrecorded - unreadable:
            yield self._unseen("no dump", missing)

    def _absent(self, ranks: Collection[int]) -> Iterator[Finding]:
        """Yield findings about ranks that have not entered a call and wait for no rank."""
        awaiting = self._awaiting()
        alike: dict[tuple[AwaitedRanks, str, str], list[int]] = {}
        for rank in ranks:
            wait = min(awaiting[rank], key=lambda wait: wait.call.order)
            does = "answered" if wait.call.channel else "entered"
            if does == "entered" and self.evidence.last(rank, wait.call.group) >= wait.call.number:
                does = "started"  # its device has only queued the call
            alike.setdefault((wait, does, self.evidence.ranks[rank].state), []).append(rank)
        done = [rank for rank in ranks if self._may_be_done(rank)]
        are_few = len(done) <= len(_waiting(self._graph, done))
        for (wait, does, state), some in alike.items():
            # If these ranks have ended, those that wait for them may have made a call too many.
            is_usual = 2 * len(wait.calls) > len(wait.call.group.ranks)
            is_shown = is_usual or not self._may_be_done(some[0]) or (are_few and not state)
            says = f"{self._names(some)} not {does} {wait.call}, in which "
            says += _ranks(wait.calls, "waits", "wait")
            if state:
                says += f"; {'it' if len(some) == 1 else 'each'} {state}"
            says += self._others(some, wait)
            says += "" if is_shown else "; the dumps do not show which ranks are right"
            yield self._found("absent", says, some, some if is_shown else ())

    def _names(self, ranks: Sequence[int]) -> str:
        """Return the ranks with "has" or "have", one rank with its coordinates and host."""
        if len(ranks) > 1:
            return f"{_ranks(ranks)} have"
        return f"{self.evidence.name(ranks[0])} has"

    def _others(self, ranks: Iterable[int], wait: AwaitedRanks) -> str:
        others = set(_waiting(self._graph, ranks)) - wait.calls.keys()
        return f"; {_ranks(others, 'waits', 'wait')} indirectly" if others else ""

    def _circle(self, ranks: Collection[int]) -> Finding:
        import networkx as nx

        waits = [wait for wait in self._unexplained if not wait.calls.keys().isdisjoint(ranks)]
        steps = nx.find_cycle(self._graph.subgraph([*ranks, *waits]))
        calls = {rank: wait.calls[rank] for rank, wait in steps if isinstance(rank, int)}
        each = [f"{self.evidence.name(rank)} is in {call}{call.at}" for rank, call in calls.items()]
        return self._found("circle", f"ranks wait for each other: {'; '.join(each)}", calls)

    def _unseen(self, kind: str, ranks: set[int]) -> Finding:
        """Return a finding about awaited ranks whose calls are unknown.

        Such a rank may wait for others. It is blamed if nothing else is wrong, and if all other
        ranks wait for it or have ended.
        """
        evidence = self.evidence
        some = sorted(ranks)
        if kind == "unreadable":
            says = evidence.unreadable[some[0]]
        else:
            says = f"{self._names(some)} left no dump: "
            says += "it has" if len(some) == 1 else "each has"
            says += " died, still makes calls elsewhere, or wrote its dump to another place"
        wait = next(one for one in self._unexplained if not ranks.isdisjoint(one.absent))
        says += f"; {_ranks(wait.calls, 'waits', 'wait')} in {wait.call} for "
        says += _ranks(ranks.intersection(wait.absent))
        says += self._others(some, wait)
        waiting = _waiting(self._graph, some)
        left = {rank for rank, record in evidence.ranks.items() if record.has_left}
        is_only = not self._explained and len(left.union(waiting)) == evidence.world_size - 1
        return self._found(kind, says, some, some if is_only and kind == "no dump" else ())

    def _unrecorded(self, ranks: set[int]) -> Finding:
        """Return a finding about ranks that may wait in a collective that is not recorded."""
        records = self.evidence.ranks
        regions = " or ".join(sorted({records[rank].region for rank in ranks}))
        says = f"{_ranks(ranks, 'is', 'are')} in {regions}, whose collectives are not recorded"
        for wait in [one for one in self._unexplained if not ranks.isdisjoint(one.absent)][:1]:
            says += f"; {_ranks(wait.calls, 'waits', 'wait')} in {wait.call}{wait.call.at}"
        busy = {node for node, waits in self._graph.out_degree() if waits}
        idle = [rank for rank in records if rank not in busy and not records[rank].region]
        if idle:
            says += f"; {_ranks(idle, 'makes', 'make')} no call"
            says += f": it {records[idle[0]].state}" if len(idle) == 1 else ""
        raised = [rank for rank in idle if records[rank].why.startswith("raised")]
        return self._found("unrecorded", says, ranks, raised)

    def _unknowns(self) -> Iterator[Finding]:
        """Yield a possible fault, if no other fault is found."""
        missing = self.evidence.missing
        unrecorded = {rank for rank, record in self.evidence.ranks.items() if record.region}
        if unrecorded:
            yield self._unrecorded(unrecorded)
        elif self.waits:
            wait = next((wait for wait in self.waits if not wait.absent), self.waits[0])
            says = (
                f"{wait.call}{wait.call.at} has not ended on {_ranks(wait.calls)}, and no rank is "
                f"known to be missing: check the network and the devices"
            )
            yield self._found("stuck", says, wait.calls)
        elif missing:
            says = f"{_ranks(missing, 'has', 'have')} no dump that can be read; "
            says += "the calls of the other ranks agree and have ended"
            yield self._found("no dump", says, missing)


def _ranks(ranks: Iterable[int], one: str = "", many: str = "") -> str:
    ranks = sorted(ranks)
    noun, verb = ("rank", one) if len(ranks) == 1 else ("ranks", many)
    return f"{noun} {format_ranks(ranks)} {verb}".rstrip()
