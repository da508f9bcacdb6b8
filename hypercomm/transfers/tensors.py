"""Reads and checks the tensors that a rank passes to a transfer, and writes to them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.autograd.graph import increment_version

from hypercomm.errors import LayoutError
from hypercomm.layout.text import short_repr

_CHECKED_WORDS = 1 << 20
"""The number of words of which `checksum` makes a copy."""


def as_tensor(value: object, what: str) -> Tensor:
    """Return a value that is a dense tensor with data, or raise LayoutError."""
    if not isinstance(value, Tensor):
        raise LayoutError(f"{what} must be a torch.Tensor, got {short_repr(value)}")
    if value.layout is not torch.strided or value.device.type == "meta":
        raise LayoutError(
            f"{what} must be a dense tensor with data, got {value.layout} on {value.device}"
        )
    if hasattr(value, "to_local"):
        raise LayoutError(f"{what} must be a plain tensor, got a DTensor; pass its to_local()")
    if value.is_conj() or value.is_neg():
        raise LayoutError(f"{what} must be resolved; pass its resolve_conj().resolve_neg()")
    return value


def check_buffer(buffer: Tensor, what: str) -> None:
    """Raise if elements of a buffer may share memory, because data cannot be received into it."""
    reach = 0  # the offset of the last element along the axes with smaller strides
    for step, length in sorted(zip(buffer.stride(), buffer.shape, strict=True)):
        if length > 1 and step <= reach and buffer.numel():
            raise LayoutError(
                f"{what} is expanded: its shape {tuple(buffer.shape)} has strides "
                f"{buffer.stride()}, so elements share memory; pass a contiguous tensor"
            )
        reach += (length - 1) * step


def memory_span(tensor: Tensor) -> tuple[int, int]:
    """Return the address of the first byte of a tensor, and the address after its last byte."""
    if not tensor.numel():
        return 0, 0
    begin = tensor.data_ptr()
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return begin, begin + (last + 1) * tensor.element_size()


def share_memory(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors share memory, or may share it because their strides differ.

    Two tensors with the same strides are boxes of one grid. They share memory if the boxes overlap.

    Example:
        >>> room = torch.zeros(4, 4)
        >>> share_memory(room[:, 0], room[:, 1]), share_memory(room[:, :2], room[1:, 1:])
        (False, True)
    """
    begin, end = memory_span(one)
    other_begin, other_end = memory_span(other)
    if begin >= other_end or other_begin >= end:
        return False
    lengths = _lengths(one)
    other_lengths = _lengths(other)
    axes = [
        (step, lengths.get(step, 1), other_lengths.get(step, 1))
        for step in sorted({*lengths, *other_lengths}, reverse=True)
    ]
    return _overlap(other_begin - begin, axes)


def _lengths(tensor: Tensor) -> dict[int, int]:
    """Return the length of each axis, by the stride in bytes. The last axis is an element."""
    size = tensor.element_size()
    axes = zip(tensor.stride(), tensor.shape, strict=True)
    return {1: size, **{step * size: length for step, length in axes if length > 1}}


def _overlap(distance: int, axes: Sequence[tuple[int, int, int]]) -> bool:
    """Return whether two boxes of a grid overlap, or whether the strides do not form a grid.

    Args:
        distance: The distance from the first byte of the first box to that of the second.
        axes: The stride of each axis, and the length of each box, from the largest stride on.
    """
    if not axes:
        return distance == 0
    (step, length, other_length), *rest = axes
    reach = sum((max(lengths) - 1) * inner for inner, *lengths in rest)
    if step <= reach:
        return True
    first, last = -((reach - distance) // step), (distance + reach) // step
    shifts = range(max(first, 1 - other_length), min(last, length - 1) + 1)
    return any(_overlap(distance - shift * step, rest) for shift in shifts)


def mark_written(tensor: Tensor) -> None:
    """Increment the version of a received tensor, because autograd did not record the write."""
    if not tensor.is_inference():
        increment_version(tensor)


def writing_to(tensors: Iterable[Tensor]) -> AbstractContextManager[object]:
    """Return a context in which the tensors may be written, also tensors of inference mode."""
    is_needed = any(one.is_inference() for one in tensors)
    return torch.inference_mode() if is_needed else contextlib.nullcontext()


def as_bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as bytes, because backends lack some dtypes."""
    # A tensor of one element may have strides that do not allow a view as bytes.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8)


def checksum(tensor: Tensor) -> int:
    """Return a checksum of the bytes of a tensor, of 64 bits.

    It detects a change of one word of 8 bytes, and detects that words have other positions.
    """
    data = as_bytes(tensor.contiguous())
    count = min(_CHECKED_WORDS, -(-data.numel() // 8))
    words = torch.zeros(count, dtype=torch.int64, device=data.device)
    weights = 2 * torch.arange(count, device=data.device) + 1
    total = torch.zeros((), dtype=torch.int64, device=data.device)
    for some in torch.split(data, 8 * count or 1):
        words.zero_().view(torch.uint8)[: some.numel()] = some
        total = 31 * total + (words * weights).sum()
    return int(total.item()) % 2**64
