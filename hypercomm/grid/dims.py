"""GridDims: some dims of a grid, as the calling rank sees them."""

from __future__ import annotations

import os
from collections.abc import Callable
from numbers import Integral, Real
from typing import TYPE_CHECKING, overload
from weakref import WeakSet, ref

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hypercomm.errors import GroupMissingError, GroupOptionsError
from hypercomm.layout.groups import Place
from hypercomm.layout.text import shown
from hypercomm.process_groups import c10d, world

if TYPE_CHECKING:
    from hypercomm.grid.interface import GridInterface


@attrs.define(eq=False)
class _Here:
    """What is known in one job, until the grid changes; keeps no group alive."""

    job: Callable[[], ProcessGroup | None]
    changes: int
    place: Place
    group: Callable[[], ProcessGroup | None] = lambda: None


known: WeakSet[GridDims] = WeakSet()
"""Of this process."""


def _forget() -> None:
    for dims in [*known]:
        dims._here = None


os.register_at_fork(after_in_child=_forget)  # the groups are the parent's


class GridDims:
    """Some dims of a grid, as the calling rank sees them: `grid["tp"]`, `grid["dp", "cp"]`.

    Asks nobody, but for `group`, and what communicates over it.

    Attributes:
        dims: The dims, in the grid's order.

    Raises:
        RankOutsideError: From each question about the calling rank, if the grid does not hold it.

    Example:
        >>> from hypercomm import HyperCommGrid
        >>> from hypercomm.testing import fake_world
        >>> with fake_world(8, rank=5), HyperCommGrid("tp=2,dp=2,pp=2") as grid:
        ...     pp = grid["pp"]
        ...     print(pp.rank, pp.size, pp.ranks, pp.prev(), pp.next(), pp.is_last)
        ...     print(grid["tp", "dp"].group.size(), grid["tp+dp"].ranks)
        1 2 (1, 5) 1 None True
        4 (4, 5, 6, 7)
    """

    __slots__ = ("__weakref__", "_grid", "_here", "_size", "dims")

    def __init__(self, grid: GridInterface, dims: tuple[str, ...]) -> None:
        self._grid = grid
        self.dims = dims
        self._here: _Here | None = None
        self._size = -1, 0
        """At which change of the grid the size was looked up, and what it was."""
        known.add(self)

    # ---- where this rank is -------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """The position of the calling rank in its group."""
        here = self._here  # as in `_place`: a call more would cost a sixth
        if here is None or here.changes != self._changes or here.job() is not dist.group.WORLD:
            here = self._find()
        return here.place.rank

    @property
    def size(self) -> int:
        """The number of ranks in each group."""
        if self._size[0] != self._changes:
            self._size = self._changes, self._grid.layout.size_of(self.dims)
        return self._size[1]

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the calling rank's group, in the layout's order."""
        return self._place.ranks

    @property
    def is_first(self) -> bool:
        """Whether the calling rank is the first of its group."""
        return self._place.is_first

    @property
    def is_last(self) -> bool:
        """Whether the calling rank is the last of its group."""
        return self._place.is_last

    def next(self, *, periodic: bool = False) -> int | None:
        """Return the rank that comes after, as torch numbers ranks; None after the last one.

        Args:
            periodic: Whether the first rank comes after the last one, as in a ring.
        """
        return self._place.next(periodic=periodic)

    def prev(self, *, periodic: bool = False) -> int | None:
        """Return the rank that comes before; None before the first one, as for `next`."""
        return self._place.prev(periodic=periodic)

    # ---- its group ----------------------------------------------------------------------------

    @property
    def group(self) -> ProcessGroup:
        """The calling rank's process group, created on first use by all ranks of the grid.

        Raises:
            RankOutsideError: The grid does not hold the calling rank; never None.
            CreationError: As for `create_pg`.
        """
        here = self._here
        if here is None or here.changes != self._changes or here.job() is not dist.group.WORLD:
            here = self._find()
        group = here.group()
        if group is None:
            try:
                group = self._grid.get_pg(self.dims)
            except GroupMissingError:
                group = self._grid.ensure_pg(self.dims)
            here.group = ref(group)
        return group  # type: ignore[return-value]  # no member has None

    @overload
    def sum(self, value: int) -> int: ...
    @overload
    def sum(self, value: float) -> float: ...
    @overload
    def sum(self, value: Tensor) -> Tensor: ...
    def sum(self, value: float | Tensor) -> float | Tensor:
        """Return the sum of a number, or of a tensor, over the group; every member must ask.

        For metrics: gradients do not flow through it.

        Args:
            value: This rank's; a tensor stays as it is.

        Raises:
            GroupOptionsError: It is neither.

        Example:
            >>> from hypercomm import HyperCommGrid
            >>> from hypercomm.testing import fake_world
            >>> with fake_world(1), HyperCommGrid("dp=1") as grid:
            ...     print(grid["dp"].sum(3), grid["dp"].mean(3))
            3 3.0
        """
        if isinstance(value, Tensor):
            total = value.detach().clone()
        elif isinstance(value, Real) and not isinstance(value, bool):
            kind = torch.int64 if isinstance(value, Integral) else torch.float64
            if kind == torch.int64 and not -(2**63) <= value < 2**63:
                raise GroupOptionsError(f"value must fit in 64 bits, got {shown(value)}")
            total = torch.tensor(value, dtype=kind, device=c10d.device_type(self.group))
        else:
            raise GroupOptionsError(f"value must be a number or a tensor, got {shown(value)}")
        dist.all_reduce(total, group=self.group)
        return total if isinstance(value, Tensor) else total.item()

    @overload
    def mean(self, value: float) -> float: ...
    @overload
    def mean(self, value: Tensor) -> Tensor: ...
    def mean(self, value: float | Tensor) -> float | Tensor:
        """Return the mean of a number, or of a tensor, over the group; as for `sum`."""
        return self.sum(value) / self.size

    def barrier(self) -> None:
        """Wait for all ranks of the group."""
        dist.barrier(group=self.group)

    # ---- inside -------------------------------------------------------------------------------

    def __repr__(self) -> str:
        return f"{'+'.join(self.dims)} of {self._grid.layout}"

    @property
    def _changes(self) -> int:
        return self._grid._state.changes

    @property
    def _place(self) -> Place:
        here = self._here
        if here is None or here.changes != self._changes or here.job() is not dist.group.WORLD:
            here = self._find()
        return here.place

    def _find(self) -> _Here:
        job, changes = dist.group.WORLD, self._changes  # first: what is found may be older
        place = self._grid.layout[self.dims].at(world.rank())
        here = _Here(ref(job) if job is not None else lambda: None, changes, place)
        self._here = None if job is None else here  # the environment may still change
        return here
