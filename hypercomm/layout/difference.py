"""What changes from one layout to another: which groups are kept, gone or new, which ranks move.

Groups are the same when they have the same ranks in the same order, whatever their dims are called.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import chain, combinations
from typing import TYPE_CHECKING, Any, Literal

import attrs
import numpy as np
from numpy.typing import NDArray

from hypercomm.errors import LayoutError
from hypercomm.layout.groups.rank_groups import RankGroups
from hypercomm.layout.losses import Lost
from hypercomm.layout.numbering.numbering import Dims
from hypercomm.layout.rank_layout import RankLayout
from hypercomm.layout.reading.checks import LARGEST_WORLD
from hypercomm.layout.reading.shown import aligned, shown
from hypercomm.layout.reading.tables import as_html

if TYPE_CHECKING:
    from hypercomm.draw.drawing import Drawing
    from hypercomm.tools.place import On

MOST_DIMS = 12
"""The most dims larger than 1 that are compared; they have 4,095 combinations."""

COLUMNS = ("before", "after", "groups x size", "result")
"""What the cells of a `GroupsChange` are."""

_Dims = tuple[str, ...]
_TwoArrays = tuple[NDArray[np.int64], NDArray[np.int64]]


@attrs.frozen
class GroupsChange:
    """What becomes of the groups over some dims; made by `difference`.

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
    """What changes from one layout to another; made by `difference`, and `str()` is a table.

    Args:
        before: The layout before.
        after: The layout after.
        changes: One for every combination of dims of either layout that makes groups of two ranks
            or more: those of `before` in its order, few dims first, then what is new in `after`.
            Several, where lists of ranks let groups over some dims be kept over different ones.
        groups_before: The number of groups of two ranks or more that `before` has.
        groups_after: The number of groups of two ranks or more that `after` has.
        groups_kept: The number of groups that both have.
        ranks_shared: The number of ranks that are in both layouts.
        ranks_moved: The number of these whose coordinates change. A layout without some dim counts
            as one where its size is 1, so the coordinate is 0.

    Example:
        >>> layouts = RankLayout.parse("tp=2,cp=2,dp=2"), RankLayout.parse("tp=4,dp=2")
        >>> changes = difference(*layouts)
        >>> [change.before for change in changes.kept]
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
    def kept(self) -> tuple[GroupsChange, ...]:
        """The changes of groups that are all kept."""
        return self._where("kept")

    @property
    def partly(self) -> tuple[GroupsChange, ...]:
        """The changes of groups of which some are kept."""
        return self._where("partly")

    @property
    def gone(self) -> tuple[GroupsChange, ...]:
        """The changes of groups that only the layout before has."""
        return self._where("gone")

    @property
    def new(self) -> tuple[GroupsChange, ...]:
        """The changes of groups that only the layout after has."""
        return self._where("new")

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
        """What is lost with the ranks that only the layout before has.

        Example:
            >>> layouts = RankLayout.parse("tp=2,dp=2"), RankLayout([3], ["dp"])
            >>> difference(*layouts).lost.shards("tp", "dp")
            ({'tp': 1, 'dp': 1},)
        """
        return Lost(self.before, self.after)

    @property
    def summary(self) -> str:
        """The difference in one sentence.

        Example:
            >>> layouts = RankLayout.parse("tp=2,dp=4"), RankLayout.parse("tp=2,dp=2")
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

    def _where(self, result: str) -> tuple[GroupsChange, ...]:
        return tuple(change for change in self.changes if change.result == result)

    def to_dict(self) -> dict[str, Any]:
        """Return the difference as a dict which JSON can hold.

        Example:
            >>> layouts = RankLayout.parse("tp=2,dp=4"), RankLayout.parse("tp=2,dp=2")
            >>> difference(*layouts).to_dict()["changes"][0]["result"]
            'partly'
        """
        counts = ("groups_before", "groups_after", "groups_kept", "ranks_shared", "ranks_moved")
        changes = [{**attrs.asdict(one), "result": one.result} for one in self.changes]
        for one in changes:
            one["before"], one["after"] = list(one["before"]), list(one["after"])
        return {
            "before": self.before.to_dict(),
            "after": self.after.to_dict(),
            "changes": changes,
            **{name: getattr(self, name) for name in counts},
        }

    def draw(self, on: On | None = None, dims: Dims | None = None) -> Drawing:
        """Return a picture of both layouts, and of which groups are kept, gone and new.

        Args, errors: As for `RankLayout.draw`; without `dims`, each by itself, up to 64 ranks.

        Example:
            >>> layouts = RankLayout.parse("tp=2,dp=2"), RankLayout.parse("tp=4")
            >>> difference(*layouts).draw(on=8).svg()[:4]
            '<svg'
        """
        from hypercomm.draw.making import drawing_of_change

        return drawing_of_change(self, on, dims)

    def _repr_html_(self) -> str:
        from hypercomm.draw.drawing import MOST_DRAWN

        if max(self.before.size, self.after.size) <= MOST_DRAWN:
            return self.draw()._repr_html_()
        return as_html(self.summary, COLUMNS, [change.cells for change in self.changes])

    def __repr__(self) -> str:
        return f"<LayoutDifference: {self.summary}>"

    def __str__(self) -> str:
        rows = [COLUMNS, *(change.cells for change in self.changes)]
        return "\n".join([*aligned(rows), self.summary])


def difference(before: RankLayout, after: RankLayout) -> LayoutDifference:
    """Compare the groups and the coordinates that ranks have in two layouts.

    Every combination of dims is looked at, dims of size 1 left out: they add nobody to a group.

    Args:
        before: The layout to come from; at most `MOST_DIMS` of its dims are larger than 1.
        after: The layout to go to, likewise; it may have other ranks and other dims.

    Returns:
        What becomes of the groups, and how many ranks move.

    Raises:
        LayoutError: One of them is no layout, or has too many ranks or dims.

    Example:
        With tp=2 the ranks 0 and 1 are together, and with cp=4 the ranks 0..3 are.

        >>> print(difference(RankLayout.parse("tp=2,cp=2"), RankLayout.parse("cp=4")))
        before  after  groups x size  result
        tp      -      2 x 2          gone
        cp      -      2 x 2          gone
        tp+cp   cp     1 x 4          kept
        tp=2,cp=2 to cp=4: 1 of 5 groups are kept, 4 gone, 0 new; 3 of 4 ranks change coordinates
    """
    ours, theirs = _every_groups(before, "before"), _every_groups(after, "after")
    ranks = _ranks(before), _ranks(after)
    kept = {
        (here, there): count
        for here, there in _candidates((before, after), (list(ours), list(theirs)), ranks)
        if (count := _common(ours[here], theirs[there]))
    }
    partners: dict[_Dims, list[_Dims]] = {}
    for here, there in kept:
        partners.setdefault(here, []).append(there)
    pairs = [(here, there) for here in ours for there in partners.get(here, [()])]
    found = {there for _, there in kept}
    pairs += [((), there) for there in theirs if there not in found]
    shared, moved = _count_moved(before, after, ranks)
    return LayoutDifference(
        before=before,
        after=after,
        changes=tuple(
            GroupsChange(
                here,
                there,
                groups_before=len(ours[here]) if here else 0,
                groups_after=len(theirs[there]) if there else 0,
                size=(ours[here] if here else theirs[there]).group_size,
                kept=kept.get((here, there), 0),
            )
            for here, there in pairs
        ),
        groups_before=sum(map(len, ours.values())),
        groups_after=sum(map(len, theirs.values())),
        groups_kept=sum(kept.values()),
        ranks_shared=shared,
        ranks_moved=moved,
    )


def _every_groups(layout: RankLayout, what: str) -> dict[_Dims, RankGroups]:
    """The groups over every combination of dims larger than 1, few dims first."""
    if not isinstance(layout, RankLayout):
        raise LayoutError(f"{what} must be a RankLayout, got {shown(layout)}")
    if layout.size > LARGEST_WORLD:
        raise LayoutError(
            f"{what} has {layout.size:,} ranks; layouts of up to {LARGEST_WORLD:,} are compared"
        )
    long = _long_dims(layout)
    if len(long) > MOST_DIMS:
        raise LayoutError(
            f"{what} has {len(long)} dims larger than 1, {long}; up to {MOST_DIMS} are compared: "
            f"merge() those that are always used together"
        )
    counts = range(1, len(long) + 1)
    every = chain.from_iterable(combinations(long, count) for count in counts)
    return {dims: layout.groups(*dims) for dims in every}


def _long_dims(layout: RankLayout) -> _Dims:
    return tuple(dim for dim in layout.dim_names if layout.size_of(dim) > 1)


def _ranks(layout: RankLayout) -> NDArray[np.int64]:
    """All ranks, in the order in which the layout numbers them."""
    return layout.groups(*layout.dim_names).to_array().reshape(-1)


def _candidates(
    layouts: tuple[RankLayout, RankLayout],
    dims: tuple[Sequence[_Dims], Sequence[_Dims]],
    ranks: _TwoArrays,
) -> list[tuple[_Dims, _Dims]]:
    """The combinations of which some groups seem to be the same: random weights of ranks add up.

    No two combinations of one layout share a group, so each group is one of them.
    """
    _, identity = np.unique(np.concatenate(ranks), return_inverse=True)
    weights = np.random.default_rng(0).integers(2**64, size=identity.size, dtype=np.uint64)
    halves = np.split(weights[identity.reshape(-1)], [layouts[0].size])
    ours, our_dims = _sums(layouts[0], dims[0], halves[0])
    theirs, their_dims = _sums(layouts[1], dims[1], halves[1])
    _, here, there = np.intersect1d(ours, theirs, return_indices=True)
    pairs = np.unique(our_dims[here] * len(dims[1]) + their_dims[there]).tolist()
    return [(dims[0][pair // len(dims[1])], dims[1][pair % len(dims[1])]) for pair in pairs]


def _sums(
    layout: RankLayout, every_dims: Sequence[_Dims], weights: NDArray[np.uint64]
) -> tuple[NDArray[np.uint64], NDArray[np.int64]]:
    """Add up the weights of every group; also the index of the dims that each is over."""
    long = _long_dims(layout)
    sums: dict[_Dims, NDArray[np.uint64]] = {}
    # The first dim varies fastest, and the last axis of an array does.
    sums[()] = weights.reshape([layout.size_of(dim) for dim in reversed(long)])
    for dims in every_dims:  # few dims first, so that each is one more sum over an earlier one
        sums[dims] = sums[dims[:-1]].sum(axis=-1 - long.index(dims[-1]), keepdims=True)
    flat = [sums[dims].reshape(-1) for dims in every_dims]
    counts = np.array([each.size for each in flat], dtype=np.int64)
    # A layout of one rank has no dims larger than 1, and an empty list has no concatenation.
    return np.concatenate([weights[:0], *flat]), np.repeat(np.arange(len(flat)), counts)


def _common(groups: RankGroups, others: RankGroups) -> int:
    """Count the groups that are in both."""
    if groups == others:
        return len(groups)
    if groups.group_size != others.group_size:
        return 0
    ours, theirs = groups.to_array(), others.to_array()
    _, here, there = np.intersect1d(
        ours[:, 0], theirs[:, 0], assume_unique=True, return_indices=True
    )
    return int(np.count_nonzero((ours[here] == theirs[there]).all(axis=1)))


def _count_moved(before: RankLayout, after: RankLayout, ranks: _TwoArrays) -> tuple[int, int]:
    """Count the ranks in both layouts, and those of them with other coordinates."""
    shared, here, there = np.intersect1d(*ranks, assume_unique=True, return_indices=True)
    moved = np.zeros(shared.size, dtype=np.bool_)
    for dim in dict.fromkeys((*_long_dims(before), *_long_dims(after))):
        moved |= _coordinate(before, dim, here) != _coordinate(after, dim, there)
    return shared.size, int(np.count_nonzero(moved))


def _coordinate(layout: RankLayout, dim: str, positions: NDArray[np.int64]) -> NDArray[np.int64]:
    """The coordinates along a dim of the ranks at these positions of the numbering."""
    if dim not in layout.dim_names:
        return np.zeros_like(positions)
    axis = layout.dim_names.index(dim)
    index = positions // math.prod(layout.shape[:axis])
    return index % layout.shape[axis]


def _named(layout: RankLayout) -> str:
    """Write the sizes, and the smallest rank unless it is 0."""
    return f"{layout} from rank {layout.rank_offset}" if layout.rank_offset else str(layout)
