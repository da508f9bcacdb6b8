"""Test groups that serve several keys or grids."""

import gc

import pytest

from hypercomm import HyperCommGrid
from hypercomm.testing import fake_world


def grid_of(**arguments):
    return HyperCommGrid([2, 4], ["tp", "dp"], share="identical", **arguments)


# share_with= works in one direction: the lender never uses groups of the borrower. The borrower
# keeps a reference to the lender.
def test_share_with_works_in_one_direction():
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


# A key that may share its group still shares a group after a reshape.
def test_group_is_shared_after_a_reshape():
    with fake_world(8, rank=5), HyperCommGrid([2, 2, 2], ["tp", "cp", "dp"]) as grid:
        grid.create_pg("tp", share="identical")
        wide = grid.create_pg(["tp", "cp"], share="never")
        grid.reshape("tp=4,dp=2")
        assert grid.create_pg("tp", name="x", share="identical") is grid.get_pg("tp") is wide
