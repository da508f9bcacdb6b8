"""What real ranks run in the tests of device meshes."""

import torch
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
