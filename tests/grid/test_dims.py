"""`grid["tp"]` on real ranks: places, groups, sums, seeds."""

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hypercomm import HyperCommGrid, RankLayout, run_ranks
from hypercomm.errors import (
    HyperCommError,
    LayoutError,
    NotInitializedError,
    SimulationError,
    UnknownDimError,
)
from hypercomm.testing import fake_world

TABLE = np.arange(8).reshape(2, 2, 2)  # pp, dp, tp: the first dim varies fastest
AXES = {"tp": 2, "dp": 1, "pp": 0}


def group_of(rank, dims):
    """The ranks that differ from one only along some dims, by numpy."""
    at = np.unravel_index(rank, TABLE.shape)
    index = [slice(None) if dim in dims else at[AXES[dim]] for dim in ("pp", "dp", "tp")]
    return tuple(TABLE[tuple(index)].flatten().tolist())


def places():
    """Where each rank is along all dims, as asked in every way."""
    with HyperCommGrid("tp=2,dp=2,pp=2") as grid:
        seen = []
        for dims in ("tp", "dp", "pp", ("tp", "pp"), "dp+pp", ["tp", "dp", "pp"]):
            here = grid[dims]
            group = here.group
            assert here is grid[dims]
            assert grid[[dims]].dims == here.dims
            assert group is grid.get_pg(here.dims) is here.group
            assert str(grid.find(group)) == "+".join(here.dims)
            seen.append(
                (
                    here.rank,
                    here.size,
                    here.ranks,
                    here.prev(),
                    here.next(),
                    here.is_first,
                    here.is_last,
                )
            )
            assert (here.prev(periodic=True), here.next(periodic=True)) == (
                here.ranks[here.rank - 1],
                here.ranks[(here.rank + 1) % here.size],
            )
            assert dist.get_process_group_ranks(group) == list(here.ranks)
        return seen


def test_places():
    wanted = [("tp",), ("dp",), ("pp",), ("tp", "pp"), ("dp", "pp"), ("tp", "dp", "pp")]
    for rank, seen in enumerate(run_ranks(places, 8)):
        for dims, told in zip(wanted, seen, strict=True):
            ranks = group_of(rank, dims)
            at = ranks.index(rank)
            beside = [ranks[at - 1] if at else None, ranks[at + 1] if at + 1 < len(ranks) else None]
            assert told == (at, len(ranks), ranks, *beside, at == 0, at == len(ranks) - 1)


def outside():
    """Ranks outside a grid hear so, and are never given None."""
    said = []
    with HyperCommGrid("tp=2", rank_offset=1) as grid:
        for ask in (lambda: grid["tp"].rank, lambda: grid["tp"].group, grid["tp"].barrier):
            try:
                said.append(type(ask()).__name__)
            except HyperCommError as error:
                said.append(str(error))
        return (
            said,
            grid["tp"].size,
            [0 in grid, 1 in grid, "tp" in grid, "dp" in grid],
        )


def test_outside():
    first, *members = run_ranks(outside, 3)
    said, *rest = first
    assert said == ["rank 0 is not in layout tp=2, which holds ranks 1..2"] * 3
    assert rest == [2, [False, True, True, False]]
    assert [told for told, *_ in members] == [["int", "ProcessGroup", "NoneType"]] * 2


def changes():
    """What was known of a group is forgotten when it is destroyed, reshaped, or the job ends."""
    grid = HyperCommGrid("tp=2,dp=2")
    tp, dp = grid["tp"], grid["dp"]
    first, before = tp.group, (tp.rank, dp.rank, tp.size)
    grid.destroy_pg("tp")
    second = tp.group
    grid.reshape("tp=1,dp=4")
    after = (tp.rank, dp.rank, tp.size, dp.size, dp.group.size())
    grid.destroy()
    try:
        gone = tp.group
    except HyperCommError as error:
        gone = type(error).__name__
    dist.barrier()
    return first is second, before, after, gone


def test_changes():
    for rank, got in enumerate(run_ranks(changes, 4)):
        before, after = (rank % 2, rank // 2, 2), (0, rank, 1, 4, 4)
        assert got == (False, before, after, "GridDestroyedError")


def sums():
    """Sums, means and barriers over dims."""
    rank = dist.get_rank()
    with HyperCommGrid("tp=2,dp=2") as grid:
        tensor = torch.tensor([float(rank), 1.0])
        seen = [grid["dp"].sum(rank), grid["tp"].mean(float(rank)), grid["tp", "dp"].sum(0.25)]
        seen += [grid["tp"].sum(tensor).tolist(), grid["dp"].mean(tensor).tolist(), tensor.tolist()]
        grid["tp", "dp"].barrier()
        return seen


def test_sums():
    for rank, seen in enumerate(run_ranks(sums, 4)):
        tp, dp = rank // 2 * 2, rank % 2  # the smallest rank of each group
        assert seen[:3] == [2 * dp + 2, tp + 0.5, 1.0]
        assert seen[3:] == [[2 * tp + 1.0, 2.0], [dp + 1.0, 1.0], [float(rank), 1.0]]


# Seeds are equal exactly where coordinates along the dims are.
def test_seeds():
    got = []
    for rank in range(8):
        with fake_world(8, rank), HyperCommGrid("tp=2,dp=2,pp=2") as grid:
            named = [(), ("tp",), ("dp",), ("pp", "tp"), ("tp+pp",), ("tp", "dp", "pp")]
            got.append([grid.seed(7, *dims) for dims in named])
    dims = [(), ("tp",), ("dp",), ("tp", "pp"), ("tp", "pp"), ("tp", "dp", "pp")]
    for at, named in enumerate(dims):
        seeds = [seeds[at] for seeds in got]
        keys = [
            tuple(np.unravel_index(rank, (2, 2, 2))[AXES[dim]] for dim in named)
            for rank in range(8)
        ]
        assert len(set(zip(keys, seeds, strict=True))) == len(set(keys)) == len(set(seeds))
        assert all(0 <= seed < 2**63 for seed in seeds)


# A seed is the same in every run, and on every machine.
def test_a_seed_is_a_promise(monkeypatch):
    monkeypatch.setenv("RANK", "5")
    grid = HyperCommGrid("tp=2,dp=4", world_size=8)
    entropy = [1234, *b"tp=1,dp=2"]
    right = int(np.random.SeedSequence(entropy).generate_state(1, np.uint64)[0]) >> 1
    assert grid.seed(1234, "dp", "tp") == right


@pytest.mark.parametrize(
    ("ask", "error", "words"),
    [
        (lambda grid: grid["tpp"], UnknownDimError, "unknown dim 'tpp'.*did you mean 'tp'"),
        (lambda grid: grid[()], LayoutError, "dims is empty"),
        (lambda grid: grid.seed(-1), LayoutError, "base must be at least 0, got -1"),
    ],
)
def test_what_is_refused(ask, error, words, monkeypatch):
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(error, match=words):
        ask(HyperCommGrid("tp=2,dp=4", world_size=8))


# What a fake world cannot sum is an error, and not a number; a group of one rank is its own sum.
def test_sums_of_a_fake_world():
    with fake_world(8), HyperCommGrid("tp=2,dp=4,pp=1") as grid:
        for call in (
            lambda: grid["tp"].sum(3.0),
            lambda: grid["tp"].mean(3),
            grid["tp"].barrier,
        ):
            with pytest.raises(SimulationError, match="fake world"):
                call()
        assert grid["pp"].sum(3) == grid["pp"].mean(3) == 3
        grid["pp"].barrier()


# After the job has ended, every call says so.
def test_after_the_job():
    with fake_world(8):
        grid = HyperCommGrid("tp=2,dp=4")
        dims, _ = grid["tp"], grid.create_pg("tp")
        dist.destroy_process_group()
        for call in (
            lambda: dims.sum(1.0),
            lambda: dims.mean(1.0),
            dims.barrier,
            lambda: dims.group,
            lambda: grid.get_pg("tp"),
            lambda: grid.create_pg("dp"),
            lambda: grid.ensure_pg("tp"),
            lambda: grid.create_pgs(["dp"]),
            lambda: grid.device_mesh("tp"),
        ):
            with pytest.raises(NotInitializedError, match=r"hypercomm\.join"):
                call()


# Before there is a job, errors name the ways to make one.
@pytest.mark.parametrize(
    "call",
    [
        lambda: HyperCommGrid("tp=2,dp=4"),
        lambda: HyperCommGrid("tp=2,dp=4", world_size=8)["tp"].group,
        lambda: HyperCommGrid("tp=2,dp=4", world_size=8).coords(),
        lambda: HyperCommGrid("tp=2,dp=4", world_size=8).create_pg("tp"),
    ],
)
def test_before_the_job(call, monkeypatch):
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(NotInitializedError, match=r"hypercomm\.join\(\)"):
        call()


# What a DeviceMesh has works on a grid and on its dims, or says what to write.
def test_habits_of_a_device_mesh():
    with fake_world(8, rank=5), HyperCommGrid("tp=2,dp=4") as grid:
        assert grid["dp"].size() == grid["dp"].size == 4
        assert grid.size() == grid["tp", "dp"].size() == 8
        assert grid["tp"].get_local_rank() == 1
        assert grid["tp"].get_group() is grid["tp"].group
        with pytest.raises(LayoutError, match=r"grid\['tp'\]\.size"):
            grid.size("tp")
        for name, words in (
            ("tp", r"write grid\['tp'\]"),
            ("mesh", "device_mesh"),
            ("get_group", r"write grid\[dim\]\.group"),
            ("mesh_dim_names", "dim_names"),
            ("xx", "'xx'$"),
        ):
            with pytest.raises(AttributeError, match=words):
                getattr(grid, name)


# An int tensor of one element is a rank, a coordinate and a size, as numpy's ints are.
@pytest.mark.parametrize("rank", [torch.tensor(5), np.int64(5), torch.tensor([5])])
def test_tensors_are_ranks(rank):
    layout = RankLayout("tp=2,dp=4")
    assert layout.coords(rank) == {"tp": 1, "dp": 2}
    assert layout.groups("dp").of(rank) == (1, 3, 5, 7)
    assert layout.rank(tp=torch.tensor(1), dp=2) == 5
    assert layout.place(rank, "tp").rank == 1
    assert rank in layout
    assert RankLayout(tp=torch.tensor(2), dp=4) == layout
