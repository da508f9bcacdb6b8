"""A program for Megatron's parallel_state, with one import changed. It needs no megatron-core.

    python examples/ported_megatron.py

Trains on 4 local ranks with tp=2 and dp=2, and on one process, and compares the losses.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from hypercomm import run_ranks
from hypercomm.compat.megatron import parallel_state as mpu  # was: from megatron.core import ...

WIDTH, BATCH, STEPS = 16, 64, 5


class Sum(torch.autograd.Function):
    """Sums over tensor parallel ranks, in the forward pass or in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, is_forward: bool) -> Tensor:
        ctx.is_forward, x = is_forward, x.clone()
        if is_forward:
            dist.all_reduce(x, group=mpu.get_tensor_model_parallel_group())
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return Sum.forward(ctx, gradient, not ctx.is_forward), None


class Layer(nn.Module):
    """A tensor parallel rank's shard of two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        rank = mpu.get_tensor_model_parallel_rank()
        size = mpu.get_tensor_model_parallel_world_size()
        up, down = torch.randn(2, 4 * WIDTH, WIDTH).chunk(size, dim=1)[rank] / WIDTH
        self.up, self.down = nn.Parameter(up.clone()), nn.Parameter(down.clone())

    def forward(self, x: Tensor) -> Tensor:
        return x + Sum.apply((Sum.apply(x, False) @ self.up.mT).relu() @ self.down, True)


def train(tensor_parallel: int) -> list[float]:
    """Train a replica on its share of each batch. Return the losses."""
    mpu.initialize_model_parallel(tensor_model_parallel_size=tensor_parallel)
    torch.manual_seed(0)
    model, dp = nn.Sequential(Layer(), Layer()), mpu.get_data_parallel_world_size()
    losses: list[Tensor] = []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for whole in torch.randn(STEPS, BATCH, WIDTH):
        x = whole.chunk(dp)[mpu.get_data_parallel_rank()]
        loss = (model(x) - x.roll(1, 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        losses.append(loss.detach())
        gradients = [weight.grad for weight in model.parameters() if weight.grad is not None]
        for each in (losses[-1], *gradients):
            dist.all_reduce(each.div_(dp), group=mpu.get_data_parallel_group())
        optimizer.step()
    mpu.destroy_model_parallel()
    return [loss.item() for loss in losses]


if __name__ == "__main__":
    [wanted], ranks = run_ranks(train, 1, args=(1,)), run_ranks(train, 4, args=(2,))
    difference = max(abs(a - b) for losses in ranks for a, b in zip(losses, wanted, strict=True))
    print(f"losses: {' '.join(f'{loss:.4f}' for loss in wanted)}")
    print(f"largest difference: {difference:.1e}")
