"""A DeepSpeed PipelineModule of two stages, with ZeRO-1, on a topology made from a layout.

    pip install deepspeed
    python examples/deepspeed_pipeline.py

Trains on 4 local ranks with dp=2 and pp=2, on the CPU, and compares with plain Adam on one process.

DeepSpeed creates the process groups of the pipeline from the ranks of the topology. On a CPU, it
supports float32 and bfloat16. It rejects fp16 ("Type fp16 is not supported on your device") if
oneDNN does not support it on the processor. It does not support ZeRO-2 and ZeRO-3 with a pipeline.
"""

import os
import warnings

os.environ.setdefault("DS_ACCELERATOR", "cpu")
# DeepSpeed calls functions that torch has renamed.
warnings.filterwarnings("ignore", "`torch.distributed", FutureWarning)

import torch
from torch import nn

from hypercomm import RankLayout, run_ranks
from hypercomm.compat.deepspeed import process_topology

STEPS, RATE = 5, 1e-2
REPLICAS, MICRO_BATCHES, MICRO_BATCH = 2, 2, 4
LAYOUT = RankLayout("dp=2,pp=2")  # the ranks of a stage are neighbours


def layers() -> list[nn.Module]:
    """Make the layers of the model."""
    torch.manual_seed(0)
    return [nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 16), nn.Linear(16, 1)]


def loss_of(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return the mean squared error."""
    return (outputs - targets).square().mean()


def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return inputs and targets of each step, equal on every rank."""
    generator = torch.Generator().manual_seed(1)
    batches = torch.randn(STEPS, REPLICAS * MICRO_BATCHES * MICRO_BATCH, 8, generator=generator)
    return [(x, x.sum(dim=1, keepdim=True)) for x in batches]


def alone() -> list[float]:
    """Train with plain Adam on full batches."""
    whole = nn.Sequential(*layers())
    losses: list[float] = []
    optimizer = torch.optim.Adam(whole.parameters(), lr=RATE)
    for x, target in data():
        loss = loss_of(whole(x), target)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def in_a_pipeline() -> tuple[int, list[float]]:
    """Train in two stages with ZeRO-1. Return the number of this stage's layers, and the losses."""
    import deepspeed
    from deepspeed.pipe import PipelineModule

    deepspeed.init_distributed("gloo")
    module = PipelineModule(
        layers(),
        topology=process_topology(LAYOUT),
        loss_fn=loss_of,
        partition_method="uniform",
    )
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=torch.optim.Adam(module.parameters(), lr=RATE),
        config={
            "train_micro_batch_size_per_gpu": MICRO_BATCH,
            "gradient_accumulation_steps": MICRO_BATCHES,
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,  # DeepSpeed clips gradients by default, plain Adam does not
        },
    )
    replica = engine.grid.get_data_parallel_rank()
    losses: list[float] = []
    for batch in data():
        inputs, targets = (whole.chunk(REPLICAS)[replica].chunk(MICRO_BATCHES) for whole in batch)
        pairs = zip(inputs, targets, strict=True)
        losses.append(engine.train_batch(data_iter=pairs).item())
    return len(module.forward_funcs), losses


if __name__ == "__main__":
    wanted, ranks = alone(), run_ranks(in_a_pipeline, LAYOUT.size)
    difference = max(abs(a - b) for _, losses in ranks for a, b in zip(losses, wanted, strict=True))
    print(f"losses: {' '.join(f'{loss:.4f}' for loss in wanted)}")
    print(f"layers of each rank: {' '.join(str(layers) for layers, _ in ranks)}")
    print(f"largest difference: {difference:.1e}")
