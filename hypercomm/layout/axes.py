"""Axes: the nameless core of every numbering here, a few (size, stride) pairs."""

from __future__ import annotations

from collections.abc import Sequence
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
