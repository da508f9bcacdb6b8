"""RankGroups: the disjoint groups of ranks over some dims, and groups derived from groups.

A question about one rank or one group is arithmetic on a few axes; nothing on its path grows with
the number of groups. Enumeration of everything is vectorised.
"""

from __future__ import annotations

import itertools
import math
import operator
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cached_property
from typing import NamedTuple

import attrs
import numpy as np
from numpy.typing import NDArray

from hypercomm.errors import LayoutError, RankOutsideError
from hypercomm.layout.checks import as_int, as_rank, as_ranks, as_sizes, as_tuple, positive
from hypercomm.layout.parsing import divisors
from hypercomm.layout.text import shown, some_of

_SHOWN = 5
"""Members of a group that its repr shows."""

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


def element(axes: Sequence[Axis], index: int) -> int:
    """Return element `index` of `lattice(axes)`, without enumerating the others.

    >>> element([Axis(2, 1), Axis(3, 4)], 5)
    9
    """
    offset = 0
    for size, stride in axes:
        index, digit = divmod(index, size)
        offset += digit * stride
    return offset


def axes_of(offsets: NDArray[np.int64]) -> list[Axis] | None:
    """Return nested axes whose `lattice` equals these offsets; None if there are no such axes.

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
        """Whether the members of every group ascend, as they do unless the ranks are listed.

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
        """Return whether `rank` is a member of one of the groups."""
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
            factors = " * ".join(map(str, sizes)) or "1"
            raise LayoutError(
                f"level sizes {factors} = {math.prod(sizes)}, but each group has "
                f"{self.group_size} members"
            )
        return tuple(
            SlicedGroups(self, size, math.prod(sizes[:level])) for level, size in enumerate(sizes)
        )

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

    def to_lists(self) -> list[list[int]]:
        """Return all groups as lists, as `init_model_parallel_group` of vLLM and SGLang takes them.

        Example:
            >>> from hypercomm import RankLayout
            >>> RankLayout.parse("tp=2,pp=2,dp=2").groups("pp").to_lists()
            [[0, 2], [1, 3], [4, 6], [5, 7]]
        """
        lists: list[list[int]] = self.to_array().tolist()
        return lists

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
    """Groups on a lattice: `outer` axes number the groups, `inner` axes span the members.

    Both run from the smallest stride to the largest, and together they are nested: each stride is
    at least the extent of the axes below it.
    """

    origin: int
    outer: tuple[Axis, ...] = attrs.field(converter=coalesce)
    inner: tuple[Axis, ...] = attrs.field(converter=coalesce)
    group_size: int = attrs.field(init=False, eq=False)
    _count: int = attrs.field(init=False, eq=False)
    _descending: list[tuple[int, int, bool]] = attrs.field(init=False, eq=False)

    def __attrs_post_init__(self) -> None:
        """Order all axes by stride, each with whether it is an outer one."""
        axes, count, members = [], 1, 1
        for size, stride in self.outer:
            axes.append((size, stride, True))
            count *= size
        for size, stride in self.inner:
            axes.append((size, stride, False))
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

    def of(self, rank: int) -> tuple[int, ...]:
        index, _ = self.locate(rank)
        base = self.origin
        for size, stride in self.outer:
            index, digit = divmod(index, size)
            base += digit * stride
        return self._span(base)

    def locate(self, rank: int) -> tuple[int, int]:
        rest = (rank if type(rank) is int else as_rank(rank)) - self.origin
        index, position, groups, members = 0, 0, self._count, self.group_size
        for size, stride, is_outer in self._descending:
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
        if len(positions) == self.group_size:
            return self._span(base)
        if len(self.inner) == 1:
            stride = self.inner[0].stride
            steps = range(
                positions.start * stride, positions.stop * stride, positions.step * stride
            )
            return tuple([base + step for step in steps])
        return tuple([base + element(self.inner, position) for position in positions])

    def _span(self, base: int) -> tuple[int, ...]:
        """Return the whole group that begins at a rank."""
        if len(self.inner) == 1:
            size, stride = self.inner[0]
            return tuple(range(base, base + size * stride, stride))
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
        """Whether the members of every group ascend, as they do where those of the parent do."""
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
        start, step = block * self.size * self.step + phase, self.step
        first, stop = start + positions.start * step, start + positions.stop * step
        return self.parent.members(parent_index, range(first, stop, positions.step * step))

    def to_array(self) -> NDArray[np.int64]:
        blocks = self.parent.to_array().reshape(-1, self.size, self.step)
        return np.ascontiguousarray(blocks.swapaxes(1, 2)).reshape(-1, self.size)


@attrs.frozen(repr=False)
class PickedGroups(RankGroups):
    """The ranks of each parent group that a function returns."""

    parent: RankGroups
    function: Callable[[tuple[int, ...]], Iterable[int]]

    @property
    def group_size(self) -> int:
        return len(self._pick(0))

    @property
    def is_sorted(self) -> bool:
        """Whether the members of every group ascend, as they do where those of the parent do."""
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
        return np.array([self.members(index, everyone) for index in range(len(self))], np.int64)

    def _pick(self, index: int) -> tuple[int, ...]:
        group = self.parent[index]
        chosen = as_tuple(self.function(group), "the result of the function in pick()")
        named = {as_int(rank, "every rank that pick() keeps") for rank in chosen}
        picked = tuple([rank for rank in group if rank in named])
        if not picked or len(picked) < len(named):
            raise LayoutError(
                f"pick() must name at least one rank, all from group {index} {shown(group)}; "
                f"the function returned {shown(sorted(named))}"
            )
        if index and len(picked) != self.group_size:
            raise LayoutError(
                f"pick() must keep equally many ranks of every group, but it keeps "
                f"{self.group_size} of group 0 and {len(picked)} of group {index}"
            )
        return picked


# ---- ranks in a list ----------------------------------------------------------------------------


def _as_listed(ranks: Iterable[int]) -> tuple[int, ...]:
    return as_ranks(ranks, "ranks")


@attrs.frozen(slots=False, cache_hash=True)
class Listing:
    """Distinct ranks, one for each position of a layout; a value that pickles as the tuple alone.

    Example:
        >>> listing = Listing([4, 2, 7])
        >>> listing.ranks[2], listing.position(7), listing.position(3), str(listing)
        (7, 2, None, '4, 2, 7')
    """

    ranks: tuple[int, ...] = attrs.field(converter=_as_listed)

    def __str__(self) -> str:
        return some_of(self.ranks, 16)

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

    def strides(self, shape: Sequence[int]) -> tuple[int, ...] | None:
        """Return the strides over a shape that give these ranks; None if no strides do.

        >>> Listing([3, 4, 7, 8]).strides([2, 2]), Listing([3, 4, 7, 8]).strides([4])
        ((1, 4), None)
        """
        neighbours = itertools.accumulate(shape[:-1], operator.mul, initial=1)
        offsets = self.array - self.array[0]
        axes = [
            Axis(size, int(offsets[neighbour]) if size > 1 else 1)
            for size, neighbour in zip(shape, neighbours, strict=True)
        ]
        fits = are_nested(axes) and np.array_equal(lattice(axes), offsets)
        return tuple([stride for _, stride in axes]) if fits else None


def listed_groups(positions: StridedGroups, listing: Listing) -> RankGroups:
    """Return the groups of listed ranks at these positions, strided where possible.

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
    nested = are_nested(sorted((*outer, *inner), key=_STRIDE))
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
        return tuple([ranks[position] for position in self.positions.members(index, positions)])

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


# ---- one rank in its group, groups on hosts -----------------------------------------------------


@attrs.frozen
class Place:
    """A rank's place in its group.

    Attributes:
        ranks: The ranks of the group, in its order.
        rank: The rank's position among them.
    """

    ranks: tuple[int, ...]
    rank: int

    @property
    def size(self) -> int:
        """The number of ranks in the group."""
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        """Whether the rank is the first of its group."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether the rank is the last of its group."""
        return self.rank == len(self.ranks) - 1

    def next(self, *, periodic: bool = False) -> int | None:
        """Return the next rank of the group, as torch numbers ranks; None after the last one.

        Args:
            periodic: Whether the first rank follows the last one, as in a ring.
        """
        return self._neighbour(self.rank + 1, periodic)

    def prev(self, *, periodic: bool = False) -> int | None:
        """Return the previous rank of the group; None before the first one, as for `next`."""
        return self._neighbour(self.rank - 1, periodic)

    def _neighbour(self, at: int, periodic: bool) -> int | None:
        if periodic:
            at %= len(self.ranks)
        return self.ranks[at] if 0 <= at < len(self.ranks) else None


def hosts_touched(groups: RankGroups, ranks_per_host: int) -> tuple[int, int]:
    """Count the hosts of each group, where host k holds ranks k*n .. (k+1)*n - 1.

    Args:
        groups: The groups.
        ranks_per_host: The number n of ranks on each host.

    Returns:
        The smallest and the largest number of hosts, over all groups.

    Example:
        >>> from hypercomm import RankLayout
        >>> layout = RankLayout.parse("tp=4,dp=6")
        >>> hosts_touched(layout.groups("tp"), 8), hosts_touched(layout.groups("dp"), 8)
        ((1, 1), (3, 3))
    """
    positive(ranks_per_host, "ranks_per_host")
    hosts = np.sort(groups.to_array() // ranks_per_host, axis=1)
    counts = 1 + np.count_nonzero(np.diff(hosts, axis=1), axis=1)
    return int(counts.min()), int(counts.max())
