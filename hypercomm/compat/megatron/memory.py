"""Buffers that are reused instead of allocated anew."""

from __future__ import annotations

import contextlib
import logging
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any, ClassVar

import torch
from torch.distributed import ProcessGroup

from hypercomm.errors import ConfigurationError
from hypercomm.process_groups import torch_internals as c10d

logger = logging.getLogger(__name__)


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


class SymmetricMemoryBuffer:
    """Memory that all ranks of a group can read, or None where torch or the device cannot do it.

    Args:
        size_in_mb: Its size, in MiB.
        process_group: The group.

    Source: names, signatures and behaviour follow `megatron.core.inference.symmetric_memory`.
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

    def maybe_get_tensors(
        self, tensor_specs: Sequence[tuple[int, torch.dtype]], alignment: int = 16
    ) -> dict[str, Any]:
        """Return several stretches of the memory, one behind the other, or None for all of them.

        Args:
            tensor_specs: Number of elements and dtype of each.
            alignment: What each begins at a multiple of, in bytes.

        Returns:
            "handle", and for each under "tensors" its bytes and where they begin.
        """
        places, end = [], 0
        for length, dtype in tensor_specs:
            places.append((end, end + length * dtype.itemsize))
            end += -(-length * dtype.itemsize // alignment) * alignment
        if self.symm_buffer is None or end > self.symm_buffer.numel():
            return {"handle": None, "tensors": None}
        tensors = [(self.symm_buffer[start:stop], start) for start, stop in places]
        return {"handle": self.symm_mem_hdl, "tensors": tensors}


GlobalSymmetricMemoryBuffer = SymmetricMemoryBuffer  # what it was called up to 0.16


class SymmetricMemoryManager:
    """The symmetric memory of each use, such as "tp" or "ep", made when it is first asked for."""

    _buffers: ClassVar[dict[str, SymmetricMemoryBuffer]] = {}
    _default_size_mb = 512

    @classmethod
    def get_buffer(
        cls, key: str, process_group: ProcessGroup | None = None, size_mb: int | None = None
    ) -> SymmetricMemoryBuffer:
        """Return the memory of a use.

        Args:
            key: The use.
            process_group: Whose memory it is; needed the first time.
            size_mb: Its size in MiB; default: 512.

        Raises:
            ConfigurationError: There is none yet, and no group (an AssertionError).
        """
        if key not in cls._buffers:
            if process_group is None:
                raise ConfigurationError(
                    f"there is no symmetric memory for key={key!r} yet; give its process_group"
                )
            size = size_mb or cls._default_size_mb
            cls._buffers[key] = SymmetricMemoryBuffer(size, process_group)
        return cls._buffers[key]

    @classmethod
    def destroy(cls, key: str | None = None) -> None:
        """Forget the memory of one use, or of all."""
        for known in list(cls._buffers) if key is None else [key]:
            cls._buffers.pop(known, None)

    @classmethod
    def is_initialized(cls, key: str) -> bool:
        """Tell whether there is memory for a use."""
        return key in cls._buffers


_USE_GROUPS = (
    ("megatron.core.transformer.moe.fused_a2a", "nccl_ep_finalize"),
    ("megatron.core.inference.symmetric_memory", "SymmetricMemoryManager.destroy"),
    (__name__, "SymmetricMemoryManager.destroy"),
)
"""What is destroyed before the groups: modules, if they were imported, and their functions."""


def destroy_users_of_groups() -> None:
    """Destroy what uses process groups; an error is logged, since it keeps no group alive."""
    for module, path in _USE_GROUPS:
        try:
            end = attrgetter(path)(sys.modules[module])
        except (KeyError, AttributeError):  # not imported, or a release that has none
            continue
        try:
            end()
        except Exception:
            logger.warning("%s of %s failed", path, module, exc_info=True)


def _current_device() -> torch.device:
    if not torch.cuda.is_available():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())
