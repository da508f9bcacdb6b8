"""TensorParallelState: one tensor parallel configuration of `ezpz.tp`, as a grid."""

from __future__ import annotations

import logging
import math
import warnings
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypercomm.compat import public_groups
from hypercomm.compat.module_state import CurrentState, ModuleState
from hypercomm.errors import ConfigurationError, HyperCommError, StateError
from hypercomm.grid import HyperCommGrid
from hypercomm.layout import RankLayout
from hypercomm.layout.checks import positive
from hypercomm.layout.parsing import misfit

if TYPE_CHECKING:
    from typing_extensions import Self

logger = logging.getLogger(__name__)


class Row(NamedTuple):
    """The groups over one dim: where the calling rank's is, and the ranks of it."""

    dim: str
    prefix: str
    group: str
    ranks: str

    @property
    def words(self) -> str:
        """What messages call the groups."""
        return f"{self.prefix} parallel"

    @property
    def backend(self) -> str:
        """The argument that has their backend."""
        return f"{self.prefix}_parallel_backend"


DIMS = ("tp", "cp", "pp", "dp")
"""The dims of the grid; the first varies fastest."""

# In the order of creation.
TABLE = {
    row.dim: row
    for row in (
        Row("dp", "data", "_DATA_PARALLEL_GROUP", "_DATA_PARALLEL_RANKS"),
        Row("tp", "tensor", "_TENSOR_PARALLEL_GROUP", "_TENSOR_PARALLEL_RANKS"),
        Row("pp", "pipeline", "_PIPELINE_PARALLEL_GROUP", "_PIPELINE_PARALLEL_RANKS"),
        Row("cp", "context", "_CONTEXT_PARALLEL_GROUP", "_CONTEXT_PARALLEL_GROUP_RANKS"),
    )
}
"""What stands for each dim: the words of its functions and arguments, and its globals."""

GLOBALS = [name for row in TABLE.values() for name in (row.group, row.ranks)]
"""Every global of ezpz.tp."""

_SIZES = {dim: f"{TABLE[dim].prefix}_parallel_size" for dim in ("tp", "cp", "pp")}
_ARGUMENTS = {*_SIZES.values(), *(row.backend for row in TABLE.values())}


class TensorParallelState(ModuleState):
    """One tensor parallel configuration: its grid, its groups, and the values of ezpz's globals.

    A new one is empty. It needs no global state: `create` makes one that stands for itself, and
    `use(state)` lets the functions of this module act on it within a `with` block.

    Attributes:
        grid: The grid over tp, cp, pp and dp, with tp fastest; None while it is empty.

    Example:
        >>> from hypercomm.testing import fake_world
        >>> with fake_world(8), TensorParallelState.create(tensor_parallel_size=2) as state:
        ...     print(state.grid.layout, state.grid.get_pg("dp").size())
        tp=2,cp=1,pp=1,dp=4 4
    """

    def __init__(self) -> None:
        super().__init__(dict.fromkeys(GLOBALS, lambda: None))
        self.grid: HyperCommGrid | None = None

    @classmethod
    def create(cls, **arguments: Any) -> Self:
        """Make a state of its own; every rank must call this, in the same order.

        Args:
            arguments: Those of `initialize_tensor_parallel`, by name.

        Raises:
            AssertionError: As for `initialize_tensor_parallel`.
        """
        state = cls()
        state.initialize(**arguments)
        return state

    def initialize(self, *, timeout: timedelta | None = None, **choices: Any) -> None:
        """Create the groups of all dims; a failure leaves everything as it was.

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
        taken = [name for name in GLOBALS if self.values[name] is not None]
        if taken:
            raise StateError(
                f"tensor parallel is already initialized: {taken[0]} is set; call "
                f"destroy_tensor_parallel() first, or hold a second state of its own with "
                f"TensorParallelState.create() and use()"
            )
        backends = {row.dim: choices.get(row.backend) for row in TABLE.values()}
        groups: Sequence[ProcessGroup | None]
        if public_groups.is_all_there_is():
            groups = [
                public_groups.create(layout.groups(dim), backend, timeout)
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
        for row, group in zip(TABLE.values(), groups, strict=True):
            ranks = list(layout.groups(row.dim).of(dist.get_rank()))
            self.fill({row.group: group, row.ranks: ranks})

    def destroy(self) -> None:
        """Destroy the groups that the state created, and empty it; may be called twice."""
        grid, self.grid = self.grid, None
        self.reset()
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


current: CurrentState[TensorParallelState] = CurrentState("ezpz.tp", TensorParallelState)
"""The state that the functions of this module act on."""


def _fitting_layout(choices: Mapping[str, Any]) -> RankLayout:
    """Check the sizes, and give what is left of the world to dp."""
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
    layout = RankLayout([*sizes.values(), world_size // math.prod(sizes.values())], DIMS)
    if dist.get_rank() == 0:
        logger.info("tensor parallel grid: %s", layout)
    return layout
