"""Ranks that agree, or do not, on real gloo processes; the simulated job has all other faults."""

import gc
import os
import signal
import threading
import time
import warnings
from datetime import timedelta
from functools import partial

import pytest
import torch.distributed as dist
from busy import late_s
from group_facts import attempt, registered, sum_over

from hypercomm import HyperCommGrid
from hypercomm.testing import fake_world, run_ranks

LONG = timedelta(seconds=40)
EVERY = ["tp", "dp"]


# Ranks that agree are told nothing, however late one is; a rank outside takes no part.
@pytest.mark.parametrize("verify", [True, False])
def test_agreeing_ranks(verify):
    def program():
        rank = dist.get_rank()
        with HyperCommGrid([2, 2], EVERY, rank_offset=1, verify=verify) as grid:
            if rank == 2:
                time.sleep(0.5)
            groups = [grid.create_pg(dims) for dims in ("tp", EVERY)]
            groups += grid.create_pgs(["dp", {"dims": "dp", "name": "twin"}])
            if rank:
                grid.verify(LONG)
            return [sum_over(group) for group in groups]

    got = run_ranks(program, 5)
    assert got[0] == [None] * 4
    assert got[1] == [110, 11110, 1010, 1010]
    assert got[4] == [11000, 11110, 10100, 10100]


# A grid that is destroyed while a thread waits: that creation ends, and nothing is left.
def test_destroyed_meanwhile():
    def program():
        grid, said = HyperCommGrid([2], ["dp"]), [("", 0.0)]
        if dist.get_rank() == 0:
            timeout = timedelta(seconds=1)
            thread = threading.Thread(
                target=lambda: said.append(attempt(lambda: grid.create_pg("dp", timeout=timeout)))
            )
            thread.start()
            time.sleep(0.3)
            grid.destroy()
            thread.join()
        dist.barrier()
        return said[-1], len(registered())

    (said, waited), left = run_ranks(program, 2)[0]
    assert said.startswith(("GroupCreationTimeout: ", "GridDestroyedError: "))
    assert waited < 1 + late_s(2)
    assert left == 1


# A forked child is refused its parent's groups, and takes nothing from the parent.
def test_a_fork():
    def program():
        grid = HyperCommGrid([2], ["dp"])
        group, (reading, writing) = grid.create_pg("dp"), os.pipe()
        child = os.fork()
        if child == 0:
            calls = [
                lambda: grid.get_pg("dp"),
                lambda: grid.create_pg("dp", name="twin"),
                lambda: grid.create_pgs([{"dims": "dp", "name": "twin"}]),
                lambda: grid.reshape("dp=2"),
                grid.destroy,
            ]
            told = [str(attempt(call)[0]).partition(":")[0] for call in calls]
            os.write(writing, ",".join(told).encode())
            os._exit(0)
        os.close(writing)
        with os.fdopen(reading) as pipe:
            told = pipe.read()
        os.waitpid(child, 0)
        total = sum_over(group)
        grid.destroy()
        return told, total, len(registered())

    assert run_ranks(program, 2) == [("GridDestroyedError," * 4 + "None", 11, 1)] * 2


# abort() waits for nobody, and may be called twice; after WORLD, destroy() is harmless.
def test_the_end_of_a_grid():
    def program():
        grid = HyperCommGrid([2], ["dp"])
        grid.create_pg("dp", timeout=LONG)
        begin = time.monotonic()
        grid.abort()
        grid.abort()
        took = time.monotonic() - begin
        other = HyperCommGrid([2], ["x"])
        other.create_pg("x")
        dist.barrier()
        left = len(registered())
        dist.destroy_process_group()
        other.destroy()
        other.destroy()
        return took, left, [attempt(partial(one.create_pg, "x"))[0] for one in (grid, other)]

    for took, left, said in run_ranks(program, 2):
        assert took < late_s(1)
        assert left == 2
        assert [words.partition(":")[0] for words in said] == ["GridDestroyedError"] * 2


# Ctrl-C ends a creation that waits; it leaves nothing, the other rank hears so, and both try again.
def test_ctrl_c():
    def program():
        grid, rank = HyperCommGrid([2], ["dp"]), dist.get_rank()
        said = ""
        begin = time.monotonic()
        if rank == 1:
            dist.barrier()
            said = attempt(lambda: grid.create_pg("dp", timeout=LONG))[0]
        else:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
            try:
                grid.create_pg("dp", timeout=LONG)
            except KeyboardInterrupt:
                said = "KeyboardInterrupt"
            dist.barrier()
        left, waited = (len(registered()), len(grid.pgs)), time.monotonic() - begin
        dist.barrier()
        return said, left, sum_over(grid.create_pg("dp", timeout=LONG)), waited

    got = run_ranks(program, 2, timeout=60)
    assert [said.partition(":")[0] for said, *_ in got] == ["KeyboardInterrupt", "CreationError"]
    for _, left, total, waited in got:
        assert (left, total) == ((1, 0), 11)
        assert waited < late_s(3)


# A grid that is collected while its groups live says so, and only then.
@pytest.mark.full
def test_a_grid_that_is_forgotten():
    def warned(end):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with fake_world(8):
                grid = HyperCommGrid([2, 4], ["tp", "dp"])
                grid.create_pg("tp")
                grid.create_pg("dp", name="twin")
                end(grid)
                del grid
                gc.collect()
        return [str(warning.message) for warning in caught]

    assert warned(lambda grid: grid.destroy()) == []
    assert warned(lambda grid: grid.abort()) == []
    (words,) = warned(lambda _: None)
    assert "tp, dp (twin)" in words
