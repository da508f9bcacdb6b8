"""Groups that several keys hold: whose name they have, who ends them, and who may have them."""

import gc
import threading

import pytest
import torch.distributed as dist

from hypercomm import HyperCommGrid
from hypercomm.errors import GridDestroyedError
from hypercomm.process_groups import owner
from hypercomm.testing import fake_world, registered_groups, simulate


def grid_of(**arguments):
    return HyperCommGrid([2, 4], ["tp", "dp"], share="identical", **arguments)


class Halted:
    """A creation that stops in the middle, until it is let go."""

    def __init__(self, monkeypatch, error=None):
        self.reached, self.go = threading.Event(), threading.Event()
        honest, self.calls = owner.create, 0

        def create(*args):
            self.calls += 1
            if self.calls > 1:
                return honest(*args)
            created = None if error else honest(*args)
            self.reached.set()
            self.go.wait(30)
            if error:
                raise error
            return created

        monkeypatch.setattr(owner, "create", create)


def in_thread(call):
    """Start a call in a thread; returns the thread, and a list that will hold what came of it."""
    outcome = []

    def run():
        try:
            outcome.append(call())
        except (RuntimeError, GridDestroyedError) as error:
            outcome.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, outcome


# A grid that is destroyed in the middle of a creation leaves nothing behind; a grid that shares
# the group has it.
@pytest.mark.parametrize("is_shared", [False, True])
def test_destroyed_meanwhile(monkeypatch, is_shared):
    with fake_world(8, rank=5):
        before = registered_groups()
        lender = grid_of()
        borrower = grid_of(share_with=lender)
        halted = Halted(monkeypatch)
        thread, outcome = in_thread(lambda: lender.create_pg("tp"))
        assert halted.reached.wait(30)
        if is_shared:
            other, shared = in_thread(lambda: borrower.create_pg("tp"))
            while not borrower._owner.specs:
                other.join(0.001)
        lender.destroy()
        halted.go.set()
        thread.join(30)
        assert isinstance(outcome[0], GridDestroyedError)
        if is_shared:
            other.join(30)
            assert borrower.get_pg("tp") is shared[0]
        else:
            assert registered_groups() == before
        borrower.destroy()
        assert registered_groups() == before


# Grids lend one way: what the second has never serves the first, so that nothing depends on which
# of them is still there; the second keeps the first.
def test_lending_goes_one_way():
    with fake_world(8, rank=5):
        lender = grid_of()
        lender.create_pg("tp")
        borrower = grid_of(share_with=lender)
        own = borrower.create_pg("dp")
        assert lender.create_pg("dp") is not own
        lent = lender.get_pg("tp")
        with pytest.warns(ResourceWarning, match="call its destroy"):
            del lender
        gc.collect()
        assert borrower.create_pg("tp") is lent
        borrower.destroy()


# A group that a reshape hands to a key that shares is shared from then on.
def test_shared_after_a_reshape():
    with fake_world(8, rank=5), HyperCommGrid([2, 2, 2], ["tp", "cp", "dp"]) as grid:
        grid.create_pg("tp", share="identical")
        wide = grid.create_pg(["tp", "cp"], share="never")
        grid.reshape("tp=4,dp=2")
        assert grid.create_pg("tp", name="x", share="identical") is grid.get_pg("tp") is wide


def two_jobs():
    backends = []
    for backend in ("gloo", "nccl"):
        if not dist.is_initialized():
            dist.init_process_group(backend)
        with HyperCommGrid([2, 2], ["tp", "dp"]) as grid:
            backends.append((dist.get_backend(grid.create_pg("tp")), grid.explain("tp").backend))
        dist.destroy_process_group()
    return backends


# The second job of a process has its own backend, in a simulation, too.
def test_a_second_job():
    expected = [("gloo", "gloo"), ("nccl", "nccl")]
    assert simulate(two_jobs, 4, backend="gloo").returned == dict.fromkeys(range(4), expected)
