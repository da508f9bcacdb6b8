"""Sharding: which part of a tensor each rank of a layout holds, and which ranks hold the same."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from itertools import chain, product
from typing import NamedTuple

import attrs
import numpy as np
from numpy.typing import NDArray

from hypercomm.layout.rank_layout import RankLayout

Steps = tuple[tuple[str, int, bool], ...]
"""Some dims of a layout with their sizes, and whether they cut in zigzag."""


class Shard(NamedTuple):
    """What a rank holds: its cell, an index for each axis that is cut, and which replica it is."""

    cell: tuple[int, ...]
    replica: int


@attrs.frozen
class Sharding:
    """How the ranks of one pipeline stage of a layout hold a tensor.

    A dim that cuts the tensor gives each of its coordinates another shard of an axis; every other
    dim replicates. Ranks that hold the same cell are its replicas, in the order of the layout.

    A dim of n coordinates that cuts in zigzag gives coordinate i the chunks i and 2 * n - 1 - i of
    2 * n, one behind the other, for dims further in to cut. The axis then has twice as many shards,
    and each rank holds two cells.

    Args:
        layout: The ranks.
        cuts: For each tensor axis that is cut, the dims that cut it, outermost first. Dims that
            the layout lacks count as dims of size 1.
        stage: The coordinate of the stage along the dim of the pipeline; none: all ranks.
        zigzag: Those dims of `cuts` that cut in zigzag.

    Example:
        >>> sharding = Sharding(RankLayout.parse("tp=2,dp=2,pp=2"), [("dp",)], {"pp": 1})
        >>> sharding.shards, sharding.replicas, sharding.ranks
        ((2,), 2, (4, 5, 6, 7))
        >>> sharding.shard_of(7), sharding.shard_of(3)
        (Shard(cell=(1,), replica=1), None)
        >>> sharding.rank_at((1,), 1)
        7
        >>> causal = Sharding(RankLayout.parse("cp=2"), [("cp",)], zigzag={"cp"})
        >>> causal.shards, [shard.cell for shard in causal.shards_of(0)]
        ((4,), [(0,), (3,)])
    """

    layout: RankLayout
    cuts: Sequence[tuple[str, ...]]
    stage: Mapping[str, int] = attrs.field(factory=dict)
    zigzag: Collection[str] = ()
    _steps: tuple[Steps, ...] = attrs.field(init=False, eq=False, repr=False)  # replicas' last

    def __attrs_post_init__(self) -> None:
        sizes = self.layout.sizes
        taken = {*self.stage, *chain.from_iterable(self.cuts)}
        replicating = [dim for dim in reversed(sizes) if dim not in taken]
        steps = (
            tuple(
                (dim, sizes[dim], dim in self.zigzag and sizes[dim] > 1)
                for dim in dims
                if dim in sizes
            )
            for dims in (*self.cuts, replicating)
        )
        object.__setattr__(self, "_steps", tuple(steps))

    @property
    def shards(self) -> tuple[int, ...]:
        """The number of shards along each axis that is cut."""
        return tuple(_chunks(steps) for steps in self._steps[:-1])

    @property
    def held(self) -> tuple[int, ...]:
        """How many of the shards along each axis that is cut each rank holds."""
        return tuple(_slots(steps) for steps in self._steps[:-1])

    @property
    def replicas(self) -> int:
        """The number of ranks that hold the same cell."""
        return _chunks(self._steps[-1])

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the stage, in the order of the layout."""
        return self.layout.ranks_where(**self.stage)

    def shard_of(self, rank: int) -> Shard | None:
        """Return what a rank holds first, or None where it is not on the stage.

        Raises:
            RankOutsideError: The layout does not hold `rank`.
        """
        coords = self.layout.coords(rank)
        if not self.stage.items() <= coords.items():
            return None
        *cell, replica = (_fold(coords, steps) for steps in self._steps)
        return Shard(tuple(cell), replica)

    def shards_of(self, rank: int) -> tuple[Shard, ...]:
        """Return all that a rank holds: one cell, or several where a dim cuts in zigzag."""
        first = self.shard_of(rank)
        if first is None or max(self.held, default=1) == 1:
            return () if first is None else (first,)
        coords, cuts = self.layout.coords(rank), self._steps[:-1]
        cells = product(*([_fold(coords, s, slot) for slot in range(_slots(s))] for s in cuts))
        return tuple(Shard(cell, first.replica) for cell in cells)

    def slots_of(self, cell: tuple[int, ...]) -> tuple[int, ...]:
        """Return behind how many others of its rank a cell lies, along each axis that is cut."""
        cuts = self._steps[:-1]
        return tuple(_unfold({}, steps, index) for steps, index in zip(cuts, cell, strict=True))

    def rank_at(self, cell: tuple[int, ...], replica: int) -> int:
        """Return the rank that holds a cell as one of its replicas; the inverse of `shard_of`."""
        coords = dict(self.stage)
        for steps, index in zip(self._steps, (*cell, replica), strict=True):
            _unfold(coords, steps, index)
        return self.layout.rank(**coords)

    def replicas_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that hold what `rank` holds, itself included; () off the stage.

        Example:
            >>> Sharding(RankLayout.parse("tp=2,dp=2"), [("dp",)]).replicas_of(3)
            (2, 3)
        """
        shard = self.shard_of(rank)
        if shard is None:
            return ()
        return tuple(self.rank_at(shard.cell, replica) for replica in range(self.replicas))

    def to_array(self) -> NDArray[np.int64]:
        """Enumerate the ranks by cell (the last axis that is cut varies fastest) and replica.

        Example:
            >>> Sharding(RankLayout.parse("tp=2,dp=2"), [("dp",)]).to_array().tolist()
            [[0, 1], [2, 3]]
        """
        dims = [dim for dim, *_ in chain.from_iterable(self._steps)]
        if not dims:
            return np.array([self.ranks], dtype=np.int64)
        stage = self.layout.select(**self.stage) if self.stage else self.layout
        counts = [math.prod(size for _, size, _ in steps) for steps in self._steps]
        ranks = stage.enumerate_ranks(dims).reshape(counts)
        for axis, steps in enumerate(self._steps):
            if _slots(steps) > 1:
                ranks = ranks.take([_holder(steps, chunk) for chunk in range(_chunks(steps))], axis)
        return ranks.reshape(math.prod(self.shards), self.replicas)


def _slots(steps: Steps) -> int:
    """How many chunks each rank holds."""
    return 1 << sum(is_zigzag for *_, is_zigzag in steps)


def _chunks(steps: Steps) -> int:
    """How many chunks there are."""
    return math.prod(size for _, size, _ in steps) * _slots(steps)


def _fold(coords: dict[str, int], steps: Steps, slot: int = 0) -> int:
    """Read the coordinates along some dims, the first outermost, as one number: of a chunk.

    From the innermost dim outwards, `slot` becomes the chunk's place in what each dim has cut.
    """
    width = _slots(steps)
    for dim, size, is_zigzag in reversed(steps):
        if is_zigzag:
            half, index = width // 2, coords[dim]
            slot += index * half if slot < half else (2 * size - 2 - index) * half
        else:
            slot += coords[dim] * width
        width *= size
    return slot


def _unfold(coords: dict[str, int], steps: Steps, index: int) -> int:
    """Set the coordinates that `_fold` reads as this number, and return the slot."""
    width = _chunks(steps)
    for dim, size, is_zigzag in steps:
        width //= size
        if is_zigzag:
            chunk, index = divmod(index, width // 2)
            coords[dim] = min(chunk, 2 * size - 1 - chunk)
            index += (chunk >= size) * (width // 2)
        else:
            coords[dim], index = divmod(index, width)
    return index


def _holder(steps: Steps, chunk: int) -> int:
    """Return the number of the coordinates that hold a chunk, the first dim outermost."""
    coords: dict[str, int] = {}
    _unfold(coords, steps, chunk)
    number = 0
    for dim, size, _ in steps:
        number = number * size + coords[dim]
    return number
