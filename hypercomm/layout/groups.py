"""RankGroups: disjoint groups of ranks, made from dims of a layout, lists or other groups.

For groups over dims, the cost of methods about one rank or one group does not depend on the number
of groups. Methods that enumerate all groups are vectorised.
"""

from __future__ import annotations

import hashlib
import math
import operator
import reprlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate, chain
from typing import NamedTuple

import attrs
import numpy as np
from numpy.typing import NDArray

from hypercomm.errors import LayoutError, RankOutsideError
from hypercomm.layout.checks import (
    as_int,
    as_ordered,
    as_rank,
    as_ranks,
    as_sizes,
    as_tuple,
    positive,
)
from hypercomm.layout.numbering import Axis, Listing, coalesce, cut_axes, lattice
from hypercomm.layout.text import format_range, plural, pluralize, short_repr

_STRIDE = operator.itemgetter(1)

RankLists = Sequence[Sequence[int]]
"""Groups as lists of ranks. The sizes of the lists may differ."""

# ---- groups -------------------------------------------------------------------------------------


class RankGroups(Sequence[tuple[int, ...]]):
    """Disjoint groups of ranks, made from dims of a layout or from lists.

    The object is a sequence of tuples: `len(groups)`, `groups[i]`, `for group in groups`. All
    groups over dims have the same size. The ranks of a group are in the layout's order, which is
    ascending by default (see `is_sorted`). The groups are ordered by the coordinates along the
    other dims, the first of these dims varying fastest.

    Args:
        groups: The ranks of each group, in order. Sizes may differ. No rank may be in two groups.

    Raises:
        LayoutError: There is no group, a group is empty, a rank is not an int or is negative, or a
            rank is listed twice.

    Example:
        >>> from hypercomm import RankGroups, RankLayout
        >>> dp = RankLayout("tp=2,dp=3").groups("dp")
        >>> len(dp), dp.group_size, list(dp)
        (2, 3, [(0, 2, 4), (1, 3, 5)])
        >>> dp.of(3), dp.index_of(3), dp.position_of(3)
        ((1, 3, 5), 1, 1)

        Groups from lists may differ in size, as a short and a long pipeline do.

        >>> pipelines = RankGroups([[0, 4], [1, 2, 3]])
        >>> pipelines.of(2), pipelines.sizes, pipelines.has_member(5)
        ((1, 2, 3), (2, 3), False)
    """

    __slots__ = ("_bounds", "_places", "_ranks")

    _ranks: NDArray[np.int64]
    """The members of all groups, one group after another."""
    _bounds: NDArray[np.int64]
    """The position in `_ranks` at which each group begins, and the length of `_ranks`."""
    _places: dict[int, int] | None
    """The position of each rank in `_ranks`. None until a method needs it."""

    def __init__(self, groups: Iterable[Iterable[int]]) -> None:
        lists = as_ordered(groups, "groups")
        if not all(isinstance(one, Iterable) for one in lists):
            given = short_repr(list(lists))
            raise LayoutError(f"groups must be lists of ranks, as in [[0, 1], [2, 3]], got {given}")
        read = [as_ranks(group, f"groups[{index}]") for index, group in enumerate(lists)]
        if not read:
            raise LayoutError("groups must have at least one list of ranks, but it is empty")
        _check_disjoint(read)
        self._set(list(chain.from_iterable(read)), list(map(len, read)))

    def _set(self, ranks: object, sizes: Sequence[int]) -> None:
        self._ranks = np.asarray(ranks, dtype=np.int64)
        self._bounds = np.cumsum([0, *sizes], dtype=np.int64)
        self._places = None

    @property
    def _positions(self) -> dict[int, int]:
        if self._places is None:
            self._places = {rank: place for place, rank in enumerate(self._ranks.tolist())}
        return self._places

    # ---- overridden by each kind of groups --------------------------------------------------

    @property
    def sizes(self) -> tuple[int, ...]:
        """The distinct sizes of the groups, ascending. Groups over dims have one size."""
        return tuple(np.unique(np.diff(self._bounds)).tolist())

    def _find(self, rank: int) -> tuple[int, int] | None:
        """Return the index of a rank's group and the rank's position there, or None."""
        place = self._positions.get(rank)
        if place is None:
            return None
        index = int(np.searchsorted(self._bounds, place, "right")) - 1
        return index, place - int(self._bounds[index])

    def _group(self, index: int) -> tuple[int, ...]:
        """Return a group by its index. The caller ensures that the index is in range."""
        return tuple(self._ranks[self._bounds[index] : self._bounds[index + 1]].tolist())

    def __len__(self) -> int:
        return len(self._bounds) - 1

    def to_array(self) -> NDArray[np.int64]:
        """Enumerate all groups as an array of shape (number of groups, group size).

        Raises:
            LayoutError: The groups have several sizes. Use `to_lists` instead.
        """
        return self._ranks.reshape(len(self), self.group_size)

    # ---- shared by all kinds of groups ------------------------------------------------------

    @property
    def group_size(self) -> int:
        """The number of ranks in every group, or 0 if there is no group.

        Raises:
            LayoutError: The groups have several sizes.
        """
        sizes = self.sizes
        if len(sizes) > 1:
            raise LayoutError(
                f"{self!r} have no common size; use sizes, to_lists() or len(groups.of(rank))"
            )
        return sizes[0] if sizes else 0

    @property
    def is_sorted(self) -> bool:
        """Whether the ranks of every group ascend, as in a layout without `strides` and `ranks`.

        Example:
            >>> from hypercomm import RankLayout
            >>> listed = RankLayout([2, 2], ["tp", "dp"], ranks=[3, 1, 7, 5])
            >>> listed.groups("tp").is_sorted, listed.groups("dp").is_sorted
            (False, True)
        """
        if len(self.sizes) > 1:
            return all(list(group) == sorted(group) for group in self)
        return bool((np.diff(self.to_array(), axis=1) > 0).all())

    def locate(self, rank: int) -> tuple[int, int]:
        """Return the index of the group that contains `rank`, and the position of `rank` there.

        Raises:
            RankOutsideError: `rank` is not in any group.
        """
        found = self._find(rank if type(rank) is int else as_rank(rank))
        if found is None:
            raise RankOutsideError(f"rank {short_repr(rank)} is not in any of {self!r}")
        return found

    def of(self, rank: int) -> tuple[int, ...]:
        """Return the group that contains `rank`.

        For groups over dims, the cost is O(number of dims + group size).

        Raises:
            RankOutsideError: `rank` is not in any group.
        """
        found = self._find(rank) if type(rank) is int else None
        return self._group((found or self.locate(rank))[0])

    def index_of(self, rank: int) -> int:
        """Return the index of the group that contains `rank`."""
        return self.locate(rank)[0]

    def position_of(self, rank: int) -> int:
        """Return the position of `rank` in its group, which torch calls the group rank."""
        return self.locate(rank)[1]

    def find(self, rank: int) -> tuple[int, tuple[int, ...]] | None:
        """Return the index and the ranks of the group that contains `rank`, or None.

        Example:
            >>> from hypercomm import RankLayout
            >>> dp = RankLayout("tp=2,dp=3").groups("dp")
            >>> dp.find(3), dp.find(6)
            ((1, (1, 3, 5)), None)
        """
        found = self._find(rank)
        return None if found is None else (found[0], self._group(found[0]))

    def has_member(self, rank: int) -> bool:
        """Return whether `rank` is in one of the groups."""
        return self._find(as_rank(rank)) is not None

    def chunks(self, size: int) -> RankGroups:
        """Split every group into groups of `size` consecutive members.

        Raises:
            LayoutError: `size` does not divide the group size.

        Example:
            >>> from hypercomm import RankLayout
            >>> list(RankLayout("dp=6").groups("dp").chunks(3))
            [(0, 1, 2), (3, 4, 5)]
        """
        size = positive(size, "the chunk size")
        return self.levels([size, max(1, self.group_size // size)])[0]

    def levels(self, sizes: Sequence[int]) -> tuple[RankGroups, ...]:
        """Factorise every group into hierarchical groups, with one `RankGroups` for each level.

        A group of level 0 has `sizes[0]` consecutive members. A group of level 1 has `sizes[1]`
        members that are `sizes[0]` positions apart, and so on. Megatron's
        `create_hierarchical_groups` makes the same groups for hierarchical context parallelism.

        Args:
            sizes: The group size at each level, innermost first. The product of `sizes` must be the
                size of these groups.

        Raises:
            LayoutError: The product of `sizes` is not the group size.

        Example:
            >>> from hypercomm import RankLayout
            >>> inner, outer = RankLayout("cp=4").groups("cp").levels([2, 2])
            >>> list(inner), list(outer)
            ([(0, 1), (2, 3)], [(0, 2), (1, 3)])
        """
        sizes = as_sizes(sizes, "level sizes")
        if math.prod(sizes) != self.group_size:
            raise LayoutError(
                f"level sizes {sizes} must multiply to the size of each group, {self.group_size}"
            )
        steps = accumulate(sizes, operator.mul, initial=1)
        return tuple([self._every(size, step) for size, step in zip(sizes, steps, strict=False)])

    def _every(self, size: int, step: int) -> RankGroups:
        """Return groups of `size` members that are `step` positions apart in these groups."""
        runs = self.to_array().reshape(-1, size, step).swapaxes(1, 2)
        return groups_of_rows(np.ascontiguousarray(runs).reshape(-1, size))

    def pick(self, function: Callable[[tuple[int, ...]], Iterable[int]]) -> RankGroups:
        """Reduce every group to the ranks that `function` returns, in the order of the group.

        For example, Megatron's embedding groups are the first and last stage of every pipeline.

        Args:
            function: A function that is called with one group at a time, when the groups are read.
                It must return the same number of ranks for every group.

        Raises:
            LayoutError: `function` returned no rank, a rank that is not in the group, or a
                different number of ranks than for the first group. The error is raised when a
                group is read.

        Example:
            >>> from hypercomm import RankLayout
            >>> pp = RankLayout("tp=2,pp=3").groups("pp")
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
        if len(self.sizes) > 1:
            return map(self._group, range(len(self)))
        return map(tuple, self.to_array().tolist())

    def to_lists(self) -> list[list[int]]:
        """Return all groups as lists, as `init_model_parallel_group` of vLLM and SGLang expects.

        Example:
            >>> from hypercomm import RankLayout
            >>> RankLayout("tp=2,pp=2,dp=2").groups("pp").to_lists()
            [[0, 2], [1, 3], [4, 6], [5, 7]]
        """
        return list(map(list, self))

    def digest(self) -> str:
        """Return a short hash of all members and sizes. Equal groups have equal digests.

        Example:
            >>> from hypercomm import RankLayout
            >>> listed = RankGroups([[0, 1], [2, 3]])
            >>> listed.digest() == RankLayout("tp=2,dp=2").groups("tp").digest()
            True
        """
        if len(self.sizes) > 1:
            members = np.fromiter(chain.from_iterable(self), np.int64)
            sizes = np.fromiter(map(len, self), np.int64)
        else:
            members = self.to_array()
            sizes = np.full(len(self), self.group_size, np.int64)
        return hashlib.sha256(members.tobytes() + sizes.tobytes()).hexdigest()[:12]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, RankGroups):
            return NotImplemented
        if self is other:
            return True
        if (len(self), self.sizes) != (len(other), other.sizes):
            return False
        if len(self.sizes) > 1:
            return list(self) == list(other)
        return np.array_equal(self.to_array(), other.to_array())

    def __hash__(self) -> int:
        return hash((len(self), self.sizes))

    def __repr__(self) -> str:
        first = ", ".join(reprlib.repr(self._group(index)) for index in range(min(len(self), 2)))
        more = ", ..." if len(self) > 2 else ""
        return f"<{format_counts(self)}: {first}{more}>"


@attrs.frozen(repr=False, eq=False)
class StridedGroups(RankGroups):
    """Groups that are computed from strides.

    The `outer` axes enumerate the groups. The `inner` axes enumerate the members of a group. All
    axes together are nested in some order (see `numbering.are_nested`). With a `listing`, the axes
    span positions in its list of ranks, from `origin` 0 on.
    """

    origin: int
    outer: tuple[Axis, ...] = attrs.field(converter=coalesce)
    inner: tuple[Axis, ...] = attrs.field(converter=coalesce)
    listing: Listing | None = None
    sizes: tuple[int, ...] = attrs.field(init=False)
    _count: int = attrs.field(init=False)
    _descending: list[tuple[int, int, int, int]] = attrs.field(init=False)
    """(size, stride, groups, positions) for each axis, the largest stride first.

    A step along the axis adds `groups` to the index of the group, and `positions` to the position
    in the group.
    """

    def __attrs_post_init__(self) -> None:
        axes = []
        count = 1
        members = 1
        for size, stride in self.outer:
            axes.append((size, stride, count, 0))
            count *= size
        for size, stride in self.inner:
            axes.append((size, stride, 0, members))
            members *= size
        axes.sort(key=_STRIDE, reverse=True)
        object.__setattr__(self, "_descending", axes)
        object.__setattr__(self, "_count", count)
        object.__setattr__(self, "sizes", (members,))

    @property
    def is_sorted(self) -> bool:
        """Whether the members ascend. Without a listing, the strides alone decide this."""
        if self.listing is not None:
            return super().is_sorted
        return list(self.inner) == sorted(self.inner, key=_STRIDE)

    def __len__(self) -> int:
        return self._count

    def __eq__(self, other: object) -> bool:
        if isinstance(other, StridedGroups) and self.listing is None is other.listing:
            ours, theirs = ((one.origin, one.outer, one.inner) for one in (self, other))
            return ours == theirs
        return super().__eq__(other)

    __hash__ = RankGroups.__hash__

    def _find(self, rank: int) -> tuple[int, int] | None:
        rest = rank - self.origin if self.listing is None else self.listing.offset_of(rank)
        index = 0
        position = 0
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
        ranks: Iterable[int] = [base]
        if len(self.inner) == 1:
            size, stride = self.inner[0]
            ranks = range(base, base + size * stride, stride)
        else:
            for size, stride in self.inner:
                ranks = [rank + step for step in range(0, size * stride, stride) for rank in ranks]
        return tuple(ranks if self.listing is None else [self.listing.ranks[at] for at in ranks])

    def _every(self, size: int, step: int) -> RankGroups:
        low = cut_axes(self.inner, step)
        middle = low and cut_axes(low[1], size)
        if not low or not middle:
            return super()._every(size, step)
        return StridedGroups(
            self.origin, (*low[0], *middle[1], *self.outer), middle[0], self.listing
        )

    def to_array(self) -> NDArray[np.int64]:
        bases = self.origin + lattice(self.outer)
        ranks = bases[:, None] + lattice(self.inner)[None, :]
        return ranks if self.listing is None else self.listing.array[ranks]


@attrs.frozen(repr=False, eq=False)
class PickedGroups(RankGroups):
    """The groups of `parent`, each reduced to the ranks that a function returns."""

    parent: RankGroups
    function: Callable[[tuple[int, ...]], Iterable[int]]

    @property
    def sizes(self) -> tuple[int, ...]:
        """The size of the first reduced group, as a tuple of one number."""
        return (len(self._group(0)),)

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
                f"the function of pick() must return one or more ranks of group {index} "
                f"{short_repr(group)}, got {short_repr([*chosen])}"
            )
        if index and len(picked) != self.group_size:
            raise LayoutError(
                f"the function of pick() must return the same number of ranks for every group, but "
                f"it returned {self.group_size} for group 0 and {len(picked)} for group {index}"
            )
        return picked


# ---- groups from lists --------------------------------------------------------------------------


def groups_of_rows(ranks: NDArray[np.int64]) -> RankGroups:
    """Return the rows of an array as groups. The caller ensures that the ranks are distinct.

    Example:
        >>> groups_of_rows(np.array([[0, 4], [1, 5]])).of(5)
        (1, 5)
    """
    groups = object.__new__(RankGroups)
    count, size = ranks.shape
    groups._set(ranks.reshape(-1), [size] * count)
    return groups


def as_groups(found: object, within: RankGroups) -> RankGroups:
    """Return the value of `derive=` as groups.

    Args:
        found: `RankGroups`, or lists of ranks of any sizes.
        within: The groups over dims from which `found` is derived. They contain all ranks of the
            grid.

    Raises:
        LayoutError: The value is neither `RankGroups` nor lists that `RankGroups` accepts, or a
            rank is not in the grid.

    Example:
        >>> from hypercomm import RankLayout
        >>> as_groups([[0, 3], [1]], RankLayout("tp=4").groups("tp")).to_lists()
        [[0, 3], [1]]
    """
    if not isinstance(found, RankGroups):
        try:
            found = RankGroups(found)  # type: ignore[arg-type]
        except LayoutError as error:
            raise LayoutError(
                f"derive= must be or return RankGroups, or lists of ranks like "
                f"[[0, 1], [2, 3, 4]]: {error}"
            ) from error
    if type(found) is RankGroups:
        outside = found._ranks[~np.isin(found._ranks, within.to_array())]
        if outside.size:
            raise LayoutError(
                f"derive= contains rank {outside[0]}, which is not a rank of the grid"
            )
    return found


def _check_disjoint(groups: Sequence[tuple[int, ...]]) -> None:
    """Raise if a rank is in two groups."""
    first: dict[int, int] = {}
    for index, group in enumerate(groups):
        for rank in group:
            if first.setdefault(rank, index) < index:
                raise LayoutError(
                    f"rank {rank} is in two groups, {short_repr(groups[first[rank]])} and "
                    f"{short_repr(group)}, but the groups of one create_pg call must be disjoint; "
                    f"for overlapping groups, give each list its own name: "
                    f"create_pgs([GroupRequest(grid.dim_names, name=f'path{{i}}', derive=[ranks]) "
                    f"for i, ranks in enumerate(lists)])"
                )


def format_counts(groups: RankGroups) -> str:
    """Format the number of groups and their size, or their smallest and largest size.

    >>> format_counts(RankGroups([[0, 1], [2, 3, 4]])), format_counts(RankGroups([[0]]))
    ('2 groups of 2..3 ranks', '1 group of 1 rank')
    """
    sizes = groups.sizes or (0,)
    size = format_range(sizes[0], sizes[-1])
    return f"{pluralize(len(groups), 'group')} of {size} {plural('rank', sizes[-1])}"


# ---- one rank in its group ----------------------------------------------------------------------


class Membership(NamedTuple):
    """The group of a rank, and the rank's position in the group.

    Attributes:
        ranks: The ranks of the group.
        position: The position of the rank in `ranks`.
    """

    ranks: tuple[int, ...]
    position: int
