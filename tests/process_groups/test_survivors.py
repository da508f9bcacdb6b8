"""Test that a grid continues with the survivors after ranks die, or with additional ranks."""

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from group_checks import expected_sum_and_members, sum_over, sums_and_members
from killable_ranks import run_scenario
from time_limits import scaled_s

from hypercomm import HyperCommGrid, renew_world
from hypercomm.errors import (
    CreationError,
    GroupCreationTimeout,
    GroupExistsError,
    GroupMissingError,
    GroupOptionsError,
    PlanMismatchError,
    RankOutsideError,
)
from hypercomm.testing import fake_world, registered_groups

GROUPS, PATIENCE = timedelta(seconds=3), timedelta(seconds=scaled_s(5))


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def is_clean(grid):
    """Return whether torch has WORLD, the groups of the grid, and no other groups."""
    return registered_groups() == {dist.group.WORLD, *filter(None, grid.pgs.values())}


def create(grid, *keys):
    grid.create_pgs([{"dims": dims, "timeout": GROUPS} for dims in keys])
    return grid


def groups_in(ranks, tp, rank):
    """Return the expected tp and dp groups of a rank. In the list of ranks, tp varies fastest."""
    if rank not in ranks:
        return {"tp": None, "dp": None}
    at = ranks.index(rank)
    first = at - at % tp
    return {
        "tp": expected_sum_and_members(ranks[first : first + tp]),
        "dp": expected_sum_and_members(ranks[at % tp :: tp]),
    }


# ---- after a loss -------------------------------------------------------------------------------


def lose(rank, losses):
    """Lose ranks once or twice. Each loss has the victims, and then the arguments of reshape()."""
    grid = create(HyperCommGrid("tp=2,dp=-1"), "tp", "dp", ["tp", "dp"])
    left = {*range(grid.layout.size)}
    for victims, ranks, target in losses:
        if rank in victims:
            die()
        left -= {*victims}
        with pytest.raises(RuntimeError):
            sum_over(grid.get_pg("tp+dp"))
        assert grid.survivors(PATIENCE) == tuple(sorted(left))
        result = grid.reshape(target, ranks=ranks)
        assert result.kept == ()
        assert len(result.created) == 3
        assert len(result.destroyed) == 3
        assert result.lost
        sums = sums_and_members(grid)
        assert sums.pop("tp+dp") == (expected_sum_and_members(ranks) if rank in ranks else None)
        assert sums == groups_in(ranks, int(target[3]), rank)
        assert is_clean(grid)


# Ranks die once or twice. The other ranks raise, find the survivors, and communicate over new
# groups. The new layout may have the ranks in any order, and may leave out a partner of a lost
# rank.
@pytest.mark.full
@pytest.mark.parametrize(
    ("size", "losses"),
    [
        (4, [([3], [0, 1, 2], "tp=1,dp=3"), ([1], [2, 0], "tp=2,dp=1")]),
        (8, [([2, 5], [0, 1, 6, 7], "tp=2,dp=2")]),
    ],
)
def test_grid_continues_after_a_loss(tmp_path, size, losses):
    lost = [victim for victims, _, _ in losses for victim in victims]
    run_scenario(tmp_path, lose, size, losses, victims=lost)


# survivors() ends the groups of the grid, so that ranks that wait in a collective raise and join.
# This works even if the frames of the current exception refer to the groups.
@pytest.mark.full
@pytest.mark.ranks(4, timeout=90)
def test_survivors_wakes_waiting_ranks():
    grid = HyperCommGrid("tp=2,dp=2")
    grid.create_pg(["tp", "dp"], timeout=timedelta(seconds=40))
    begin = time.monotonic()
    try:
        if dist.get_rank() == 2:
            torch.zeros(2) @ torch.zeros(3)
        sum_over(grid.get_pg("tp+dp"))
    except RuntimeError:
        left = grid.survivors(timedelta(seconds=41))
    assert left == (0, 1, 2, 3)
    assert time.monotonic() - begin < scaled_s(5)
    assert list(map(str, grid.reshape("dp=4", ranks=left).destroyed)) == ["tp+dp"]


# survivors() needs a longer timeout than the groups. Afterwards the groups have ended, and their
# keys can only be used after a reshape.
def test_timeouts_of_survivors():
    with fake_world(8), HyperCommGrid("tp=2,dp=4") as grid:
        grid.create_pg("tp", timeout=timedelta(seconds=20))
        group = grid.create_pg("dp", timeout=timedelta(seconds=40))
        for seconds in (10, 40):
            with pytest.raises(GroupOptionsError, match=r"dp for 0:00:40, .*seconds=40\)"):
                grid.survivors(timedelta(seconds=seconds))
        assert grid.get_pg("dp") is group
        assert grid.survivors(timedelta(seconds=41)) == tuple(range(8))
        assert registered_groups() == {dist.group.WORLD}
        for use in (grid.get_pg, grid.ensure_pg, lambda dims: grid[dims].group):
            with pytest.raises(GroupMissingError, match="reshape"):
                use("dp")
        with pytest.raises(GroupExistsError, match="reshape"):
            grid.create_pg("dp")
        assert "destroyed: tp, dp" in str(grid.reshape("tp=4,dp=2", ranks=range(8)))
        assert grid.get_pg("tp").size() == 4
        with pytest.raises(CreationError, match="min_ranks=9"):
            grid.survivors(timedelta(hours=1), min_ranks=9)


# ---- lists of ranks -----------------------------------------------------------------------------


# Ranks outside the grid join the grid by making the same call, and can leave again, in any order.
@pytest.mark.ranks(8, timeout=90)
def test_ranks_join_and_leave():
    rank = dist.get_rank()
    with HyperCommGrid("tp=2,dp=2") as grid:
        grid.create_pgs(["tp", "dp"])
        assert sums_and_members(grid) == groups_in([0, 1, 2, 3], 2, rank)
        for target, ranks in (
            ("tp=2,dp=1", [7, 1]),
            ("tp=2,dp=2", [0, 1, 2, 3]),  # as before; ranks 4 to 6 have made the same calls
            ("tp=2,dp=4", [*range(8)]),
        ):
            grid.reshape(target, ranks=ranks)
            assert sums_and_members(grid) == groups_in(ranks, 2, rank)
        grid.reshape("tp=4", ranks=[0, 1, 6, 7])
        assert sums_and_members(grid) == {"tp": groups_in([0, 1, 6, 7], 4, rank)["tp"]}
    assert is_clean(grid)


# ---- a new WORLD --------------------------------------------------------------------------------


LOSSES = [
    (2, [0, 1, 3], [0, 1, 2], "tp=1,dp=3", "2 (no other rank has tp=0,dp=1)"),
    (0, [1, 2], [1, 0], "tp=2,dp=1", "0 (no other rank has dp=0)"),
]
"""Each entry: the victim, the remaining ranks, the new ranks and layout, and the reported loss."""


def renew(rank, folder):
    """Lose ranks twice. The remaining ranks make a new WORLD, and the grid continues in it."""
    grid = create(HyperCommGrid("tp=2,dp=-1"), "tp", "dp")
    for victim, left, ranks, target, lost in LOSSES:
        if rank == victim:
            die()
        assert grid.survivors(PATIENCE) == tuple(left)
        store = None if victim else dist.FileStore(f"{folder}/world")
        job = renew_world(left, store=store, timeout=2 * PATIENCE)
        rank = left.index(rank)
        with pytest.raises(CreationError):
            grid.create_pg("tp", name="early")
        assert grid.reshape(target, ranks=ranks).lost.summary == lost
        assert job.rank == dist.get_rank() == rank
        assert job.size == dist.get_world_size() == len(left)
        assert sums_and_members(grid) == groups_in(ranks, int(target[3]), rank)
        assert sum_over(dist.group.WORLD) == int("1" * len(left))
        assert is_clean(grid)
    grid.destroy()
    job.leave()
    assert not dist.is_initialized()


# One of four ranks dies, and then the first of the remaining ranks dies. Each time, the remaining
# ranks make a new WORLD, in which the grid continues. They meet in the store of the job, and the
# second time in a file. The result reports the lost ranks with their old rank numbers.
@pytest.mark.full
def test_renew_world_after_losses(tmp_path):
    run_scenario(tmp_path, renew, 4, str(tmp_path), victims=[0, 2])


# If a rank does not join or passes other ranks, the error names this rank, and nothing changes. A
# rank that is not in the list raises. The new WORLD keeps no group of the old WORLD, even if rank
# numbers are equal.
@pytest.mark.full
@pytest.mark.parametrize(
    ("lists", "error", "named"),
    [
        ([[0, 1, 2, 3]] * 3, GroupCreationTimeout, "rank 3"),
        ([[0, 1, 2]] * 2 + [[2, 0, 1]], PlanMismatchError, "rank 2"),
    ],
)
@pytest.mark.ranks(4)
def test_renew_world_without_a_rank(lists, error, named):
    grid = create(HyperCommGrid("tp=2,dp=2"), "tp", ["tp", "dp"])
    rank = dist.get_rank()
    begin = time.monotonic()
    if rank < 3:
        with pytest.raises(error, match=rf"(?s)renew_world\(\) of ranks .*{named}"):
            renew_world(lists[rank], timeout=timedelta(seconds=2))
        assert time.monotonic() - begin < 2 + scaled_s(2)
    dist.barrier()  # the groups wait for three seconds
    assert sum_over(grid.get_pg("tp+dp")) == 1111
    if rank == 3:
        with pytest.raises(RankOutsideError):
            renew_world([0, 1, 2])
    else:
        with renew_world([2, 0, 1], timeout=PATIENCE) as job:
            assert job.rank == [1, 2, 0][rank]
            assert sum_over(dist.group.WORLD) == 111
            assert grid.reshape("tp=2,dp=1", ranks=[0, 1]).kept == ()  # ranks are renumbered
            assert sums_and_members(grid)["tp"] == (
                expected_sum_and_members([0, 1]) if job.rank < 2 else None
            )
