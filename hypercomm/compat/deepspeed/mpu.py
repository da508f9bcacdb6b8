"""Mpu: the process groups of a grid under the names by which DeepSpeed asks for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypercomm.compat.deepspeed.roles import Dims, read_roles
from hypercomm.compat.module_state import name_functions
from hypercomm.errors import GroupMissingError, LayoutError, RankOutsideError
from hypercomm.grid.arguments import GroupArguments
from hypercomm.grid.grid import GridView
from hypercomm.layout import RankGroups
from hypercomm.layout.text import shown

Fact = TypeVar("Fact")
Asked = Callable[["Mpu"], Fact]

_GROUPS = (("tp",), ("pp",), ("dp",), ("sp",), ("sp", "dp"), ("tp", "pp"))
"""The parts that make a group: the last two are sequence data parallel and model parallel."""

_ALONE = "deepspeed.alone"
"""Names the group of one rank, for parts that no dim plays."""


def _asks(words: str, fact: Callable[[ProcessGroup], Fact]) -> Callable[..., Asked[Fact]]:
    """Make what makes methods: `parts` in, a method that answers for their group out."""

    def of(*parts: str) -> Asked[Fact]:
        def ask(self: Mpu) -> Fact:
            return fact(self._find(*parts))

        ask.__doc__ = f"Return {words} {' x '.join(parts)} group."
        return ask

    return of


_group = _asks("the calling rank's", lambda group: group)
_rank = _asks("the calling rank's place in its", lambda group: group.rank())
_world_size = _asks("the size of the", lambda group: group.size())
_group_ranks = _asks("the ranks of the calling rank's", dist.get_process_group_ranks)
_src_rank = _asks(
    "the first rank of the calling rank's", lambda group: dist.get_process_group_ranks(group)[0]
)


class Mpu:
    """A grid's process groups under the names that DeepSpeed asks an `mpu` for.

    Every rank of the grid must make one, in the same order as its other groups: those that are
    missing are created, all or none, those that exist are found. The grid owns them all, and each
    answer is looked up in it, so that it has none after the grid is destroyed, nor on ranks outside
    (a RankOutsideError). Model parallel is tp x pp. ZeRO shards and reduces over sp x dp, and
    divides by dp alone, so that the losses of the sp ranks are parts of one.

    DeepSpeed works some groups out by itself. Those of its MoE layers come from the sizes: let tp
    be the fastest dim for them, and pp the slowest. ZeRO-3 shards over dp alone, unless
    `deepspeed.zero.Init(data_parallel_group=...)` is given the sequence data parallel group.

    Args:
        grid: A grid, or a view of one.
        tp: The dim, or dims, over which tensors are split. A dim that the grid lacks has size 1.
        pp: The same of pipeline stages.
        dp: The same of replicas, which have data of their own.
        sp: The same of parts of a sequence (Ulysses).

    Attributes:
        grid: The grid.
        roles: The grid's dims that play each part, by argument.

    Raises:
        LayoutError: There is no grid, an argument names no dims, a dim plays two parts, or one that
            is larger than 1 plays none.
        CreationError, GroupOptionsError, NotInitializedError, GridDestroyedError: As for
            `create_pgs`; nothing was created.

    Example:
        >>> from hypercomm import HyperCommGrid
        >>> from hypercomm.testing import fake_world
        >>> with fake_world(16, rank=5), HyperCommGrid([2, 2, 4], ["tp", "cp", "dp"]) as grid:
        ...     mpu = Mpu(grid, sp="cp")  # deepspeed.initialize(model=..., mpu=mpu)
        ...     print(mpu.get_data_parallel_group_ranks(), mpu.get_model_parallel_world_size())
        ...     print(mpu.get_sequence_data_parallel_group() is grid.get_pg(["cp", "dp"]))
        [1, 5, 9, 13] 2
        True

    Source: DeepSpeed 0.19.8, `deepspeed/utils/groups.py` and `utils/bwc.py`, and Megatron-DeepSpeed
    at 4efb479, `megatron/core/parallel_state.py`. There is no `initialize_sequence_parallel`: it
    tells DeepSpeed that an mpu has no model parallel.
    """

    def __init__(
        self,
        grid: GridView,
        *,
        tp: Dims = "tp",
        pp: Dims = "pp",
        dp: Dims = "dp",
        sp: Dims = None,
    ) -> None:
        if not isinstance(grid, GridView):
            raise LayoutError(f"Mpu() takes a HyperCommGrid or a view of one, got {shown(grid)}")
        self.grid = grid
        roles = read_roles(grid.layout, {"tp": tp, "pp": pp, "dp": dp, "sp": sp})
        self.roles: Mapping[str, tuple[str, ...]] = MappingProxyType(roles)
        wanted = {self._dims(*parts): self._request(*parts) for parts in _GROUPS}
        missing = [request for request in wanted.values() if not self._has(request)]
        grid.create_pgs(missing, share="identical")

    def __repr__(self) -> str:
        roles = ", ".join(f"{part}={'+'.join(dims) or 1}" for part, dims in self.roles.items())
        return f"Mpu({roles}) of {self.grid.layout}"

    # ---- how groups are found -----------------------------------------------------------------

    def _find(self, *parts: str) -> ProcessGroup:
        """The calling rank's group over the dims that play some parts."""
        group = self._look_up(self._request(*parts))
        if group is None:
            raise RankOutsideError(
                f"rank {dist.get_rank()} is not in the grid {self.grid.layout}, and has no groups "
                f"of it; ask grid.is_current_rank_in_grid() first"
            )
        return group

    def _dims(self, *parts: str) -> tuple[str, ...]:
        names = {name for part in parts for name in self.roles[part]}
        return tuple(name for name in self.grid.dim_names if name in names)

    def _request(self, *parts: str) -> GroupArguments:
        """What the grid is asked for: without dims each rank is a group."""
        dims = self._dims(*parts)
        if dims:
            return {"dims": dims}
        return {"dims": self.grid.dim_names[0], "name": _ALONE, "derive": _each_alone}

    def _look_up(self, request: GroupArguments) -> ProcessGroup | None:
        return self.grid.get_pg(request["dims"], name=request.get("name"))

    def _has(self, request: GroupArguments) -> bool:
        try:
            self._look_up(request)
        except GroupMissingError:
            return False
        return True

    # ---- what DeepSpeed asks ------------------------------------------------------------------

    get_tensor_model_parallel_group = _group("tp")
    get_tensor_model_parallel_rank = _rank("tp")
    get_tensor_model_parallel_world_size = _world_size("tp")
    get_tensor_model_parallel_src_rank = _src_rank("tp")
    get_slice_parallel_group = _group("tp")
    get_slice_parallel_rank = _rank("tp")
    get_slice_parallel_world_size = _world_size("tp")

    get_pipeline_model_parallel_group = _group("pp")
    get_pipeline_model_parallel_rank = _rank("pp")
    get_pipeline_model_parallel_world_size = _world_size("pp")
    get_pipe_parallel_group = _group("pp")
    get_pipe_parallel_rank = _rank("pp")
    get_pipe_parallel_world_size = _world_size("pp")

    get_model_parallel_group = _group("tp", "pp")
    get_model_parallel_rank = _rank("tp", "pp")
    get_model_parallel_world_size = _world_size("tp", "pp")
    get_model_parallel_src_rank = _src_rank("tp", "pp")

    get_data_parallel_group = _group("dp")
    get_data_parallel_rank = _rank("dp")
    get_data_parallel_world_size = _world_size("dp")
    get_data_parallel_src_rank = _src_rank("dp")
    get_data_parallel_group_ranks = _group_ranks("dp")

    get_sequence_parallel_group = _group("sp")
    get_sequence_parallel_rank = _rank("sp")
    get_sequence_parallel_world_size = _world_size("sp")
    get_sequence_parallel_src_rank = _src_rank("sp")

    get_sequence_data_parallel_group = _group("sp", "dp")
    get_sequence_data_parallel_rank = _rank("sp", "dp")
    get_sequence_data_parallel_world_size = _world_size("sp", "dp")

    def model_parallel_is_initialized(self) -> bool:
        """Tell whether the groups are there, be it of one rank each, until the grid's end."""
        return not self.grid.is_destroyed

    sequence_parallel_is_initialized = model_parallel_is_initialized
    sequence_data_parallel_is_initialized = model_parallel_is_initialized


def _each_alone(groups: RankGroups) -> RankGroups:
    return groups.chunks(1)


name_functions(vars(Mpu), __name__, "Mpu.")
