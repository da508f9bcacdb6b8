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
from hypercomm.tools.blame.calls import FROM_ANYBODY, Evidence, Group
from hypercomm.tools.blame.reading import read_folder

CLEAR, BLAMED, UNCLEAR = "clear", "blamed", "unclear"

_MOST_CALLS = 16
"""The number of calls of a finding in JSON, at most."""


@attrs.frozen
class Finding:
    """One thing that is wrong.

    Attributes:
        kind: "absent", "no dump", "unreadable", "order", "circle", "shape", "dtype", "root" or
            "stuck".
        culprits: The ranks to blame; empty if the dumps are inconclusive.
        involved: All ranks that it concerns.
        waits: The calls that wait because of it.
        waiting: The ranks that wait because of it, directly or through others.
        says: A description.
    """

    kind: str
    culprits: tuple[int, ...]
    involved: tuple[int, ...]
    waits: tuple[Wait, ...]
    waiting: tuple[int, ...]
    says: str


@attrs.frozen(eq=False)
class Verdict:
    """The result of judging the dumps of a job.

    Attributes:
        evidence: The dumps.
        findings: The faults, the worst first.
        waits: The calls that have not ended, with the members that have not entered them.
        outcome: "clear", "blamed", or "unclear" if something is wrong and no rank is blamed.
        culprits: The ranks to blame, in ascending order.
    """

    evidence: Evidence
    findings: tuple[Finding, ...]
    waits: tuple[Wait, ...]

    @property
    def outcome(self) -> str:
        """Whether a rank is to blame."""
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
        return {
            "outcome": self.outcome,
            "verdict": str(self),
            "source": evidence.source,
            "world_size": evidence.world_size,
            "dumps": len(evidence.ranks),
            "no_dump": sorted(set(range(evidence.world_size)) - evidence.ranks.keys()),
            "findings": [
                {
                    "kind": finding.kind,
                    "culprits": [self._rank_dict(rank) for rank in finding.culprits],
                    "involved": finding.involved,
                    "waiting": finding.waiting,
                    "calls": [self._wait_dict(wait) for wait in finding.waits[:_MOST_CALLS]],
                    "says": finding.says,
                }
                for finding in self.findings
            ],
            "groups": [
                {
                    "dims": evidence.title(group),
                    "torch_name": group.name,
                    "ranks": list(group.ranks),
                    "waits": [self._wait_dict(waits[0]) for waits in every],
                }
                for group, every in self.by_group().items()
            ],
            "notes": evidence.notes,
        }

    def by_group(self) -> dict[Group, list[list[Wait]]]:
        """Return the calls that have not ended, by group: the waits of each call together."""
        found: dict[Group, dict[object, list[Wait]]] = {}
        for wait in self.waits:
            call = wait.call
            same = found.setdefault(call.group, {})
            same.setdefault((call.number, call.channel and wait.rank), []).append(wait)
        return {group: list(same.values()) for group, same in found.items()}

    def _rank_dict(self, rank: int) -> dict[str, Any]:
        record = self.evidence.ranks.get(rank)
        fields: dict[str, Any] = {"host": "", "pid": None, "why": "", "place": (), "file": None}
        if record is not None:
            fields = {field: getattr(record, field) for field in fields}
        return {"rank": rank, "coords": self.evidence.coords(rank), **fields}

    def _wait_dict(self, wait: Wait) -> dict[str, Any]:
        title = self.evidence.title(wait.call.group)
        call = wait.call.to_dict()
        return {"rank": wait.rank, "group": title, "call": call, "absent": wait.absent}


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
    waits, differences = find_waits(evidence), find_differences(evidence)
    findings = list(_Judge(evidence, waits, differences).findings())
    missing = tuple(sorted(set(range(evidence.world_size)) - evidence.ranks.keys()))
    if not findings and missing:
        says = (
            f"the calls of {len(evidence.ranks)} of {evidence.world_size} ranks agree and have "
            f"ended; {_ranks(missing, 'has', 'have')} no dump that can be read, so it is unknown "
            f"whether anything waits"
        )
        findings = [Finding("no dump", (), missing, (), (), says)]
    findings.sort(key=lambda finding: (not finding.culprits, -len(finding.waiting)))
    return Verdict(evidence, tuple(findings), tuple(waits))


class _Judge:
    def __init__(
        self, evidence: Evidence, waits: list[Wait], differences: list[Difference]
    ) -> None:
        self._evidence, self._waits, self._differences = evidence, waits, differences
        self._graph = wait_graph(waits)
        self._deviations = find_deviations(evidence, waits, differences)

    def findings(self) -> Iterator[Finding]:
        """Yield differences, deviations from the common order, then the ends of all waiting."""
        explained = set(self._deviations)
        extra = {rank for rank, one in self._deviations.items() if one.is_extra}
        explained.update(rank for w in self._waits if w.rank in extra for rank in w.absent)
        found = [*self._mismatches(explained), *self._ends(explained)]
        yield from found
        stuck = tuple(wait for wait in self._waits if not wait.absent)
        if stuck and not found:
            involved = tuple(sorted({wait.rank for wait in stuck}))
            yield Finding("stuck", (), involved, stuck, (), _describe_stuck(self._evidence, stuck))

    def _mismatches(self, explained: set[int]) -> Iterator[Finding]:
        left = dict(self._deviations)
        for found in self._differences:
            if found.odd or not left.keys() & found.calls.keys():
                yield self._different(found)
                explained.update((found.odd or found.calls) if found.what == "order" else ())
                for rank in found.odd:
                    left.pop(rank, None)
        for rank, deviation in left.items():
            says = _describe_deviation(self._evidence, deviation)
            yield self._finding("order", (rank,), (rank,), self._awaiting(rank), says)
        first = {each.call.group: each.call.number for each in reversed(self._differences)}
        explained.update(
            wait.rank
            for wait in self._waits
            if wait.call.number >= first.get(wait.call.group, math.inf)
        )

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
            if any(wait.rank not in explained for wait in self._awaiting(rank)):
                yield self._absent(rank)
            elif rank not in evidence.unreadable:
                evidence.notes.append(f"rank {rank} left no dump; this does not explain the hang")

    def _awaiting(self, rank: int) -> tuple[Wait, ...]:
        return tuple(wait for wait in self._waits if rank in wait.absent)

    def _who_waits(self, ranks: Iterable[int], graph: Any = None) -> tuple[int, ...]:
        import networkx as nx

        graph, ends = self._graph if graph is None else graph, set(ranks)
        nodes = set().union(*(nx.ancestors(graph, rank) for rank in ends if rank in graph))
        return tuple(sorted(node for node in nodes - ends if isinstance(node, int)))

    def _finding(
        self, kind: str, culprits: Iterable[int], ranks: Sequence[int], waits: Any, says: str
    ) -> Finding:
        return Finding(
            kind, tuple(culprits), tuple(ranks), tuple(waits), self._who_waits(ranks), says
        )

    def _different(self, found: Difference) -> Finding:
        says = _describe_difference(self._evidence, found)
        deviation = self._deviations.get(found.odd[0]) if found.odd else None
        if deviation is not None:
            says += f"; {_describe_deviation(self._evidence, deviation, is_first=False)}"
        return self._finding(found.what, found.odd, tuple(found.calls), (), says)

    def _circle(self, graph: Any, part: set[Any]) -> Finding:
        import networkx as nx

        edges = nx.find_cycle(graph.subgraph(part))
        steps = [graph.edges[edge]["wait"] for edge in edges if isinstance(edge[0], int)]
        ranks = [wait.rank for wait in steps]
        each = "; ".join(
            f"rank {wait.rank} is in {self._evidence.describe_call(wait.call)}{wait.call.at} and "
            f"waits for rank {after}"
            for wait, after in zip(steps, [*ranks[1:], ranks[0]], strict=True)
        )
        says = (
            f"{', '.join(map(self._evidence.describe_rank, ranks))} wait for each other: {each}; "
            f"the dumps do not show which order is intended, so no rank is blamed"
        )
        return self._finding("circle", (), sorted(ranks), steps, says)

    def _absent(self, rank: int) -> Finding:
        evidence, direct = self._evidence, self._awaiting(rank)
        own = [
            wait
            for wait in self._waits
            if wait.rank == rank
            and not wait.absent
            and wait.call.state != "queued"
            and (not wait.call.channel or evidence.ranks[rank].is_at(wait.call))
        ]
        taking = [wait for wait in own if wait.call.op == FROM_ANYBODY]
        inside = [wait for wait in own if wait not in taking]
        kind = "absent"
        if rank not in evidence.ranks:
            kind = "unreadable" if rank in evidence.unreadable else "no dump"
        if inside:
            kind, says = "stuck", _describe_stuck(evidence, inside)
        else:
            says = _describe_absent(evidence, rank, direct, self._who_waits([rank]))
            says += f"; {_describe_stuck(evidence, taking)}" if taking else ""
        is_culprit = not own and kind != "unreadable"
        return self._finding(kind, (rank,) if is_culprit else (), (rank,), direct, says)


# ---- sentences ----------------------------------------------------------------------------------


def _ranks(ranks: Sequence[int], one: str = "", many: str = "") -> str:
    verb = one if len(ranks) == 1 else many
    return f"{plural('rank', len(ranks))} {format_ranks(sorted(ranks))} {verb}".rstrip()


def _describe_absent(
    evidence: Evidence, rank: int, waits: Sequence[Wait], waiting: Sequence[int]
) -> str:
    call = min((wait.call for wait in waits), key=lambda call: call.order)
    key = (call.group, call.number, call.op, call.peer)
    inside = [w.rank for w in waits if (w.call.group, w.call.number, w.call.op, w.call.peer) == key]
    who, what = evidence.describe_rank(rank), evidence.describe_call(call)
    record = evidence.ranks.get(rank)
    if call.channel:
        done = "sent" if call.op == "recv" else "received"
        says = f"{who} has not {done} what {_ranks(inside, 'waits', 'wait')} for in {what}"
    else:
        lane = record.lanes.get((call.group, ""), []) if record else []
        has = "has not entered"
        if lane and lane[-1].number >= call.number:
            has = "has called, but its device has not started,"
        elif rank in evidence.unreadable:
            has = "is not known to have entered"
        says = f"{who} {has} {what}, in which {_ranks(inside, 'waits', 'wait')}"
    if record is None:
        no_dump = "it left no dump: it has died, or its dump was not collected"
        says += f"; {evidence.unreadable.get(rank, no_dump)}"
    elif record.why.startswith(("left", "raised")):
        says += f"; it {record.why}"
    elif record.place:
        says += f"; it is at {record.place[0]}"
    others = sorted(set(waiting) - set(inside))
    return says + (f"; {_ranks(others, 'waits', 'wait')} indirectly" if others else "")


def _describe_deviation(evidence: Evidence, found: Deviation, *, is_first: bool = True) -> str:
    who = evidence.describe_rank(found.rank) if is_first else f"rank {found.rank}"
    after = "as its first call"
    if found.last is not None:
        after = f"right after {evidence.describe_call(found.last)}{found.last.at}"
    return (
        f"{who} calls {evidence.describe_call(found.own)}{found.own.at} {after}; {found.votes[0]} "
        f"of {found.votes[1]} ranks {'instead' if found.is_extra else 'first'} call "
        f"{found.usual.op} over {evidence.title(found.usual.group)} (rank {found.by}"
        f"{found.usual.at})"
    )


def _describe_difference(evidence: Evidence, found: Difference) -> str:
    of = f"number {found.call.number} of {evidence.describe_group(found.call.group)}"
    if not found.odd:
        calls = "; ".join(
            f"{evidence.describe_rank(rank)} calls {call}"
            for rank, call in list(found.calls.items())[:4]
        )
        kinds = {"order": "collectives", "shape": "shapes", "dtype": "dtypes"}
        what = kinds.get(found.what, "roots")
        return f"different {what} as {of}: {calls}; the dumps do not show which is intended"
    others = [rank for rank in found.calls if rank not in found.odd]
    odd, more = found.odd[0], found.odd[1:]
    says = f"{evidence.describe_rank(odd)} calls {found.calls[odd]} as {of}"
    says += f" ({_ranks(more, 'differs', 'differ')} as well)" if more else ""
    says += f", but {_ranks(others, 'calls', 'call')} {found.calls[others[0]]}" if others else ""
    if not found.siblings:
        return says
    title, usual = evidence.title(found.call.group), _ranks(found.siblings, "calls", "call")
    op = found.calls[others[0]].op if others else "another op"
    return (
        f"{says}; {usual} {op} as number {found.call.number} in the other {title} groups, so "
        f"{_ranks(found.odd, 'is', 'are')} the odd one"
    )


def _describe_stuck(evidence: Evidence, stuck: Sequence[Wait]) -> str:
    first = next((wait.call for wait in stuck if wait.call.op != FROM_ANYBODY), None)
    if first is None:
        return "\n".join(
            f"{evidence.describe_rank(wait.rank)} waits in "
            f"{evidence.describe_call(wait.call)}{wait.call.at}, and no member is known to have "
            f"sent to it; the dumps do not show the intended sender"
            for wait in stuck
        )
    failed = next((f"; it failed: {w.call.error}" for w in stuck if w.call.error), "")
    on = [wait.rank for wait in stuck if wait.call.group == first.group]
    return (
        f"all members have entered {evidence.describe_call(first)}, and it has not ended on "
        f"{_ranks(on)}{failed}; no rank is missing: check the network and the devices"
    )
