"""Test Mpu on any grid, and ProcessTopology for a layout, against numpy and DeepSpeed."""

import importlib.util
import os
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, strategies as st
from torch import nn

from hypercomm import HyperCommGrid, RankLayout, errors, run_ranks
from hypercomm.compat.deepspeed import Mpu, process_topology, topology_axes
from hypercomm.compat.megatron import parallel_state
from hypercomm.testing import fake_world, registered_groups

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed reads this during its import
HOME = importlib.util.find_spec("deepspeed")
needs_deepspeed = pytest.mark.skipif(
    HOME is None, reason="deepspeed is not installed: the extra `test` installs it on Linux"
)

# For each name in an mpu's getters, the kinds of parallelism whose dims form the group.
PARTS = {
    "tensor_model": ("tp",),
    "slice": ("tp",),
    "pipeline_model": ("pp",),
    "pipe": ("pp",),
    "model": ("tp", "pp"),
    "data": ("dp",),
    "sequence": ("sp",),
    "sequence_data": ("sp", "dp"),
}
FACTS = ("group", "rank", "world_size", "src_rank")


def plain(group):
    return dist.get_process_group_ranks(group)


def line_through(shape, rank, axes):
    """Return the ranks that differ from `rank` only along `axes`, in ascending order."""
    world = np.arange(np.prod(shape)).reshape(shape[::-1])
    place = list(np.unravel_index(rank, world.shape))
    for axis in axes:
        place[len(shape) - 1 - axis] = slice(None)
    return sorted(world[tuple(place)].reshape(-1).tolist())


# ---- Mpu ----------------------------------------------------------------------------------------


@st.composite
def worlds(draw):
    """Draw sizes, a kind of parallelism for each dim, and a rank."""
    shape = draw(st.lists(st.integers(1, 3), min_size=1, max_size=5))
    parts = [draw(st.sampled_from(["tp", "pp", "dp", "sp"])) for _ in shape]
    return shape, parts, draw(st.integers(0, int(np.prod(shape)) - 1))


# For any assignment of dims to kinds of parallelism, the groups, ranks and sizes match lines
# through an array of the world.
@given(worlds())
def test_mpu_matches_numpy(drawn):
    shape, parts, rank = drawn
    names = [f"d{axis}" for axis in range(len(shape))]
    roles = {
        part: [name for name, its in zip(names, parts, strict=True) if its == part]
        for part in ("tp", "pp", "dp", "sp")
    }
    with fake_world(int(np.prod(shape)), rank), HyperCommGrid(shape, names) as grid:
        mpu = Mpu(grid, **roles)
        for name, of in PARTS.items():
            axes = [axis for axis, part in enumerate(parts) if part in of]
            ranks = line_through(shape, rank, axes)
            get = {fact: getattr(mpu, f"get_{name}_parallel_{fact}") for fact in FACTS}
            assert plain(get.pop("group")()) == ranks
            assert {fact: answer() for fact, answer in get.items()} == {
                "rank": ranks.index(rank),
                "world_size": len(ranks),
                "src_rank": ranks[0],
            }
            if name == "data":
                assert mpu.get_data_parallel_group_ranks() == ranks


# An Mpu has every name that DeepSpeed's sources read from an mpu, except two. An mpu with
# initialize_sequence_parallel would declare that there is no model parallelism.
# _init_tp_mesh_device belongs to a DeepSpeed module that can replace an mpu.
@needs_deepspeed
def test_mpu_has_every_name_that_deepspeed_reads():
    sources = Path(HOME.submodule_search_locations[0])
    asked = set()
    by_pipelines = set()
    for source in sources.rglob("*.py"):
        found = re.findall(
            r"\bmpu\.(\w+)\(|(?:has|get)attr\((?:self\.|groups\.)?mpu, ['\"](\w+)['\"]",
            source.read_text(errors="replace"),
        )
        names = {name for pair in found for name in pair if name}
        (by_pipelines if source.parent.name == "pipe" else asked).update(names)
    absent = {"initialize_sequence_parallel", "_init_tp_mesh_device"}
    assert {"get_sequence_data_parallel_group", "get_model_parallel_rank"} <= asked
    assert {name for name in asked | by_pipelines if not hasattr(Mpu, name)} == absent
    slices = {name for name in asked if "slice_parallel" in name or "pipe_parallel" in name}
    missing = {name for name in asked if not hasattr(parallel_state, name)}
    assert missing - slices == absent  # DeepSpeed asks for the newer names first


# A dim that the grid lacks has size 1. Its group consists of the calling rank only. The getter
# returns neither None nor WORLD.
def test_missing_dims_have_size_1():
    with fake_world(8, rank=5), HyperCommGrid([8], ["dp"]) as grid:
        mpu = Mpu(grid, tp=None, sp=["cp", "cp_outer"])
        assert plain(mpu.get_model_parallel_group()) == plain(mpu.get_sequence_parallel_group())
        assert plain(mpu.get_model_parallel_group()) == [5]
        assert mpu.get_sequence_data_parallel_group() is mpu.get_data_parallel_group()


# An Mpu uses existing groups, whatever their options. Other groups are created once per set of
# ranks. A second Mpu creates nothing. All groups are destroyed with the grid.
def test_mpu_uses_groups_of_the_grid():
    with fake_world(16, rank=5):
        before = registered_groups()
        with HyperCommGrid([2, 2, 4, 1], ["tp", "cp", "dp", "pp"]) as grid:
            mine = grid.create_pg("dp", group_desc="mine")
            mpu = Mpu(grid, dp=["dp"], sp="cp")
            assert mpu.grid is grid
            assert mpu.get_data_parallel_group() is mine
            assert mpu.get_model_parallel_group() is mpu.get_tensor_model_parallel_group()
            added = registered_groups() - before
            assert len(added) == 5  # tp, cp, dp, cp+dp, and pp of one rank
            Mpu(grid, dp=["dp"], sp="cp")
            assert registered_groups() - before == added
            assert mpu.model_parallel_is_initialized()
        assert registered_groups() == before
        assert not mpu.model_parallel_is_initialized()
        assert not mpu.sequence_parallel_is_initialized()
        assert not mpu.sequence_data_parallel_is_initialized()
        with pytest.raises(errors.GridDestroyedError):
            mpu.get_data_parallel_group()


# A rank outside the grid can make an Mpu, as it can create groups. Its getters raise, because torch
# would take None for WORLD.
def test_getters_outside_the_grid_raise():
    with fake_world(8, rank=6), HyperCommGrid([2, 2], ["tp", "dp"]) as grid:
        mpu = Mpu(grid)
        with pytest.raises(errors.RankOutsideError, match="rank 6 is not in the grid tp=2,dp=2"):
            mpu.get_model_parallel_group()


# ---- topologies ---------------------------------------------------------------------------------

AXES = {"pp": "pipe", "dp": "data", "tp": "model"}


@st.composite
def numberings(draw):
    """Draw a layout in which each kind of parallelism has one or two neighbouring dims."""
    parts = draw(st.permutations(["tp", "dp", "pp"]))[draw(st.integers(0, 2)) :]
    shape, names = [], []
    roles = dict.fromkeys(AXES)
    for part in parts:
        sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=2))
        roles[part] = [f"{part}{place}" for place in range(len(sizes))]
        shape += sizes
        names += roles[part]
    return RankLayout(shape, names), roles


# A topology numbers ranks like the layout. In an array of ranks with the axes of the topology, the
# lines along each axis are groups of the layout. If DeepSpeed is installed, it agrees.
@given(numberings())
def test_topology_axes_match_numpy(drawn):
    layout, roles = drawn
    axes = topology_axes(layout, **roles)
    assert {"pipe", "data"} <= set(axes) <= {"pipe", "data", "model"}
    assert ("model" in axes) == bool(roles["tp"])
    world = np.arange(layout.size).reshape(tuple(axes.values()))
    for part, dims in roles.items():
        if AXES[part] in axes:
            place = list(axes).index(AXES[part])
            lines = np.moveaxis(world, place, -1).reshape(-1, world.shape[place])
            groups = layout.groups(*dims) if dims else [(rank,) for rank in layout.ranks]
            assert sorted(lines.tolist()) == sorted(map(list, groups))


@pytest.mark.clients
@needs_deepspeed
def test_topology_matches_deepspeed():
    topology = process_topology(RankLayout("tp=2,dp=4,pp=3"))
    assert topology.get_coord(21)._asdict() == {"pipe": 2, "data": 2, "model": 1}
    assert topology.get_axis_comm_lists("pipe")[1] == [1, 9, 17]


# ---- on real ranks ------------------------------------------------------------------------------


STEPS, BATCH, SEQUENCE, HEADS, SIZE = 4, 4, 8, 2, 4


def attention(query, key, value):
    """Compute attention on [batch, sequence, heads, size], as DeepSpeed's layer requires."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    return nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2)


class Model(nn.Module):
    """One layer of attention between two linear layers."""

    def __init__(self, attend):
        super().__init__()
        torch.manual_seed(0)
        width = HEADS * SIZE
        self.first = nn.Linear(width, 3 * width)
        self.last = nn.Linear(width, 1)
        self.attend = attend

    def forward(self, x):
        parts = self.first(x).unflatten(-1, (3, HEADS, SIZE)).unbind(2)
        return self.last(self.attend(*parts).flatten(2))


def batches():
    """Return one batch per step, the same on every rank."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(STEPS, BATCH, SEQUENCE, HEADS * SIZE, generator=generator)


def squares(model, x):
    """Return the sum of squared errors over all positions."""
    return (model(x) - x.sum(dim=-1, keepdim=True)).square().sum()


def alone():
    """Train on full batches in one process, and return the losses."""
    model = Model(attention)
    losses = []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for x in batches():
        loss = squares(model, x) / (BATCH * SEQUENCE)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_on_a_grid():
    """Train with ZeRO-1 on parts of batches and sequences.

    Return the losses and the number of added groups.
    """
    import deepspeed
    from deepspeed.sequence.layer import DistributedAttention

    with HyperCommGrid([2, 2, 2], ["seq", "replica", "shard"]) as grid:
        mpu = Mpu(grid, tp="shard", sp="seq", dp="replica")
        before = registered_groups()
        attend = DistributedAttention(attention, mpu.get_sequence_parallel_group(), 2, 1)
        model = Model(partial(attend, batch_dim_idx=0))
        engine, *_ = deepspeed.initialize(
            model=model,
            optimizer=torch.optim.SGD(model.parameters(), lr=1e-2),
            mpu=mpu,
            config={
                "train_micro_batch_size_per_gpu": BATCH // 2,
                "zero_optimization": {"stage": 1},
                "zero_allow_untested_optimizer": True,
                "gradient_clipping": 0.0,
            },
        )
        losses = []
        for whole in batches():
            x = whole.chunk(2)[mpu.get_data_parallel_rank()]
            x = x.chunk(2, dim=1)[mpu.get_sequence_parallel_rank()]
            loss = squares(engine, x) / (BATCH // 2 * SEQUENCE)  # this rank's share of the loss
            engine.backward(loss)
            engine.step()
            total = loss.detach().clone()
            dist.all_reduce(total, group=mpu.get_sequence_data_parallel_group())
            losses.append(total.item() / 2)
        return losses, len(registered_groups() - before)


# ZeRO-1 over data and sequence parallel ranks, with Ulysses attention, computes the same losses as
# one process.
@pytest.mark.clients
@needs_deepspeed
def test_training_matches_one_process():
    wanted = alone()
    assert len(set(wanted)) == len(wanted)
    for losses, added in run_ranks(train_on_a_grid, 8):
        np.testing.assert_allclose(losses, wanted, rtol=1e-5)
        assert added == 0
