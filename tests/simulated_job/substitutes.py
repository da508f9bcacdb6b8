"""Clocks, threads and locks of a simulated process, in place of Python's while a job is simulated.

Where no task of a simulation calls, they are as good as the real ones: objects may outlive it.
"""

from __future__ import annotations

import functools
import math
import random
import threading
import time
import uuid
from collections.abc import Callable
from types import ModuleType, TracebackType
from typing import Any

from simulated_job.scheduler import EndedError, Scheduler, Task

FOREVER = -1.0


class Running:
    """The simulation that runs in this process, if one does."""

    def __init__(self) -> None:
        self.scheduler: Scheduler | None = None

    @property
    def now(self) -> Scheduler | None:
        """The scheduler, where one of its tasks is what runs."""
        found = self.scheduler
        return found if found is not None and found.current is not None else None


running = Running()
"""Of this process."""


class Clock:
    """Stands in for the module `time`."""

    def monotonic(self) -> float:
        """Return the virtual time."""
        scheduler = running.now
        return time.monotonic() if scheduler is None else scheduler.now_s

    perf_counter = time = monotonic

    def sleep(self, seconds: float) -> None:
        """Let others run for so long."""
        scheduler = running.now
        if scheduler is None:
            time.sleep(seconds)
        else:
            scheduler.arrive("sleep", scheduler.now_s + max(0.0, seconds))

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


class Uuids:
    """Stands in for the module `uuid`, with numbers that a seed makes."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def uuid4(self) -> uuid.UUID:
        """Return the next number."""
        return uuid.UUID(int=self._random.getrandbits(128), version=4)

    def __getattr__(self, name: str) -> Any:
        return getattr(uuid, name)


def _deadline(timeout: float | None) -> float:
    scheduler = running.now
    if scheduler is None or timeout is None or timeout < 0:
        return math.inf
    return scheduler.now_s + timeout


class Event:
    """Stands in for `threading.Event`."""

    def __init__(self) -> None:
        self._is_set = False

    def is_set(self) -> bool:
        """Tell whether it is set."""
        return self._is_set

    def set(self) -> None:
        """Let those go on that wait."""
        self._is_set = True
        if running.now is not None:
            running.now.notify(self)

    def clear(self) -> None:
        """Let whoever comes wait again."""
        self._is_set = False

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until it is set, or for so long."""
        scheduler, until_s = running.now, _deadline(timeout)
        while not self._is_set and scheduler is not None and scheduler.wait(self, until_s):
            pass
        return self._is_set


class Lock:
    """Stands in for `threading.Lock`, and for `RLock` where its owner may take it again."""

    is_reentrant = False

    def __init__(self) -> None:
        self._owner: object = None
        self._count = 0

    def acquire(self, blocking: bool = True, timeout: float = FOREVER) -> bool:
        """Take it, once nobody has it."""
        scheduler = running.now
        me: object = self if scheduler is None else scheduler.current
        if self.is_reentrant and self._owner is me:
            self._count += 1
            return True
        until_s = _deadline(timeout)
        while self._owner is not None:
            if not blocking or scheduler is None or not scheduler.wait(self, until_s):
                if self._owner is not None:
                    return False
                break
        self._owner, self._count = me, 1
        return True

    def release(self) -> None:
        """Give it back."""
        if self._owner is None:
            raise RuntimeError("release unlocked lock")
        self._count -= 1
        if not self._count:
            self._owner = None
            if running.now is not None:
                running.now.notify(self)

    def locked(self) -> bool:
        """Tell whether somebody has it."""
        return self._owner is not None

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.release()


class RLock(Lock):
    """Stands in for `threading.RLock`."""

    is_reentrant = True


class Condition:
    """Stands in for `threading.Condition`."""

    def __init__(self, lock: Lock | None = None) -> None:
        self._lock = RLock() if lock is None else lock

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Give the lock back, wait until somebody notifies, and take it again."""
        scheduler = running.now
        if scheduler is None:
            return False
        owner, count = self._lock._owner, self._lock._count
        self._lock._count = 1
        self._lock.release()
        try:
            return scheduler.wait(self, _deadline(timeout))
        finally:
            if not scheduler.is_ended:
                self._lock.acquire()
            self._lock._owner, self._lock._count = owner, count

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        """Wait until something is so."""
        until_s = _deadline(timeout)
        while not predicate():
            scheduler = running.now
            left_s = math.inf if scheduler is None else until_s - scheduler.now_s
            if left_s <= 0 or not self.wait(None if left_s == math.inf else left_s):
                return predicate()
        return True

    def notify(self, n: int = 1) -> None:  # noqa: ARG002 - whoever is woken in vain waits again
        """Let those go on that wait."""
        if running.now is not None:
            running.now.notify(self)

    def notify_all(self) -> None:
        """Let those go on that wait."""
        self.notify()


class Local:
    """Stands in for `threading.local`: each task sees attributes of its own."""

    def __init__(self) -> None:
        vars(self)["_of_tasks"] = {}

    def _own(self) -> dict[str, Any]:
        scheduler = running.now
        current = None if scheduler is None else scheduler.current
        known: dict[Task | None, dict[str, Any]] = vars(self)["_of_tasks"]
        return known.setdefault(current, {})

    def __getattr__(self, name: str) -> Any:
        try:
            return self._own()[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: object) -> None:
        self._own()[name] = value

    def __delattr__(self, name: str) -> None:
        del self._own()[name]


class Thread:
    """Stands in for `threading.Thread`: another task of the simulated process."""

    def __init__(
        self,
        group: None = None,
        target: Callable[..., object] = lambda: None,
        name: str | None = None,
        args: tuple[object, ...] = (),
        kwargs: dict[str, object] | None = None,
        *,
        daemon: bool | None = None,
    ) -> None:
        del group
        self.name, self.daemon = name, daemon
        self._action = functools.partial(target, *args, **(kwargs or {}))
        self._done = Event()

    def start(self) -> None:
        """Begin."""
        scheduler = running.now
        if scheduler is None or scheduler.current is None:
            raise RuntimeError("nothing is simulated now")

        def run() -> None:
            try:
                self._action()
            except EndedError:
                raise
            except BaseException:  # noqa: BLE001 - ends the thread alone, as Python's do
                pass
            finally:
                self._done.set()

        scheduler.spawn(scheduler.current.process, run)

    def join(self, timeout: float | None = None) -> None:
        """Wait until it has ended."""
        self._done.wait(timeout)

    def is_alive(self) -> bool:
        """Tell whether it goes on."""
        return not self._done.is_set()


class Threads:
    """Stands in for the module `threading`."""

    Event, Lock, RLock, Condition, Thread, local = Event, Lock, RLock, Condition, Thread, Local

    def get_ident(self) -> int:
        """Return a number of the calling thread."""
        scheduler = running.now
        if scheduler is None or scheduler.current is None:
            return threading.get_ident()
        return scheduler.current.number + 1

    def __getattr__(self, name: str) -> Any:
        return getattr(threading, name)


def modules(seed: int) -> list[tuple[ModuleType, object]]:
    """Return each module that a simulation replaces, and what stands in for it."""
    return [(time, Clock()), (threading, Threads()), (uuid, Uuids(seed))]
