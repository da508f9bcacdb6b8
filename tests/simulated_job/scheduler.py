"""Scheduler: threads of which one runs at a time, on a virtual clock; who does is decided here."""

from __future__ import annotations

import contextvars
import hashlib
import heapq
import math
import threading
from collections.abc import Callable
from typing import Protocol

import attrs

from hypercomm.errors import SimulationError


class EndedError(BaseException):
    """The simulated process that a thread belongs to has ended."""


class Process(Protocol):
    """What threads belong to: entered when one of them comes to run.

    Attributes:
        held_s: Until when none of them runs.
    """

    held_s: float

    def enter(self) -> None:
        """Be the one whose state the program sees."""
        ...

    def leave(self) -> None:
        """Keep that state for the next time."""
        ...

    def arrive(self, task: Task, what: str) -> None:
        """Hear that one of its threads may be stopped here, and what it is about to do."""
        ...


class Choices(Protocol):
    """Decides which thread runs next; the same answers make the same run."""

    def choose(self, current: Task | None, ready: list[Task]) -> Task:
        """Return one of those that could run, in the order in which they began."""
        ...


@attrs.define(eq=False)
class Task:
    """A simulated thread.

    Attributes:
        number: Its place in the order in which threads began.
        process: What it belongs to.
        action: What it does; raises nothing but `EndedError`.
        wake_s: From when on it can run; infinity while it waits for something.
        awaits: What it waits for, if so.
        error: What is raised in it when it runs next.
        is_main: Whether the job lasts until it ends.
    """

    number: int
    process: Process
    action: Callable[[], None]
    is_main: bool
    wake_s: float = 0.0
    awaits: object = None
    error: BaseException | None = None
    ended: BaseException | None = None
    is_done: bool = False
    baton: threading.Lock = attrs.field(factory=threading.Lock)


class Scheduler:
    """Runs tasks until all of the main ones are done.

    Args:
        choices: Decides who runs.
        most_steps: After how many decisions a run has failed.
        slack_s: How much later than the first a thread may come that could run before.

    Attributes:
        now_s: The virtual time.
        current: The task that runs.
        steps: The decisions so far.
        trace: What was done, in order: the time, the task, what.
        is_stuck: Why the run was given up, if it was.
    """

    def __init__(self, choices: Choices, most_steps: int = 200_000, slack_s: float = 0.0) -> None:
        self.now_s = 0.0
        self.current: Task | None = None
        self.steps = 0
        self.trace: list[tuple[float, int, str]] = []
        self.is_stuck: str | None = None
        self._choices = choices
        self._most_steps = most_steps
        self._slack_s = slack_s
        self._tasks: list[Task] = []
        self._begun = 0
        self._timers: list[tuple[float, int, Callable[[], None]]] = []
        self._timed = 0
        self._finished = threading.Lock()

    # ---- what a run is made of --------------------------------------------------------------

    def spawn(self, process: Process, action: Callable[[], None], *, is_main: bool = False) -> Task:
        """Let another thread begin, which runs when it is chosen."""
        wake_s = max(self.now_s, process.held_s)
        task = Task(self._begun, process, action, is_main, wake_s=wake_s)
        self._begun += 1
        self._tasks.append(task)
        task.baton.acquire()
        _threads.start(lambda: self._run(task))
        return task

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Do something at a time, between two steps of threads."""
        self._timed += 1
        heapq.heappush(self._timers, (time_s, self._timed, action))

    def run(self) -> None:
        """Run all tasks, and return when the main ones are done, and the others have ended."""
        self._finished.acquire()
        try:
            first = self._next()
            if first is None:
                return
            self._enter(first)
            first.baton.release()
            self._finished.acquire()
        finally:
            self.current = None
            self._finished.release()

    # ---- what tasks call ----------------------------------------------------------------------

    def arrive(self, what: str, until_s: float | None = None) -> None:
        """Let another task run, and go on when this one is chosen.

        Args:
            what: What this task is about to do.
            until_s: When it can go on at the earliest; default: now.

        Raises:
            EndedError: The process has ended.
            BaseException: What was raised in this task, such as KeyboardInterrupt.
        """
        me = self._me()
        self._check(me)
        self.trace.append((self.now_s, me.number, what))
        me.wake_s = self.now_s if until_s is None else until_s
        me.process.arrive(me, what)
        self._switch(me)

    def wait(self, on: object, until_s: float = math.inf) -> bool:
        """Wait until `notify` is called with the same object; False if that took too long."""
        me = self._me()
        self._check(me)
        me.awaits, me.wake_s = on, until_s
        try:
            self._switch(me)
            return me.awaits is None
        finally:
            me.awaits = None

    def notify(self, on: object) -> None:
        """Let all tasks go on that wait for an object."""
        for task in self._tasks:
            if task.awaits is on:
                task.awaits, task.wake_s = None, max(self.now_s, task.process.held_s)

    def throw(self, task: Task, error: BaseException) -> None:
        """Raise an error in a task when it runs next, which is now at the earliest."""
        task.error, task.wake_s = error, min(task.wake_s, self.now_s)

    def end(self, process: Process) -> None:
        """End all tasks of a process: whatever they call from now on raises."""
        for task in self._tasks:
            if task.process is process:
                task.ended, task.wake_s = EndedError(), self.now_s

    def hold(self, process: Process, until_s: float) -> None:
        """Let no task of a process run before a time."""
        process.held_s = until_s
        for task in self._tasks:
            if task.process is process:
                task.wake_s = max(task.wake_s, until_s)

    @property
    def is_ended(self) -> bool:
        """Whether the process of the current task has ended."""
        return self.current is not None and self.current.ended is not None

    def digest(self) -> str:
        """Return a hash of all that was done."""
        lines = "\n".join(f"{time:.6f} {task} {what}" for time, task, what in self.trace)
        return hashlib.sha256(lines.encode()).hexdigest()[:16]

    # ---- the baton ----------------------------------------------------------------------------

    def _me(self) -> Task:
        if self.current is None:
            raise SimulationError("nothing is simulated now")
        return self.current

    def _check(self, me: Task) -> None:
        if me.ended is not None:
            raise me.ended
        if me.error is not None:
            error, me.error = me.error, None
            raise error

    def _switch(self, me: Task) -> None:
        chosen = self._next()
        if chosen is not me:
            if chosen is None:
                raise SimulationError("a task waits for what nobody does")
            self._enter(chosen)
            chosen.baton.release()
            me.baton.acquire()
        self._check(me)

    def _enter(self, task: Task) -> None:
        before = self.current
        if before is None or before.process is not task.process:
            if before is not None:
                before.process.leave()
            task.process.enter()
        self.current = task

    def _run(self, task: Task) -> None:
        task.baton.acquire()
        try:
            self._check(task)
            contextvars.Context().run(task.action)
        except EndedError:
            pass
        finally:
            task.is_done = True
            self._tasks.remove(task)
            if not any(other.is_main for other in self._tasks):
                self._end_all()
            chosen = self._next()
            if chosen is None:
                self._finished.release()
            else:
                self._enter(chosen)
                chosen.baton.release()

    def _end_all(self) -> None:
        for task in self._tasks:
            if task.ended is None:
                task.ended, task.wake_s = EndedError(), self.now_s

    def _next(self) -> Task | None:
        """Choose who runs; the clock goes on where nobody can."""
        if not self._tasks:
            return None
        self.steps += 1
        if self.steps > self._most_steps and self.is_stuck is None:
            self.is_stuck = f"no end after {self._most_steps:,} steps"
            self._end_all()
        soonest = min([task.wake_s for task in self._tasks])
        while self._timers and self._timers[0][0] <= max(soonest, self.now_s):
            time_s, _, action = heapq.heappop(self._timers)
            self.now_s = max(self.now_s, time_s)
            action()
            soonest = min([task.wake_s for task in self._tasks])
        if soonest == math.inf:
            self.is_stuck = self.is_stuck or "all wait for each other, without end"
            self._end_all()
            soonest = self.now_s
        self.now_s = max(self.now_s, soonest)
        latest = self.now_s + self._slack_s
        ready = [task for task in self._tasks if task.wake_s <= latest]
        chosen = ready[0] if len(ready) == 1 else self._choices.choose(self.current, ready)
        self.now_s = max(self.now_s, chosen.wake_s)
        return chosen


class _Threads:
    """Threads that stay for the next run: a new one is slow to begin."""

    def __init__(self) -> None:
        self._idle: list[_Thread] = []

    def start(self, action: Callable[[], None]) -> None:
        try:
            thread = self._idle.pop()
        except IndexError:
            thread = _Thread(self._idle)
        thread.begin(action)


class _Thread:
    def __init__(self, idle: list[_Thread]) -> None:
        self._idle = idle
        self._begin = threading.Lock()
        self._begin.acquire()
        self._action: Callable[[], None] = lambda: None
        threading.Thread(target=self._work, name="simulated", daemon=True).start()

    def begin(self, action: Callable[[], None]) -> None:
        self._action = action
        self._begin.release()

    def _work(self) -> None:
        while True:
            self._begin.acquire()
            action, self._action = self._action, lambda: None
            action()
            del action
            self._idle.append(self)


_threads = _Threads()
