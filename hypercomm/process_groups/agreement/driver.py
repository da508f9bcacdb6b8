"""The driver: holds a meeting on the job's store.

Each question is asked in a thread that changes nothing, and is given up in time: what comes of a
meeting moves on when the answer is taken.
"""

from __future__ import annotations

import time
from typing import Any

from hypercomm.errors import CreationError, OutcomeUnknownError
from hypercomm.process_groups import torch_internals as c10d
from hypercomm.process_groups.agreement.meeting import (
    Check,
    Delete,
    Exchange,
    Meeting,
    Now,
    Operation,
    Publish,
    Read,
    Sleep,
    T,
)
from hypercomm.process_groups.torch_internals.store import USUAL_S, answer


def hold(meeting: Meeting[T], limit_s: float = USUAL_S) -> T:
    """Hold a meeting, and return what comes of it; what interrupts it is raised within it.

    Args:
        meeting: What is asked.
        limit_s: How long each answer may take.

    Raises:
        DistNetworkError: The store is gone, or does not answer.
    """
    result: Any = None
    error: BaseException | None = None
    while True:
        try:
            operation = meeting.send(result) if error is None else meeting.throw(error)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]
        result, error = None, None
        try:
            result = _perform(operation, limit_s)
        except BaseException as raised:  # noqa: BLE001 - the meeting decides, or obeys, first
            error = raised


def hold_for_all(meeting: Meeting[T], limit_s: float, call: str) -> T:
    """Do as `hold`, where ranks decide together what becomes of a call.

    Raises:
        OutcomeUnknownError: The store is gone, and with it what was decided.
    """
    try:
        return hold(meeting, max(1.0, min(limit_s, USUAL_S)))
    except CreationError:
        raise
    except RuntimeError as error:
        raise OutcomeUnknownError(
            f"the outcome of {call} is unknown: the job's store is gone, and with it whether the "
            f"other ranks have gone on ({str(error).splitlines()[0]}); restart the job"
        ) from error


def _perform(operation: Operation, limit_s: float) -> Any:
    if isinstance(operation, Now):
        return time.monotonic()
    if isinstance(operation, Sleep):
        return time.sleep(operation.seconds)
    return answer(lambda: _ask(operation), limit_s)


def _ask(operation: Operation) -> Any:
    match operation:
        case Exchange(key, expected, text):
            return c10d.exchange(key, expected, text)
        case Read(key):
            return c10d.read(key)
        case Check(keys):
            return c10d.is_set(keys)
        case Publish(texts):
            return c10d.set_all(texts)
        case Delete(keys):
            return c10d.forget(keys)
