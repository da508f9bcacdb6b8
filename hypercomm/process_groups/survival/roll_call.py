"""Roll call: who is left of a grid's ranks, the same answer on all of them."""

from __future__ import annotations

import time
from collections.abc import Callable

from hypercomm.errors import CreationError
from hypercomm.process_groups.agreement.steps import Steps, error_of

_CALL = "survivors()"


def call_the_roll(
    steps: Steps, of: Callable[[tuple[int, ...]], Steps], limit_s: float
) -> tuple[int, ...]:
    """Wait for the ranks of a grid; return those that have come, as all of them are told.

    Who has not come is found a few at a time (`MOST_NAMED` of arrival.py), so those that are left
    meet again, until nobody is missing.

    Args:
        steps: Those of all its ranks.
        of: Returns the steps of some of them.
        limit_s: How long to wait for the ranks that do not come; at each meeting anew.

    Raises:
        CreationError: The others have gone on without this rank.
        PlanMismatchError: A rank calls something else.
        OutcomeUnknownError: The store is gone.
    """
    ranks = steps.agreement.layout.ranks
    while True:
        step = steps.enter([_CALL])
        end, pending = steps.meet(step, time.monotonic() + limit_s, _CALL)
        if pending is not None:
            raise pending
        if end.kind == "agreed":
            return tuple(ranks)
        rank = steps.agreement.said.rank
        if rank in end.ranks:
            raise CreationError(
                f"the other ranks have gone on without rank {rank}, which came to survivors() too "
                f"late; end this process, or start the job again"
            )
        left = tuple(one for one in ranks if one not in end.ranks)
        if end.kind != "missing" or len(left) == len(ranks):
            raise error_of(end)
        ranks, steps = left, of(left)
