"""The analysis of recorded calls: differences, waits, and ranks that leave the common order.

The same functions analyse dumps and simulations. They read no files.
"""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import attrs

from hypercomm.blame.evidence import Evidence, LoggedCall
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
        by: A rank that makes the usual call.
    """

    rank: int
    last: LoggedCall | None
    own: LoggedCall
    usual: LoggedCall
    by: int


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
    import networkx as nx

    ends = {rank for rank in ranks if rank in graph}
    nodes = set().union(*(nx.ancestors(graph, rank) for rank in ends)) - ends
    return tuple(sorted(node for node in nodes if isinstance(node, int)))


# ---- the order across the groups of one rank ----------------------------------------------------


def find_deviations(
    evidence: Evidence,
    waits: Iterable[AwaitedRanks],
    differences: Iterable[Mapping[int, LoggedCall]],
) -> dict[int, Deviation]:
    """Find ranks that leave the common order of calls and thereby make a rank wait.

    Ranks with groups over the same dims run the same program, so most of these ranks make their
    calls in the same order, such as all_reduce over tp, then all_reduce over dp. A rank that leaves
    this order is reported only if its deviation explains a wait or a difference in a group. There
    are two cases:

    * The group spans the dims of the usual call, and the rank is absent from the group's call or
      differs in it. If all ranks of the group deviate together, they are not reported.
    * The group spans the dims of the rank's own call, and the rank takes part in the group's call.
      No other rank may deviate in the same way.

    Args:
        evidence: The calls.
        waits: The calls that have not ended.
        differences: The calls that differ.
    """
    troubles = [*waits, *(AwaitedRanks(calls, tuple(calls)) for calls in differences)]
    for with_messages in (False, True):  # messages differ between the stages of a pipeline
        every = list(_compare_orders(evidence, with_messages))
        leaving = defaultdict(set)
        for one in every:
            leaving[one.usual.op, one.own.op].add(one.rank)
        found = {
            one.rank: one
            for one in every
            if bool(one.usual.channel) == with_messages
            and any(_explains(one, leaving[one.usual.op, one.own.op], each) for each in troubles)
        }
        if found:
            return found
    return {}


def _explains(one: Deviation, leaving: set[int], trouble: AwaitedRanks) -> bool:
    """Return whether a deviation explains a wait or a difference.

    Args:
        one: The deviation.
        leaving: The ranks that deviate in the same way.
        trouble: The wait, or the calls that differ.
    """
    group = trouble.call.group
    is_missed = one.rank in trouble.absent and group.title == one.usual.group.title
    if one.usual.channel:
        return is_missed and trouble.call.op == ANSWERS.get(one.usual.op)
    if is_missed and not leaving.issuperset(group.ranks):
        return leaving.isdisjoint(trouble.calls.keys() - set(trouble.absent))
    is_extra = one.rank in trouble.calls and group.title == one.own.group.title
    return is_extra and leaving == {one.rank}


def _compare_orders(evidence: Evidence, with_messages: bool) -> Iterator[Deviation]:
    """Yield the deviations of each rank from the ranks with groups over the same dims."""
    classes: dict[frozenset[str], dict[int, list[LoggedCall]]] = {}
    for rank, record in evidence.ranks.items():
        lanes = [own for (_, way), own in record.lanes.items() if with_messages or not way]
        calls = sorted((call for own in lanes for call in own), key=lambda call: call.order)
        classes.setdefault(frozenset(g.title for g in record.groups), {})[rank] = calls
    for by_rank in classes.values():
        following = _from_a_common_start(by_rank)
        for place in itertools.count():
            here = {rank: own[place] for rank, own in following.items() if place < len(own)}
            keys = {rank: (call.group.title, call.op) for rank, call in here.items()}
            usual = _majority(keys.values())
            if usual is None:
                break
            by = min(rank for rank in keys if keys[rank] == usual)
            for rank in [rank for rank in keys if keys[rank] != usual]:
                own = following.pop(rank)  # later calls of the rank are not compared
                yield Deviation(rank, own[place - 1] if place else None, own[place], here[by], by)


def _from_a_common_start(calls: Mapping[int, list[LoggedCall]]) -> dict[int, list[LoggedCall]]:
    """Return the calls. If old calls are lost, begin at the first call that all ranks recorded."""
    places: dict[int, dict[tuple[str, int], int]] = {}
    for rank, own in calls.items():
        collectives = [(place, call) for place, call in enumerate(own) if not call.channel]
        places[rank] = {(call.group.title, call.number): place for place, call in collectives}
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
        kind: "absent", "no dump", "unreadable", "order", "circle", "shape", "dtype" or "stuck".
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
        self, kind: str, says: str, ranks: Iterable[int], odd: Iterable[int] = ()
    ) -> Finding:
        ranks = tuple(sorted(ranks))
        return Finding(kind, tuple(odd), ranks, _waiting(self._graph, ranks), says)

    def _mistakes(self) -> Iterator[Finding]:
        """Yield the calls that differ, and the ranks that leave the common order."""
        differences = find_differences(self.evidence)
        deviations = find_deviations(self.evidence, self.waits, differences)
        self._explained.update(deviations)
        for wait in self.waits:
            group = wait.call.group
            own = [deviations[rank].own for rank in wait.calls if rank in deviations]
            if any(call.group.title == group.title for call in own):
                self._explained.update(wait.absent)
            firsts = [next(iter(calls.values())) for calls in differences]
            if any(call.group == group and call.number <= wait.call.number for call in firsts):
                self._explained.update(wait.calls)
        every_odd: set[int] = set()
        for calls in differences:
            odd, siblings = _find_odd(self.evidence, calls)
            every_odd.update(odd)
            if odd or not deviations.keys() & calls.keys():
                yield self._difference(calls, odd, siblings)
        for rank in sorted(deviations.keys() - every_odd):
            one = deviations[rank]
            after = f"right after {one.last}{one.last.at}" if one.last else "as its first call"
            says = (
                f"{self.evidence.name(rank)} calls {one.own}{one.own.at} {after}, where most ranks "
                f"call {one.usual.op} over {one.usual.group.title} (rank {one.by}{one.usual.at})"
            )
            yield self._found("order", says, [rank], [rank])

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
            says += f"; so do {_ranks(siblings)} in the other {one.group.title} groups"
        if not odd:
            says += "; the dumps do not show which call is intended"
        kinds = zip(("order", "shape", "dtype"), one.terms, other.terms, strict=True)
        kind = next(kind for kind, mine, theirs in kinds if mine != theirs)
        if kind == "order":
            self._explained.update(odd or calls)
        return self._found(kind, says, calls, odd)

    def _ends(self) -> Iterator[Finding]:
        """Yield a finding for each rank, or circle of ranks, at the end of a chain of waits."""
        import networkx as nx

        unknown = [rank for rank in self.evidence.missing if rank in self._graph]
        known = self._graph.copy()
        known.remove_nodes_from(unknown)
        for part in nx.attracting_components(known):
            ranks = [node for node in part if isinstance(node, int)]
            if ranks and self._explained.isdisjoint(ranks):
                yield self._absent(ranks[0]) if len(part) == 1 else self._circle(part)
                self._explained.update(ranks)
        self._explained.update(_waiting(known, self._explained))
        for rank in unknown:
            if not self._explained.issuperset(_waiting(self._graph, [rank])):
                yield self._absent(rank)

    def _circle(self, part: Collection[Any]) -> Finding:
        import networkx as nx

        steps = nx.find_cycle(self._graph.subgraph(part))
        calls = {rank: wait.calls[rank] for rank, wait in steps if isinstance(rank, int)}
        each = [f"{self.evidence.name(rank)} is in {call}{call.at}" for rank, call in calls.items()]
        return self._found("circle", f"ranks wait for each other: {'; '.join(each)}", calls)

    def _absent(self, rank: int) -> Finding:
        evidence = self.evidence
        record = evidence.ranks.get(rank)
        awaiting = [wait for wait in self.waits if rank in wait.absent]
        wait = min(awaiting, key=lambda wait: wait.call.order)
        does = "answered" if wait.call.channel else "entered"
        if does == "entered" and evidence.last(rank, wait.call.group) >= wait.call.number:
            does = "started"  # its device has only queued the call
        kind = "absent"
        why = ""
        if rank in evidence.unreadable:
            kind = "unreadable"
            why = f"; {evidence.unreadable[rank]}"
        elif record is None:
            kind = "no dump"
            why = "; it left no dump, so it may have died"
        elif record.why.startswith(("left", "raised")):
            why = f"; it {record.why}"
        elif record.place:
            why = f"; it is at {record.place[0]}"
        others = set(_waiting(self._graph, [rank])) - wait.calls.keys()
        why += f"; {_ranks(others, 'waits', 'wait')} indirectly" if others else ""
        says = f"{evidence.name(rank)} has not {does} {wait.call}, in which "
        says += _ranks(wait.calls, "waits", "wait") + why
        return self._found(kind, says, [rank], [rank] if kind != "unreadable" else [])

    def _unknowns(self) -> Iterator[Finding]:
        """Yield a possible fault, if no other fault is found."""
        missing = self.evidence.missing
        if self.waits:
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
