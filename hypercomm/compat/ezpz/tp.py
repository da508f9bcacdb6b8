"""`ezpz.tp` on a grid: its functions, and its globals, which can be read and written.

`initialize_tensor_parallel` fills and `destroy_tensor_parallel` empties the default
`TensorParallelState`. All other functions, and the globals, act on the current one: that of a
`with use(state):` block, else the default.

Source: names, signatures and behaviour follow `ezpz.tp`, and through it fairscale's
`fairscale.nn.model_parallel.initialize`.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from datetime import timedelta
from operator import attrgetter
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypercomm.compat.ezpz.state import GLOBALS, TABLE, Row, TensorParallelState, current
from hypercomm.compat.module_state import name_functions
from hypercomm.errors import ConfigurationError, LayoutError
from hypercomm.layout.checks import as_int
from hypercomm.layout.text import shown

Answer = TypeVar("Answer")

__all__ = [
    "TensorParallelState",
    "destroy_tensor_parallel",
    "divide_and_check_no_remainder",
    "ensure_divisibility",
    "get_context_parallel_group",
    "get_context_parallel_rank",
    "get_context_parallel_ranks",
    "get_context_parallel_world_size",
    "get_data_parallel_group",
    "get_data_parallel_rank",
    "get_data_parallel_ranks",
    "get_data_parallel_world_size",
    "get_pipeline_parallel_group",
    "get_pipeline_parallel_rank",
    "get_pipeline_parallel_ranks",
    "get_pipeline_parallel_world_size",
    "get_tensor_parallel_group",
    "get_tensor_parallel_rank",
    "get_tensor_parallel_ranks",
    "get_tensor_parallel_src_rank",
    "get_tensor_parallel_world_size",
    "initialize_tensor_parallel",
    "split_tensor_along_last_dim",
    "tensor_parallel_is_initialized",
    "use",
]


def use(
    state: TensorParallelState,
) -> contextlib.AbstractContextManager[TensorParallelState]:
    """Let the getters and globals of this module act on `state` within a `with` block.

    The block is context-local, as that of `hypercomm.compat.megatron.parallel_state.use`.
    `initialize_tensor_parallel` and `destroy_tensor_parallel` are for the default state, also in a
    block: `TensorParallelState.create` makes one for it, and `state.destroy()` ends it.

    Raises:
        StateError: `state` is no TensorParallelState.
    """
    return current.use(state)


# ---- creation -----------------------------------------------------------------------------------


def initialize_tensor_parallel(
    tensor_parallel_size: int = 1,
    pipeline_parallel_size: int = 1,
    context_parallel_size: int = 1,
    tensor_parallel_backend: str | None = None,
    pipeline_parallel_backend: str | None = None,
    context_parallel_backend: str | None = None,
    data_parallel_backend: str | None = None,
    timeout: timedelta | None = None,
) -> None:
    """Create the groups of all dims, and fill the default state; every rank must call this.

    Ranks that differ in tp only are neighbours, then come cp, pp and dp; dp takes what is left of
    the world. A failure leaves nothing behind.

    Args:
        tensor_parallel_size: Ranks that share each layer's tensors; one above the size of the
            world is cut to it, with a warning.
        pipeline_parallel_size: Pipeline stages.
        context_parallel_size: Ranks that share each sequence.
        tensor_parallel_backend: Backend of the tensor parallel groups; default: that of WORLD.
        pipeline_parallel_backend: The same of the pipeline parallel groups.
        context_parallel_backend: The same of the context parallel groups.
        data_parallel_backend: The same of the data parallel groups.
        timeout: Timeout of all groups; default: that of WORLD.

    Raises:
        ConfigurationError: A size is not a positive int, the sizes do not divide the world, or a
            backend or the timeout cannot be used (an AssertionError).
        StateError: torch.distributed is not initialised, or this is (an AssertionError).

    Example:
        >>> from hypercomm.testing import fake_world
        >>> with fake_world(16, rank=6):
        ...     initialize_tensor_parallel(2, 2, 2)
        ...     print(get_tensor_parallel_ranks(), get_pipeline_parallel_ranks())
        ...     destroy_tensor_parallel()
        [6, 7] [2, 6]
    """
    current.default.initialize(**locals())


def destroy_tensor_parallel() -> None:
    """Destroy the groups that the default state created, and set all of its globals to None."""
    current.default.destroy()


def tensor_parallel_is_initialized() -> bool:
    """Tell whether the groups of all four dims are there."""
    state = current.get()
    return all(state.values[row.group] is not None for row in TABLE.values())


# ---- groups, ranks and sizes --------------------------------------------------------------------


def _itself(held: Any) -> Any:
    return held


def _asks(
    what: str, fact: Callable[[Any], Answer], of: Callable[[Row], str] = attrgetter("group")
) -> Callable[..., Callable[[], Answer]]:
    """Make what makes getters: a dim in, a function out that answers of what its global holds."""

    def make(dim: str, otherwise: Answer | None = None) -> Callable[[], Answer]:
        row = TABLE[dim]

        def get() -> Answer:
            state = current.get()
            if otherwise is not None and state.values[of(row)] is None:
                return otherwise
            return fact(state.require(of(row), row.words))

        more = "" if otherwise is None else f"; {otherwise} without one"
        get.__doc__ = f"Return {what.format(row.words)}{more}."
        return get

    return make


_group: Callable[[str], Callable[[], ProcessGroup]] = _asks("the calling rank's {} group", _itself)
_ranks: Callable[[str], Callable[[], list[int]]] = _asks(
    "the ranks of the {} group, ascending", _itself, attrgetter("ranks")
)
_world_size = _asks("the size of the {} group", lambda group: int(group.size()))
_rank = _asks("the calling rank's place in its {} group", lambda group: int(group.rank()))

get_tensor_parallel_group = _group("tp")
get_tensor_parallel_ranks = _ranks("tp")
get_tensor_parallel_world_size = _world_size("tp", otherwise=1)
get_tensor_parallel_rank = _rank("tp", otherwise=0)

get_context_parallel_group = _group("cp")
get_context_parallel_ranks = _ranks("cp")
get_context_parallel_world_size = _world_size("cp")
get_context_parallel_rank = _rank("cp")

get_pipeline_parallel_group = _group("pp")
get_pipeline_parallel_ranks = _ranks("pp")
get_pipeline_parallel_world_size = _world_size("pp")
get_pipeline_parallel_rank = _rank("pp")

get_data_parallel_group = _group("dp")
get_data_parallel_ranks = _ranks("dp")
get_data_parallel_world_size = _world_size("dp")
get_data_parallel_rank = _rank("dp")


def get_tensor_parallel_src_rank() -> int:
    """Return the first rank of the calling rank's tensor parallel group."""
    size = get_tensor_parallel_world_size()
    return dist.get_rank() // size * size


# ---- arithmetic ---------------------------------------------------------------------------------


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Check that one number divides another.

    Raises:
        ConfigurationError: It does not, or one is no int (an AssertionError).

    Example:
        >>> ensure_divisibility(7, 2)
        Traceback (most recent call last):
            ...
        hypercomm.errors.ConfigurationError: 7 is not divisible by 2
    """
    try:
        as_int(numerator, "numerator")
        as_int(denominator, "denominator")
    except LayoutError as error:
        raise ConfigurationError(str(error)) from None
    if denominator == 0 or numerator % denominator != 0:
        raise ConfigurationError(f"{numerator} is not divisible by {denominator}")


def divide_and_check_no_remainder(numerator: int, denominator: int) -> int:
    """Divide where nothing is left.

    Raises:
        ConfigurationError: Something is (an AssertionError).

    Example:
        >>> divide_and_check_no_remainder(12, 4)
        3
    """
    ensure_divisibility(numerator, denominator)
    return numerator // denominator


def split_tensor_along_last_dim(
    tensor: torch.Tensor, num_partitions: int, contiguous_split_chunks: bool = False
) -> tuple[torch.Tensor, ...]:
    """Split a tensor along its last dim into equal parts.

    Args:
        tensor: Of at least one dim, the last a multiple of `num_partitions` long.
        num_partitions: The number of parts.
        contiguous_split_chunks: Whether to copy parts that are not contiguous.

    Returns:
        Views of the tensor, or copies.

    Raises:
        ConfigurationError: The last dim cannot be split so (an AssertionError).

    Example:
        >>> [part.tolist() for part in split_tensor_along_last_dim(torch.arange(6), 3)]
        [[0, 1], [2, 3], [4, 5]]
    """
    if not isinstance(tensor, torch.Tensor) or tensor.dim() == 0:
        raise ConfigurationError(f"tensor must be one of at least one dim, got {shown(tensor)}")
    size = divide_and_check_no_remainder(tensor.size(-1), num_partitions)
    if num_partitions < 1:
        raise ConfigurationError(f"num_partitions must be at least 1, got {num_partitions}")
    parts = torch.split(tensor, size, dim=-1)
    return tuple(part.contiguous() for part in parts) if contiguous_split_chunks else parts


name_functions(globals(), __name__)
current.bind(sys.modules[__name__], GLOBALS)
