"""A grid continues with the remaining ranks, or with additional ones."""

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from busy import late_s
from group_facts import figures, figures_of, sum_over
from mortal_ranks import run_scene

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

GROUPS, PATIENCE = timedelta(seconds=3), timedelta(seconds=5)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def is_clean(grid):
    """Return whether torch has WORLD and the groups of the grid, and no others."""
    return registered_groups() == {dist.group.WORLD, *filter(None, grid.pgs.values())}


def create(grid, *keys):
    grid.create_pgs([{"dims": dims, "timeout": GROUPS} for dims in keys])
    return grid


def groups_in(ranks, tp, rank):
    """Return the groups of a rank over tp and dp, with tp as the fastest dim in a list of ranks."""
    if rank not in ranks:
        return {"tp": None, "dp": None}
    at = ranks.index(rank)
    first = at - at % tp
    return {"tp": figures_of(ranks[first : first + tp]), "dp": figures_of(ranks[at % tp :: tp])}


# ---- after a loss -------------------------------------------------------------------------------


def lose(rank, losses):
    """Lose ranks once or twice; a loss has victims, the ranks that continue, and their layout."""
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
        assert (result.kept, len(result.created), len(result.destroyed)) == ((), 3, 3)
        assert result.lost
        sums = figures(grid)
        assert sums.pop("tp+dp") == (figures_of(ranks) if rank in ranks else None)
        assert sums == groups_in(ranks, int(target[3]), rank)
        assert is_clean(grid)


# Ranks die, once or twice. The others raise, find the survivors, and communicate over new groups,
# with their ranks in any order; a partner of a lost rank may be spare.
@pytest.mark.full
@pytest.mark.parametrize(
    ("size", "losses"),
    [
        (4, [([3], [0, 1, 2], "tp=1,dp=3"), ([1], [2, 0], "tp=2,dp=1")]),
        (8, [([2, 5], [0, 1, 6, 7], "tp=2,dp=2")]),
    ],
)
def test_a_loss(tmp_path, size, losses):
    lost = [victim for victims, _, _ in losses for victim in victims]
    run_scene(tmp_path, lose, size, losses, victims=lost)


# survivors() ends the grid's groups, so that ranks that wait in a collective join, too. It does so
# although the frames of the current exception refer to the groups.
@pytest.mark.full
@pytest.mark.ranks(4, timeout=90)
def test_waiting_ranks_wake_up():
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
    assert time.monotonic() - begin < late_s(5)
    assert list(map(str, grid.reshape("dp=4", ranks=left).destroyed)) == ["tp+dp"]


# A timeout must be longer than the timeout of the groups. Afterwards the groups have ended, and
# their keys need a reshape.
def test_timeouts():
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


# Ranks outside the grid join it by making the same call. They may leave again, in any order.
@pytest.mark.ranks(8, timeout=90)
def test_ranks_that_come():
    rank = dist.get_rank()
    with HyperCommGrid("tp=2,dp=2") as grid:
        grid.create_pgs(["tp", "dp"])
        assert figures(grid) == groups_in([0, 1, 2, 3], 2, rank)
        for target, ranks in (("tp=2,dp=4", [*range(8)]), ("tp=2,dp=1", [7, 1])):
            grid.reshape(target, ranks=ranks)
            assert figures(grid) == groups_in(ranks, 2, rank)
        grid.reshape("tp=4", ranks=[0, 1, 6, 7])
        assert figures(grid) == {"tp": groups_in([0, 1, 6, 7], 4, rank)["tp"]}
    assert is_clean(grid)


def name_the_dead(rank):
    grid = create(HyperCommGrid("tp=2,dp=2"), "tp", "dp")
    if rank == 2:
        die()
    begin = time.monotonic()
    with pytest.raises(GroupCreationTimeout) as caught:
        grid.reshape("tp=1,dp=4", ranks=range(4), timeout=timedelta(seconds=2))
    assert caught.value.missing == (2,)
    assert time.monotonic() - begin < 2 + late_s(2)
    assert (str(grid.layout), len(grid.pgs)) == ("tp=2,dp=2", 2)
    grid.reshape("tp=1,dp=3", ranks=[0, 1, 3], timeout=PATIENCE)
    assert figures(grid) == groups_in([0, 1, 3], 1, rank)


# If a dead rank is listed, all ranks raise in time and name it, and nothing changes. They continue
# without it.
@pytest.mark.full
def test_a_dead_rank_in_the_list(tmp_path):
    run_scene(tmp_path, name_the_dead, 4, victims=[2])


# ---- a new WORLD --------------------------------------------------------------------------------


LOSSES = [
    (2, [0, 1, 3], [0, 1, 2], "tp=1,dp=3", "2: tp=0,dp=1"),
    (0, [1, 2], [1, 0], "tp=2,dp=1", "0: dp=0"),
]
"""The victim, the remaining ranks, the ranks of the grid in the new WORLD, its layout, the loss."""


def renew(rank, folder):
    """Lose ranks, twice; the remaining ranks make a new WORLD, and the grid continues in it."""
    grid = create(HyperCommGrid("tp=2,dp=-1"), "tp", "dp")
    for victim, left, ranks, target, lost in LOSSES:
        if rank == victim:
            die()
        assert grid.survivors(PATIENCE) == tuple(left)
        store = dist.FileStore(f"{folder}/{target}") if folder else None
        job = renew_world(left, store=store, timeout=2 * PATIENCE)
        rank = left.index(rank)
        with pytest.raises(CreationError):
            grid.create_pg("tp", name="early")
        assert grid.reshape(target, ranks=ranks).lost.words == lost
        assert (job.rank, job.size) == (dist.get_rank(), dist.get_world_size()) == (rank, len(left))
        assert figures(grid) == groups_in(ranks, int(target[3]), rank)
        assert sum_over(dist.group.WORLD) == int("1" * len(left))
        assert is_clean(grid)
    grid.destroy()
    job.leave()
    assert not dist.is_initialized()


# One of four ranks dies, then the first of the rest. Each time the remaining ranks make a new
# WORLD, in which the grid continues. The loss is reported in the old rank numbers.
@pytest.mark.full
@pytest.mark.parametrize("in_a_file", [False, True])
def test_a_new_world(tmp_path, in_a_file):
    run_scene(tmp_path, renew, 4, str(tmp_path) if in_a_file else "", victims=[0, 2])


# The error names a rank that does not join or passes other ranks, and nothing changes. A rank that
# is not in the list raises. The new WORLD keeps no group of the old one, even if rank numbers are
# equal.
@pytest.mark.full
@pytest.mark.parametrize(
    ("lists", "error", "named"),
    [
        ([[0, 1, 2, 3]] * 3, GroupCreationTimeout, "rank 3"),
        ([[0, 1, 2]] * 2 + [[2, 0, 1]], PlanMismatchError, "rank 2"),
    ],
)
@pytest.mark.ranks(4)
def test_a_new_world_without_one(lists, error, named):
    grid, rank = create(HyperCommGrid("tp=2,dp=2"), "tp", ["tp", "dp"]), dist.get_rank()
    begin = time.monotonic()
    if rank < 3:
        with pytest.raises(error, match=rf"(?s)renew_world\(\) of ranks .*{named}"):
            renew_world(lists[rank], timeout=timedelta(seconds=2))
        assert time.monotonic() - begin < 2 + late_s(2)
    dist.barrier()  # the groups wait for three seconds
    assert sum_over(grid.get_pg("tp+dp")) == 1111
    if rank == 3:
        with pytest.raises(RankOutsideError):
            renew_world([0, 1, 2])
    else:
        with renew_world([2, 0, 1], timeout=PATIENCE) as job:
            assert (job.rank, sum_over(dist.group.WORLD)) == ([1, 2, 0][rank], 111)
            assert grid.reshape("tp=2,dp=1", ranks=[0, 1]).kept == ()  # other processes
            assert figures(grid)["tp"] == (figures_of([0, 1]) if job.rank < 2 else None)
