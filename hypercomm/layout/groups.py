"""RankGroups: the disjoint groups of ranks over some dims, and groups derived from groups.

A question about one rank or one group is arithmetic on a few axes; nothing on its path grows with
the number of groups. Enumeration of everything is vectorised.
"""

from __future__ import annotations

import math
import operator
import reprlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import attrs
import numpy as np
from numpy.typing import NDArray

from hypercomm.errors import LayoutError, RankOutsideError
from hypercomm.layout.checks import as_int, as_rank, as_sizes, as_tuple, positive
from hypercomm.layout.text import shown

_STRIDE = operator.itemgetter(1)


# ---- axes ---------------------------------------------------------------------------------------


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


def coalesce(axes: Iterable[Axis]) -> tuple[Axis, ...]:
    """Drop axes of size 1 and join neighbours that step as one.

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
    """Split axes after `count` elements; None if the cut is inside a step of an axis.

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
    """Return whether each stride is at least the extent of the axes before it.

    >>> are_nested([Axis(2, 1), Axis(1, 0), Axis(3, 2)]), are_nested([Axis(2, 1), Axis(3, 1)])
    (True, False)
    """
    extent = 1
    for size, stride in axes:
        if size > 1 and stride < extent:
            return False
        extent = size * stride if size > 1 else extent
    return True


# ---- groups -------------------------------------------------------------------------------------


class RankGroups(ABC, Sequence[tuple[int, ...]]):
    """Disjoint groups of ranks, all of one size, each a tuple.

    It is a sequence of tuples: `len(groups)`, `groups[i]`, `for group in groups`. Members ascend,
    unless the layout lists its ranks in another order (see `is_sorted`); then they are in the
    layout's order. Groups are ordered by the coordinates along the other dims, the first of them
    varying fastest.

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
    def _find(self, rank: int) -> tuple[int, int] | None:
        """Return (index of the group, position within it) of `rank`; None for other ranks."""

    @abstractmethod
    def _group(self, index: int) -> tuple[int, ...]:
        """Return a group by its index, which is in range."""

    @abstractmethod
    def to_array(self) -> NDArray[np.int64]:
        """Enumerate all groups as an array of shape (number of groups, group size)."""

    @property
    def is_sorted(self) -> bool:
        """Whether the members of every group ascend, as they do unless the ranks are listed.

        Example:
            >>> from hypercomm import RankLayout
            >>> listed = RankLayout([2, 2], ["tp", "dp"], ranks=[3, 1, 7, 5])
            >>> listed.groups("tp").is_sorted, listed.groups("dp").is_sorted
            (False, True)
        """
        return bool((np.diff(self.to_array(), axis=1) > 0).all())

    def locate(self, rank: int) -> tuple[int, int]:
        """Return (index of the group, position within it) of `rank`.

        Raises:
            RankOutsideError: `rank` is a member of no group.
        """
        found = self._find(rank if type(rank) is int else as_rank(rank))
        if found is None:
            raise RankOutsideError(f"rank {shown(rank)} is in none of these groups: {self!r}")
        return found

    def of(self, rank: int) -> tuple[int, ...]:
        """Return the group that `rank` is a member of, in O(dims + size of the answer).

        Raises:
            RankOutsideError: `rank` is a member of no group.
        """
        found = self._find(rank) if type(rank) is int else None
        return self._group((found or self.locate(rank))[0])

    def index_of(self, rank: int) -> int:
        """Return the index of the group that `rank` is a member of."""
        return self.locate(rank)[0]

    def position_of(self, rank: int) -> int:
        """Return the position of `rank` within its group: its group rank."""
        return self.locate(rank)[1]

    def has_member(self, rank: int) -> bool:
        """Return whether `rank` is a member of one of the groups."""
        return self._find(as_rank(rank)) is not None

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
        return self.levels([size, max(1, self.group_size // size)])[0]

    def levels(self, sizes: Sequence[int]) -> tuple[RankGroups, ...]:
        """Factorise every group into hierarchical sub-groups, one `RankGroups` for each level.

        Level 0 takes `sizes[0]` consecutive members, level 1 takes `sizes[1]` members that are
        `sizes[0]` apart, and so on, as Megatron's `create_hierarchical_groups` does for
        hierarchical context parallelism.

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
        sizes = as_sizes(sizes, "level sizes")
        if math.prod(sizes) != self.group_size:
            raise LayoutError(
                f"level sizes {sizes} must multiply to the {self.group_size} members of each group"
            )
        steps = accumulate(sizes, operator.mul, initial=1)
        return tuple([self._every(size, step) for size, step in zip(sizes, steps, strict=False)])

    def _every(self, size: int, step: int) -> RankGroups:
        """Return groups of `size` members that are `step` positions apart in these groups."""
        runs = self.to_array().reshape(-1, size, step).swapaxes(1, 2)
        return ArrayGroups(np.ascontiguousarray(runs).reshape(-1, size))

    def pick(self, function: Callable[[tuple[int, ...]], Iterable[int]]) -> RankGroups:
        """Keep of every group the ranks that `function` returns, in the group's order.

        `function` is called with one group at a time, when the groups are read, and must return
        equally many ranks for each. Megatron's embedding groups are the first and last stage of
        every pipeline.

        Raises:
            LayoutError: When a group is read, if `function` returns no rank, a rank that is not in
                the group, or another number of ranks than for the first group.

        Example:
            >>> from hypercomm import RankLayout
            >>> pp = RankLayout.parse("tp=2,pp=3").groups("pp")
            >>> list(pp.pick(lambda group: (group[0], group[-1])))
            [(0, 4), (1, 5)]
        """
        return PickedGroups(self, function)

    def __getitem__(self, index: int) -> tuple[int, ...]:  # type: ignore[override]
        index = as_int(index, "the index of a group")
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"group {index} is out of range; there are {len(self)} groups")
        return self._group(position)

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return map(tuple, self.to_array().tolist())

    def to_lists(self) -> list[list[int]]:
        """Return all groups as lists, as `init_model_parallel_group` of vLLM and SGLang takes them.

        Example:
            >>> from hypercomm import RankLayout
            >>> RankLayout.parse("tp=2,pp=2,dp=2").groups("pp").to_lists()
            [[0, 2], [1, 3], [4, 6], [5, 7]]
        """
        lists: list[list[int]] = self.to_array().tolist()
        return lists

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RankGroups):
            return NotImplemented
        if (len(self), self.group_size) != (len(other), other.group_size):
            return False
        return self is other or np.array_equal(self.to_array(), other.to_array())

    def __hash__(self) -> int:
        return hash((len(self), self.group_size))

    def __repr__(self) -> str:
        first = ", ".join(reprlib.repr(self._group(index)) for index in range(min(len(self), 2)))
        more = ", ..." if len(self) > 2 else ""
        return f"<{len(self)} groups of {self.group_size}: {first}{more}>"


@attrs.frozen(repr=False, eq=False)
class StridedGroups(RankGroups):
    """Groups on a lattice: `outer` axes number the groups, `inner` axes span the members.

    Together the axes are nested: each stride is at least the extent of the axes with smaller ones.
    `inner` runs from the smallest stride to the largest.
    """

    origin: int
    outer: tuple[Axis, ...] = attrs.field(converter=coalesce)
    inner: tuple[Axis, ...] = attrs.field(converter=coalesce)
    group_size: int = attrs.field(init=False)
    _count: int = attrs.field(init=False)
    _descending: list[tuple[int, int, int, int]] = attrs.field(init=False)
    """All axes, the largest stride first: size, stride, and the step of the group's index and of
    the position within it."""

    def __attrs_post_init__(self) -> None:
        axes, count, members = [], 1, 1
        for size, stride in self.outer:
            axes.append((size, stride, count, 0))
            count *= size
        for size, stride in self.inner:
            axes.append((size, stride, 0, members))
            members *= size
        axes.sort(key=_STRIDE, reverse=True)
        object.__setattr__(self, "_descending", axes)
        object.__setattr__(self, "_count", count)
        object.__setattr__(self, "group_size", members)

    @property
    def is_sorted(self) -> bool:
        """True: `inner` axes are nested."""
        return True

    def __len__(self) -> int:
        return self._count

    def __eq__(self, other: object) -> bool:
        if isinstance(other, StridedGroups):
            ours, theirs = ((one.origin, one.outer, one.inner) for one in (self, other))
            return ours == theirs
        return super().__eq__(other)

    __hash__ = RankGroups.__hash__

    def _find(self, rank: int) -> tuple[int, int] | None:
        rest, index, position = rank - self.origin, 0, 0
        for size, stride, of_index, of_position in self._descending:
            digit, rest = divmod(rest, stride)
            if not 0 <= digit < size:
                return None
            index += digit * of_index
            position += digit * of_position
        return None if rest else (index, position)

    def _group(self, index: int) -> tuple[int, ...]:
        base = self.origin
        for size, stride in self.outer:
            index, digit = divmod(index, size)
            base += digit * stride
        if len(self.inner) == 1:
            size, stride = self.inner[0]
            return tuple(range(base, base + size * stride, stride))
        ranks = [base]
        for size, stride in self.inner:
            ranks = [rank + step for step in range(0, size * stride, stride) for rank in ranks]
        return tuple(ranks)

    def _every(self, size: int, step: int) -> RankGroups:
        low = cut_axes(self.inner, step)
        middle = low and cut_axes(low[1], size)
        if not low or not middle:
            return super()._every(size, step)
        return StridedGroups(self.origin, (*low[0], *middle[1], *self.outer), middle[0])

    def to_array(self) -> NDArray[np.int64]:
        bases = self.origin + lattice(self.outer)
        return bases[:, None] + lattice(self.inner)[None, :]


@attrs.frozen(repr=False, eq=False)
class PickedGroups(RankGroups):
    """The ranks of each parent group that a function returns."""

    parent: RankGroups
    function: Callable[[tuple[int, ...]], Iterable[int]]

    @property
    def group_size(self) -> int:
        return len(self._group(0))

    def __len__(self) -> int:
        return len(self.parent)

    def _find(self, rank: int) -> tuple[int, int] | None:
        found = self.parent._find(rank)
        picked = () if found is None else self._group(found[0])
        return (found[0], picked.index(rank)) if found and rank in picked else None

    def to_array(self) -> NDArray[np.int64]:
        return np.array([self._group(index) for index in range(len(self))], np.int64)

    def _group(self, index: int) -> tuple[int, ...]:
        group = self.parent._group(index)
        chosen = set(as_tuple(self.function(group), "the result of the function in pick()"))
        picked = tuple([rank for rank in group if rank in chosen])
        if not picked or len(picked) < len(chosen):
            raise LayoutError(
                f"pick() must name at least one rank, all from group {index} {shown(group)}; "
                f"the function returned {shown([*chosen])}"
            )
        if index and len(picked) != self.group_size:
            raise LayoutError(
                f"pick() must keep equally many ranks of every group, but it keeps "
                f"{self.group_size} of group 0 and {len(picked)} of group {index}"
            )
        return picked


@attrs.frozen(repr=False, eq=False, slots=False)
class ArrayGroups(RankGroups):
    """Groups that are listed, one in each row of an array: of a layout that lists its ranks."""

    array: NDArray[np.int64]

    @property
    def group_size(self) -> int:
        return int(self.array.shape[1])

    def __len__(self) -> int:
        return len(self.array)

    @cached_property
    def _positions(self) -> dict[int, int]:
        return {rank: position for position, rank in enumerate(self.array.ravel().tolist())}

    def _find(self, rank: int) -> tuple[int, int] | None:
        position = self._positions.get(rank)
        return None if position is None else divmod(position, self.group_size)

    def _group(self, index: int) -> tuple[int, ...]:
        return tuple(self.array[index].tolist())

    def to_array(self) -> NDArray[np.int64]:
        return self.array

    def __reduce__(self) -> tuple[type[ArrayGroups], tuple[NDArray[np.int64]]]:
        return ArrayGroups, (self.array,)


# ---- one rank in its group ----------------------------------------------------------------------


class Place(NamedTuple):
    """A rank's place in its group: the ranks of the group, and the rank's position among them."""

    ranks: tuple[int, ...]
    rank: int
