"""The threads and the clock that the agreement uses; a simulated job replaces them in `system`."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")

_Inbox = queue.SimpleQueue[tuple[Callable[[], None], Callable[[], None]]]


class System:
    """The clock and the threads of this process.

    Threads come from a pool of daemon threads: on a busy machine a new thread is slow to start, and
    `concurrent.futures` would wait at interpreter exit for a thread that hangs in the store. The
    pool grows to the number of threads that were busy together; a forked child starts without any.
    """

    longest_s = threading.TIMEOUT_MAX
    """The longest time that a thread can wait for an event, in seconds."""

    def __init__(self) -> None:
        self._idle: list[_Inbox] = []
        os.register_at_fork(after_in_child=self._idle.clear)

    def now(self) -> float:
        """Return the time, in seconds, as `time.monotonic`."""
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
        """Run a function that raises nothing in a thread; call `done` once that thread is idle.

        A caller that waits for `done` gets the same thread for its next function.
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
            del action, done  # they hold the caller's objects


system = System()
"""Of this process."""


class LateError(RuntimeError):
    """A function did not return in time."""


class Task(Generic[T]):
    """A function that runs in a thread of the pool, where it may hang."""

    def __init__(self, action: Callable[[], T]) -> None:
        self._results: list[T] = []
        self._error: BaseException | None = None
        self.done = system.event()

        def run() -> None:
            try:
                self._results.append(action())
            except BaseException as error:  # noqa: BLE001 - raised by `result`
                self._error = error

        system.start(run, self.done.set)

    def result(self) -> T:
        """Return the result of a function that has returned, or raise its error."""
        if self._error is None:
            return self._results[0]
        try:
            raise self._error
        finally:
            self._error = None  # it holds this frame


def in_time(action: Callable[[], T], limit_s: float) -> T:
    """Call a function in another thread, with a time limit in seconds, and return its result.

    A thread that exceeds the limit continues, and becomes idle when the function returns.

    Raises:
        LateError: The function did not return in time.
    """
    task = Task(action)
    if not task.done.wait(min(limit_s, system.longest_s)):
        raise LateError(f"not done within {limit_s:.1f} s")
    return task.result()
