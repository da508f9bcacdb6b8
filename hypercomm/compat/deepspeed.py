"""Provides DeepSpeed with an `mpu` for a grid, and with a `ProcessTopology` for a layout.

Only `process_topology` imports DeepSpeed.
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypercomm.errors import LayoutError, RankOutsideError
from hypercomm.grid.view import GridView
from hypercomm.layout import RankGroups, RankLayout
from hypercomm.layout.parsing import as_dims
from hypercomm.layout.text import short_repr
from hypercomm.process_groups.spec import GroupRequest
from hypercomm.transfers.mapping import roles_of

__all__ = ["Mpu", "process_topology", "topology_axes"]

Dims = str | Iterable[str] | None
"""The dim or dims of one kind of parallelism (a role, such as dp). None stands for no dims."""

_ALONE = "deepspeed.alone"
"""The name of the groups for roles without dims. Each of these groups has one rank."""


_SPANS = (("tp",), ("pp",), ("tp", "pp"), ("dp",), ("sp",), ("sp", "dp"))
"""The roles of each group, in the order of creation. A group spans the dims of its roles."""


def _read_roles(layout: RankLayout, given: Mapping[str, Dims]) -> dict[str, tuple[str, ...]]:
    """Return the dims of each role, without dims that the layout does not have.

    Args:
        layout: The layout with the dims.
        given: The dims of each role, by the name of the argument.

    Returns:
        The dims of each role, in the order of the layout.

    Raises:
        LayoutError: An argument does not name dims, a dim has two roles, or a dim larger than 1 has
            no role.

    Example:
        >>> layout = RankLayout("tp=2,cp=2,dp=4")
        >>> _read_roles(layout, {"tp": "tp", "pp": "pp", "dp": ["dp", "cp"]})
        {'tp': ('tp',), 'pp': (), 'dp': ('cp', 'dp')}
    """
    named = {part: () if dims is None else as_dims(dims) for part, dims in given.items()}
    part_of = roles_of((f"{part}=", name) for part, names in named.items() for name in names)
    for name, size in layout.sizes.items():
        if size > 1 and name not in part_of:
            parts = ", ".join(f"{part}={short_repr(dims)}" for part, dims in given.items())
            raise LayoutError(
                f"dim {name!r} of size {size} has no role in {parts}, so DeepSpeed would not "
                f"keep the weights of its ranks equal; add it to a role, as in dp=('dp', {name!r})"
            )
    return {
        part: tuple(name for name in layout.dim_names if name in names)
        for part, names in named.items()
    }


class Mpu:
    """An `mpu` for DeepSpeed, whose methods return the process groups of a grid.

    An `Mpu` creates the groups that the grid lacks. If the creation fails, none of these groups
    exist. All ranks of the grid must create the `Mpu` and other process groups in the same order.
    The grid owns the groups. The methods look the groups up in the grid. They raise if
    the grid is destroyed, and they raise RankOutsideError on ranks outside the grid. The model
    parallel groups span tp x pp. ZeRO shards and reduces over sp x dp, but divides the sum by the
    size of dp. Therefore, each sp rank must return only its part of the loss.

    DeepSpeed derives some groups itself. For the groups of its MoE layers, tp must vary fastest,
    and pp must vary slowest. ZeRO-3 shards over dp alone, unless the sequence data parallel
    group is passed to `deepspeed.zero.Init(data_parallel_group=...)`.

    Args:
        grid: A grid, or a view of one.
        tp: The dim or dims of tensor parallelism. Dims that the grid does not have count as dims of
            size 1.
        pp: The dim or dims of pipeline stages.
        dp: The dim or dims of replicas, which process different data.
        sp: The dim or dims along which each sequence is split (Ulysses).

    Attributes:
        grid: The grid.
        roles: The dims of each role, by the name of the argument.

    Raises:
        LayoutError: An argument does not name dims, a dim has two roles, or a dim larger than 1 has
            no role.
        CreationError, GroupOptionsError, NotInitializedError, GridDestroyedError: `create_pgs`
            raised this error. No group was created.

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
    at 4efb479, `megatron/core/parallel_state.py`. There is no `initialize_sequence_parallel`,
    because DeepSpeed assumes that an mpu with this function has no model parallelism.
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
        self.grid = grid
        given = {"tp": tp, "pp": pp, "dp": dp, "sp": sp}
        self.roles: Mapping[str, tuple[str, ...]] = _read_roles(grid.layout, given)
        held = {(key.dims, key.name) for key in grid.pgs}
        missing = [
            GroupRequest(dims, name=name, derive=_each_alone if name else None)
            for dims, name in dict.fromkeys(map(self._key, _SPANS))
            if (dims, name) not in held
        ]
        grid.create_pgs(missing, share="identical")

    def _find(self, *roles: str) -> ProcessGroup:
        """Return the calling rank's group over the dims of some roles."""
        dims, name = self._key(roles)
        group = self.grid.get_pg(dims, name=name)
        if group is None:
            raise RankOutsideError(
                f"rank {dist.get_rank()} is not in the grid {self.grid.layout}, so it is in none "
                f"of the grid's groups; call grid.is_current_rank_in_grid() first"
            )
        return group

    def _key(self, parts: tuple[str, ...]) -> tuple[tuple[str, ...], str | None]:
        """Return the dims and the name of a group. Without dims, each rank has its own group."""
        names = {name for part in parts for name in self.roles[part]}
        dims = tuple(name for name in self.grid.dim_names if name in names)
        return (dims, None) if dims else (tuple(self.grid.dim_names[:1]), _ALONE)

    def get_tensor_model_parallel_group(self) -> ProcessGroup:
        """Return the calling rank's tp group."""
        return self._find("tp")

    def get_tensor_model_parallel_rank(self) -> int:
        """Return the calling rank's position in its tp group."""
        return self._find("tp").rank()

    def get_tensor_model_parallel_world_size(self) -> int:
        """Return the size of the tp group."""
        return self._find("tp").size()

    def get_tensor_model_parallel_src_rank(self) -> int:
        """Return the first rank of the tp group."""
        return dist.get_process_group_ranks(self._find("tp"))[0]

    def get_pipeline_model_parallel_group(self) -> ProcessGroup:
        """Return the calling rank's pp group."""
        return self._find("pp")

    def get_pipeline_model_parallel_rank(self) -> int:
        """Return the calling rank's position in its pp group."""
        return self._find("pp").rank()

    def get_pipeline_model_parallel_world_size(self) -> int:
        """Return the size of the pp group."""
        return self._find("pp").size()

    def get_pipeline_model_parallel_src_rank(self) -> int:
        """Return the first rank of the pp group."""
        return dist.get_process_group_ranks(self._find("pp"))[0]

    def get_model_parallel_group(self) -> ProcessGroup:
        """Return the calling rank's tp x pp group."""
        return self._find("tp", "pp")

    def get_model_parallel_rank(self) -> int:
        """Return the calling rank's position in its tp x pp group."""
        return self._find("tp", "pp").rank()

    def get_model_parallel_world_size(self) -> int:
        """Return the size of the tp x pp group."""
        return self._find("tp", "pp").size()

    def get_model_parallel_src_rank(self) -> int:
        """Return the first rank of the tp x pp group."""
        return dist.get_process_group_ranks(self._find("tp", "pp"))[0]

    def get_data_parallel_group(self) -> ProcessGroup:
        """Return the calling rank's dp group."""
        return self._find("dp")

    def get_data_parallel_rank(self) -> int:
        """Return the calling rank's position in its dp group."""
        return self._find("dp").rank()

    def get_data_parallel_world_size(self) -> int:
        """Return the size of the dp group."""
        return self._find("dp").size()

    def get_data_parallel_src_rank(self) -> int:
        """Return the first rank of the dp group."""
        return dist.get_process_group_ranks(self._find("dp"))[0]

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Return the ranks of the calling rank's dp group."""
        return dist.get_process_group_ranks(self._find("dp"))

    def get_sequence_parallel_group(self) -> ProcessGroup:
        """Return the calling rank's sp group."""
        return self._find("sp")

    def get_sequence_parallel_rank(self) -> int:
        """Return the calling rank's position in its sp group."""
        return self._find("sp").rank()

    def get_sequence_parallel_world_size(self) -> int:
        """Return the size of the sp group."""
        return self._find("sp").size()

    def get_sequence_parallel_src_rank(self) -> int:
        """Return the first rank of the sp group."""
        return dist.get_process_group_ranks(self._find("sp"))[0]

    def get_sequence_data_parallel_group(self) -> ProcessGroup:
        """Return the calling rank's sp x dp group."""
        return self._find("sp", "dp")

    def get_sequence_data_parallel_rank(self) -> int:
        """Return the calling rank's position in its sp x dp group."""
        return self._find("sp", "dp").rank()

    def get_sequence_data_parallel_world_size(self) -> int:
        """Return the size of the sp x dp group."""
        return self._find("sp", "dp").size()

    def get_sequence_data_parallel_src_rank(self) -> int:
        """Return the first rank of the sp x dp group."""
        return dist.get_process_group_ranks(self._find("sp", "dp"))[0]

    get_slice_parallel_group = get_tensor_model_parallel_group
    get_slice_parallel_rank = get_tensor_model_parallel_rank
    get_slice_parallel_world_size = get_tensor_model_parallel_world_size
    get_slice_parallel_src_rank = get_tensor_model_parallel_src_rank
    get_pipe_parallel_group = get_pipeline_model_parallel_group
    get_pipe_parallel_rank = get_pipeline_model_parallel_rank
    get_pipe_parallel_world_size = get_pipeline_model_parallel_world_size
    get_pipe_parallel_src_rank = get_pipeline_model_parallel_src_rank

    def model_parallel_is_initialized(self) -> bool:
        """Return whether the groups exist, which is true until the grid is destroyed."""
        return not self.grid.is_destroyed

    sequence_parallel_is_initialized = model_parallel_is_initialized
    sequence_data_parallel_is_initialized = model_parallel_is_initialized


def _each_alone(groups: RankGroups) -> RankGroups:
    return groups.chunks(1)


# ---- topology -----------------------------------------------------------------------------------

_AXES = {"pp": "pipe", "dp": "data", "tp": "model"}
"""DeepSpeed's axis for each role. DeepSpeed needs "pipe" and "data", even with size 1."""


def topology_axes(
    layout: RankLayout | GridView, *, pp: Dims = "pp", dp: Dims = "dp", tp: Dims = "tp"
) -> dict[str, int]:
    """Return the axes along which DeepSpeed numbers a layout's ranks. The LAST axis varies fastest.

    Args:
        layout: A layout or a grid. Its ranks must start at 0 and have no gaps.
        pp: The dim, or neighbouring dims, of DeepSpeed's axis "pipe". Dims that the layout does not
            have count as dims of size 1.
        dp: The dim, or neighbouring dims, of the axis "data".
        tp: The dim, or neighbouring dims, of the axis "model". If the layout has none of
            these dims, there is no axis "model".

    Returns:
        The size of each axis, in DeepSpeed's order, which is the reversed order of the layout.

    Raises:
        LayoutError: The ranks do not start at 0, have gaps or are in another order, the dims of an
            axis are not adjacent, a dim has two roles, or a dim larger than 1 has no role.

    Example:
        Rank = tp * 1 + dp * 2 + pp * 8, so DeepSpeed's slowest axis is the pipeline.

        >>> topology_axes(RankLayout("tp=2,dp=4,pp=3"))
        {'pipe': 3, 'data': 4, 'model': 2}
        >>> topology_axes(RankLayout("pp=2,cp=2,dp=4"), dp=["dp", "cp"])
        {'data': 8, 'pipe': 2}
        >>> topology_axes(RankLayout("dp=4"))
        {'pipe': 1, 'data': 4}
    """
    layout = layout.layout if isinstance(layout, GridView) else RankLayout(layout)
    roles = _read_roles(layout, {"pp": pp, "dp": dp, "tp": tp})
    axes = {_AXES[part]: dims for part, dims in roles.items() if dims or part != "tp"}
    sizes = {axis: math.prod(map(layout.size_of, dims)) for axis, dims in axes.items()}
    groups = {axis: layout.groups(*dims) for axis, dims in axes.items() if dims}
    for slowest_first in itertools.permutations(axes):
        numbering = RankLayout({axis: sizes[axis] for axis in reversed(slowest_first)})
        if all(numbering.groups(axis) == groups[axis] for axis in groups):
            return {axis: sizes[axis] for axis in slowest_first}
    raise LayoutError(
        f"DeepSpeed numbers ranks from 0 on without gaps, and cannot number {layout!r} along "
        f"{axes}; use a layout of the whole world in which the dims of each axis are neighbours"
    )


def process_topology(
    layout: RankLayout | GridView, *, pp: Dims = "pp", dp: Dims = "dp", tp: Dims = "tp"
) -> Any:
    """Return a layout as a DeepSpeed ProcessTopology, for `PipelineModule(topology=)`.

    DeepSpeed creates the process groups of the pipeline itself. If a grid has also created a group
    over the same ranks, two groups exist for these ranks.

    Args:
        layout: A layout or a grid of the whole world.
        pp: The dim, or neighbouring dims, of DeepSpeed's axis "pipe".
        dp: The dim, or neighbouring dims, of the axis "data".
        tp: The dim, or neighbouring dims, of the axis "model".

    Returns:
        A `deepspeed.runtime.pipe.topology.ProcessTopology`.

    Raises:
        LayoutError: `topology_axes` cannot find axes for the layout.
        ImportError: DeepSpeed cannot be imported.

    Example:
        >>> layout = RankLayout("tp=2,dp=4,pp=3")
        >>> topology = process_topology(layout)  # doctest: +SKIP
        >>> topology.get_coord(21), layout.coords(21)  # doctest: +SKIP
        (ProcessCoord(pipe=2, data=2, model=1), {'tp': 1, 'dp': 2, 'pp': 2})

    Source: DeepSpeed 0.19.8, `deepspeed/runtime/pipe/topology.py`.
    """
    axes = topology_axes(layout, pp=pp, dp=dp, tp=tp)
    module = importlib.import_module("deepspeed.runtime.pipe.topology")
    return module.ProcessTopology(axes=list(axes), dims=list(axes.values()))
