"""What tensors may move: dense ones with data, into buffers that may be written to."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import starmap
from operator import attrgetter

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.distributed import ProcessGroup, Work

from hypercomm.errors import LayoutError
from hypercomm.layout.groups import Axis, are_nested
from hypercomm.layout.text import shown


def as_tensor(value: object, what: str) -> Tensor:
    """Check that what is given is a dense tensor with data."""
    if not isinstance(value, Tensor):
        raise LayoutError(f"{what} must be a torch.Tensor, got {shown(value)}")
    if value.layout is not torch.strided or value.device.type == "meta":
        raise LayoutError(
            f"{what} must be a dense tensor with data, got {value.layout} on {value.device}"
        )
    if value.is_quantized or value.is_nested:
        kind = "quantized" if value.is_quantized else "nested"
        raise LayoutError(f"{what} must be a plain tensor, got a {kind} one")
    return value


def check_buffer(buffer: Tensor, what: str) -> None:
    """Check that what receives may be written to, and has each element in memory once."""
    steps = sorted(
        starmap(Axis, zip(buffer.shape, buffer.stride(), strict=True)), key=attrgetter("stride")
    )
    if buffer.numel() and not are_nested(steps):
        raise LayoutError(
            f"{what} must have each element at an address of its own, but shape "
            f"{tuple(buffer.shape)} has strides {buffer.stride()}; give a contiguous one"
        )
    if buffer.grad_fn is not None:
        raise LayoutError(
            f"{what} was computed from what requires a gradient, and may not be overwritten; give "
            f"another buffer, as torch.empty_like(...) makes"
        )


def check_device(tensor: Tensor, group: ProcessGroup | None, what: str = "tensor") -> None:
    """Check that a group has a backend for where a tensor is."""
    found = dist.get_backend_config(group)  # as in "cpu:gloo,cuda:nccl"
    devices = [entry.partition(":")[0] for entry in found.split(",")]
    if tensor.device.type not in devices:
        raise LayoutError(
            f"{what} is on {tensor.device}, but the process group that moves it has backends for "
            f"{', '.join(devices)}"
        )


def post(receives: Iterable[tuple[int, Tensor]], sends: Iterable[tuple[int, Tensor]]) -> list[Work]:
    """Begin to receive from ranks and to send to ranks, all at once: no order can block.

    Between two ranks, what is sent first is received first.
    """
    ops = [dist.P2POp(dist.irecv, tensor, rank) for rank, tensor in receives]
    ops += [dist.P2POp(dist.isend, tensor, rank) for rank, tensor in sends]
    return dist.batch_isend_irecv(ops) if ops else []


def mark_written(tensor: Tensor) -> None:
    """Let autograd know that a tensor was written to: to receive is no operation that it sees."""
    if not tensor.is_inference():
        increment_version(tensor)
