"""Runs threads one at a time on a virtual clock. Random delays determine their order."""

from __future__ import annotations

import contextvars
import math
import random
import threading
from collections.abc import Callable
from typing import Any


class EndedError(BaseException):
    """Raised in a thread whose simulated process has ended."""


class Task:
    """A simulated thread.

    Args:
        owner: The process that the task belongs to, or None if the task belongs to the job.
        action: The function that the task runs.
        is_main: Whether the job lasts until the task ends.

    Attributes:
        wake_s: The time at which the task can continue, or infinity while it waits for an object.
        awaits: The object for which the task waits.
        error: The error that is raised in the task when it runs next.
        is_ended: Whether the process of the task has ended.
    """

    def __init__(self, owner: Any, action: Callable[[], object], *, is_main: bool) -> None:
        self.owner, self.action, self.is_main = owner, action, is_main
        self.wake_s = 0.0
        self.awaits: object = None
        self.error: BaseException | None = None
        self.is_ended = False
        self.speed_s = 0.0
        self.baton = threading.Lock()  # released to run this task
        self.baton.acquire()


class Scheduler:
    """Runs tasks until all main tasks are done.

    Args:
        seed: Determines all delays.
        most_steps: The number of steps after which a run is ended early.

    Attributes:
        now_s: The virtual time.
        current: The task that runs.
        trace: The time, owner and action of each step of the run.
        is_stuck: The reason why the run was ended early, or "".
    """

    def __init__(self, seed: int, most_steps: int) -> None:
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.current: Task | None = None
        self.trace: list[tuple[float, str, str]] = []
        self.is_stuck = ""
        self._left = most_steps
        self._tasks: list[Task] = []
        self._finished = threading.Lock()

    def run(self) -> None:
        """Run all tasks."""
        self._finished.acquire()
        self._pass_on()
        self._finished.acquire()
        self.current = None

    def spawn(self, owner: Any, action: Callable[[], object], *, is_main: bool = False) -> Task:
        """Start a thread."""
        task = Task(owner, action, is_main=is_main)
        task.speed_s = 10 ** self.random.uniform(-5, -3)  # some ranks are slower than others
        threading.Thread(target=self._run, args=(task,), name="simulated", daemon=True).start()
        self._wake(task)
        self._tasks.append(task)
        return task

    # ---- functions for tasks --------------------------------------------------------------------

    def pause(self, what: str, seconds: float = 0.0) -> None:
        """Let other tasks run. Faults occur in this method.

        Raises:
            EndedError: The process has ended.
            BaseException: The error that `throw` passed to this task.
        """
        me = self._me()
        self._check(me)
        self.trace.append((self.now_s, str(me.owner), what))
        self._wake(me, seconds)
        if me.owner is not None:
            me.owner.arrive()
        self._switch(me)

    def wait(self, on: object, until_s: float = math.inf) -> bool:
        """Wait until `notify` is called with the same object. Return False after a timeout."""
        me = self._me()
        self._check(me)
        me.awaits = on
        me.wake_s = until_s
        try:
            self._switch(me)
            return me.awaits is None
        finally:
            me.awaits = None

    def notify(self, on: object) -> None:
        """Wake all tasks that wait for an object."""
        for task in self._tasks:
            if task.awaits is on:
                task.awaits = None
                self._wake(task)

    def throw(self, task: Task, error: BaseException) -> None:
        """Raise an error in a task when it runs next."""
        task.error = error
        task.wake_s = min(task.wake_s, self.now_s)

    def end(self, owner: object = None) -> None:
        """End all tasks of a process, or all tasks of the job.

        An ended task still runs to completion, but its actions have no effect.
        """
        for task in self._tasks:
            if owner is None or task.owner is owner:
                task.is_ended = True
                task.wake_s = self.now_s

    def hold(self, owner: Any, seconds: float) -> None:
        """Suspend all tasks of a process."""
        owner.held_s = self.now_s + seconds
        for task in self._tasks:
            if task.owner is owner:
                task.wake_s = max(task.wake_s, owner.held_s)

    # ---- switching ------------------------------------------------------------------------------

    def _me(self) -> Task:
        if self.current is None:
            raise RuntimeError("nothing is simulated now")
        return self.current

    def _check(self, me: Task) -> None:
        if me.is_ended:
            raise EndedError
        if me.error is not None:
            error = me.error
            me.error = None
            raise error

    def _wake(self, task: Task, seconds: float = 0.0) -> None:
        held_s = 0.0 if task.owner is None else task.owner.held_s
        delay_s = seconds + task.speed_s * self.random.expovariate(1.0)
        task.wake_s = max(self.now_s + delay_s, held_s)

    def _switch(self, me: Task) -> None:
        if self._pass_on(but=me):
            me.baton.acquire()
        self._check(me)

    def _run(self, task: Task) -> None:
        task.baton.acquire()
        try:
            if not task.is_ended:
                contextvars.Context().run(task.action)
        except EndedError:
            pass
        finally:
            self._tasks.remove(task)
            if task.is_main and not any(other.is_main for other in self._tasks):
                self.end()
            self._pass_on()

    def _pass_on(self, but: Task | None = None) -> bool:
        """Start the next task. Return False if the next task is `but`, which already runs."""
        if not self._tasks:
            self._finished.release()
            return True
        self._left -= 1
        task = min(self._tasks, key=lambda one: one.wake_s)
        if (task.wake_s == math.inf or self._left < 0) and not self.is_stuck:
            self.is_stuck = "no end" if self._left < 0 else "all wait for each other"
            self.end()
            task = self._tasks[0]
        self.now_s = max(self.now_s, task.wake_s)
        self.current = task
        if task.owner is not None:
            task.owner.enter()
        if task is but:
            return False
        task.baton.release()
        return True


# ---- the clock and the threads of the library ---------------------------------------------------


class SimulatedSystem:
    """Implements the methods of the library's `system` on the virtual clock.

    For an ended process, the time is infinite, and every wait returns immediately.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def now(self) -> float:
        """Return the virtual time."""
        task = self._scheduler.current
        return math.inf if task is None or task.is_ended else self._scheduler.now_s

    def sleep(self, seconds: float) -> None:
        """Let other tasks run."""
        self._scheduler.pause("sleep", seconds)

    def event(self) -> Event:
        """Return an event."""
        return Event(self._scheduler)

    def lock(self) -> Lock:
        """Return a lock."""
        return Lock(self._scheduler)

    def start(self, action: Callable[[], None], done: Callable[[], None]) -> None:
        """Start a thread of the current process."""
        current = self._scheduler.current
        if current is not None and not current.is_ended:
            self._scheduler.spawn(current.owner, lambda: (action(), done()))


class Event:
    """Replaces `threading.Event`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._is_set = False

    def is_set(self) -> bool:
        """Return whether the event is set."""
        return self._is_set

    def set(self) -> None:
        """Set the event, and wake all tasks that wait for it."""
        self._is_set = True
        self._scheduler.notify(self)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the event is set, or until a timeout."""
        scheduler = self._scheduler
        until_s = math.inf if timeout is None else scheduler.now_s + timeout
        while not self._is_set and not (scheduler.current is None or scheduler.current.is_ended):
            if not scheduler.wait(self, until_s):
                break
        return self._is_set


class Lock:
    """Replaces `threading.Lock`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._is_held = False

    def acquire(self, timeout: float = -1.0) -> bool:
        """Acquire the lock once it is free."""
        scheduler = self._scheduler
        me = scheduler.current
        until_s = math.inf if timeout < 0 else scheduler.now_s + timeout
        while self._is_held:
            if me is None or me.is_ended or not scheduler.wait(self, until_s):
                break
        if self._is_held:
            return False
        self._is_held = True
        return True

    def release(self) -> None:
        """Release the lock."""
        self._is_held = False
        self._scheduler.notify(self)

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()
