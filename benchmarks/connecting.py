"""Measures connecting twelve gloo groups, by connect() and by hand, and their first collectives."""

from __future__ import annotations

import functools
import gc
import time
import warnings
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from measure import Goal, Table
from torch.distributed import ProcessGroup

from hypercomm import HyperCommGrid
from hypercomm.testing import run_ranks

SIZES = {4: "tp=2,cp=2,dp=1", 8: "tp=2,cp=2,dp=2"}
DIMS = ("tp", "cp", "dp", "tp+cp", "cp+dp", "tp+cp+dp")
BY_HAND, OURS, MEETING = "the same collectives by hand", "connect()", "such a meeting alone"
AFTER, BEFORE = "after connect()", "without"


def groups_of(grid: HyperCommGrid) -> list[ProcessGroup]:
    """Create twelve groups: six combinations of dims, and a twin of each."""
    every = [{"dims": dims, "name": name} for name in (None, "twin") for dims in DIMS]
    groups = grid.create_pgs(every, share="never")
    return [group for group in groups if group is not None and group.size() > 1]


def by_hand(groups: list[ProcessGroup]) -> None:
    """All-reduce ones over each group, and check the sums."""
    for group in groups:
        ones = torch.ones(1, dtype=torch.int32)
        dist.all_reduce(ones, group=group)
        if int(ones.item()) != group.size():
            raise ValueError(ones)


def taken(call: Callable[[], object]) -> float:
    """Begin a call on all ranks at the same time. Return the seconds until all have made it."""
    dist.barrier()
    begin = time.perf_counter()
    call()
    dist.barrier()
    return time.perf_counter() - begin


def seconds(sizes: str, cycles: int, lazy: bool) -> dict[str, list[float]]:
    """Return the seconds that each way takes in each cycle on this rank. Each uses new groups."""
    warnings.simplefilter("ignore")
    seen: dict[str, list[float]] = {who: [] for who in (BY_HAND, OURS, MEETING, AFTER, BEFORE)}
    order = [BY_HAND, OURS]
    for cycle in range(cycles + 1):
        for who in order:
            with HyperCommGrid(sizes, lazy_init=lazy or None) as grid:
                groups = groups_of(grid)
                call = grid.connect if who == OURS else functools.partial(by_hand, groups)
                told = {who: taken(call)}
                if who == OURS:
                    told[AFTER] = taken(functools.partial(by_hand, groups))
                    told[MEETING] = taken(grid.verify)
                else:
                    told[BEFORE] = told[who]
                if cycle:  # the first cycle also loads modules
                    for name, took in told.items():
                        seen[name].append(took)
        if not cycle:
            gc.freeze()
        order.reverse()
    return seen


def connecting(nprocs: list[int], runs: int, cycles: int) -> Iterator[Table]:
    """Measure twelve groups that gloo connects at the first message, or at creation."""
    for count in nprocs:
        for lazy in (True, False):
            every: dict[str, list[float]] = {}
            for _ in range(runs):
                ranks = run_ranks(
                    functools.partial(seconds, SIZES[count], cycles, lazy), count, timeout=300
                )
                for who in ranks[0]:
                    slowest = zip(*(rank[who] for rank in ranks), strict=True)
                    every.setdefault(who, []).extend(max(cycle) * 1e3 for cycle in slowest)
            how = "lazy_init" if lazy else "connected at creation"
            first = {who: every[who] for who in (BY_HAND, OURS, MEETING)}
            goals = {OURS: Goal(1.2, BY_HAND)}
            yield Table(
                f"connect 12 groups, {how}, {count} gloo processes", "ms", first, BY_HAND, goals
            )
            later = {who: every[who] for who in (BEFORE, AFTER)}
            yield Table(
                f"first collectives over them, {how}, {count} gloo processes", "ms", later, BEFORE
            )
