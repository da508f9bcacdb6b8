"""What real ranks run in the tests of device meshes."""

import warnings

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from hypercomm import HyperCommGrid
from ranks.common import tables as registered


def redistribute_on_a_grid():
    """Ranks 1..8 as dp=4 and tp=2: the local parts of a tensor, and the groups that it took."""
    with HyperCommGrid([2, 2, 2], ["tp", "cp", "dp"], rank_offset=1) as grid:
        grid.create_pg("tp")
        grid.create_pg(["cp", "dp"])
        if not grid.is_current_rank_in_grid():
            return [], [], 0
        before = registered()[0]
        mesh = grid.device_mesh(("dp", "cp"), "tp")
        whole = torch.arange(48.0).reshape(8, 6)
        tensor = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
        sharded = tensor.to_local().tolist()
        swapped = tensor.redistribute(mesh, [Replicate(), Shard(0)]).to_local().tolist()
        return sharded, swapped, len(registered()[0] - before)


def grids_one_after_another():
    """DTensors on one grid after another of the same shape, each with tensor parallel layers."""
    found = []
    for _ in range(3):
        with HyperCommGrid([2, 2], ["tp", "dp"]) as grid:
            grid.create_pg("tp")
            grid.create_pg("dp")
            mesh = grid.device_mesh("dp", "tp")
            torch.manual_seed(0)
            model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))
            x = torch.randn(4, 16)
            whole = model(x).square().mean().item()
            parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
            loss = model(x).square().mean()
            loss.backward()
            tensor = torch.relu(distribute_tensor(x, mesh, [Shard(0), Shard(1)]))
            assert tensor.device_mesh.get_group("tp") is grid.get_pg("tp")
            summed = tensor.full_tensor().sum().item()
            found.append((loss.item() - whole, summed - torch.relu(x).sum().item()))
    return found


def flattened_on_a_grid():
    """On 8 ranks: sums over a mesh's flattened dims, and what torch then creates beyond."""
    dims = ["cp", "dp_shard", "dp_replicate"]
    with HyperCommGrid([2, 2, 2], dims) as grid:
        grid.create_pgs([*dims, "cp+dp_shard", "dp_shard+dp_replicate"])
        before = registered()[0]
        mesh = grid.device_mesh(
            flatten={"dp": ["dp_replicate", "dp_shard"], "dp_shard_cp": ["dp_shard", "cp"]}
        )
        sums = []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch: names of flattened dims will go
            for name, parts in {"dp": dims[:0:-1], "dp_shard_cp": dims[1::-1]}.items():
                total = torch.tensor([dist.get_rank()])
                dist.all_reduce(total, group=mesh[name].get_group())
                same = mesh[tuple(parts)]._flatten(name).get_group() is mesh.get_group(name)
                sums.append((total.item(), mesh[name].size(), mesh[name].get_local_rank(), same))
        return sums, len(registered()[0] - before)


def accelerate_on_a_grid():
    """On 8 ranks: what accelerate takes for its mesh, beside the mesh that it makes itself."""
    from accelerate import ParallelismConfig
    from accelerate.utils import TorchContextParallelConfig

    dims = ["cp", "dp_shard", "dp_replicate"]
    sizes = {"dp_replicate_size": 2, "dp_shard_size": 2, "cp_size": 2}  # tp needs transformers
    config = {**sizes, "cp_handler": TorchContextParallelConfig()}
    with HyperCommGrid([2, 2, 2], dims) as grid, warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        theirs = ParallelismConfig(**config).get_device_mesh("cpu")
        grid.create_pgs([*dims, "cp+dp_shard", "dp_shard+dp_replicate", "cp+dp_shard+dp_replicate"])
        before = registered()[0]
        given = ParallelismConfig(**config)
        given.device_mesh = grid.device_mesh(
            flatten={
                "dp": ["dp_replicate", "dp_shard"],
                "dp_shard_cp": ["dp_shard", "cp"],
                "dp_cp": ["dp_replicate", "dp_shard", "cp"],
            }
        )
        ours = given.get_device_mesh("cpu")
        found = []
        for name in ("cp", "dp_shard", "dp_replicate", "dp", "dp_shard_cp", "dp_cp"):
            total = torch.tensor([1 << dist.get_rank()])
            dist.all_reduce(total, group=ours[name].get_group())
            alike = ours[name].mesh.tolist() == theirs[name].mesh.tolist()
            found.append((name, total.item(), alike))
        fsdp = fully_shard_sizes(ours)
        return found, fsdp, len(registered()[0] - before)


def fully_shard_sizes(mesh):
    """Shard a layer over accelerate's FSDP dims; the length of a rank's part of the weight."""
    from torch.distributed.fsdp import fully_shard

    layer = fully_shard(nn.Linear(8, 8), mesh=mesh["dp_shard_cp"])
    layer(torch.ones(1, 8)).sum().backward()
    return layer.weight.to_local().shape[0]
