"""Groups of several keys: their names, when they are destroyed, and which keys may share them."""

import gc

import pytest

from hypercomm import HyperCommGrid
from hypercomm.testing import fake_world


def grid_of(**arguments):
    return HyperCommGrid([2, 4], ["tp", "dp"], share="identical", **arguments)


# Sharing between grids has one direction: groups of the second grid are never used by the first
# one. The second grid keeps a reference to the first one.
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


# A group that a reshape gives to a key that shares is shared afterwards.
def test_shared_after_a_reshape():
    with fake_world(8, rank=5), HyperCommGrid([2, 2, 2], ["tp", "cp", "dp"]) as grid:
        grid.create_pg("tp", share="identical")
        wide = grid.create_pg(["tp", "cp"], share="never")
        grid.reshape("tp=4,dp=2")
        assert grid.create_pg("tp", name="x", share="identical") is grid.get_pg("tp") is wide
