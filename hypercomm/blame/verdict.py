"""The verdict: on whom a job waits, and why, or that the dumps do not tell."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import attrs

from hypercomm.blame.comparing import Difference, differences
from hypercomm.blame.folder import read_folder
from hypercomm.blame.order import out_of_order
from hypercomm.blame.records import FROM_ANYBODY, Evidence, GroupId, call_form
from hypercomm.blame.waiting import (
    Wait,
    all_waits,
    circle_in,
    ends_of,
    graph_of,
    is_in,
    who_waits,
)
from hypercomm.blame.words import (
    says_absent,
    says_circle,
    says_different,
    says_missing,
    says_stuck,
)
from hypercomm.layout import RankLayout

CLEAR, BLAMED, UNCLEAR = "clear", "blamed", "unclear"
"""What a verdict is: nobody waits; somebody is to blame; something is wrong, and nobody named."""


@attrs.frozen
class Finding:
    """One thing that is wrong.

    Attributes:
        kind: "absent", "no dump", "unreadable", "order", "circle", "shape", "dtype", "root" or
            "stuck".
        culprits: The ranks to blame; none where the dumps do not tell.
        involved: All ranks that it is about.
        waits: The calls that wait because of it.
        waiting: Who waits because of it, directly or not.
        says: It in words.
    """

    kind: str
    culprits: tuple[int, ...]
    involved: tuple[int, ...]
    waits: tuple[Wait, ...]
    waiting: tuple[int, ...]
    says: str


@attrs.frozen(eq=False)
class Verdict:
    """What the dumps of a job say.

    Attributes:
        evidence: What was read.
        findings: What is wrong, the worst first.
        waits: Each call that does not end, with those that have not entered it.
        outcome: "clear", "blamed" or "unclear".
    """

    evidence: Evidence
    findings: tuple[Finding, ...]
    waits: tuple[Wait, ...]

    @property
    def outcome(self) -> str:
        """Whether somebody is to blame."""
        if not self.findings:
            return CLEAR
        return BLAMED if any(finding.culprits for finding in self.findings) else UNCLEAR

    @property
    def culprits(self) -> tuple[int, ...]:
        """The ranks to blame, in ascending order."""
        return tuple(sorted({rank for each in self.findings for rank in each.culprits}))

    def __str__(self) -> str:
        if self.findings:
            return "\n".join(finding.says for finding in self.findings)
        ranks = len(self.evidence.ranks)
        return f"nobody waits for anybody: what {ranks} ranks called agrees, and has ended"

    def to_dict(self) -> dict[str, Any]:
        """Return the verdict as a dict which JSON can hold."""
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
                    "culprits": [self._rank_form(rank) for rank in finding.culprits],
                    "involved": list(finding.involved),
                    "waiting": list(finding.waiting),
                    "calls": [self._wait_form(wait) for wait in finding.waits[:_MOST_CALLS]],
                    "says": finding.says,
                }
                for finding in self.findings
            ],
            "groups": [
                {
                    **evidence.group_form(group),
                    "waits": [self._wait_form(wait) for wait in waits],
                }
                for group, waits in self.by_group().items()
            ],
            "notes": evidence.notes,
        }

    def by_group(self) -> dict[GroupId, list[Wait]]:
        """Return the calls that do not end, by group: one for each number, and each message."""
        found: dict[GroupId, dict[tuple[object, ...], Wait]] = {}
        for wait in self.waits:
            found.setdefault(wait.group, {}).setdefault(_in_common(wait), wait)
        return {group: list(waits.values()) for group, waits in found.items()}

    def waiting_in(self, wait: Wait) -> list[int]:
        """Return the ranks that are in the same call of a group."""
        return [
            other.rank
            for other in self.waits
            if other.group == wait.group and _in_common(other) == _in_common(wait)
        ]

    def _rank_form(self, rank: int) -> dict[str, Any]:
        record = self.evidence.ranks.get(rank)
        return {
            "rank": rank,
            "coords": self.evidence.coords(rank),
            "host": record.host if record else "",
            "pid": record.pid if record else None,
            "why": record.why if record else "",
            "place": list(record.place) if record else [],
            "file": record.file if record else None,
        }

    def _wait_form(self, wait: Wait) -> dict[str, Any]:
        return {
            "rank": wait.rank,
            "group": self.evidence.group_form(wait.group)["dims"],
            "call": dict(call_form(wait.call)),
            "absent": list(wait.absent),
        }


def _in_common(wait: Wait) -> tuple[object, ...]:
    """What those have in common who wait in one call; of a message, each end is alone."""
    call = wait.call
    if call.is_message:
        return call.number, call.op, call.peer, wait.rank
    return (call.number,)


_MOST_CALLS = 16
"""The most calls of one finding that JSON lists."""


def blame(folder: str | os.PathLike[str], layout: str | RankLayout | None = None) -> Verdict:
    """Say on whom a job waits, from what its ranks left in a folder.

    Args:
        folder: What torch's flight recorder wrote, or `grid.watch`.
        layout: Coordinates where the dumps have none: "tp=2,dp=4".

    Raises:
        DumpError: There is no such folder, no dump in it, two of one rank, or those of two jobs.
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
    """Say on whom the ranks wait.

    Args:
        evidence: What they left behind.
    """
    found = differences(evidence)
    waits = all_waits(evidence)
    graph = graph_of(waits)
    findings = [_different(evidence, each, graph) for each in found]
    explained = _explained(found, waits)
    known = {
        rank: [other for other in others if other in evidence.ranks]
        for rank, others in graph.items()
        if rank in evidence.ranks
    }
    for part in ends_of(known):
        waits_for_unknown = len(part) == 1 and graph[part[0]]
        if waits_for_unknown or explained.intersection(part):
            continue
        findings.append(_end(evidence, part, waits, known))
        explained.update(part)
    explained.update(who_waits(known, explained))
    for rank in sorted(graph.keys() - known.keys()):
        needed = [w for w in waits if rank in w.absent and w.rank not in explained]
        if needed:
            findings.append(_absent(evidence, rank, needed, tuple(who_waits(graph, [rank]))))
        elif rank not in evidence.unreadable:
            evidence.notes.append(f"rank {rank} left no dump; that explains nothing that waits")
    if not findings:
        stuck = [wait for wait in waits if not wait.absent]
        if stuck:
            findings = [_stuck(evidence, stuck)]
    missing = sorted(set(range(evidence.world_size)) - evidence.ranks.keys())
    if not findings and missing:
        findings = [Finding("no dump", (), tuple(missing), (), (), says_missing(evidence, missing))]
    findings.sort(key=lambda finding: (not finding.culprits, -len(finding.waiting)))
    return Verdict(evidence, tuple(findings), tuple(waits))


def _explained(found: Sequence[Difference], waits: Sequence[Wait]) -> set[int]:
    """Who is stuck in a call that differs, or behind it, and who has left its order."""
    first = {each.group: each.number for each in reversed(found)}
    stuck = {w.rank for w in waits if w.call.number >= first.get(w.group, math.inf)}
    return stuck.union(*(each.odd for each in found if each.what == "order"))


def _different(evidence: Evidence, found: Difference, graph: dict[int, list[int]]) -> Finding:
    return Finding(
        kind=found.what,
        culprits=found.odd if found.is_decided else (),
        involved=tuple(found.calls),
        waits=(),
        waiting=tuple(who_waits(graph, found.calls)),
        says=says_different(evidence, found),
    )


def _end(
    evidence: Evidence, part: list[int], waits: Sequence[Wait], graph: dict[int, list[int]]
) -> Finding:
    waiting = tuple(who_waits(graph, part))
    if len(part) == 1:
        return _absent(evidence, part[0], waits, waiting)
    circle = circle_in(graph, part)
    steps = []
    for rank, other in zip(circle, [*circle[1:], circle[0]], strict=True):
        steps.append(next(w for w in waits if w.rank == rank and other in w.absent))
    votes = out_of_order(evidence, steps)
    return Finding(
        kind="order" if votes.culprits else "circle",
        culprits=votes.culprits,
        involved=tuple(sorted(circle)),
        waits=tuple(steps),
        waiting=tuple(sorted({*waiting, *part} - set(votes.culprits or circle))),
        says=says_circle(evidence, steps, votes),
    )


def _absent(
    evidence: Evidence, rank: int, waits: Sequence[Wait], waiting: tuple[int, ...]
) -> Finding:
    direct = tuple(wait for wait in waits if rank in wait.absent)
    kind = "absent"
    if rank not in evidence.ranks:
        kind = "unreadable" if rank in evidence.unreadable else "no dump"
    inside = [
        wait
        for wait in waits
        if wait.rank == rank
        and not wait.absent
        and wait.call.state != "queued"
        and wait.call.op != FROM_ANYBODY
        and (wait.call.peer is None or is_in(evidence, wait.rank, wait.call))
    ]
    taking = [wait for wait in waits if wait.rank == rank and wait.call.op == FROM_ANYBODY]
    says = says_stuck(evidence, inside) if inside else says_absent(evidence, rank, direct, waiting)
    if taking and not inside:
        says += f"; {says_stuck(evidence, taking)}"
    return Finding(
        kind="stuck" if inside else kind,
        culprits=() if inside or taking or kind == "unreadable" else (rank,),
        involved=(rank,),
        waits=direct,
        waiting=waiting,
        says=says,
    )


def _stuck(evidence: Evidence, stuck: Sequence[Wait]) -> Finding:
    return Finding(
        kind="stuck",
        culprits=(),
        involved=tuple(sorted({wait.rank for wait in stuck})),
        waits=tuple(stuck),
        waiting=(),
        says=says_stuck(evidence, stuck),
    )
