"""Measures creating process groups on gloo processes. All ways take turns in the same launch."""

from __future__ import annotations

import functools
import gc
import time
import warnings
from collections.abc import Iterator, Mapping

import torch.distributed as dist
from measure import Goal, Table
from peers import PEERS, REFERENCE, Peer, Shape, Wanted, destroy_all, lazy, one_by_one, shared

from hypercomm.testing import run_ranks

NAMES = ("tp", "cp", "dp", "pp")
EIGHT: Wanted = (
    ("tp",),
    ("cp",),
    ("dp",),
    ("pp",),
    ("tp", "cp"),
    ("cp", "dp"),
    ("tp", "dp"),
    ("tp", "cp", "dp"),
)
SHAPES = {4: (2, 2, 1, 1), 8: (2, 2, 2, 1), 16: (2, 2, 2, 2), 32: (2, 2, 4, 2)}
WITH_SIZE_1 = {4: (2, 1, 2, 1), 8: (2, 1, 4, 1), 16: (2, 1, 4, 2), 32: (2, 1, 8, 2)}

OURS: dict[str, Peer] = {"hypercomm, one by one": one_by_one, "hypercomm, lazy_init": lazy}
SHARED: dict[str, Peer] = {"hypercomm, share='identical'": shared}


def seconds(ways: Mapping[str, Peer], shape: Shape, cycles: int) -> dict[str, list[float]]:
    """Measure on a rank, for each way and cycle, the seconds until all ranks have all groups."""
    warnings.simplefilter("ignore")
    seen: dict[str, list[float]] = {who: [] for who in ways}
    order = list(ways)
    for cycle in range(cycles + 1):
        for who in order:
            dist.barrier()
            begin = time.perf_counter()
            ways[who](shape, NAMES, EIGHT)
            dist.barrier()
            taken = time.perf_counter() - begin
            if cycle:  # the first cycle also loads modules
                seen[who].append(taken)
            destroy_all()
        if not cycle:
            gc.freeze()  # later collections skip the objects of torch and Megatron
        order.append(order.pop(0))
    return seen


def gloo(what: str, ways: Mapping[str, Peer], shape: Shape, runs: int, cycles: int) -> Table:
    """Measure the libraries in several launches. The slowest rank ends a cycle."""
    nprocs = 1
    for size in shape:
        nprocs *= size
    seen: dict[str, list[float]] = {who: [] for who in ways}
    for _ in range(runs):
        ranks = run_ranks(functools.partial(seconds, ways, shape, cycles), nprocs, timeout=900)
        for who in ways:
            slowest = zip(*(rank[who] for rank in ranks), strict=True)
            seen[who] += [max(cycle) * 1e3 for cycle in slowest]
    return Table(what, "ms", seen, REFERENCE)


def creation(nprocs: list[int], runs: int, cycles: int) -> Iterator[Table]:
    """Create groups over eight combinations of dims, no two of which have equal groups."""
    ways = {**PEERS, **OURS}
    for count in nprocs:
        what = f"eight dim combinations, {count} gloo processes"
        table = gloo(what, ways, SHAPES[count], runs, cycles)
        yield Table(what, "ms", table.samples, REFERENCE, {"hypercomm": Goal(0.9, REFERENCE)})


def sharing(nprocs: list[int], runs: int, cycles: int) -> Iterator[Table]:
    """Create groups over the same combinations, where dims of size 1 make some groups equal."""
    ways = {**SHARED, **PEERS}
    for count in nprocs:
        what = f"the same with dims of size 1, {count} gloo processes"
        table = gloo(what, ways, WITH_SIZE_1[count], runs, cycles)
        goals = {who: Goal(0.5, REFERENCE) for who in SHARED}
        yield Table(what, "ms", table.samples, REFERENCE, goals)
