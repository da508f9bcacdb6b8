"""connect(): what it connects, in fake worlds and on real ranks, and whom it names."""

import json
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from busy import late_s
from group_facts import sum_over
from mortal_ranks import exit_codes

from hypercomm import HyperCommGrid, run_ranks
from hypercomm.errors import (
    HyperCommError,
)
from hypercomm.grid import connect
from hypercomm.testing import fake_world, simulate

LIMIT = timedelta(seconds=20)
SHORT = timedelta(seconds=2)
KILLED, STOPPED = signal.SIGKILL, signal.SIGSTOP

# ---- real ranks -------------------------------------------------------------------------------


def rows_of(connections):
    return [(row.title, row.ranks) for row in connections]


def in_other_orders(lazily):
    """Stages create two groups over tp in another order; one key shares another's group."""
    with HyperCommGrid("tp=2,dp=1,pp=4", lazy_init=lazily) as grid:
        names = [None, "twin"]
        for name in names if grid.coords()["pp"] % 2 else reversed(names):
            grid.create_pg("tp", name=name)
        for name in ("one", "two"):
            grid.create_pg("tp", name=name, share="identical")
        grid.create_pgs(["pp", "dp", "tp+pp"])
        told = grid.connect(timeout=LIMIT)
        assert all((row.seconds > 0) == (len(row.ranks) > 1) for row in told)
        return rows_of(told), sum_over(grid.get_pg("tp+pp"))


# Whatever order ranks have created groups in; each key once, and each edge both ways.
@pytest.mark.full
@pytest.mark.parametrize("lazily", [pytest.param(None, marks=pytest.mark.slow), True])
def test_all_is_connected(lazily):
    for rank, (rows, total) in enumerate(run_ranks(in_other_orders, 8, args=(lazily,), timeout=90)):
        tp, stage = rank % 2, rank // 2
        pipeline = [tp, tp + 2, tp + 4, tp + 6]
        edges = {tuple(sorted((rank, pipeline[(stage + step) % 4]))) for step in (1, -1)}
        mine = (rank - tp, rank - tp + 1)
        assert [row for row in rows if "edge" not in row[0]] == [
            ("dp", (rank,)),
            ("tp", mine),
            ("tp (one), tp (two)", mine),
            ("tp (twin)", mine),
            ("pp", tuple(pipeline)),
            ("tp+pp", tuple(range(8))),
        ]
        assert {tuple(sorted(ranks)) for title, ranks in rows if title == "pp edge"} == edges
        assert total == 11_111_111


def of_a_view():
    """Rank 4 is outside; a view has groups of its own, and those of the dim that it shares."""
    with HyperCommGrid([2, 2], ["tp", "pp"]) as grid:
        grid.register_view("expert", [2, 2], ["ep", "pp"], ["pp"])
        grid.create_pgs(["tp", "pp", {"dims": "ep", "view": "expert"}])
        view = grid.view("expert")
        return rows_of(view.connect(timeout=LIMIT)), rows_of(grid.connect(timeout=LIMIT))


# Views, with a rank outside; and grids behind each other, which meet as one.
def test_views_and_sets():
    *inside, outside = run_ranks(of_a_view, 5, timeout=60)
    assert outside == ([], [])
    for rank, (of_view, of_grid) in enumerate(inside):
        pair, ends = (rank // 2 * 2, rank // 2 * 2 + 1), (rank % 2, rank % 2 + 2)
        wanted = [("pp", ends), ("pp edge", ends), ("ep of expert", pair)]
        assert (of_view, of_grid) == (wanted, [("tp", pair), *wanted])


def said_of(call, *arguments, catch=HyperCommError, **keywords):
    """What a call raises, in words, and within how many seconds."""
    begin = time.monotonic()
    try:
        call(*arguments, **keywords)
    except catch as error:
        missing, group = getattr(error, "missing", ()), getattr(error, "group", "")
        return f"{type(error).__name__}: {error}", missing, group, time.monotonic() - begin
    return "nothing", (), "", time.monotonic() - begin


def one_stays_away(absent):
    """One rank comes only to the second call."""
    with HyperCommGrid("tp=2,dp=2") as grid:
        grid.create_pgs(["tp", "dp"])
        said = None
        if dist.get_rank() != absent:
            said = said_of(grid.connect, timeout=SHORT)
        dist.barrier()
        return said, rows_of(grid.connect(timeout=LIMIT)), sum_over(grid.get_pg("dp"))


# Who does not come is named, with its groups; then nothing was done, and all may do it again.
@pytest.mark.full
def test_one_stays_away():
    got = run_ranks(one_stays_away, 4, args=(3,), timeout=60)
    for rank, (said, rows, total) in enumerate(got):
        assert [title for title, _ in rows] == ["tp", "dp"]
        assert total == (1010 if rank % 2 else 101)
        if rank != 3:
            words, missing, group, seconds = said
            assert words.startswith("GroupCreationTimeout: connect()")
            assert "rank 3 (tp=1, dp=1) did not join" in words
            assert (missing, group) == ((3,), "")
            assert 2 <= seconds < late_s(8)


def one_has_another_group():
    """Rank 1 has a twin that the others lack; all may go on afterwards."""
    with HyperCommGrid("tp=2,dp=2") as grid:
        grid.create_pgs(["tp", "dp"])
        if dist.get_rank() % 2:
            grid.create_pg("dp", name="twin")
        said = said_of(grid.connect, timeout=LIMIT)
        dist.barrier()
        if dist.get_rank() % 2:
            grid.destroy_pg("dp", name="twin")
        return said, len(grid.connect(timeout=LIMIT))


# Where groups differ all hear so, long before the timeout, and may go on.
def test_one_has_another_group():
    for said, count in run_ranks(one_has_another_group, 4, timeout=60):
        assert said[0].startswith("PlanMismatchError: connect(): ranks differ at position")
        assert "dp (twin) over <2 groups of 2: (0, 2), (1, 3)>" in said[0]
        assert said[3] < late_s(10)
        assert count == 2


def gone_at_dp(rank, port, folder, how, lazily, more):
    """Rank 3 is killed, or stopped, when it comes to dp; the others say what they hear."""
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=4)
    grid = HyperCommGrid("tp=2,dp=2", lazy_init=lazily)
    grid.create_pgs(["tp", "dp", *more])
    dist.barrier()
    if rank == 3:
        all_reduce, dp = dist.all_reduce, grid.get_pg("dp")

        def leave(tensor, group):
            if group is dp:
                os.kill(os.getpid(), how)
                time.sleep(60)
            return all_reduce(tensor, group=group)

        dist.all_reduce = leave
    said = said_of(grid.connect, timeout=timedelta(seconds=4))
    begin = time.monotonic()
    others = sum_over(grid.get_pg("tp")) if rank < 2 else None
    grid.destroy()
    told = [*said, others, time.monotonic() - begin]
    Path(folder, f"{rank}.json").write_text(json.dumps(told))
    os._exit(0)  # the world is broken: nobody waits for it


# Who dies, or hangs, between two groups is named with the second one; the first one works.
@pytest.mark.full
@pytest.mark.parametrize(
    ("how", "lazily", "more"),
    [
        (signal.SIGKILL, None, []),
        (signal.SIGSTOP, None, ["tp+dp"]),
    ],
)
def test_one_is_gone(how, lazily, more, tmp_path):
    codes = exit_codes(*(gone_at_dp, 4, str(tmp_path), how, lazily, more), seconds=50, stopped=(3,))
    assert codes[:3] == [0, 0, 0]
    for rank in range(3):
        told = json.loads((tmp_path / f"{rank}.json").read_text())
        words, missing, group, seconds, total, leaving = told
        assert words.startswith(
            "GroupCreationTimeout: connect() of each group: timed out: rank 3 (tp=1,"
        )
        assert (missing, group) == ([3], "dp" if rank == 1 else "".join(more))
        assert not group or words.endswith(f"; rank {rank} was connecting {group}")
        assert seconds < 20
        assert leaving < 20
        assert total == (11 if rank < 2 else None)


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


class Devices:
    """What torch has for a kind of device."""

    def __init__(self, count):
        self.count = count

    def is_available(self):
        return self.count > 0

    def current_device(self):
        return self.count - 1


# Each backend of a group is connected on a device that is here, of whatever kind; in a world that
# is not live on whichever it is for.
@pytest.mark.parametrize(
    ("config", "wanted"),
    [
        ("cpu:gloo,xpu:xccl", {"gloo": "cpu", "xccl": "xpu"}),
        ("cpu:gloo,cuda:nccl,xpu:xccl", {"gloo": "cpu", "xccl": "xpu"}),
        ("cuda:nccl,xpu:xccl", {"xccl": "xpu"}),
        ("cpu:gloo,cuda:gloo", {"gloo": "cpu"}),
        ("cpu:gloo,hpu:hccl", {"gloo": "cpu"}),
    ],
)
@pytest.mark.parametrize("is_real", [True, False])
def test_devices(config, wanted, is_real, monkeypatch):
    monkeypatch.setattr(torch, "xpu", Devices(2))
    monkeypatch.setattr(torch, "cuda", Devices(0))
    monkeypatch.setattr(dist, "get_backend_config", lambda _: config)
    monkeypatch.setattr(connect, "_is_live", lambda _: is_real)
    found = connect._devices_of(None, None)
    if is_real:
        assert found == wanted
    else:
        assert {*found} == {each.split(":")[1] for each in config.split(",")}
