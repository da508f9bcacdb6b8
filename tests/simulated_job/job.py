"""Runs the real code on all ranks of a simulated job, with a simulated store, gloo and clock."""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from typing import Any, NamedTuple
from unittest import mock

import attrs
import torch
import torch.distributed as dist
from hypercomm.process_groups.agreement.system import system

from hypercomm.grid import connect
from hypercomm.process_groups import torch_internals as torchdist
from hypercomm.testing.simulated_group import SimulatedGroup
from hypercomm.testing.worlds import OtherWorld, other_worlds
from simulated_job.scheduler import EndedError, Event, Scheduler, SimulatedSystem, Task

_LOST = "the link to the simulated store is lost"


class Fault(NamedTuple):
    """A fault of one rank.

    Attributes:
        rank: The rank.
        at: The step of the rank at which the fault occurs, counted from 1 after `mark`.
        kind: "dies", "is interrupted" or "pauses". Other kinds affect the next store operation of
            the rank: "loses a request", "loses a reply", "waits for a request", "waits for a
            reply", or "is cut off", which makes the store silent for all ranks.
        seconds: The duration of a pause, of a wait, or of the silence of the store.
    """

    rank: int
    at: int
    kind: str
    seconds: float = 0.0


@attrs.frozen
class Made:
    """A call that a program made through `attempt`."""

    label: str
    value: Any
    error: BaseException | None
    began_s: float
    took_s: float

    @property
    def kind(self) -> str:
        """The class name of the error, or "" if the call returned."""
        return "" if self.error is None else type(self.error).__name__


class Group(NamedTuple):
    """A process group of a rank."""

    name: str
    ranks: tuple[int, ...]
    backend: str
    timeout: timedelta
    description: str


# ---- the store ---------------------------------------------------------------------------------


@attrs.define
class Server:
    """The content of the store, and the times at which the store is gone or silent.

    Attributes:
        held: The keys and values.
        gone_s: The time from which the store is gone.
        silent_s: The time from which the store is silent.
        back_s: The time at which the store replies again, also to requests sent in the meantime.
        requests: How many requests the store has received.
    """

    held: dict[str, bytes] = attrs.field(factory=dict)
    gone_s: float = math.inf
    silent_s: float = math.inf
    back_s: float = 1e6
    requests: int = 0


class Client(dist.Store):  # type: ignore[name-defined, misc]
    """The store as one rank sees it. Each operation is a step of the schedule."""

    def __init__(self, server: Server, rank: Rank) -> None:
        super().__init__()
        self._server = server
        self._rank = rank
        self._held = server.held

    def _do(self, verb: str, key: str, act: Callable[[], Any]) -> Any:
        scheduler, server = self._rank.job.scheduler, self._server
        scheduler.pause(f"{verb} {key}")
        server.requests += 1
        fault = self._rank.link
        self._rank.link = None
        kind, seconds = ("", 0.0) if fault is None else (fault.kind, fault.seconds)
        if kind == "is cut off":
            server.silent_s = scheduler.now_s
            server.back_s = scheduler.now_s + seconds
        if kind == "waits for a request":
            scheduler.pause(kind, seconds)
        self._await_answer()
        if scheduler.now_s >= server.gone_s or kind == "loses a request":
            raise dist.DistNetworkError(_LOST)
        reply = act()
        if kind == "waits for a reply":
            scheduler.pause(kind, seconds)
        if kind == "loses a reply":
            raise dist.DistNetworkError(_LOST)
        return reply

    def _await_answer(self) -> None:
        """Wait while the store is silent."""
        scheduler, server = self._rank.job.scheduler, self._server
        if server.silent_s <= scheduler.now_s < server.back_s:
            scheduler.pause("silence", server.back_s - scheduler.now_s)

    def _put(self, key: str, value: str | bytes) -> bytes:
        self._held[key] = value.encode() if isinstance(value, str) else bytes(value)
        self._rank.job.scheduler.notify(self._server)
        return self._held[key]

    def clone(self) -> Client:
        """Return another connection of this rank."""
        self._rank.job.scheduler.pause("clone")
        return Client(self._server, self._rank)

    def set(self, key: str, value: str | bytes) -> None:
        """Set a key."""
        self._do("set", key, lambda: self._put(key, value))

    def wait(self, keys: Sequence[str], timeout: timedelta) -> None:
        """Wait until all keys are set.

        Raises:
            DistStoreError: A key is not set in time.
        """
        scheduler, server = self._rank.job.scheduler, self._server
        until_s = scheduler.now_s + timeout.total_seconds()
        self._do("wait", keys[0], lambda: None)
        while not self._held.keys() >= {*keys}:
            self._await_answer()
            if scheduler.now_s >= server.gone_s:
                raise dist.DistNetworkError(_LOST)
            limit_s = min(
                until_s, *(s for s in (server.gone_s, server.silent_s) if s > scheduler.now_s)
            )
            if not scheduler.wait(server, limit_s) and scheduler.now_s >= until_s:
                raise dist.DistStoreError("simulated store: wait timeout")

    def get(self, key: str) -> bytes:
        """Return the value of a key, once it is set."""
        self.wait([key], timedelta(seconds=300))
        return bytes(self._do("get", key, lambda: self._held[key]))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the values of keys that are set."""
        found: list[bytes] = self._do("get", keys[0], lambda: [self._held[key] for key in keys])
        return found

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are set."""
        return bool(self._do("check", keys[0], lambda: self._held.keys() >= {*keys}))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set a key if it has the expected value. Return its value afterwards."""

        def act() -> bytes:
            held = self._held.get(key)
            if held == expected.encode() or (held is None and not expected):
                return self._put(key, desired)
            return expected.encode() if held is None else held

        return bytes(self._do("compare_set", key, act))

    def add(self, key: str, amount: int) -> int:
        """Add to the integer that is the value of a key."""
        act = lambda: self._put(key, str(int(self._held.get(key, b"0")) + amount))  # noqa: E731
        return int(self._do("add", key, act))

    def delete_key(self, key: str) -> bool:
        """Delete a key."""
        return self._do("delete_key", key, lambda: self._held.pop(key, None)) is not None

    def list_keys(self) -> list[str]:
        """Return all keys."""
        found: list[str] = self._do("list_keys", "", lambda: [*self._held])
        return found

    def has_extended_api(self) -> bool:
        """Return True."""
        return True


# ---- gloo --------------------------------------------------------------------------------------


class JobGroup(SimulatedGroup):
    """A process group of a simulated rank, which connects like a gloo group."""

    rank_process: Rank
    address = b""
    peers: frozenset[bytes] = frozenset()
    is_closed = False
    supports_coalescing = False
    calls = 0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.received: Counter[object] = Counter()

    def connect(self, place: Any, timeout: timedelta) -> None:
        """Publish an address, read the addresses of the other members, and connect to them.

        Raises:
            RuntimeError: A member has ended, or did not connect in time.
        """
        job = self.rank_process.job
        key = f"{self.group_name}//cpu//0"
        self.address = f"{self.group_name} {self.rank_process} {len(job.network)}".encode()
        host = b"simulated"
        self.address = len(host).to_bytes(8, sys.byteorder) + host + self.address
        job.network[self.address] = self
        place.set(f"{key}/{self._rank}", self.address)
        others = [other for other in range(self._size) if other != self._rank]
        if torchdist.lazy_init.is_set:
            return
        self.peers = frozenset(bytes(place.get(f"{key}/{other}")) for other in others)
        self.wait_for_peers(job.network, lambda: [job.network[one] for one in self.peers], timeout)

    def wait_for_peers(
        self, on: object, find: Callable[[], list[JobGroup]], timeout: timedelta
    ) -> None:
        """Wait until the other members have connected to this one."""
        scheduler = self.rank_process.job.scheduler
        until_s = scheduler.now_s + timeout.total_seconds()
        scheduler.notify(on)
        scheduler.pause("gloo connects")
        while True:
            peers = find()
            if any(peer.is_closed or peer.rank_process.is_dead for peer in peers):
                raise RuntimeError("simulated gloo: connection closed by peer")
            if all(self.address in peer.peers for peer in peers):
                return
            if not scheduler.wait(on, until_s) and scheduler.now_s >= until_s:
                raise RuntimeError("simulated gloo: connecting timed out")

    def allreduce(self, tensors: Any, opts: Any = None) -> Any:  # noqa: ARG002 - torch's
        """Sum over all members, once all of them have made the call."""
        self.calls += 1
        lane = self._lane(self.calls)
        lane[self._rank] = tensors[0].clone()
        return self._work(
            lane, self._size, lambda: tensors[0].copy_(torch.stack([*lane.values()]).sum(0))
        )

    def send(self, tensors: Any, to: int, tag: int = 0) -> Any:
        """Send a tensor to another member."""
        lane = self._lane((self._rank, to, tag))
        lane[len(lane)] = tensors[0].clone()
        return self._work(lane, 0, int)

    def recv(self, tensors: Any, source: int, tag: int = 0) -> Any:
        """Receive the next tensor of another member."""
        key = (source, self._rank, tag)
        at = self.received[key]
        self.received[key] += 1
        lane = self._lane(key)
        return self._work(lane, at + 1, lambda: tensors[0].copy_(lane[at]))

    def _lane(self, key: object) -> dict[int, Any]:
        """Return the pending tensors of the collective or pair of members with this key."""
        return self.rank_process.job.lanes.setdefault((self.group_name, key), {})

    def _work(self, lane: dict[int, Any], count: int, end: Callable[[], object]) -> Any:
        scheduler = self.rank_process.job.scheduler
        until_s = scheduler.now_s + self.options._timeout.total_seconds()
        scheduler.notify(lane)

        def wait(*_: object) -> bool:
            while len(lane) < count:
                if not scheduler.wait(lane, until_s):
                    raise RuntimeError("simulated gloo: timed out")
            end()
            return True

        return mock.Mock(wait=wait)

    def end(self) -> None:
        """Close all connections. Members that connect afterwards fail."""
        self.is_closed = True
        self.rank_process.job.scheduler.notify(self.rank_process.job.network)


# ---- one rank, and the job ---------------------------------------------------------------------


class Rank:
    """One rank of a simulated job.

    Attributes:
        value: The result of the program.
        error: The error of the program.
        calls: The calls that the program made through `attempt`.
        is_dead: Whether the rank has died.
        points: How many steps the rank has taken since `mark`.
        held: The process groups that the rank has when its program ends.
        store: The rank's client of the store.
    """

    def __init__(self, number: int, job: Job) -> None:
        self.number, self.job = number, job
        self.held_s = 0.0
        self.points = -math.inf
        self.is_dead = self.is_calling = False
        self.calls: list[Made] = []
        self.held: list[Group] = []
        self.value: Any = None
        self.error: BaseException | None = None
        self.link: Fault | None = None
        self.main: Task | None = None
        self.gates: Counter[str] = Counter()
        self._place: Any = None
        self._position = 0
        self.store = Client(job.server, self)
        self.world = OtherWorld(
            lambda: self._group("0", self.number, job.size, job.timeout, "default_pg"),
            {rank: rank for rank in range(job.size)},
            "gloo",
            self._create,
            store=self.store,
            end=lambda group: group.end(),
        )

    def __str__(self) -> str:
        return f"rank {self.number}"

    def enter(self) -> None:
        """Make torch use the job of this rank."""
        self.world.show()

    def arrive(self) -> None:
        """Count a step, and apply the faults that are due."""
        self.points += 1
        scheduler = self.job.scheduler
        for fault in [one for one in self.job.faults if one[:2] == (self.number, self.points)]:
            self.job.faults.remove(fault)
            self.job.happened.append(fault)
            if fault.kind == "dies":
                self.is_dead = True
                scheduler.end(self)
                scheduler.notify(self.job.network)
                scheduler.notify(self.job)
            elif fault.kind == "is interrupted":
                if self.main is not None and self.is_calling:
                    scheduler.throw(self.main, KeyboardInterrupt())
            elif fault.kind == "pauses":
                scheduler.hold(self, fault.seconds)
            else:
                self.link = fault

    def new_group(
        self, size: int, position: int, ranks: Sequence[int], *args: Any, **options: Any
    ) -> tuple[Any, None]:
        """Create a group with the given store, as torch's `_new_process_group_helper` does.

        `ranks` is empty for a group of a joined world.
        """
        self._position = position
        self._place = args[1]
        return self.world.new_group(size, position, ranks or range(size), *args, **options)

    def _group(
        self, name: str, position: int, size: int, timeout: timedelta, text: str
    ) -> JobGroup:
        group = JobGroup(name, position, size, timeout, text)
        group.rank_process = self
        return group

    def _create(
        self, name: str, ranks: tuple[int, ...], backend: str, timeout: timedelta, text: str
    ) -> JobGroup:
        group = self._group(name, self._position, len(ranks), timeout, text)
        if "gloo" in torchdist.single_backends(backend):
            try:
                group.connect(self._place, timeout)
            except BaseException:
                group.end()
                raise
        return group

    def groups(self) -> list[Group]:
        """Return the process groups that torch has registered for this rank while it runs."""
        found = []
        tables = dist.distributed_c10d._world
        for group, (backend, _) in tables.pg_map.items():
            if group is not tables.default_pg:
                ranks = tuple(tables.pg_group_ranks[group])
                text = group.group_desc
                timeout = group.options._timeout
                found.append(Group(tables.pg_names[group], ranks, backend, timeout, text))
        return found


@attrs.define(eq=False, repr=False)
class Job:
    """A simulated job, and the result of its run.

    Attributes:
        ranks: The ranks of the job.
        server: The store.
        happened: The faults that have occurred.
    """

    scheduler: Scheduler
    size: int
    timeout: timedelta
    faults: list[Fault]
    server: Server
    ranks: list[Rank] = attrs.field(factory=list)
    network: dict[bytes, JobGroup] = attrs.field(factory=dict)
    lanes: dict[Any, dict[int, Any]] = attrs.field(factory=dict)
    happened: list[Fault] = attrs.field(factory=list)

    @property
    def is_stuck(self) -> str:
        """The reason why the run was ended early, or "" if it was not ended early."""
        return self.scheduler.is_stuck

    def calls(self, number: int) -> list[Made]:
        """Return the call with index `number` of each living rank. -1 returns the last calls."""
        return [rank.calls[number] for rank in self.living() if len(rank.calls) > number]

    def kinds(self, number: int) -> list[str]:
        """Return the error class of the call with index `number` of each living rank."""
        return [call.kind for call in self.calls(number)]

    def living(self) -> list[Rank]:
        """Return the ranks that have not died."""
        return [rank for rank in self.ranks if not rank.is_dead]

    def values(self) -> list[Any]:
        """Return the results of the programs. Raise if one has failed."""
        for rank in self.ranks:
            if rank.error is not None or rank.is_dead or self.is_stuck:
                raise AssertionError(str(self)) from rank.error
        return [rank.value for rank in self.ranks]

    def __str__(self) -> str:
        lines = [f"{self.size} ranks, {self.scheduler.now_s:.3f} s {self.is_stuck} {self.happened}"]
        for rank in self.ranks:
            lines.append(f"{rank}: {'died' if rank.is_dead else repr(rank.error or rank.value)}")
            for call in rank.calls:
                ended = f"{call.kind}: {call.error}" if call.error is not None else "returned"
                lines.append(f"  {call.began_s:.3f} +{call.took_s:.3f} {call.label}: {ended}")
        return "\n".join(lines)

    __repr__ = __str__


_job: list[Job] = []


def simulate_job(
    program: Callable[..., Any],
    size: int,
    *,
    args: Sequence[object] = (),
    seed: int = 0,
    faults: Iterable[Fault] = (),
    timeout_s: float = 10.0,
    server: Server | None = None,
    most_steps: int = 200_000,
) -> Job:
    """Run a program on all ranks of a job in this process. Equal seeds give equal runs.

    Args:
        program: The function that every rank calls with `args`.
        size: The number of ranks.
        args: The arguments of the program.
        seed: Determines the order in which ranks run.
        faults: The faults of ranks.
        timeout_s: The timeout of WORLD.
        server: The store. The store of an earlier job can be used again.
        most_steps: The number of steps after which the run is ended early.
    """
    scheduler = Scheduler(seed, most_steps)
    server = server or Server()
    # Rank 0 of a gloo WORLD publishes its address under this key.
    server.held["cpu//0/0"] = f"address of job {len(server.held)}".encode()
    job = Job(scheduler, size, timedelta(seconds=timeout_s), [*faults], server)
    was_collecting = gc.isenabled()
    gc.disable()  # grids warn when they are collected, which would differ between runs
    _job.append(job)
    functions = {
        "_new_process_group_helper": lambda *args, **named: this_rank().new_group(*args, **named)
    }
    try:
        with contextlib.ExitStack() as stack:
            for name in ("now", "sleep", "event", "lock", "start"):
                ours = getattr(SimulatedSystem(scheduler), name)
                stack.enter_context(mock.patch.object(system, name, ours))
            stack.enter_context(mock.patch.object(connect, "_is_live", return_value=True))
            stack.enter_context(other_worlds(lambda: this_rank().world, functions))
            job.ranks += [Rank(number, job) for number in range(size)]
            for rank in job.ranks:
                main = functools.partial(_main, rank, program, args)
                rank.main = scheduler.spawn(rank, main, is_main=True)
            scheduler.run()
    finally:
        _job.pop()
        if was_collecting:
            gc.enable()
    return job


def _main(rank: Rank, program: Callable[..., Any], args: Sequence[object]) -> None:
    rank.world.begin()
    try:
        rank.value = program(*args)
    except EndedError:
        raise
    except BaseException as error:  # noqa: BLE001 - the test checks it
        rank.error = error
    finally:
        rank.held = rank.groups()
        rank.gates["over"] = 1
        rank.job.scheduler.notify(rank.job)


# ---- functions for programs --------------------------------------------------------------------


def this_rank() -> Rank:
    """Return the rank that runs now."""
    current = _job[-1].scheduler.current
    if current is None or current.owner is None:
        raise RuntimeError("no rank of a simulated job runs now")
    rank: Rank = current.owner
    return rank


def sleep(seconds: float) -> None:
    """Suspend this rank."""
    this_rank().job.scheduler.pause("sleep of the program", seconds)


def mark() -> None:
    """Start to count the steps of this rank. `Fault.at` is such a count."""
    this_rank().points = 0


def attempt(function: Callable[..., Any], *args: object, **keywords: object) -> Made:
    """Make a call, and record its result or error in `Rank.calls`."""
    rank = this_rank()
    scheduler = rank.job.scheduler
    began_s = scheduler.now_s
    value = error = None
    rank.is_calling = True
    try:
        value = function(*args, **keywords)
    except (Exception, KeyboardInterrupt) as raised:  # noqa: BLE001 - the test checks it
        error = raised
    rank.is_calling = False
    if rank.is_dead:
        raise EndedError
    label = f"{getattr(function, '__name__', function)}{args or ''}{keywords or ''}"
    made = Made(label, value, error, began_s, scheduler.now_s - began_s)
    rank.calls.append(made)
    return made


def gate(name: str) -> None:
    """Wait until all ranks that still run have called this function. The store is not used."""
    rank = this_rank()
    job = rank.job
    rank.gates[name] += 1
    job.scheduler.notify(job)
    while not all(
        other.is_dead or other.gates["over"] or other.gates[name] >= rank.gates[name]
        for other in job.ranks
    ):
        job.scheduler.wait(job)


def thread(action: Callable[[], object]) -> Callable[[], object]:
    """Start another thread of this rank. Return a function that waits until the thread ends."""
    rank = this_rank()
    scheduler = rank.job.scheduler
    ended = Event(scheduler)

    def act() -> None:
        try:
            action()
        finally:
            ended.set()

    scheduler.spawn(rank, act)
    return ended.wait


def interrupt_in(seconds: float) -> None:
    """Raise KeyboardInterrupt in the main thread of this rank after a while."""
    rank = this_rank()
    scheduler, main = rank.job.scheduler, rank.main

    def act() -> None:
        scheduler.pause("before Ctrl-C", seconds)
        if main is not None:
            scheduler.throw(main, KeyboardInterrupt())

    scheduler.spawn(None, act)
