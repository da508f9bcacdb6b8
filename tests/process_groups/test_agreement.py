"""Agreement on real gloo processes; the simulated job covers all other faults."""

import gc
import os
import signal
import threading
import time
import warnings
from datetime import timedelta

import pytest
import torch.distributed as dist
from busy import wait_until
from group_facts import registered, store_of_world, sum_over

from hypercomm import HyperCommGrid
from hypercomm.errors import CreationError, GridDestroyedError, GroupCreationTimeout
from hypercomm.testing import fake_world

LONG = timedelta(seconds=40)
EVERY = ["tp", "dp"]


# Ranks that agree raise nothing, however late one is; a rank outside the grid takes no part.
@pytest.mark.parametrize("verify", [True, pytest.param(False, marks=pytest.mark.full)])
@pytest.mark.ranks(5)
def test_agreeing_ranks(verify):
    rank = dist.get_rank()
    with HyperCommGrid([2, 2], EVERY, rank_offset=1, verify=verify) as grid:
        if rank == 2:
            time.sleep(0.5)
        groups = [grid.create_pg(dims) for dims in ("tp", EVERY)]
        groups += grid.create_pgs(["dp", {"dims": "dp", "name": "twin"}])
        if rank:
            grid.verify(LONG)
        tp, dp = 110 if rank < 3 else 11000, 1010 if rank % 2 else 10100
        assert [sum_over(group) for group in groups] == (
            [tp, 11110, dp, dp] if rank else [None] * 4
        )


# If a grid is destroyed while a thread waits, the creation fails, and nothing is left.
@pytest.mark.ranks(2)
def test_destroyed_meanwhile():
    grid, ended = HyperCommGrid([2], ["dp"]), []

    def create():
        begin = time.monotonic()
        with pytest.raises((GroupCreationTimeout, GridDestroyedError)):
            grid.create_pg("dp", timeout=timedelta(seconds=2))
        ended.append(time.monotonic() - begin)

    if dist.get_rank() == 0:
        thread = threading.Thread(target=create)
        thread.start()
        time.sleep(0.3)
        grid.destroy()
        thread.join()
        assert max(ended) < LONG.total_seconds() / 2
    dist.barrier()
    assert len(registered()) == 1


# A forked child cannot use the groups of its parent, and the parent keeps them.
@pytest.mark.ranks(2)
def test_a_fork():
    with HyperCommGrid([2], ["dp"]) as grid:
        group = grid.create_pg("dp")
        child = os.fork()
        if child == 0:
            refused = 0
            for call in (
                lambda: grid.get_pg("dp"),
                lambda: grid.create_pg("dp", name="twin"),
                lambda: grid.create_pgs([{"dims": "dp", "name": "twin"}]),
                lambda: grid.reshape("dp=2"),
            ):
                try:
                    call()
                except GridDestroyedError:
                    refused += 1
            grid.destroy()
            os._exit(refused)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 4
        assert sum_over(group) == 11
    assert len(registered()) == 1


# abort() waits for no rank, and can be called twice; destroy() works after WORLD has ended.
@pytest.mark.ranks(2)
def test_the_end_of_a_grid():
    grid, other = HyperCommGrid([2], ["dp"]), HyperCommGrid([2], ["x"])
    grid.create_pg("dp", timeout=LONG)
    begin = time.monotonic()
    grid.abort()
    grid.abort()
    assert time.monotonic() - begin < LONG.total_seconds() / 2
    other.create_pg("x")
    dist.barrier()
    assert len(registered()) == 2
    dist.destroy_process_group()
    other.destroy()
    other.destroy()
    for one in (grid, other):
        with pytest.raises(GridDestroyedError):
            one.create_pg("x")


# Ctrl-C ends a waiting creation, and leaves nothing. The other rank raises, and a retry succeeds.
@pytest.mark.ranks(2)
def test_ctrl_c():
    grid, rank = HyperCommGrid([2], ["dp"]), dist.get_rank()
    store = store_of_world().clone()  # the creation holds the client of WORLD while it waits
    dist.barrier()
    begin, keys = time.monotonic(), store.num_keys()

    def interrupt():
        wait_until(lambda: store.num_keys() > keys)  # this rank has published something
        os.kill(os.getpid(), signal.SIGINT)

    if rank == 0:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        threading.Thread(target=interrupt).start()
    else:
        dist.barrier()
    with pytest.raises(CreationError if rank else KeyboardInterrupt):
        grid.create_pg("dp", timeout=LONG)
    if rank == 0:
        dist.barrier()
    assert time.monotonic() - begin < LONG.total_seconds() / 2
    assert (len(registered()), len(grid.pgs)) == (1, 0)
    dist.barrier()
    assert sum_over(grid.create_pg("dp", timeout=LONG)) == 11


# A grid warns when it is collected with live groups, and only then.
@pytest.mark.full
@pytest.mark.parametrize("end", ["destroy", "abort", None])
def test_a_grid_that_is_forgotten(end):
    with warnings.catch_warnings(record=True) as caught, fake_world(8):
        warnings.simplefilter("always")
        grid = HyperCommGrid([2, 4], ["tp", "dp"])
        grid.create_pgs(["tp", {"dims": "dp", "name": "twin"}])
        if end is not None:
            getattr(grid, end)()
        del grid
        gc.collect()
    assert ["tp, dp (twin)" in str(one.message) for one in caught] == [True] * (end is None)
