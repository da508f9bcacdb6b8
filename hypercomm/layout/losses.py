"""What ranks that are lost held: the shards of some dims that no rank is left with."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from itertools import chain, combinations

import attrs
import numpy as np
from numpy.typing import NDArray

from hypercomm.errors import LayoutError, RankOutsideError
from hypercomm.layout.rank_layout import RankLayout
from hypercomm.layout.reading.checks import as_rank
from hypercomm.layout.reading.notation import format_ranks
from hypercomm.layout.reading.shown import aligned, shown

MOST_DIMS = 12
"""The most dims larger than 1 of which all combinations are looked at; they have 4,095."""

_MOST_SHOWN = 4

_Dims = tuple[str, ...]


@attrs.frozen(repr=False, slots=False)
class Lost:
    """What is lost of a layout with the ranks that another one has no more; `str()` is a table.

    What is sharded over some dims, and the same along the others, has a shard for each combination
    of coordinates along those dims. A shard is lost where no rank is left that held it.

    Args:
        before: The layout before.
        after: The layout after; only its ranks count.

    Raises:
        LayoutError: One of them is no layout.

    Example:
        >>> before = RankLayout.parse("tp=2,dp=4")
        >>> lost = Lost(before, RankLayout([2, 3], ["tp", "dp"], ranks=[0, 1, 2, 3, 6, 7]))
        >>> lost.ranks, lost.shards("tp"), lost.shards("dp")
        ((4, 5), (), ({'dp': 2},))
        >>> print(lost)
        sharded over  shards  lost
        tp            2       none
        dp            4       1: dp=2
        tp+dp         8       2: tp=0,dp=2; tp=1,dp=2
        tp=2,dp=4: 2 of 8 ranks are lost, 4..5: dp=2
    """

    before: RankLayout = attrs.field()
    after: RankLayout = attrs.field()

    @before.validator
    @after.validator
    def _check(self, attribute: attrs.Attribute[RankLayout], value: object) -> None:
        if not isinstance(value, RankLayout):
            raise LayoutError(f"{attribute.name} must be a RankLayout, got {shown(value)}")

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """The ranks that only the layout before has, ascending."""
        ranks = np.asarray(self.before.ranks)
        return tuple(np.sort(ranks[~self._left.reshape(-1)]).tolist())

    @cached_property
    def _left(self) -> NDArray[np.bool_]:
        """Whether each rank is left; the first dim varies fastest, so it is the last axis."""
        left = np.isin(np.asarray(self.before.ranks), np.asarray(self.after.ranks))
        return left.reshape(self.before.shape[::-1])

    def shards(self, /, *dims: str) -> tuple[dict[str, int], ...]:
        """Return the shards of what is sharded over some dims that no rank is left with.

        Args:
            dims: At least one, in any order, as for `RankLayout.groups`.

        Returns:
            The coordinates of each along the dims, in the layout's order; the first dim varies
            fastest. A trainer loads them from its checkpoint; all others some rank has.

        Raises:
            UnknownDimError, LayoutError: As for `RankLayout.order_dims`.
        """
        ordered = self.before.order_dims(dims)
        names = self.before.dim_names
        others = tuple(-1 - axis for axis, name in enumerate(names) if name not in ordered)
        return tuple(self._coords(ordered, ~np.asarray(self._left.any(axis=others))))

    def replicas(self, rank: int, /, *dims: str) -> tuple[int, ...]:
        """Return the ranks that are left with the shard that a rank has, or had.

        Args:
            rank: One of the layout before.
            dims: Those over which is sharded, as for `shards`.

        Raises:
            RankOutsideError: The layout before does not have the rank.
            UnknownDimError, LayoutError: As for `RankLayout.order_dims`.

        Example:
            >>> lost = Lost(RankLayout.parse("tp=2,dp=4"), RankLayout.parse("tp=2,dp=2"))
            >>> lost.replicas(5, "tp"), lost.replicas(5, "tp", "dp")
            ((1, 3), ())
        """
        ordered = self.before.order_dims(dims)
        if as_rank(rank) not in self.before:
            raise RankOutsideError(f"rank {rank} is not in {self.before}, the layout before")
        here = self.before.coords(rank)
        holders = self.before.ranks_where(**{dim: here[dim] for dim in ordered})
        return tuple(one for one in holders if one in self.after)

    @property
    def least(self) -> tuple[dict[str, int], ...]:
        """The lost shards of which no coordinate may be left out: `dp=2`, and not `tp=0,dp=2` too.

        Raises:
            LayoutError: More than `MOST_DIMS` dims are larger than 1.
        """
        found: list[dict[str, int]] = []
        known: dict[_Dims, NDArray[np.bool_]] = {(): np.array(False)}
        for dims, gone in self._every():
            implied = np.logical_or.reduce(
                np.broadcast_arrays(*(known[dims[:at] + dims[at + 1 :]] for at in range(len(dims))))
            )
            found.extend(self._coords(dims, (gone & ~implied).reshape(self._shape(dims))))
            known[dims] = gone | implied
        return tuple(found)

    @property
    def summary(self) -> str:
        """What is lost in one sentence.

        Example:
            >>> layouts = RankLayout.parse("tp=2,dp=2"), RankLayout([3], ["dp"])
            >>> Lost(*layouts).summary
            'tp=2,dp=2: 1 of 4 ranks is lost, 3: tp=1,dp=1'
        """
        count = len(self.ranks)
        if not count:
            return f"{self.before}: no rank is lost"
        verb = "is" if count == 1 else "are"
        total = f"{count:,} of {self.before.size:,}"
        return f"{self.before}: {total} ranks {verb} lost, {self.words}"

    @property
    def words(self) -> str:
        """The ranks that are lost, and the least of what is lost with them: "3: tp=1,dp=1"."""
        if not self.ranks:
            return "none"
        ranks = format_ranks(self.ranks)
        return f"{ranks}: {_some(self.least)}" if len(self._long()) <= MOST_DIMS else ranks

    def __repr__(self) -> str:
        return f"<Lost: {self.summary}>"

    def __str__(self) -> str:
        rows = [("sharded over", "shards", "lost")]
        long = self._long()
        most = len(long) if len(long) <= MOST_DIMS else 1
        for dims in _combinations(long, most):
            lost = self.shards(*dims)
            told = f"{len(lost):,}: {_some(lost)}" if lost else "none"
            shards = math.prod(self.before.size_of(dim) for dim in dims)
            rows.append(("+".join(dims), f"{shards:,}", told))
        more = (
            f"{len(long)} dims are too many to list together; ask shards() over those that matter"
        )
        return "\n".join([*aligned(rows), *([more] if most < len(long) else []), self.summary])

    # ---- inside -------------------------------------------------------------------------------

    def _long(self) -> _Dims:
        """The dims larger than 1; of a layout of one rank its first dim."""
        names = self.before.dim_names
        return tuple(dim for dim in names if self.before.size_of(dim) > 1) or names[:1]

    def _shape(self, dims: _Dims) -> tuple[int, ...]:
        return tuple(self.before.size_of(dim) for dim in reversed(dims))

    def _every(self) -> Iterator[tuple[_Dims, NDArray[np.bool_]]]:
        """For each combination of dims larger than 1, few first, which shards are lost."""
        long = self._long()
        if len(long) > MOST_DIMS:
            raise LayoutError(
                f"before has {len(long)} dims larger than 1, {long}; all combinations of up to "
                f"{MOST_DIMS} are looked at: ask for shards() over those that matter"
            )
        left = self._left.reshape(self._shape(long))
        for dims in _combinations(long, len(long)):
            others = tuple(-1 - axis for axis, name in enumerate(long) if name not in dims)
            yield dims, ~np.asarray(left.any(axis=others, keepdims=True))

    def _coords(self, dims: _Dims, gone: NDArray[np.bool_]) -> Iterator[dict[str, int]]:
        """The coordinates of what is marked in an array over some dims, the last one first."""
        for index in np.argwhere(gone).tolist():
            yield dict(zip(dims, reversed(index), strict=True))


def _combinations(dims: _Dims, most: int) -> Iterator[_Dims]:
    """All combinations of at least one and at most so many dims, few first."""
    return chain.from_iterable(combinations(dims, count) for count in range(1, most + 1))


def _some(shards: Sequence[Mapping[str, int]]) -> str:
    """Write the first ones of some shards, in the notation of sizes."""
    texts = [",".join(f"{dim}={at}" for dim, at in one.items()) for one in shards[:_MOST_SHOWN]]
    more = len(shards) - len(texts)
    return "; ".join(texts) + (f" and {more:,} more" if more else "")
