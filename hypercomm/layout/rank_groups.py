"""RankGroups: the disjoint groups of ranks that some dims make, and groups derived from groups.

A question about one rank or one group is arithmetic on a handful of axes; nothing on its path
grows with the number of groups. Enumeration of everything is vectorised.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from operator import itemgetter

import attrs
import numpy as np
from numpy.typing import NDArray

from hypercomm.errors import LayoutError, RankOutsideError
from hypercomm.layout.axes import Axis, coalesce, element, lattice
from hypercomm.layout.checks import as_few, as_int, as_rank, as_tuple, positive
from hypercomm.layout.messages import shown
from hypercomm.layout.sizes import divisors

_SHOWN = 5
"""Members of a group that its repr shows."""


class RankGroups(ABC, Sequence[tuple[int, ...]]):
    """Disjoint groups of ranks, all of one size, each a tuple.

    Members are ascending, unless the layout lists its ranks in another order (`is_sorted` tells);
    then they are in the layout's. It is a sequence of tuples: `len(groups)`, `groups[i]`, `for
    group in groups`. Groups are ordered like the ranks: the first dim that tells groups apart
    varies fastest.

    Example:
        >>> from hypercomm import RankLayout
        >>> dp = RankLayout.parse("tp=2,dp=3").groups("dp")
        >>> len(dp), dp.group_size, list(dp)
        (2, 3, [(0, 2, 4), (1, 3, 5)])
        >>> dp.of(3), dp.index_of(3), dp.position_of(3)
        ((1, 3, 5), 1, 1)
    """

    __slots__ = ()

    @property
    @abstractmethod
    def group_size(self) -> int:
        """The number of members of every group."""

    @abstractmethod
    def locate(self, rank: int) -> tuple[int, int]:
        """Return (index of the group, position within it) of `rank`.

        Raises:
            RankOutsideError: `rank` is a member of no group.
        """

    @abstractmethod
    def members(self, index: int, positions: range) -> tuple[int, ...]:
        """Return the ranks at `positions` of group `index`; neither is checked."""

    @abstractmethod
    def to_array(self) -> NDArray[np.int64]:
        """Enumerate all groups as an array of shape (number of groups, group size)."""

    @property
    def is_sorted(self) -> bool:
        """Whether the members of every group ascend; at once, unless the layout lists its ranks.

        Example:
            >>> from hypercomm import RankLayout
            >>> listed = RankLayout([2, 2], ["tp", "dp"], ranks=[3, 1, 7, 5])
            >>> listed.groups("tp").is_sorted, listed.groups("dp").is_sorted
            (False, True)
        """
        return bool((np.diff(self.to_array(), axis=1) > 0).all())

    def of(self, rank: int) -> tuple[int, ...]:
        """Return the group that `rank` is a member of, in O(dims + size of the answer).

        Raises:
            RankOutsideError: `rank` is a member of no group.
        """
        return self.members(self.locate(rank)[0], range(self.group_size))

    def index_of(self, rank: int) -> int:
        """Return the index of the group that `rank` is a member of."""
        return self.locate(rank)[0]

    def position_of(self, rank: int) -> int:
        """Return the position of `rank` within its group: its group rank."""
        return self.locate(rank)[1]

    def has_member(self, rank: int) -> bool:
        """Tell whether `rank` is a member of any of the groups."""
        try:
            self.locate(rank)
        except RankOutsideError:
            return False
        return True

    def chunks(self, size: int) -> RankGroups:
        """Cut every group into consecutive groups of `size` members.

        Raises:
            LayoutError: `size` does not divide the group size.

        Example:
            >>> from hypercomm import RankLayout
            >>> list(RankLayout.parse("dp=6").groups("dp").chunks(3))
            [(0, 1, 2), (3, 4, 5)]
        """
        size = positive(size, "the chunk size")
        if self.group_size % size:
            raise LayoutError(
                f"chunk size {size} does not divide the group size {self.group_size}; "
                f"use one of {divisors(self.group_size)}"
            )
        return SlicedGroups(self, size, 1)

    def levels(self, sizes: Sequence[int]) -> tuple[RankGroups, ...]:
        """Factorise every group into hierarchical sub-groups, one `RankGroups` for each level.

        Level 0 takes `sizes[0]` consecutive members, level 1 takes `sizes[1]` members that are
        `sizes[0]` apart, and so on. This is what Megatron's `create_hierarchical_groups` makes
        for hierarchical context parallelism.

        Args:
            sizes: Group size of each level, innermost first; their product is the group size.

        Raises:
            LayoutError: The product of `sizes` is not the group size.

        Example:
            >>> from hypercomm import RankLayout
            >>> inner, outer = RankLayout.parse("cp=4").groups("cp").levels([2, 2])
            >>> list(inner), list(outer)
            ([(0, 1), (2, 3)], [(0, 2), (1, 3)])
        """
        sizes = [positive(size, "every level size") for size in as_few(sizes, "level sizes")]
        if math.prod(sizes) != self.group_size:
            factors = " * ".join(map(str, sizes)) or "1"
            raise LayoutError(
                f"level sizes {factors} = {math.prod(sizes)}, but each group has "
                f"{self.group_size} members"
            )
        return tuple(
            SlicedGroups(self, size, math.prod(sizes[:level])) for level, size in enumerate(sizes)
        )

    def pick(self, function: Callable[[tuple[int, ...]], Sequence[int]]) -> RankGroups:
        """Keep of every group the ranks that `function` names, each once, in the group's order.

        `function` sees one group at a time, and must keep equally many ranks of each. Megatron's
        embedding groups are the first and last stage of every pipeline.

        Raises:
            LayoutError: When a group is looked at, if `function` names no rank, a rank that is
                not in the group, or another number of ranks than for the first group.

        Example:
            >>> from hypercomm import RankLayout
            >>> pp = RankLayout.parse("tp=2,pp=3").groups("pp")
            >>> list(pp.pick(lambda group: (group[0], group[-1])))
            [(0, 4), (1, 5)]
        """
        if not callable(function):
            raise LayoutError(f"pick() takes a function of a group, got {shown(function)}")
        return PickedGroups(self, function)

    def __getitem__(self, index: int) -> tuple[int, ...]:  # type: ignore[override]
        index = as_int(index, "the index of a group")
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"group {index} is out of range; there are {len(self)} groups")
        return self.members(position, range(self.group_size))

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return map(tuple, self.to_array().tolist())

    def __repr__(self) -> str:
        first = ", ".join(self._shorten(index) for index in range(min(len(self), 2)))
        more = ", ..." if len(self) > 2 else ""
        return f"<{len(self)} groups of {self.group_size}: {first}{more}>"

    def _shorten(self, index: int) -> str:
        """Write a group, leaving out the middle of a long one."""
        size = self.group_size
        if size <= _SHOWN:
            return str(self[index])
        first = self.members(index, range(_SHOWN - 1))
        (last,) = self.members(index, range(size - 1, size))
        return f"({', '.join(map(str, first))}, ..., {last})"


@attrs.frozen(repr=False)
class StridedGroups(RankGroups):
    """Groups on a lattice: `outer` axes tell groups apart, `inner` axes span the members.

    Built by `RankLayout.groups`. Both lists run from the smallest stride to the largest, and
    together they are nested: each stride is at least the extent of the axes below it.
    """

    origin: int
    outer: tuple[Axis, ...] = attrs.field(converter=coalesce)
    inner: tuple[Axis, ...] = attrs.field(converter=coalesce)

    @property
    def group_size(self) -> int:
        return math.prod(size for size, _ in self.inner)

    @property
    def is_sorted(self) -> bool:
        """Always: `inner` axes are nested."""
        return True

    def __len__(self) -> int:
        return math.prod(size for size, _ in self.outer)

    def locate(self, rank: int) -> tuple[int, int]:
        rest = as_rank(rank) - self.origin
        index, position, groups, members = 0, 0, len(self), self.group_size
        for size, stride, is_outer in self._descending():
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

    def _descending(self) -> list[tuple[int, int, bool]]:
        """All axes, the largest stride first: size, stride, and whether it tells groups apart."""
        axes = [(*axis, True) for axis in self.outer] + [(*axis, False) for axis in self.inner]
        return sorted(axes, key=itemgetter(1), reverse=True)

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


@attrs.frozen(repr=False)
class SlicedGroups(RankGroups):
    """Every `step`-th member of each parent group, `size` of them: chunks and hierarchy levels."""

    parent: RankGroups
    size: int
    step: int

    @property
    def group_size(self) -> int:
        return self.size

    @property
    def is_sorted(self) -> bool:
        """Whether the members of every group ascend: where the parent's do, and perhaps beyond."""
        return self.parent.is_sorted or super().is_sorted

    @property
    def _per_parent(self) -> int:
        return self.parent.group_size // self.size

    def __len__(self) -> int:
        return len(self.parent) * self._per_parent

    def locate(self, rank: int) -> tuple[int, int]:
        parent_index, parent_position = self.parent.locate(rank)
        block, within = divmod(parent_position, self.size * self.step)
        position, phase = divmod(within, self.step)
        return parent_index * self._per_parent + block * self.step + phase, position

    def members(self, index: int, positions: range) -> tuple[int, ...]:
        parent_index, within = divmod(index, self._per_parent)
        block, phase = divmod(within, self.step)
        start = block * self.size * self.step + phase
        return self.parent.members(
            parent_index,
            range(
                start + positions.start * self.step,
                start + positions.stop * self.step,
                positions.step * self.step,
            ),
        )

    def to_array(self) -> NDArray[np.int64]:
        blocks = self.parent.to_array().reshape(-1, self.size, self.step)
        return np.ascontiguousarray(blocks.swapaxes(1, 2)).reshape(-1, self.size)


@attrs.frozen(repr=False)
class PickedGroups(RankGroups):
    """The ranks of each parent group that a function names."""

    parent: RankGroups
    function: Callable[[tuple[int, ...]], Sequence[int]]

    @property
    def group_size(self) -> int:
        return len(self._pick(0))

    @property
    def is_sorted(self) -> bool:
        """Whether the members of every group ascend: where the parent's do, and perhaps beyond."""
        return self.parent.is_sorted or super().is_sorted

    def __len__(self) -> int:
        return len(self.parent)

    def locate(self, rank: int) -> tuple[int, int]:
        index = self.parent.index_of(rank)
        picked = self._pick(index)
        if rank not in picked:
            raise RankOutsideError(
                f"rank {shown(rank)} is not picked from its group; of that group, {picked} are"
            )
        return index, picked.index(rank)

    def members(self, index: int, positions: range) -> tuple[int, ...]:
        return self._pick(index)[positions.start : positions.stop : positions.step]

    def to_array(self) -> NDArray[np.int64]:
        everyone = range(self.group_size)
        flat = chain.from_iterable(self.members(index, everyone) for index in range(len(self)))
        return np.fromiter(flat, dtype=np.int64).reshape(len(self), -1)

    def _pick(self, index: int) -> tuple[int, ...]:
        group = self.parent[index]
        chosen = as_tuple(self.function(group), "what pick() keeps")
        named = {as_int(rank, "what pick() keeps") for rank in chosen}
        picked = tuple(rank for rank in group if rank in named)
        if not picked or len(picked) < len(named):
            raise LayoutError(
                f"pick() must name at least one rank, all from group {index} {group}; "
                f"the function returned {tuple(sorted(named))}"
            )
        if index and len(picked) != self.group_size:
            raise LayoutError(
                f"pick() must keep equally many ranks of every group, but it keeps "
                f"{self.group_size} of group 0 and {len(picked)} of group {index}"
            )
        return picked
