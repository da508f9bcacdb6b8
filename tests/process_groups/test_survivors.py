"""A grid goes on with the ranks that are left, or with more that came."""

import os
import signal
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from busy import late_s
from group_facts import attempt, sum_over
from mortal_ranks import run_scene

from hypercomm import HyperCommGrid, renew_world
from hypercomm.errors import (
    CreationError,
    GroupCreationTimeout,
    GroupExistsError,
    GroupMissingError,
    GroupOptionsError,
)
from hypercomm.testing import fake_world, registered_groups, run_ranks

GROUPS, PATIENCE = timedelta(seconds=3), timedelta(seconds=5)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def figures(grid):
    """What communicates: the sum over each group, and in which order its members are."""
    told = {}
    for key, group in grid.pgs.items():
        told[str(key)] = None
        if group is not None:
            parts = [torch.zeros(1, dtype=torch.int64) for _ in range(group.size())]
            dist.all_gather(parts, torch.tensor([dist.get_rank()]), group=group)
            told[str(key)] = [sum_over(group), [part.item() for part in parts]]
    return told


def is_clean(grid):
    """Whether torch has WORLD and the groups of the grid, and no others."""
    return registered_groups() == {dist.group.WORLD, *filter(None, grid.pgs.values())}


def create(grid, *keys):
    grid.create_pgs([{"dims": dims, "timeout": GROUPS} for dims in keys])
    return grid


def sum_of(ranks):
    """What a group sums up to, and its members in their order."""
    return [sum(10**rank for rank in ranks), list(ranks)]


def groups_in(ranks, tp, rank):
    """The groups over tp and dp that a rank is in, where tp counts fastest in a list of ranks."""
    if rank not in ranks:
        return {"tp": None, "dp": None}
    at = ranks.index(rank)
    first = at - at % tp
    return {"tp": sum_of(ranks[first : first + tp]), "dp": sum_of(ranks[at % tp :: tp])}


# ---- after a loss -------------------------------------------------------------------------------


def lose(rank, losses):
    """Lose ranks, once or again: each time the victims, the ranks that go on, and as what."""
    told = []
    grid = create(HyperCommGrid("tp=2,dp=-1"), "tp", "dp", ["tp", "dp"])
    for victims, ranks, target in losses:
        if rank in victims:
            die()
        failed, _ = attempt(lambda: sum_over(grid.get_pg("tp+dp")))
        left = grid.survivors(PATIENCE)
        said = str(grid.reshape(target, ranks=ranks))
        told.append([failed.split(":")[0], left, said, figures(grid), is_clean(grid)])
    return told


# Ranks die, once or again: the others find out, hear who it was, and communicate over new groups,
# in an order of their own; a partner of a lost rank may be spare.
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
    for rank, told in run_scene(tmp_path, lose, size, losses, victims=lost).items():
        left = {*range(size)}
        for (victims, ranks, target), got in zip(losses, told, strict=True):
            failed, found, said, sums, clean = got
            left -= {*victims}
            assert failed in ("RuntimeError", "DistBackendError")
            assert found == sorted(left)
            assert sums.pop("tp+dp") == (sum_of(ranks) if rank in ranks else None)
            assert sums == groups_in(ranks, int(target[3]), rank)
            assert clean
            assert "\n  kept: none\n  created: tp, dp, tp+dp\n  destroyed: tp, dp, tp+dp" in said
            assert "lost: " in said


def wake(rank):
    """Rank 2 notices an error of its own; the others wait for it in a collective."""
    grid = HyperCommGrid("tp=2,dp=2")
    grid.create_pg(["tp", "dp"], timeout=timedelta(seconds=40))
    begin = time.monotonic()
    try:
        if rank == 2:
            torch.zeros(2) @ torch.zeros(3)
        sum_over(grid.get_pg("tp+dp"))
    except RuntimeError:
        left = grid.survivors(timedelta(seconds=41))
    return [left, time.monotonic() - begin, str(grid.reshape("dp=4", ranks=left))]


# survivors() ends the grid's groups, so that ranks that wait in a collective come, too; and it
# does so although the frames of the exception at hand refer to them.
@pytest.mark.full
def test_waiting_ranks_wake_up():
    for left, waited, said in run_ranks(lambda: wake(dist.get_rank()), 4, timeout=90):
        assert (left, "created: tp+dp" in said or "destroyed: tp+dp" in said) == (
            (0, 1, 2, 3),
            True,
        )
        assert waited < late_s(5)


# A timeout has to be longer than that of the groups; then the groups are ended, and their keys wait
# for a reshape.
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
        with pytest.raises(GroupMissingError, match="reshape"):
            grid.get_pg("dp")
        with pytest.raises(GroupExistsError, match="reshape"):
            grid.create_pg("dp")
        assert "destroyed: tp, dp" in str(grid.reshape("tp=4,dp=2", ranks=range(8)))
        assert grid.get_pg("tp").size() == 4
        with pytest.raises(CreationError, match="min_ranks=9"):
            grid.survivors(timedelta(hours=1), min_ranks=9)


# ---- lists of ranks -----------------------------------------------------------------------------


def grow():
    grid = HyperCommGrid("tp=2,dp=2")
    grid.create_pgs(["tp", "dp"])
    told = [figures(grid)]
    for target, ranks in (("tp=2,dp=4", range(8)), ("tp=2,dp=1", [7, 1]), ("tp=4", [0, 1, 6, 7])):
        grid.reshape(target, ranks=ranks)
        told.append(figures(grid))
    grid.destroy()
    return told, is_clean(grid)


# Ranks that were outside come: they call the same. They may go again, in any order.
def test_ranks_that_come():
    for rank, (told, clean) in enumerate(run_ranks(grow, 8, timeout=90)):
        *others, last = told
        lists = [[0, 1, 2, 3], list(range(8)), [7, 1]]
        assert others == [groups_in(ranks, 2, rank) for ranks in lists]
        assert last == {"tp": groups_in([0, 1, 6, 7], 4, rank)["tp"]}
        assert clean


def name_the_dead(rank):
    grid = create(HyperCommGrid("tp=2,dp=2"), "tp", "dp")
    if rank == 2:
        die()
    begin = time.monotonic()
    with pytest.raises(GroupCreationTimeout) as caught:
        grid.reshape("tp=1,dp=4", ranks=range(4), timeout=timedelta(seconds=2))
    told = [caught.value.missing, time.monotonic() - begin, str(grid.layout), len(grid.pgs)]
    grid.reshape("tp=1,dp=3", ranks=[0, 1, 3], timeout=PATIENCE)
    return [*told, figures(grid)]


# A rank that is dead and named all the same: all hear in time who it is, nothing has changed, and
# without it they go on.
@pytest.mark.full
def test_a_dead_rank_in_the_list(tmp_path):
    for rank, got in run_scene(tmp_path, name_the_dead, 4, victims=[2]).items():
        missing, waited, *kept, sums = got
        assert (missing, kept) == ([2], ["tp=2,dp=2", 2])
        assert waited < 2 + late_s(2)
        assert sums == groups_in([0, 1, 3], 1, rank)


# ---- a new WORLD --------------------------------------------------------------------------------


def renew(rank, losses, folder):
    """Lose ranks, once or again; the rest makes a WORLD of its own, and the grid goes on in it."""
    told, number = [], rank
    grid = create(HyperCommGrid("tp=2,dp=-1"), "tp", "dp")
    for at, (victims, going, target) in enumerate(losses):
        if number in victims:
            die()
        left = grid.survivors(PATIENCE)
        store = dist.FileStore(f"{folder}/{at}") if folder else None
        job = renew_world(left, store=store, timeout=2 * PATIENCE)
        early, _ = attempt(lambda: grid.create_pg("tp", name="early"))
        result = grid.reshape(target, ranks=[job.numbers[one] for one in going])
        here = [job.rank, job.size, dist.get_rank(), dist.get_world_size()]
        whole = sum_over(dist.group.WORLD)
        told.append([left, here, early, result.lost.words, figures(grid), whole, is_clean(grid)])
        number = job.rank
    grid.destroy()
    job.leave()
    assert not dist.is_initialized()
    return told


# One of four dies, then the first of the rest: each time those that are left make a WORLD of their
# own, in which the grid goes on; what is lost is told in the numbers from before.
@pytest.mark.full
@pytest.mark.parametrize("in_a_file", [False, True])
def test_a_new_world(tmp_path, in_a_file):
    losses = [([2], [0, 1, 3], "tp=1,dp=3"), ([0], [2, 1], "tp=2,dp=1")]
    folder = str(tmp_path) if in_a_file else ""
    got = run_scene(tmp_path, renew, 4, losses, folder, victims=[0, 2])
    for rank, told in got.items():
        new = {1: 1, 3: 2}[rank]  # its number after the first loss
        for one, left, number, lost, ranks, tp in (
            (told[0], [0, 1, 3], new, "2: tp=0,dp=1", [0, 1, 2], 1),
            (told[1], [1, 2], new - 1, "0: dp=0", [1, 0], 2),
        ):
            found, here, early, words, sums, whole, clean = one
            assert (found, here) == (left, [number, len(left)] * 2)
            assert early.startswith("CreationError: this grid ")
            assert words == lost
            assert whole == int("1" * len(left))
            assert sums == groups_in(ranks, tp, number)
            assert clean


def renew_without_one(rank, lists):
    """Rank 3 does not come, or a rank means other ranks, before three make a new WORLD."""
    grid = HyperCommGrid("dp=4")
    grid.create_pg("dp")
    said, waited = "", 0.0
    if rank < 3:
        said, waited = attempt(lambda: renew_world(lists[rank], timeout=timedelta(seconds=2)))
    works = sum_over(grid.get_pg("dp"))
    if rank == 3:
        return [attempt(lambda: renew_world([0, 1, 2]))[0], works]
    with renew_world([2, 0, 1], timeout=PATIENCE) as job:
        return [said, waited, works, job.rank, sum_over(dist.group.WORLD)]


# Who does not come, or means other ranks, is named, and nothing has changed; a rank that is not
# meant is refused.
@pytest.mark.full
@pytest.mark.parametrize(
    ("lists", "kind", "names"),
    [
        ([[0, 1, 2, 3]] * 3, "GroupCreationTimeout", "rank 3"),
        ([[0, 1, 2]] * 2 + [[2, 0, 1]], "PlanMismatchError", "rank 2"),
    ],
)
def test_a_new_world_without_one(tmp_path, lists, kind, names):
    *got, (said, works) = run_scene(tmp_path, renew_without_one, 4, lists).values()
    for rank, (words, waited, total, number, whole) in enumerate(got):
        assert words.startswith(f"{kind}: renew_world() of ranks "), words
        assert names in words
        assert waited < 2 + late_s(2)
        assert (total, number, whole) == (works, [1, 2, 0][rank], 111)
    assert works == 1111
    assert said.startswith("RankOutsideError: rank 3 ")
