"""RankLayout: named mixed-radix numbering of ranks.

A rank is `rank_offset` plus the sum of coordinate times stride over the dims. The FIRST dim
varies fastest, as in Megatron's `order`; DeviceMesh, JAX and MPI number the other way round.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import attrs
import numpy as np
from numpy.typing import NDArray

from hypercomm.errors import LayoutError
from hypercomm.layout.groups.listed import listed_groups
from hypercomm.layout.groups.place import Place
from hypercomm.layout.groups.rank_groups import RankGroups
from hypercomm.layout.groups.strided import StridedGroups
from hypercomm.layout.numbering.axes import Axis, coalesce, lattice
from hypercomm.layout.numbering.numbering import Dims
from hypercomm.layout.numbering.written import Written
from hypercomm.layout.reading.checks import as_ordered
from hypercomm.layout.reading.shown import shown
from hypercomm.layout.reading.signatures import with_own_names
from hypercomm.layout.reading.sizes import close_sizes

if TYPE_CHECKING:  # they read the layouts of this package, and are wanted by few
    from hypercomm.draw.drawing import Drawing
    from hypercomm.tools.place import On


@with_own_names
@attrs.frozen(repr=False)
class RankLayout(Written):
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

    __iter__ = None
    """Over ranks or over dims? `ranks` and `dim_names` say."""

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
        offsets = self._offset_at(coords) + lattice(self._axes(free))
        return tuple(self._ranks_at(offsets).tolist())

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
        return groups_over(self, self.order_dims(dims))

    def __getitem__(self, dims: Dims) -> LayoutDims:
        """Return some dims, and the groups over them: `layout["tp"]`, `layout["dp", "cp"]`.

        Raises:
            UnknownDimError, LayoutError: As for `order_dims`.

        Example:
            >>> tp = RankLayout.parse("tp=2,pp=3")["tp"]
            >>> tp.size, tp.at(3).rank, tp.at(3).ranks
            (2, 1, (2, 3))
        """
        return LayoutDims(self, self.order_dims(dims))

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
        strides = accumulate(parts.values(), operator.mul, initial=stride)
        axes = map(Axis, parts.values(), strides)
        return self._with_dims(axis, axis + 1, list(zip(parts, axes, strict=True)))

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
            return self.renumber((*self.shape[:first], size, *self.shape[last:]), names)
        joined = steps[0] if steps else Axis(1, self.strides[first])
        return self._with_dims(first, last, [(name, joined)])

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
        return self.renumber(shape, wanted)

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
        offset = self._offset_at(coords)
        if not kept:
            rank = self._rank_at(offset)
            raise LayoutError(f"select() of every dim leaves none; the rank there is {rank}")
        axes = self._axes(kept)
        shape, strides = zip(*axes, strict=True)
        if self._listing is not None:
            return RankLayout(shape, kept, ranks=self._ranks_at(offset + lattice(axes)).tolist())
        return RankLayout(shape, kept, self.rank_offset + offset, strides=strides)

    # ---- how it looks -----------------------------------------------------------------------

    def draw(
        self,
        on: On | None = None,
        dims: Dims | None = None,
        *,
        groups: Iterable[Dims] | str | None = None,
    ) -> Drawing:
        """Return a picture of the layout: its ranks on their hosts, and its groups as colours.

        Args:
            on: Where the ranks are: GPUs for each host, 8, or whatever `read_topology` takes, such
                as "host=4,domain=72", a hostfile or SLURM's topology.conf. Default: not shown.
            dims: The dims whose groups are lit. Default: each has a picture of its own up to 64
                ranks; beyond, the first.
            groups: Several such, as in "tp,dp+cp", each for a picture of its own.

        Returns:
            A drawing: print it, look at it in a notebook, `save` it as SVG, PNG or HTML.

        Raises:
            UnknownDimError, LayoutError: As for `order_dims`, or there are too many ranks.
            TopologyError: `on` cannot be read, or holds fewer ranks.

        Example:
            >>> print(RankLayout.parse("tp=2,dp=2").draw(on=2).text(width=60, color=False))
            tp=2,dp=2
            4 ranks on 2 hosts; the first dim varies fastest
            <BLANKLINE>
                   host0  host1
            rank │  0 1 │  2 3
            tp   │  0 0 │  1 1
            dp   │  0 1 │  0 1
            <BLANKLINE>
            tp: 2 groups of 2, each inside one host
            dp: 2 groups of 2, each on 2 hosts
        """
        from hypercomm.draw.making import drawing_of_grids

        return drawing_of_grids(str(self), {"": self}, on, dims, groups)

    def _repr_html_(self) -> str:
        from hypercomm.draw.drawing import MOST_DRAWN

        return super()._repr_html_() if self.size > MOST_DRAWN else self.draw()._repr_html_()

    # ---- inside -----------------------------------------------------------------------------

    def _repr_pretty_(self, printer: Any, _: object) -> None:
        """What hypothesis and IPython print: text that can be pasted back."""
        printer.text(repr(self))

    def _with_dims(self, first: int, last: int, dims: Sequence[tuple[str, Axis]]) -> RankLayout:
        """This layout with dims first..last-1 replaced."""
        every = list(zip(self.dim_names, self._axes(self.dim_names), strict=True))
        every[first:last] = dims
        names, axes = zip(*every, strict=True)
        shape, strides = zip(*axes, strict=True)
        return attrs.evolve(self, shape=shape, dim_names=names, strides=strides)


@attrs.frozen
class LayoutDims:
    """Some dims of a layout, and the groups over them: `layout["tp"]`, `layout["dp", "cp"]`.

    Attributes:
        layout: The layout.
        dims: The dims, in its order.

    Example:
        >>> from hypercomm import RankLayout
        >>> pp = RankLayout.parse("tp=2,pp=3")["pp"]
        >>> pp.size, pp.at(3).rank, pp.at(3).ranks, pp.at(3).next(), pp.at(5).next()
        (3, 1, (1, 3, 5), 5, None)
    """

    layout: RankLayout
    dims: tuple[str, ...]

    @property
    def size(self) -> int:
        """The number of ranks in each group."""
        return self.layout.size_of(self.dims)

    @property
    def groups(self) -> RankGroups:
        """The groups, as `RankLayout.groups` returns them."""
        return self.layout.groups(*self.dims)

    def at(self, rank: int) -> Place:
        """Return a rank's place in its group.

        Raises:
            RankOutsideError: The rank is not in the layout.
        """
        self.layout.coords(rank)  # its error speaks of the layout, not of the groups
        groups = self.groups
        return Place(groups.of(rank), groups.position_of(rank))


@functools.lru_cache(maxsize=1024)
def groups_over(layout: RankLayout, inner: tuple[str, ...]) -> RankGroups:
    """Return the groups over dims in layout order: values, made once however often asked for."""
    outer = [name for name in layout.dim_names if name not in inner]
    axes = layout._axes(outer), layout._axes(inner)
    if layout._listing is not None:
        return listed_groups(StridedGroups(0, *axes), layout._listing)
    return StridedGroups(layout.rank_offset, *axes)
