"""Numbering: how a layout counts its ranks, and what can be asked about one of them.

Coordinates make an offset: the sum of coordinate times stride over the dims. It is the distance of
a rank from the first one, `rank_offset`; or, where the ranks are listed, a position in the list.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from operator import mul
from typing import TYPE_CHECKING

import attrs
import numpy as np
from numpy.typing import NDArray

from hypercomm.errors import LayoutError, RankOutsideError, UnknownDimError
from hypercomm.layout.numbering.axes import Axis, lattice
from hypercomm.layout.numbering.listing import Listing, as_listing
from hypercomm.layout.reading import notation
from hypercomm.layout.reading.checks import (
    LARGEST_RANK,
    LARGEST_WORLD,
    as_dims,
    as_int,
    as_names,
    as_offset,
    as_rank,
    as_sizes,
    as_strides,
)
from hypercomm.layout.reading.shown import did_you_mean, shown

if TYPE_CHECKING:
    from typing_extensions import Self

Dims = str | Iterable["Dims"]
"""Dims in any spelling: "tp", "dp+cp", ["dp", "cp"]."""


def dense_strides(layout: Numbering) -> tuple[int, ...]:
    """Return the strides of a layout without gaps, in ranks, in the order of its dims.

    >>> dense_strides(Numbering([2, 3, 4], ["tp", "cp", "dp"]))
    (1, 2, 6)
    """
    return tuple(accumulate(layout.shape[:-1], mul, initial=1))[: len(layout.shape)]


@attrs.frozen
class Numbering:
    """The fields of a `RankLayout`, whose docstring tells of them, and its questions about ranks.

    Each numbering has one canonical form, so that equal layouts compare equal: strides where they
    suffice, else a list, in which the strides step from position to position.
    """

    shape: tuple[int, ...] = attrs.field(converter=as_sizes)
    dim_names: tuple[str, ...] = attrs.field(converter=as_names)
    rank_offset: int = attrs.field(default=0, converter=as_offset)
    strides: tuple[int, ...] = attrs.field(
        kw_only=True, default=attrs.Factory(dense_strides, takes_self=True), converter=as_strides
    )
    _listing: Listing | None = attrs.field(
        kw_only=True, default=None, converter=as_listing, alias="ranks"
    )

    def __attrs_post_init__(self) -> None:
        if not self.shape and not self.dim_names:
            raise LayoutError("a layout needs at least one dim, but shape and dim_names are empty")
        if len(self.shape) != len(self.dim_names):
            raise LayoutError(
                f"len(shape) {list(self.shape)} != len(dim_names) {list(self.dim_names)}: "
                f"{len(self.shape)} and {len(self.dim_names)}; give one size for each name"
            )
        if len(self.strides) != len(self.shape):
            raise LayoutError(f"strides {self.strides} need one stride for each of {self.shape}")
        if self._listing is not None:
            self._settle(self._listing)
        object.__setattr__(self, "strides", self._canonical_strides())
        if self.last_rank > LARGEST_RANK:
            raise LayoutError(
                f"{self} at rank_offset {self.rank_offset} needs ranks up to {self.last_rank}; "
                f"torch numbers them up to {LARGEST_RANK}"
            )

    def _settle(self, listing: Listing) -> None:
        """Check a list of ranks, and do without it where strides make the same ranks."""
        if len(listing.ranks) != self.size:
            raise LayoutError(
                f"ranks holds {len(listing.ranks)} ranks, but shape {self.shape} has "
                f"{shown(self.size)} positions; give one rank for each"
            )
        first = min(listing.ranks)
        if self.rank_offset not in {0, first}:
            raise LayoutError(
                f"rank_offset {self.rank_offset} may not be given beside ranks, the smallest of "
                f"which is {first}; leave it out"
            )
        if not self._is_dense:
            raise LayoutError(
                f"strides {self.strides} may not be given beside ranks, which say where each "
                f"position is; leave one of them out"
            )
        object.__setattr__(self, "rank_offset", first)
        strides = listing.strides(self.shape)
        if strides is not None:
            object.__setattr__(self, "strides", tuple(strides))
            object.__setattr__(self, "_listing", None)

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

    def __str__(self) -> str:
        return notation.format_sizes(self.dim_names, self.shape)

    def __repr__(self) -> str:
        ranks = f"rank_offset={self.rank_offset}, strides={self.strides}"
        if self._listing is not None:
            ranks = f"ranks={shown(self._listing.ranks)}"
        name = type(self).__name__
        return f"{name}(shape={self.shape}, dim_names={self.dim_names}, {ranks})"

    # ---- which ranks, which dims --------------------------------------------------------------

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(self.shape)

    @property
    def sizes(self) -> dict[str, int]:
        """The size of each dim by name, in the layout's order."""
        return dict(zip(self.dim_names, self.shape, strict=True))

    @property
    def last_rank(self) -> int:
        """The largest rank."""
        if self._listing is not None:
            return max(self._listing.ranks)
        reach: int = sum(map(mul, self.shape, self.strides))
        return self.rank_offset + reach - sum(self.strides)

    @property
    def ranks(self) -> Sequence[int]:
        """All ranks in the order of the numbering: ascending, unless they are listed otherwise."""
        if self._listing is not None:
            return self._listing.ranks
        if self._is_dense:
            return range(self.rank_offset, self.rank_offset + self.size)
        return tuple(self._ranks_at(lattice(self._axes(self.dim_names))).tolist())

    def __contains__(self, rank: object) -> bool:
        try:
            return self._find(rank) is not None
        except RankOutsideError:  # it is no rank at all
            return False

    def size_of(self, *dims: Dims, default: int | None = None) -> int:
        """Return the size of a dim, or the product of the sizes of several.

        Args:
            dims: Names, in any spelling and order.
            default: The size of a dim that there is not.

        Raises:
            UnknownDimError: There is no such dim, and no default.
            LayoutError: There are none, or one comes twice.

        Example:
            >>> from hypercomm import RankLayout
            >>> layout = RankLayout.parse("tp=2,dp=4")
            >>> layout.size_of("dp"), layout.size_of("tp", "dp"), layout.size_of("cp", default=1)
            (4, 8, 1)
        """
        names = as_dims(dims)
        are_strings = all(isinstance(name, str) for name in names)
        absent = [name for name in names if name not in self.dim_names] if are_strings else []
        if default is None or not absent:
            return math.prod(self.shape[self._axis_of(name)] for name in self._check_dims(names))
        present = [name for name in names if name not in absent]
        factors = [as_int(default, "default")] * len(absent)
        return math.prod(factors) * (self.size_of(present) if present else 1)

    def order_dims(self, dims: Dims) -> tuple[str, ...]:
        """Return dims in the layout's order, after checking them.

        Args:
            dims: One name, several as in "dp+cp", or any iterable of names, in any order.

        Raises:
            UnknownDimError: A name is not one of the layout's.
            LayoutError: There are none, or one comes twice.

        Example:
            >>> from hypercomm import RankLayout
            >>> layout = RankLayout.parse("tp=2,cp=2,dp=2")
            >>> layout.order_dims(["dp", "tp"]), layout.order_dims("dp+tp")
            (('tp', 'dp'), ('tp', 'dp'))
        """
        if isinstance(dims, str) and dims in self.dim_names:
            return (dims,)
        wanted = self._check_dims(dims)
        return tuple([name for name in self.dim_names if name in wanted])

    def renumber(self, shape: Iterable[int], dim_names: Iterable[str]) -> Self:
        """Number the same ranks, in the same order, by other dims.

        Raises:
            LayoutError: The sizes do not multiply to the number of ranks, or there are gaps, and
                more ranks than can be listed.

        Example:
            >>> from hypercomm import RankLayout
            >>> RankLayout([4], ["dp"], 8).renumber([2, 2], ["tp", "cp"]).coords(9)
            {'tp': 1, 'cp': 0}
        """
        listing = self._listing
        if not self._is_dense:
            if self.size > LARGEST_WORLD:
                raise LayoutError(
                    f"with gaps (strides {self.strides}) the ranks must be listed, and {self.size} "
                    f"are more than the {LARGEST_WORLD} that can be; take a layout without gaps"
                )
            listing = Listing(self.ranks)
        other = type(self)(shape, dim_names, self.rank_offset, ranks=listing)
        if other.size != self.size:
            raise LayoutError(f"{other} has {other.size} ranks, but {self} has {self.size}")
        return other

    # ---- one rank -----------------------------------------------------------------------------

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
        return self._rank_at(self._offset_at(coords))

    def shift(self, rank: int, dim: str, by: int, periodic: bool = False) -> int | None:
        """Return the rank that is `by` steps away along a dim, as MPI's Cart_shift does.

        Args:
            rank: The rank to start from.
            dim: The dim to walk along.
            by: Steps: 1 for the next pipeline stage, -1 for the previous one.
            periodic: Whether the dim wraps around, as in a ring.

        Returns:
            The rank, or None when the walk leaves a dim that is not periodic.

        Raises:
            UnknownDimError, RankOutsideError: The layout has no such dim or rank.

        Example:
            >>> from hypercomm import RankLayout
            >>> layout = RankLayout.parse("tp=2,pp=3")
            >>> layout.shift(2, "pp", 1), layout.shift(4, "pp", 1)
            (4, None)
            >>> layout.shift(4, "pp", 1, periodic=True)
            0
        """
        axis = self._axis_of(dim)
        here = self._index(rank)[axis]
        there = here + as_int(by, "by")
        if periodic:
            there %= self.shape[axis]
        elif not 0 <= there < self.shape[axis]:
            return None
        return self._rank_at(self._offset_of(rank) + (there - here) * self.strides[axis])

    # ---- inside -------------------------------------------------------------------------------

    @property
    def _is_dense(self) -> bool:
        """Whether there are no gaps, be it between ranks or between positions in the list."""
        return self.strides == dense_strides(self)

    def _axes(self, names: Iterable[str]) -> list[Axis]:
        axes = (self.dim_names.index(name) for name in names)
        return [Axis(self.shape[axis], self.strides[axis]) for axis in axes]

    def _axis_of(self, dim: str) -> int:
        if not isinstance(dim, str) or dim not in self.dim_names:
            raise UnknownDimError(
                f"unknown dim {shown(dim)}; this layout has dims {self.dim_names}"
                f"{did_you_mean(dim, self.dim_names)}"
            )
        return self.dim_names.index(dim)

    def _check_dims(self, dims: Dims) -> tuple[str, ...]:
        if isinstance(dims, str) and dims in self.dim_names:
            return (dims,)
        wanted = as_dims(dims)
        if not wanted:
            raise LayoutError(f"dims is empty; name at least one of {self.dim_names}")
        for position, name in enumerate(wanted):
            self._axis_of(name)
            if name in wanted[:position]:
                raise LayoutError(f"dim {name!r} comes twice in dims {wanted}")
        return wanted

    def _offset_at(self, coords: Mapping[str, int]) -> int:
        """The first offset with these coordinates."""
        offset = 0
        for name, coordinate in coords.items():
            axis = self._axis_of(name)
            if not 0 <= as_int(coordinate, f"the coordinate of dim {name!r}") < self.shape[axis]:
                raise LayoutError(
                    f"the coordinate of dim {name!r} must be in range({self.shape[axis]}), "
                    f"got {shown(coordinate)}"
                )
            offset += int(coordinate) * self.strides[axis]
        return offset

    def _offset_of(self, rank: object) -> int:
        if self._listing is None:
            return as_rank(rank) - self.rank_offset
        position = self._listing.position(as_rank(rank))
        return -1 if position is None else position

    def _rank_at(self, offset: int) -> int:
        return self.rank_offset + offset if self._listing is None else self._listing.ranks[offset]

    def _ranks_at(self, offsets: NDArray[np.int64]) -> NDArray[np.int64]:
        return self.rank_offset + offsets if self._listing is None else self._listing.array[offsets]

    def _index(self, rank: object) -> list[int]:
        """The coordinates of a rank, in the order of the dims."""
        index = self._find(rank)
        if index is not None:
            return index
        if self._listing is not None:
            held = f"the ranks {self._listing}"
        else:
            gaps = "" if self._is_dense else f", with gaps (strides {self.strides})"
            held = f"ranks {self.rank_offset}..{self.last_rank}{gaps}"
        raise RankOutsideError(f"rank {shown(rank)} is not in layout {self}, which holds {held}")

    def _find(self, rank: object) -> list[int] | None:
        """The coordinates of a rank, None where it is not held; no error, which costs more."""
        rest = self._offset_of(rank)
        reversed_index = []
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            coordinate, rest = divmod(rest, stride)
            if not 0 <= coordinate < size:
                return None
            reversed_index.append(coordinate)
        return None if rest else reversed_index[::-1]
