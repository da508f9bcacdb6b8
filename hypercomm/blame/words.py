"""Verdicts in words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from hypercomm.blame.comparing import Difference
from hypercomm.blame.order import Votes
from hypercomm.blame.records import FROM_ANYBODY, Call, Evidence, GroupId
from hypercomm.blame.waiting import Wait
from hypercomm.layout.text import format_ranks, plural


def _ranks(ranks: Sequence[int]) -> str:
    return f"{plural('rank', len(ranks))} {format_ranks(sorted(ranks))}"


def call_in_group(evidence: Evidence, group: GroupId, call: Call) -> str:
    """Return which call is meant: "all_reduce number 5 of tp (ranks 2..3)"."""
    of = evidence.group_in_words(group)
    if call.peer is not None:
        way = "to" if call.op == "send" else "from"
        return f"{call.op} number {call.number} {way} rank {call.peer} in {of}"
    if call.op == FROM_ANYBODY:
        return f"recv number {call.number} from anybody in {of}"
    return f"{call.op} number {call.number} of {of}"


def says_absent(
    evidence: Evidence, rank: int, waits: Sequence[Wait], waiting: Sequence[int]
) -> str:
    """Say that others wait for a rank that waits for nobody.

    Args:
        evidence: What the ranks left behind.
        rank: The rank.
        waits: The calls that wait for it.
        waiting: Who waits for it, also by way of others.
    """
    first = min(waits, key=lambda wait: wait.call.order)
    alike = (first.group, first.call.number, first.call.op, first.call.peer)
    inside = [w.rank for w in waits if (w.group, w.call.number, w.call.op, w.call.peer) == alike]
    what = call_in_group(evidence, first.group, first.call)
    if first.call.peer is not None:
        answer = "sent" if first.call.op == "recv" else "received"
        verb = "wait" if len(inside) > 1 else "waits"
        says = f"{evidence.who(rank)} has not {answer} what {_ranks(inside)} {verb} for in {what}"
    else:
        verb = "wait" if len(inside) > 1 else "waits"
        record = evidence.ranks.get(rank)
        is_queued = record is not None and record.last(first.group) >= first.call.number
        has = "has called, but its device has not started," if is_queued else "has not entered"
        if rank in evidence.unreadable:
            has = "is not known to have entered"
        says = f"{evidence.who(rank)} {has} {what}, in which {_ranks(inside)} {verb}"
    says += _whereabouts(evidence, rank)
    others = sorted(set(waiting) - set(inside))
    if others:
        verb = "wait" if len(others) > 1 else "waits"
        says += f"; {_ranks(others)} {verb} for it, too, or for those that do"
    return says


def _whereabouts(evidence: Evidence, rank: int) -> str:
    record = evidence.ranks.get(rank)
    if record is None and rank in evidence.unreadable:
        return f"; where it is cannot be told: {evidence.unreadable[rank]}"
    if record is None:
        return "; it left no dump: it has died, or its dump was not collected"
    if record.why.startswith(("left", "raised")):
        return f"; it {record.why}"
    return f"; it is at {record.place[0]}" if record.place else ""


def says_circle(evidence: Evidence, circle: Sequence[Wait], votes: Votes) -> str:
    """Say that ranks wait for each other, and who goes another way than most.

    Args:
        evidence: What the ranks left behind.
        circle: Each rank's wait, for the rank of the next.
        votes: Who goes another way.
    """
    if votes.missed is not None and votes.entered is not None:
        rank, missed = votes.entered.rank, votes.missed
        what = call_in_group(evidence, missed.group, missed.call)
        if missed.call.peer is None:
            lacks = f"not {what}, in which rank {missed.rank} waits for it"
        else:
            done = "sent" if missed.call.op == "recv" else "received"
            lacks = f"has not {done} what rank {missed.rank} waits for in {what}"
        says = (
            f"{evidence.who(rank)} has entered "
            f"{call_in_group(evidence, votes.entered.group, votes.entered.call)}"
            f"{_at(votes.entered.call)}, and {lacks}: {votes.with_most} of {votes.voters} ranks "
            f"go there before they enter that of {evidence.title(votes.entered.group)}"
        )
        others = [rank for rank in votes.culprits if rank != votes.entered.rank]
        return says + (f"; so do {_ranks(others)}" if others else "")
    steps = [
        f"rank {wait.rank} is in {call_in_group(evidence, wait.group, wait.call)}{_at(wait.call)} "
        f"and waits for rank {after.rank}"
        for wait, after in zip(circle, [*circle[1:], circle[0]], strict=True)
    ]
    who = ", ".join(evidence.who(wait.rank) for wait in circle)
    return (
        f"{who} wait for each other: {'; '.join(steps)}; the dumps do not tell which order is "
        f"meant, so none of them is blamed alone"
    )


def _at(call: Call) -> str:
    return f" at {call.where}" if call.where else ""


def says_different(evidence: Evidence, found: Difference) -> str:
    """Say what ranks call differently in one group.

    Args:
        evidence: What the ranks left behind.
        found: What differs.
    """
    what = {"order": "other collectives", "shape": "other shapes", "dtype": "other dtypes"}
    of = evidence.group_in_words(found.group)
    if not found.is_decided:
        calls = "; ".join(
            f"{evidence.who(rank)} calls {call.in_words()}{_at(call)}"
            for rank, call in list(found.calls.items())[:4]
        )
        return (
            f"members of {of} call {what.get(found.what, 'other roots')} as number "
            f"{found.number}: {calls}; the dumps do not tell which is meant"
        )
    others = {rank: call for rank, call in found.calls.items() if rank not in found.odd}
    usual = next(iter(others.values()))
    odd = found.calls[found.odd[0]]
    more = f" (as do {_ranks(found.odd[1:])} something else)" if len(found.odd) > 1 else ""
    says = (
        f"{evidence.who(found.odd[0])} calls {odd.in_words()}{_at(odd)} as number {found.number} "
        f"of {of}{more}, and {_ranks(list(others))} {usual.in_words()}{_at(usual)}"
    )
    skipped = _skipped(evidence, found, found.odd[0], usual)
    return f"{says}; {skipped}" if skipped else says


def _skipped(evidence: Evidence, found: Difference, rank: int, usual: Call) -> str:
    """Say that a rank has left a call out, or swapped two, where that explains what follows."""
    after = {
        member: next((c for c in calls if c.number == found.number + 1), None)
        for member in found.calls
        if (calls := evidence.ranks[member].calls.get(found.group)) is not None
    }
    rest = Counter(c.signature() for m, c in after.items() if c and m not in found.odd)
    own_next = after.get(rank)
    theirs = rest.most_common(1)[0][0] if rest else None
    if theirs != found.calls[rank].signature():
        return ""
    if own_next is not None and own_next.signature() == usual.signature():
        return "it makes this call and the next in the other order than the others"
    return f"it has left out {usual.op}, which the others call first"


def says_missing(evidence: Evidence, missing: Sequence[int]) -> str:
    """Say that what is there has ended, and that ranks are not there.

    Args:
        evidence: What the ranks left behind.
        missing: Those of which nothing can be read.
    """
    has = "have" if len(missing) > 1 else "has"
    return (
        f"what {len(evidence.ranks)} of {evidence.world_size} ranks called agrees, and has ended; "
        f"{_ranks(missing)} {has} no dump that can be read, and may wait for anybody: the dumps do "
        f"not tell"
    )


def says_stuck(evidence: Evidence, stuck: Sequence[Wait]) -> str:
    """Say that all have entered a call which does not end.

    Args:
        evidence: What the ranks left behind.
        stuck: The call, of some of its members.
    """
    alone = [wait for wait in stuck if wait.call.op == FROM_ANYBODY]
    first = next((wait for wait in stuck if wait not in alone), None)
    if first is None:
        each = [
            f"{evidence.who(wait.rank)} waits in "
            f"{call_in_group(evidence, wait.group, wait.call)}{_at(wait.call)}, and no member is "
            f"known to have sent to it: the dumps do not tell who was to"
            for wait in alone
        ]
        return "\n".join(each)
    failed = next((wait.call.error for wait in stuck if wait.call.error), "")
    why = f"; it failed: {failed}" if failed else ""
    return (
        f"all members have entered {call_in_group(evidence, first.group, first.call)}, and it has "
        f"not ended on {_ranks([w.rank for w in stuck if w.group == first.group])}{why}; no rank "
        f"is missing: look at the network and the devices between them"
    )
