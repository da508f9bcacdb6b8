"""Groups that stay after a loss: the same objects, with other members."""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from busy import late_s
from group_facts import figures, figures_of
from mortal_ranks import run_scene
from test_survivors import die

from hypercomm import HyperCommGrid
from hypercomm.errors import GroupOptionsError, PlanMismatchError

HAS_IT = hasattr(dist, "_reconfigure")
"""Whether torch can change the members of a group: from 2.14 on."""

LONG, SHORT = timedelta(seconds=60), timedelta(seconds=1)


VICTIM, SPARE = 3, 2


def use_for_ever(groups):
    while True:
        for group in groups:
            dist.all_reduce(torch.zeros(1), group=group)


def lose_and_regain(rank):
    grid = HyperCommGrid("tp=2,dp=3", enable_reconfigure=True)
    grid.create_pgs(["tp", "dp"], timeout=LONG)
    groups, seen = [*grid.pgs.values()], [figures(grid)]
    names = [group.group_name for group in groups]
    if rank == VICTIM:
        die()
    began = time.monotonic()
    with pytest.raises(RuntimeError):  # a peer of the victim, or of a rank that has raised
        use_for_ever(groups)
    left = grid.survivors(SHORT)
    seen.append([*left])
    if rank != SPARE:  # which takes no part in it
        with pytest.raises(PlanMismatchError, match="reshape to"):
            grid.reshape(("tp=1,dp=4", "tp=2,dp=2")[rank % 2], ranks=[0, 1, 4, 5])
    reshaped = grid.reshape("tp=2,dp=2", ranks=[0, 1, 4, 5])
    took_s = time.monotonic() - began
    is_spare = rank == SPARE
    seen.append([] if is_spare else figures(grid))
    if not is_spare:
        assert [*grid.pgs.values()] == groups
        assert [group.group_name for group in groups] == names
        assert [str(new) for new, _ in reshaped.kept] == ["tp", "dp"]
    grid.reshape("tp=1,dp=5", ranks=left)
    seen.append(figures(grid))
    assert is_spare or [*grid.pgs.values()] == groups
    grid.destroy()
    assert not is_spare or not grid.pgs
    return [*seen, took_s < late_s(10)]


# A loss with a spare rank, a reshape that differs between ranks, a valid reshape, and one that uses
# the spare rank again: the group objects stay the same, so modules can hold them.
@pytest.mark.skipif(not HAS_IT, reason="torch has it since 2.14")
def test_groups_stay(tmp_path):
    seen = run_scene(tmp_path, lose_and_regain, 6, victims=[VICTIM])
    for rank, (before, left, without, again, is_soon) in seen.items():
        tp, dp = rank // 2 * 2, [rank % 2 + 2 * at for at in range(3)]
        assert before == {"tp": figures_of([tp, tp + 1]), "dp": figures_of(dp)}
        assert left == [0, 1, 2, 4, 5]
        dp.remove(2 + rank % 2)
        assert without == (
            {"tp": figures_of([tp, tp + 1]), "dp": figures_of(dp)} if rank != SPARE else []
        )
        assert again == {"tp": figures_of([rank]), "dp": figures_of([0, 1, 2, 4, 5])}
        assert is_soon  # the timeout of the groups is a minute


# A group that another grid also uses keeps its members: the grid that is reshaped gets a new group.
@pytest.mark.skipif(not HAS_IT, reason="torch has it since 2.14")
@pytest.mark.full
@pytest.mark.ranks(4, timeout=60)
def test_a_group_of_two_grids():
    options = {"share": "identical", "enable_reconfigure": True}
    lender = HyperCommGrid("tp=2,dp=2", name="lender", **options)
    other = HyperCommGrid("tp=2,dp=2", name="other", share_with=lender, **options)
    group = lender.create_pg("tp")
    assert other.create_pg("tp") is group
    lender.reshape("tp=4,dp=1", ranks=range(4))
    assert figures(lender) == {"tp": figures_of([0, 1, 2, 3])}
    first = dist.get_rank() // 2 * 2
    assert figures(other) == {"tp": figures_of([first, first + 1])}
    assert other.get_pg("tp") is group


@pytest.mark.skipif(HAS_IT, reason="torch can do it")
@pytest.mark.ranks(1)
def test_a_torch_that_cannot():
    with pytest.raises(GroupOptionsError, match="torch has it since"):
        HyperCommGrid("dp=1", enable_reconfigure=True).create_pg("dp")
