"""StridedGroups: the groups of ranks that strides number."""

from __future__ import annotations

import math
from operator import itemgetter

import attrs
import numpy as np
from numpy.typing import NDArray

from hypercomm.errors import RankOutsideError
from hypercomm.layout.groups.rank_groups import RankGroups
from hypercomm.layout.numbering.axes import Axis, coalesce, element, lattice
from hypercomm.layout.reading.checks import as_rank
from hypercomm.layout.reading.shown import shown

_SIZE, _STRIDE = itemgetter(0), itemgetter(1)


def _descending(groups: StridedGroups) -> list[tuple[int, int, bool]]:
    """All axes from the largest stride to the smallest, and whether each is an outer one."""
    outer = [(*axis, True) for axis in groups.outer]
    return sorted(outer + [(*axis, False) for axis in groups.inner], key=_STRIDE, reverse=True)


@attrs.frozen(repr=False)
class StridedGroups(RankGroups):
    """Groups on a lattice: `outer` axes tell groups apart, `inner` axes span the members.

    Built by `RankLayout.groups`. Both lists run from the smallest stride to the largest, and
    together they are nested: each stride is at least the extent of the axes below it.
    """

    origin: int
    outer: tuple[Axis, ...] = attrs.field(converter=coalesce)
    inner: tuple[Axis, ...] = attrs.field(converter=coalesce)
    _axes: list[tuple[int, int, bool]] = attrs.field(
        init=False, eq=False, default=attrs.Factory(_descending, takes_self=True)
    )

    @property
    def group_size(self) -> int:
        return math.prod(map(_SIZE, self.inner))

    @property
    def is_sorted(self) -> bool:
        """Always: `inner` axes are nested."""
        return True

    def __len__(self) -> int:
        return math.prod(map(_SIZE, self.outer))

    def locate(self, rank: int) -> tuple[int, int]:
        rest = as_rank(rank) - self.origin
        index, position, groups, members = 0, 0, len(self), self.group_size
        for size, stride, is_outer in self._axes:
            digit, rest = divmod(rest, stride)
            if not 0 <= digit < size:
                rest = -1
                break
            if is_outer:
                groups //= size
                index += digit * groups
            else:
                members //= size
                position += digit * members
        if rest:
            raise RankOutsideError(f"rank {shown(rank)} is in none of these groups: {self!r}")
        return index, position

    def members(self, index: int, positions: range) -> tuple[int, ...]:
        base = self.origin + element(self.outer, index)
        if not self.inner:
            return (base,)[: len(positions)]
        if len(self.inner) == 1:
            stride = self.inner[0].stride
            return tuple(
                range(
                    base + positions.start * stride,
                    base + positions.stop * stride,
                    positions.step * stride,
                )
            )
        if len(positions) < self.group_size:
            return tuple(base + element(self.inner, position) for position in positions)
        ranks = [base]
        for size, stride in self.inner:
            ranks = [rank + step for step in range(0, size * stride, stride) for rank in ranks]
        return tuple(ranks)

    def to_array(self) -> NDArray[np.int64]:
        bases = self.origin + lattice(self.outer)
        return bases[:, None] + lattice(self.inner)[None, :]
