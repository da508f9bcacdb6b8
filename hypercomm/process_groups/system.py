"""The threads and the clock of meetings. Tests with virtual time replace its methods."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")

_Inbox = queue.SimpleQueue[tuple[Callable[[], None], Callable[[], None]]]


class System:
    """The clock and the threads of this process.

    Functions run in a pool of daemon threads, because a new thread is slow to start on a busy
    machine. The pool does not use `concurrent.futures`, which would wait at interpreter exit for
    a thread that hangs in the store. The pool grows to the largest number of threads that were
    busy at the same time. A forked child starts with an empty pool.
    """

    longest_s = threading.TIMEOUT_MAX
    """The longest time for which a thread can wait for an event, in seconds."""

    def __init__(self) -> None:
        self._idle: list[_Inbox] = []
        os.register_at_fork(after_in_child=self._idle.clear)

    def now(self) -> float:
        """Return the time of `time.monotonic`, in seconds."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Suspend the calling thread."""
        time.sleep(seconds)

    def event(self) -> Any:
        """Return a new `threading.Event`."""
        return threading.Event()

    def lock(self) -> Any:
        """Return a new `threading.Lock`."""
        return threading.Lock()

    def start(self, action: Callable[[], None], done: Callable[[], None]) -> None:
        """Run a function in a thread of the pool. The function must not raise.

        Args:
            action: The function.
            done: Called once the thread is idle. A caller that waits for `done` gets the same
                thread for its next function.
        """
        try:
            inbox = self._idle.pop()
        except IndexError:
            inbox = queue.SimpleQueue()
            threading.Thread(
                target=self._work, args=(inbox,), name="hypercomm", daemon=True
            ).start()
        inbox.put((action, done))

    def _work(self, inbox: _Inbox) -> None:
        while True:
            action, done = inbox.get()
            action()
            self._idle.append(inbox)
            done()
            del action, done  # the functions would keep objects of the caller alive


system = System()
"""The clock and the threads of this process."""


_AGAIN_S = 0.3
"""Time for which `in_time` waits once more, in seconds, because it may have been suspended."""


class LateError(RuntimeError):
    """A function did not return in time."""


def in_time(action: Callable[[], T], limit_s: float) -> T:
    """Call a function in another thread, with a limit in seconds, and return its result.

    A function that exceeds the limit continues to run in its thread.

    Raises:
        LateError: The function did not return in time.
    """
    results: list[T] = []
    errors: list[BaseException] = []
    done = system.event()

    def run() -> None:
        try:
            results.append(action())
        except BaseException as error:  # noqa: BLE001 - raised in the calling thread
            errors.append(error)

    system.start(run, done.set)
    is_done = done.wait(min(limit_s, system.longest_s))
    if not (is_done or done.wait(_AGAIN_S)):
        raise LateError(f"not done within {limit_s:.1f} s")
    if errors:
        raise errors.pop()  # the traceback refers to this frame, which must not refer to the error
    return results[0]
