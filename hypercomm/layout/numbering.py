"""Axes, which turn coordinates into offsets, and lists, which turn offsets into ranks.

An offset is the sum of coordinate times stride over the dims. The rank of an offset is the first
rank plus the offset, or the rank at that position in a list (`Listing`).
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import NamedTuple

import attrs
import numpy as np
from numpy.typing import NDArray

_STRIDE = operator.itemgetter(1)


# ---- axes ---------------------------------------------------------------------------------------


class Axis(NamedTuple):
    """A dim as numbers: its size, and the stride between neighbours."""

    size: int
    stride: int


def lattice(axes: Sequence[Axis]) -> NDArray[np.int64]:
    """Enumerate the offsets that axes span, the first axis varying fastest.

    >>> lattice([Axis(2, 1), Axis(3, 4)]).tolist()
    [0, 1, 4, 5, 8, 9]
    """
    offsets = np.zeros(1, dtype=np.int64)
    for size, stride in axes:
        steps = np.arange(size, dtype=np.int64) * stride
        offsets = (steps[:, None] + offsets[None, :]).reshape(-1)
    return offsets


def coalesce(axes: Iterable[Axis]) -> tuple[Axis, ...]:
    """Drop axes of size 1, and join neighbouring axes that are equivalent to one axis.

    >>> coalesce([Axis(2, 1), Axis(1, 2), Axis(3, 2), Axis(2, 12)])
    (Axis(size=6, stride=1), Axis(size=2, stride=12))
    """
    joined: list[Axis] = []
    for axis in axes:
        size, stride = axis
        if size == 1:
            continue
        if joined and joined[-1][0] * joined[-1][1] == stride:
            joined[-1] = Axis(joined[-1][0] * size, joined[-1][1])
        else:
            joined.append(axis)
    return tuple(joined)


def cut_axes(axes: Sequence[Axis], count: int) -> tuple[list[Axis], list[Axis]] | None:
    """Split axes after `count` elements, or return None if no axis can be split there.

    >>> cut_axes([Axis(2, 1), Axis(6, 4)], 4)
    ([Axis(size=2, stride=1), Axis(size=2, stride=4)], [Axis(size=3, stride=8)])
    >>> cut_axes([Axis(6, 1)], 4)
    """
    before: list[Axis] = []
    after = list(axes)
    while count > 1:
        size, stride = after.pop(0)
        part = math.gcd(size, count)
        if part not in {size, count}:
            return None
        before.append(Axis(part, stride))
        if part < size:
            after.insert(0, Axis(size // part, stride * part))
        count //= part
    return before, after


def are_nested(axes: Iterable[Axis]) -> bool:
    """Return whether each stride exceeds the largest offset of all axes with smaller strides.

    If so, dividing an offset by the strides in descending order yields its coordinates.

    >>> are_nested([Axis(4, 2), Axis(1, 9), Axis(2, 1)]), are_nested([Axis(2, 1), Axis(3, 1)])
    (True, False)
    """
    largest = 0
    for size, stride in sorted(axes, key=_STRIDE):
        if size > 1:
            if stride <= largest:
                return False
            largest += (size - 1) * stride
    return True


def find_equal(values: NDArray[np.int64]) -> tuple[int, int] | None:
    """Return the positions of two equal values, or None if all differ.

    >>> find_equal(np.array([4, 7, 5, 7])), find_equal(np.array([4, 7, 5]))
    ((1, 3), None)
    """
    order = np.argsort(values, kind="stable")
    (equal,) = np.nonzero(np.diff(values[order]) == 0)
    return (int(order[equal[0]]), int(order[equal[0] + 1])) if equal.size else None


# ---- strides ------------------------------------------------------------------------------------


def dense_strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the strides without gaps, the first dim varying fastest.

    >>> dense_strides([2, 3, 4])
    (1, 2, 6)
    """
    return tuple(accumulate(shape[:-1], operator.mul, initial=1))


def canonical_strides(shape: Sequence[int], given: Sequence[int]) -> tuple[int, ...]:
    """Replace the strides of dims of size 1, which have no effect.

    The new stride is the size times the stride of the previous dim, or 1 for the first dim.

    >>> canonical_strides([2, 1, 3], [1, 7, 4])
    (1, 2, 4)
    """
    strides: list[int] = []
    extent = 1
    for size, stride in zip(shape, given, strict=True):
        strides.append(stride if size > 1 else extent)
        extent = size * strides[-1]
    return tuple(strides)


def strides_of(shape: Sequence[int], ranks: NDArray[np.int64]) -> tuple[int, ...] | None:
    """Return strides with which a shape enumerates these distinct ranks, or None if none exist.

    >>> strides_of((2, 2), np.array([3, 4, 7, 8])), strides_of((4,), np.array([3, 4, 7, 8]))
    ((1, 4), None)
    >>> strides_of((2, 2), np.array([3, 7, 4, 8]))
    (4, 1)
    """
    offsets = ranks - ranks[0]
    axes = [
        Axis(size, int(offsets[neighbour]) if size > 1 else 1)
        for size, neighbour in zip(shape, dense_strides(shape), strict=True)
    ]
    fits = are_nested(axes) and np.array_equal(lattice(axes), offsets)
    return tuple([stride for _, stride in axes]) if fits else None


def renumbered(axes: Iterable[Axis], shape: Sequence[int]) -> tuple[int, ...] | None:
    """Return the strides with which another shape enumerates the same offsets in the same order.

    Args:
        axes: The present axes, the first one varying fastest.
        shape: The new sizes, whose product is the number of offsets.

    Returns:
        A stride for each size, or None if there are no such strides.

    >>> renumbered([Axis(4, 2), Axis(2, 1)], [2, 2, 2]), renumbered([Axis(4, 2), Axis(2, 1)], [8])
    ((2, 4, 1), None)
    """
    rest: Sequence[Axis] = coalesce(axes)
    strides = []
    for size in shape:
        cut = cut_axes(rest, size)
        if cut is None:
            return None
        own = coalesce(cut[0])
        rest = cut[1]
        if len(own) > 1:
            return None
        strides.append(own[0].stride if own else 1)
    return tuple(strides)


# ---- lists of ranks -----------------------------------------------------------------------------


@attrs.frozen(slots=False, cache_hash=True)
class Listing:
    """Distinct ranks in a list. The offset of a rank is its position in the list.

    A pickle contains the list, but no cached values.

    Example:
        >>> listing = Listing((4, 2, 7))
        >>> listing.offset_of(7), listing.offset_of(3), listing.first
        (2, -1, 2)
    """

    ranks: tuple[int, ...]

    def __reduce__(self) -> tuple[type[Listing], tuple[tuple[int, ...]]]:
        return Listing, (self.ranks,)

    @functools.cached_property
    def array(self) -> NDArray[np.int64]:
        """The ranks as an array, which callers must not change."""
        return np.array(self.ranks, dtype=np.int64)

    @functools.cached_property
    def _positions(self) -> dict[int, int]:
        return {rank: position for position, rank in enumerate(self.ranks)}

    @functools.cached_property
    def first(self) -> int:
        """The smallest rank."""
        return min(self.ranks)

    def offset_of(self, rank: int) -> int:
        """Return the offset of a rank, or -1 if the rank is not in the list."""
        return self._positions.get(rank, -1)
