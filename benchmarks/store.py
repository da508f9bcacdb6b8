"""Count the requests that the store of a large job gets when all ranks create five groups.

    python benchmarks/store.py [--ranks 64 16384 131072] [--processes 4096]

Every rank runs the generator of the agreement protocol. `--ranks` simulates this many ranks on a
counted store in this process. The store performs one request after the other, in 14 us each. In one
run, all ranks start at the same time. In another run, they start within 30 s. `--processes` runs
this many ranks in four real processes. Each of these ranks has a connection to a TCPStore. For
comparison, the requests of the barrier at the end of torch's `new_group` are counted.
"""

from __future__ import annotations

import argparse
import heapq
import os
import random
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing import get_context
from typing import Any

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # otherwise each connection logs a warning

import torch.distributed as dist
from hypercomm.process_groups.agreement.driver import perform
from hypercomm.process_groups.agreement.protocol import Member
from hypercomm.process_groups.agreement.records import (
    Add,
    Delete,
    Exchange,
    Moment,
    Now,
    Read,
    Wait,
    Work,
    Write,
)
from hypercomm.process_groups.agreement.scope import Memory, Scope

from hypercomm.process_groups.world import World

REQUEST_S = 14e-6
"""The time that a TCPStore takes for one request, measured on two cores."""

LIMIT_S = 600.0
SKEW_S = 30.0
GROUPS = [f"group {number} over 16384 groups of 8 ranks\nbackend: nccl" for number in range(5)]


def member_of(rank: int, size: int, memory: Memory, began: float = 0.0) -> Member:
    """Return one rank's side of the protocol, in a call that all ranks make."""
    scope = Scope(World(rank, size, "nccl", has_store=True), "calls", range(size), memory=memory)
    return Member(scope, "create_pgs()", lambda: GROUPS, began, began + LIMIT_S)


# ---- a counted store ----------------------------------------------------------------------------


class CountedStore:
    """A store in this process that performs one request after the other.

    Attributes:
        requests: The number of requests.
        sent: The number of bytes of all keys and values that the store has received and sent.
        free: The time in seconds at which the store has performed all requests so far.
    """

    def __init__(self) -> None:
        self.held: dict[str, str] = {}
        self.waiting: dict[str, list[int]] = defaultdict(list)
        self.requests = self.sent = 0
        self.free = 0.0

    def count(self, at: float, *texts: str) -> float:
        """Count one request, and return the time at which it is done."""
        self.requests += 1
        self.sent += sum(map(len, texts))
        self.free = max(self.free, at) + REQUEST_S
        return self.free

    def perform(self, operation: Any, at: float) -> tuple[float, Any]:
        """Perform an operation at a time. Return the time at which it is done, and the reply."""
        held = self.held
        match operation:
            case Exchange(key, expected, text):
                if held.get(key, "") == expected:
                    held[key] = text
                reply = held.get(key, expected)
                return self.count(at, key, expected, text, reply), reply
            case Read(key):
                return self.count(at, key, held.get(key, "")), held.get(key)
            case Add(key, amount):
                held[key] = str(int(held.get(key, "0")) + amount)
                return self.count(at, key, str(amount), held[key]), int(held[key])
            case Write(key, text):
                held[key] = text
                return self.count(at, key, text), None
            case Delete(keys):
                for key in keys:
                    held.pop(key, None)
                    at = self.count(at, key)
                return at, None
        raise TypeError(operation)


class Job:
    """A job whose ranks run their generators on a virtual clock."""

    def __init__(self, size: int, seed: int = 0) -> None:
        drawn = random.Random(seed)  # noqa: S311
        self.store = CountedStore()
        self.ended: dict[int, float] = {}
        self.busiest = Counter[int]()
        self.bytes = Counter[int]()
        self.last_start = 0.0
        self._events: list[tuple[float, int, Any, int]] = []
        self._waits: dict[int, tuple[Wait, int]] = {}
        self._turns = Counter[int]()
        self._memories = [Memory(namespace=f"hypercomm/{size}/0123abcd") for _ in range(size)]
        self._size = size
        self._drawn = drawn
        self._steps: dict[int, Any] = {}

    def call(self, skew_s: float) -> None:
        """Make one call on all ranks, which start within `skew_s`."""
        begin = self.store.free
        self.ended.clear()
        for rank in range(self._size):
            start = begin + self._drawn.uniform(0.0, skew_s)
            self.last_start = max(self.last_start, start)
            member = member_of(rank, self._size, self._memories[rank], start)
            self._steps[rank] = member.call()
            self._push(start, rank, None)
        while self._events:
            at, rank, reply, turn = heapq.heappop(self._events)
            if self._turns[rank] == turn:
                self._advance(at, rank, reply)

    def _push(self, at: float, rank: int, reply: Any) -> None:
        heapq.heappush(self._events, (at, rank, reply, self._turns[rank]))

    def _advance(self, at: float, rank: int, reply: Any) -> None:
        self._turns[rank] += 1
        self._waits.pop(rank, None)
        while True:
            try:
                operation = self._steps[rank].send(reply)
            except StopIteration as end:
                if end.value.kind != "agreed":
                    raise RuntimeError(f"rank {rank}: {end.value}") from None
                self.ended[rank] = at
                del self._steps[rank]
                return
            if isinstance(operation, Now):
                reply = Moment(at)
            elif isinstance(operation, Work):
                reply = True
            else:
                break
        before = self.store.requests, self.store.sent
        if isinstance(operation, Wait):
            self.store.count(at, operation.key)
            self._waits[rank] = operation, self._turns[rank]
            self.store.waiting[operation.key].append(rank)
            self._push(operation.until, rank, None)
        else:
            done, reply = self.store.perform(operation, at)
            self._push(done, rank, reply)
        self._note(rank, before)
        if isinstance(operation, (Wait, Write)):
            self._wake(operation.key, self.store.free)

    def _note(self, rank: int, before: tuple[int, int]) -> None:
        """Record the requests and bytes of a rank since `before`."""
        self.busiest[rank] += self.store.requests - before[0]
        self.bytes[rank] += self.store.sent - before[1]

    def _wake(self, key: str, at: float) -> None:
        """Make the ranks that wait for a key read the key."""
        if key not in self.store.held:
            return
        for rank in self.store.waiting.pop(key, []):
            wait, turn = self._waits.get(rank, (None, -1))
            if wait is None or wait.key != key or turn != self._turns[rank]:
                continue
            before = self.store.requests, self.store.sent
            done, reply = self.store.perform(Read(key), at)
            self._note(rank, before)
            self._turns[rank] += 1
            self._push(done, rank, reply)


def modelled(size: int, skew_s: float) -> str:
    """Return the report line for `size` simulated ranks that all start within `skew_s` seconds."""
    job = Job(size)
    job.call(skew_s)
    seconds = job.store.requests * REQUEST_S
    late = max(job.ended.values()) - job.last_start
    mean, most = job.store.requests / size, max(job.busiest.values())
    return (
        f"{size} ranks: {mean:.2f} requests, {job.store.sent / size:.0f} bytes, {seconds:.2f} s of "
        f"the store; at most {most} requests and {max(job.bytes.values())} bytes of a rank; starts "
        f"within {skew_s:.0f} s, the last rank ends {late:.2f} s after the last start"
    )


# ---- torch's own barrier ------------------------------------------------------------------------


class CountedCalls:
    """A store that counts the requests of torch's functions."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.requests = 0

    def __getattr__(self, name: str) -> Any:
        method = getattr(self._inner, name)

        def call(*arguments: Any) -> Any:
            self.requests += 1
            return method(*arguments)

        return call


def torch_requests(size: int = 8) -> float:
    """Return how many requests a rank makes in the barrier at the end of `new_group`."""
    inner = dist.HashStore()
    stores = [CountedCalls(inner) for _ in range(size)]
    barrier = dist.distributed_c10d._store_based_barrier
    threads = [
        threading.Thread(target=barrier, args=(rank, store, "group", size, timedelta(seconds=60)))
        for rank, store in enumerate(stores)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(store.requests for store in stores) / size


# ---- a real store -------------------------------------------------------------------------------


def run_rank(port: int, rank: int, size: int, start: float, ends: dict[int, float]) -> None:
    """Run the generator of one rank over a separate connection to the store."""
    store = dist.TCPStore("127.0.0.1", port, None, is_master=False, wait_for_workers=False)
    store.add("connected", 1)
    store.wait(["all are connected"], timedelta(seconds=LIMIT_S))
    time.sleep(start)
    steps = member_of(rank, size, Memory(namespace="hypercomm/real"), time.monotonic()).call()
    reply: Any = None
    while True:
        try:
            operation = steps.send(reply)
        except StopIteration as end:
            if end.value.kind == "agreed":
                ends[rank] = time.monotonic()
            return
        match operation:
            case Now():
                reply = Moment(time.monotonic())
            case Work():
                reply = True
            case Wait(key):
                store.wait([key], timedelta(seconds=LIMIT_S))
                reply = perform(Read(key), store)
            case _:
                reply = perform(operation, store)


def run_part(port: int, ranks: range, size: int, starts: list[float], results: Any) -> None:
    """Run some ranks in the threads of one process."""
    threading.stack_size(256 * 1024)
    ends: dict[int, float] = {}
    threads = [
        threading.Thread(target=run_rank, args=(port, rank, size, starts[rank], ends))
        for rank in ranks
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    results.put(ends)


def measured(size: int, processes: int = 4, skew_s: float = 5.0) -> str:
    """Return the report line for `size` ranks on a TCPStore."""
    server = dist.TCPStore("127.0.0.1", 0, None, is_master=True, wait_for_workers=False)
    drawn, context = random.Random(1), get_context("spawn")  # noqa: S311
    starts = [drawn.uniform(0.0, skew_s) for _ in range(size)]
    results = context.Queue()
    parts = [range(first, size, processes) for first in range(processes)]
    workers = [
        context.Process(target=run_part, args=(server.port, part, size, starts, results))
        for part in parts
    ]
    for worker in workers:
        worker.start()
    while server.add("connected", 0) < size:
        time.sleep(0.05)
    begin = time.monotonic()
    server.set("all are connected", "1")
    ends: dict[int, float] = {}
    for _ in workers:
        ends |= results.get(timeout=LIMIT_S)
    for worker in workers:
        worker.join()
    last = max(ends.values()) - (begin + max(starts))
    return (
        f"{size} ranks on a TCPStore: {len(ends)} agree, the last one {last:.2f} s after the last "
        f"start; starts within {skew_s:.0f} s"
    )


def lines(ranks: list[int], real: list[int]) -> Iterator[str]:
    """Yield the lines of the report."""
    barrier = torch_requests()
    for size in ranks:
        yield modelled(size, 0.0)
        yield modelled(size, SKEW_S)
        yield (
            f"{size} ranks: {barrier:.2f} requests for the barrier of one new_group of torch, "
            f"{barrier * size * REQUEST_S:.2f} s of the store; five of them "
            f"{5 * barrier * size * REQUEST_S:.2f} s"
        )
    for size in real:
        yield measured(size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", nargs="*", type=int, default=[64, 16_384, 131_072])
    parser.add_argument("--processes", nargs="*", type=int, default=[4096])
    options = parser.parse_args()
    for line in lines(options.ranks, options.processes):
        print(line, flush=True)


if __name__ == "__main__":
    main()
