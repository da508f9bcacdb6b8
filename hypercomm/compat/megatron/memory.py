"""Buffers that are reused instead of allocated anew."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch.distributed import ProcessGroup

from hypercomm.process_groups import c10d


class GlobalMemoryBuffer:
    """One tensor for each name and dtype, which grows when a larger one is asked for.

    Example:
        >>> buffer = GlobalMemoryBuffer()
        >>> first = buffer.get_tensor((2, 3), torch.float32, "activations")
        >>> first.shape, first.data_ptr() == buffer.get_tensor((4,), torch.float32, "activations").data_ptr()
        (torch.Size([2, 3]), True)
    """  # noqa: E501

    def __init__(self) -> None:
        self.buffer: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def get_tensor(
        self,
        tensor_shape: Sequence[int],
        dtype: torch.dtype,
        name: str,
        mem_alloc_context: Callable[[], AbstractContextManager[Any]] | None = None,
    ) -> torch.Tensor:
        """Return a tensor of this shape on the current device, with whatever is in it.

        Args:
            tensor_shape: Its shape.
            dtype: Its dtype.
            name: Which buffer; two tensors of one name and dtype share their memory.
            mem_alloc_context: Makes the context in which memory is allocated.
        """
        length = math.prod(tensor_shape)
        held = self.buffer.get((name, dtype))
        if held is None or held.numel() < length:
            with (mem_alloc_context or contextlib.nullcontext)():
                held = torch.empty(length, dtype=dtype, device=_current_device())
            self.buffer[name, dtype] = held
        return held[:length].view(*tensor_shape)


class GlobalSymmetricMemoryBuffer:
    """Memory that all ranks of a group can read, or None where torch or the device cannot do it.

    Args:
        size_in_mb: Its size, in MiB.
        process_group: The group.
    """

    def __init__(self, size_in_mb: int, process_group: ProcessGroup) -> None:
        self.symm_buffer: torch.Tensor | None
        self.symm_buffer, self.symm_mem_hdl = c10d.symmetric_memory(
            int(size_in_mb * 1024 * 1024), process_group
        )

    def maybe_get_tensor(self, tensor_shape: Sequence[int], dtype: torch.dtype) -> dict[str, Any]:
        """Return a tensor of this shape and its handle, or None for both where it does not fit."""
        length = math.prod(tensor_shape) * dtype.itemsize
        if self.symm_buffer is None or length > self.symm_buffer.numel():
            return {"tensor": None, "handle": None}
        tensor = self.symm_buffer[:length].view(dtype).view(*tensor_shape)
        return {"tensor": tensor, "handle": self.symm_mem_hdl}


def _current_device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
