"""FSDP2 over dp and tensor parallelism over tp, on the process groups of a grid.

    python examples/fsdp_and_tensor_parallel.py

Trains a transformer block on 4 local ranks, and the same block on one rank, and compares the
losses.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)
from torch.nn.functional import gelu, scaled_dot_product_attention

from hypercomm import HyperCommGrid, run_ranks
from hypercomm.testing import registered_groups

WIDTH, HEADS, BATCH, LENGTH, STEPS = 32, 4, 4, 8, 5


class Block(nn.Module):
    """Attention and a feed-forward layer, each after a norm."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        # With tensor parallelism, each rank has some of the heads; -1 infers their number.
        q, k, v = (
            layer(y).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for layer in (self.q, self.k, self.v)
        )
        attended = scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.norm2(x))))


def train(model: nn.Module, inputs: Tensor) -> list[Tensor]:
    """Train for some steps. Return the loss before each step."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses: list[Tensor] = []
    for x in inputs:
        loss = (model(x) - x.roll(1, dims=1)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


def data() -> Tensor:
    """Return a batch for each step, equal on every rank."""
    return torch.randn(STEPS, BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(1))


def alone() -> list[float]:
    """Train the unsharded model on full batches."""
    torch.manual_seed(0)
    return [loss.item() for loss in train(Block(), data())]


def on_a_grid() -> tuple[list[float], int]:
    """Train on the grid tp=2, dp=2. Return the losses, and how many process groups torch added."""
    torch.manual_seed(0)
    model = Block()
    with HyperCommGrid([2, 2], ["tp", "dp"]) as grid:
        grid.create_pg("tp")
        dp = grid.create_pg("dp")
        before = len(registered_groups())
        mesh = grid.device_mesh("dp", "tp")
        columns = dict.fromkeys(("q", "k", "v", "up"), ColwiseParallel())
        rows = dict.fromkeys(("out", "down"), RowwiseParallel())
        parallelize_module(model, mesh["tp"], {**columns, **rows})
        fully_shard(model, mesh=mesh["dp"])
        losses = train(model, data().chunk(2, dim=1)[mesh.get_local_rank("dp")])
        for loss in losses:
            dist.all_reduce(loss, group=dp)
        return [loss.item() / 2 for loss in losses], len(registered_groups()) - before


if __name__ == "__main__":
    wanted, ranks = alone(), run_ranks(on_a_grid, 4)
    difference = max(abs(a - b) for losses, _ in ranks for a, b in zip(losses, wanted, strict=True))
    print(f"losses: {' '.join(f'{loss:.4f}' for loss in wanted)}")
    print(f"largest difference: {difference:.1e}")
    print(f"process groups added: {max(added for _, added in ranks)}")
