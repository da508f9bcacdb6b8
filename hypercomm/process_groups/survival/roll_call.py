"""Roll call: who is left of a grid's ranks, the same answer on all of them."""

from __future__ import annotations

import time
from collections.abc import Callable

from hypercomm.errors import CreationError, GroupCreationTimeout
from hypercomm.process_groups.agreement.steps import Steps
from hypercomm.process_groups.c10d.gloo_store import AttemptGivenUpError

_CALL = "survivors()"


def call_the_roll(
    steps: Steps, of: Callable[[tuple[int, ...]], Steps], limit_s: float
) -> tuple[int, ...]:
    """Wait for the ranks of a grid; return those that have come, as all of them are told.

    Who is missing is named a few at a time, so those that are left meet again, until nobody is.

    Args:
        steps: Those of all its ranks.
        of: Returns the steps of some of them.
        limit_s: How long to wait for the ranks that do not come, and again for those that are gone
            meanwhile.

    Raises:
        CreationError: The others have gone on without this rank.
        PlanMismatchError: A rank calls something else.
        OutcomeUnknownError: The store is gone.
    """
    ranks = steps.agreement.layout.ranks
    while True:
        step = steps.enter([_CALL])
        try:
            pending = steps.conclude(step, time.monotonic() + limit_s, _CALL)
        except AttemptGivenUpError:
            raise CreationError(
                f"the other ranks have gone on without rank {steps.agreement.said.rank}, which "
                f"came to survivors() too late; end this process, or start the job again"
            ) from None
        except GroupCreationTimeout as error:
            missing = {*error.missing}
            ranks = tuple(rank for rank in ranks if rank not in missing)
            steps = of(ranks)
            continue
        if pending is not None:
            raise pending
        return tuple(ranks)
