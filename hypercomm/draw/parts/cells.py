"""Cells: what a still picture shows in one place: a rank, or a host or more of them.

Up to `MOST_RANKS` ranks have a cell each. Of more, a cell stands for a unit of the innermost level
of the machine that has few enough units, or for a block of such units; where the machine is not
known, for a block of ranks.
"""

from __future__ import annotations

import attrs
import numpy as np
from numpy.typing import NDArray

from hypercomm.draw.scenes import distinct, ranks_of
from hypercomm.layout import RankLayout
from hypercomm.layout.text import counted, format_ranks
from hypercomm.topology import Topology

MOST_RANKS = 1_000
"""More ranks than this do not have a cell each."""

MOST_UNITS = 256
"""Cells of a picture that stand for more than a rank."""


@attrs.frozen(eq=False)
class Cells:
    """The cells of one grid, by their first rank.

    Args:
        names: What each is called: a rank, a host, a block of hosts.
        of_position: The cell of each position of the numbering.
        counts: How many ranks of the grid each holds.
        firsts: The first rank of each.
        kind: What a cell is: "rank", "host", "block of 4 hosts".
        parents: For each level further out, innermost first: its name, the unit that holds each
            cell, and the names of all its units.
    """

    names: tuple[str, ...]
    of_position: NDArray[np.int64]
    counts: NDArray[np.int64]
    firsts: NDArray[np.int64]
    kind: str
    parents: tuple[tuple[str, NDArray[np.int64], tuple[str, ...]], ...] = ()

    @property
    def are_ranks(self) -> bool:
        """Whether each cell is a rank."""
        return self.kind == "rank"


def cells_of(
    numbering: RankLayout,
    topology: Topology | None,
    most_ranks: int = MOST_RANKS,
    most_units: int = MOST_UNITS,
) -> Cells:
    """Return the cells of a grid.

    Args:
        numbering: The grid.
        topology: The machine, where it is known.
        most_ranks: The most ranks that have a cell each.
        most_units: The most cells of larger units.

    Example:
        >>> cells = cells_of(RankLayout([4, 3], ["tp", "dp"]), None, most_ranks=8, most_units=4)
        >>> cells.names, cells.counts.tolist(), cells.kind
        (('0..3', '4..7', '8..11'), [4, 4, 4], 'block of 4 ranks')
    """
    ranks = ranks_of(numbering)
    levels = () if topology is None else topology.levels
    if ranks.size <= most_ranks:
        order = np.argsort(ranks)
        cells = np.empty_like(order)
        cells[order] = np.arange(ranks.size)
        names: tuple[str, ...] = tuple(map(str, ranks[order].tolist()))
        return _cells(ranks, cells, names, "rank", topology, 0)
    for index, level in enumerate(levels):
        used, cells = np.unique(level.of_rank[ranks], return_inverse=True)
        if used.size <= most_units:
            names = tuple(level.names[unit] for unit in used.tolist())
            return _cells(ranks, cells.reshape(-1), names, level.name, topology, index + 1)
    if levels:
        outer = levels[-1]
        used, units = np.unique(outer.of_rank[ranks], return_inverse=True)
        block = _block(used.size, most_units)
        names = tuple(
            _from_to([outer.names[unit] for unit in used[start : start + block].tolist()])
            for start in range(0, used.size, block)
        )
        kind = f"block of {counted(block, outer.name)}"
        return _cells(ranks, units.reshape(-1) // block, names, kind, topology, len(levels))
    block = _block(ranks.size, most_units)
    places = np.argsort(np.argsort(ranks))
    ordered = np.sort(ranks)
    names = tuple(
        format_ranks(ordered[start : start + block].tolist())
        for start in range(0, ranks.size, block)
    )
    kind = "rank" if block == 1 else f"block of {counted(block, 'rank')}"
    return _cells(ranks, places // block, names, kind, None, 0)


def _cells(
    ranks: NDArray[np.int64],
    cells: NDArray[np.int64],
    names: tuple[str, ...],
    kind: str,
    topology: Topology | None,
    inner: int,
) -> Cells:
    firsts = np.full(len(names), np.iinfo(np.int64).max)
    np.minimum.at(firsts, cells, ranks)
    parents = tuple(
        (level.name, level.of_rank[firsts], level.names)
        for level in (topology.levels[inner:] if topology else ())
    )
    counts = np.bincount(cells, minlength=len(names))
    return Cells(names, cells, counts, firsts, kind, parents)


def _block(count: int, most: int) -> int:
    block = 1
    while -(-count // block) > most:
        block *= 2
    return block


def _from_to(names: list[str]) -> str:
    """Name the first and the last; of the last only its number, where that is all that differs.

    >>> _from_to(["rack7", "rack8"]), _from_to(["a", "b", "c"]), _from_to(["a"])
    ('rack7..8', 'a..c', 'a')
    """
    first, last = names[0], names[-1]
    stem = first.rstrip("0123456789")
    number = last.removeprefix(stem)
    if len(names) == 1:
        return first
    return f"{first}..{number if stem != first and number.isdecimal() else last}"


@attrs.frozen
class Frame:
    """What lies around cells: a host, a domain; the outermost one has no name.

    Args:
        name: What it is called.
        level: The name of its level.
        frames: The frames inside, or none.
        cells: The cells inside, where there are no frames.
    """

    name: str
    level: str
    frames: tuple[Frame, ...] = ()
    cells: tuple[int, ...] = ()


def frames_of(cells: Cells) -> Frame:
    """Nest the cells of a grid in frames, as the levels of the machine are nested.

    A level all of whose units hold one unit of the level inside is left out.
    """
    parents = [
        parent
        for position, parent in enumerate(cells.parents)
        if position == 0 or _differs(cells.parents[position - 1][1], parent[1])
    ]

    def nested(members: NDArray[np.int64], depth: int, name: str, level: str) -> Frame:
        if depth < 0:
            return Frame(name, level, cells=tuple(members.tolist()))
        inner, units, names = parents[depth]
        own = units[members]
        inside = [
            nested(members[own == unit], depth - 1, names[unit], inner)
            for unit in dict.fromkeys(own.tolist())
        ]
        return Frame(name, level, tuple(inside))

    return nested(np.arange(len(cells.names)), len(parents) - 1, "", "")


def _differs(inner: NDArray[np.int64], outer: NDArray[np.int64]) -> bool:
    pairs = distinct(outer * (int(inner.max()) + 1) + inner)
    return bool(distinct(outer).size < pairs.size)


def groups_in(cells: Cells, group: NDArray[np.int64]) -> list[NDArray[np.int64]]:
    """List the groups that each cell touches, ascending.

    Args:
        cells: The cells.
        group: The number of the group of each position.
    """
    groups = int(group.max()) + 1
    pairs = distinct(cells.of_position * groups + group)
    splits = np.searchsorted(pairs, np.arange(1, len(cells.names)) * groups)
    return [part % groups for part in np.split(pairs, splits)]
