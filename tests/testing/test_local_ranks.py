"""Collectives on local ranks: each number is that of numpy, over every group of a layout."""

import re
import subprocess
import sys
import types
from pathlib import Path

import by_numpy
import numpy as np
import pytest
import torch
import torch.distributed as dist
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed import _functional_collectives as functional
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from hypercomm import GridSet, HyperCommGrid, RankLayout
from hypercomm.errors import (
    CreationError,
    GroupMissingError,
    LaunchError,
    LayoutError,
    SimulationError,
    WorldSizeError,
)
from hypercomm.process_groups.c10d.self_checks import since
from hypercomm.testing import dim_subsets, fake_world, layouts, local_ranks

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "simulate.md"
HAS_LOCAL_RANKS = since("2.10")
needs_torch = pytest.mark.skipif(not HAS_LOCAL_RANKS, reason="torch 2.10 and newer have them")

NAMES = ("tp", "cp", "dp")
SHAPE = (2, 4, 8)
TABLE = np.arange(64).reshape(SHAPE, order="F")
COMBINATIONS = [("tp",), ("cp",), ("dp",), ("tp", "cp"), ("tp", "dp"), ("cp", "dp"), NAMES]

# Their names before torch 2.13.
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def draw_numbers(world_size, group_size):
    """Small whole numbers for each rank, two for each member of its group: sums are exact."""
    return np.random.default_rng(0).integers(-9, 9, (world_size, 2 * group_size)).astype(float)


def communicate(ranks, group, numbers):
    """What every rank has after each collective over a process group, as arrays [rank, number]."""
    size, members = group.size(), dist.get_process_group_ranks(group)
    last = members[-1]

    def own():
        return ranks.each(lambda rank: torch.from_numpy(numbers[rank].copy()))

    def zeros(count):
        return torch.zeros(count, dtype=float)

    def read(*tensors):
        parts = [
            np.array([shard.numpy() for shard in ranks.shards(tensor).values()])
            for tensor in tensors
        ]
        return np.concatenate(parts, axis=1)

    found = {}
    for name in ("SUM", "MAX", "AVG"):
        dist.all_reduce(tensor := own(), getattr(dist.ReduceOp, name), group=group)
        found[f"all_reduce {name}"] = read(tensor)
    dist.broadcast(tensor := own(), last, group=group)
    found["broadcast"] = read(tensor)
    dist.reduce(tensor := own(), last, group=group)
    found["reduce"] = read(tensor)
    dist.all_gather(several := [zeros(2 * size) for _ in members], own(), group=group)
    found["all_gather"] = read(*several)
    all_gather_single(out := zeros(2 * size * size), own(), group=group)
    found["all_gather_single"] = read(out)
    dist.reduce_scatter(out := zeros(2), list(own().split(2)), group=group)
    found["reduce_scatter"] = read(out)
    reduce_scatter_single(out := zeros(2), own(), dist.ReduceOp.MAX, group=group)
    found["reduce_scatter_single"] = read(out)
    dist.all_to_all(several := [zeros(2) for _ in members], list(own().split(2)), group=group)
    found["all_to_all"] = read(*several)
    dist.all_to_all_single(out := zeros(2 * size), own(), group=group)
    found["all_to_all_single"] = read(out)
    parts = list(own().split(2))  # of all ranks: those of the roots count
    dist.scatter(out := zeros(2), parts, dist.get_rank(), group=group)
    found["scatter"] = read(out)
    found["functional"] = read(functional.wait_tensor(functional.all_reduce(own(), "sum", group)))
    dist.barrier(group)
    return found


def expected(groups, numbers, root):
    """The same by numpy; ranks in no group keep what they have."""
    size = len(groups[0])
    kept, zeros = numbers.copy, lambda count: np.zeros((len(numbers), count))
    wanted = {f"all_reduce {name}": kept() for name in ("SUM", "MAX", "AVG")}
    wanted |= {"broadcast": kept(), "reduce": kept(), "functional": kept()}
    wanted |= {name: zeros(2 * size * size) for name in ("all_gather", "all_gather_single")}
    wanted |= {name: zeros(2 * size) for name in ("all_to_all", "all_to_all_single")}
    scattered = ("reduce_scatter", "reduce_scatter_single", "scatter")
    wanted |= {name: zeros(2) for name in scattered}
    for members in groups:
        own = numbers[members]
        cut = own.reshape(size, size, 2)  # [sender, receiver, number]
        exchanged = cut.transpose(1, 0, 2).reshape(size, -1)
        rows = {
            "all_reduce SUM": own.sum(axis=0),
            "all_reduce MAX": own.max(axis=0),
            "all_reduce AVG": own.mean(axis=0),
            "broadcast": own[-1],
            "reduce": np.array([*own[:-1], own.sum(axis=0)]),
            "functional": own.sum(axis=0),
            "all_gather": own.ravel(),
            "all_gather_single": own.ravel(),
            "all_to_all": exchanged,
            "all_to_all_single": exchanged,
            "reduce_scatter": cut.sum(axis=0),
            "reduce_scatter_single": cut.max(axis=0),
            "scatter": cut[root],
        }
        for name, row in rows.items():
            wanted[name][members] = row
    return wanted


def check(ranks, group, groups, world_size):
    """Compare what every rank has after each collective with numpy."""
    numbers = draw_numbers(world_size, len(groups[0]))
    found = communicate(ranks, group, numbers)
    wanted = expected(groups, numbers, dist.get_rank(group))
    assert found.keys() == wanted.keys()
    for name, array in found.items():
        np.testing.assert_allclose(array, wanted[name], 1e-12, err_msg=name)


# Over every combination of dims of 64 ranks, from whichever rank.
@needs_torch
@pytest.mark.parametrize("rank", [pytest.param(0, marks=pytest.mark.long), 37])
@pytest.mark.parametrize("dims", COMBINATIONS, ids="+".join)
def test_all_groups_of_a_layout(dims, rank):
    with local_ranks(64, rank) as ranks, HyperCommGrid(SHAPE, NAMES) as grid:
        group = grid.create_pg(dims)
        check(ranks, group, by_numpy.all_groups(TABLE, NAMES, dims), 64)


# Over the groups of a view, and WORLD.
@needs_torch
@pytest.mark.long
def test_views():
    shape, names = (4, 2, 8), ("ep", "etp", "dp")
    table = np.arange(64).reshape(shape, order="F")
    with local_ranks(64, 21) as ranks, HyperCommGrid(SHAPE, NAMES) as grid:
        grid.register_view("expert", shape, names, ["dp"])
        for dims in (("ep",), ("etp",), ("dp",), ("ep", "dp")):
            group = grid.create_pg(dims, view="expert")
            check(ranks, group, by_numpy.all_groups(table, names, dims), 64)
        check(ranks, dist.group.WORLD, [list(range(64))], 64)


# Over groups made of groups, which are no lines of a mesh, and which some ranks are in none of.
@needs_torch
@pytest.mark.long
@pytest.mark.parametrize("some", [[0, 7], [0, 1, 4], [0, 1, 2, 4, 6, 7]], ids=str)
def test_derived_groups(some):
    def pick(line):
        return [line[position] for position in some]

    lines = by_numpy.all_groups(TABLE, NAMES, ("dp",))
    with local_ranks(64) as ranks, HyperCommGrid(SHAPE, NAMES) as grid:
        group = grid.create_pg("dp", name="some", derive=lambda groups: groups.pick(pick))
        check(ranks, group, [pick(line) for line in lines], 64)
        group = grid.create_pg("dp", name="halves", derive=lambda groups: groups.chunks(4))
        check(ranks, group, [half for line in lines for half in (line[:4], line[4:])], 64)


# Over the groups of a grid that leaves ranks out, on both sides.
@needs_torch
def test_two_grids():
    with local_ranks(24, 13) as ranks, GridSet.tile(a="tp=2,dp=4", b="tp=4,dp,pp=2") as grids:
        group = grids["b"].create_pg(("tp", "pp"))
        assert grids["a"].create_pg("tp") is None
        table = np.arange(8, 24).reshape((4, 2, 2), order="F")
        check(ranks, group, by_numpy.all_groups(table, ("tp", "dp", "pp"), ("tp", "pp")), 24)


# What survives a reshape acts for the groups of the new shape.
@needs_torch
def test_reshape():
    with local_ranks(16) as ranks, HyperCommGrid((2, 2, 4), NAMES) as grid:
        grid.create_pgs(["tp", "dp", ["tp", "cp"]])
        kept = grid.get_pg(["tp", "cp"])
        grid.reshape("tp=4,dp=4")
        assert grid.get_pg("tp") is kept
        table = np.arange(16).reshape((4, 4), order="F")
        for dims in ("tp", "dp"):
            groups = by_numpy.all_groups(table, ("tp", "dp"), (dims,))
            check(ranks, grid.get_pg(dims), groups, 16)


@st.composite
def tables(draw):
    """Draw a layout, with its ranks by numpy alone, in any order and with gaps where listed."""
    layout = draw(layouts(max_ranks=24, max_offset=4))
    shape, names = layout.shape, layout.dim_names
    if draw(st.booleans()):
        ranks = draw(st.permutations(range(layout.size + draw(st.integers(0, 3)))))[: layout.size]
        layout = RankLayout(shape, names, ranks=ranks)
    else:
        ranks = np.arange(layout.size) + layout.rank_offset
    return layout, np.array(ranks).reshape(shape, order="F")


# Over all groups of any layout, from any of its ranks, in a world that may have more.
@needs_torch
@pytest.mark.long
@settings(max_examples=examples(100))
@given(st.data(), tables(), st.integers(0, 2))
def test_groups_of_drawn_layouts(data, drawn, spare):
    layout, table = drawn
    world_size = int(table.max()) + 1 + spare
    rank = data.draw(st.sampled_from(table.ravel().tolist()))
    dims = data.draw(dim_subsets(layout))
    with local_ranks(world_size, rank) as ranks, HyperCommGrid.from_layout(layout) as grid:
        groups = by_numpy.all_groups(table, layout.dim_names, dims)
        check(ranks, grid.create_pg(dims), groups, world_size)


# The name is the function, whichever name of its module is asked for first: no module is called so.
def test_name():
    program = "from hypercomm import testing; testing.LocalRanks; testing.local_ranks(None)"
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr


# numpy's groups above are those of the other oracle, which the real ranks have.
def test_the_oracles_agree():
    for dims in COMBINATIONS:
        for members in by_numpy.all_groups(TABLE, NAMES, dims):
            assert members == by_numpy.group_of(SHAPE, NAMES, 0, dims, members[0])


# DTensor on the mesh of a grid; gradients reduced over dp are those of one process with all data.
@needs_torch
def test_dtensor_and_gradients():
    from torch.distributed.tensor import DTensor, Replicate, Shard

    with local_ranks(8) as ranks, HyperCommGrid((2, 4), ("tp", "dp")) as grid:
        _, dp = grid.create_pgs(["tp", "dp"])
        local = ranks.each(lambda rank: torch.tensor([float(rank)]))
        tensor = DTensor.from_local(local, grid.device_mesh("dp", "tp"), [Shard(0), Replicate()])
        full = ranks.shards(tensor.full_tensor())
        assert [full[rank].tolist() for rank in (0, 5)] == [[0, 2, 4, 6], [1, 3, 5, 7]]
        torch.manual_seed(5)
        model = torch.nn.Linear(3, 1)
        data = torch.arange(12.0).reshape(4, 3)
        model(ranks.each(lambda rank: data[rank // 2 : rank // 2 + 1])).square().mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad, dist.ReduceOp.AVG, group=dp)
        found = [ranks.shards(parameter.grad) for parameter in model.parameters()]
    torch.manual_seed(5)
    model = torch.nn.Linear(3, 1)
    model(data).square().mean().backward()
    for shards, parameter in zip(found, model.parameters(), strict=True):
        for shard in shards.values():
            torch.testing.assert_close(shard, parameter.grad)


# The groups of a mesh that torch makes are known once a grid has them.
@needs_torch
def test_groups_of_a_mesh():
    with local_ranks(8) as ranks:
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "tp"))
        tensor = ranks.each(lambda rank: torch.tensor([float(rank)]))
        sentence = (
            "no grid has the process group of ranks [0, 2, 4, 6], so nothing tells which ones "
            "other ranks have in its place: create it by a grid, or give its DeviceMesh to "
            "HyperCommGrid.from_device_mesh() and keep that grid"
        )
        with pytest.raises(SimulationError, match=f"^{re.escape(sentence)}$"):
            dist.all_reduce(tensor, group=mesh.get_group("dp"))
        with HyperCommGrid.from_device_mesh(mesh):
            dist.all_reduce(tensor, group=mesh.get_group("dp"))
        assert [int(shard) for shard in ranks.shards(tensor).values()] == [12, 16] * 4


# One process group for two keys, whose groups differ on other ranks, is refused with both.
@needs_torch
def test_shared_groups():
    def halves(groups):
        return groups.pick(lambda line: line[:2] if line[0] == 0 else line[2:])

    with local_ranks(8) as ranks, HyperCommGrid((2, 4), NAMES[::2], share="identical") as grid:
        one = grid.create_pg("dp", name="first", derive=lambda groups: groups.chunks(2))
        tensor = ranks.each(lambda rank: torch.tensor([float(rank)]))
        dist.all_reduce(tensor, group=one)
        assert [int(shard) for shard in ranks.shards(tensor).values()] == [2, 4] * 2 + [10, 12] * 2
        assert grid.create_pg("dp", name="other", derive=halves) is one
        sentence = (
            "this rank has one process group over 'dp', name='first' and over 'dp', name='other', "
            "where other ranks have two; create them with share='never'"
        )
        with pytest.raises(SimulationError, match=f"^{re.escape(sentence)}$"):
            dist.all_reduce(tensor, group=one)


def state():
    """All that a block changes for its length."""
    local = getattr(dist, "_local_tensor", None)
    patched = [vars(DeviceMesh).get(name) for name in ("get_coordinate", "get_rank")]
    inner = [] if local is None else [local._c10d._prepare_collective_groups]
    modes = [] if local is None else list(local.get_local_tensor_mode_list())
    random = torch.get_rng_state().tolist()
    functions = [torch.manual_seed, torch.initial_seed, dist.get_rank]
    return dist.is_initialized(), patched, inner, modes, random, functions


def fails(call, sentence, error=SimulationError):
    with pytest.raises(error, match=f"^{re.escape(sentence)}"):
        call()


# Whatever ends a block, all is as before.
@needs_torch
def test_the_end():
    with local_ranks(2):
        pass
    before = state()
    with local_ranks(8) as ranks:
        dist.all_reduce(ranks.each(lambda _: torch.rand(2)) + torch.rand(2))
        assert (dist.get_rank(), dist.get_world_size()) == (0, 8)
    assert state() == before
    with pytest.raises(ZeroDivisionError), local_ranks(8):
        raise ZeroDivisionError
    assert state() == before
    with local_ranks(8):
        dist.destroy_process_group()
    assert state() == before
    assert repr(ranks) == "<8 local ranks>"


# Sizes and ranks that are none, a block in a block or in another world, a grid that is too large:
# refused, and nothing has changed.
@needs_torch
def test_bad_worlds():
    with local_ranks(2):
        pass
    before = state()
    for size in ("8", 8.0, None, True, 0, -1, 4097, 2**70):
        fails(lambda size=size: local_ranks(size).__enter__(), "world_size must be ", LayoutError)
    for rank in ("0", 8, -1, None):
        fails(lambda rank=rank: local_ranks(8, rank).__enter__(), "rank must be ", LayoutError)
    assert state() == before
    sentence = "torch.distributed is initialised already, with 8 ranks; leave or destroy that "
    for world in (fake_world, local_ranks):
        with world(8):
            within = state()
            fails(local_ranks(4).__enter__, sentence, WorldSizeError)
            assert state() == within
    with local_ranks(8):
        within = state()
        fails(
            lambda: HyperCommGrid((3, 3), ("tp", "dp")),
            "Grid shape [3, 3] is over sized",
            WorldSizeError,
        )
        with HyperCommGrid((2, 4), ("tp", "dp")) as grid:
            fails(lambda: grid.get_pg("tp"), "Process group for 'tp' hasn't", GroupMissingError)
        assert state() == within
    with dist._local_tensor.LocalTensorMode(4):
        fails(local_ranks(4).__enter__, "torch's LocalTensorMode is entered already; leave it")
        assert not dist.is_initialized()
    assert state() == before


# A torch that has no such mode, or another one than is known, is named, with what to do.
def test_a_torch_without(monkeypatch):
    monkeypatch.setattr(dist, "_local_tensor", types.SimpleNamespace(), raising=False)
    why = "has no LocalTensor, LocalTensorMode, local_tensor_mode"
    sentence = (
        f"torch {torch.__version__} has no local ranks: torch.distributed._local_tensor "
        f"{why if HAS_LOCAL_RANKS else 'is there from torch 2.10 on'}; use "
        f"hypercomm.testing.run_ranks, whose ranks are processes, or another release of torch"
    )
    fails(local_ranks(8).__enter__, f"{sentence}", CreationError)
    assert not dist.is_initialized()


# Collectives that would not be right are refused, and change no number.
@needs_torch
def test_refused_collectives():
    outer = torch.ones(2)
    with local_ranks(8) as ranks, HyperCommGrid((2, 4), ("tp", "dp")) as grid:
        dp = grid.create_pg("dp")
        tensor = ranks.each(lambda rank: torch.arange(4.0) + rank)
        before = {rank: shard.clone() for rank, shard in ranks.shards(tensor).items()}
        common = "is given a tensor that all ranks have in common, of shape "
        fails(
            lambda: dist.all_reduce(outer, group=dp),
            f"c10d.allreduce_.default {common}(2,): it was made outside of the local_ranks() "
            f"block, or within each(), or holds objects; make tensors in the block, or with each()",
        )
        fails(
            lambda: functional.all_reduce(outer, "sum", dp),
            f"_c10d_functional.all_reduce.default {common}",
        )
        for call in (
            lambda: dist.all_gather_object([None] * 4, "object", group=dp),
            lambda: dist.broadcast_object_list(["object"], group=dp),
            lambda: ranks.each(lambda _: dist.all_reduce(torch.ones(1), group=dp)),
        ):
            with pytest.raises(SimulationError, match=re.escape(common)):
                call()
        alone = "does not work on local ranks: not all ranks do the same in it; use a collective "
        for name, call in {
            "gather_": lambda: dist.gather(tensor, [tensor.clone()] * 4, group=dp),
            "send": lambda: dist.send(tensor, 2, group=dp),
            "recv_": lambda: dist.recv(tensor, 2, group=dp),
        }.items():
            fails(call, f"c10d.{name}.default {alone}")
        fails(
            lambda: dist.all_to_all_single(
                torch.zeros(4), tensor, [1, 2, 1, 0], [1, 2, 1, 0], group=dp
            ),
            "all_to_all_single with split sizes [1, 2, 1, 0] does not work on local ranks, where "
            "all ranks give the same sizes; give equal ones, or none",
        )
        for rank, shard in ranks.shards(tensor).items():
            assert torch.equal(shard, before[rank])


# What is no function of a rank, or makes no tensors that belong together, is refused, as is a
# tensor without shards.
@needs_torch
def test_bad_shards():
    outer = torch.ones(2)
    with local_ranks(2) as ranks:
        for value in (None, 7, torch.ones(1)):
            fails(lambda value=value: ranks.each(value), "function must be callable, ", LaunchError)
        none = (
            "function must return a plain torch.Tensor for each rank, or one of local ranks, got "
        )
        fails(lambda: ranks.each(int), f"{none}0 for rank 0")
        fails(lambda: ranks.each([torch.ones(1), None].__getitem__), none)
        fails(lambda: ranks.each({0: outer}.get), f"{none}None for rank 1")
        unlike = "function must return tensors of one dtype, device and number of axes, got "
        cpu = "torch.float32 on cpu with 1 axes for rank 0 and"
        for other, words in {
            (1.0, torch.float64): f"{cpu} torch.float64 on cpu with 1 axes for rank 1",
            ((1.0,), torch.float32): f"{cpu} torch.float32 on cpu with 2 axes for rank 1",
        }.items():
            with pytest.raises(SimulationError, match=f"^{re.escape(unlike + words)}$"):
                ranks.each(
                    lambda rank, other=other: (
                        torch.tensor([other[0]], dtype=other[1]) if rank else torch.ones(1)
                    )
                )
        for value in (None, 7, outer):
            fails(lambda value=value: ranks.shards(value), "tensor must have a shard for each ")
        assert ranks.shards(ranks.each(torch.arange(2).__getitem__))[1].item() == 1
        weight = ranks.each(lambda rank: torch.ones(rank + 1, requires_grad=True) * 2)
        assert [tuple(shard.shape) for shard in ranks.shards(weight).values()] == [(1,), (2,)]


# A tensor that ranks have in common is copied: each rank's numbers are its own.
@needs_torch
def test_shards_are_copies():
    base = torch.ones(1)
    with local_ranks(4) as ranks, HyperCommGrid("tp=2,dp=2") as grid:
        tensor = ranks.each(lambda _: base)
        dist.all_reduce(tensor, group=grid.create_pg("dp"))
        assert [shard.item() for shard in ranks.shards(tensor).values()] == [2] * 4
    assert base.item() == 1


# The page's program runs, and its assertion holds.
@needs_torch
def test_program_of_the_page():
    found = re.findall(r"```python\n([^`]*?local_ranks\([^`]*)```", PAGE.read_text())
    assert len(found) == 1
    exec(compile(found[0], PAGE.name, "exec"), {})
