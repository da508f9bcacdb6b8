"""Creating and destroying, again and again, on a machine that has no time for it."""

import contextlib
import multiprocessing
import os
import time

import pytest
from ranks import endurance_ranks

from hypercomm.testing import run_ranks

pytestmark = pytest.mark.slow

CYCLES = 500
WARM_UP = 50
GROWTH_KIB = 5 * 1024


def burn():
    while True:
        pass


@contextlib.contextmanager
def busy_machine():
    """Keep every core busy with something else."""
    burning = [
        multiprocessing.get_context("spawn").Process(target=burn, daemon=True)
        for _ in range(os.cpu_count() or 1)
    ]
    for process in burning:
        process.start()
    try:
        yield
    finally:
        for process in burning:
            process.kill()
            process.join()


# 500 cycles on eight ranks under CPU load: none fails, every process group, thread and file is
# given back, and the memory of no rank grows by 5 MB after the first cycles; rank 0 has the store.
def test_cycles_under_load():
    begin = time.monotonic()
    with busy_machine():
        got = run_ranks(endurance_ranks.cycles, 8, args=(WARM_UP, CYCLES), timeout=1500)
    failures = [words for failed, _, _ in got for words in failed]
    growth = [after["resident"] - before["resident"] for _, before, after in got]
    print(
        f"\n{CYCLES} cycles of {len(endurance_ranks.EVERY)} groups on 8 ranks under load in "
        f"{time.monotonic() - begin:.0f} s: {len(failures)} failures; growth of each rank in KiB "
        f"{growth}; {got[0][2]}"
    )
    assert failures == []
    for _, before, after in got:
        for what in ("groups", "files"):
            assert after[what] == before[what], what
        # The pool of store workers keeps as many threads as were ever busy at once: while gloo
        # connects slowly, a second one looks whether members have given up.
        for what in ("threads", "python threads"):
            assert after[what] <= before[what] + 2, what
    assert max(growth) < GROWTH_KIB
