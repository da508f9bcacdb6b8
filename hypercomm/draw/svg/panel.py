"""Panels: one grid, with the groups over some of its dims as colours."""

from __future__ import annotations

import attrs
import numpy as np
from numpy.typing import NDArray

from hypercomm.draw.palette import FILLS, pattern
from hypercomm.draw.parts.cells import MOST_RANKS, Cells, cells_of, frames_of, groups_in
from hypercomm.draw.parts.groups_lit import GroupsLit
from hypercomm.draw.scenes import Dims
from hypercomm.draw.svg.blocks import Block, escaped, fitted, label, rectangle
from hypercomm.draw.svg.placed import Size, draw_frames, place
from hypercomm.layout import RankLayout
from hypercomm.layout.text import counted, format_coords, format_ranks, plural
from hypercomm.topology import Topology

_RANK, _SMALL_RANK = Size(40, 34, 8), Size(33, 28, 8)
_UNIT = Size(104, 54, 16)
_BAR = 10
"""The height of the groups' colours in a cell of many ranks."""
_STRIPES = 8
"""The most groups whose colours a cell of many ranks shows."""


@attrs.frozen
class Look:
    """How the cell of a rank looks: its class, a mark beside its group's number, words on it."""

    fill: str
    pattern: str = ""
    mark: str = ""
    words: str = ""


class Looks:
    """How groups look: each in a colour of its own."""

    def of(self, group: int) -> Look:
        """Return the look of a group."""
        return Look(f"f{group % len(FILLS)}", pattern(group))

    def words(self, groups: NDArray[np.int64]) -> str:
        """Write the numbers of groups; how many there are, where these are not one by one."""
        first, last = int(groups[0]), int(groups[-1])
        if first == last:
            return f"g{first}"
        run = last - first + 1 == groups.size
        return f"g{first}..g{last}" if run else f"{groups.size:,} groups"


OWN_COLOURS = Looks()


def panel(
    numbering: RankLayout,
    dims: Dims,
    topology: Topology | None,
    width: float,
    looks: Looks = OWN_COLOURS,
    most_ranks: int = MOST_RANKS,
) -> Block:
    """Draw a grid.

    Args:
        numbering: The grid.
        dims: The dims whose groups are lit.
        topology: The machine, where it is known.
        width: The most that it may take.
        looks: How groups look.
        most_ranks: The most ranks that have a cell each.
    """
    cells = cells_of(numbering, topology, most_ranks)
    lit = GroupsLit(numbering, dims)
    if cells.are_ranks:
        size = _RANK if numbering.size <= 256 else _SMALL_RANK
        if topology is None:
            size = attrs.evolve(size, columns=_row(numbering))
    else:
        size = _UNIT
    placed = place(frames_of(cells), size, width)
    draw = _ranks if cells.are_ranks else _units
    inside = draw(cells, lit, placed.cells, size, topology, looks)
    markup = f'{draw_frames(placed)}<g class="cells">{inside}</g>'
    return Block(placed.width, placed.height, markup)


def _row(numbering: RankLayout) -> int:
    """How many ranks a row has where no host says: whole inner dims, up to 16 ranks."""
    columns = 1
    for size in numbering.shape:
        if columns * size > 16:
            return columns if columns >= 4 else 16
        columns *= size
    return max(columns, 1)


def _ranks(
    cells: Cells,
    lit: GroupsLit,
    at: dict[int, tuple[float, float]],
    size: Size,
    topology: Topology | None,
    looks: Looks,
) -> str:
    """A cell for each rank; those of a group are together, so that hovering lights all of them."""
    positions = np.empty_like(cells.of_position)
    positions[cells.of_position] = np.arange(positions.size)
    groups = lit.of_each()[positions].tolist()
    members: dict[int, list[int]] = {}
    for cell, group in enumerate(groups):
        members.setdefault(group, []).append(cell)
    middle, up, down = size.width / 2, size.height / 2 - 2, size.height - 5.5
    parts = []
    for group, inside in sorted(members.items()):
        shown = looks.of(group)
        parts.append('<g class="g">')
        for cell in inside:
            x, y = at[cell]
            rank = int(cells.firsts[cell])
            tip = _tip(lit, rank, group, topology, shown)
            parts.append(f"<g><title>{escaped(tip)}</title>")
            parts.append(_filled(x, y, size.width, size.height, shown))
            look_of_rank = "strong" if len(cells.names[cell]) < 5 else "strong small"
            parts.append(label(x + middle, y + up, cells.names[cell], look_of_rank, "m"))
            number = fitted(f"g{group}{shown.mark}", size.width - 2, 10)
            parts.append(label(x + middle, y + down, number, "small", "m"))
            parts.append("</g>")
        parts.append("</g>")
    return "".join(parts)


def _tip(lit: GroupsLit, rank: int, group: int, topology: Topology | None, look: Look) -> str:
    where = [level.names[int(level.of_rank[rank])] for level in topology.levels] if topology else []
    told = [
        f"rank {rank}: {format_coords(lit.numbering.coords(rank))}",
        f"{lit.name} group {group}{f': {look.words}' if look.words else ''}",
    ]
    return "\n".join([*told, ", ".join(where)] if where else told)


def _filled(x: float, y: float, width: float, height: float, look: Look) -> str:
    """A cell's ground; the pattern over it is faint, so that the texts stay readable."""
    drawn = rectangle(x, y, width, height, look.fill, 3)
    if look.pattern:
        over = drawn.replace(f'class="{look.fill}"', f'fill="url(#hc-{look.pattern})"')
        drawn += over
    return drawn


def _units(
    cells: Cells,
    lit: GroupsLit,
    at: dict[int, tuple[float, float]],
    size: Size,
    _: Topology | None,
    looks: Looks,
) -> str:
    """A cell for each host, domain or block: how many ranks, and the groups that it touches."""
    parts = []
    for cell, groups in enumerate(groups_in(cells, lit.of_each())):
        x, y = at[cell]
        told = format_ranks(groups.tolist())
        first = int(cells.firsts[cell])
        ranks = counted(int(cells.counts[cell]), "rank")
        tip = (
            f"{cells.kind} {cells.names[cell]}: {ranks}, the first is {first}\n"
            f"{lit.name} {plural('group', groups.size)} {told} ({groups.size:,} of {lit.count:,})"
        )
        parts.append(f'<g class="g"><title>{escaped(tip)}</title>')
        parts.append(_filled(x, y, size.width, size.height, Look("mixed")))
        if groups.size <= _STRIPES:
            each, top = size.width / groups.size, y + size.height - _BAR
            parts += [
                _filled(x + index * each, top, each, _BAR, looks.of(group))
                for index, group in enumerate(groups.tolist())
            ]
        middle = x + size.width / 2
        lines = (cells.names[cell], ranks, looks.words(groups))
        for row, line in enumerate(lines):
            shown_line = fitted(line, size.width - 4, 11.5 if row == 0 else 10.5)
            look_of_line = "strong small" if row == 0 else "small"
            parts.append(label(middle, y + 13 + 13 * row, shown_line, look_of_line, "m"))
        parts.append("</g>")
    return "".join(parts)
