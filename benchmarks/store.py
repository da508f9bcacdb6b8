"""Count what each call costs the job's store, and reckon what that takes it in a large job.

    python benchmarks/store.py [--clients 1024 4096] [--seconds 8]

The calls are counted in a simulated job, where all ranks come at once: questions, bytes of keys and
values, and keys that stay. How fast a TCPStore answers is measured on loopback, with many
connections from a few processes: what one question, and one byte, takes of the server's processor.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import attrs
import torch.distributed as dist

from hypercomm import HyperCommGrid
from hypercomm.process_groups.torch_internals.store import store

sys.path.append(str(Path(__file__).parents[1] / "tests"))
from simulated_job import gate, simulate_job

SEVEN = ["tp", "cp", "dp", ["tp", "cp"], ["cp", "dp"], ["tp", "dp"], ["tp", "cp", "dp"]]
SIZES = (1_024, 16_384, 131_072)
PROCESSES = 4
SMALL, LARGE = 100, 50_000
"""Bytes of the two kinds of question that are timed."""


@attrs.frozen
class Cost:
    """What a call of one rank asks of the store, or of several ranks on average.

    Attributes:
        questions: How many messages.
        sent: Bytes of keys and values that go there.
        received: Bytes of values that come from there.
        keys: Keys that the call leaves there, for each rank.
    """

    questions: float
    sent: float
    received: float
    keys: float

    def __add__(self, other: Cost) -> Cost:
        pairs = zip(attrs.astuple(self), attrs.astuple(other), strict=True)
        return Cost(*(one + another for one, another in pairs))


# ---- what is asked ------------------------------------------------------------------------------


def program(shape: Sequence[int]) -> dict[str, Cost]:
    """On a simulated rank: what each call costs."""
    client, costs, size = store(), {}, dist.get_world_size()

    def count(what: str, action: Callable[[], object]) -> None:
        gate(what)
        before, keys = (client.asked.total(), client.sent, client.received), client.num_keys()
        before = (before[0] + 1, *before[1:])  # that question was ours
        gate(f"{what} begins")
        action()
        after = (client.asked.total(), client.sent, client.received)
        gate(f"{what} ends")
        spent = [late - early for late, early in zip(after, before, strict=True)]
        costs[what] = Cost(*spent, (client.num_keys() - keys) / size)

    def grid(**options: Any) -> HyperCommGrid:
        return HyperCommGrid(shape, ["tp", "cp", "dp"], **options)

    first, second, lazy = grid(), grid(), grid(lazy_init=True)
    count("the first grid of a job: joining", first._owner.agreement.join)
    count("another grid: joining", second._owner.agreement.join)
    count("create_pg('tp')", lambda: first.create_pg("tp"))
    count("create_pgs() of seven groups", lambda: second.create_pgs(SEVEN))
    lazy._owner.agreement.join()
    count("the same, lazy_init=True", lambda: lazy.create_pgs(SEVEN))
    count("verify()", second.verify)
    count("destroy()", second.destroy)
    count("destroy(), lazy_init=True", lazy.destroy)
    turned = "tp={2},cp={1},dp={0}".format(*shape)
    count("reshape() with one group", lambda: first.reshape(turned))
    return costs


def counted(ranks: int, backend: str) -> dict[str, list[Cost]]:
    """What each call costs each of some ranks."""
    shape = (2, 2, ranks // 4)
    run = simulate_job(program, ranks, args=(shape,), backend=backend, most_steps=10**7)
    costs = run.values()
    return {what: [cost[what] for cost in costs] for what in costs[0]}


def mean(costs: Sequence[Cost]) -> Cost:
    return Cost(*map(statistics.mean, zip(*map(attrs.astuple, costs), strict=True)))


# ---- how fast it answers ------------------------------------------------------------------------


def serve(pipe: Connection) -> None:
    """In a process: hold a store, and tell how much of the processor it has used."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(server.port)
    while pipe.recv():
        pipe.send(time.process_time())


def ask(pipe: Connection, port: int, number: int, clients: int) -> None:
    """In a process: let clients ask, each in a thread, whenever told to, and count."""
    stores: list[Any] = [None] * clients
    counts = [0] * clients

    def connect(at: int) -> None:
        wait = timedelta(seconds=60)
        stores[at] = dist.TCPStore("127.0.0.1", port, wait_for_workers=False, timeout=wait)

    def work(text: str, until: float, at: int) -> None:
        counts[at] = 0
        while time.monotonic() < until:
            stores[at].compare_set(f"{number}/{at}", "absent", text)  # sets nothing
            counts[at] += 1

    for at in range(clients):
        connect(at)
    pipe.send(clients)
    while True:
        size, until = pipe.recv()
        if not size:
            return
        in_threads(partial(work, "x" * size, until), clients)
        pipe.send(sum(counts))


def in_threads(action: Callable[[int], None], count: int) -> None:
    """Do something in many threads, and wait for all."""
    threads = [threading.Thread(target=action, args=(at,)) for at in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


@attrs.frozen
class Rate:
    """How a store answers many clients.

    Attributes:
        clients: How many.
        a_second: How many questions of 100 bytes it answered in a second, on this machine.
        question_us: Microseconds of the server's processor for one question.
        byte_us: The same for a byte of it.
    """

    clients: int
    a_second: float
    question_us: float
    byte_us: float


def measured(clients: int, seconds: float) -> Rate:
    """Ask a store from many clients at once."""
    # torch looks up the name of each client: where no name server answers, that takes long.
    os.environ.setdefault("RES_OPTIONS", "timeout:1 attempts:1")
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    spawn = multiprocessing.get_context("spawn")
    near, far = spawn.Pipe()
    server = spawn.Process(target=serve, args=(far,), daemon=True)
    server.start()
    port, pipes, askers = near.recv(), [], []
    for number in range(PROCESSES):
        mine, theirs = spawn.Pipe()
        share = clients // PROCESSES
        askers.append(spawn.Process(target=ask, args=(theirs, port, number, share), daemon=True))
        askers[-1].start()
        pipes.append(mine)
    for pipe in pipes:
        pipe.recv()
    rounds = [timed(near, pipes, size, seconds / 2) for size in (SMALL, LARGE)]
    for pipe in pipes:
        pipe.send((0, 0.0))
    near.send(False)
    for process in (*askers, server):
        process.join()
    (small_us, a_second), (large_us, _) = rounds
    byte_us = max(0.0, (large_us - small_us) / (LARGE - SMALL))
    return Rate(clients, a_second, small_us - SMALL * byte_us, byte_us)


def timed(
    server: Connection, askers: Sequence[Connection], size: int, seconds: float
) -> tuple[float, float]:
    """Let all ask for a while; the server's microseconds for a question, and those in a second."""
    server.send(True)
    before, begin = server.recv(), time.monotonic()
    for pipe in askers:
        pipe.send((size, begin + seconds))
    count = sum(pipe.recv() for pipe in askers)
    took = time.monotonic() - begin
    server.send(True)
    return (server.recv() - before) / count * 1e6, count / took


# ---- what that comes to -------------------------------------------------------------------------

HEAD = f"{'call':42}{'questions':>10}{'most':>6}{'sent':>9}{'most':>9}{'received':>10}{'keys':>7}"


def lines_of(counts: dict[str, list[Cost]]) -> Iterator[str]:
    yield HEAD
    for what, costs in counts.items():
        usual = mean(costs)
        most = max(cost.questions for cost in costs), max(cost.sent for cost in costs)
        yield (
            f"{what:42}{usual.questions:10.1f}{most[0]:6.0f}{usual.sent:9,.0f}{most[1]:9,.0f}"
            f"{usual.received:10,.0f}{usual.keys:7.1f}"
        )


STARTS = ("the first grid of a job: joining", "create_pgs() of seven groups", "verify()")


def reckoned(counts: dict[str, list[Cost]], rate: Rate) -> Iterator[str]:
    """Say what a start takes the store: ranks * (questions * a + bytes * b)."""
    total = sum((mean(counts[what]) for what in STARTS), Cost(0, 0, 0, 0))
    size = total.sent + total.received
    one_us = total.questions * rate.question_us + size * rate.byte_us
    yield (
        f"one rank: {total.questions:.1f} questions * {rate.question_us:.1f} us + {size:,.0f} "
        f"bytes * {rate.byte_us * 1e3:.2f} ns = {one_us:,.0f} us"
    )
    for ranks in SIZES:
        yield (
            f"{ranks:9,} ranks * {one_us:,.0f} us = {ranks * one_us / 1e6:8.2f} s; "
            f"{ranks * total.questions:12,.0f} questions, {ranks * size / 1e6:8,.0f} MB, "
            f"{ranks * total.keys:9,.0f} keys"
        )


def addresses(few: dict[str, list[Cost]], many: dict[str, list[Cost]], rate: Rate) -> Iterator[str]:
    """Say what the addresses of gloo's members take in addition: each reads those of all others."""
    sizes = [_members(len(counts[STARTS[1]])) for counts in (few, many)]
    costs = [mean(counts[STARTS[1]]) for counts in (few, many)]
    bytes_ = [cost.sent + cost.received for cost in costs]
    each = (bytes_[1] - bytes_[0]) / (sizes[1] - sizes[0])
    yield f"a member of a gloo group: {each:.0f} bytes for each other member"
    for ranks in SIZES:
        members = _members(ranks)
        size = ranks * members * each
        yield (
            f"{ranks:9,} ranks * {members:9,} members * {each:.0f} bytes = {size / 1e9:9,.1f} GB: "
            f"{size * rate.byte_us / 1e6:9,.1f} s"
        )


def _members(ranks: int) -> int:
    """The members of a rank's seven groups, in the shape of the count."""
    tp, cp, dp = 2, 2, ranks // 4
    return tp + cp + dp + tp * cp + cp * dp + tp * dp + tp * cp * dp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[1_024])
    parser.add_argument("--seconds", type=float, default=8.0, help="for each number of clients")
    options = parser.parse_args()
    few, own, many = counted(8, "gloo"), counted(8, "nccl"), counted(64, "gloo")
    titles = {"8 ranks, gloo": few, "8 ranks, NCCL, without its own": own, "64 ranks, gloo": many}
    for title, counts in titles.items():
        print(f"\n{title}; a rank on average, and the one with most", *lines_of(counts), sep="\n")
    print("\nTCPStore on loopback")
    rates = []
    for clients in options.clients:
        rates.append(measured(clients, options.seconds))
        print(
            f"{clients:6,} clients: {rates[-1].a_second:9,.0f} questions of {SMALL} bytes a "
            f"second; the server's processor: {rates[-1].question_us:.1f} us a question, "
            f"{rates[-1].byte_us * 1e3:.2f} ns a byte"
        )
    print(
        "\njoining, seven groups and verify(), all ranks at once",
        *reckoned(own, rates[-1]),
        sep="\n",
    )
    print("\nthe addresses of gloo's members besides", *addresses(few, many, rates[-1]), sep="\n")


if __name__ == "__main__":
    main()
