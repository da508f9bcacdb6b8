"""Numbering: how a layout counts its ranks, and what can be asked about one of them.

Coordinates make a place: the sum of coordinate times stride over the dims. A place is the distance
of a rank from the first one, `rank_offset`; or, where the ranks are listed, a position in the list.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from hypercomm.errors import LayoutError, RankOutsideError, UnknownDimError
from hypercomm.layout import notation
from hypercomm.layout.axes import Axis, lattice
from hypercomm.layout.checks import (
    LARGEST_RANK,
    as_int,
    as_names,
    as_offset,
    as_rank,
    as_sizes,
    as_strides,
    as_tuple,
)
from hypercomm.layout.listing import Listing, as_listing
from hypercomm.layout.messages import shown


def dense_strides(layout: Numbering) -> tuple[int, ...]:
    """Return the strides of a layout without gaps, in ranks, in the order of its dims.

    >>> dense_strides(Numbering([2, 3, 4], ["tp", "cp", "dp"]))
    (1, 2, 6)
    """
    return tuple(math.prod(layout.shape[:axis]) for axis in range(len(layout.shape)))


@attrs.frozen
class Numbering:
    """The fields of a `RankLayout`, whose docstring tells of them, and its questions about ranks.

    Strides or a list: one numbering is told in one way, so that equal ones are equal. Where strides
    can make the ranks of a list, they do; else they step from position to position in the list.
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
                f"shape {self.shape} has {len(self.shape)} sizes, but dim_names "
                f"{self.dim_names} has {len(self.dim_names)} names; give one name for each size"
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
        if self.strides != dense_strides(self):
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
    def last_rank(self) -> int:
        """The largest rank."""
        if self._listing is not None:
            return max(self._listing.ranks)
        steps = zip(self.shape, self.strides, strict=True)
        return self.rank_offset + sum((size - 1) * stride for size, stride in steps)

    @property
    def ranks(self) -> Sequence[int]:
        """All ranks in the order of the numbering: ascending, unless they are listed otherwise."""
        if self._listing is not None:
            return self._listing.ranks
        if self.strides == dense_strides(self):
            return range(self.rank_offset, self.rank_offset + self.size)
        return tuple(self._ranks_at(lattice(self._axes(self.dim_names))).tolist())

    def __contains__(self, rank: object) -> bool:
        try:
            return self._find(rank) is not None
        except RankOutsideError:  # it is no rank at all
            return False

    def size_of(self, dim: str, default: int | None = None) -> int:
        """Return the size of a dim, or `default` if there is no such dim and one is given.

        Raises:
            UnknownDimError: There is no such dim, and no default.

        Example:
            >>> from hypercomm import RankLayout
            >>> layout = RankLayout.parse("tp=2,dp=4")
            >>> layout.size_of("dp"), layout.size_of("cp", default=1)
            (4, 1)
        """
        if default is not None and isinstance(dim, str) and dim not in self.dim_names:
            return default
        return self.shape[self._axis_of(dim)]

    def order_dims(self, dims: str | Iterable[str]) -> tuple[str, ...]:
        """Return dims in the layout's order, after checking them.

        Args:
            dims: One name, or any iterable of names, in any order.

        Raises:
            UnknownDimError: A name is not one of the layout's.
            LayoutError: There are none, or one comes twice.

        Example:
            >>> from hypercomm import RankLayout
            >>> RankLayout.parse("tp=2,cp=2,dp=2").order_dims(["dp", "tp"])
            ('tp', 'dp')
        """
        wanted = self._check_dims(dims)
        return tuple(name for name in self.dim_names if name in wanted)

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
        return self._rank_at(self._place_at(coords))

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
            >>> from hypercomm import RankLayout
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
        return self._rank_at(self._place_of(rank) + (there - here) * self.strides[axis])

    # ---- inside -------------------------------------------------------------------------------

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

    def _place_at(self, coords: Mapping[str, int]) -> int:
        """The first place with these coordinates."""
        place = 0
        for name, coordinate in coords.items():
            axis = self._axis_of(name)
            if not 0 <= as_int(coordinate, f"the coordinate of dim {name!r}") < self.shape[axis]:
                raise LayoutError(
                    f"the coordinate of dim {name!r} must be in range({self.shape[axis]}), "
                    f"got {shown(coordinate)}"
                )
            place += int(coordinate) * self.strides[axis]
        return place

    def _place_of(self, rank: object) -> int:
        if self._listing is None:
            return as_rank(rank) - self.rank_offset
        position = self._listing.position(as_rank(rank))
        return -1 if position is None else position

    def _rank_at(self, place: int) -> int:
        return self.rank_offset + place if self._listing is None else self._listing.ranks[place]

    def _ranks_at(self, places: NDArray[np.int64]) -> NDArray[np.int64]:
        return self.rank_offset + places if self._listing is None else self._listing.array[places]

    def _index(self, rank: object) -> list[int]:
        """The coordinates of a rank, in the order of the dims."""
        index = self._find(rank)
        if index is None:
            raise self._outside(rank)
        return index

    def _find(self, rank: object) -> list[int] | None:
        """The coordinates of a rank, None where it is not held; no error, which costs more."""
        rest = self._place_of(rank)
        reversed_index = []
        for size, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            coordinate, rest = divmod(rest, stride)
            if not 0 <= coordinate < size:
                return None
            reversed_index.append(coordinate)
        return None if rest else reversed_index[::-1]

    def _outside(self, rank: object) -> RankOutsideError:
        if self._listing is not None:
            held = f"the ranks {self._listing}"
        else:
            dense = self.strides == dense_strides(self)
            gaps = "" if dense else f", with gaps (strides {self.strides})"
            held = f"ranks {self.rank_offset}..{self.last_rank}{gaps}"
        return RankOutsideError(f"rank {shown(rank)} is not in layout {self}, which holds {held}")
