"""What real ranks run in the tests of ezpz.tp."""

from datetime import timedelta

import torch
import torch.distributed as dist

from hypercomm.compat.ezpz import tp
from ranks.common import all_reduce_of, given_back, threads_and_files
from ranks.common import tables as registered

NAMES = ("tensor", "context", "pipeline", "data")
FEATURES, HIDDEN, BATCH, STEPS = 6, 8, 4, 5


def groups():
    return {name: getattr(tp, f"get_{name}_parallel_group")() for name in NAMES}


def sums():
    """An all-reduce over every group; 10 to the power of each member's rank tells who was there."""
    rank = dist.get_rank()
    tp.initialize_tensor_parallel(2, 2, 2, timeout=timedelta(seconds=60))
    found = {name: all_reduce_of(10**rank, group) for name, group in groups().items()}
    tp.destroy_tensor_parallel()
    return found


def cycles(count):
    """Initialise, use every group, destroy; groups, threads and files after once and after all."""

    def cycle():
        tp.initialize_tensor_parallel(2, 2)
        for group in groups().values():
            all_reduce_of(1, group)
        tp.destroy_tensor_parallel()

    cycle()
    dist.barrier()
    before = len(registered()[0]), threads_and_files()
    for _ in range(count - 1):
        cycle()
    dist.barrier()
    return before, (len(registered()[0]), given_back(before[1]))


def backends():
    """The backend of each group, where each dim was given its own."""
    tp.initialize_tensor_parallel(
        2, tensor_parallel_backend="gloo", pipeline_parallel_backend="cpu:gloo"
    )
    found = {name: dist.get_backend_config(group) for name, group in groups().items()}
    before = registered()
    tp.destroy_tensor_parallel()
    refused = None
    try:
        tp.initialize_tensor_parallel(2, context_parallel_backend="cpu:gloo,cuda:smoke")
    except AssertionError as error:
        refused = str(error)
    return found, refused, registered() != before, tp.tensor_parallel_is_initialized()


class Copy(torch.autograd.Function):
    """The same input on all tensor parallel ranks: its gradient is the sum of theirs."""

    @staticmethod
    def forward(_, x):
        return x.clone()

    @staticmethod
    def backward(_, grad):
        grad = grad.clone()
        dist.all_reduce(grad, group=tp.get_tensor_parallel_group())
        return grad


class Reduce(torch.autograd.Function):
    """The sum of what the tensor parallel ranks computed: its gradient is that of each."""

    @staticmethod
    def forward(_, x):
        x = x.clone()
        dist.all_reduce(x, group=tp.get_tensor_parallel_group())
        return x

    @staticmethod
    def backward(_, grad):
        return grad


def problem():
    """The weights of a two-layer network, and batches for two data parallel ranks."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    return (
        draw(FEATURES, FEATURES) / 2,
        draw(FEATURES, HIDDEN) / 2,
        draw(HIDDEN, FEATURES) / 2,
        draw(STEPS, 2, BATCH, FEATURES),
        draw(STEPS, 2, BATCH, FEATURES),
    )


def train():
    """Train on 4 ranks, tp=2 and dp=2, with the first layer split by columns, the next by rows."""
    tp.initialize_tensor_parallel(2)
    rank, size = tp.get_tensor_parallel_rank(), tp.get_tensor_parallel_world_size()
    replica, replicas = tp.get_data_parallel_rank(), tp.get_data_parallel_world_size()
    whole, first, second, inputs, targets = problem()
    part = tp.divide_and_check_no_remainder(HIDDEN, size)
    weights = [
        whole,  # not split, so that a gradient goes through the whole of what is
        tp.split_tensor_along_last_dim(first, size, contiguous_split_chunks=True)[rank],
        second[rank * part : (rank + 1) * part].clone(),
    ]
    for weight in weights:
        weight.requires_grad_()
    losses = []
    for x, target in zip(inputs[:, replica], targets[:, replica], strict=True):
        hidden = torch.relu(Copy.apply(x @ weights[0]) @ weights[1])
        loss = (Reduce.apply(hidden @ weights[2]) - target).square().mean()
        loss.backward()
        with torch.no_grad():
            for weight in weights:
                dist.all_reduce(weight.grad, group=tp.get_data_parallel_group())
                weight.sub_(0.1 * weight.grad / replicas)
                weight.grad = None
        loss = loss.detach()
        dist.all_reduce(loss, group=tp.get_data_parallel_group())
        losses.append(loss.item() / replicas)
    tp.destroy_tensor_parallel()
    return losses, [weight.detach().tolist() for weight in weights]
