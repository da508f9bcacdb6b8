"""`ezpz.tp` on a grid: its functions, and its globals, which can be read and written.

`initialize_tensor_parallel` fills and `destroy_tensor_parallel` empties the default
`TensorParallelState`. All other functions, and the globals, act on the current one: that of a
`with use(state):` block, else the default.

Source: names, signatures and behaviour follow `ezpz.tp`, and through it fairscale's
`fairscale.nn.model_parallel.initialize`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
import warnings
from collections.abc import Callable, Mapping
from datetime import timedelta
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypercomm.compat.module_state import CurrentState, ModuleState, name_functions
from hypercomm.errors import ConfigurationError, HyperCommError, LayoutError, StateError
from hypercomm.grid import HyperCommGrid
from hypercomm.layout import RankGroups, RankLayout
from hypercomm.layout.checks import as_int, positive
from hypercomm.layout.parsing import misfit
from hypercomm.layout.text import shown

if TYPE_CHECKING:
    from typing_extensions import Self

Answer = TypeVar("Answer")
logger = logging.getLogger(__name__)

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


class _Row(NamedTuple):
    """The groups over one dim, and the globals of the calling rank's group and its ranks."""

    dim: str
    prefix: str
    group: str
    ranks: str

    @property
    def words(self) -> str:
        """The name of the groups in messages."""
        return f"{self.prefix} parallel"

    @property
    def backend(self) -> str:
        """The argument with their backend."""
        return f"{self.prefix}_parallel_backend"


_DIMS = ("tp", "cp", "pp", "dp")
"""The dims of the grid; the first varies fastest."""

# In the order of creation.
_TABLE = {
    row.dim: row
    for row in (
        _Row("dp", "data", "_DATA_PARALLEL_GROUP", "_DATA_PARALLEL_RANKS"),
        _Row("tp", "tensor", "_TENSOR_PARALLEL_GROUP", "_TENSOR_PARALLEL_RANKS"),
        _Row("pp", "pipeline", "_PIPELINE_PARALLEL_GROUP", "_PIPELINE_PARALLEL_RANKS"),
        _Row("cp", "context", "_CONTEXT_PARALLEL_GROUP", "_CONTEXT_PARALLEL_GROUP_RANKS"),
    )
}
"""For each dim the word in its functions and arguments, and its globals."""

_GLOBALS = [name for row in _TABLE.values() for name in (row.group, row.ranks)]
"""Every global of ezpz.tp."""

_SIZES = {dim: f"{_TABLE[dim].prefix}_parallel_size" for dim in ("tp", "cp", "pp")}
_ARGUMENTS = {*_SIZES.values(), *(row.backend for row in _TABLE.values())}


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
            arguments: Those of `initialize_tensor_parallel`, by name.

        Raises:
            AssertionError: As for `initialize_tensor_parallel`.
        """
        state = cls()
        state.initialize(**arguments)
        return state

    def initialize(self, *, timeout: timedelta | None = None, **choices: Any) -> None:
        """Create the groups of all dims; a failure leaves everything unchanged.

        Raises:
            AssertionError: As for `initialize_tensor_parallel`.
        """
        unknown = sorted(choices.keys() - _ARGUMENTS)
        if unknown:
            raise TypeError(f"unknown argument {unknown[0]!r}; there are {sorted(_ARGUMENTS)}")
        if not dist.is_initialized():
            raise StateError(
                "torch.distributed is not initialised; call torch.distributed.init_process_group()"
            )
        try:
            self._create(_fitting_layout(choices), choices, timeout)
        except HyperCommError as error:
            if isinstance(error, AssertionError):
                raise
            raise ConfigurationError(str(error)) from error

    def _create(
        self, layout: RankLayout, choices: Mapping[str, Any], timeout: timedelta | None
    ) -> None:
        taken = [name for name in _GLOBALS if self.values[name] is not None]
        if taken:
            raise StateError(
                f"tensor parallel is already initialized: {taken[0]} is set; call "
                f"destroy_tensor_parallel() first, or hold a second state with "
                f"TensorParallelState.create() and use()"
            )
        backends = {row.dim: choices.get(row.backend) for row in _TABLE.values()}
        if dist.group.WORLD is None:  # torch.distributed is a mock of a unit test
            groups = [
                _by_new_group(layout.groups(dim), backend, timeout)
                for dim, backend in backends.items()
            ]
        else:
            grid = HyperCommGrid.from_layout(layout, name="ezpz.tp", cover="exact")
            requests = [{"dims": dim, "backend": backend} for dim, backend in backends.items()]
            try:
                groups = grid.create_pgs(requests, timeout=timeout)
            except BaseException:
                grid.destroy()
                raise
            self.grid = grid
        for row, group in zip(_TABLE.values(), groups, strict=True):
            ranks = list(layout.groups(row.dim).of(dist.get_rank()))
            self.fill({row.group: group, row.ranks: ranks})
        current.keep(self)

    def destroy(self) -> None:
        """Destroy the groups that the state created, and empty it; may be called twice."""
        grid, self.grid = self.grid, None
        self.reset()
        current.drop(self)
        if grid is not None:
            grid.destroy()

    def require(self, name: str, words: str) -> Any:
        """Return the value of a global that is set.

        Raises:
            StateError: It is None (an AssertionError).
        """
        value = self.read(name)
        if value is None:
            raise StateError(
                f"{words} group is not initialized: {name} is None; call "
                f"initialize_tensor_parallel() first, or make the state in use with "
                f"TensorParallelState.create()"
            )
        return value


def _by_new_group(
    groups: RankGroups, backend: str | None, timeout: timedelta | None
) -> ProcessGroup | None:
    """Create groups one after the other, and return the calling rank's."""
    own, rank = None, dist.get_rank()
    for ranks in groups:
        group = dist.new_group(list(ranks), backend=backend, timeout=timeout)
        own = group if rank in ranks else own
    return own


def _fitting_layout(choices: Mapping[str, Any]) -> RankLayout:
    """Return the layout of checked sizes, with the remaining ranks along dp."""
    world_size = dist.get_world_size()
    sizes = {name: positive(choices.get(name, 1), name) for name in _SIZES.values()}
    wanted = sizes[_SIZES["tp"]]
    if wanted > world_size:
        warnings.warn(
            f"{_SIZES['tp']}={wanted} is larger than the world of {world_size} ranks; "
            f"using {world_size}",
            stacklevel=4,
        )
        sizes[_SIZES["tp"]] = world_size
    problem = misfit(sizes, world_size)
    if problem is not None:
        raise ConfigurationError(problem)
    layout = RankLayout([*sizes.values(), world_size // math.prod(sizes.values())], _DIMS)
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
    """Return whether the groups of all four dims are there."""
    state = current.get()
    return all(state.values[row.group] is not None for row in _TABLE.values())


# ---- groups, ranks and sizes --------------------------------------------------------------------


def _itself(held: Any) -> Any:
    return held


def _asks(
    what: str, fact: Callable[[Any], Answer], of: Callable[[_Row], str] = attrgetter("group")
) -> Callable[..., Callable[[], Answer]]:
    """Return a factory of getters, which takes a dim."""

    def make(dim: str, otherwise: Answer | None = None) -> Callable[[], Answer]:
        row = _TABLE[dim]

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
current.bind(sys.modules[__name__], _GLOBALS)
