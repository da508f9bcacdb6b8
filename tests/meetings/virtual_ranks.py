"""Runs the ranks of a job in this process, with a store in memory and a virtual clock.

Each rank runs the real `Meeting`, on real threads of which one runs at a time. Each request to the
store is a step. A function chooses which thread takes the next step, so a run can be repeated, and
all orders of a few steps can be run.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import Any
from unittest import mock

import attrs
import torch.distributed as dist

from hypercomm.process_groups.meeting import Call, meet
from hypercomm.process_groups.system import system
from hypercomm.process_groups.world import Scope, World

T = 10.0
"""The timeout of calls, in seconds."""


class EndedError(BaseException):
    """Raised in the threads of a rank that has died, and of a run that is over."""


class Task:
    """A thread of a rank."""

    def __init__(self, rank: Rank, action: Callable[[], object]) -> None:
        self.rank, self.action = rank, action
        self.wake_s = 0.0
        self.awaits: object = None
        self.error: BaseException | None = None
        self.is_asking = False
        self.baton = threading.Lock()  # released to run this task
        self.baton.acquire()


class Scheduler:
    """Runs one task at a time, on a virtual clock.

    Args:
        choose: Returns which one of so many tasks makes the next request. All other tasks wait.
        delay: Returns the duration of a step, in seconds.
    """

    def __init__(self, choose: Callable[[int], int], delay: Callable[[], float]) -> None:
        self.choose, self.delay = choose, delay
        self.now_s = 0.0
        self.ranks: list[Rank] = []
        self.current: Task
        self.failure: BaseException | None = None
        self._tasks: list[Task] = []
        self._finished = threading.Lock()
        self._finished.acquire()

    def run(self) -> None:
        self._next()
        self._finished.acquire()
        if self.failure is not None:
            raise self.failure

    def spawn(self, rank: Rank, action: Callable[[], object]) -> Task:
        task = Task(rank, action)
        task.wake_s = self.now_s + self.delay()
        self._tasks.append(task)
        threading.Thread(target=self._run, args=(task,), daemon=True).start()
        return task

    def sleep(self, seconds: float = 0.0, *, is_asking: bool = False) -> None:
        """End a step of the current task. `is_asking` means that a request follows."""
        self.current.is_asking = is_asking
        self._switch(None, self.now_s + seconds + self.delay())

    def wait(self, on: object, until_s: float) -> None:
        """Wait until `notify` is called with the same object, or until a time."""
        self._switch(on, until_s)

    def notify(self, on: object) -> None:
        for task in self._tasks:
            if task.awaits is on:
                task.awaits = None
                task.wake_s = max(self.now_s + self.delay(), task.rank.held_s)

    def delay_all(self, rank: Rank) -> None:
        """Delay all tasks of a rank that is suspended."""
        for task in self._tasks:
            if task.rank is rank:
                task.wake_s = max(task.wake_s, rank.held_s)

    def throw(self, task: Task, error: BaseException) -> None:
        """Raise an error in a task at its next step."""
        task.error, task.wake_s = error, max(self.now_s, task.rank.held_s)

    def _switch(self, on: object, wake_s: float) -> None:
        me = self.current
        self._check(me)
        me.awaits, me.wake_s = on, max(wake_s, me.rank.held_s)
        self._next()
        me.baton.acquire()
        me.awaits, me.is_asking = None, False
        self._check(me)

    def _check(self, task: Task) -> None:
        if task.rank.is_dead or self._is_over():
            raise EndedError
        if task.error is not None:
            error, task.error = task.error, None
            raise error

    def _is_over(self) -> bool:
        is_over = all(rank.is_done or rank.is_dead for rank in self.ranks)
        return is_over or self.failure is not None

    def _run(self, task: Task) -> None:
        task.baton.acquire()
        try:
            self._check(task)
            task.action()
        except EndedError:
            pass
        except BaseException as error:  # noqa: BLE001 - raised by `run`
            self.failure = self.failure or error
        self._tasks.remove(task)
        self._next()

    def _next(self) -> None:
        """Let the next task run."""
        if not self._tasks:
            self._finished.release()
            return
        is_over = self._is_over()
        for task in self._tasks:
            if is_over or task.rank.is_dead:
                task.wake_s = self.now_s
        self.now_s = max(self.now_s, min(task.wake_s for task in self._tasks))
        if self.now_s > 1e6:
            self.failure = self.failure or AssertionError("all ranks wait for ever")
        ready = [task for task in self._tasks if task.wake_s <= self.now_s]
        inner = [task for task in ready if not task.is_asking]
        self.current = inner[0] if inner else ready[self.choose(len(ready))]
        self.current.baton.release()


class Event:
    """Replaces `threading.Event`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._is_set = scheduler, False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        self._scheduler.notify(self)

    def wait(self, timeout: float = math.inf) -> bool:
        until_s = self._scheduler.now_s + timeout
        while not self._is_set and self._scheduler.now_s < until_s:
            self._scheduler.wait(self, until_s)
        return self._is_set


class Lock:
    """Replaces `threading.Lock`."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler, self._is_held = scheduler, False

    def acquire(self, timeout: float = math.inf) -> bool:
        until_s = self._scheduler.now_s + timeout
        while self._is_held and self._scheduler.now_s < until_s:
            self._scheduler.wait(self, until_s)
        is_free = not self._is_held
        self._is_held = True
        return is_free

    def release(self) -> None:
        self._is_held = False
        self._scheduler.notify(self)


# ---- the store ----------------------------------------------------------------------------------


@attrs.define(eq=False)
class Server:
    """The store of a job.

    Attributes:
        held: The keys and values.
        gone_s: The time from which the store is gone.
        silent_s: The time from which the store does not answer.
        missed: Keys that a rank deleted when they did not exist.
    """

    held: dict[str, bytes] = attrs.field(factory=dict)
    gone_s: float = math.inf
    silent_s: float = math.inf
    missed: list[str] = attrs.field(factory=list)


class Client(dist.Store):  # type: ignore[name-defined, misc]
    """A connection of one rank to the store."""

    def __init__(self, server: Server, rank: Rank) -> None:
        super().__init__()
        self._server, self._rank = server, rank

    def _step(self, verb: str) -> dict[str, bytes]:
        scheduler = self._rank.scheduler
        self._rank.note_request(verb)
        scheduler.sleep(is_asking=True)
        if scheduler.now_s >= self._server.silent_s:
            scheduler.sleep(1e5)
        if scheduler.now_s >= self._server.gone_s:
            raise dist.DistNetworkError("the simulated store is gone")
        return self._server.held

    def _put(self, key: str, value: str) -> bytes:
        self._server.held[key] = value.encode()
        self._rank.scheduler.notify(self._server)
        return self._server.held[key]

    def clone(self) -> Client:
        self._step("clone")
        return Client(self._server, self._rank)

    def set(self, key: str, value: str) -> None:
        self._step("set")
        self._put(key, value)

    def wait(self, keys: list[str], timeout: timedelta) -> None:
        held = self._step("wait")
        scheduler = self._rank.scheduler
        until_s = scheduler.now_s + timeout.total_seconds()
        while keys[0] not in held:
            now_s = scheduler.now_s
            if now_s >= until_s:
                assert self._rank.held_s, (
                    "a wait must end by a write, because torch warns otherwise"
                )
                raise dist.DistStoreError("wait timeout")
            ends = [one for one in (self._server.gone_s, self._server.silent_s) if one > now_s]
            scheduler.wait(self._server, min([until_s, *ends]))
            if scheduler.now_s >= self._server.silent_s:
                scheduler.sleep(1e5)
            if scheduler.now_s >= self._server.gone_s:
                raise dist.DistNetworkError("the simulated store is gone")

    def get(self, key: str) -> bytes:
        held = self._step("get")
        assert key in held, f"get({key!r}) would block, because the key has been deleted"
        return held[key]

    def check(self, keys: list[str]) -> bool:
        return keys[0] in self._step("check")

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        found = self._step("compare_set").get(key)
        if found is None and expected == "":
            return self._put(key, desired)
        if found == expected.encode():
            return self._put(key, desired)
        return expected.encode() if found is None else found

    def add(self, key: str, amount: int) -> int:
        found = int(self._step("add").get(key, b"0"))
        return int(self._put(key, str(found + amount)))

    def delete_key(self, key: str) -> bool:
        found = self._step("delete_key").pop(key, None)
        if found is None:
            self._server.missed.append(key)
        return found is not None

    def list_keys(self) -> list[str]:
        return [*self._step("list_keys")]


# ---- ranks --------------------------------------------------------------------------------------


@attrs.frozen(eq=False, slots=False)
class VirtualWorld(World):
    """The world of a rank, with the store of the run."""

    client: Any = None

    @property
    def store(self) -> Any:
        return self.client


@attrs.frozen
class Made:
    """A call of a rank: what it returned or raised, and when."""

    value: Any
    error: BaseException | None
    began_s: float
    took_s: float

    @property
    def kind(self) -> str:
        """The class name of the error, or ""."""
        return "" if self.error is None else type(self.error).__name__


@attrs.define(eq=False)
class Rank:
    """A rank of a run.

    Attributes:
        calls: The calls that the rank has made.
        requests: The requests of the rank since the last `requests.clear()`, in order.
        faults: Maps the number of a request to a function that is called before the request.
    """

    number: int
    scheduler: Scheduler
    world: Any = None
    calls: list[Made] = attrs.field(factory=list)
    requests: list[str] = attrs.field(factory=list)
    faults: dict[int, Callable[[Rank], None]] = attrs.field(factory=dict)
    is_done: bool = False
    is_dead: bool = False
    held_s: float = 0.0
    main: Task | None = None
    _counted: int = 0

    def note_request(self, verb: str) -> None:
        self.requests.append(verb)
        self._counted += 1
        fault = self.faults.pop(self._counted, None)
        if fault is not None:
            fault(self)

    def die(self) -> None:
        self.is_dead = True
        self.scheduler.notify(self.scheduler)

    def interrupt(self) -> None:
        """Raise KeyboardInterrupt in the calling thread, unless its program is over."""
        if self.main is not None and not self.is_done:
            self.scheduler.throw(self.main, KeyboardInterrupt())

    def hold(self, seconds: float) -> None:
        """Suspend all threads of the rank."""
        self.held_s = self.scheduler.now_s + seconds
        self.scheduler.delay_all(self)

    def sleep(self, seconds: float) -> None:
        self.scheduler.sleep(seconds)

    def attempt(self, function: Callable[[], Any]) -> Made:
        """Make a call, and note its result or error."""
        began_s = self.scheduler.now_s
        value = error = None
        try:
            value = function()
        except (Exception, KeyboardInterrupt) as raised:  # noqa: BLE001 - the test checks it
            error = raised
        made = Made(value, error, began_s, self.scheduler.now_s - began_s)
        self.calls.append(made)
        return made

    def meet(
        self,
        path: str = "tp",
        ranks: Sequence[int] | None = None,
        facts: Sequence[str] = ("a call",),
        limit_s: float = T,
        **options: Any,
    ) -> Made:
        """Meet other ranks, and note the name of the meeting or the error."""
        among = range(self.world.size) if ranks is None else ranks
        scope = Scope(self.world, path, among, **options)

        def call() -> str:
            with meet(scope, Call.of(f"call({path})", facts), limit_s) as meeting:
                return meeting.name

        return self.attempt(call)


@attrs.frozen
class Run:
    """The result of a run."""

    ranks: list[Rank]
    server: Server
    now_s: float

    def calls(self, number: int) -> list[Made]:
        """Return the call with index `number` of each living rank that has made it."""
        living = [rank for rank in self.ranks if not rank.is_dead]
        return [rank.calls[number] for rank in living if len(rank.calls) > number]

    def kinds(self, number: int) -> list[str]:
        return [call.kind for call in self.calls(number)]

    def __str__(self) -> str:
        lines = []
        for rank in self.ranks:
            calls = [f"{one.began_s:.2f}+{one.took_s:.2f} {one.error!r}" for one in rank.calls]
            lines.append(f"rank {rank.number} {'(dead)' if rank.is_dead else ''}: {calls}")
        return "\n".join(lines)


def run(
    program: Callable[[Rank], object],
    size: int,
    *,
    seed: int = 0,
    choose: Callable[[int], int] | None = None,
    server: Server | None = None,
    faults: Iterable[tuple[int, int, Callable[[Rank], None]]] = (),
    processes: int | None = None,
) -> Run:
    """Run a program on all ranks.

    Args:
        program: The program of a rank.
        size: The number of ranks.
        seed: Determines the duration of each step.
        choose: Chooses the next task, in place of durations. Steps then take no time.
        server: The store. Default: a new store.
        faults: Ranks, the number of a request, and what happens before it.
        processes: The number of processes, if some of them replace others. Default: one per rank.
    """
    source = random.Random(seed)
    speeds = [10 ** source.uniform(-5, -3) for _ in range(8)]
    delay = lambda: source.choice(speeds) * source.expovariate(1.0)  # noqa: E731
    scheduler = Scheduler(choose or (lambda _: 0), delay if choose is None else lambda: 0.0)
    server = server or Server()
    ranks = [Rank(number, scheduler) for number in range(processes or size)]
    for rank in ranks:
        limit = timedelta(seconds=T)
        world = VirtualWorld(rank.number, size, "gloo", has_store=True, timeout=limit)
        rank.world = attrs.evolve(world, client=Client(server, rank))
        rank.world.memory.namespace = "job"
    for number, at, fault in faults:
        ranks[number].faults[at] = fault
    scheduler.ranks = ranks

    def main_of(rank: Rank) -> Callable[[], None]:
        def main() -> None:
            program(rank)
            rank.is_done = True

        return main

    replaced: dict[str, Any] = {
        "now": lambda: scheduler.now_s,
        "sleep": scheduler.sleep,
        "event": lambda: Event(scheduler),
        "lock": lambda: Lock(scheduler),
        "start": lambda action, done: scheduler.spawn(
            scheduler.current.rank, lambda: (action(), done())
        ),
    }
    with contextlib.ExitStack() as stack:
        for name, function in replaced.items():
            stack.enter_context(mock.patch.object(system, name, function))
        for rank in ranks:
            rank.main = scheduler.spawn(rank, main_of(rank))
        scheduler.run()
    return Run(ranks, server, scheduler.now_s)


def every_order(program: Callable[[Rank], object], size: int) -> Iterator[Run]:
    """Run a program in every order of its steps."""
    choices: list[list[int]] = [[0, 1]]  # the choice at each step, and the number of choices
    while choices:
        steps = itertools.count()

        def choose(count: int, steps: Iterator[int] = steps) -> int:
            at = next(steps)
            if at == len(choices):
                choices.append([0, count])
            choices[at][1] = count
            return choices[at][0]

        yield run(program, size, choose=choose)
        while choices and choices[-1][0] + 1 >= choices[-1][1]:
            choices.pop()
        if choices:
            choices[-1][0] += 1


def gate(rank: Rank, name: str, counts: Counter[str]) -> None:
    """Wait until all living ranks that still run have reached the gate."""
    scheduler = rank.scheduler
    counts[name] += 1
    scheduler.notify(counts)
    while counts[name] < sum(not (one.is_dead or one.is_done) for one in scheduler.ranks):
        scheduler.wait(counts, scheduler.now_s + 1.0)
