"""Listings: ranks that are numbered by a list, and the groups of positions in it.

A layout counts positions: 0, 1, 2 ..., the first dim fastest. As a rule position p is rank
`rank_offset + p`, or as its strides say; a listing says it for each position.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterable, Sequence
from functools import cached_property

import attrs
import numpy as np
from numpy.typing import NDArray

from hypercomm.errors import RankOutsideError
from hypercomm.layout.axes import Axis, are_nested, axes_of, lattice
from hypercomm.layout.checks import as_rank, as_rank_list
from hypercomm.layout.messages import shown
from hypercomm.layout.rank_groups import RankGroups, StridedGroups

_SHOWN = 16
"""Ranks of a list that a message shows."""


@attrs.frozen(slots=False, cache_hash=True)
class Listing:
    """Distinct ranks, one for each position; a value that pickles as the tuple alone.

    Example:
        >>> listing = Listing([4, 2, 7])
        >>> listing.ranks[2], listing.position(7), listing.position(3), str(listing)
        (7, 2, None, '4, 2, 7')
    """

    ranks: tuple[int, ...] = attrs.field(converter=as_rank_list)

    def __str__(self) -> str:
        first = self.ranks[:_SHOWN]
        left = len(self.ranks) - len(first)
        return ", ".join(map(str, first)) + (f" and {left} more" if left else "")

    def __reduce__(self) -> tuple[type[Listing], tuple[tuple[int, ...]]]:
        return Listing, (self.ranks,)

    @cached_property
    def array(self) -> NDArray[np.int64]:
        """The ranks, in the order of the positions; not to be written to."""
        return np.array(self.ranks, dtype=np.int64)

    @cached_property
    def _positions(self) -> dict[int, int]:
        return {rank: position for position, rank in enumerate(self.ranks)}

    def position(self, rank: int) -> int | None:
        """Return the position of a rank; None if it is not listed."""
        return self._positions.get(rank)

    def strides(self, shape: Sequence[int]) -> list[int] | None:
        """Find the strides that number these ranks over a shape; None if no nested ones do.

        >>> Listing([3, 4, 7, 8]).strides([2, 2]), Listing([3, 4, 7, 8]).strides([4])
        ([1, 4], None)
        """
        neighbours = itertools.accumulate(shape[:-1], operator.mul, initial=1)
        offsets = self.array - self.array[0]
        axes = [
            Axis(size, int(offsets[neighbour]) if size > 1 else 1)
            for size, neighbour in zip(shape, neighbours, strict=True)
        ]
        fits = are_nested(axes) and np.array_equal(lattice(axes), offsets)
        return [stride for _, stride in axes] if fits else None


def as_listing(value: Iterable[int] | Listing | None) -> Listing | None:
    """Read the ranks that a layout is given, if it is given any."""
    return value if value is None or isinstance(value, Listing) else Listing(value)


def listed_groups(positions: StridedGroups, listing: Listing) -> RankGroups:
    """Return the groups of listed ranks at these positions: on a lattice, where they are on one.

    So groups with the same ranks in the same order are equal, whatever they were made from.

    >>> whole = StridedGroups(0, [], [Axis(4, 1)])
    >>> listed_groups(whole, Listing([0, 1, 4, 5])), listed_groups(whole, Listing([0, 1, 5, 4]))
    (<1 groups of 4: (0, 1, 4, 5)>, <1 groups of 4: (0, 1, 5, 4)>)
    """
    listed = ListedGroups(positions, listing)
    ranks = listed.to_array()
    first = int(ranks[0, 0])
    outer, inner = axes_of(ranks[:, 0] - first), axes_of(ranks[0] - first)
    if outer is None or inner is None:
        return listed
    strided = StridedGroups(first, outer, inner)
    nested = are_nested(sorted((*outer, *inner), key=operator.attrgetter("stride")))
    return strided if nested and np.array_equal(strided.to_array(), ranks) else listed


@attrs.frozen(repr=False, eq=False)
class ListedGroups(RankGroups):
    """The listed ranks at the positions of other groups, in the order of the positions."""

    positions: StridedGroups
    listing: Listing

    @property
    def group_size(self) -> int:
        return self.positions.group_size

    def __len__(self) -> int:
        return len(self.positions)

    def locate(self, rank: int) -> tuple[int, int]:
        position = self.listing.position(as_rank(rank))
        if position is None:
            raise RankOutsideError(f"rank {shown(rank)} is in none of these groups: {self!r}")
        return self.positions.locate(position)

    def members(self, index: int, positions: range) -> tuple[int, ...]:
        ranks = self.listing.ranks
        return tuple(ranks[position] for position in self.positions.members(index, positions))

    def to_array(self) -> NDArray[np.int64]:
        return self.listing.array[self.positions.to_array()]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, ListedGroups):
            return NotImplemented
        if (self.positions, self.listing) == (other.positions, other.listing):
            return True
        return np.array_equal(self.to_array(), other.to_array())

    def __hash__(self) -> int:
        return hash((len(self), self[0]))
