"""GridDims: some dims of a grid, as the calling rank sees them, and the edges of a pipeline.

An edge leads from one stage of a pipeline to a neighbouring stage. `PipelineEdges` has a process
group for each edge. The groups of one direction have three keys in the grid: the even edges (stage
0 to 1, 2 to 3, ...), the odd edges (1 to 2, 3 to 4, ...), and the edge from the last stage to the
first. The edges of one key have no rank in common.
"""

from __future__ import annotations

import warnings
from functools import partial
from numbers import Integral, Real
from typing import TYPE_CHECKING, NoReturn, overload

import attrs
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from hypercomm.errors import (
    GroupMissingError,
    GroupOptionsError,
    HyperCommError,
    SimulationError,
)
from hypercomm.grid.state import GridState
from hypercomm.layout import RankLayout
from hypercomm.layout.groups import Membership, RankGroups, groups_of_rows
from hypercomm.layout.text import short_repr
from hypercomm.process_groups import torch_internals as torchdist
from hypercomm.process_groups.creation import ensure
from hypercomm.process_groups.spec import GroupKey, GroupRequest
from hypercomm.process_groups.table import LIVE, Entry


class Size(int):
    """A number of ranks that can also be called, because `DeviceMesh.size()` is a method.

    Example:
        >>> Size(4) == Size(4)() == 4
        True
    """

    def __call__(self) -> int:
        """Return the number."""
        return int(self)


class GridDims:
    """Some dims of a grid, as the calling rank sees them: `grid["tp"]`, `grid["dp", "cp"]`.

    Only `group` and the methods that communicate over it contact other ranks. An object remains
    valid after the grid is reshaped.

    Attributes:
        dims: The dims, in the grid's order.

    Raises:
        RankOutsideError: A property of the calling rank is read on a rank outside the grid.

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

    __slots__ = ("_entry", "_known", "_state", "_view", "dims")

    def __init__(self, state: GridState, view: str | None, dims: tuple[str, ...]) -> None:
        self._state = state  # a reshape replaces its table
        self._view = view
        self.dims = dims
        self._known: tuple[RankLayout, int, Membership] | None = None
        """The layout and the rank of the last lookup, and the result."""
        self._entry: Entry | None = None
        """The entry of the group in the table, after the first lookup."""

    # ---- the calling rank -----------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """The position of the calling rank in its group."""
        return self._place.position

    @property
    def size(self) -> Size:
        """The number of ranks in each group; `size()` works too."""
        return Size(self._layout.size_of(self.dims))

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the calling rank's group, in the layout's order."""
        return self._place.ranks

    @property
    def is_first(self) -> bool:
        """Whether the calling rank is the first rank of its group."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether the calling rank is the last rank of its group."""
        return self.rank == len(self.ranks) - 1

    def next(self, *, periodic: bool = False) -> int | None:
        """Return the global rank of the next group member, or None on the last member.

        Pass the result as `dst=` to `torch.distributed.send`, unless it is None.

        Args:
            periodic: Whether the first rank follows the last one, as in a ring.
        """
        return self._neighbour(1, periodic)

    def prev(self, *, periodic: bool = False) -> int | None:
        """Return the global rank of the previous group member, or None on the first member.

        Args:
            periodic: Whether the last rank precedes the first one, as in a ring.
        """
        return self._neighbour(-1, periodic)

    def _neighbour(self, steps: int, periodic: bool) -> int | None:
        ranks, at = self._place
        at += steps
        if periodic:
            at %= len(ranks)
        return ranks[at] if 0 <= at < len(ranks) else None

    @property
    def _layout(self) -> RankLayout:
        return self._state.table.views.layout_of(self._view)

    @property
    def _place(self) -> Membership:
        rank = self._state.table.rank()
        layout = self._layout
        known = self._known
        if known is None or known[0] is not layout or known[1] != rank:
            known = self._known = layout, rank, layout.membership(rank, self.dims)
        return known[2]

    # ---- the group ------------------------------------------------------------------------------

    @property
    def group(self) -> ProcessGroup:
        """The calling rank's process group, which is created on first access.

        All ranks that `HyperCommGrid.create_pg` requires must make this first access.

        Raises:
            NotInitializedError: torch.distributed is not initialised, or was destroyed.
            HyperCommError: See `HyperCommGrid.create_pg`.
        """
        table = self._state.table
        entry = self._entry
        if entry is not None and table.entries.get(entry.spec.key) is entry:
            table.check_usable()
        else:
            if table.world is None:
                torchdist.world_group()  # raises an error, because WORLD was destroyed
            _ = self._place  # raises an error on a rank outside of the grid
            entry = self._entry = table.entries.get(self._key())
        group = None if entry is None else entry.communicator.pg  # before the state: it ends last
        if group is None or entry.state != LIVE:  # type: ignore[union-attr]
            # Another thread may have reshaped the grid, so the table is read again.
            request = GroupRequest("+".join(self.dims), view=self._view)
            group = ensure(self._state.table, request)
        return group  # type: ignore[return-value]  # a rank of the grid is in one of the groups

    def _key(self, name: str | None = None) -> GroupKey:
        """Return the key of the group over the dims, or of a further group with a name."""
        return self._state.table.find_key("+".join(self.dims), name, self._view)[0]

    def get_group(self) -> ProcessGroup:
        """Return `group`, as a DeviceMesh does."""
        return self.group

    def get_local_rank(self) -> int:
        """Return `rank`, as a DeviceMesh does."""
        return self.rank

    @overload
    def sum(self, value: int) -> int: ...
    @overload
    def sum(self, value: float) -> float: ...
    @overload
    def sum(self, value: Tensor) -> Tensor: ...
    def sum(self, value: float | Tensor) -> float | Tensor:
        """Return the sum of a number or a tensor over the group. Every group member must call this.

        Use this method for metrics. No gradient flows through the sum.

        Args:
            value: The value of this rank: a tensor, which is not changed, or an int or float. All
                ranks pass tensors of one shape and dtype, or all pass numbers.

        Returns:
            The same value on all ranks. The sum of ints is an int and exact. If any rank passes a
            float, the sum is a float. Numbers are summed in float64 on the device of the group. The
            sum of bool and integer tensors has the dtype int64, like `torch.sum`, and tensors of
            float16 and bfloat16 are summed in float32.

        Raises:
            GroupOptionsError: `value` is not a tensor or a number, or has more than 64 bits.
            SimulationError: The world is fake, and the group has other ranks.

        Warns:
            UserWarning: `value` requires a gradient.

        Example:
            >>> from hypercomm import HyperCommGrid
            >>> from hypercomm.testing import fake_world
            >>> with fake_world(1), HyperCommGrid("dp=1") as grid:
            ...     print(grid["dp"].sum(3), grid["dp"].mean(3))
            3 3.0
        """
        if not isinstance(value, Tensor):
            return self._sum_numbers(value)
        total = self._sum_tensors(value)
        return total.to(value.dtype) if value.is_floating_point() else total

    @overload
    def mean(self, value: float) -> float: ...
    @overload
    def mean(self, value: Tensor) -> Tensor: ...
    def mean(self, value: float | Tensor) -> float | Tensor:
        """Return the mean of a number or a tensor over the group. See `sum`.

        The mean of numbers is a float. The mean of bool and integer tensors has torch's default
        dtype, and the mean of other tensors has the dtype of the tensors.
        """
        if not isinstance(value, Tensor):
            return self._sum_numbers(value) / self.size
        mean = self._sum_tensors(value) / self.size
        return mean.to(value.dtype) if value.is_floating_point() else mean

    def _sum_numbers(self, value: float) -> float:
        own = torch.tensor(_split_number(value), dtype=torch.float64)
        total = own.to(torchdist.device_type(self.group))
        dist.all_reduce(total, group=self._group_with_peers())
        high, low, rest, floats = total.tolist()
        integer = int(high) * _LOW + int(low)
        return integer + rest if floats else integer

    def _sum_tensors(self, value: Tensor) -> Tensor:
        """Return the sum in the dtype in which `torch.sum` would compute it."""
        if value.requires_grad and torch.is_grad_enabled():
            warnings.warn(
                "no gradient flows through the sum and the mean of a GridDims; for a metric, pass "
                "value.detach(); in a layer, use a torch.autograd.Function",
                stacklevel=3,
            )
        dtype = value.dtype
        if not (value.is_floating_point() or value.is_complex()):
            dtype = torch.int64
        elif dtype.itemsize < torch.float32.itemsize:
            dtype = torch.float32
        total = value.detach().to(dtype, copy=True, memory_format=torch.contiguous_format)
        dist.all_reduce(total, group=self._group_with_peers())
        return total

    def barrier(self) -> None:
        """Wait for all ranks of the group. Raises the errors of `sum`."""
        dist.barrier(group=self._group_with_peers())

    def _group_with_peers(self) -> ProcessGroup:
        """Return the group, or raise if its other ranks do not exist."""
        group = self.group
        world = self._state.table.world
        if self.size > 1 and not (world is not None and world.has_store):
            raise SimulationError(
                f"each group of {'+'.join(self.dims)} has {self.size} ranks, but in a fake world "
                f"only this rank exists, so nothing can be summed or awaited; use "
                f"hypercomm.testing.simulate or run_ranks"
            )
        return group

    def __repr__(self) -> str:
        text = f"{'+'.join(self.dims)} of {self._layout}"
        try:
            place = self._place
        except HyperCommError:  # the calling rank is not known, or not in the grid
            return f"<{text}: groups of {self.size} ranks>"
        return f"<{text}: rank {place.position} of {self.size}, ranks {short_repr(place.ranks)}>"


_LOW = 2**32
"""Ints are summed in two parts: multiples of this number, and the rest."""


def _split_number(value: object) -> list[float]:
    """Split a number into floats. Sums of these floats over ranks give the sum of the numbers.

    Returns:
        For an int: its multiple of `_LOW`, the rest, 0 and 0. Sums of the first two are exact.
        For a float: 0, 0, the float, and 1, so that the last sum counts the floats.

    Raises:
        GroupOptionsError: The value is not a number, or has more than 64 bits.

    Example:
        >>> _split_number(2**33 + 5), _split_number(-1), _split_number(0.5)
        ([2.0, 5.0, 0.0, 0.0], [-1.0, 4294967295.0, 0.0, 0.0], [0.0, 0.0, 0.5, 1.0])
    """
    if isinstance(value, Integral) and abs(int(value)) < 2**64:
        high, low = divmod(int(value), _LOW)
        return [float(high), float(low), 0.0, 0.0]
    if isinstance(value, Real) and not isinstance(value, Integral):
        return [0.0, 0.0, float(value), 1.0]
    raise GroupOptionsError(
        f"value must be a tensor, a float, or an int of at most 64 bits, got {short_repr(value)}"
    )


# ---- the edges of a pipeline --------------------------------------------------------------------


@attrs.frozen(repr=False)
class PipelineEdges:
    """The edges of a pipeline at the calling rank's stage. Each is a process group of two ranks.

    `HyperCommGrid.edges` returns this object. An edge leads from one stage to a neighbouring
    stage. The groups have keys such as "pp (edge forward even)", where even edges begin at
    stages 0, 2, 4, ... The groups are always created with creation "local" and never shared, so a
    transfer never waits for a transfer in the other direction or to another stage.

    The first use of an edge creates this edge and the edge of the other direction, and waits until
    the neighbour uses one of these two edges. With `wrap`, a rank creates even edges first, then
    odd edges, then the edge from the last stage to the first. Otherwise ranks could wait for each
    other in a ring. The first use may therefore wait for both neighbours, which may wait for their
    neighbours. To avoid these waits, call `create` first. In a grid with `verify`, the first use
    calls `create`. An object remains valid after the grid is reshaped. The two ranks of an edge
    must send and receive in the same order.

    Attributes:
        wrap: Whether the first stage follows the last stage.

    Raises:
        RankOutsideError: A property is read on a rank outside the grid.
        HyperCommError: A property cannot create its edge; see `HyperCommGrid.create_pg`.

    Example:
        >>> from hypercomm import HyperCommGrid
        >>> from hypercomm.testing import fake_world
        >>> with fake_world(8, rank=0), HyperCommGrid("tp=2,pp=4") as grid:
        ...     edges = grid.edges("pp")
        ...     print(edges.to_next.size(), grid.find(edges.to_next), edges.from_previous)
        2 pp (edge forward even) None
    """

    _at: GridDims
    wrap: bool

    @property
    def to_next(self) -> ProcessGroup | None:
        """The group for sending forward to the next stage; None at the end of the pipeline."""
        return self._group("forward", 0)

    @property
    def from_previous(self) -> ProcessGroup | None:
        """The group for receiving from the previous stage; None at the start of the pipeline."""
        return self._group("forward", -1)

    @property
    def to_previous(self) -> ProcessGroup | None:
        """The group for sending back to the previous stage; None at the start of the pipeline."""
        return self._group("backward", -1)

    @property
    def from_next(self) -> ProcessGroup | None:
        """The group for receiving from the next stage; None at the end of the pipeline."""
        return self._group("backward", 0)

    def create(self) -> None:
        """Create all missing edges. The two ranks of an edge create it together.

        Call this on every rank of the grid, before `connect`, `verify` or `reshape`, which compare
        the groups of all ranks. Edges are created one by one, so the earlier edges
        remain after a failure. Raises the errors of `create_pg`.
        """
        self._create(self._kinds())

    def _group(self, direction: str, offset: int) -> ProcessGroup | None:
        """Return the group of the edge that begins `offset` stages from here, or None."""
        kind = self._kind(offset)
        if kind is None:
            return None
        state = self._at._state  # another thread may reshape the grid, and replace the table
        key = self._at._key(f"edge {direction} {kind}")
        if state.table.options.verify:  # all ranks must create the same groups
            self.create()
        try:
            return state.table.get(key)
        except GroupMissingError:
            kinds = self._kinds()
            needed = kinds[: kinds.index(kind) + 1] if self.wrap else [kind]
            own = {self._kind(offset) for offset in (0, -1)}
            self._create([one for one in kinds if one in needed or one not in own])
        return state.table.get(key)

    def _create(self, kinds: list[str]) -> None:
        """Create the calling rank's edges of some kinds: "even", "odd" or "wrap".

        The keys of a kind are registered even if the rank has no edge of this kind.
        """
        for kind in kinds:
            for direction in ("forward", "backward"):
                request = GroupRequest(
                    self._at.dims,
                    name=f"edge {direction} {kind}",
                    view=self._at._view,
                    derive=partial(_pairs, kind),
                    creation="local",
                    share="never",
                )
                ensure(self._at._state.table, request)

    def _kind(self, offset: int) -> str | None:
        """Return the kind of the edge that begins `offset` stages from here.

        The result is None if no edge begins there.
        """
        stage, size = self._at.rank + offset, self._at.size
        if 0 <= stage < size - 1:
            return "odd" if stage % 2 else "even"
        return "wrap" if self.wrap and size > 1 else None

    def _kinds(self) -> list[str]:
        """Return the kinds of edges of the pipeline, in the order of their creation."""
        size = self._at.size
        found = {"even": size > 1, "odd": size > 2, "wrap": self.wrap and size > 1}
        return [kind for kind, exists in found.items() if exists]

    if not TYPE_CHECKING:  # else type checkers would accept every name

        def __getattr__(self, name: str) -> NoReturn:
            usual = {"next": "to_next", "prev": "from_previous"}.get(name)
            hint = f"; write {usual}" if usual else ""
            raise AttributeError(f"'PipelineEdges' object has no attribute {name!r}{hint}")

    def __repr__(self) -> str:
        wrap = " with wrap" if self.wrap else ""
        return f"edges of {'+'.join(self._at.dims)} of {self._at._layout}{wrap}"


def _pairs(kind: str, groups: RankGroups) -> RankGroups:
    """Return the edges of a kind. There are none if a reshape has made the pipelines too short.

    >>> from hypercomm import RankLayout
    >>> pp = RankLayout("pp=5").groups("pp")
    >>> [list(_pairs(kind, pp)) for kind in ("even", "odd", "wrap")]
    [[(0, 1), (2, 3)], [(1, 2), (3, 4)], [(0, 4)]]
    """
    array, size = groups.to_array(), groups.group_size
    first = int(kind == "odd")
    stages = [*range(first, first + (size - first) // 2 * 2)]
    if kind == "wrap":
        stages = [0, size - 1] if size > 1 else []
    return groups_of_rows(array[:, stages].reshape(-1, 2))
