"""Test that many cycles of creating and destroying groups leak nothing."""

import gc
import threading
import time
from itertools import chain, combinations
from pathlib import Path

import pytest
import torch.distributed as dist
from group_checks import all_reduce_of, registered, settle, threads_and_files

from hypercomm import HyperCommGrid
from hypercomm.process_groups import torch_internals as torchdist
from hypercomm.testing import run_ranks

GROWTH_KIB = 5 * 1024
NAMES = ["tp", "cp", "dp"]
EVERY = [list(dims) for dims in chain(*(combinations(NAMES, number) for number in (1, 2, 3)))]


def resources():
    """Count the process groups, threads and files of this process, and its memory in KiB."""
    dist.barrier()
    torchdist.release()  # no member connects any more
    time.sleep(0.6)  # destroyed groups keep their connections for half a second
    settle()
    gc.collect()
    threads, files = threads_and_files()
    return {
        "groups": len(registered()),
        "threads": threads,
        "files": files,
        "python threads": threading.active_count(),
        "resident": int(Path("/proc/self/statm").read_text().split()[1]) * 4,
    }


# Groups are created and destroyed many times, in one call or with one call per group. All process
# groups, threads and files are released, and after the first cycles the memory of each rank grows
# by less than 5 MB. The open files show that no reference to a group remains, because gloo closes
# connections with the last reference.
@pytest.mark.parametrize(
    "count",
    [pytest.param(10, marks=pytest.mark.full), pytest.param(100, marks=pytest.mark.slow)],
)
def test_cycles_leak_nothing(count):
    def create_use_destroy(one_by_one):
        with HyperCommGrid([2, 2, 2], NAMES) as grid:
            groups = [*map(grid.create_pg, EVERY)] if one_by_one else grid.create_pgs(EVERY)
            assert all_reduce_of(1, groups[-1]) == dist.get_world_size()

    def cycles():
        for cycle in range(count // 10):
            create_use_destroy(cycle % 2 == 0)
        before = resources()
        for cycle in range(count):
            create_use_destroy(cycle % 2 == 0)
        return before, resources()

    for before, after in run_ranks(cycles, 8, timeout=280):
        for what in ("groups", "files"):
            assert after[what] == before[what], what
        # The pool keeps as many threads as were ever busy at the same time. If gloo connects
        # slowly, one more thread is busy, because it reports that the rank waits.
        for what in ("threads", "python threads"):
            assert after[what] <= before[what] + 2, what
        assert after["resident"] - before["resident"] < GROWTH_KIB
