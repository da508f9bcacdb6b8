"""Listings: ranks that are numbered by a list.

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

from hypercomm.layout.numbering.axes import Axis, are_nested, lattice
from hypercomm.layout.reading.checks import as_rank_list
from hypercomm.layout.reading.shown import some_of

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
        return some_of(self.ranks, _SHOWN)

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
