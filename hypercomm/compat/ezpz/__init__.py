# mypy: disable-error-code="no-any-return"
"""Implements `ezpz.tp`, which is tensor parallelism as in fairscale, with a grid.

`initialize_tensor_parallel` fills the default `TensorParallelState`, and `destroy_tensor_parallel`
empties this state. All other functions, and reads and writes of the globals, act on the current
state: the state of a `with use(state):` block, or the default state.

The module is also its own attribute `tp`, so `from hypercomm.compat.ezpz import tp` replaces
`from ezpz import tp`.

Source: names, signatures and behaviour follow `ezpz.tp`, and through it fairscale's
`fairscale.nn.model_parallel.initialize`.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypercomm.compat import aliases
from hypercomm.compat.module_state import CurrentState, ModuleState
from hypercomm.errors import ConfigurationError, HyperCommError, StateError
from hypercomm.grid import HyperCommGrid
from hypercomm.layout import RankLayout
from hypercomm.layout.checks import positive

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Return a global."""


__all__ = ["install", "tp"]

_GROUPS = {
    "dp": ("data_parallel", "_DATA_PARALLEL_GROUP", "_DATA_PARALLEL_RANKS"),
    "tp": ("tensor_parallel", "_TENSOR_PARALLEL_GROUP", "_TENSOR_PARALLEL_RANKS"),
    "pp": ("pipeline_parallel", "_PIPELINE_PARALLEL_GROUP", "_PIPELINE_PARALLEL_RANKS"),
    "cp": ("context_parallel", "_CONTEXT_PARALLEL_GROUP", "_CONTEXT_PARALLEL_GROUP_RANKS"),
}
"""For each dim, in the order of creation: ezpz's name of the dim, and two globals.

The first global contains the group over the dim. The second global contains the ranks of the group.
"""

_GLOBALS = [name for _, *names in _GROUPS.values() for name in names]


def install() -> None:
    """Replace `ezpz.tp` by this module. Other modules, such as `ezpz.tp.layers`, are not replaced.

    Call this function before `ezpz` is imported. ezpz need not be installed. A second call has no
    effect.

    Raises:
        StateError: `ezpz` has already been imported. Nothing was changed.

    Example:
        >>> install()
        >>> import ezpz.tp
        >>> ezpz.tp.__name__
        'hypercomm.compat.ezpz'
    """
    aliases.install({"ezpz.tp": __name__}, ("ezpz",), loaded="ezpz")


class TensorParallelState(ModuleState):
    """One tensor parallel configuration: its grid, its groups, and the values of ezpz's globals.

    A new state is empty. `create` returns an initialised state without changing the default state.
    Within a `with use(state):` block, the functions of this module act on `state`.

    Attributes:
        grid: The grid over tp, cp, pp and dp, or None in an empty state. tp varies fastest.

    Example:
        >>> from hypercomm.testing import fake_world
        >>> with fake_world(8), TensorParallelState.create(tensor_parallel_size=2) as state:
        ...     print(state.grid.layout, state.grid.get_pg("dp").size())
        tp=2,cp=1,pp=1,dp=4 4
    """

    empty = dict.fromkeys(_GLOBALS, lambda: None)

    def initialize(self, *args: Any, **kwargs: Any) -> None:
        """Create the groups of all dims. See `initialize_tensor_parallel`."""
        signature = inspect.signature(initialize_tensor_parallel)
        call = signature.bind(*args, **kwargs)
        self.check_new(_GLOBALS, "destroy_tensor_parallel", lambda _: None)
        call.apply_defaults()
        try:
            self._create(call.arguments)
        except HyperCommError as error:
            raise ConfigurationError(str(error)) from error

    def _create(self, given: dict[str, Any]) -> None:
        layout = _fitting_layout(given)
        backends = {dim: given[f"{name}_backend"] for dim, (name, *_) in _GROUPS.items()}
        own = {dim: list(layout.groups(dim).of(dist.get_rank())) for dim in _GROUPS}
        groups: list[Any]
        if dist.group.WORLD is None:  # a unit test has replaced functions of torch.distributed
            groups = [dist.new_group(own[dim], given["timeout"], backends[dim]) for dim in _GROUPS]
        else:
            grid = HyperCommGrid(layout, name="ezpz.tp", cover="exact")
            requests = [{"dims": dim, "backend": backend} for dim, backend in backends.items()]
            groups = grid.create_pgs(requests, timeout=given["timeout"])
            self.grid = grid
        for (dim, (_, name, ranks)), group in zip(_GROUPS.items(), groups, strict=True):
            self.values |= {name: group, ranks: own[dim]}
        current.keep(self)


def _fitting_layout(given: dict[str, Any]) -> RankLayout:
    """Return the layout over tp, cp, pp and dp. The size of dp is inferred from the world size."""
    names = [f"{_GROUPS[dim][0]}_size" for dim in ("tp", "cp", "pp")]
    size, *others = [positive(given[name], name) for name in names]
    world_size = dist.get_world_size()
    if size > world_size:
        problem = f"tensor_parallel_size={size} is larger than the world of {world_size} ranks"
        warnings.warn(f"{problem}; using {world_size}", stacklevel=5)
    shape = [min(size, world_size), *others, -1]
    return RankLayout(shape, ["tp", "cp", "pp", "dp"], world_size=world_size)


current: CurrentState[TensorParallelState] = CurrentState("ezpz.tp", TensorParallelState)
"""The state that the functions of this module act on."""

use = current.use


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
    """Create the groups of all dims, and fill the default state. Every rank must call this.

    tp varies fastest, followed by cp, pp and dp. The size of dp is inferred from the world size. If
    the call fails, no groups are left.

    Args:
        tensor_parallel_size: Number of ranks that share each layer's tensors. If this number
            exceeds the world size, the world size is used, with a warning.
        pipeline_parallel_size: Number of pipeline stages.
        context_parallel_size: Number of ranks that share each sequence.
        tensor_parallel_backend: Backend of the tensor parallel groups. Default: WORLD's backend.
        pipeline_parallel_backend: Backend of the pipeline parallel groups. Default: WORLD's
            backend.
        context_parallel_backend: Backend of the context parallel groups. Default: WORLD's backend.
        data_parallel_backend: Backend of the data parallel groups. Default: WORLD's backend.
        timeout: Timeout of all groups. Default: WORLD's timeout.

    Raises:
        ConfigurationError: A size is not a positive int, the sizes do not divide the world, or a
            backend or the timeout cannot be used (an AssertionError).
        StateError: torch.distributed is not initialised, or the state is already initialised (an
            AssertionError).

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
    """Destroy the groups that the default state created, and set all its globals to None."""
    current.default.destroy()


def tensor_parallel_is_initialized() -> bool:
    """Return whether the groups of all four dims exist."""
    values = current.get().values
    return all(values[group] is not None for _, group, _ in _GROUPS.values())


# ---- groups, ranks and sizes --------------------------------------------------------------------


def _held(dim: str, what: int = 0) -> Any:
    """Return the calling rank's group over a dim, or with `what=1` the ranks of the group."""
    words, *names = _GROUPS[dim]
    value = current.get().read(names[what])
    if value is None:
        raise StateError(
            f"{words.replace('_', ' ')} group is not initialized: {names[what]} is None; call "
            f"initialize_tensor_parallel() first, or use() a state that "
            f"TensorParallelState.create() returned"
        )
    return value


def get_tensor_parallel_group() -> ProcessGroup:
    """Return the calling rank's tensor parallel group."""
    return _held("tp")


def get_tensor_parallel_ranks() -> list[int]:
    """Return the ranks of the calling rank's tensor parallel group."""
    return _held("tp", 1)


def get_tensor_parallel_world_size() -> int:
    """Return the size of the calling rank's tensor parallel group, or 1 without a group."""
    group = current.get().read("_TENSOR_PARALLEL_GROUP")
    return 1 if group is None else group.size()


def get_tensor_parallel_rank() -> int:
    """Return the calling rank's position in its tensor parallel group, or 0 without a group."""
    group = current.get().read("_TENSOR_PARALLEL_GROUP")
    return 0 if group is None else group.rank()


def get_pipeline_parallel_group() -> ProcessGroup:
    """Return the calling rank's pipeline parallel group."""
    return _held("pp")


def get_pipeline_parallel_ranks() -> list[int]:
    """Return the ranks of the calling rank's pipeline parallel group."""
    return _held("pp", 1)


def get_pipeline_parallel_world_size() -> int:
    """Return the size of the calling rank's pipeline parallel group."""
    return _held("pp").size()


def get_pipeline_parallel_rank() -> int:
    """Return the position of the calling rank in its pipeline parallel group."""
    return _held("pp").rank()


def get_context_parallel_group() -> ProcessGroup:
    """Return the calling rank's context parallel group."""
    return _held("cp")


def get_context_parallel_ranks() -> list[int]:
    """Return the ranks of the calling rank's context parallel group."""
    return _held("cp", 1)


def get_context_parallel_world_size() -> int:
    """Return the size of the calling rank's context parallel group."""
    return _held("cp").size()


def get_context_parallel_rank() -> int:
    """Return the position of the calling rank in its context parallel group."""
    return _held("cp").rank()


def get_data_parallel_group() -> ProcessGroup:
    """Return the calling rank's data parallel group."""
    return _held("dp")


def get_data_parallel_ranks() -> list[int]:
    """Return the ranks of the calling rank's data parallel group."""
    return _held("dp", 1)


def get_data_parallel_world_size() -> int:
    """Return the size of the calling rank's data parallel group."""
    return _held("dp").size()


def get_data_parallel_rank() -> int:
    """Return the position of the calling rank in its data parallel group."""
    return _held("dp").rank()


def get_tensor_parallel_src_rank() -> int:
    """Return the first rank of the calling rank's tensor parallel group."""
    size = get_tensor_parallel_world_size()
    return dist.get_rank() // size * size


# ---- arithmetic ---------------------------------------------------------------------------------


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Raise unless `denominator` divides `numerator`.

    Raises:
        ConfigurationError: `denominator` does not divide `numerator` (an AssertionError).

    Example:
        >>> ensure_divisibility(7, 2)
        Traceback (most recent call last):
            ...
        hypercomm.errors.ConfigurationError: 7 is not divisible by 2
    """
    if denominator == 0 or numerator % denominator != 0:
        raise ConfigurationError(f"{numerator} is not divisible by {denominator}")


def divide_and_check_no_remainder(numerator: int, denominator: int) -> int:
    """Return `numerator` divided by `denominator`. Raise if there is a remainder.

    Raises:
        ConfigurationError: `denominator` does not divide `numerator` (an AssertionError).

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
        tensor: A tensor with at least one dim.
        num_partitions: The number of parts, which must divide the length of the last dim.
        contiguous_split_chunks: Whether to copy parts that are not contiguous.

    Returns:
        The parts, as views of the tensor or as copies.

    Raises:
        ConfigurationError: `num_partitions` does not divide the last dim (an AssertionError).

    Example:
        >>> [part.tolist() for part in split_tensor_along_last_dim(torch.arange(6), 3)]
        [[0, 1], [2, 3], [4, 5]]
    """
    size = divide_and_check_no_remainder(tensor.size(-1), num_partitions)
    parts = torch.split(tensor, size, dim=-1)
    return tuple(part.contiguous() for part in parts) if contiguous_split_chunks else parts


tp = sys.modules[__name__]
current.bind(tp, _GLOBALS)
