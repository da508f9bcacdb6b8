"""Scenes: what a picture shows, before anybody has said how: grids, a change, a matrix.

A scene holds numberings, not lists of cells, so that one of a million ranks is as small as one of
eight. What needs more than a numbering (which groups a change keeps, who sends what) was worked
out by those above, and is held as it is.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import attrs
import numpy as np
from numpy.typing import NDArray

from hypercomm.layout import RankLayout
from hypercomm.topology import Topology

Dims = tuple[str, ...]
Result = Literal["kept", "partly", "gone", "new"]


def _as_cells(given: object) -> NDArray[np.int64]:
    cells = np.asarray(given, dtype=np.int64)
    return cells.reshape(-1, 3)


@attrs.frozen
class GridScene:
    """One grid, or the grids of a set.

    Args:
        title: What is shown, in one line.
        grids: Each with its name; the name of a single grid may be "".
        topology: The hosts, domains and switches that hold the ranks, where they are known.
        dims: The dims whose groups are lit first, in the order of the first grid that has them
            all; a grid without one of them lights the groups of those that it has.
        panels: Dims that get a still picture each, the one of `dims` first; none: `dims` alone.
        edges: Names of two grids each, of which the first sends to the second.
    """

    title: str
    grids: tuple[tuple[str, RankLayout], ...]
    topology: Topology | None = None
    dims: Dims = ()
    panels: tuple[Dims, ...] = ()
    edges: tuple[tuple[str, str], ...] = ()


@attrs.frozen
class Change:
    """What becomes of the groups over some dims, as `GroupsChange` tells it.

    Args:
        before: The dims that make these groups before; none if they are new.
        after: The dims that make them after; none if they are gone.
        result: "kept", "partly", "gone" or "new".
        counts: How many groups of which size, as in "4 -> 8 x 2".
        kept: How many groups are the same before and after.
    """

    before: Dims
    after: Dims
    result: Result
    counts: str
    kept: int


@attrs.frozen
class ChangeScene:
    """A layout before and after a change.

    Args:
        title: What is shown, in one line.
        before: The numbering before.
        after: The numbering after; it may have other ranks.
        changes: What becomes of the groups over every combination of dims.
        topology: As for `GridScene`; of the larger of both.
        dims: The dims before whose groups are lit first.
        summary: The change in one sentence.
    """

    title: str
    before: RankLayout
    after: RankLayout
    changes: tuple[Change, ...] = ()
    topology: Topology | None = None
    dims: Dims = ()
    summary: str = ""


@attrs.frozen
class MatrixScene:
    """Who sends how much to whom.

    Args:
        title: What is shown, in one line.
        sources: The ranks that send, in the order of their layout.
        targets: The ranks that receive, likewise.
        cells: A row for each message, or each pair of ranks: source, target, amount.
        unit: What amounts count: "B", "elements" or "parts"; "parts" are of `whole`.
        whole: The amount of the whole tensor, in `unit`; 0 where nobody knows it.
        topology: As for `GridScene`.
        notes: Further lines below the title.
    """

    title: str
    sources: tuple[int, ...]
    targets: tuple[int, ...]
    cells: NDArray[np.int64] = attrs.field(
        converter=_as_cells, eq=attrs.cmp_using(eq=np.array_equal)
    )
    unit: str
    whole: int = 0
    topology: Topology | None = None
    notes: tuple[str, ...] = ()


Scene = GridScene | ChangeScene | MatrixScene


def ranks_of(numbering: RankLayout) -> NDArray[np.int64]:
    """List the ranks in the order of their positions; the first dim varies fastest.

    >>> ranks_of(RankLayout([2, 2], ["tp", "dp"], 4)).tolist()
    [4, 5, 6, 7]
    """
    ranks = numbering.ranks
    if isinstance(ranks, range):
        return np.arange(ranks.start, ranks.stop, dtype=np.int64)
    return np.asarray(ranks, dtype=np.int64)


def distinct(numbers: NDArray[np.int64]) -> NDArray[np.int64]:
    """List the numbers that there are, ascending; of a million, faster than numpy's hashing.

    >>> distinct(np.array([4, 2, 4])).tolist()
    [2, 4]
    """
    ordered = np.sort(numbers)
    return ordered[np.flatnonzero(np.diff(ordered, prepend=ordered[:1] - 1))]


def group_of_each(numbering: RankLayout, dims: Iterable[str]) -> NDArray[np.int64]:
    """Number the group over some dims that each position is in, as `RankLayout.groups` does.

    Groups count by the coordinates along the other dims, the first of those fastest.

    Args:
        numbering: The numbering.
        dims: Some of its dims.

    Returns:
        For each position, in the order of `numbering.ranks`, the index of its group.

    Example:
        >>> group_of_each(RankLayout([2, 2, 2], ["tp", "cp", "dp"]), ["cp"]).tolist()
        [0, 1, 0, 1, 2, 3, 2, 3]
    """
    inner = set(dims)
    index = np.zeros(1, dtype=np.int64)
    groups = 1
    for name, size in numbering.sizes.items():
        steps = np.zeros(size, dtype=np.int64)
        if name not in inner:
            steps = np.arange(size, dtype=np.int64) * groups
            groups *= size
        index = (steps[:, None] + index[None, :]).reshape(-1)
    return index
