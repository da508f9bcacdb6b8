"""A checkpoint saved on one grid and loaded on a grid of another shape.

    python examples/checkpoint_on_another_shape.py

Saves a sharded model on tp=2, dp=4, loads it on tp=4, dp=2, and compares every weight.
"""

import functools
import tempfile

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from hypercomm import HyperCommGrid, run_ranks
from hypercomm.testing import registered_groups


def model_of(seed: int) -> nn.Sequential:
    """Make the unsharded model."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 16))


def sharded(seed: int, grid: HyperCommGrid) -> nn.Sequential:
    """Make the model, split over tp and sharded over dp."""
    mesh = grid.device_mesh("dp", "tp")
    model = model_of(seed)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    return model


def save_and_load(folder: str) -> tuple[float, int]:
    """Save on one grid. Load on another grid, into a model with other weights."""
    before = registered_groups()
    with HyperCommGrid([2, 4], ["tp", "dp"]) as grid:
        grid.create_pg("tp")
        grid.create_pg("dp")
        dcp.save({"model": sharded(0, grid).state_dict()}, checkpoint_id=folder)
    with HyperCommGrid([4, 2], ["tp", "dp"]) as grid:
        grid.create_pg("tp")
        grid.create_pg("dp")
        model = sharded(1, grid)
        state = {"model": model.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        model.load_state_dict(state["model"])
        wanted = model_of(0).state_dict()
        difference = 0.0
        for name, weight in model.state_dict().items():
            assert isinstance(weight, DTensor)
            # Gather over dp, then over tp. torch warns if one call gathers over both.
            over_tp = weight.redistribute(placements=[Replicate(), weight.placements[1]])
            whole = over_tp.full_tensor()
            difference = max(difference, (whole - wanted[name]).abs().max().item())
    return difference, len(registered_groups() - before)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        differences, added = zip(
            *run_ranks(functools.partial(save_and_load, folder), 8), strict=True
        )
    print(f"largest difference: {max(differences):.1e}")
    print(f"process groups left: {max(added)}")
