"""One rank of a simulated job as a process: what the program finds in its modules while it runs."""

from __future__ import annotations

import importlib
import os
import pkgutil
import sys
import threading
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import lru_cache
from types import BuiltinFunctionType, FunctionType
from typing import Any
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

import attrs
import torch.distributed as dist

from hypercomm.process_groups import torch_internals as c10d
from hypercomm.process_groups.torch_internals import store as real_store
from hypercomm.process_groups.torch_internals.gloo import LazyInit
from hypercomm.testing.other_world import OtherWorld
from hypercomm.testing.simulation.group import SimulatedGroup
from simulated_job import substitutes
from simulated_job.faults import (
    AnswersLate,
    AsksLate,
    DelayedWrite,
    Dies,
    IsInterrupted,
    LostRequest,
    Pauses,
    RankFault,
)
from simulated_job.gloo import Network, SimulatedGloo
from simulated_job.scheduler import Scheduler, Task
from simulated_job.store import Client, Server, Within

_CONTAINERS = (dict, list, set, Counter, OrderedDict, WeakKeyDictionary, WeakSet)
_LOCK, _RLOCK = type(threading.Lock()), type(threading.RLock())
_SHARED = (FunctionType, BuiltinFunctionType, type)
_ROOMS = ("hypercomm.process_groups.", "hypercomm.grid.")
_SWITCH = "TORCH_GLOO_LAZY_INIT"
"""What the library sets in the environment of a process."""

for _room in _ROOMS:  # a module that a program loads first would keep the real clock and locks
    _package = importlib.import_module(_room.rstrip("."))
    for _found in pkgutil.walk_packages(_package.__path__, _room):
        importlib.import_module(_found.name)


@attrs.frozen
class Call:
    """What a rank called, by `attempt`.

    Attributes:
        label: What was called.
        value: What it returned.
        error: What it raised, if it did.
        began_s: When, in virtual time.
        took_s: How long it took.
    """

    label: str
    value: Any
    error: BaseException | None
    began_s: float
    took_s: float

    @property
    def is_ok(self) -> bool:
        """Whether it returned."""
        return self.error is None

    @property
    def kind(self) -> str:
        """What it raised, by name; "" where it returned."""
        return "" if self.error is None else type(self.error).__name__


class JobGroup(SimulatedGroup):
    """Stands in for a process group of a simulated job."""

    part: SimulatedGloo | None = None


class RankProcess:
    """One rank of a simulated job.

    Args:
        rank: The rank.
        job: Its job.

    Attributes:
        held_s: Until when it is paused.
        is_alive: Whether it has not died.
        points: How often it could be stopped so far.
        calls: What it has called by `attempt`.
        main: Its main task.
        clients: Its views of the stores, by their names.
    """

    def __init__(self, rank: int, job: JobState) -> None:
        self.rank = rank
        self.job = job
        self.held_s = 0.0
        self.is_alive = True
        self.points = 0
        self.calls: list[Call] = []
        self.main: Task | None = None
        self.clients: dict[str, Client] = {}
        self._faults = [fault for fault in job.faults if fault.rank == rank]
        self._values = job.state.fresh()
        self._switch: str | None = None
        self.world = OtherWorld(
            lambda: JobGroup("0", rank, len(job.everyone), job.timeout, "default_pg"),
            job.everyone,
            job.backend,
            self._create,
            store=self.client(""),
            end=_end,
        )

    def client(self, name: str) -> Client:
        """Return a store of the job as this rank sees it."""
        if name not in self.clients:
            server = self.job.servers.setdefault(name, Server())
            self.clients[name] = Client(server, self.job.scheduler)
        return self.clients[name]

    def _create(
        self, name: str, ranks: tuple[int, ...], backend: str, timeout: timedelta, description: str
    ) -> JobGroup:
        group = JobGroup(name, ranks.index(self.rank), len(ranks), timeout, description)
        if "gloo" in c10d.single_backends(backend):
            store = Within(real_store.store(), f"{name}//cpu/")
            gloo: Any = (
                dist.distributed_c10d.ProcessGroupGloo
            )  # ours, or what hypercomm puts around it
            group.part = gloo(store, group.rank(), len(ranks), timeout=timeout)
        return group

    def is_gone(self) -> None:
        """Say that nobody needs to wait for this rank at a gate."""
        self.job.gone.add(self.rank)
        self.job.scheduler.notify(self.job.gates)

    # ---- what the scheduler calls -------------------------------------------------------------

    def enter(self) -> None:
        """Put in place what this rank finds in its modules and its environment."""
        self.job.state.put(self._values)
        self.world.show()
        _set_switch(self._switch)

    def leave(self) -> None:
        """Keep what is there."""
        self._values = self.job.state.taken()
        self._switch = os.environ.get(_SWITCH)

    def arrive(self, task: Task, what: str) -> None:
        """Count a scheduling point, at which a fault may happen."""
        self.points += 1
        if not self._faults:
            return
        for fault in self._faults:
            if fault.at == self.points or (isinstance(fault.at, str) and fault.at in what):
                self._faults = [other for other in self._faults if other is not fault]
                self._suffer(fault, task)

    def _suffer(self, fault: RankFault, task: Task) -> None:
        scheduler = self.job.scheduler
        self.job.happened.append(fault)
        if isinstance(fault, Dies):
            self.is_alive = False
            scheduler.end(self)
            self.job.network.changed()
            self.is_gone()
        elif isinstance(fault, IsInterrupted) and self.main is not None:
            scheduler.throw(self.main, KeyboardInterrupt())
        elif isinstance(fault, Pauses):
            scheduler.hold(self, scheduler.now_s + fault.seconds)
        else:
            for client in self.clients.values():
                self._suffer_on(client, fault, task)

    def _suffer_on(self, client: Client, fault: RankFault, task: Task) -> None:
        """Let something happen to the rank's link to a store."""
        if isinstance(fault, AnswersLate):
            client.late_once_s = fault.seconds
        elif isinstance(fault, DelayedWrite):
            client.hold_set_s = fault.seconds
        elif isinstance(fault, LostRequest):
            client.breaks_once = True
        elif isinstance(fault, AsksLate):
            task.wake_s = client.busy_until_s = self.job.scheduler.now_s + fault.seconds


def _end(group: JobGroup) -> None:
    if group.part is not None:
        group.part.end()


def _set_switch(value: str | None) -> None:
    if value is not None:
        os.environ[_SWITCH] = value
    elif _SWITCH in os.environ:
        del os.environ[_SWITCH]


@attrs.define(eq=False)
class JobState:
    """What the ranks of a simulated job have in common."""

    scheduler: Scheduler
    everyone: dict[int, int]
    backend: str
    timeout: timedelta
    faults: list[RankFault]
    state: ModuleState
    network: Network
    servers: dict[str, Server] = attrs.field(factory=dict)
    gates: defaultdict[str, set[int]] = attrs.field(factory=lambda: defaultdict(set))
    gone: set[int] = attrs.field(factory=set)
    happened: list[object] = attrs.field(factory=list)


class _Workers:
    """Stands in for the threads that ask the store: each question has a task of its own."""

    def start(self, action: Callable[[], None], done: Callable[[], None]) -> None:
        scheduler = substitutes.running.now
        if scheduler is None or scheduler.current is None:
            action()
            done()
            return

        def run() -> None:
            real_store.ask_here()
            action()
            done()

        scheduler.spawn(scheduler.current.process, run)


class ModuleState:
    """The variables of our modules that a process has for itself, and what stands in for others.

    Those are variables in lower case that hold containers, locks or what belongs to a thread: a
    simulated rank finds its own there. Constants are in upper case.

    Args:
        seed: Makes what would be at random.
    """

    def __init__(self, seed: int) -> None:
        stand_ins = {id(real): ours for real, ours in substitutes.modules(seed)}
        stand_ins[id(real_store.workers)] = _Workers()
        self._replaced: list[tuple[dict[str, Any], str, object, object]] = []
        slots: dict[int, tuple[Callable[[], object], list[tuple[dict[str, Any], str]]]] = {}
        for variables, name in _variables(len(sys.modules)):
            value = variables[name]
            if id(value) in stand_ins:
                self._replaced.append((variables, name, value, stand_ins[id(value)]))
            elif (make := _maker(value)) is not None:
                _, places = slots.setdefault(id(value), (make, []))
                places.append((variables, name))
        self._slots = list(slots.values())

    def fresh(self) -> list[object]:
        """Return what a new process begins with."""
        return [make() for make, _ in self._slots]

    def put(self, values: list[object]) -> None:
        """Put the values of a process where its modules find them."""
        for (_, places), value in zip(self._slots, values, strict=True):
            for variables, name in places:
                variables[name] = value

    def taken(self) -> list[object]:
        """Return the values that are there."""
        return [places[0][0][places[0][1]] for _, places in self._slots]

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Let our modules have what stands in for others within a `with` block."""
        before, switch = self.taken(), os.environ.get(_SWITCH)
        for variables, name, _, ours in self._replaced:
            variables[name] = ours
        try:
            yield
        finally:
            for variables, name, real, _ in self._replaced:
                variables[name] = real
            self.put(before)
            _set_switch(switch)


@lru_cache(maxsize=1)
def _variables(_: int) -> list[tuple[dict[str, Any], str]]:
    """Return the variables in lower case of our modules, found anew once there are more modules."""
    return [
        (vars(module), name)
        for path, module in list(sys.modules.items())
        if path.startswith(_ROOMS)
        for name, value in vars(module).items()
        if name == name.lower() and not name.startswith("__") and not isinstance(value, _SHARED)
    ]


def _maker(value: object) -> Callable[[], object] | None:
    """Return what makes a variable anew for each process; None where all may have it."""
    if isinstance(value, threading.local):
        return substitutes.Local
    if isinstance(value, _LOCK):
        return substitutes.Lock
    if isinstance(value, _RLOCK):
        return substitutes.RLock
    if isinstance(value, LazyInit):
        return LazyInit
    if isinstance(value, defaultdict):
        return lambda: defaultdict(value.default_factory)
    if isinstance(value, (*_CONTAINERS, WeakValueDictionary)):
        return type(value)
    return None
