"""The verdict on a folder of dumps: the rank that a job waits for, and why."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import attrs

from hypercomm.layout import RankLayout
from hypercomm.layout.text import format_ranks, plural
from hypercomm.tools.blame.analysis import (
    Deviation,
    Difference,
    Wait,
    find_deviations,
    find_differences,
    find_waits,
    wait_graph,
)
from hypercomm.tools.blame.calls import Evidence
from hypercomm.tools.blame.reading import read_folder

CLEAR, BLAMED, UNCLEAR = "clear", "blamed", "unclear"


@attrs.frozen
class Finding:
    """One thing that is wrong.

    Attributes:
        kind: "absent", "no dump", "unreadable", "order", "circle", "shape", "dtype", "root" or
            "stuck".
        culprits: The ranks to blame; empty if the dumps are inconclusive.
        involved: All ranks that it concerns.
        waiting: The ranks that wait because of it, directly or through others.
        says: A description.
    """

    kind: str
    culprits: tuple[int, ...]
    involved: tuple[int, ...]
    waiting: tuple[int, ...]
    says: str


@attrs.frozen(eq=False)
class Verdict:
    """The result of judging the dumps of a job.

    Attributes:
        evidence: The dumps.
        findings: The faults, the worst first.
        waits: The calls that have not ended, with the members that have not entered them.
    """

    evidence: Evidence
    findings: tuple[Finding, ...]
    waits: tuple[Wait, ...]

    @property
    def outcome(self) -> str:
        """Return "clear", "blamed", or "unclear" if something is wrong and no rank is blamed."""
        return BLAMED if self.culprits else UNCLEAR if self.findings else CLEAR

    @property
    def culprits(self) -> tuple[int, ...]:
        """The ranks to blame, in ascending order."""
        return tuple(sorted({rank for each in self.findings for rank in each.culprits}))

    def __str__(self) -> str:
        if self.findings:
            return "\n".join(finding.says for finding in self.findings)
        ranks = len(self.evidence.ranks)
        return f"no rank waits: the calls of {ranks} ranks agree and have ended"

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict as a dict for JSON."""
        evidence = self.evidence
        findings = [
            {
                **attrs.asdict(finding),
                "culprits": [self._rank_dict(rank) for rank in finding.culprits],
            }
            for finding in self.findings
        ]
        return {
            "outcome": self.outcome,
            "verdict": str(self),
            "world_size": evidence.world_size,
            "dumps": len(evidence.ranks),
            "no_dump": sorted(set(range(evidence.world_size)) - evidence.ranks.keys()),
            "findings": findings,
            "waits": [self._wait_dict(wait) for wait in self.waits],
            "notes": evidence.notes,
        }

    def _rank_dict(self, rank: int) -> dict[str, Any]:
        record = self.evidence.ranks.get(rank)
        fields = ("host", "why", "place", "file")
        known = {field: getattr(record, field, None) for field in fields}
        return {"rank": rank, "coords": self.evidence.coords(rank), **known}

    def _wait_dict(self, wait: Wait) -> dict[str, Any]:
        fields = ("op", "number", "shapes", "dtypes", "peer", "where")
        return {
            "group": self.evidence.title(wait.call.group),
            "members": wait.call.group.ranks,
            **{field: getattr(wait.call, field) for field in fields},
            "waiting": sorted(wait.calls),
            "absent": wait.absent,
        }


def blame(folder: str | os.PathLike[str], layout: str | RankLayout | None = None) -> Verdict:
    """Find the rank that a job waits for, from the dumps of its ranks.

    Args:
        folder: The folder that torch's flight recorder, or `grid.watch`, wrote to.
        layout: The layout of the job, "tp=2,dp=4", if the dumps have none.

    Returns:
        The verdict; str() describes it.

    Raises:
        DumpError: The folder cannot be read, holds no dump, two of one rank, or those of two jobs.
        WorldSizeError, NotationError: The layout does not fit, or cannot be read.

    Example:
        Rank 1 has not entered the second all_reduce.

        >>> import json, pathlib, tempfile
        >>> call = {"pg_id": 0, "process_group": ["0", "default_pg"], "input_sizes": [[4]],
        ...         "input_dtypes": ["Float"], "profiling_name": "nccl:all_reduce",
        ...         "p2p_seq_id": 0, "is_p2p": False}
        >>> one = {**call, "collective_seq_id": 1, "record_id": 0, "state": "completed"}
        >>> two = {**call, "collective_seq_id": 2, "record_id": 1, "state": "started"}
        >>> world = {"0": {"name": "0", "desc": "default_pg", "ranks": "[0, 1]"}}
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     for rank, entries in enumerate([[one, two], [one]]):
        ...         dump = {"version": "2.10", "pg_config": world, "entries": entries}
        ...         _ = pathlib.Path(folder, f"trace_{rank}").write_text(json.dumps(dump))
        ...     verdict = blame(folder, "dp=2")
        >>> verdict.culprits, verdict.evidence.coords(1)
        ((1,), {'dp': 1})
        >>> print(verdict)  # doctest: +ELLIPSIS
        rank 1 (dp=1) has not entered all_reduce number 2 of WORLD (ranks 0..1), in which rank 0 ...
    """
    if isinstance(layout, str):
        layout = RankLayout.parse(layout)
    return judge(read_folder(folder, layout))


def judge(evidence: Evidence) -> Verdict:
    """Find the ranks that others wait for."""
    judged = _Judge(evidence)
    findings = list(judged.findings())
    missing = tuple(sorted(set(range(evidence.world_size)) - evidence.ranks.keys()))
    if not findings and missing:
        says = (
            f"the calls of {len(evidence.ranks)} of {evidence.world_size} ranks agree and have "
            f"ended; {_ranks(missing, 'has', 'have')} no dump that can be read, so it is unknown "
            f"whether anything waits"
        )
        findings = [Finding("no dump", (), missing, (), says)]
    findings.sort(key=lambda finding: (not finding.culprits, -len(finding.waiting)))
    return Verdict(evidence, tuple(findings), tuple(judged.waits))


class _Judge:
    def __init__(self, evidence: Evidence) -> None:
        self._evidence = evidence
        self.waits = find_waits(evidence)
        self._differences = find_differences(evidence)
        self._graph = wait_graph(self.waits)
        self._deviations = find_deviations(evidence, self.waits, self._differences)

    def findings(self) -> Iterator[Finding]:
        """Yield differences, deviations from the common order, then the ends of all waiting."""
        explained = set(self._deviations)
        extra = {rank for rank, one in self._deviations.items() if one.is_extra}
        explained.update(rank for w in self.waits if extra & w.calls.keys() for rank in w.absent)
        found = [*self._mismatches(explained), *self._ends(explained)]
        yield from found
        if not found and self.waits:
            yield self._stuck(self.waits)

    def _mismatches(self, explained: set[int]) -> Iterator[Finding]:
        left = dict(self._deviations)
        for found in self._differences:
            if found.odd or not left.keys() & found.calls.keys():
                yield self._different(found)
                explained.update((found.odd or found.calls) if found.what == "order" else ())
                for rank in found.odd:
                    left.pop(rank, None)
        for rank, deviation in left.items():
            says = self._evidence.describe_rank(rank) + _describe_deviation(
                self._evidence, deviation
            )
            yield self._finding("order", (rank,), (rank,), says)
        first = {each.call.group: each.call.number for each in reversed(self._differences)}
        for wait in self.waits:
            if wait.call.number >= first.get(wait.call.group, math.inf):
                explained.update(wait.calls)

    def _ends(self, explained: set[int]) -> Iterator[Finding]:
        """Yield the ranks, or circles of ranks, at which the waiting of others ends."""
        import networkx as nx  # comes with torch

        evidence = self._evidence
        known = self._graph.subgraph(
            node for node in self._graph if not isinstance(node, int) or node in evidence.ranks
        )
        for part in nx.strongly_connected_components(known):
            is_end = all(other in part for node in part for other in known[node])
            ranks = sorted(node for node in part if isinstance(node, int))
            if is_end and ranks and explained.isdisjoint(ranks):
                yield self._absent(ranks[0]) if len(ranks) == 1 else self._circle(known, part)
                explained.update(ranks)
        explained.update(self._who_waits(explained, known))
        for rank in sorted(node for node in self._graph.nodes - known.nodes):
            if any(not explained.issuperset(wait.calls) for wait in self._awaiting(rank)):
                yield self._absent(rank)

    def _awaiting(self, rank: int) -> list[Wait]:
        return [wait for wait in self.waits if rank in wait.absent]

    def _who_waits(self, ranks: Iterable[int], graph: Any = None) -> tuple[int, ...]:
        import networkx as nx

        graph, ends = self._graph if graph is None else graph, set(ranks)
        nodes = set().union(*(nx.ancestors(graph, rank) for rank in ends if rank in graph))
        return tuple(sorted(node for node in nodes - ends if isinstance(node, int)))

    def _finding(
        self, kind: str, culprits: Iterable[int], ranks: Sequence[int], says: str
    ) -> Finding:
        return Finding(kind, tuple(culprits), tuple(ranks), self._who_waits(ranks), says)

    def _different(self, found: Difference) -> Finding:
        evidence, calls = self._evidence, found.calls
        of = f"number {found.call.number} of {evidence.describe_group(found.call.group)}"
        first, *more = found.odd or calls
        others = [rank for rank in calls if rank not in found.odd and rank != first]
        says = f"{evidence.describe_rank(first)} calls {calls[first]} as {of}"
        says += f" ({_ranks(more)} as well)" if found.odd and more else ""
        says += f", but {_ranks(others, 'calls', 'call')} {calls[others[0]]}" if others else ""
        if not found.odd:
            says += "; the dumps do not show which is intended"
        if found.siblings:
            title = evidence.title(found.call.group)
            says += (
                f"; {_ranks(found.siblings, 'makes', 'make')} the usual call as number "
                f"{found.call.number} in the other {title} groups"
            )
        deviation = self._deviations.get(first) if found.odd else None
        if deviation is not None:
            says += f"; rank {first}{_describe_deviation(evidence, deviation)}"
        return self._finding(found.what, found.odd, tuple(calls), says)

    def _circle(self, graph: Any, part: set[Any]) -> Finding:
        import networkx as nx

        evidence = self._evidence
        edges = nx.find_cycle(graph.subgraph(part))
        steps = [(one, other) for one, other in edges if isinstance(one, int)]
        steps = [(rank, wait.calls[rank]) for rank, wait in steps]
        ranks = [rank for rank, _ in steps]
        each = "; ".join(
            f"{evidence.describe_rank(rank)} is in {evidence.describe_call(call)}{call.at} and "
            f"waits for rank {after}"
            for (rank, call), after in zip(steps, [*ranks[1:], ranks[0]], strict=True)
        )
        says = f"{each}; the dumps do not show which order is intended, so no rank is blamed"
        return self._finding("circle", (), sorted(ranks), says)

    def _absent(self, rank: int) -> Finding:
        evidence, record = self._evidence, self._evidence.ranks.get(rank)
        own = [
            wait
            for wait in self.waits
            if rank in wait.calls and not wait.absent and wait.calls[rank].state != "queued"
            if record is not None and (not wait.call.channel or record.is_at(wait.call))
        ]
        if own:
            return self._stuck(own, rank)
        kind, why = "absent", ""
        if rank in evidence.unreadable:
            kind, why = "unreadable", evidence.unreadable[rank]
        elif record is None:
            kind, why = "no dump", "it left no dump: it has died, or its dump was not collected"
        elif record.why.startswith(("left", "raised")):
            why = f"it {record.why}"
        elif record.place:
            why = f"it is at {record.place[0]}"
        wait = min(self._awaiting(rank), key=lambda wait: wait.call.order)
        call, inside = wait.call, sorted(wait.calls)
        does = "has not entered"
        if call.channel:
            does = f"has not {'sent' if call.op == 'recv' else 'received'} the message of"
        elif evidence.last(rank, call.group) >= call.number:
            does = "has called, but its device has not started,"
        elif kind == "unreadable":
            does = "is not known to have entered"
        says = f"{evidence.describe_rank(rank)} {does} {evidence.describe_call(call)}, in which "
        says += _ranks(inside, "waits", "wait") + (f"; {why}" if why else "")
        others = sorted(set(self._who_waits([rank])) - set(inside))
        says += f"; {_ranks(others, 'waits', 'wait')} indirectly" if others else ""
        culprits = () if kind == "unreadable" else (rank,)
        return self._finding(kind, culprits, (rank,), says)

    def _stuck(self, waits: Sequence[Wait], rank: int | None = None) -> Finding:
        wait = waits[0]
        ranks = sorted({one for each in waits for one in each.calls}) if rank is None else [rank]
        says = (
            f"{self._evidence.describe_call(wait.call)}{wait.call.at} has not ended on "
            f"{_ranks(sorted(wait.calls))}, and no rank is known to be missing: check the network "
            f"and the devices"
        )
        return self._finding("stuck", (), ranks, says)


def _ranks(ranks: Sequence[int], one: str = "", many: str = "") -> str:
    verb = one if len(ranks) == 1 else many
    return f"{plural('rank', len(ranks))} {format_ranks(sorted(ranks))} {verb}".rstrip()


def _describe_deviation(evidence: Evidence, found: Deviation) -> str:
    after = "as its first call"
    if found.last is not None:
        after = f"right after {evidence.describe_call(found.last)}{found.last.at}"
    return (
        f" calls {evidence.describe_call(found.own)}{found.own.at} {after}; {found.votes[0]} "
        f"of {found.votes[1]} ranks {'instead' if found.is_extra else 'first'} call "
        f"{found.usual.op} over {evidence.title(found.usual.group)} (rank {found.by}"
        f"{found.usual.at})"
    )
