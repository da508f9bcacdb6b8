"""Compares two layouts: finds groups that are kept, gone or new, and counts ranks that move.

Two groups are the same if they have the same ranks in the same order, whatever their dims are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import combinations
from typing import Any, Literal

import attrs
import numpy as np
from numpy.typing import NDArray

from hypercomm.errors import LayoutError
from hypercomm.layout.checks import LARGEST_WORLD
from hypercomm.layout.groups import RankGroups
from hypercomm.layout.layout import RankLayout
from hypercomm.layout.text import aligned, format_ranks, format_sizes, short_repr

MOST_DIMS = 12
"""The largest number of dims larger than 1 in a comparison. They have 4,095 combinations."""

COLUMNS = ("before", "after", "groups x size", "result")
"""The column titles for `GroupsChange.cells`."""

_Dims = tuple[str, ...]


@attrs.frozen
class GroupsChange:
    """A change of the groups over some dims, which `difference` has found.

    Args:
        before: The dims of these groups in the old layout, in the order of that layout. Empty if
            the groups are new.
        after: The dims of these groups in the new layout, in the order of that layout. Empty if
            the groups are gone.
        groups_before: The number of groups over these dims in the old layout.
        groups_after: The number of groups over these dims in the new layout.
        size: The number of ranks in each of these groups.
        kept: The number of these groups that are in both layouts.

    Example:
        >>> GroupsChange(("tp", "cp"), ("tp",), 2, 2, 4, kept=2).cells
        ('tp+cp', 'tp', '2 x 4', 'kept')
        >>> GroupsChange(("tp",), ("tp",), 4, 8, 2, kept=3).cells
        ('tp', 'tp', '4 -> 8 x 2', 'partly: 3 of 4 kept')
    """

    before: _Dims
    after: _Dims
    groups_before: int
    groups_after: int
    size: int
    kept: int

    @property
    def result(self) -> Literal["kept", "partly", "gone", "new"]:
        """Whether the groups are all kept, partly kept, gone or new."""
        if not self.after:
            return "gone"
        if not self.before:
            return "new"
        return "kept" if self.kept == self.groups_before == self.groups_after else "partly"

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """The change as text, one cell for each of `COLUMNS`."""
        counts = dict.fromkeys(filter(None, (self.groups_before, self.groups_after)))
        counted = " -> ".join([f"{count:,}" for count in counts])
        result: str = self.result
        if result == "partly":
            result += f": {self.kept:,} of {self.groups_before:,} kept"
        return (
            "+".join(self.before) or "-",
            "+".join(self.after) or "-",
            f"{counted} x {self.size:,}",
            result,
        )


@attrs.frozen(repr=False)
class LayoutDifference:
    """The differences between two layouts. `str()` formats them as a table.

    Args:
        before: The layout before.
        after: The layout after.
        changes: One change for each combination of dims whose groups have at least two ranks. The
            combinations of `before` come first, ordered by the number of dims and then as in the
            layout. Combinations whose groups are only in `after` come last. If the ranks of a
            layout are a list, a combination may have several changes, because its groups may be
            groups over different combinations of dims in `after`.
        groups_before: The number of groups of at least two ranks in `before`.
        groups_after: The number of groups of at least two ranks in `after`.
        groups_kept: The number of groups that are in both layouts.
        ranks_shared: The number of ranks that are in both layouts.
        ranks_moved: The number of shared ranks whose coordinates change. If a layout lacks a
            dim, its ranks have coordinate 0 along that dim.

    Example:
        >>> layouts = RankLayout("tp=2,cp=2,dp=2"), RankLayout("tp=4,dp=2")
        >>> changes = difference(*layouts)
        >>> [change.before for change in changes.changes if change.result == "kept"]
        [('dp',), ('tp', 'cp'), ('tp', 'cp', 'dp')]
        >>> changes.groups_kept, changes.groups_gone, changes.ranks_moved
        (7, 12, 4)
    """

    before: RankLayout
    after: RankLayout
    changes: tuple[GroupsChange, ...]
    groups_before: int
    groups_after: int
    groups_kept: int
    ranks_shared: int
    ranks_moved: int

    @property
    def groups_gone(self) -> int:
        """The number of groups that only `before` has."""
        return self.groups_before - self.groups_kept

    @property
    def groups_new(self) -> int:
        """The number of groups that only `after` has."""
        return self.groups_after - self.groups_kept

    @property
    def ranks_gone(self) -> int:
        """The number of ranks that only `before` has."""
        return self.before.size - self.ranks_shared

    @property
    def ranks_new(self) -> int:
        """The number of ranks that only `after` has."""
        return self.after.size - self.ranks_shared

    @property
    def lost(self) -> Lost:
        """The shards that are lost with the ranks that only `before` has.

        Example:
            >>> layouts = RankLayout("tp=2,dp=2"), RankLayout([3], ["dp"])
            >>> difference(*layouts).lost.shards("tp", "dp")
            ({'tp': 1, 'dp': 1},)
        """
        return Lost(self.before, self.after)

    @property
    def summary(self) -> str:
        """The difference in one sentence.

        Example:
            >>> layouts = RankLayout("tp=2,dp=4"), RankLayout("tp=2,dp=2")
            >>> difference(*layouts).summary.partition("; ")[2]
            '0 of 4 shared ranks change coordinates, 4 are gone'
        """
        shared = " shared" if self.ranks_gone or self.ranks_new else ""
        ranks = f"{self.ranks_moved:,} of {self.ranks_shared:,}{shared} ranks change coordinates"
        if self.ranks_gone:
            ranks += f", {self.ranks_gone:,} are gone"
        if self.ranks_new:
            ranks += f", {self.ranks_new:,} are new"
        return (
            f"{_named(self.before)} to {_named(self.after)}: "
            f"{self.groups_kept:,} of {self.groups_before:,} groups are kept, "
            f"{self.groups_gone:,} gone, {self.groups_new:,} new; {ranks}"
        )

    def __repr__(self) -> str:
        return f"<LayoutDifference: {self.summary}>"

    def __str__(self) -> str:
        rows = [COLUMNS, *(change.cells for change in self.changes)]
        return "\n".join([*aligned(rows), self.summary])


def difference(before: RankLayout, after: RankLayout) -> LayoutDifference:
    """Compare the groups and the coordinates of ranks in two layouts.

    All combinations of dims larger than 1 are compared.

    Args:
        before: The layout before. At most `MOST_DIMS` of its dims may be larger than 1.
        after: The layout after, with the same limit. Its ranks and dims may differ from the
            ranks and dims of `before`.

    Returns:
        The changes of all groups, and the number of ranks that move.

    Raises:
        LayoutError: An argument is not a layout, or has too many ranks or dims.

    Example:
        With tp=2, ranks 0 and 1 form a group. With cp=4, ranks 0 to 3 form a group.

        >>> print(difference(RankLayout("tp=2,cp=2"), RankLayout("cp=4")))
        before  after  groups x size  result
        tp      -              2 x 2  gone
        cp      -              2 x 2  gone
        tp+cp   cp             1 x 4  kept
        tp=2,cp=2 to cp=4: 1 of 5 groups are kept, 4 gone, 0 new; 3 of 4 ranks change coordinates
    """
    ours = _all_groups(before, "layout 'before'")
    theirs = _all_groups(after, "layout 'after'")
    kept = _count_kept(ours, theirs)
    kept_before = {here for here, _ in kept}
    kept_after = {there for _, there in kept}
    pairs = [*kept, *((dims, ()) for dims in ours if dims not in kept_before)]
    number = {dims: number for number, dims in enumerate(ours)}
    pairs.sort(key=lambda pair: number[pair[0]])
    pairs += [((), dims) for dims in theirs if dims not in kept_after]
    changes = [
        GroupsChange(
            here,
            there,
            groups_before=len(ours.get(here, ())),
            groups_after=len(theirs.get(there, ())),
            size=(ours.get(here) or theirs[there]).group_size,
            kept=kept.get((here, there), 0),
        )
        for here, there in pairs
    ]
    shared, moved = _count_moved(before, after)
    return LayoutDifference(
        before,
        after,
        tuple(changes),
        groups_before=sum(map(len, ours.values())),
        groups_after=sum(map(len, theirs.values())),
        groups_kept=sum(kept.values()),
        ranks_shared=shared,
        ranks_moved=moved,
    )


def _all_groups(layout: RankLayout, what: str) -> dict[_Dims, RankGroups]:
    """Return the groups over every combination of dims larger than 1, small ones first."""
    if not isinstance(layout, RankLayout):
        raise LayoutError(f"{what} must be a RankLayout, got {short_repr(layout)}")
    if layout.size > LARGEST_WORLD:
        raise LayoutError(
            f"{what} has {layout.size:,} ranks; at most {LARGEST_WORLD:,} can be compared"
        )
    long = _dims_above_one(layout)
    if len(long) > MOST_DIMS:
        raise LayoutError(
            f"{what} has {len(long)} dims larger than 1, {long}; at most {MOST_DIMS} can be "
            f"compared; join some of them with renumber()"
        )
    groups = {}
    for count in range(1, len(long) + 1):
        for dims in combinations(long, count):
            groups[dims] = layout.groups(*dims)
    return groups


def _dims_above_one(layout: RankLayout) -> _Dims:
    return tuple(dim for dim in layout.dim_names if layout.size_of(dim) > 1)


def _count_kept(
    ours: Mapping[_Dims, RankGroups], theirs: Mapping[_Dims, RankGroups]
) -> dict[tuple[_Dims, _Dims], int]:
    """Count the groups that are in both layouts, for each pair of old dims and new dims.

    Within one layout, groups over different dims differ, so the ranks of a group identify its dims.
    """
    dims_of = {key: dims for dims, groups in ours.items() for key in _keys(groups)}
    kept: Counter[tuple[_Dims, _Dims]] = Counter()
    for there, groups in theirs.items():
        for key in _keys(groups):
            if key in dims_of:
                kept[dims_of[key], there] += 1
    return kept


def _keys(groups: RankGroups) -> Iterator[bytes]:
    """Yield the ranks of each group as bytes, with 32 bits for each rank."""
    return map(bytes, groups.to_array().astype(np.int32))


def _count_moved(before: RankLayout, after: RankLayout) -> tuple[int, int]:
    """Count the ranks that are in both layouts, and how many of them have different coordinates."""
    shared, here, there = np.intersect1d(
        np.asarray(before.ranks), np.asarray(after.ranks), assume_unique=True, return_indices=True
    )
    ours = _coords_at(before, here)
    theirs = _coords_at(after, there)
    moved = np.zeros(shared.size, dtype=np.bool_)
    for dim in {**ours, **theirs}:
        moved |= ours.get(dim, 0) != theirs.get(dim, 0)
    return shared.size, int(np.count_nonzero(moved))


def _coords_at(layout: RankLayout, positions: NDArray[np.int64]) -> dict[str, Any]:
    """Return, for each dim, the coordinates of the ranks at some positions."""
    indices = np.unravel_index(positions, layout.shape, order="F")
    return dict(zip(layout.dim_names, indices, strict=True))


def _named(layout: RankLayout) -> str:
    """Format the sizes, and the smallest rank unless it is 0."""
    return f"{layout} from rank {layout.rank_offset}" if layout.rank_offset else str(layout)


# ---- lost ranks ---------------------------------------------------------------------------------


@attrs.frozen(slots=False)
class Lost:
    """The shards that are lost if a job continues without some ranks.

    If a state is sharded over some dims and replicated along the other dims, it has one shard for
    each combination of coordinates along the sharded dims. A shard is lost if no remaining rank has
    this shard.

    Args:
        before: The layout before.
        after: The layout after. Only its ranks matter.

    Example:
        >>> before = RankLayout("tp=2,dp=4")
        >>> lost = Lost(before, RankLayout([2, 3], ["tp", "dp"], ranks=[0, 1, 2, 3, 6, 7]))
        >>> lost.ranks, lost.shards("tp"), lost.shards("dp")
        ((4, 5), (), ({'dp': 2},))
        >>> lost.summary
        '4..5 (no other rank has dp=2)'
    """

    before: RankLayout
    after: RankLayout

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that are in `before` but not in `after`, ascending."""
        return tuple(sorted({*self.before.ranks} - {*self.after.ranks}))

    def shards(self, /, *dims: str) -> tuple[dict[str, int], ...]:
        """Return the shards over some dims that no remaining rank has.

        A trainer loads these shards from its checkpoint. A remaining rank has each other shard.

        Args:
            dims: One or more dims, in any order.

        Returns:
            The coordinates of each lost shard along the dims, in the order of `before`, the first
            dim varying fastest.

        Raises:
            UnknownDimError: The layout does not have a dim of this name.
            LayoutError: No dims are given, or a dim is given twice.
        """
        ordered = self.before.order_dims(dims)
        names = self.before.dim_names
        others = tuple([-1 - axis for axis, name in enumerate(names) if name not in ordered])
        left = np.isin(np.asarray(self.before.ranks), np.asarray(self.after.ranks))
        # The first dim of the layout is the last axis of the array.
        held = left.reshape(self.before.shape[::-1]).any(axis=others)
        lost = np.argwhere(~np.asarray(held)).tolist()
        return tuple(dict(zip(ordered, reversed(index), strict=True)) for index in lost)

    @property
    def summary(self) -> str:
        """The lost ranks and shards as text, such as "3 (no other rank has tp=1,dp=1)".

        The text lists lost shards over one dim. If there are none, it lists lost shards over two
        dims, and so on.
        """
        ranks = format_ranks(self.ranks) or "none"
        dims = _dims_above_one(self.before)
        for count in range(1, min(len(dims), MOST_DIMS) + 1):
            shards = [one for some in combinations(dims, count) for one in self.shards(*some)]
            if shards:
                texts = [format_sizes(one) for one in shards[:4]]
                more = "; ..." if len(shards) > len(texts) else ""
                return f"{ranks} (no other rank has {'; '.join(texts)}{more})"
        return ranks
