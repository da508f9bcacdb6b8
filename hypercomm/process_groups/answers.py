"""Questions to the job's store, which may be out of reach: they end all the same.

When the link to the store's host is cut without a word, a question hangs for a quarter of an hour,
whatever its timeout says (seen in torch 2.13). So it is asked in a thread, and given up in time.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")

USUAL_S = 60.0
"""How long an answer may take where nothing else says so: a large job asks all at once."""

_in_thread = threading.local()


class LateError(RuntimeError):
    """Something was not done in time."""


def in_time(action: Callable[[], T], limit_s: float) -> T:
    """Do something in a thread of its own, wait for it for so long, and return what it does.

    A thread that is late goes on, and ends when what it waits for does.

    Raises:
        LateError: It was not done in time.
    """
    results: list[T] = []
    errors: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        _in_thread.is_set = True
        try:
            results.append(action())
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            errors.append(error)
        done.set()

    thread = threading.Thread(target=run, name="hypercomm", daemon=True)
    thread.start()
    if not done.wait(min(limit_s, threading.TIMEOUT_MAX)):
        raise LateError(f"not done within {limit_s:.1f} s")
    thread.join()
    if errors:
        try:
            raise errors[0]
        finally:
            errors.clear()  # the error holds this frame
    return results[0]


def answer(question: Callable[[], T], limit_s: float = USUAL_S) -> T:
    """Ask the store something, and return the answer; questions within are asked as they are.

    Raises:
        DistNetworkError: No answer came in time; torch raises it, too, when the store is gone.
    """
    if getattr(_in_thread, "is_set", False):
        return question()
    try:
        return in_time(question, limit_s)
    except LateError as error:
        raise dist.DistNetworkError("the store does not answer") from error
