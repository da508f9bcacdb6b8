"""The memory buffer of tensor parallel layers, and the ends of other users of process groups."""

from __future__ import annotations

import contextlib
import logging
import math
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from operator import attrgetter
from typing import Any

import torch

logger = logging.getLogger(__name__)


class GlobalMemoryBuffer:
    """One tensor for each name and dtype, which grows when a larger one is asked for.

    Example:
        >>> buffer = GlobalMemoryBuffer()
        >>> first = buffer.get_tensor((2, 3), torch.float32, "activations")
        >>> again = buffer.get_tensor((4,), torch.float32, "activations")
        >>> first.shape, first.data_ptr() == again.data_ptr()
        (torch.Size([2, 3]), True)
    """

    def __init__(self) -> None:
        self.buffer: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def get_tensor(
        self,
        tensor_shape: Sequence[int],
        dtype: torch.dtype,
        name: str,
        mem_alloc_context: Callable[[], AbstractContextManager[Any]] | None = None,
    ) -> torch.Tensor:
        """Return a tensor of this shape on the current device; its content is undefined.

        Args:
            tensor_shape: Its shape.
            dtype: Its dtype.
            name: The name of the buffer; two tensors of one name and dtype share memory.
            mem_alloc_context: Makes the context in which memory is allocated.
        """
        length = math.prod(tensor_shape)
        held = self.buffer.get((name, dtype))
        if held is None or held.numel() < length:
            device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
            with (mem_alloc_context or contextlib.nullcontext)():
                held = torch.empty(length, dtype=dtype, device=device)
            self.buffer[name, dtype] = held
        return held[:length].view(*tensor_shape)


_USERS = (
    ("megatron.core.transformer.moe.fused_a2a", "nccl_ep_finalize"),
    ("megatron.core.inference.symmetric_memory", "SymmetricMemoryManager.destroy"),
)
"""Modules of Megatron whose objects use process groups, and the function that destroys these."""


def destroy_users_of_groups() -> None:
    """Destroy Megatron's objects that use process groups; an error is logged."""
    for module, path in _USERS:
        try:
            destroy = attrgetter(path)(sys.modules[module])
        except (KeyError, AttributeError):  # not imported, or a release without it
            continue
        try:
            destroy()
        except Exception:
            logger.warning("%s of %s failed", path, module, exc_info=True)
