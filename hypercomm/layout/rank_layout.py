"""RankLayout: named mixed-radix numbering of ranks.

A rank is `rank_offset` plus the sum of coordinate times stride over the dims. The FIRST dim
varies fastest, as in Megatron's `order`; DeviceMesh, JAX and MPI number the other way round.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable, Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from hypercomm.errors import LayoutError, OrderError
from hypercomm.layout import notation
from hypercomm.layout.axes import coalesce, lattice
from hypercomm.layout.checks import (
    LARGEST_RANK,
    LARGEST_WORLD,
    as_names,
    as_ordered,
    as_sizes,
    positive,
)
from hypercomm.layout.listing import listed_groups
from hypercomm.layout.messages import shown
from hypercomm.layout.numbering import Numbering, dense_strides
from hypercomm.layout.rank_groups import RankGroups, StridedGroups
from hypercomm.layout.sizes import as_choices, as_size, close_sizes, completions


@attrs.frozen(repr=False)
class RankLayout(Numbering):
    """A named numbering of a hyperrectangle of ranks; the first dim varies fastest.

    A layout is a value: frozen, hashable, picklable, and equal to those with the same sizes, names
    and numbering. It needs no torch and no cluster.

    Args:
        shape: Size of each dim, in ranks; the first dim varies fastest. At most 64 dims.
        dim_names: Name of each dim, in the order of `shape`.
        rank_offset: The smallest rank.
        strides: Ranks between neighbours along each dim, in the order of `shape`. Default: as
            dense as can be. Each must be at least the extent of the dims before it.
        ranks: In place of offset and strides: the rank at each position, the first dim varying
            fastest, where some hosts are left out or the ranks are in an order of their own.

    Raises:
        LayoutError: The lengths differ or are 0, a size is not a positive int, a name is empty,
            doubled or no string, the offset is negative, or `ranks` does not hold one rank for
            each position, each once, or is given beside an offset or strides.

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

        Position 2 in a list, at coordinates (0, 1), is its third rank.

        >>> listed = RankLayout([2, 2], ["tp", "dp"], ranks=[9, 8, 0, 1])
        >>> listed.rank(tp=0, dp=1), listed.coords(8), list(listed.groups("dp"))
        (0, {'tp': 1, 'dp': 0}, [(9, 0), (8, 1)])
    """

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
        if total > LARGEST_RANK:
            raise LayoutError(f"world_size must be at most {LARGEST_RANK}, got {total}")
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
        known = {"shape", "dim_names", "rank_offset", "strides", "ranks"}
        if not isinstance(fields, dict) or not {"shape", "dim_names"} <= set(fields) <= known:
            raise LayoutError(
                f"the JSON form of a layout is an object with 'shape', 'dim_names' and perhaps "
                f"'rank_offset' and 'strides', or 'ranks', got {shown(text)}"
            )
        return cls(**fields)

    def to_json(self) -> str:
        """Write the layout as JSON; equal layouts write equal text.

        Example:
            >>> RankLayout([2, 4], ["tp", "dp"]).to_json()
            '{"shape": [2, 4], "dim_names": ["tp", "dp"], "rank_offset": 0}'
        """
        fields = {"shape": self.shape, "dim_names": self.dim_names}
        if self._listing is not None:
            return json.dumps({**fields, "ranks": self.ranks})
        dense = self.strides == dense_strides(self)
        gaps = {} if dense else {"strides": self.strides}
        return json.dumps({**fields, "rank_offset": self.rank_offset, **gaps})

    # ---- several ranks, groups ----------------------------------------------------------------

    def ranks_where(self, /, **coords: int) -> tuple[int, ...]:
        """Return all ranks with these coordinates, in the order of `ranks`.

        Raises:
            UnknownDimError, LayoutError: As for `rank`.

        Example:
            >>> RankLayout.parse("tp=2,dp=2,pp=2").ranks_where(pp=1, tp=0)
            (4, 6)
        """
        free = [name for name in self.dim_names if name not in coords]
        places = self._place_at(coords) + lattice(self._axes(free))
        return tuple(self._ranks_at(places).tolist())

    def groups(self, /, *dims: str) -> RankGroups:
        """Return the disjoint groups whose members differ only in their coordinates along `dims`.

        Members are in the layout's order, whatever the order of `dims`: ascending, unless its
        ranks are listed in another. Groups are ordered by the coordinates along the other dims,
        the first of those fastest.

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
        order gives the ranks in the layout's, the same as `groups(*dims).to_array()`.

        Returns:
            An array of shape (number of groups, group size).

        Example:
            >>> layout = RankLayout([2, 2, 2], ["a", "b", "c"])
            >>> layout.enumerate_ranks(["a", "b"]).tolist()
            [[0, 2, 1, 3], [4, 6, 5, 7]]
        """
        inner = self._check_dims(dims if isinstance(dims, str) else as_ordered(dims, "dims"))
        outer = [name for name in self.dim_names if name not in inner]
        bases = lattice(self._axes(outer))
        return self._ranks_at(bases[:, None] + lattice(self._axes(reversed(inner)))[None, :])

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
            LayoutError: The dims are not neighbours, or too many ranks would have to be listed.

        Example:
            >>> str(RankLayout.parse("tp=2,cp=2,dp=4").merge(["dp", "cp"], "dp_cp"))
            'tp=2,dp_cp=8'

            Where there are gaps that no stride tells, the ranks are listed.

            >>> RankLayout([2, 2], ["tp", "dp"], strides=[1, 4]).merge(["tp", "dp"], "dp_tp")
            RankLayout(shape=(4,), dim_names=('dp_tp',), ranks=(0, 1, 4, 5))
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
            names = (*self.dim_names[:first], name, *self.dim_names[last:])
            size = math.prod(self.shape[first:last])
            return self._over_its_list((*self.shape[:first], size, *self.shape[last:]), names)
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
            LayoutError: The dims are not all of the layout's, or it has gaps, and more ranks than
                can be listed.

        Example:
            >>> RankLayout.parse("tp=2,dp=4").reorder("dp", "tp").coords(1)
            {'dp': 1, 'tp': 0}
        """
        wanted = self._check_dims(dims)
        if len(wanted) != len(self.dim_names):
            raise LayoutError(f"reorder() needs every dim of {self.dim_names}, got {wanted}")
        shape = [self.size_of(name) for name in wanted]
        if self.strides != dense_strides(self):
            return self._over_its_list(shape, wanted)
        return RankLayout(shape, wanted, self.rank_offset, ranks=self._listing)

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
        kept = [name for name in self.dim_names if name not in coords]
        place = self._place_at(coords)
        if not kept:
            rank = self._rank_at(place)
            raise LayoutError(f"select() of every dim leaves none; the rank there is {rank}")
        axes = self._axes(kept)
        shape, strides = zip(*axes, strict=True)
        if self._listing is not None:
            return RankLayout(shape, kept, ranks=self._ranks_at(place + lattice(axes)).tolist())
        return RankLayout(shape, kept, self.rank_offset + place, strides=strides)

    # ---- inside -----------------------------------------------------------------------------

    def _over_its_list(self, shape: Sequence[int], dim_names: Sequence[str]) -> RankLayout:
        """Another shape over the same list of ranks, of a layout with gaps."""
        if self.size > LARGEST_WORLD:
            raise LayoutError(
                f"with gaps (strides {self.strides}) the ranks must be listed, and {self.size} are "
                f"more than the {LARGEST_WORLD} that can be; take a layout without gaps"
            )
        return RankLayout(shape, dim_names, ranks=self.ranks)

    def _with_dims(
        self,
        first: int,
        last: int,
        names: Sequence[str],
        shape: Sequence[int],
        strides: Sequence[int],
    ) -> RankLayout:
        """This layout with dims first..last-1 replaced."""
        return attrs.evolve(
            self,
            shape=(*self.shape[:first], *shape, *self.shape[last:]),
            dim_names=(*self.dim_names[:first], *names, *self.dim_names[last:]),
            strides=(*self.strides[:first], *strides, *self.strides[last:]),
        )


@functools.lru_cache(maxsize=1024)
def _groups_over(layout: RankLayout, inner: tuple[str, ...]) -> RankGroups:
    """The groups over dims in layout order: values, made once however often they are asked for."""
    outer = [name for name in layout.dim_names if name not in inner]
    axes = layout._axes(outer), layout._axes(inner)
    if layout._listing is not None:
        return listed_groups(StridedGroups(0, *axes), layout._listing)
    return StridedGroups(layout.rank_offset, *axes)
