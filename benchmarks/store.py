"""Count the requests that the store of a large job gets when all ranks meet once.

    python benchmarks/store.py [--ranks 64 16384 131072] [--processes 4096]

`--ranks` simulates this many ranks on a counted store in this process, which performs one request
after the other, in 14 us each. The ranks make the requests of `Meeting`, on a virtual clock. In one
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
from collections import Counter
from collections.abc import Iterator
from datetime import timedelta
from multiprocessing import get_context
from typing import Any
from unittest import mock

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # otherwise each connection logs a warning

import attrs
import torch.distributed as dist

from hypercomm.process_groups.meeting import Call, Meeting, meet
from hypercomm.process_groups.system import system
from hypercomm.process_groups.world import Scope, World, digest_of

REQUEST_S = 14e-6
"""The time that a TCPStore takes for one request, measured on two cores."""

LIMIT_S = 600.0
SKEW_S = 30.0
CALL = Call.of("create_pgs()", [f"group {number} over 16384 groups of 8" for number in range(5)])


@attrs.frozen(eq=False, slots=False)
class StoreWorld(World):
    """A world with a given store."""

    client: Any = None

    @property
    def store(self) -> Any:
        return self.client


def scope_of(rank: int, size: int, store: Any) -> Scope:
    world = StoreWorld(rank, size, "nccl", has_store=True, client=store)
    world.memory.namespace = f"hypercomm/{size}/0123abcd"
    return Scope(world, "calls", range(size))


# ---- a counted store ----------------------------------------------------------------------------


class CountedStore:
    """A store in this process that performs one request after the other.

    Attributes:
        now: The time in seconds.
        free: The time in seconds at which the store has performed all requests so far.
        last_start: The time in seconds at which the last rank has started.
        requests: The number of requests of each rank.
        sent: The number of bytes of all keys and values that each rank has sent and received.
        rank: The rank whose requests are counted now.
    """

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}
        self.now = 0.0
        self.free = 0.0
        self.last_start = 0.0
        self.requests = Counter[int]()
        self.sent = Counter[int]()
        self.rank = 0

    def time(self) -> float:
        return self.now

    def count(self, *texts: str | bytes) -> None:
        """Count one request. The time is then when the store has performed it."""
        self.requests[self.rank] += 1
        self.sent[self.rank] += sum(map(len, texts))
        self.free = self.now = max(self.free, self.now) + REQUEST_S

    def add(self, key: str, amount: int) -> int:
        self.held[key] = text = b"%d" % (int(self.held.get(key, b"0")) + amount)
        self.count(key, str(amount), text)
        return int(text)

    def set(self, key: str, text: str) -> None:
        self.held[key] = text.encode()
        self.count(key, text)

    def compare_set(self, key: str, expected: str, text: str) -> bytes:
        found = self.held.get(key, b"")
        if found.decode() == expected:
            self.held[key] = found = text.encode()
        self.count(key, expected, text, found)
        return found or expected.encode()

    def check(self, keys: list[str]) -> bool:
        self.count(*keys)
        return keys[0] in self.held


class Never:
    """Stands for the event that the wait of a rank has ended, which it has not."""

    def is_set(self) -> bool:
        return False


def met(size: int, skew_s: float) -> CountedStore:
    """Return the store after `size` simulated ranks, which start within `skew_s` seconds, met."""
    store = CountedStore()
    drawn = random.Random(0)  # noqa: S311
    starts = [drawn.uniform(0.0, skew_s) for _ in range(size)]
    store.last_start = max(starts)
    meetings: dict[int, Meeting] = {}
    events = [(start, rank, 0.0) for rank, start in enumerate(starts)]
    heapq.heapify(events)
    with mock.patch.object(system, "now", store.time):
        while events:
            at, rank, pause_s = heapq.heappop(events)
            store.now, store.rank = max(at, store.now), rank
            if not pause_s:
                meeting = Meeting(scope_of(rank, size, store), CALL, LIMIT_S, store, store.now)
                meeting._base = f"hypercomm/{size}/0123abcd/calls"
                meeting._digest = digest_of(CALL.facts)
                meeting._agreed = f"agreed {meeting._digest}"
                meeting._second = store
                meetings[rank] = meeting
                if meeting._set_bits():  # the last rank writes the outcome
                    store.compare_set(meeting._go, "", meeting._agreed)
                    store.set(meeting._go, meeting._agreed)
                    break
                store.count(meeting._go)  # the request that waits
                heapq.heappush(events, (store.now + meeting._slow_s, rank, meeting._slow_s))
            else:
                meeting = meetings[rank]
                own, searches = meeting._publish(Never())
                if searches and not meeting._is_hopeless(own):
                    heapq.heappush(events, (store.now + 2 * pause_s, rank, 2 * pause_s))
    for rank in range(size - 1):
        store.rank = rank
        store.count(meetings[0]._go, meetings[0]._agreed)  # the outcome is read
    return store


def modelled(size: int, skew_s: float) -> str:
    """Return the report line for `size` simulated ranks that all start within `skew_s` seconds."""
    store = met(size, skew_s)
    total = sum(store.requests.values())
    return (
        f"{size} ranks: {total / size:.2f} requests, {sum(store.sent.values()) / size:.0f} bytes, "
        f"{total * REQUEST_S:.2f} s of the store; at most {max(store.requests.values())} requests "
        f"and {max(store.sent.values())} bytes of a rank; starts within {skew_s:.0f} s, the last "
        f"rank ends {store.free - store.last_start:.2f} s after the last start"
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
    """Meet as one rank, over a separate connection to the store."""
    store = dist.TCPStore("127.0.0.1", port, None, is_master=False, wait_for_workers=False)
    store.add("connected", 1)
    store.wait(["all are connected"], timedelta(seconds=LIMIT_S))
    time.sleep(start)
    with meet(scope_of(rank, size, store), CALL, LIMIT_S):
        ends[rank] = time.monotonic()


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
