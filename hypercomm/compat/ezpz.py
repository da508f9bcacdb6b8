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

import contextlib
import inspect
import logging
import math
import sys
import warnings
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypercomm.compat import aliases
from hypercomm.compat.module_state import CurrentState, ModuleState, check_job, name_functions
from hypercomm.errors import ConfigurationError, HyperCommError, LayoutError, StateError
from hypercomm.grid import HyperCommGrid
from hypercomm.layout import RankLayout
from hypercomm.layout.checks import as_int, positive
from hypercomm.layout.parsing import misfit
from hypercomm.layout.text import shown

if TYPE_CHECKING:
    from typing_extensions import Self

    def __getattr__(name: str) -> Any:
        """Return a global, or a getter that is generated at the end of this module."""


__all__ = ["install", "tp"]

logger = logging.getLogger(__name__)

_GROUPS = {
    "dp": ("data parallel", "_DATA_PARALLEL_GROUP", "_DATA_PARALLEL_RANKS"),
    "tp": ("tensor parallel", "_TENSOR_PARALLEL_GROUP", "_TENSOR_PARALLEL_RANKS"),
    "pp": ("pipeline parallel", "_PIPELINE_PARALLEL_GROUP", "_PIPELINE_PARALLEL_RANKS"),
    "cp": ("context parallel", "_CONTEXT_PARALLEL_GROUP", "_CONTEXT_PARALLEL_GROUP_RANKS"),
}
"""For each dim, in the order of creation: the words for it, and its globals: group and ranks."""

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

    def __init__(self) -> None:
        super().__init__(dict.fromkeys(_GLOBALS, lambda: None))
        self.grid: HyperCommGrid | None = None

    @classmethod
    def create(cls, **arguments: Any) -> Self:
        """Return a new state; every rank must call this, in the same order.

        Args:
            arguments: The arguments of `initialize_tensor_parallel`, by name.

        Raises:
            AssertionError: As for `initialize_tensor_parallel`.
        """
        state = cls()
        state.initialize(**arguments)
        return state

    def initialize(self, **arguments: Any) -> None:
        """Create the groups of all dims; arguments and errors of `initialize_tensor_parallel`."""
        check_job()
        call = inspect.signature(initialize_tensor_parallel).bind(**arguments)
        call.apply_defaults()
        given = call.arguments
        sizes = {
            name: given[name]
            for name in ("tensor_parallel_size", "context_parallel_size", "pipeline_parallel_size")
        }
        backends = {
            dim: given[f"{words.replace(' ', '_')}_backend"] for dim, (words, *_) in _GROUPS.items()
        }
        timeout = given["timeout"]
        try:
            self._create(_fitting_layout(sizes), backends, timeout)
        except HyperCommError as error:
            if isinstance(error, AssertionError):
                raise
            raise ConfigurationError(str(error)) from error

    def _create(
        self, layout: RankLayout, backends: dict[str, str | None], timeout: timedelta | None
    ) -> None:
        taken = [name for name in _GLOBALS if self.values[name] is not None]
        if taken:
            raise StateError(
                f"tensor parallel is already initialized: {taken[0]} is set; call "
                f"destroy_tensor_parallel() first, or hold a second state with "
                f"TensorParallelState.create() and use()"
            )
        grid, rank = None, dist.get_rank()
        if dist.group.WORLD is None:  # a unit test has put a mock in the place of torch.distributed
            groups = [_by_new_group(layout, dim, backends[dim], timeout) for dim in _GROUPS]
        else:
            grid = HyperCommGrid(layout, name="ezpz.tp", cover="exact")
            requests = [{"dims": dim, "backend": backends[dim]} for dim in _GROUPS]
            try:
                groups = grid.create_pgs(requests, timeout=timeout)
            except BaseException:
                grid.destroy()
                raise
        self.grid = grid
        for (dim, (_, name, ranks)), group in zip(_GROUPS.items(), groups, strict=True):
            self.fill({name: group, ranks: list(layout.groups(dim).of(rank))})
        current.keep(self)

    def destroy(self) -> None:
        """Destroy the groups that the state created, and empty it; may be called twice."""
        grid, self.grid = self.grid, None
        self.reset()
        current.drop(self)
        if grid is not None:
            grid.destroy()


def _by_new_group(
    layout: RankLayout, dim: str, backend: str | None, timeout: timedelta | None
) -> ProcessGroup | None:
    """Create groups one after the other, and return the calling rank's."""
    own, rank = None, dist.get_rank()
    for ranks in layout.groups(dim):
        group = dist.new_group(list(ranks), backend=backend, timeout=timeout)
        own = group if rank in ranks else own
    return own


def _fitting_layout(sizes: dict[str, int]) -> RankLayout:
    """Return the layout of sizes of tp, cp and pp, with the remaining ranks along dp."""
    world_size = dist.get_world_size()
    sizes = {name: positive(size, name) for name, size in sizes.items()}
    if (wanted := sizes["tensor_parallel_size"]) > world_size:
        warnings.warn(
            f"tensor_parallel_size={wanted} is larger than the world of {world_size} ranks; "
            f"using {world_size}",
            stacklevel=4,
        )
        sizes["tensor_parallel_size"] = world_size
    problem = misfit(sizes, world_size)
    if problem is not None:
        raise ConfigurationError(problem)
    shape = [*sizes.values(), world_size // math.prod(sizes.values())]
    layout = RankLayout(shape, ["tp", "cp", "pp", "dp"])
    if dist.get_rank() == 0:
        logger.info("tensor parallel grid: %s", layout)
    return layout


current: CurrentState[TensorParallelState] = CurrentState("ezpz.tp", TensorParallelState)
"""The state that the functions of this module act on."""


def use(
    state: TensorParallelState,
) -> contextlib.AbstractContextManager[TensorParallelState]:
    """Make the getters and globals of this module act on `state` within a `with` block.

    The block is context-local, as that of `hypercomm.compat.megatron.parallel_state.use`.
    `initialize_tensor_parallel` and `destroy_tensor_parallel` always act on the default state.

    Raises:
        StateError: `state` is not a TensorParallelState.
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


def _getter(words: str, name: str, answer: Callable[[Any], Any], doc: str) -> Callable[[], Any]:
    """Return a getter of what a function answers about the value of a global."""

    def get() -> Any:
        value = current.get().read(name)
        if value is None:
            raise StateError(
                f"{words} group is not initialized: {name} is None; call "
                f"initialize_tensor_parallel() first, or make the state in use with "
                f"TensorParallelState.create()"
            )
        return answer(value)

    get.__doc__ = doc
    return get


def _getters() -> dict[str, Callable[[], Any]]:
    """Return the getters of the group, the ranks, the size and the position along each dim."""
    made = {}
    for words, group, ranks in _GROUPS.values():
        for what, name, answer, doc in [
            ("group", group, lambda held: held, f"Return the calling rank's {words} group."),
            ("ranks", ranks, lambda held: held, f"Return the ranks of the {words} group."),
            (
                "world_size",
                group,
                lambda held: held.size(),
                f"Return the size of the {words} group.",
            ),
            ("rank", group, lambda held: held.rank(), f"Return the rank in the {words} group."),
        ]:
            made[f"get_{words.replace(' ', '_')}_{what}"] = _getter(words, name, answer, doc)
    return made


def get_tensor_parallel_world_size() -> int:
    """Return the size of the tensor parallel group; 1 without one."""
    group = current.get().values["_TENSOR_PARALLEL_GROUP"]
    return 1 if group is None else int(group.size())


def get_tensor_parallel_rank() -> int:
    """Return the calling rank's position in its tensor parallel group; 0 without one."""
    group = current.get().values["_TENSOR_PARALLEL_GROUP"]
    return 0 if group is None else int(group.rank())


def get_tensor_parallel_src_rank() -> int:
    """Return the first rank of the calling rank's tensor parallel group."""
    size = get_tensor_parallel_world_size()
    return dist.get_rank() // size * size


# ---- arithmetic ---------------------------------------------------------------------------------


def ensure_divisibility(numerator: int, denominator: int) -> None:
    """Raise unless one number divides another.

    Raises:
        ConfigurationError: `denominator` does not divide `numerator`, or one of them is not an int
            (an AssertionError).

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
        ConfigurationError: The last dim cannot be split so (an AssertionError).

    Example:
        >>> [part.tolist() for part in split_tensor_along_last_dim(torch.arange(6), 3)]
        [[0, 1], [2, 3], [4, 5]]
    """
    if not isinstance(tensor, torch.Tensor) or tensor.dim() == 0:
        raise ConfigurationError(f"tensor must be a tensor with dims, got {shown(tensor)}")
    size = divide_and_check_no_remainder(tensor.size(-1), num_partitions)
    if num_partitions < 1:
        raise ConfigurationError(f"num_partitions must be at least 1, got {num_partitions}")
    parts = torch.split(tensor, size, dim=-1)
    return tuple(part.contiguous() for part in parts) if contiguous_split_chunks else parts


for _name, _function in _getters().items():
    globals().setdefault(_name, _function)
del _name, _function
tp = sys.modules[__name__]
name_functions(globals(), __name__)
current.bind(tp, _GLOBALS)
