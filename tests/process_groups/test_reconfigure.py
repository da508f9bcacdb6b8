"""Test process groups that stay the same objects when other ranks replace lost ranks."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from group_checks import expected_sum_and_members, sums_and_members
from killable_ranks import run_scenario
from test_survivors import die
from time_limits import scaled_s

from hypercomm import GridSet, HyperCommGrid
from hypercomm.errors import GroupOptionsError, PlanMismatchError

HAS_IT = hasattr(dist, "_reconfigure")
"""Whether torch can change the ranks of a group, as torch 2.14 and newer can."""

LONG, SHORT = timedelta(seconds=60), timedelta(seconds=1)


VICTIM, SPARE = 3, 2


def use_until_error(groups):
    while True:
        for group in groups:
            dist.all_reduce(torch.zeros(1), group=group)


def lose_and_regain(rank):
    grid = HyperCommGrid("tp=2,dp=3", enable_reconfigure=True)
    grid.create_pgs(["tp", "dp"], timeout=LONG)
    groups, seen = [*grid.pgs.values()], [sums_and_members(grid)]
    names = [group.group_name for group in groups]
    if rank == VICTIM:
        die()
    began = time.monotonic()
    with pytest.raises(RuntimeError):  # the victim is a peer, or a peer has raised
        use_until_error(groups)
    left = grid.survivors(SHORT)
    seen.append([*left])
    if rank != SPARE:  # the spare rank takes no part
        with pytest.raises(PlanMismatchError, match="reshape to"):
            grid.reshape(("tp=1,dp=4", "tp=2,dp=2")[rank % 2], ranks=[0, 1, 4, 5])
    reshaped = grid.reshape("tp=2,dp=2", ranks=[0, 1, 4, 5])
    took_s = time.monotonic() - began
    is_spare = rank == SPARE
    seen.append([] if is_spare else sums_and_members(grid))
    if not is_spare:
        assert [*grid.pgs.values()] == groups
        assert [group.group_name for group in groups] == names
        assert [str(new) for new, _ in reshaped.kept] == ["tp", "dp"]
    grid.reshape("tp=1,dp=5", ranks=left)
    seen.append(sums_and_members(grid))
    assert is_spare or [*grid.pgs.values()] == groups
    grid.destroy()
    assert not is_spare or not grid.pgs
    return [*seen, took_s < scaled_s(10)]


# The group objects stay the same after the loss of a rank, a reshape that differs between ranks, a
# valid reshape that leaves a spare rank, and a reshape that uses the spare rank again. Modules can
# keep these objects.
@pytest.mark.skipif(not HAS_IT, reason="torch has it since 2.14")
def test_groups_keep_their_identity(tmp_path):
    seen = run_scenario(tmp_path, lose_and_regain, 6, victims=[VICTIM])
    for rank, (before, left, without, again, is_soon) in seen.items():
        tp = rank // 2 * 2
        dp = [rank % 2 + 2 * at for at in range(3)]
        assert before == {
            "tp": expected_sum_and_members([tp, tp + 1]),
            "dp": expected_sum_and_members(dp),
        }
        assert left == [0, 1, 2, 4, 5]
        dp.remove(2 + rank % 2)
        assert without == (
            {"tp": expected_sum_and_members([tp, tp + 1]), "dp": expected_sum_and_members(dp)}
            if rank != SPARE
            else []
        )
        assert again == {
            "tp": expected_sum_and_members([rank]),
            "dp": expected_sum_and_members([0, 1, 2, 4, 5]),
        }
        assert is_soon  # the timeout of the groups is a minute


# If another grid also uses a group, the group keeps its members, and the reshaped grid gets a new
# group.
@pytest.mark.skipif(not HAS_IT, reason="torch has it since 2.14")
@pytest.mark.full
@pytest.mark.ranks(4, timeout=60)
def test_group_shared_by_two_grids_is_not_changed():
    sizes = {"lender": "tp=2,dp=2", "other": "tp=2,dp=2"}
    lender, other = GridSet(sizes, share="identical", enable_reconfigure=True).values()
    group = lender.create_pg("tp")
    assert other.create_pg("tp") is group
    lender.reshape("tp=4,dp=1", ranks=range(4))
    assert sums_and_members(lender) == {"tp": expected_sum_and_members([0, 1, 2, 3])}
    first = dist.get_rank() // 2 * 2
    assert sums_and_members(other) == {"tp": expected_sum_and_members([first, first + 1])}
    assert other.get_pg("tp") is group


@pytest.mark.skipif(HAS_IT, reason="torch can do it")
@pytest.mark.ranks(1)
def test_torch_without_reconfigure_raises():
    with pytest.raises(GroupOptionsError, match="torch supports it since"):
        HyperCommGrid("dp=1", enable_reconfigure=True).create_pg("dp")
