"""DistributedDataParallel over the dp groups of a grid with tensor parallel ranks.

    python examples/data_parallel.py

Trains on 4 local ranks, and compares with one process. The ranks of a dp group
have the same model.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hypercomm import HyperCommGrid, run_ranks
from hypercomm.testing import registered_groups


def model_of(tp: int) -> nn.Module:
    """Make the model of a tensor parallel rank. Each rank has different weights."""
    torch.manual_seed(tp)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))


def train(model: nn.Module, inputs: Tensor) -> list[Tensor]:
    """Train for some steps. Return the loss before each step."""
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses: list[Tensor] = []
    for x in inputs:
        loss = (model(x) - x.sum(dim=1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def data() -> Tensor:
    """Return a batch for each step, equal on every rank."""
    return torch.randn(5, 8, 8, generator=torch.Generator().manual_seed(1))


def on_a_grid() -> tuple[float, int]:
    """Train on the grid tp=2, dp=2. Return the difference from one process."""
    with HyperCommGrid([2, 2], ["tp", "dp"]) as grid:
        dp = grid.create_pg("dp")
        before = registered_groups()
        place = grid.coords()
        model = DistributedDataParallel(model_of(place["tp"]), process_group=dp)
        losses = train(model, data().chunk(2, dim=1)[place["dp"]])
        for loss in losses:
            dist.all_reduce(loss, group=dp)
        wanted = train(model_of(place["tp"]), data())
        difference = max(
            abs(loss.item() / 2 - alone.item()) for loss, alone in zip(losses, wanted, strict=True)
        )
        return difference, len(registered_groups() - before)


if __name__ == "__main__":
    differences, added = zip(*run_ranks(on_a_grid, 4), strict=True)
    print(f"largest difference: {max(differences):.1e}")
    print(f"process groups added: {max(added)}")
