"""Questions to the job's store, which may be out of reach: they end all the same.

When the link to the store's host is cut without a word, a question hangs for a quarter of an hour,
whatever its timeout says (seen in torch 2.13). So it is asked in a thread, and given up in time.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from typing import TypeVar

import torch.distributed as dist

T = TypeVar("T")

USUAL_S = 60.0
"""How long an answer may take where nothing else says so: a large job asks all at once."""

_in_thread = threading.local()


class Workers:
    """Threads that wait for something to do: on a busy machine a new one is slow to begin.

    As many stay as were ever busy at once; the child of a fork begins without.
    """

    def __init__(self) -> None:
        self._idle: list[queue.SimpleQueue[Callable[[], None]]] = []
        os.register_at_fork(after_in_child=self._idle.clear)

    def start(self, action: Callable[[], None]) -> None:
        """Do something that raises nothing, in a thread."""
        try:
            inbox = self._idle.pop()
        except IndexError:
            inbox = queue.SimpleQueue()
            threading.Thread(
                target=self._work, args=(inbox,), name="hypercomm", daemon=True
            ).start()
        inbox.put(action)

    def _work(self, inbox: queue.SimpleQueue[Callable[[], None]]) -> None:
        _in_thread.is_set = True
        while True:
            inbox.get()()
            self._idle.append(inbox)


workers = Workers()
"""Of this process."""


class LateError(RuntimeError):
    """Something was not done in time."""


def in_time(action: Callable[[], T], limit_s: float) -> T:
    """Do something in another thread, wait for it for so long, and return what it does.

    A thread that is late goes on, and ends when what it waits for does.

    Raises:
        LateError: It was not done in time.
    """
    results: list[T] = []
    errors: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            results.append(action())
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            errors.append(error)
        done.set()

    workers.start(run)
    if not done.wait(min(limit_s, threading.TIMEOUT_MAX)):
        raise LateError(f"not done within {limit_s:.1f} s")
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
