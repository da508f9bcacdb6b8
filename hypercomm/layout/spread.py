"""Spread: which part of a tensor each rank of a layout holds, and which ranks hold the same."""

from __future__ import annotations

import math
from typing import NamedTuple

import attrs
import numpy as np
from numpy.typing import NDArray

from hypercomm.layout.rank_layout import RankLayout

Steps = tuple[tuple[str, int], ...]
"""Some dims of a layout with their sizes."""


class Place(NamedTuple):
    """What a rank holds: its cell, an index for each axis that is cut, and which replica it is."""

    cell: tuple[int, ...]
    replica: int


@attrs.frozen
class Spread:
    """How the ranks of one pipeline stage of a layout hold a tensor.

    A dim that cuts the tensor gives each of its coordinates another shard of an axis; every other
    dim replicates. Ranks that hold the same cell are its replicas, in the order of the layout.

    Args:
        layout: The ranks.
        cuts: For each tensor axis that is cut, the dims that cut it, outermost first. Dims that
            the layout lacks count as dims of size 1.
        stage: The dim of the pipeline and the coordinate of the stage; None: all ranks.

    Example:
        >>> spread = Spread(RankLayout.parse("tp=2,dp=2,pp=2"), (("dp",),), ("pp", 1))
        >>> spread.shards, spread.replicas, spread.ranks
        ((2,), 2, (4, 5, 6, 7))
        >>> spread.place(7), spread.place(3)
        (Place(cell=(1,), replica=1), None)
        >>> spread.rank_at((1,), 1)
        7
    """

    layout: RankLayout
    cuts: tuple[tuple[str, ...], ...]
    stage: tuple[str, int] | None
    _steps: tuple[Steps, ...] = attrs.field(init=False, eq=False, repr=False)
    _replica_steps: Steps = attrs.field(init=False, eq=False, repr=False)

    def __attrs_post_init__(self) -> None:
        sizes = dict(zip(self.layout.dim_names, self.layout.shape, strict=True))
        taken = {dim for dims in self.cuts for dim in dims} | set((self.stage or ())[:1])
        steps = tuple(
            tuple((dim, sizes[dim]) for dim in dims if dim in sizes) for dims in self.cuts
        )
        replicas = tuple((dim, size) for dim, size in sizes.items() if dim not in taken)
        object.__setattr__(self, "_steps", steps)
        object.__setattr__(self, "_replica_steps", replicas)

    @property
    def shards(self) -> tuple[int, ...]:
        """The number of shards along each axis that is cut."""
        return tuple(math.prod(size for _, size in steps) for steps in self._steps)

    @property
    def replicas(self) -> int:
        """The number of ranks that hold the same cell."""
        return math.prod(size for _, size in self._replica_steps)

    @property
    def ranks(self) -> tuple[int, ...]:
        """The ranks of the stage, in the order of the layout."""
        return tuple(self.layout.ranks_where(**dict([self.stage] if self.stage else [])))

    def place(self, rank: int) -> Place | None:
        """Return what a rank holds, or None where it is not on the stage.

        Raises:
            RankOutsideError: The layout does not hold `rank`.
        """
        coords = self.layout.coords(rank)
        if self.stage is not None and coords[self.stage[0]] != self.stage[1]:
            return None
        cell = tuple(_fold(coords, steps) for steps in self._steps)
        return Place(cell, _fold(coords, self._replica_steps[::-1]))

    def find(self, rank: int) -> Place | None:
        """Return what a rank holds, or None where it is not on the stage, or not in the layout."""
        return self.place(rank) if rank in self.layout else None

    def rank_at(self, cell: tuple[int, ...], replica: int) -> int:
        """Return the rank that holds a cell as one of its replicas; the inverse of `place`."""
        coords = dict([self.stage] if self.stage else [])
        for steps, index in zip(self._steps, cell, strict=True):
            _unfold(coords, steps, index)
        _unfold(coords, self._replica_steps[::-1], replica)
        return self.layout.rank(**coords)

    def replicas_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that hold what `rank` holds, itself included; () off the stage.

        Example:
            >>> Spread(RankLayout.parse("tp=2,dp=2"), (("dp",),), None).replicas_of(3)
            (2, 3)
        """
        place = self.place(rank)
        if place is None:
            return ()
        return tuple(self.rank_at(place.cell, replica) for replica in range(self.replicas))

    def to_array(self) -> NDArray[np.int64]:
        """Enumerate the ranks by cell (the last axis that is cut varies fastest) and replica.

        Example:
            >>> Spread(RankLayout.parse("tp=2,dp=2"), (("dp",),), None).to_array().tolist()
            [[0, 1], [2, 3]]
        """
        fastest_last = [*(step for steps in self._steps for step in steps)]
        dims = [dim for dim, _ in (*fastest_last, *self._replica_steps[::-1])]
        if not dims:
            return np.array([self.ranks], dtype=np.int64)
        stage = self.layout if self.stage is None else self.layout.select(**dict([self.stage]))
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
