"""In a circle of ranks that wait for each other, who goes another way than most."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from hypercomm.blame.records import Call, Evidence, GroupId, RankRecord
from hypercomm.blame.waiting import Wait


@attrs.frozen
class Votes:
    """In which order most ranks make two calls, where one rank makes them the other way.

    Attributes:
        culprits: Those that are in a circle and go against most.
        with_most: How many ranks go the other way.
        voters: How many ranks tell.
        missed: What the first culprit should have entered.
        entered: What it has entered instead.
    """

    culprits: tuple[int, ...] = ()
    with_most: int = 0
    voters: int = 0
    missed: Wait | None = None
    entered: Wait | None = None


def out_of_order(evidence: Evidence, circle: Sequence[Wait]) -> Votes:
    """Let all ranks of the job vote on the order of the calls in a circle.

    Each rank of the circle is in one call and has not entered the one that another waits in. Of
    all the ranks that make both, in their own groups over the same dims, most are right.

    Args:
        evidence: What the ranks left behind.
        circle: Each rank's wait, for the rank of the next.
    """
    outvoted: list[tuple[int, Votes]] = []
    for position, entered in enumerate(circle):
        missed = circle[position - 1]  # whose rank waits for this one
        right: list[int] = []
        wrong: list[int] = []
        for record in evidence.ranks.values():
            goes_first = _comes_first(evidence, record, missed, entered)
            if goes_first is not None:
                (right if goes_first else wrong).append(record.rank)
        if len(right) > len(wrong) and entered.rank in wrong:
            voters = len(right) + len(wrong)
            outvoted.append((entered.rank, Votes((), len(right), voters, missed, entered)))
    if not outvoted or len(outvoted) == len(circle):
        return Votes()
    culprits = tuple(sorted(rank for rank, _ in outvoted))
    first = next(votes for rank, votes in outvoted if rank == culprits[0])
    return attrs.evolve(first, culprits=culprits)


def _comes_first(
    evidence: Evidence, record: RankRecord, missed: Wait, entered: Wait
) -> bool | None:
    """Whether a rank makes the call that one is missed in before the other; None: no telling."""
    one = _same_call(evidence, record, missed, is_answer=True)
    other = _same_call(evidence, record, entered)
    if one is None and other is None:
        return None
    if one is None or other is None:
        groups = [_same_group(evidence, record, wait) for wait in (missed, entered)]
        is_message = (missed if one is None else entered).call.peer is not None
        if None in groups or (is_message and record.rank != entered.rank):
            return None  # not every rank sends or receives
        return one is not None
    return one.order < other.order


def _same_group(evidence: Evidence, record: RankRecord, wait: Wait) -> GroupId | None:
    """The group over the same dims that a rank is in."""
    if wait.group in record.names or wait.group in record.calls:
        return wait.group
    title = evidence.title(wait.group)
    groups = (group for group in record.names if evidence.title(group) == title)
    return next(groups, None)


def _same_call(
    evidence: Evidence, record: RankRecord, wait: Wait, *, is_answer: bool = False
) -> Call | None:
    """The call of the same number and kind that a rank has made in its own such group.

    A message is answered by one of the other kind, to whomever.
    """
    group = _same_group(evidence, record, wait)
    if group is None:
        return None
    calls = record.calls.get(group, [])
    if wait.call.peer is not None:
        op = wait.call.op if not is_answer else "send" if wait.call.op == "recv" else "recv"
        channels = record.messages.get(group, {}).items()
        calls = [call for kind, of in channels if kind.startswith(op) for call in of]
    same = [call for call in calls if call.number == wait.call.number]
    return min(same, key=lambda call: call.order, default=None)
