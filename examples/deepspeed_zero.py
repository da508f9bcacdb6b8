"""DeepSpeed's ZeRO-1 over the data parallel ranks of a Megatron state, passed as `mpu`.

    pip install deepspeed
    python examples/deepspeed_zero.py

Trains on 4 local ranks with tp=2 and dp=2, on the CPU, and compares with plain Adam on one process.
"""

import os
import warnings

os.environ.setdefault("DS_ACCELERATOR", "cpu")
# DeepSpeed calls functions that torch has renamed.
warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)

import torch
import torch.distributed as dist
from torch import nn

from hypercomm import run_ranks
from hypercomm.compat.megatron import parallel_state as mpu
from hypercomm.testing import registered_groups

STEPS, RATE = 5, 1e-2


def model() -> nn.Module:
    """Make the model."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 1))


def data() -> torch.Tensor:
    """Return a batch for each step, equal on every rank."""
    return torch.randn(STEPS, 8, 8, generator=torch.Generator().manual_seed(1))


def alone() -> list[float]:
    """Train with plain Adam on full batches."""
    whole = model()
    losses: list[float] = []
    optimizer = torch.optim.Adam(whole.parameters(), lr=RATE)
    for x in data():
        loss = (whole(x) - x.sum(dim=1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def on_a_grid() -> tuple[list[float], int]:
    """Train with ZeRO-1. Return the losses, and how many process groups DeepSpeed added."""
    import deepspeed

    mpu.initialize_model_parallel(tensor_model_parallel_size=2)
    before = registered_groups()
    whole = model()
    engine, *_ = deepspeed.initialize(
        model=whole,
        optimizer=torch.optim.Adam(whole.parameters(), lr=RATE),
        mpu=mpu,
        config={
            "train_micro_batch_size_per_gpu": 4,
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,  # DeepSpeed clips gradients by default, plain Adam does not
        },
    )
    losses: list[float] = []
    for x in data().chunk(2, dim=1)[mpu.get_data_parallel_rank()]:
        loss = (engine(x) - x.sum(dim=1, keepdim=True)).square().mean()
        engine.backward(loss)
        engine.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean, group=mpu.get_data_parallel_group())
        losses.append(mean.item() / mpu.get_data_parallel_world_size())
    added = len(registered_groups() - before)
    mpu.destroy_model_parallel()
    return losses, added


if __name__ == "__main__":
    wanted, ranks = alone(), run_ranks(on_a_grid, 4)
    difference = max(abs(a - b) for losses, _ in ranks for a, b in zip(losses, wanted, strict=True))
    print(f"losses: {' '.join(f'{loss:.4f}' for loss in wanted)}")
    print(f"largest difference: {difference:.1e}")
    print(f"process groups added: {max(added for _, added in ranks)}")
