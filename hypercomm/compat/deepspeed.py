"""DeepSpeed on a grid: an `mpu`, and a `ProcessTopology` made from a layout.

DeepSpeed itself is imported only when a topology is made.
"""

from __future__ import annotations

import importlib
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypercomm.compat.module_state import name_functions
from hypercomm.errors import LayoutError, RankOutsideError
from hypercomm.grid.view import GridView
from hypercomm.layout import RankGroups, RankLayout
from hypercomm.layout.parsing import as_dims
from hypercomm.layout.text import short_repr
from hypercomm.process_groups.spec import GroupRequest
from hypercomm.transfers.mapping import roles_of

__all__ = ["Mpu", "process_topology", "topology_axes"]

Dims = str | Iterable[str] | None
"""The dims of a role: one, several, or none."""

_ALONE = "deepspeed.alone"
"""The name of the group of one rank, for roles without dims."""


_NAMES = {
    "tensor_model": ("tp",),
    "slice": ("tp",),
    "pipeline_model": ("pp",),
    "pipe": ("pp",),
    "model": ("tp", "pp"),
    "data": ("dp",),
    "sequence": ("sp",),
    "sequence_data": ("sp", "dp"),
}
"""The roles that make a group, by DeepSpeed's names of it."""

_FACTS: dict[str, tuple[str, Callable[[ProcessGroup], Any]]] = {
    "group": ("the calling rank's", lambda group: group),
    "rank": ("the calling rank's position in its", lambda group: group.rank()),
    "world_size": ("the size of the", lambda group: group.size()),
    "src_rank": ("the first rank of the", lambda group: dist.get_process_group_ranks(group)[0]),
}
"""What DeepSpeed asks about a group, with the words for it."""


def _method(roles: tuple[str, ...], fact: str) -> Callable[[Mpu], Any]:
    words, answer = _FACTS[fact]

    def get(self: Mpu) -> Any:
        return answer(self._find(roles))

    get.__doc__ = f"Return {words} {' x '.join(roles)} group."
    return get


def _read_roles(layout: RankLayout, given: Mapping[str, Dims]) -> dict[str, tuple[str, ...]]:
    """Return the dims of each role; dims that the layout lacks have size 1 and are left out.

    Args:
        layout: The layout with the dims.
        given: The dims of each role, by the name of the argument.

    Returns:
        For each role its dims, in the order of the layout.

    Raises:
        LayoutError: An argument is not a dim, a dim has two roles, or one larger than 1 has none.

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
                f"keep its ranks equal; name it in one, as in dp=('dp', {name!r})"
            )
    return {
        part: tuple(name for name in layout.dim_names if name in names)
        for part, names in named.items()
    }


class Mpu:
    """A grid's process groups under the names that DeepSpeed asks an `mpu` for.

    Every rank of the grid must make one, in the same order as its other groups. Missing groups are
    created, all or none. The grid owns them, and each method looks them up in it, so it raises
    after the grid is destroyed, and on ranks outside (RankOutsideError). Model parallel is tp x pp.
    ZeRO shards and reduces over sp x dp, and divides by dp alone, so that the losses of the sp
    ranks are parts of one.

    DeepSpeed derives some groups itself. For the groups of its MoE layers tp must be the fastest
    dim and pp the slowest. ZeRO-3 shards over dp alone, unless
    `deepspeed.zero.Init(data_parallel_group=...)` is given the sequence data parallel group.

    Args:
        grid: A grid, or a view of one.
        tp: The dim, or dims, over which tensors are split. A dim that the grid lacks has size 1.
        pp: The same of pipeline stages.
        dp: The same of replicas, each with different data.
        sp: The same of parts of a sequence (Ulysses).

    Attributes:
        grid: The grid.
        roles: The dims of each role, by argument.

    Raises:
        LayoutError: An argument is not a dim, a dim has two roles, or one larger than 1 has none.
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
    makes DeepSpeed treat an mpu as one without model parallel.
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
            for dims, name in dict.fromkeys(map(self._key, _NAMES.values()))
            if (dims, name) not in held
        ]
        grid.create_pgs(missing, share="identical")

    def _find(self, parts: tuple[str, ...]) -> ProcessGroup:
        """Return the calling rank's group over the dims of some roles."""
        dims, name = self._key(parts)
        group = self.grid.get_pg(dims, name=name)
        if group is None:
            raise RankOutsideError(
                f"rank {dist.get_rank()} is not in the grid {self.grid.layout}, and has no groups "
                f"of it; call grid.is_current_rank_in_grid() first"
            )
        return group

    def _key(self, parts: tuple[str, ...]) -> tuple[tuple[str, ...], str | None]:
        """Return the dims and the name of a group; without dims each rank is a group."""
        names = {name for part in parts for name in self.roles[part]}
        dims = tuple(name for name in self.grid.dim_names if name in names)
        return (dims, None) if dims else (tuple(self.grid.dim_names[:1]), _ALONE)

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Callable[[], Any]:
            """Return a method that is generated below the class."""

    def get_data_parallel_group_ranks(self) -> list[int]:
        """Return the ranks of the calling rank's dp group."""
        return dist.get_process_group_ranks(self._find(_NAMES["data"]))

    def model_parallel_is_initialized(self) -> bool:
        """Return whether the groups exist: until the grid is destroyed."""
        return not self.grid.is_destroyed

    sequence_parallel_is_initialized = model_parallel_is_initialized
    sequence_data_parallel_is_initialized = model_parallel_is_initialized


def _each_alone(groups: RankGroups) -> RankGroups:
    return groups.chunks(1)


for _name, _roles in _NAMES.items():
    for _fact in _FACTS:
        setattr(Mpu, f"get_{_name}_parallel_{_fact}", _method(_roles, _fact))
name_functions(vars(Mpu), __name__, "Mpu.")


# ---- topology -----------------------------------------------------------------------------------

_AXES = {"pp": "pipe", "dp": "data", "tp": "model"}
"""DeepSpeed's names of the roles; it needs the first two, also with size 1."""


def topology_axes(
    layout: RankLayout | GridView, *, pp: Dims = "pp", dp: Dims = "dp", tp: Dims = "tp"
) -> dict[str, int]:
    """Return the axes that DeepSpeed numbers the ranks of a layout by, the LAST one fastest.

    Args:
        layout: A layout, or a grid, of ranks from 0 on without gaps.
        pp: The dim, or the neighbouring dims, that DeepSpeed's "pipe" is. A dim that the layout
            lacks has size 1.
        dp: The same of "data".
        tp: The same of "model"; a layout that has none gives no such axis.

    Returns:
        The size of each axis, in DeepSpeed's order, which is the layout's reversed.

    Raises:
        LayoutError: The ranks do not begin at 0, have gaps or another order; the dims of an
            axis are not adjacent; or as for `Mpu`.

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
        f"DeepSpeed cannot number the ranks of {layout!r}, from 0 on without gaps, along {axes}; "
        f"take a layout of the whole world in which the dims of each axis are neighbours"
    )


def process_topology(
    layout: RankLayout | GridView, *, pp: Dims = "pp", dp: Dims = "dp", tp: Dims = "tp"
) -> Any:
    """Make DeepSpeed's ProcessTopology of a layout, for `PipelineModule(topology=)`.

    DeepSpeed creates the process groups of the pipeline itself, so there are two groups over the
    same ranks if a grid of the same layout has created its own.

    Args:
        layout: A layout, or a grid, of the whole world.
        pp: The dim, or the neighbouring dims, that DeepSpeed's "pipe" is.
        dp: The same of "data".
        tp: The same of "model".

    Returns:
        A `deepspeed.runtime.pipe.topology.ProcessTopology`.

    Raises:
        LayoutError: As for `topology_axes`.
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
