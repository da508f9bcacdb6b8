"""Do all ranks mean the same? Each compares what it is about to do with the first that came.

One operation of the store for each rank, and no barrier: the first rank leaves what it does, as
JSON, and each later one gets that in return.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import zip_longest

import torch.distributed as dist

from hypercomm.errors import CreationError, PlanMismatchError
from hypercomm.process_groups import c10d


def agree(key: str, plan: Sequence[str]) -> None:
    """Compare a plan with that of the rank that came first.

    Args:
        key: Where the plan is left in the store; the same on all ranks.
        plan: What this rank is about to create, an entry for each group, in order.

    Raises:
        PlanMismatchError: The plans differ; names the first entry that does.
        CreationError: The key holds what this library did not write.
    """
    rank = dist.get_rank()
    mine = json.dumps({"rank": rank, "plan": list(plan)})
    found = c10d.set_if_absent(key, mine)
    if found == mine:
        return
    first_rank, first_plan = _read(key, found)
    for position, (own, theirs) in enumerate(zip_longest(plan, first_plan)):
        if own != theirs:
            words = (
                f"ranks differ in what they create at position {position}: rank {rank} creates "
                f"{own or 'nothing more'}, but rank {first_rank}, which came first, creates "
                f"{theirs or 'nothing more'}; every rank must give the same list, in one order"
            )
            c10d.set_if_absent(f"{key}/differs", words)
            raise PlanMismatchError(words)


def explain(key: str, error: RuntimeError) -> None:
    """Raise a better error where a creation failed because another rank's plan differs."""
    words = c10d.read_if_set(f"{key}/differs")
    if words is not None and not isinstance(error, PlanMismatchError):
        raise PlanMismatchError(f"{error}; {words}") from error


def _read(key: str, text: str) -> tuple[int, list[str]]:
    try:
        found = json.loads(text)
        rank, plan = found["rank"], found["plan"]
    except (ValueError, TypeError, KeyError):
        rank = plan = None
    if (
        not isinstance(rank, int)
        or not isinstance(plan, list)
        or not all(isinstance(entry, str) for entry in plan)
    ):
        raise CreationError(
            f"the store's key {key!r} holds {text[:80]!r}, which is no plan of a rank; something "
            f"else writes there, or the ranks have different versions of hypercomm"
        )
    return rank, plan
