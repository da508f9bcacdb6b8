"""Test the connections that connect() opens in fake worlds and on real ranks, and its errors."""

import re
import signal
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from group_checks import sum_over
from killable_ranks import run_scenario, signal_self
from time_limits import scaled_s

from hypercomm import HyperCommGrid
from hypercomm.errors import CreationError, PlanMismatchError
from hypercomm.testing import fake_world, simulate

LIMIT = timedelta(seconds=20)

# ---- real ranks -------------------------------------------------------------------------------


def rows_of(connections):
    return [(row.title, row.ranks) for row in connections]


# Every group is connected once, although ranks have created two groups over tp in different orders.
# A group with several keys is also connected only once. Each pipeline edge is connected in both
# directions.
@pytest.mark.full
@pytest.mark.parametrize("lazily", [pytest.param(None, marks=pytest.mark.slow), True])
@pytest.mark.ranks(8, timeout=90)
def test_every_group_is_connected(lazily):
    rank = dist.get_rank()
    tp = rank % 2
    stage = rank // 2
    with HyperCommGrid("tp=2,dp=1,pp=4", lazy_init=lazily) as grid:
        for name in [None, "twin"][:: -1 if stage % 2 else 1]:
            grid.create_pg("tp", name=name)
        for name in ("one", "two"):
            grid.create_pg("tp", name=name, share="identical")
        grid.create_pgs(["pp", "dp", "tp+pp"])
        rows = grid.connect(timeout=LIMIT)
        assert all((row.seconds > 0) == (len(row.ranks) > 1) for row in rows)
        assert sum_over(grid.get_pg("tp+pp")) == 11_111_111
    pipeline = (tp, tp + 2, tp + 4, tp + 6)
    pair = (2 * stage, 2 * stage + 1)
    assert [row for row in rows_of(rows) if "edge" not in row[0]] == [
        ("dp", (rank,)),
        ("tp", pair),
        ("tp (one), tp (two)", pair),
        ("tp (twin)", pair),
        ("pp", pipeline),
        ("tp+pp", tuple(range(8))),
    ]
    edges = {tuple(sorted((pipeline[stage], pipeline[(stage + by) % 4]))) for by in (1, -1)}
    assert {tuple(sorted(row.ranks)) for row in rows if row.title == "pp edge"} == edges


# connect() of a view connects all groups of the view, even groups over dims that the view shares
# with the grid. A rank outside connects no group. A backend whose device is missing on this machine
# is skipped.
@pytest.mark.ranks(5)
def test_view_connects_its_groups(monkeypatch):
    rank = dist.get_rank()
    with HyperCommGrid([2, 2], ["tp", "pp"]) as grid:
        grid.register_view("expert", [2, 2], ["ep", "pp"], ["pp"])
        grid.create_pgs(["tp", "pp", {"dims": "ep", "view": "expert"}])
        pair, ends = (rank // 2 * 2, rank // 2 * 2 + 1), (rank % 2, rank % 2 + 2)
        wanted = [("pp", ends), ("pp edge", ends), ("ep of expert", pair)]
        of_view = rows_of(grid.view("expert").connect(timeout=LIMIT))
        assert of_view == (wanted if rank < 4 else [])
        monkeypatch.setattr(dist, "get_backend_config", lambda _: "cpu:gloo,hpu:hccl")
        of_grid = rows_of(grid.connect(timeout=LIMIT))
        assert of_grid == ([("tp", pair), *wanted] if rank < 4 else [])


# If ranks have different groups, all ranks raise long before the timeout. This changes nothing, so
# a retry works.
@pytest.mark.full
@pytest.mark.ranks(4)
def test_different_groups():
    rank = dist.get_rank()
    with HyperCommGrid("tp=2,dp=2") as grid:
        grid.create_pgs(["tp", "dp"])
        if rank % 2:
            grid.create_pg("dp", name="twin")
        begin = time.monotonic()
        with pytest.raises(PlanMismatchError, match=r"dp \(twin\) over .*\(0, 2\), \(1, 3\)"):
            grid.connect(timeout=LIMIT)
        assert time.monotonic() - begin < LIMIT.total_seconds() / 2
        dist.barrier()
        if rank % 2:
            grid.destroy_pg("dp", name="twin")
        assert [title for title, _ in rows_of(grid.connect(timeout=LIMIT))] == ["tp", "dp"]
        assert sum_over(grid.get_pg("dp")) == (1010 if rank % 2 else 101)


def rank_3_stops_at_dp(rank):
    """Stop rank 3 when connect() reaches dp. The group tp works on the other ranks."""
    grid = HyperCommGrid("tp=2,dp=2")
    grid.create_pgs(["tp", "dp", "tp+dp"])
    dist.barrier()
    if rank == 3:
        all_reduce = dist.all_reduce
        dp = grid.get_pg("dp")

        def leave(tensor, group, **options):
            if group is dp:
                signal_self(signal.SIGSTOP)
            return all_reduce(tensor, group=group, **options)

        dist.all_reduce = leave
    begin = time.monotonic()
    group = "dp" if rank == 1 else "tp+dp"
    failed = f"connect.* failed in {re.escape(group)} .*although all ranks of the grid had arrived"
    with pytest.raises(CreationError, match=failed) as caught:
        grid.connect(timeout=timedelta(seconds=4))
    assert caught.value.group == group
    assert rank > 1 or sum_over(grid.get_pg("tp")) == 11
    grid.destroy()
    assert time.monotonic() - begin < scaled_s(20)


# If a rank hangs after it has connected one group, the errors of its peers name the next group.
@pytest.mark.full
def test_rank_that_stops_between_groups(tmp_path):
    run_scenario(tmp_path, rank_3_stops_at_dp, 4, victims=[3])


# ---- without real ranks -----------------------------------------------------------------------


# A fake world has no peers, so connect() makes no call of torch.
def test_fake_world_needs_no_call(monkeypatch):
    with fake_world(8, rank=5), HyperCommGrid("tp=2,dp=1,pp=4") as grid:
        grid.create_pgs(["tp", "dp", "pp"])
        monkeypatch.setattr(dist, "all_reduce", None)
        monkeypatch.setattr(dist, "batch_isend_irecv", None)
        rows = grid.connect(pipelines="pp")
        assert [row.title for row in rows] == ["dp", "tp", "pp", "pp edge", "pp edge"]
        assert {row.seconds for row in rows} == {0}
        assert len(grid.connect(pipelines=())) == 3
        assert len(grid.connect(pipelines=["tp"])) == 4


def connect_in_a_simulation():
    with HyperCommGrid("tp=2,pp=2", backend="nccl") as grid:
        grid.create_pgs(["tp", "pp"])
        return [row.title for row in grid.connect()]


# In a simulation of NCCL, connect() does not use a GPU.
def test_simulated_nccl_needs_no_device():
    assert set(map(tuple, simulate(connect_in_a_simulation, 4).returned.values())) == {
        ("tp", "pp", "pp edge")
    }
