"""The store of a world, and operations on it with a time limit.

When the link to the host of the store is cut, an operation can hang for a quarter of an hour,
whatever its timeout is (seen in torch 2.13). So it runs in a thread, which is abandoned in time.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterable
from typing import Any, Generic, TypeVar

_ABSENT = "absent"


def read_bytes(store: Any, key: str) -> bytes | None:
    """Return the bytes of a key of a store, in one operation; None if it is not set."""
    found: bytes = store.compare_set(key, _ABSENT, _ABSENT)  # sets nothing
    return None if found == _ABSENT.encode() else found


def forget(store: Any, keys: Iterable[str]) -> None:
    """Delete keys of a store."""
    for key in keys:
        store.delete_key(key)


# ---- in time -----------------------------------------------------------------------------------

T = TypeVar("T")

_Inbox = queue.SimpleQueue[tuple[Callable[[], None], Callable[[], None]]]


class Workers:
    """A pool of daemon threads: on a busy machine a new thread is slow to start.

    `concurrent.futures` would wait for its threads at interpreter exit, and one may hang in the
    store. The pool grows to the number of threads that were busy together; a forked child starts
    without any.
    """

    def __init__(self) -> None:
        self._idle: list[_Inbox] = []
        os.register_at_fork(after_in_child=self._idle.clear)

    def start(self, action: Callable[[], None], done: Callable[[], None]) -> None:
        """Run a function that raises nothing in a thread; call `done` once that is idle again.

        A caller that waits for `done` reuses the same thread for its next function.
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
            del action, done  # they hold what was asked


workers = Workers()
"""Of this process."""


class Task(Generic[T]):
    """A function that runs in a worker thread, which may hang.

    Args:
        action: The function; for `poll`, it returns something else than None.
    """

    def __init__(self, action: Callable[[], T]) -> None:
        self._results: list[T] = []
        self._error: BaseException | None = None
        self.done = threading.Event()

        def run() -> None:
            try:
                self._results.append(action())
            except BaseException as error:  # noqa: BLE001 - raised by `result`
                self._error = error

        workers.start(run, self.done.set)

    def result(self) -> T:
        """Return the result of a function that has returned, or raise its error."""
        if self._error is None:
            return self._results[0]
        try:
            raise self._error
        finally:
            self._error = None  # it holds this frame

    def poll(self) -> T | None:
        """Return the result, or raise the error; None while the function runs."""
        return self.result() if self.done.is_set() else None


class LateError(RuntimeError):
    """A function did not return in time."""


def in_time(action: Callable[[], T], limit_s: float) -> T:
    """Call a function in another thread, with a time limit, and return its result.

    A late thread continues, and becomes idle when the function returns.

    Args:
        action: The function.
        limit_s: The limit, in seconds.

    Raises:
        LateError: The function did not return in time.
    """
    task = Task(action)
    if not task.done.wait(min(limit_s, threading.TIMEOUT_MAX)):
        raise LateError(f"not done within {limit_s:.1f} s")
    return task.result()
