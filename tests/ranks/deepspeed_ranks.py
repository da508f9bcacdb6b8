"""What real ranks run in the tests of hypercomm.compat.deepspeed."""

import os
from functools import partial

os.environ.setdefault("DS_ACCELERATOR", "cpu")  # DeepSpeed reads it when it is imported

import torch
import torch.distributed as dist
from torch import nn

from hypercomm import HyperCommGrid
from hypercomm.compat.deepspeed import Mpu, process_topology
from hypercomm.compat.megatron import parallel_state
from hypercomm.testing import registered_groups
from ranks.common import all_reduce_of

NAMES = ("tensor_model", "pipeline_model", "model", "data", "sequence", "sequence_data")
STEPS, BATCH, SEQUENCE, HEADS, SIZE = 4, 4, 8, 2, 4


def sums():
    """An all-reduce over every group; 10 to the power of each member's rank tells who was there."""
    with HyperCommGrid([2, 2, 2], ["shard", "seq", "replica"]) as grid:
        mpu = Mpu(grid, tp="shard", sp="seq", dp="replica")
        number = 10 ** dist.get_rank()
        return {
            name: all_reduce_of(number, getattr(mpu, f"get_{name}_parallel_group")())
            for name in NAMES
        }


def beside_deepspeed(shape, dims):
    """What an Mpu and DeepSpeed's own grid answer on the topology of one layout."""
    import deepspeed
    from deepspeed.runtime.pipe.topology import PipelineParallelGrid

    deepspeed.init_distributed("gloo")
    with HyperCommGrid(shape, dims) as grid:
        mpu, theirs = Mpu(grid), PipelineParallelGrid(process_topology(grid))
        return [
            {name: _plain(getattr(asked, name)()) for name in dir(theirs) if _is_asked(name)}
            for asked in (mpu, theirs)
        ]


def _is_asked(name):
    return name.startswith("get_") and "parallel" in name and hasattr(Mpu, name)


def _plain(answer):
    is_group = isinstance(answer, dist.ProcessGroup)
    return sorted(dist.get_process_group_ranks(answer)) if is_group else answer


# ---- training over parts of sequences -----------------------------------------------------------


def attention(query, key, value):
    """Attend within [batch, sequence, heads, size], as DeepSpeed's layer wants it."""
    query, key, value = (x.transpose(1, 2) for x in (query, key, value))
    return nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2)


class Model(nn.Module):
    """One layer of attention, and what comes before and behind."""

    def __init__(self, attend):
        super().__init__()
        torch.manual_seed(0)
        width = HEADS * SIZE
        self.first, self.last = nn.Linear(width, 3 * width), nn.Linear(width, 1)
        self.attend = attend

    def forward(self, x):
        parts = self.first(x).unflatten(-1, (3, HEADS, SIZE)).unbind(2)
        attend = self.attend
        if attend is not attention:
            attend = partial(attend, batch_dim_idx=0)
        return self.last(attend(*parts).flatten(2))


def batches():
    """A batch for each step, alike on every rank."""
    generator = torch.Generator().manual_seed(1)
    return torch.randn(STEPS, BATCH, SEQUENCE, HEADS * SIZE, generator=generator)


def squares(model, x):
    """The sum of squared errors over all positions."""
    return (model(x) - x.sum(dim=-1, keepdim=True)).square().sum()


def alone():
    """Train on whole batches in one process."""
    model, losses = Model(attention), []
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for x in batches():
        loss = squares(model, x) / (BATCH * SEQUENCE)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_on_a_state():
    """Train on Megatron's state, cp=2 and dp=2."""
    parallel_state.initialize_model_parallel(context_parallel_size=2)
    try:
        return _train(parallel_state)
    finally:
        parallel_state.destroy_model_parallel()


def train_on_a_grid():
    """Train on a grid of three dims of 2, tensor parallel the slowest."""
    with HyperCommGrid([2, 2, 2], ["seq", "replica", "shard"]) as grid:
        return _train(Mpu(grid, tp="shard", sp="seq", dp="replica"))


def _train(mpu):
    """Train with ZeRO-1 on parts of the batch and of its sequences; count the groups it added."""
    import deepspeed
    from deepspeed.sequence.layer import DistributedAttention

    before = registered_groups()
    attend = attention
    if mpu.get_sequence_parallel_world_size() > 1:
        attend = DistributedAttention(attention, mpu.get_sequence_parallel_group(), 2, 1)
    replicas = mpu.get_data_parallel_world_size()
    model = Model(attend)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=torch.optim.SGD(model.parameters(), lr=1e-2),
        mpu=mpu,
        config={
            "train_micro_batch_size_per_gpu": BATCH // replicas,
            "zero_optimization": {"stage": 1},
            "zero_allow_untested_optimizer": True,
            "gradient_clipping": 0.0,
        },
    )
    losses = []
    for whole in batches():
        x = whole.chunk(replicas)[mpu.get_data_parallel_rank()]
        parts = x.chunk(mpu.get_sequence_parallel_world_size(), dim=1)
        x = parts[mpu.get_sequence_parallel_rank()]
        loss = squares(engine, x) / (BATCH // replicas * SEQUENCE)  # a part of its replica's
        engine.backward(loss)
        engine.step()
        total = loss.detach().clone()
        dist.all_reduce(total, group=mpu.get_sequence_data_parallel_group())
        losses.append(total.item() / replicas)
    return losses, len(registered_groups() - before)
