"""Test that real gloo processes agree on creations. tests/meetings covers all other faults."""

import gc
import os
import signal
import threading
import time
import warnings
from datetime import timedelta

import pytest
import torch.distributed as dist
from group_checks import registered, store_of_world, sum_over
from time_limits import wait_until

from hypercomm import HyperCommGrid
from hypercomm.errors import CreationError, GridDestroyedError, GroupCreationTimeout
from hypercomm.testing import fake_world

LONG = timedelta(seconds=40)
EVERY = ["tp", "dp"]


# If a grid is destroyed while a thread waits for the creation of a group, the creation fails, and
# no group is left.
@pytest.mark.ranks(2)
def test_destroy_during_a_creation():
    grid = HyperCommGrid([2], ["dp"])
    ended = []

    def create():
        begin = time.monotonic()
        with pytest.raises((GroupCreationTimeout, GridDestroyedError)):
            grid.create_pg("dp", timeout=timedelta(seconds=1))
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
def test_forked_child_cannot_use_groups():
    with HyperCommGrid([2], ["dp"]) as grid:
        group = grid.create_pg("dp")
        child = os.fork()
        if child == 0:
            raised = 0
            for call in (
                lambda: grid.get_pg("dp"),
                lambda: grid.create_pg("dp", name="twin"),
                lambda: grid.create_pgs([{"dims": "dp", "name": "twin"}]),
                lambda: grid.reshape("dp=2"),
            ):
                try:
                    call()
                except GridDestroyedError:
                    raised += 1
            grid.destroy()
            os._exit(raised)
        _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == 4
        assert sum_over(group) == 11
    assert len(registered()) == 1


# abort() waits for no rank and is idempotent. destroy() works after WORLD has ended.
@pytest.mark.ranks(2)
def test_destroy_and_abort_are_idempotent():
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


# Ctrl-C ends a creation that waits, and no group is left. The other rank raises, and a retry
# succeeds.
@pytest.mark.ranks(2)
def test_ctrl_c_during_a_creation():
    grid = HyperCommGrid([2], ["dp"])
    rank = dist.get_rank()
    store = store_of_world().clone()  # a waiting creation locks WORLD's client
    dist.barrier()
    begin = time.monotonic()
    keys = store.num_keys()

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
    assert len(registered()) == 1
    assert len(grid.pgs) == 0
    dist.barrier()
    assert sum_over(grid.create_pg("dp", timeout=LONG)) == 11


# A grid that is garbage collected with live groups warns. After destroy() or abort(), it does not.
@pytest.mark.parametrize("end", ["destroy", "abort", None])
def test_garbage_collected_grid_warns(end):
    with warnings.catch_warnings(record=True) as caught, fake_world(8):
        warnings.simplefilter("always")
        grid = HyperCommGrid([2, 4], ["tp", "dp"])
        grid.create_pgs(["tp", {"dims": "dp", "name": "twin"}])
        if end is not None:
            getattr(grid, end)()
        del grid
        gc.collect()
    warned = ["tp, dp (twin)" in str(one.message) for one in caught]
    assert warned == ([True] if end is None else [])
