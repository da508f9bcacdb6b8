"""Axes: the nameless core of every numbering here, a few (size, stride) pairs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray


class Axis(NamedTuple):
    """`size` steps of `stride` ranks each."""

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


def coalesce(axes: Sequence[Axis]) -> tuple[Axis, ...]:
    """Drop axes of size 1 and join neighbours that step as one.

    >>> coalesce([Axis(2, 1), Axis(1, 2), Axis(3, 2), Axis(2, 12)])
    (Axis(size=6, stride=1), Axis(size=2, stride=12))
    """
    joined: list[Axis] = []
    for axis in axes:
        if axis.size == 1:
            continue
        if joined and joined[-1].size * joined[-1].stride == axis.stride:
            joined[-1] = Axis(joined[-1].size * axis.size, joined[-1].stride)
        else:
            joined.append(axis)
    return tuple(joined)


def element(axes: Sequence[Axis], index: int) -> int:
    """Return element `index` of `lattice(axes)`, without making the rest of it.

    >>> element([Axis(2, 1), Axis(3, 4)], 5)
    9
    """
    offset = 0
    for size, stride in axes:
        index, digit = divmod(index, size)
        offset += digit * stride
    return offset


def axes_of(offsets: NDArray[np.int64]) -> list[Axis] | None:
    """Find the nested axes whose `lattice` these offsets are; None if there are none.

    >>> axes_of(np.array([0, 1, 4, 5, 8, 9])), axes_of(np.array([0, 1, 5])), axes_of(np.array([1]))
    ([Axis(size=2, stride=1), Axis(size=3, stride=4)], None, None)
    """
    axes: list[Axis] = []
    rest = offsets
    while len(rest) > 1:
        stride = int(rest[1])
        astray = np.flatnonzero(rest != stride * np.arange(len(rest)))
        size = int(astray[0]) if len(astray) else len(rest)  # how far the first step is repeated
        if size < 2 or len(rest) % size:
            return None
        axes.append(Axis(size, stride))
        rest = rest[::size]
    return axes if are_nested(axes) and np.array_equal(lattice(axes), offsets) else None


def are_nested(axes: Iterable[Axis]) -> bool:
    """Tell whether each stride is at least the extent of the axes before it; size 1 takes no step.

    >>> are_nested([Axis(2, 1), Axis(1, 0), Axis(3, 2)]), are_nested([Axis(2, 1), Axis(3, 1)])
    (True, False)
    """
    extent = 1
    for size, stride in axes:
        if size > 1 and stride < extent:
            return False
        extent = size * stride if size > 1 else extent
    return True
