"""ListedGroups: the groups of ranks that are numbered by a list."""

from __future__ import annotations

import operator

import attrs
import numpy as np
from numpy.typing import NDArray

from hypercomm.errors import RankOutsideError
from hypercomm.layout.groups.rank_groups import RankGroups
from hypercomm.layout.groups.strided import StridedGroups
from hypercomm.layout.numbering.axes import are_nested, axes_of
from hypercomm.layout.numbering.listing import Listing
from hypercomm.layout.reading.checks import as_rank
from hypercomm.layout.reading.shown import shown


def listed_groups(positions: StridedGroups, listing: Listing) -> RankGroups:
    """Return the groups of listed ranks at these positions: on a lattice, where they are on one.

    So groups with the same ranks in the same order are equal, whatever they were made from.

    >>> from hypercomm.layout.numbering.axes import Axis
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
