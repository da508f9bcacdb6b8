"""Reshaping on real gloo processes: numbers summed over a group say who is in it."""

import contextlib
import time
from unittest import mock

import pytest
import torch.distributed as dist
from busy import late_s
from by_numpy import group_of
from group_facts import sum_over

from hypercomm import HyperCommGrid
from hypercomm.errors import CreationError
from hypercomm.process_groups import torch_internals as c10d
from hypercomm.testing import registered_groups

START, OTHER = "tp=2,cp=2,dp=2", "tp=4,dp=2"
KEYS = [("tp",), ("cp",), ("dp",), ("tp", "cp"), ("cp", "dp"), ("tp", "cp", "dp")]
ERROR = ZeroDivisionError("on purpose")


def numpy_sums(layout, keys):
    """10**member summed over this rank's groups of a layout, by key, from numpy alone."""
    sizes = {name: int(size) for name, size in (part.split("=") for part in layout.split(","))}
    place = [*sizes.values()], [*sizes], 0
    groups = {dims: group_of(*place, dims, dist.get_rank()) for dims in keys if {*dims} <= {*sizes}}
    return {dims: sum(10**member for member in group) for dims, group in groups.items()}


def sums(grid):
    """The sum over each group of a grid, by the dims of its key."""
    return {key.dims: sum_over(group) for key, group in grid.pgs.items() if group is not None}


# There and back, twice: after each reshape every key that has its dims reduces over what numpy
# finds, and what was kept is the very object; with and without verify, one by one or batched.
@pytest.mark.parametrize(
    ("verify", "batched"), [(False, True), pytest.param(True, False, marks=pytest.mark.full)]
)
@pytest.mark.ranks(8, timeout=180)
def test_there_and_back(verify, batched):
    # tp has the ranks of tp+cp; dp those that it had: (0, 4), (1, 5), ...
    survivors = {OTHER: {("tp",): ("tp", "cp"), ("dp",): ("dp",)}, START: {("dp",): ("dp",)}}
    with HyperCommGrid(START, verify=verify) as grid:
        if batched:
            grid.create_pgs(KEYS)
        else:
            for dims in KEYS:
                grid.create_pg(dims)
        for target in (OTHER, START) * 2:
            before = dict(grid.pgs)
            result = grid.reshape(target)
            assert str(grid.layout) == target
            assert {new.dims: old.dims for new, old in result.kept} == survivors[target]
            assert all(grid.pgs[new] is before[old] for new, old in result.kept)
            assert sums(grid) == numpy_sums(target, [key.dims for key in grid.pgs])
            grid.verify()
            if target == START:
                grid.create_pgs([dims for dims in KEYS if "cp" in dims])  # they were destroyed
        assert sums(grid) == numpy_sums(START, KEYS)
    assert registered_groups() == {dist.group.WORLD}


# ---- a rank that fails --------------------------------------------------------------------------


@contextlib.contextmanager
def failing_on(rank, where, failures):
    """Let one rank fail to derive groups, or to create them."""
    if dist.get_rank() != rank:
        yield
    elif where == "derive":
        failures.append(ERROR)
        yield
        failures.clear()
    else:
        with mock.patch.object(c10d, "new_group", side_effect=ERROR):
            yield


# One rank fails, before the ranks meet or in the creation: it raises its own error, the others
# raise within seconds and name it, nobody has lost or kept anything, and all may try again.
@pytest.mark.full
@pytest.mark.parametrize(
    ("failing", "where", "verify"),
    [(0, "create", False), (6, "derive", False), (6, "create", True)],
)
@pytest.mark.ranks(8, timeout=90)
def test_one_rank_fails(failing, where, verify):
    is_here, failures = dist.get_rank() == failing, []

    def pairs(groups):
        if failures:
            raise failures[0]
        return groups.levels([2, 2])[1]

    with HyperCommGrid("tp=2,dp=4", verify=verify) as grid:
        grid.create_pg("tp")
        grid.create_pg("dp", name="pairs", derive=pairs)
        before = dict(grid.pgs)
        dist.barrier()  # who still waits in a creation would hear of the failure there
        begin = time.monotonic()
        with (
            failing_on(failing, where, failures),
            pytest.raises(ZeroDivisionError if is_here else CreationError) as caught,
        ):
            grid.reshape("dp=4,tp=2")
        assert time.monotonic() - begin < late_s(5)
        assert is_here or f"rank {failing} (host" in str(caught.value)
        assert is_here or str(ERROR) in str(caught.value)
        assert [*grid.pgs.items()] == [*before.items()]
        assert registered_groups() == {dist.group.WORLD, *before.values()}
        assert sums(grid)["tp",] == numpy_sums("tp=2,dp=4", [("tp",)])["tp",]
        grid.reshape("dp=4,tp=2")
        assert sums(grid)["tp",] == numpy_sums("dp=4,tp=2", [("tp",)])["tp",]


# A key that another grid's group serves: a reshape that fails does not destroy it, and one that
# succeeds uses it; it stays its owner's.
@pytest.mark.ranks(4)
def test_a_group_of_another_grid():
    with HyperCommGrid("tp=2,dp=2", share="identical", name="lender") as lender:
        lent = lender.create_pg(["tp", "dp"])
        with HyperCommGrid("tp=2,dp=2", share="identical", share_with=lender) as grid:
            ends = {"derive": lambda groups: groups.pick(lambda ranks: (ranks[0], ranks[-1]))}
            grid.create_pgs(["tp", {"dims": "tp", "name": "ends", **ends}])
            error = ZeroDivisionError if dist.get_rank() == 0 else CreationError
            with failing_on(0, "create", []), pytest.raises(error):
                grid.reshape("tp=4,dp=1")
            assert sum_over(lent) == 1111
            grid.destroy_pg("tp", name="ends")
            grid.reshape("tp=4,dp=1")
            assert str(grid.explain("tp").served_by) == "another grid"
            assert grid.get_pg("tp") is lent
            grid.reshape("tp=2,dp=2")
        assert sum_over(lent) == 1111
