"""Training in three dimensions: FSDP2 over dp, tensor parallelism over tp, a pipeline over pp.

    python examples/three_d_training.py

Trains on 8 local ranks with tp=2, dp=2, pp=2, and on one process, and compares the losses.
"""

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import parallel
from torch.nn.functional import gelu, mse_loss

from hypercomm import HyperCommGrid, run_ranks

WIDTH, LAYERS, BATCH, MICRO_BATCHES, STEPS = 16, 4, 16, 4, 5


class Layer(nn.Module):
    """A feed-forward layer after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(gelu(self.up(self.norm(x))))


def make() -> tuple[nn.Sequential, Tensor]:
    """Make the full model, and a batch for each step, equal on every rank."""
    torch.manual_seed(0)
    return nn.Sequential(*(Layer() for _ in range(LAYERS))), torch.randn(STEPS, BATCH, WIDTH)


def alone() -> list[float]:
    """Train the full model on full batches. Return the losses."""
    model, data = make()
    losses: list[float] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for x in data:
        loss = mse_loss(model(x), x.roll(1, 1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def on_a_grid() -> list[float]:
    """Train a stage on a share of each batch. The last stage returns the losses."""
    with HyperCommGrid("tp=2,dp=2,pp=2") as grid:
        grid.create_pgs(["tp", "dp", "pp"])
        dp, pp, mesh = grid["dp"], grid["pp"], grid.device_mesh("dp", "tp")
        losses: list[float] = []
        whole, data = make()
        model = nn.Sequential(*list(whole)[pp.rank * LAYERS // pp.size :][: LAYERS // pp.size])
        columns, rows = parallel.ColwiseParallel(), parallel.RowwiseParallel()
        for layer in model:
            parallel.parallelize_module(layer, mesh["tp"], {"up": columns, "down": rows})
            fully_shard(layer, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        stage = PipelineStage(model, pp.rank, pp.size, torch.device("cpu"), group=pp.group)
        schedule = Schedule1F1B(stage, MICRO_BATCHES, mse_loss)
        for x in data.chunk(dp.size, dim=1)[dp.rank]:
            parts: list[Tensor] = []
            optimizer.zero_grad()
            schedule.step(*([x] if pp.is_first else []), target=x.roll(1, 1), losses=parts)
            optimizer.step()
            if pp.is_last:
                losses.append(dp.mean(torch.stack(parts).mean().detach()).item())
        return losses


if __name__ == "__main__":
    wanted, losses = alone(), run_ranks(on_a_grid, 8)[-1]
    print(f"losses: {' '.join(f'{loss:.4f}' for loss in wanted)}")
    print(f"largest difference: {max(abs(a - b) for a, b in zip(losses, wanted, strict=True)):.1e}")
