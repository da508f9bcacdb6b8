"""Sharding: which part of a tensor each rank of a layout holds, and which ranks hold the same."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import attrs
import numpy as np
from numpy.typing import NDArray

from hypercomm.layout.rank_layout import RankLayout

Steps = tuple[tuple[str, int], ...]
"""Some dims of a layout with their sizes."""


class Shard(NamedTuple):
    """What a rank holds: its cell, an index for each axis that is cut, and which replica it is."""

    cell: tuple[int, ...]
    replica: int


@attrs.frozen
class Sharding:
    """How the ranks of one pipeline stage of a layout hold a tensor.

    A dim that cuts the tensor gives each of its coordinates another shard of an axis; every other
    dim replicates. Ranks that hold the same cell are its replicas, in the order of the layout.

    Args:
        layout: The ranks.
        cuts: For each tensor axis that is cut, the dims that cut it, outermost first. Dims that
            the layout lacks count as dims of size 1.
        stage: The coordinate of the stage along the dim of the pipeline; none: all ranks.

    Example:
        >>> sharding = Sharding(RankLayout.parse("tp=2,dp=2,pp=2"), [("dp",)], {"pp": 1})
        >>> sharding.shards, sharding.replicas, sharding.ranks
        ((2,), 2, (4, 5, 6, 7))
        >>> sharding.shard_of(7), sharding.shard_of(3)
        (Shard(cell=(1,), replica=1), None)
        >>> sharding.rank_at((1,), 1)
        7
    """

    layout: RankLayout
    cuts: Sequence[tuple[str, ...]]
    stage: Mapping[str, int] = attrs.field(factory=dict)
    _steps: tuple[Steps, ...] = attrs.field(init=False, eq=False, repr=False)  # replicas' last

    def __attrs_post_init__(self) -> None:
        sizes = self.layout.sizes
        taken = {*self.stage, *chain.from_iterable(self.cuts)}
        replicating = [dim for dim in reversed(sizes) if dim not in taken]
        steps = (
            tuple((dim, sizes[dim]) for dim in dims if dim in sizes)
            for dims in (*self.cuts, replicating)
        )
        object.__setattr__(self, "_steps", tuple(steps))

    @property
    def shards(self) -> tuple[int, ...]:
        """The number of shards along each axis that is cut."""
        return tuple(math.prod(size for _, size in steps) for steps in self._steps[:-1])

    @property
    def replicas(self) -> int:
        """The number of ranks that hold the same cell."""
        return math.prod(size for _, size in self._steps[-1])

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the stage, in the order of the layout."""
        return self.layout.ranks_where(**self.stage)

    def shard_of(self, rank: int) -> Shard | None:
        """Return what a rank holds, or None where it is not on the stage.

        Raises:
            RankOutsideError: The layout does not hold `rank`.
        """
        coords = self.layout.coords(rank)
        if not self.stage.items() <= coords.items():
            return None
        *cell, replica = (_fold(coords, steps) for steps in self._steps)
        return Shard(tuple(cell), replica)

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
        dims = [dim for dim, _ in chain.from_iterable(self._steps)]
        if not dims:
            return np.array([self.ranks], dtype=np.int64)
        stage = self.layout.select(**self.stage) if self.stage else self.layout
        return stage.enumerate_ranks(dims).reshape(math.prod(self.shards), self.replicas)


def _fold(coords: dict[str, int], steps: Steps) -> int:
    """Read the coordinates along some dims, the first outermost, as one number."""
    index = 0
    for dim, size in steps:
        index = index * size + coords[dim]
    return index


def _unfold(coords: dict[str, int], steps: Steps, index: int) -> None:
    """Set the coordinates that `_fold` reads as this number."""
    for dim, size in reversed(steps):
        index, coords[dim] = divmod(index, size)
