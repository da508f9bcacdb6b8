"""RankLayout: named mixed-radix numbering of ranks.

A rank is `rank_offset` plus the sum of coordinate times stride over the dims. The FIRST dim
varies fastest, as in Megatron's `order`; DeviceMesh, JAX and MPI number the other way round.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Mapping, Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from hypercomm.errors import LayoutError, OrderError, RankOutsideError, UnknownDimError
from hypercomm.layout import notation
from hypercomm.layout.axes import Axis, coalesce, lattice
from hypercomm.layout.checks import (
    as_int,
    as_names,
    as_offset,
    as_ordered,
    as_rank,
    as_sizes,
    as_strides,
    as_tuple,
    positive,
)
from hypercomm.layout.messages import shown
from hypercomm.layout.rank_groups import RankGroups, StridedGroups
from hypercomm.layout.sizes import as_choices, as_size, close_sizes, completions


def _dense_strides(layout: RankLayout) -> tuple[int, ...]:
    return tuple(math.prod(layout.shape[:axis]) for axis in range(len(layout.shape)))


_LARGEST_RANK = 2**31 - 1
"""torch numbers ranks with a C int."""


@attrs.frozen
class RankLayout:
    """A named numbering of a hyperrectangle of ranks; the first dim varies fastest.

    A layout is a value: frozen, hashable, equal when sizes, names, offset and strides are, and
    picklable. It needs no torch and no cluster.

    Args:
        shape: Size of each dim, in ranks; the first dim varies fastest. At most 64 dims.
        dim_names: Name of each dim, in the order of `shape`.
        rank_offset: The smallest rank.
        strides: Ranks between neighbours along each dim, in the order of `shape`. Default: as
            dense as can be. Each must be at least the extent of the dims before it.

    Raises:
        LayoutError: The lengths differ or are 0, a size is not a positive int, a name is empty,
            doubled or no string, or the offset is negative.

    Example:
        Rank = tp * 1 + cp * 2 + dp * 6, so coordinates (1, 2, 3) make 1 + 4 + 18 = 23.

        >>> layout = RankLayout([2, 3, 4], ["tp", "cp", "dp"])
        >>> layout.strides, layout.size
        ((1, 2, 6), 24)
        >>> layout.rank(tp=1, cp=2, dp=3)
        23
        >>> layout.coords(23)
        {'tp': 1, 'cp': 2, 'dp': 3}
        >>> layout.groups("cp")[0]
        (0, 2, 4)
    """

    shape: tuple[int, ...] = attrs.field(converter=as_sizes)
    dim_names: tuple[str, ...] = attrs.field(converter=as_names)
    rank_offset: int = attrs.field(default=0, converter=as_offset)
    strides: tuple[int, ...] = attrs.field(
        kw_only=True, default=attrs.Factory(_dense_strides, takes_self=True), converter=as_strides
    )

    def __attrs_post_init__(self) -> None:
        if not self.shape and not self.dim_names:
            raise LayoutError("a layout needs at least one dim, but shape and dim_names are empty")
        if len(self.shape) != len(self.dim_names):
            raise LayoutError(
                f"shape {self.shape} has {len(self.shape)} sizes, but dim_names "
                f"{self.dim_names} has {len(self.dim_names)} names; give one name for each size"
            )
        if len(self.strides) != len(self.shape):
            raise LayoutError(f"strides {self.strides} need one stride for each of {self.shape}")
        object.__setattr__(self, "strides", self._canonical_strides())
        if self.last_rank > _LARGEST_RANK:
            raise LayoutError(
                f"{self} at rank_offset {self.rank_offset} needs ranks up to {self.last_rank}; "
                f"torch numbers them up to {_LARGEST_RANK}"
            )

    def _canonical_strides(self) -> tuple[int, ...]:
        """Check that the dims are nested; a dim of size 1 steps nowhere, and gets the dense stride.

        So layouts with the same ranks are equal.
        """
        strides = []
        extent = 1
        for name, size, stride in zip(self.dim_names, self.shape, self.strides, strict=True):
            if size > 1 and stride < extent:
                raise LayoutError(
                    f"the stride of dim {name!r} must be at least {extent}, the extent of the "
                    f"dims before it, got {stride}"
                )
            strides.append(stride if size > 1 else extent)
            extent = size * strides[-1]
        return tuple(strides)

    # ---- other ways to make one -------------------------------------------------------------

    @classmethod
    def parse(cls, text: str, *, world_size: int | None = None, rank_offset: int = 0) -> RankLayout:
        """Make a layout from sizes as text, first dim fastest; `str(layout)` writes it back.

        Args:
            text: Sizes, as in "tp=2,cp=3,dp=4". One may be -1, or a name alone: it is inferred.
            world_size: The number of ranks that the sizes must multiply to.
            rank_offset: The smallest rank.

        Raises:
            NotationError: The text cannot be read; the message names the offending part.
            WorldSizeError: The sizes do not multiply to `world_size`.

        Example:
            >>> RankLayout.parse("tp=2,cp=3,dp=-1", world_size=24).shape
            (2, 3, 4)
        """
        sizes = close_sizes(notation.parse_sizes(text), world_size)
        return cls(tuple(sizes.values()), tuple(sizes), rank_offset)

    @classmethod
    def from_order(
        cls,
        order: str,
        /,
        *,
        world_size: int | None = None,
        rank_offset: int = 0,
        **sizes: int,
    ) -> RankLayout:
        """Make a layout from an order of dims, first one fastest, and their sizes by name.

        A dim of the order without a size has size 1; but with `world_size`, the one dim without
        a size (or with size -1) is inferred. Sizes of 1 that the order does not name are dims
        at its end, as in Megatron's `RankGenerator`.

        Raises:
            NotationError: The order cannot be read, or more than one size is open.
            OrderError: A size larger than 1 belongs to no dim of the order.
            WorldSizeError: The sizes do not multiply to `world_size`.

        Example:
            >>> str(RankLayout.from_order("tp-cp-ep-dp-pp", tp=2, cp=1, ep=1, pp=4, world_size=16))
            'tp=2,cp=1,ep=1,dp=2,pp=4'
        """
        names = notation.parse_order(order)
        sizes = {name: as_size(name, size) for name, size in sizes.items()}
        for name, size in sizes.items():
            if name not in names and size != 1:
                raise OrderError(
                    f"dim {name!r} has size {size}, but order {order!r} does not name it; "
                    f"add it to the order"
                )
        marked = notation.OPEN in sizes.values()
        default = 1 if world_size is None or marked else notation.OPEN
        wanted = {name: sizes.get(name, default) for name in dict.fromkeys((*names, *sizes))}
        closed = close_sizes(wanted, world_size)
        return cls(tuple(closed.values()), tuple(closed), rank_offset)

    @classmethod
    def suggest(
        cls, world_size: int, /, *, rank_offset: int = 0, **sizes: int | Iterable[int]
    ) -> list[RankLayout]:
        """List the layouts that fill `world_size` ranks, given what is known of each dim.

        Args:
            world_size: The number of ranks that the sizes must multiply to.
            rank_offset: The smallest rank.
            sizes: For each dim, first one fastest: its size, or the sizes to choose from, or -1
                for any size.

        Returns:
            The layouts, sizes of the earlier dims ascending; empty when nothing fits.

        Example:
            >>> [str(layout) for layout in RankLayout.suggest(8, tp=[1, 2, 4], pp=2, dp=-1)]
            ['tp=1,pp=2,dp=4', 'tp=2,pp=2,dp=2', 'tp=4,pp=2,dp=1']
        """
        total = positive(world_size, "world_size")
        if total > _LARGEST_RANK:
            raise LayoutError(f"world_size must be at most {_LARGEST_RANK}, got {total}")
        if not sizes:
            raise LayoutError("suggest() needs at least one dim, as in suggest(64, tp=8, dp=-1)")
        names = as_names(tuple(sizes))
        choices = {name: as_choices(name, value) for name, value in sizes.items()}
        return [
            cls(shape, names, rank_offset) for shape in completions(list(choices.values()), total)
        ]

    @classmethod
    def from_json(cls, text: str) -> RankLayout:
        """Make a layout from what `to_json` wrote.

        Raises:
            LayoutError: The text is not such a form.
        """
        try:
            fields = json.loads(text)
        except (TypeError, ValueError, RecursionError) as error:
            raise LayoutError(f"this is not the JSON form of a layout: {error}") from error
        known = {"shape", "dim_names", "rank_offset", "strides"}
        if not isinstance(fields, dict) or not {"shape", "dim_names"} <= set(fields) <= known:
            raise LayoutError(
                f"the JSON form of a layout is an object with 'shape', 'dim_names' and perhaps "
                f"'rank_offset' and 'strides', got {shown(text)}"
            )
        return cls(**fields)

    def to_json(self) -> str:
        """Write the layout as JSON; equal layouts write equal text.

        Example:
            >>> RankLayout([2, 4], ["tp", "dp"]).to_json()
            '{"shape": [2, 4], "dim_names": ["tp", "dp"], "rank_offset": 0}'
        """
        fields = attrs.asdict(self)
        if self.strides == _dense_strides(self):
            del fields["strides"]
        return json.dumps(fields)

    def __str__(self) -> str:
        return notation.format_sizes(self.dim_names, self.shape)

    # ---- one rank ---------------------------------------------------------------------------

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(self.shape)

    @property
    def last_rank(self) -> int:
        """The largest rank."""
        steps = zip(self.shape, self.strides, strict=True)
        return self.rank_offset + sum((size - 1) * stride for size, stride in steps)

    @property
    def ranks(self) -> Sequence[int]:
        """All ranks, ascending."""
        if self.strides == _dense_strides(self):
            return range(self.rank_offset, self.rank_offset + self.size)
        return tuple((self.rank_offset + lattice(self._axes(self.dim_names))).tolist())

    def __contains__(self, rank: object) -> bool:
        try:
            self._index(rank)
        except RankOutsideError:
            return False
        return True

    def size_of(self, dim: str, default: int | None = None) -> int:
        """Return the size of a dim, or `default` if there is no such dim and one is given.

        Raises:
            UnknownDimError: There is no such dim, and no default.

        Example:
            >>> layout = RankLayout.parse("tp=2,dp=4")
            >>> layout.size_of("dp"), layout.size_of("cp", default=1)
            (4, 1)
        """
        if default is not None and isinstance(dim, str) and dim not in self.dim_names:
            return default
        return self.shape[self._axis_of(dim)]

    def coords(self, rank: int) -> dict[str, int]:
        """Return the coordinates of a rank, by dim name; the inverse of `rank(**coords)`.

        Raises:
            RankOutsideError: The layout does not hold `rank`.
        """
        return dict(zip(self.dim_names, self._index(rank), strict=True))

    def rank(self, /, **coords: int) -> int:
        """Return the rank at these coordinates, one for each dim; the inverse of `coords(rank)`.

        Raises:
            UnknownDimError: A coordinate is for no dim of the layout.
            LayoutError: A dim has no coordinate, or one that is not in range(size).
        """
        missing = [name for name in self.dim_names if name not in coords]
        if missing:
            raise LayoutError(f"rank() needs a coordinate for every dim; {missing} have none")
        return self._origin(coords)

    def shift(self, rank: int, dim: str, by: int, periodic: bool = True) -> int | None:
        """Return the rank that is `by` steps away along a dim, as MPI's Cart_shift does.

        Args:
            rank: The rank to start from.
            dim: The dim to walk along.
            by: Steps: 1 for the next pipeline stage, -1 for the previous one.
            periodic: Whether the dim wraps around.

        Returns:
            The rank, or None when the walk leaves a dim that is not periodic.

        Raises:
            UnknownDimError, RankOutsideError: The layout has no such dim or rank.

        Example:
            >>> layout = RankLayout.parse("tp=2,pp=3")
            >>> layout.shift(4, "pp", 1), layout.shift(4, "pp", 1, periodic=False)
            (0, None)
        """
        axis = self._axis_of(dim)
        here = self._index(rank)[axis]
        there = here + as_int(by, "by")
        if periodic:
            there %= self.shape[axis]
        elif not 0 <= there < self.shape[axis]:
            return None
        return as_rank(rank) + (there - here) * self.strides[axis]

    def ranks_where(self, /, **coords: int) -> tuple[int, ...]:
        """Return all ranks with these coordinates, ascending.

        Raises:
            UnknownDimError, LayoutError: As for `rank`.

        Example:
            >>> RankLayout.parse("tp=2,dp=2,pp=2").ranks_where(pp=1, tp=0)
            (4, 6)
        """
        free = [name for name in self.dim_names if name not in coords]
        return tuple((self._origin(coords) + lattice(self._axes(free))).tolist())

    # ---- groups -----------------------------------------------------------------------------

    def order_dims(self, dims: str | Iterable[str]) -> tuple[str, ...]:
        """Return dims in the layout's order, after checking them.

        Args:
            dims: One name, or any iterable of names, in any order.

        Raises:
            UnknownDimError: A name is not one of the layout's.
            LayoutError: There are none, or one comes twice.

        Example:
            >>> RankLayout.parse("tp=2,cp=2,dp=2").order_dims(["dp", "tp"])
            ('tp', 'dp')
        """
        wanted = self._check_dims(dims)
        return tuple(name for name in self.dim_names if name in wanted)

    def groups(self, /, *dims: str) -> RankGroups:
        """Return the disjoint groups whose members differ only in their coordinates along `dims`.

        Members are in ascending rank order, whatever the order of `dims`; groups are ordered by
        the coordinates along the other dims, the first of those fastest.

        Raises:
            UnknownDimError, LayoutError: As for `order_dims`.

        Example:
            >>> layout = RankLayout.parse("tp=2,cp=2,dp=2")
            >>> list(layout.groups("tp", "dp"))
            [(0, 1, 4, 5), (2, 3, 6, 7)]
        """
        return _groups_over(self, self.order_dims(dims))

    def enumerate_ranks(self, dims: str | Iterable[str]) -> NDArray[np.int64]:
        """Enumerate groups with members in the order of `dims`, the LAST one varying fastest.

        This is the order rule of Megatron's `_gen_rank_enum`. Naming dims in reversed layout
        order gives ascending ranks, the same as `groups(*dims).to_array()`.

        Returns:
            An array of shape (number of groups, group size).

        Example:
            >>> layout = RankLayout([2, 2, 2], ["a", "b", "c"])
            >>> layout.enumerate_ranks(["a", "b"]).tolist()
            [[0, 2, 1, 3], [4, 6, 5, 7]]
        """
        inner = self._check_dims(dims if isinstance(dims, str) else as_ordered(dims, "dims"))
        outer = [name for name in self.dim_names if name not in inner]
        bases = self.rank_offset + lattice(self._axes(outer))
        return bases[:, None] + lattice(self._axes(reversed(inner)))[None, :]

    # ---- other layouts from this one --------------------------------------------------------

    def split(self, dim: str, /, **sizes: int) -> RankLayout:
        """Factorise a dim into several, the first named varying fastest; no rank moves.

        Raises:
            LayoutError: The sizes (one may be -1) do not multiply to the size of `dim`.

        Example:
            >>> str(RankLayout.parse("tp=2,cp=8").split("cp", cp_inner=2, cp_outer=4))
            'tp=2,cp_inner=2,cp_outer=4'
        """
        axis = self._axis_of(dim)
        size, stride = self.shape[axis], self.strides[axis]
        if not sizes:
            raise LayoutError(f"split({dim!r}) needs the new dims, as in split('cp', a=2, b=-1)")
        try:
            parts = close_sizes(sizes, size)
        except (ValueError, TypeError) as error:
            raise LayoutError(
                f"dim {dim!r} of size {size} cannot be split into {shown(sizes)}: the sizes "
                f"must be ints that multiply to {size}, one of them perhaps -1"
            ) from error
        shape = as_sizes(parts.values())
        strides = [stride * math.prod(shape[:position]) for position in range(len(shape))]
        return self._with_dims(axis, axis + 1, tuple(parts), shape, strides)

    def merge(self, dims: Iterable[str], name: str) -> RankLayout:
        """Join dims that are neighbours in the layout into one; no rank moves.

        Raises:
            LayoutError: The dims are not neighbours, or step with a gap between them.

        Example:
            >>> str(RankLayout.parse("tp=2,cp=2,dp=4").merge(["dp", "cp"], "dp_cp"))
            'tp=2,dp_cp=8'
        """
        wanted = self.order_dims(dims)
        first = self._axis_of(wanted[0])
        last = first + len(wanted)
        if self.dim_names[first:last] != wanted:
            raise LayoutError(
                f"dims {wanted} cannot be merged: they are not neighbours in {self.dim_names}; "
                f"reorder() the layout first, which renumbers its ranks"
            )
        steps = coalesce(self._axes(wanted))
        if len(steps) > 1:
            raise LayoutError(
                f"dims {wanted} cannot be merged: there are gaps between their ranks, with "
                f"strides {self.strides[first:last]} over sizes {self.shape[first:last]}"
            )
        size, stride = steps[0] if steps else (1, self.strides[first])
        return self._with_dims(first, last, (name,), (size,), (stride,))

    def rename(self, /, **names: str) -> RankLayout:
        """Give dims new names, old=new; no rank moves.

        Raises:
            UnknownDimError: An old name is not one of the layout's.

        Example:
            >>> str(RankLayout.parse("tp=2,dp=4").rename(dp="fsdp"))
            'tp=2,fsdp=4'
        """
        for name in names:
            self._axis_of(name)
        return attrs.evolve(self, dim_names=[names.get(name, name) for name in self.dim_names])

    def reorder(self, *dims: str) -> RankLayout:
        """Number the ranks in another order of dims, the first varying fastest; ranks move.

        Raises:
            LayoutError: The dims are not all of the layout's, or the layout is not dense.

        Example:
            >>> RankLayout.parse("tp=2,dp=4").reorder("dp", "tp").coords(1)
            {'dp': 1, 'tp': 0}
        """
        wanted = self._check_dims(dims)
        if len(wanted) != len(self.dim_names):
            raise LayoutError(f"reorder() needs every dim of {self.dim_names}, got {wanted}")
        if self.strides != _dense_strides(self):
            raise LayoutError(f"a layout with gaps (strides {self.strides}) cannot be reordered")
        return RankLayout([self.size_of(name) for name in wanted], wanted, self.rank_offset)

    def select(self, /, **coords: int) -> RankLayout:
        """Return the layout of the ranks with these coordinates, over the other dims.

        The ranks keep their numbers, so the result may have gaps: its strides are this layout's.

        Raises:
            UnknownDimError: A coordinate is for no dim of the layout.
            LayoutError: A coordinate is not in range(size), or no dim is left.

        Example:
            >>> stage = RankLayout.parse("tp=2,pp=2,dp=2").select(pp=1)
            >>> str(stage), stage.ranks
            ('tp=2,dp=2', (2, 3, 6, 7))
        """
        kept = [axis for axis, name in enumerate(self.dim_names) if name not in coords]
        origin = self._origin(coords)
        if not kept:
            raise LayoutError(f"select() of every dim leaves none; the rank there is {origin}")
        return RankLayout(
            [self.shape[axis] for axis in kept],
            [self.dim_names[axis] for axis in kept],
            origin,
            strides=[self.strides[axis] for axis in kept],
        )

    # ---- inside -----------------------------------------------------------------------------

    def _axes(self, names: Iterable[str]) -> list[Axis]:
        axes = (self.dim_names.index(name) for name in names)
        return [Axis(self.shape[axis], self.strides[axis]) for axis in axes]

    def _axis_of(self, dim: str) -> int:
        if not isinstance(dim, str) or dim not in self.dim_names:
            raise UnknownDimError(
                f"unknown dim {shown(dim)}; this layout has dims {self.dim_names}"
            )
        return self.dim_names.index(dim)

    def _check_dims(self, dims: str | Iterable[str]) -> tuple[str, ...]:
        wanted = (dims,) if isinstance(dims, str) else as_tuple(dims, "dims")
        if not wanted:
            raise LayoutError(f"dims is empty; name at least one of {self.dim_names}")
        for position, name in enumerate(wanted):
            self._axis_of(name)
            if name in wanted[:position]:
                raise LayoutError(f"dim {name!r} comes twice in dims {wanted}")
        return wanted

    def _index(self, rank: object) -> list[int]:
        """The coordinates of a rank, in the order of the dims."""
        rest = as_rank(rank) - self.rank_offset
        reversed_index = []
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            coordinate, rest = divmod(rest, stride)
            if not 0 <= coordinate < size:
                raise self._outside(rank)
            reversed_index.append(coordinate)
        if rest:
            raise self._outside(rank)
        return reversed_index[::-1]

    def _outside(self, rank: object) -> RankOutsideError:
        dense = self.strides == _dense_strides(self)
        gaps = "" if dense else f", with gaps (strides {self.strides})"
        return RankOutsideError(
            f"rank {shown(rank)} is not in layout {self}, which holds ranks "
            f"{self.rank_offset}..{self.last_rank}{gaps}"
        )

    def _origin(self, coords: Mapping[str, int]) -> int:
        """The smallest rank with these coordinates."""
        rank = self.rank_offset
        for name, coordinate in coords.items():
            axis = self._axis_of(name)
            if not 0 <= as_int(coordinate, f"the coordinate of dim {name!r}") < self.shape[axis]:
                raise LayoutError(
                    f"the coordinate of dim {name!r} must be in range({self.shape[axis]}), "
                    f"got {shown(coordinate)}"
                )
            rank += int(coordinate) * self.strides[axis]
        return rank

    def _with_dims(
        self,
        first: int,
        last: int,
        names: Sequence[str],
        shape: Sequence[int],
        strides: Sequence[int],
    ) -> RankLayout:
        """This layout with dims first..last-1 replaced."""
        return RankLayout(
            (*self.shape[:first], *shape, *self.shape[last:]),
            (*self.dim_names[:first], *names, *self.dim_names[last:]),
            self.rank_offset,
            strides=(*self.strides[:first], *strides, *self.strides[last:]),
        )


@functools.lru_cache(maxsize=1024)
def _groups_over(layout: RankLayout, inner: tuple[str, ...]) -> RankGroups:
    """The groups over dims in layout order: values, made once however often they are asked for."""
    outer = [name for name in layout.dim_names if name not in inner]
    return StridedGroups(layout.rank_offset, layout._axes(outer), layout._axes(inner))
