"""Test groups that serve several keys or grids."""

from hypercomm import GridSet, HyperCommGrid
from hypercomm.testing import fake_world


# The grids of a set share in one direction: a grid uses groups of the grids before it.
def test_a_set_shares_in_one_direction():
    sizes = {"first": "tp=2,dp=4", "second": "tp=2,dp=4"}
    with fake_world(8, rank=5), GridSet(sizes, share="identical") as grids:
        first, second = grids.values()
        own = second.create_pg("dp")
        assert first.create_pg("dp") is not own
        assert second.create_pg("tp", name="x") is not first.create_pg("tp")
        assert second.create_pg("tp") is first.get_pg("tp")


# A key that may share its group still shares a group after a reshape.
def test_group_is_shared_after_a_reshape():
    with fake_world(8, rank=5), HyperCommGrid([2, 2, 2], ["tp", "cp", "dp"]) as grid:
        grid.create_pg("tp", share="identical")
        wide = grid.create_pg(["tp", "cp"], share="never")
        grid.reshape("tp=4,dp=2")
        assert grid.create_pg("tp", name="x", share="identical") is grid.get_pg("tp") is wide
