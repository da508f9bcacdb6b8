"""Test torchtitan's grid and meshes against numpy, and against torchtitan if it is installed."""

import sys

import numpy as np
import pytest
import torch
import torch.distributed as dist

from hypercomm import HyperCommGrid, torchtitan_grids
from hypercomm.compat.torchtitan import torchtitan_meshes
from hypercomm.testing import fake_world, registered_groups

SIZES = [
    {"dp_replicate": 2, "dp_shard": 2, "cp": 2, "tp": 2, "pp": 2, "ep": 4},
    {"dp_shard": 4, "tp": 2, "pp": 4, "ep": 8},
    {"dp_replicate": 8, "cp": 4},
    {"dp_shard": -1, "ep": 2},
]
WORLD = 32


EVERY = {"dp_replicate": 1, "dp_shard": -1, "cp": 1, "tp": 1, "pp": 1, "ep": 1}
BACKENDS = ["partial_dtensor", "spmd_types"]


def expected(rank, backend, *, dp_replicate, dp_shard, cp, tp, pp, ep):
    """Return torchtitan's meshes by name. A mesh of one stage or of one group contains `rank`."""
    dp_shard = WORLD // (dp_replicate * cp * tp * pp) if dp_shard == -1 else dp_shard
    inner = dp_shard * cp * tp
    ranks = np.arange(WORLD)
    dataloading = ranks.reshape(pp, dp_replicate * dp_shard, cp, tp)
    stage, *_, at = np.argwhere(dataloading == rank)[0]
    meshes = {
        "dataloading": dataloading,
        "dense": ranks.reshape(pp, dp_replicate, dp_shard * cp, tp),
        "sparse": ranks.reshape(pp, dp_replicate, inner // ep, ep),
        "loss": dataloading[stage, :, :, at].ravel(),
    }
    if backend == "spmd_types":  # parameters use all dims, types are checked on (dp, cp, tp)
        meshes["dense"] = ranks.reshape(pp, dp_replicate, dp_shard, cp, tp)
        meshes["spmd_dense_for_fwdbwd"] = dataloading[stage]
        if ep > 1:
            meshes["spmd_sparse_for_fwdbwd"] = meshes["sparse"][stage]
    return meshes


# Each mesh has torchtitan's ranks. Dims with the same name in several meshes have one group.
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
@pytest.mark.parametrize("rank", [0, 13, 31])
def test_meshes_match_torchtitan(sizes, rank, backend):
    with fake_world(WORLD, rank), torchtitan_grids(**sizes) as grids:
        meshes = torchtitan_meshes(grids, backend)
        wanted = expected(rank, backend, **EVERY | sizes)
        assert meshes.keys() == wanted.keys()
        for name, mesh in meshes.items():
            np.testing.assert_array_equal(mesh.mesh.numpy(), wanted[name], err_msg=name)
        dense, data = meshes["dense"], meshes["dataloading"]
        assert data.get_group("tp") is dense.get_group("tp")
        assert data.get_group("pp") is dense.get_group("pp")
        assert dense.get_group("dp_replicate") is meshes["sparse"].get_group("dp_replicate")
        if backend == "spmd_types":
            types = meshes["spmd_dense_for_fwdbwd"]
            assert types.mesh_dim_names == ("dp", "cp", "tp")
            assert types.get_group("dp") is data.get_group("batch")
            assert types.get_group("tp") is data.get_group("tp")
        # tp, cp, pp, dp_replicate, batch, ep, efsdp, loss, and fsdp or dp_shard
        assert len(registered_groups() - {dist.group.WORLD}) == 9
    assert not dist.is_initialized()


# spmd_types checks types on the groups of a grid, given as a list or by name, and on its meshes.
@pytest.mark.clients
@pytest.mark.parametrize("way", ["groups", "names", "mesh"])
def test_spmd_types_on_a_grid(way):
    checker = pytest.importorskip("spmd_types.checker", reason="pip install --no-deps spmd_types")
    spmd = sys.modules["spmd_types"]
    with fake_world(8, 5), HyperCommGrid([2, 4], ["tp", "dp"]) as grid:
        tp, dp = grid.create_pgs(["tp", "dp"])
        axes = {
            "groups": [tp, dp],
            "names": {"tp": spmd.MeshAxis.of(tp), "dp": spmd.MeshAxis.of(dp)},
            "mesh": grid.device_mesh("dp", "tp"),
        }[way]
        with spmd.set_current_mesh(axes), checker.typecheck():
            tensor = torch.ones(4)
            spmd.assert_type(tensor, {tp: spmd.R, dp: spmd.R})
            with pytest.raises(spmd.SpmdTypeError, match="axis tp"):
                spmd.assert_type(tensor, {tp: spmd.V, dp: spmd.R})


# torchtitan's code makes meshes with the same ranks and names, but creates more groups.
@pytest.mark.clients
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_meshes_match_torchtitans_code(sizes, backend):
    named = "pip install tyro && pip install --no-deps torchtitan spmd_types"
    dims = pytest.importorskip("torchtitan.distributed.parallel_dims", reason=named)
    with fake_world(WORLD, 13), torchtitan_grids(**sizes) as grids:
        meshes = torchtitan_meshes(grids, backend)
        ours = len(registered_groups())
        theirs = dims.ParallelDims(**EVERY | sizes, world_size=WORLD, spmd_backend=backend)
        theirs.build_mesh()
        assert len(registered_groups()) - ours > ours - 1  # both counts include WORLD
        assert theirs._global_meshes.keys() == meshes.keys()
        for name, mesh in theirs._global_meshes.items():
            assert mesh.mesh.tolist() == meshes[name].mesh.tolist()
            if name != "loss":
                assert mesh.mesh_dim_names == meshes[name].mesh_dim_names
