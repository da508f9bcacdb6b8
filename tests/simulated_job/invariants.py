"""Invariants: what must hold of every run of a simulated job; each says in words what does not."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection

from hypercomm.errors import GroupCreationTimeout
from simulated_job.job import HeldGroup, JobRun

GRACE_S = 2.0
"""How much longer than its timeout a call may take."""


def unlike_groups(run: JobRun) -> list[str]:
    """Name groups that two ranks hold under one name, but with other ranks or options."""
    found: dict[str, tuple[int, HeldGroup]] = {}
    words = []
    for rank, outcome in enumerate(run.ranks):
        for held in outcome.groups:
            first, like = found.setdefault(held.name, (rank, held))
            if held != like:
                words.append(f"rank {first} holds {like}, but rank {rank} holds {held}")
            if rank not in held.ranks:
                words.append(f"rank {rank} holds {held}, in which it is not")
    return words


def partial_groups(run: JobRun) -> list[str]:
    """Name groups that one of their members holds, and another does not, though both live."""
    members: dict[HeldGroup, set[int]] = defaultdict(set)
    for rank, outcome in enumerate(run.ranks):
        for held in outcome.groups:
            members[held].add(rank)
    words = []
    for held, having in members.items():
        lacking = [
            rank for rank in held.ranks if rank not in having and not run.ranks[rank].is_dead
        ]
        if lacking:
            words.append(f"ranks {sorted(having)} hold {held.name}, but ranks {lacking} do not")
    return words


def errors(run: JobRun) -> list[str]:
    """Name what was raised, in calls or by programs, and ranks that died; none where all agree."""
    words = [run.is_stuck] if run.is_stuck else []
    for rank, outcome in enumerate(run.ranks):
        words += [
            f"rank {rank}: {call.label}: {call.error!r}"
            for call in outcome.calls
            if call.error is not None
        ]
        words += [f"rank {rank}: {outcome.error!r}"] if outcome.error is not None else []
        words += [f"rank {rank} died"] if outcome.is_dead else []
    return words


def late_calls(run: JobRun, timeout_s: float, but: Collection[int] = ()) -> list[str]:
    """Name calls that took longer than their timeout, and two seconds.

    Args:
        run: The run.
        timeout_s: The timeout of every call.
        but: Ranks that were paused, or whose answers were late.
    """
    words = [run.is_stuck] if run.is_stuck else []
    return words + [
        f"rank {rank}: {call.label} took {call.took_s:.1f} s"
        for rank, outcome in enumerate(run.ranks)
        if rank not in but
        for call in outcome.calls
        if call.took_s > timeout_s + GRACE_S
    ]


def false_culprits(run: JobRun, culprits: Collection[int]) -> list[str]:
    """Name timeouts that blame nobody, or a rank that is none of the culprits.

    A culprit sees the others differ, and may blame whom it waits for.
    """
    words = []
    for rank, outcome in enumerate(run.ranks):
        for call in outcome.calls:
            if rank not in culprits and isinstance(call.error, GroupCreationTimeout):
                missing = call.error.missing
                if not missing or not set(missing) <= set(culprits):
                    words.append(f"rank {rank}: {call.label} blames {list(missing)}: {call.error}")
    return words


def partial_success(run: JobRun, number: int, but: Collection[int] = ()) -> list[str]:
    """Say of the n-th call of each rank that lives whether it succeeded on some ranks only.

    A rank that says that it cannot know how the call ended is left out.
    """
    ended = {
        rank: outcome.calls[number]
        for rank, outcome in enumerate(run.ranks)
        if rank not in but and not outcome.is_dead and len(outcome.calls) > number
    }
    known = {rank: call for rank, call in ended.items() if "unknown" not in str(call.error)}
    succeeded = [rank for rank, call in known.items() if call.is_ok]
    failed = {rank: call.kind for rank, call in known.items() if not call.is_ok}
    return [f"ranks {succeeded} succeeded, but {failed}"] if succeeded and failed else []


def keys_left(run: JobRun) -> int:
    """Return how many keys the store holds at the end."""
    return len(run.store.held)
