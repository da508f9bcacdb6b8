"""What the real ranks of test_endurance.py do."""

import gc
import threading
from itertools import chain, combinations
from pathlib import Path

import torch
import torch.distributed as dist

from hypercomm import HyperCommGrid
from ranks.common import registered, settle, threads_and_files

NAMES = ["tp", "cp", "dp"]
EVERY = [list(dims) for dims in chain(*(combinations(NAMES, number) for number in (1, 2, 3)))]
KIB_OF_A_PAGE = 4


def standing():
    """What a process has: process groups, threads, files and memory in KiB."""
    dist.barrier()
    settle()
    gc.collect()
    resident = int(Path("/proc/self/statm").read_text().split()[1]) * KIB_OF_A_PAGE
    threads, files = threads_and_files()
    return {
        "groups": len(registered()),
        "threads": threads,
        "files": files,
        "python threads": threading.active_count(),
        "resident": resident,
    }


def create_use_destroy(cycle):
    """Create all groups, use the last one, and destroy; returns the sum over all ranks.

    Every other cycle creates them one by one. Nothing holds a group afterwards: gloo's connections
    close only with the last reference.
    """
    with HyperCommGrid([2, 2, 2], NAMES) as grid:
        one_by_one = cycle % 2 == 0
        groups = [grid.create_pg(dims) for dims in EVERY] if one_by_one else grid.create_pgs(EVERY)
        value = torch.ones(1)
        dist.all_reduce(value, group=groups[-1])
        return value.item()


def cycles(warm_up, count):
    """Repeat the above; what failed, what there is after some cycles, and at the end.

    Barriers only where something is measured.
    """
    failures, after = [], None
    for cycle in range(warm_up + count):
        try:
            total = create_use_destroy(cycle)
            if total != dist.get_world_size():
                failures.append(f"cycle {cycle}: {total}")
        except Exception as error:  # noqa: BLE001 - counted
            failures.append(f"cycle {cycle}: {type(error).__name__}: {error}")
        if cycle == warm_up - 1:
            after = standing()
    return failures, after, standing()
