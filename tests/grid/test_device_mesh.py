"""Test that grids and DeviceMeshes convert to each other, with numpy's ranks and no new groups."""

import math
import re
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from drawn_layouts import layouts_with_tables, table_of
from group_checks import sum_over, tables as registered
from hypothesis import given, strategies as st
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from hypercomm import GridSet, HyperCommGrid, RankLayout
from hypercomm.errors import LayoutError
from hypercomm.process_groups.torch_internals import part_of_mesh
from hypercomm.testing import fake_world

NAMES = ("tp", "cp", "dp", "pp")


@st.composite
def grids(draw):
    """Draw the shape, the offset and a rank of a grid."""
    shape = draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    offset = draw(st.integers(0, 3))
    return shape, offset, offset + draw(st.integers(0, math.prod(shape) - 1))


@st.composite
def meshes(draw):
    """Draw a grid, and some of its dims in any order. A mesh dim may join several of these dims."""
    shape, offset, rank = draw(grids())
    indices = draw(st.permutations(range(len(shape))))
    indices = indices[: draw(st.integers(1, len(shape)))]
    spans = []
    while indices:
        size = draw(st.integers(1, len(indices)))
        spans.append(sorted(indices[:size], reverse=True))
        indices = indices[size:]
    return shape, offset, rank, spans


# The ranks of the grid are an array with the last dim first. A mesh is a transposed part of this
# array.
def expected_mesh(shape, offset, rank, spans):
    everyone = offset + np.arange(math.prod(shape)).reshape(shape[::-1])
    place = dict(zip(range(len(shape))[::-1], np.argwhere(everyone == rank)[0], strict=True))
    flat = [dim for span in spans for dim in span]
    part = everyone.transpose(
        *(len(shape) - 1 - dim for dim in flat),
        *(len(shape) - 1 - dim for dim in range(len(shape)) if dim not in flat),
    )
    here = tuple(place[dim] for dim in range(len(shape)) if dim not in flat)
    part = part[(..., *here)]
    return part.reshape([math.prod(shape[dim] for dim in span) for span in spans])


@given(meshes())
def test_mesh_matches_numpy(case):
    shape, offset, rank, spans = case
    named = [tuple(NAMES[dim] for dim in span) for span in spans]
    with (
        fake_world(offset + math.prod(shape), rank),
        HyperCommGrid(shape, NAMES[: len(shape)], offset) as grid,
    ):
        groups = [grid.create_pg(names) for names in named]
        before = registered()
        given = named if len(named) > 1 else ["+".join(named[0])]  # one list might be the dims
        mesh = grid.device_mesh(*given)
        wanted = expected_mesh(shape, offset, rank, spans)
        np.testing.assert_array_equal(mesh.mesh.numpy(), wanted)
        assert mesh.mesh_dim_names == tuple("_".join(names) for names in named)
        place = np.argwhere(wanted == rank)[0]
        assert mesh.get_coordinate() == list(place) or tuple(mesh.get_coordinate()) == tuple(place)
        for axis, (name, group) in enumerate(zip(mesh.mesh_dim_names, groups, strict=True)):
            line = wanted[tuple(slice(None) if at == axis else i for at, i in enumerate(place))]
            assert mesh.get_group(name) is group
            assert dist.get_process_group_ranks(mesh.get_group(name)) == line.tolist()
            assert mesh.get_local_rank(name) == dist.get_rank(group) == place[axis]
            assert mesh[name].get_group() is group
            if mesh.ndim > 1:  # a slice of a mesh of one dim is the mesh itself
                assert part_of_mesh(mesh, [name], name, group) == mesh[name]
        assert registered() == before


# from_device_mesh() of a mesh with all dims returns an equal grid with the same groups. This grid
# does not own the groups.
@given(grids(), st.data())
def test_mesh_to_grid_round_trip(case, data):
    shape, offset, rank = case
    names = NAMES[: len(shape)]
    with (
        fake_world(offset + math.prod(shape) + 1, rank),
        HyperCommGrid(shape, names, offset) as grid,
    ):
        for name in names:
            grid.create_pg(name)
        before = registered()
        order = data.draw(
            st.permutations([name for name in names if grid.layout.size_of(name) > 1])
        )
        rest = [name for name in reversed(names) if grid.layout.size_of(name) == 1]
        adopted = HyperCommGrid.from_device_mesh(grid.device_mesh(*rest, *order))
        assert registered() == before
        for name in names:
            assert adopted.get_pg(name) is grid.get_pg(name)
            assert adopted.ensure_pg(name) is grid.get_pg(name)
            assert adopted.group_ranks(name) == grid.group_ranks(name)
        assert set(adopted.layout.ranks) == set(grid.layout.ranks)
        assert HyperCommGrid.from_device_mesh(grid.device_mesh()).layout == grid.layout
        adopted.destroy()
        assert registered() == before


# Meshes made by torch become grids with their groups, including WORLD. The meshes may leave out
# ranks, and their strides may interleave. Such a grid owns only the groups that it creates later.
@given(layouts_with_tables(kinds=("dense", "gaps"), max_ranks=24), st.data())
def test_grid_from_torch_mesh(case, data):
    layout, table = case
    rank = data.draw(st.integers(0, layout.last_rank))
    names = layout.dim_names
    with fake_world(layout.last_rank + 1, rank):
        mesh = DeviceMesh("cpu", torch.from_numpy(table.T.copy()), mesh_dim_names=names[::-1])
        before = registered()
        with HyperCommGrid.from_device_mesh(mesh) as grid:
            assert registered() == before
            assert np.array_equal(table_of(grid.layout), table)
            assert grid.dim_names == [*names]
            for name in names if rank in table else ():
                group = mesh.get_group(name)
                assert grid.get_pg(name) is group
                assert list(grid.group_ranks(name)) == dist.get_process_group_ranks(group)
            own = grid.create_pg(names, name="own")
            assert (own is None) == (rank not in table)
            assert (registered() == before) == (own is None)
        assert registered() == before
        assert dist.is_initialized()


# device_mesh() creates missing groups, even for flattened dims.
def test_missing_groups_are_created():
    with fake_world(8, rank=5), HyperCommGrid([2, 2, 2], ["tp", "cp", "dp"]) as grid:
        tp = grid.create_pg("tp")
        mesh = grid.device_mesh(("dp"), "cp", "tp", flatten={"dp_cp": ["dp", "cp"]})
        assert mesh.get_group("tp") is tp
        assert mesh.get_group("dp") is grid.get_pg("dp")
        assert dist.get_process_group_ranks(grid.get_pg("dp", "cp")) == [1, 3, 5, 7]


# torch sorts the ranks of a group, so in a permuted mesh the order of a group differs from the mesh
# row. Such a mesh is rejected on every rank, including ranks whose rows are sorted.
@pytest.mark.parametrize(
    "ranks", [[[1, 0], [3, 2]], [[2, 3], [0, 1]], [[0, 1], [3, 2]], [[0, 2], [3, 1]]], ids=str
)
@pytest.mark.parametrize("rank", range(4))
def test_permuted_mesh_is_rejected(ranks, rank):
    with fake_world(4, rank):
        mesh = DeviceMesh("cpu", torch.tensor(ranks), mesh_dim_names=("dp", "tp"))
        before = registered()
        with pytest.raises(ValueError, match=re.escape(f"permuted: {ranks}")):
            HyperCommGrid.from_device_mesh(mesh)
        assert registered() == before


# ---- real ranks ---------------------------------------------------------------------------------


# DTensor caches meshes with equal ranks and names. Destroying a grid removes its meshes from the
# cache, so that tensor parallel layers work on one grid after another of the same shape.
@pytest.mark.full
@pytest.mark.ranks(4)
def test_equal_grids_one_after_another():
    for _ in range(3):
        with HyperCommGrid([2, 2], ["tp", "dp"]) as grid:
            grid.create_pgs(["tp", "dp"])
            mesh = grid.device_mesh("dp", "tp")
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
            x = torch.randn(4, 16)
            whole = model(x).square().mean().item()
            parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
            loss = model(x).square().mean()
            loss.backward()
            assert loss.item() == pytest.approx(whole, abs=1e-5)
            tensor = torch.relu(distribute_tensor(x, mesh, [Shard(0), Shard(1)]))
            assert tensor.device_mesh.get_group("tp") is grid.get_pg("tp")
            torch.testing.assert_close(tensor.full_tensor(), torch.relu(x))


# DTensor's cache confuses equal meshes of two grids: results on the second mesh use the groups of
# the first mesh. The first part of the test shows this with plain torch meshes. device_mesh()
# raises instead. Each fix that the error suggests works.
def test_equal_meshes_with_different_groups_raise():
    with fake_world(2):
        first, third = GridSet({"first": "tp=2", "third": "tp=2"}, share="identical").values()
        second = HyperCommGrid("tp=2", name="second")
        plain = [
            DeviceMesh.from_group(grid.create_pg("tp"), "cpu", mesh_dim_names=("tp",))
            for grid in (first, second)
        ]
        results = [torch.relu(distribute_tensor(torch.ones(4), mesh, [Shard(0)])) for mesh in plain]
        assert results[1].device_mesh.get_group() is first.get_pg("tp")

        mesh = first.device_mesh()
        assert first.device_mesh() == mesh
        with pytest.raises(LayoutError, match="in one grid or GridSet"):
            second.device_mesh()
        with third:
            assert third.device_mesh().get_group() is first.get_pg("tp")
        with HyperCommGrid("model=2") as other:
            assert other.device_mesh().get_group() is other.get_pg("model")
        first.destroy()
        with second:
            result = torch.relu(distribute_tensor(torch.ones(4), second.device_mesh(), [Shard(0)]))
            assert result.device_mesh.get_group() is second.get_pg("tp")


# device_mesh() also raises if a slice or a flattened dim equals a mesh of another grid, unless both
# meshes have the same groups. Meshes of an earlier world are ignored.
def test_equal_parts_of_meshes_raise():
    kept = []
    for _ in range(2):
        with fake_world(8):
            first, second = HyperCommGrid("tp=2,dp=4"), HyperCommGrid("tp=2,pp=4")
            kept.append(first.device_mesh())
            with pytest.raises(LayoutError, match="'tp'"):
                second.device_mesh()
            assert second.device_mesh("pp").get_group() is second.get_pg("pp")
    with fake_world(8), HyperCommGrid("tp=2,cp=2,dp=2") as grid:
        grid.register_view("expert", [4, 2], ["tp", "edp"])
        grid.register_view("same", [2, 4], ["tp", "edp"], shared_dims=["tp"])
        kept.append(grid.device_mesh(flatten={"both": ["dp", "cp"]}))
        kept.append(grid.view("expert").device_mesh("edp", "tp"))
        assert grid.view("same").device_mesh("edp", "tp")["tp"].get_group() is grid.get_pg("tp")
        with HyperCommGrid("tp=2,both=4") as other, pytest.raises(LayoutError, match="equal dim"):
            other.device_mesh("both", "tp")


# DTensors are sharded and redistributed with the groups of the grid only. The mesh has an offset or
# a list of ranks. With a list, shards follow the positions in the list. from_device_mesh() finds
# the same ranks on every rank.
@pytest.mark.parametrize(
    "order", [pytest.param(range(1, 5), marks=pytest.mark.full), [2, 0, 3, 1]], ids=str
)
@pytest.mark.ranks(5)
def test_dtensor_on_real_ranks(order):
    layout = RankLayout([2, 2], ["tp", "dp"], ranks=order)
    right = np.arange(24.0).reshape(4, 6)
    with HyperCommGrid(layout, cover="any") as grid:
        grid.create_pgs(["tp", "dp"])
        if dist.get_rank() not in order:
            return
        before = registered()[0]
        dp, tp = divmod([*order].index(dist.get_rank()), 2)
        mesh = grid.device_mesh("dp", "tp")
        is_first = dist.get_rank() == order[0]  # a mesh takes tensors from its first rank
        whole = torch.tensor(right if is_first else 0 * right)
        tensor = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
        swapped = tensor.redistribute(mesh, [Replicate(), Shard(0)])
        own = right[dp * 2 : dp * 2 + 2, tp * 3 : tp * 3 + 3]
        np.testing.assert_array_equal(tensor.to_local(), own)
        np.testing.assert_array_equal(swapped.to_local(), right[tp * 2 : tp * 2 + 2])
        np.testing.assert_array_equal(tensor.full_tensor(), right)
        assert registered()[0] == before
        assert HyperCommGrid.from_device_mesh(mesh).layout == layout


# Flattened dims use existing groups. FSDP2 finds these groups by name. Without them, torch would
# create new groups.
@pytest.mark.full
@pytest.mark.ranks(8)
def test_fsdp_uses_flattened_dims():
    from torch.distributed.fsdp import fully_shard

    warnings.simplefilter("ignore", UserWarning)  # torch deprecates names of flattened dims
    dims = ["cp", "dp_shard", "dp_replicate"]
    ranks = np.arange(8).reshape(2, 2, 2)
    replicate, shard, cp = np.argwhere(ranks == dist.get_rank())[0]
    with HyperCommGrid([2, 2, 2], dims) as grid:
        grid.create_pgs([*dims, "cp+dp_shard", "dp_shard+dp_replicate"])
        before = registered()[0]
        flat = {"dp": ["dp_replicate", "dp_shard"], "dp_shard_cp": ["dp_shard", "cp"]}
        mesh = grid.device_mesh(flatten=flat)
        for name, members, at in (
            ("dp", ranks[:, :, cp].ravel(), replicate * 2 + shard),
            ("dp_shard_cp", ranks[replicate].ravel(), shard * 2 + cp),
        ):
            group = mesh[name].get_group()
            assert sum_over(group) == sum(10 ** int(member) for member in members)
            assert (mesh[name].size(), mesh[name].get_local_rank()) == (4, at)
            assert mesh[tuple(flat[name])]._flatten(name).get_group() is group
        layer = fully_shard(nn.Linear(8, 8), mesh=mesh["dp_shard_cp"])
        layer(torch.ones(1, 8)).sum().backward()
        assert layer.weight.to_local().shape[0] == 2
        assert registered()[0] == before


# The device type of a mesh is the given type, or by default the type of the backend.
def test_device_type_of_a_mesh():
    with fake_world(4), HyperCommGrid([2, 2], ["tp", "dp"]) as grid:
        grid.create_pg("tp")
        assert grid.device_mesh("tp").device_type == "cpu"
        meta = grid.device_mesh("tp", device_type="meta")
        assert meta.device_type == "meta"
