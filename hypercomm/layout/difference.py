"""Differences between two layouts: groups that are kept, gone or new, and ranks that move.

Groups are the same when they have the same ranks in the same order, whatever their dims are called.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cached_property
from itertools import combinations
from typing import Literal

import attrs
import numpy as np

from hypercomm.errors import LayoutError
from hypercomm.layout.checks import LARGEST_WORLD
from hypercomm.layout.groups import RankGroups
from hypercomm.layout.layout import RankLayout
from hypercomm.layout.text import aligned, format_ranks, format_sizes, short_repr

MOST_DIMS = 12
"""The most dims larger than 1 that are compared; they have 4,095 combinations."""

COLUMNS = ("before", "after", "groups x size", "result")
"""The columns of the cells of a `GroupsChange`."""

_Dims = tuple[str, ...]


@attrs.frozen
class GroupsChange:
    """How the groups over some dims change; made by `difference`.

    Args:
        before: The dims that make these groups in the layout before, in its order; none if new.
        after: The dims that make them in the layout after, in its order; none if gone.
        groups_before: The number of groups over the dims before.
        groups_after: The number of groups over the dims after.
        size: The number of members of every group.
        kept: The number of groups that are the same before and after.

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
        """Whether all of the groups are kept, some of them, or whether they are gone or new."""
        if not self.after:
            return "gone"
        if not self.before:
            return "new"
        return "kept" if self.kept == self.groups_before == self.groups_after else "partly"

    @property
    def cells(self) -> tuple[str, str, str, str]:
        """The change as text, one for each of `COLUMNS`."""
        counts = dict.fromkeys(filter(None, (self.groups_before, self.groups_after)))
        partly = f": {self.kept:,} of {self.groups_before:,} kept"
        return (
            "+".join(self.before) or "-",
            "+".join(self.after) or "-",
            f"{' -> '.join(f'{count:,}' for count in counts)} x {self.size:,}",
            self.result + partly * (self.result == "partly"),
        )


@attrs.frozen(repr=False)
class LayoutDifference:
    """The differences between two layouts; made by `difference`. `str()` is a table.

    Args:
        before: The layout before.
        after: The layout after.
        changes: One for every combination of dims of either layout that makes groups of two ranks
            or more: those of `before` in its order, few dims first, then what is new in `after`.
            A combination has several if its groups are kept over different dims, which needs
            layouts with lists of ranks.
        groups_before: The number of groups of two ranks or more that `before` has.
        groups_after: The number of groups of two ranks or more that `after` has.
        groups_kept: The number of groups that both have.
        ranks_shared: The number of ranks that are in both layouts.
        ranks_moved: The number of these whose coordinates change. A layout without some dim counts
            as one where its size is 1, so the coordinate is 0.

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
        """The number of groups that only the layout before has."""
        return self.groups_before - self.groups_kept

    @property
    def groups_new(self) -> int:
        """The number of groups that only the layout after has."""
        return self.groups_after - self.groups_kept

    @property
    def ranks_gone(self) -> int:
        """The number of ranks that only the layout before has."""
        return self.before.size - self.ranks_shared

    @property
    def ranks_new(self) -> int:
        """The number of ranks that only the layout after has."""
        return self.after.size - self.ranks_shared

    @property
    def lost(self) -> Lost:
        """The shards that are lost with the ranks that only the layout before has.

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
        for count, what in ((self.ranks_gone, "gone"), (self.ranks_new, "new")):
            ranks += f", {count:,} are {what}" * (count > 0)
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
    """Compare the groups and the coordinates that ranks have in two layouts.

    All combinations of dims larger than 1 are compared.

    Args:
        before: The layout to come from; at most `MOST_DIMS` of its dims are larger than 1.
        after: The layout to go to, likewise; it may have other ranks and other dims.

    Returns:
        What becomes of all groups, and how many ranks move.

    Raises:
        LayoutError: One of them is not a layout, or has too many ranks or dims.

    Example:
        With tp=2 the ranks 0 and 1 are together, and with cp=4 the ranks 0..3 are.

        >>> print(difference(RankLayout("tp=2,cp=2"), RankLayout("cp=4")))
        before  after  groups x size  result
        tp      -      2 x 2          gone
        cp      -      2 x 2          gone
        tp+cp   cp     1 x 4          kept
        tp=2,cp=2 to cp=4: 1 of 5 groups are kept, 4 gone, 0 new; 3 of 4 ranks change coordinates
    """
    ours, theirs = _every_groups(before, "before"), _every_groups(after, "after")
    kept = _count_kept(ours, theirs)
    both = {here for here, _ in kept}, {there for _, there in kept}
    pairs = [*kept, *((dims, ()) for dims in ours if dims not in both[0])]
    number = {dims: number for number, dims in enumerate(ours)}
    pairs.sort(key=lambda pair: number[pair[0]])
    pairs += [((), dims) for dims in theirs if dims not in both[1]]
    changes = []
    for here, there in pairs:
        groups, others = ours.get(here, ()), theirs.get(there, ())
        size = (ours.get(here) or theirs[there]).group_size
        count = kept.get((here, there), 0)
        changes.append(GroupsChange(here, there, len(groups), len(others), size, count))
    counts = sum(map(len, ours.values())), sum(map(len, theirs.values())), sum(kept.values())
    return LayoutDifference(before, after, tuple(changes), *counts, *_count_moved(before, after))


def _every_groups(layout: RankLayout, what: str) -> dict[_Dims, RankGroups]:
    """The groups over every combination of dims larger than 1, few dims first."""
    if not isinstance(layout, RankLayout):
        raise LayoutError(f"{what} must be a RankLayout, got {short_repr(layout)}")
    if layout.size > LARGEST_WORLD:
        raise LayoutError(
            f"{what} has {layout.size:,} ranks; the most to compare are {LARGEST_WORLD:,}"
        )
    long = _long_dims(layout)
    if len(long) > MOST_DIMS:
        wrong = f"{what} has {len(long)} dims larger than 1, {long}"
        raise LayoutError(f"{wrong}; up to {MOST_DIMS} are compared: renumber() by fewer")
    some = [dims for count in range(1, len(long) + 1) for dims in combinations(long, count)]
    return {dims: layout.groups(*dims) for dims in some}


def _long_dims(layout: RankLayout) -> _Dims:
    return tuple(dim for dim in layout.dim_names if layout.size_of(dim) > 1)


def _count_kept(
    ours: Mapping[_Dims, RankGroups], theirs: Mapping[_Dims, RankGroups]
) -> dict[tuple[_Dims, _Dims], int]:
    """Count the groups that are the same, by the dims that they are over before and after.

    No two combinations of dims of one layout share a group.
    """
    dims_of = {key: dims for dims, groups in ours.items() for key in _keys(groups)}
    pairs = ((dims_of.get(key), dims) for dims, groups in theirs.items() for key in _keys(groups))
    return Counter((here, there) for here, there in pairs if here is not None)


def _keys(groups: RankGroups) -> Iterator[bytes]:
    """Yield the ranks of each group as bytes; torch numbers ranks with 32 bits."""
    return map(bytes, groups.to_array().astype(np.int32))


def _count_moved(before: RankLayout, after: RankLayout) -> tuple[int, int]:
    """Count the ranks in both layouts, and those of them with other coordinates."""
    ranks = np.asarray(before.ranks), np.asarray(after.ranks)
    shared, *places = np.intersect1d(*ranks, assume_unique=True, return_indices=True)
    ours, theirs = (
        dict(zip(layout.dim_names, np.unravel_index(place, layout.shape, order="F"), strict=True))
        for layout, place in zip((before, after), places, strict=True)
    )
    moved = np.zeros(shared.size, dtype=np.bool_)
    for dim in {**ours, **theirs}:
        moved |= ours.get(dim, 0) != theirs.get(dim, 0)
    return shared.size, int(np.count_nonzero(moved))


def _named(layout: RankLayout) -> str:
    """Write the sizes, and the smallest rank unless it is 0."""
    return f"{layout} from rank {layout.rank_offset}" if layout.rank_offset else str(layout)


# ---- lost ranks ---------------------------------------------------------------------------------


@attrs.frozen(slots=False)
class Lost:
    """The shards that are lost if a job continues without some ranks.

    State that is sharded over some dims and replicated along the others has a shard for each
    combination of coordinates along those dims. A shard is lost if none of its holders is left.

    Args:
        before: The layout before.
        after: The layout after; only its ranks count.

    Example:
        >>> before = RankLayout("tp=2,dp=4")
        >>> lost = Lost(before, RankLayout([2, 3], ["tp", "dp"], ranks=[0, 1, 2, 3, 6, 7]))
        >>> lost.ranks, lost.shards("tp"), lost.shards("dp")
        ((4, 5), (), ({'dp': 2},))
        >>> lost.words
        '4..5: dp=2'
    """

    before: RankLayout
    after: RankLayout

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that only the layout before has, ascending."""
        return tuple(sorted({*self.before.ranks} - {*self.after.ranks}))

    def shards(self, /, *dims: str) -> tuple[dict[str, int], ...]:
        """Return the shards over some dims that no remaining rank holds.

        Args:
            dims: At least one, in any order, as for `RankLayout.groups`.

        Returns:
            The coordinates of each along the dims, in the layout's order; the first dim varies
            fastest. A trainer loads these from its checkpoint; some rank has each other shard.

        Raises:
            UnknownDimError, LayoutError: As for `RankLayout.order_dims`.
        """
        ordered = self.before.order_dims(dims)
        names = self.before.dim_names
        others = tuple([-1 - axis for axis, name in enumerate(names) if name not in ordered])
        left = np.isin(np.asarray(self.before.ranks), np.asarray(self.after.ranks))
        held = left.reshape(self.before.shape[::-1]).any(axis=others)  # the first dim comes last
        lost = np.argwhere(~np.asarray(held)).tolist()
        return tuple(dict(zip(ordered, reversed(index), strict=True)) for index in lost)

    @property
    def words(self) -> str:
        """The lost ranks, and the lost shards over the fewest dims, as "3: tp=1,dp=1"."""
        ranks, dims = format_ranks(self.ranks) or "none", _long_dims(self.before)
        for count in range(1, min(len(dims), MOST_DIMS) + 1):
            shards = [one for some in combinations(dims, count) for one in self.shards(*some)]
            if shards:
                texts = [format_sizes(one) for one in shards[:4]]
                more = "; ..." if len(shards) > len(texts) else ""
                return f"{ranks}: {'; '.join(texts)}{more}"
        return ranks
