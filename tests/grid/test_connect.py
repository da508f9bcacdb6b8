"""connect(): what it connects, in fake worlds and on real ranks, and whom it names."""

import signal
import time
from datetime import timedelta

import pytest
import torch.distributed as dist
from busy import late_s
from group_facts import sum_over
from mortal_ranks import end_by, run_scene

from hypercomm import HyperCommGrid
from hypercomm.errors import GroupCreationTimeout, PlanMismatchError
from hypercomm.testing import fake_world, simulate

LIMIT = timedelta(seconds=20)

# ---- real ranks -------------------------------------------------------------------------------


def rows_of(connections):
    return [(row.title, row.ranks) for row in connections]


# Whatever order ranks have created groups in, here two over tp; each key once, also those that
# share a group, and each edge both ways.
@pytest.mark.full
@pytest.mark.parametrize("lazily", [pytest.param(None, marks=pytest.mark.slow), True])
@pytest.mark.ranks(8, timeout=90)
def test_all_is_connected(lazily):
    tp, stage = dist.get_rank() % 2, dist.get_rank() // 2
    with HyperCommGrid("tp=2,dp=1,pp=4", lazy_init=lazily) as grid:
        for name in [None, "twin"][:: -1 if stage % 2 else 1]:
            grid.create_pg("tp", name=name)
        for name in ("one", "two"):
            grid.create_pg("tp", name=name, share="identical")
        grid.create_pgs(["pp", "dp", "tp+pp"])
        told = grid.connect(timeout=LIMIT)
        assert all((row.seconds > 0) == (len(row.ranks) > 1) for row in told)
        assert sum_over(grid.get_pg("tp+pp")) == 11_111_111
    pipeline, mine = (tp, tp + 2, tp + 4, tp + 6), (2 * stage, 2 * stage + 1)
    assert [row for row in rows_of(told) if "edge" not in row[0]] == [
        *(("dp", (dist.get_rank(),)), ("tp", mine), ("tp (one), tp (two)", mine)),
        *(("tp (twin)", mine), ("pp", pipeline), ("tp+pp", tuple(range(8)))),
    ]
    edges = {tuple(sorted((pipeline[stage], pipeline[(stage + by) % 4]))) for by in (1, -1)}
    assert {tuple(sorted(row.ranks)) for row in told if row.title == "pp edge"} == edges


# A view has groups of its own, and those of the dim that it shares; a rank outside has none.
@pytest.mark.ranks(5)
def test_views():
    rank = dist.get_rank()
    with HyperCommGrid([2, 2], ["tp", "pp"]) as grid:
        grid.register_view("expert", [2, 2], ["ep", "pp"], ["pp"])
        grid.create_pgs(["tp", "pp", {"dims": "ep", "view": "expert"}])
        pair, ends = (rank // 2 * 2, rank // 2 * 2 + 1), (rank % 2, rank % 2 + 2)
        wanted = [("pp", ends), ("pp edge", ends), ("ep of expert", pair)]
        of_view = rows_of(grid.view("expert").connect(timeout=LIMIT))
        assert of_view == (wanted if rank < 4 else [])
        of_grid = rows_of(grid.connect(timeout=LIMIT))
        assert of_grid == ([("tp", pair), *wanted] if rank < 4 else [])


# Who does not come is named, and where groups differ all hear so, long before the timeout; then
# nothing was done, and all may do it again.
@pytest.mark.full
@pytest.mark.ranks(4)
def test_one_rank_is_wrong():
    rank = dist.get_rank()
    with HyperCommGrid("tp=2,dp=2") as grid:
        grid.create_pgs(["tp", "dp"])
        if rank != 3:
            with pytest.raises(
                GroupCreationTimeout, match=r"connect.* rank 3 \(tp=1, dp=1\)"
            ) as late:
                grid.connect(timeout=timedelta(seconds=2))
            assert (late.value.missing, late.value.group) == ((3,), "")
        dist.barrier()
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


def gone_at_dp(rank, how, more):
    """Rank 3 is killed, or stopped, when it comes to dp; the first group works."""
    grid = HyperCommGrid("tp=2,dp=2")
    grid.create_pgs(["tp", "dp", *more])
    dist.barrier()
    if rank == 3:
        all_reduce, dp = dist.all_reduce, grid.get_pg("dp")

        def leave(tensor, group):
            if group is dp:
                end_by(how)
            return all_reduce(tensor, group=group)

        dist.all_reduce = leave
    begin = time.monotonic()
    with pytest.raises(GroupCreationTimeout) as caught:
        grid.connect(timeout=timedelta(seconds=4))
    assert rank > 1 or sum_over(grid.get_pg("tp")) == 11
    grid.destroy()
    assert time.monotonic() - begin < late_s(20)
    words, group = str(caught.value), "dp" if rank == 1 else "".join(more)
    assert words.startswith("connect(): timed out: rank 3 (tp=1,")
    assert (caught.value.missing, caught.value.group) == ((3,), group)
    assert not group or words.endswith(f"; rank {rank} was connecting {group}")


# Who dies, or hangs, between two groups is named with the second one.
@pytest.mark.full
@pytest.mark.parametrize(("how", "more"), [(signal.SIGKILL, []), (signal.SIGSTOP, ["tp+dp"])])
def test_one_is_gone(how, more, tmp_path):
    run_scene(tmp_path, gone_at_dp, 4, how, more, victims=[3])


# ---- without ----------------------------------------------------------------------------------


# Where nobody is to be connected to, nothing is called.
def test_fake_worlds(monkeypatch):
    with fake_world(8, rank=5), HyperCommGrid("tp=2,dp=1,pp=4") as grid:
        grid.create_pgs(["tp", "dp", "pp"])
        monkeypatch.setattr(dist, "all_reduce", None)
        monkeypatch.setattr(dist, "batch_isend_irecv", None)
        told = grid.connect(pipelines="pp")
        assert [row.title for row in told] == ["dp", "tp", "pp", "pp edge", "pp edge"]
        assert {row.seconds for row in told} == {0}
        assert len(grid.connect(pipelines=())) == 3
        assert len(grid.connect(pipelines=["tp"])) == 4


def connect_in_a_simulation():
    with HyperCommGrid("tp=2,pp=2", backend="nccl") as grid:
        grid.create_pgs(["tp", "pp"])
        return [row.title for row in grid.connect()]


# NCCL's devices are asked for nothing where there are none.
def test_simulations():
    assert set(map(tuple, simulate(connect_in_a_simulation, 4).returned.values())) == {
        ("tp", "pp", "pp edge")
    }


# A backend whose device is not here is left out.
@pytest.mark.ranks(2)
def test_a_device_that_is_not_here(monkeypatch):
    with HyperCommGrid("tp=2") as grid:
        grid.create_pg("tp")
        monkeypatch.setattr(dist, "get_backend_config", lambda _: "cpu:gloo,hpu:hccl")
        assert rows_of(grid.connect(timeout=LIMIT)) == [("tp", (0, 1))]
