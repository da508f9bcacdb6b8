"""`ezpz.tp`, tensor parallelism after fairscale's `initialize_model_parallel`, on a grid.

`initialize_tensor_parallel` fills and `destroy_tensor_parallel` empties the default
`TensorParallelState`. All other functions, and the globals, which can be read and written, act on
the current one: that of a `with use(state):` block, else the default.

The module is also importable as `tp` from itself: `from hypercomm.compat.ezpz import tp` is what
`from ezpz import tp` was.

Source: names, signatures and behaviour follow `ezpz.tp`, and through it fairscale's
`fairscale.nn.model_parallel.initialize`.
"""

from __future__ import annotations

import inspect
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hypercomm.compat import aliases
from hypercomm.compat.module_state import CurrentState, ModuleState, name_functions
from hypercomm.errors import ConfigurationError, HyperCommError, StateError
from hypercomm.grid import HyperCommGrid
from hypercomm.layout import RankLayout
from hypercomm.layout.checks import positive

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Return a global, or a getter that is generated at the end of this module."""


__all__ = ["install", "tp"]

_GROUPS = {
    "dp": ("data_parallel", "_DATA_PARALLEL_GROUP", "_DATA_PARALLEL_RANKS"),
    "tp": ("tensor_parallel", "_TENSOR_PARALLEL_GROUP", "_TENSOR_PARALLEL_RANKS"),
    "pp": ("pipeline_parallel", "_PIPELINE_PARALLEL_GROUP", "_PIPELINE_PARALLEL_RANKS"),
    "cp": ("context_parallel", "_CONTEXT_PARALLEL_GROUP", "_CONTEXT_PARALLEL_GROUP_RANKS"),
}
"""For each dim, in the order of creation: ezpz's name of it, and its globals: group and ranks."""

_GLOBALS = [name for _, *names in _GROUPS.values() for name in names]


def install() -> None:
    """Make `ezpz.tp` ours; other modules of ezpz, `ezpz.tp.layers` included, stay its own.

    Call it before `ezpz` is imported. It works with ezpz installed or not, and a second call
    changes nothing.

    Raises:
        StateError: `ezpz` was imported before; nothing was changed.

    Example:
        >>> install()
        >>> import ezpz.tp
        >>> ezpz.tp.__name__
        'hypercomm.compat.ezpz'
    """
    aliases.install({"ezpz.tp": __name__}, ("ezpz",), loaded="ezpz")


class TensorParallelState(ModuleState):
    """One tensor parallel configuration: its grid, its groups, and the values of ezpz's globals.

    A new one is empty. `create` returns one that needs no global state. Within a
    `with use(state):` block the functions of this module act on it.

    Attributes:
        grid: The grid over tp, cp, pp and dp, with tp fastest; None while it is empty.

    Example:
        >>> from hypercomm.testing import fake_world
        >>> with fake_world(8), TensorParallelState.create(tensor_parallel_size=2) as state:
        ...     print(state.grid.layout, state.grid.get_pg("dp").size())
        tp=2,cp=1,pp=1,dp=4 4
    """

    empty = dict.fromkeys(_GLOBALS, lambda: None)

    def initialize(self, **arguments: Any) -> None:
        """Create the groups of all dims; arguments and errors of `initialize_tensor_parallel`."""
        self.check_new(_GLOBALS, "destroy_tensor_parallel", lambda _: None)
        call = inspect.signature(initialize_tensor_parallel).bind(**arguments)
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
            self.fill({name: group, ranks: own[dim]})
        current.keep(self)


def _fitting_layout(given: dict[str, Any]) -> RankLayout:
    """Return the layout of sizes of tp, cp and pp, with the remaining ranks along dp."""
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
    """Create the groups of all dims, and fill the default state; every rank must call this.

    Ranks that differ in tp only are neighbours, then come cp, pp and dp; dp takes the remaining
    ranks of the world. A failure leaves nothing behind.

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
    """Return whether the groups of all four dims exist."""
    values = current.get().values
    return all(values[group] is not None for _, group, _ in _GROUPS.values())


# ---- groups, ranks and sizes --------------------------------------------------------------------

_ANSWERS: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "group": ("calling rank's group", lambda group: group),
    "ranks": ("ranks of the group", lambda ranks: ranks),
    "world_size": ("size of the group", lambda group: group.size()),
    "rank": ("calling rank's position in its group", lambda group: group.rank()),
}
"""What the getters return of a group, or of its ranks, with the words for it."""

_DEFAULTS = {"get_tensor_parallel_world_size": 1, "get_tensor_parallel_rank": 0}
"""The answers of getters that need no group."""


def _getter(kind: str, what: str, name: str) -> Callable[[], Any]:
    """Return a getter of what is known about the value of a global."""
    words, answer = _ANSWERS[what]
    default = _DEFAULTS.get(f"get_{kind}_{what}")

    def get() -> Any:
        value = current.get().read(name)
        if value is not None:
            return answer(value)
        if default is not None:
            return default
        raise StateError(
            f"{kind.replace('_', ' ')} group is not initialized: {name} is None; call "
            f"initialize_tensor_parallel() first, or make the state in use with "
            f"TensorParallelState.create()"
        )

    get.__doc__ = f"Return the {words}, {kind.replace('_', ' ')}."
    if default is not None:
        get.__doc__ += f" Without a group: {default}."
    return get


for _kind, _group, _ranks in _GROUPS.values():
    for _what in _ANSWERS:
        globals()[f"get_{_kind}_{_what}"] = _getter(
            _kind, _what, _ranks if _what == "ranks" else _group
        )


def get_tensor_parallel_src_rank() -> int:
    """Return the first rank of the calling rank's tensor parallel group."""
    size: int = tp.get_tensor_parallel_world_size()
    return dist.get_rank() // size * size


# ---- arithmetic ---------------------------------------------------------------------------------


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Raise unless one number divides another.

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
    """Return the quotient of two numbers, the second of which divides the first.

    Raises:
        ConfigurationError: It does not (an AssertionError).

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
        tensor: Of at least one dim; `num_partitions` divides the length of the last one.
        num_partitions: The number of parts.
        contiguous_split_chunks: Whether to copy parts that are not contiguous.

    Returns:
        Views of the tensor, or copies.

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
name_functions(globals(), __name__)
current.bind(tp, _GLOBALS)
