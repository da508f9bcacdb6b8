"""Together: what all ranks of a grid do, or none of them."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, TypeVar

import attrs

from hypercomm.errors import CreationError
from hypercomm.process_groups.agreement.steps import Step, Steps, error_of
from hypercomm.process_groups.job import current
from hypercomm.process_groups.torch_internals.gloo import AttemptGivenUpError

T = TypeVar("T")

_LONGER_S = 0.7
"""How much longer those wait who are done, than those who still create groups."""

NOTHING = (lambda _: None), (lambda: None)
"""What is done where ranks only meet, and how it is taken back."""


@attrs.frozen
class Outcome(Generic[T]):
    """What came of something that all ranks have done.

    Attributes:
        result: What this rank's part has returned.
        pending: What has interrupted this rank though all are done; raised once it has obeyed.
    """

    result: T
    pending: BaseException | None

    def get(self) -> T:
        """Return the result, or raise what is pending."""
        if self.pending is not None:
            raise self.pending
        return self.result


@contextlib.contextmanager
def refusing(steps: Steps, call: str) -> Iterator[None]:
    """Let the ranks that wait hear at once if this one fails before it meets them."""
    before = steps.number
    try:
        yield
    except BaseException as error:
        if steps.number == before:  # else this rank has heard of a failure, and so have they
            with contextlib.suppress(RuntimeError):  # the store is gone
                steps.refuse(error, call)
        raise


def all_or_none(
    steps: Steps,
    entries: Sequence[str],
    limit_s: float,
    call: str,
    work: Callable[[Step], T],
    take_back: Callable[[], None],
    *,
    follows: bool = False,
) -> Outcome[T]:
    """Do something on all ranks of a grid, or on none.

    Args:
        steps: The grid's.
        entries: What is done, as all ranks must say alike.
        limit_s: Seconds within which all must be done.
        call: What every rank must call for it, for errors.
        work: Does this rank's part.
        take_back: Undoes as much of it as was done; raises nothing.
        follows: Whether it follows something that all have done: who is late to it is told to call
            again, as the others do.

    Returns:
        What `work` has returned, and what has interrupted this rank.

    Raises:
        PlanMismatchError: Another rank does something else, or failed.
        GroupCreationTimeout: A rank did not come in time.
        CreationError: The others have given up on this rank.
        OutcomeUnknownError: The store is gone, and with it whether the others have gone on.
    """
    deadline = time.monotonic() + limit_s
    longer_s = 0.0 if work is NOTHING[0] else min(_LONGER_S, limit_s)
    while True:
        step = attrs.evolve(steps.enter(entries), deadline=deadline)
        try:
            result = work(step)
            # Who waits in a creation names who is missing there, a moment before.
            return Outcome(result, steps.conclude(step, deadline + longer_s, call))
        except BaseException as error:
            end = steps.abandon(step, error, call)
            take_back()
            if not isinstance(error, AttemptGivenUpError):
                raise
            if end is not None and end.kind != "agreed" and current().rank not in end.ranks:
                raise error_of(end) from error
            if follows or time.monotonic() > deadline:
                raise CreationError(
                    f"{call} was given up by the other ranks; call it again"
                ) from error
