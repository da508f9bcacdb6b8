"""Scenes as text: rows of numbers for a terminal of any width, with colours where it has them."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Sequence

import attrs
import numpy as np

from hypercomm.draw.palette import AMOUNTS, FILLS, MARKS, MIXED, RESULTS, shade
from hypercomm.draw.parts.amounts import amount_words, amounts_of, summary
from hypercomm.draw.parts.cells import Cells, cells_of, groups_in
from hypercomm.draw.parts.fates import Fate, fates
from hypercomm.draw.parts.groups_lit import GroupsLit, dims_in, long_dims
from hypercomm.draw.parts.words import about
from hypercomm.draw.scenes import ChangeScene, Dims, GridScene, MatrixScene, Scene
from hypercomm.layout import RankLayout
from hypercomm.layout.text import aligned, counted
from hypercomm.topology import Topology

MOST_RANKS = 256
"""More ranks than this are shown by host, and then by blocks."""

MOST_LINES = 32
"""Hosts or blocks that are shown."""

_MOST_SIDE = 16
"""Rows and columns of a matrix."""

NARROWEST = 24
"""Columns below which nothing is cut any more."""


@attrs.frozen
class Piece:
    """Some text, and the colour behind it, as "#RRGGBB"; "" for none."""

    text: str
    fill: str = ""


Line = list[Piece]


def lines_of(scene: Scene, width: int, boxes: bool) -> list[Line]:
    """Draw a scene in lines of a width.

    Args:
        scene: The scene.
        width: Columns of the terminal.
        boxes: Whether it shows characters that draw boxes; else there is ASCII only.
    """
    width = max(width, NARROWEST)
    bar = "│" if boxes else "|"
    if isinstance(scene, GridScene):
        lines = _grids(scene, width, bar)
    elif isinstance(scene, ChangeScene):
        lines = _change(scene, width, bar)
    else:
        lines = _matrix(scene, width, bar)
    return lines


def as_text(lines: Sequence[Line], colour: bool) -> str:
    """Write lines, with colours as terminals of 24 bits take them, or without."""
    return "\n".join("".join(_written(piece, colour) for piece in line).rstrip() for line in lines)


def _written(piece: Piece, colour: bool) -> str:
    if not colour or not piece.fill:
        return piece.text
    red, green, blue = (int(piece.fill[at : at + 2], 16) for at in (1, 3, 5))
    ink = "97" if red + green + blue < 380 else "30"
    return f"\x1b[{ink};48;2;{red};{green};{blue}m{piece.text}\x1b[0m"


def width_of_terminal() -> int:
    """Return how many columns there are; 80 where nobody knows."""
    return shutil.get_terminal_size().columns


def has_colour() -> bool:
    """Tell whether stdout shows colours: a terminal, none that is dumb, and no NO_COLOR.

    Source: https://no-color.org.
    """
    wanted = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return wanted and sys.stdout is not None and sys.stdout.isatty()


def has_boxes() -> bool:
    """Tell whether what is written to stdout may hold more than ASCII."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        "│…".encode(encoding)
    except (UnicodeEncodeError, LookupError):
        return False
    return True


# ---- words -------------------------------------------------------------------------------------


def plain(text: str) -> str:
    """Write a text such that it cannot move the cursor: what does not print becomes "?".

    >>> plain("tp" + chr(27) + "[2J")
    'tp?[2J'
    """
    return "".join(letter if letter.isprintable() else "?" for letter in text)


def wrapped(text: str, width: int) -> list[Line]:
    """Break a text at blanks, and within words that are wider than a line.

    >>> [line[0].text for line in wrapped("tp: 4 groups of 2, each inside one host", 16)]
    ['tp: 4 groups of', '2, each inside', 'one host']
    """
    lines = [""]
    for word in plain(text).split(" "):
        rest = word
        if lines[-1] and len(lines[-1]) + 1 + len(rest) <= width:
            lines[-1] += f" {rest}"
            continue
        if lines[-1]:
            lines.append("")
        while len(rest) > width:
            lines[-1], rest = rest[:width], rest[width:]
            lines.append("")
        lines[-1] = rest
    return [[Piece(line)] for line in lines]


def cut(text: str, width: int) -> str:
    """Cut a text at its end.

    >>> cut("expert", 4), cut("tp", 4)
    ('ex..', 'tp')
    """
    text = plain(text)
    return text if len(text) <= width else f"{text[: max(0, width - 2)]}.."[:width]


def tail(text: str, width: int) -> str:
    """Cut a text at its beginning: names of hosts differ at their ends.

    >>> tail("gpu-node-0017", 8), tail("gpu1", 8)
    ('..e-0017', 'gpu1')
    """
    text = plain(text)
    return text if len(text) <= width else f"..{text[2 - width :]}" if width > 2 else text[-width:]


# ---- grids -------------------------------------------------------------------------------------


def _grids(scene: GridScene, width: int, bar: str) -> list[Line]:
    lines = wrapped(scene.title, width)
    for line in about(scene, MOST_RANKS, MOST_LINES, "line"):
        lines += wrapped(line, width)
    several = len(scene.grids) > 1
    wanted = scene.panels
    for name, numbering in scene.grids:
        lines.append([])
        if several:
            sent = [there for here, there in scene.edges if here == name]
            to = f", sends to {', '.join(sent)}" if sent else ""
            lines += wrapped(f"{name}: {numbering}{to}", width)
        shown = list(dict.fromkeys(dims_in(numbering, dims) for dims in wanted))
        lits = [GroupsLit(numbering, dims) for dims in shown or every_dim(numbering)]
        if numbering.size <= MOST_RANKS:
            rows: list[_Row] = [(lit.name, lit.of_each().tolist(), None) for lit in lits]
            lines += _rows(numbering, rows, scene.topology, width, bar)
        else:
            cells = cells_of(numbering, scene.topology, MOST_RANKS, MOST_LINES)
            lines += _table(cells, lits, width)
        if not several:
            lines.append([])
            lines += [line for lit in lits for line in _words(lit, scene.topology, width)]
    return lines


def every_dim(numbering: RankLayout) -> list[Dims]:
    """Return each dim larger than 1 by itself."""
    return [(dim,) for dim in long_dims(numbering)]


def _words(lit: GroupsLit, topology: Topology | None, width: int) -> list[Line]:
    return wrapped(f"{lit.name}: {lit.words(topology)}", width)


_Row = tuple[str, list[int], Fate | None]
_Host = tuple[str, list[int]]


def _rows(
    numbering: RankLayout, rows: Sequence[_Row], topology: Topology | None, width: int, bar: str
) -> list[Line]:
    """A column for each rank, a row for each dims: its group's number, hosts beside each other."""
    ranks = [int(rank) for rank in numbering.ranks]
    positions = sorted(range(len(ranks)), key=ranks.__getitem__)
    marked = any(fate for _, _, fate in rows)
    numbers = [max(ranks), *(max(groups) for _, groups, _ in rows)]
    wide = max(len(f"{number}") for number in numbers) + 1 + marked
    names = [cut(name, max(4, width // 4)) for name, _, _ in rows]
    left = max(map(len, ["rank", *names]))
    room = max(1, (width - left - 3) // wide)
    hosts = _hosts(ranks, positions, topology, room)
    lines: list[Line] = []
    for band in _bands(hosts, wide, width - left - 1):
        if lines:
            lines.append([])
        if topology is not None:
            hosts_of, outer = [name for name, _ in band], _outer(band, ranks, topology)
            for names_of in [outer, hosts_of] if any(outer) else [hosts_of]:
                heads = [
                    tail(name, len(inside) * wide + 2).ljust(len(inside) * wide + 3)
                    for name, (_, inside) in zip(names_of, band, strict=True)
                ]
                lines.append([Piece(" " * (left + 3) + "".join(heads))])
        lines.append([Piece("rank".ljust(left))])
        for _, inside in band:
            texts = (f"{ranks[at]:>{wide - marked}}{' ' * marked}" for at in inside)
            lines[-1].append(Piece(f" {bar} " + "".join(texts)))
        for name, (_, groups, fate) in zip(names, rows, strict=True):
            line = [Piece(name.ljust(left))]
            for _, inside in band:
                line.append(Piece(f" {bar} "))
                line += [_group(groups[at], fate, wide) for at in inside]
            lines.append(line)
    return lines


def _outer(band: list[_Host], ranks: list[int], topology: Topology) -> list[str]:
    """The unit of the level around the hosts, above the first host of each; "" elsewhere."""
    if len(topology.levels) < 2:
        return [""] * len(band)
    level = topology.levels[1]
    names = [plain(level.names[int(level.of_rank[ranks[inside[0]]])]) for _, inside in band]
    return [
        name if name != before else ""
        for name, before in zip(names, ["", *names[:-1]], strict=True)
    ]


def _group(group: int, fate: Fate | None, wide: int) -> Piece:
    if fate is None:
        return Piece(f"{group:>{wide}}", FILLS[group % len(FILLS)])
    result = fate.of(group)
    return Piece(f"{group:>{wide - 1}}{MARKS[result]}", RESULTS[result])


def _hosts(
    ranks: list[int], positions: list[int], topology: Topology | None, room: int
) -> list[_Host]:
    """The positions on each host, in pieces that fit; all ranks, where no host is known."""
    hosts: dict[str, list[int]] = {}
    for position in positions:
        name = ""
        if topology is not None:
            name = plain(topology.levels[0].names[int(topology.levels[0].of_rank[ranks[position]])])
        hosts.setdefault(name, []).append(position)
    if room >= 8:
        room = 1 << (room.bit_length() - 1)  # rows that are easy to count
    return [
        (name, inside[start : start + room])
        for name, inside in hosts.items()
        for start in range(0, len(inside), room)
    ]


def _bands(hosts: list[_Host], wide: int, width: int) -> list[list[_Host]]:
    bands: list[list[_Host]] = []
    left = 0
    for host in hosts:
        needed = len(host[1]) * wide + 3
        if not bands or needed > left:
            bands.append([])
            left = width + 1
        bands[-1].append(host)
        left -= needed
    return bands


def _table(cells: Cells, lits: Sequence[GroupsLit], width: int) -> list[Line]:
    """A line for each host or block: its ranks, and the groups of each dims that it touches."""
    columns = [[lit.name, *map(_touched, groups_in(cells, lit.of_each()))] for lit in lits]
    names = [cells.kind.split()[-1], *cells.names]
    counts = ["ranks", *(f"{count:,}" for count in cells.counts.tolist())]
    return _aligned([names, counts, *columns], width)


def _touched(groups: np.ndarray) -> str:
    first, last = int(groups[0]), int(groups[-1])
    if first == last:
        return f"{first}"
    run = last - first + 1 == groups.size
    return f"{first}..{last}" if run else counted(int(groups.size), "group")


def _aligned(columns: Sequence[Sequence[str]], width: int) -> list[Line]:
    """Write columns beside each other; those that do not fit are left out, and named."""
    widths = [min(max(map(len, column)), max(8, width // 2)) for column in columns]
    kept, used = 0, -2
    while kept < len(columns) and (used + 2 + widths[kept] <= width or kept < 2):
        used += 2 + widths[kept]
        kept += 1
    texts = [
        [cut(text, widths[index]) for text in column] for index, column in enumerate(columns[:kept])
    ]
    lines = [[Piece(line)] for line in aligned(list(zip(*texts, strict=True)))]
    missing = [column[0] for column in columns[kept:]]
    if missing:
        lines += wrapped(f"no room for {', '.join(missing)}", width)
    return lines


# ---- changes -----------------------------------------------------------------------------------


def _change(scene: ChangeScene, width: int, bar: str) -> list[Line]:
    lines = wrapped(scene.title, width)
    lines += wrapped(scene.summary, width) if scene.summary else []
    found = fates(scene)
    sides = {
        "before": (scene.before, [(name, fate) for name, fate, _ in found]),
        "after": (scene.after, [(name, fate) for name, _, fate in found]),
    }
    for when, (numbering, every) in sides.items():
        lines.append([])
        lines += wrapped(f"{when}: {numbering}", width)
        held = [(name, fate) for name, fate in every if fate is not None]
        if numbering.size <= MOST_RANKS:
            rows: list[_Row] = [(name, fate.lit.of_each().tolist(), fate) for name, fate in held]
            lines += _rows(numbering, rows, scene.topology, width, bar)
        for name, fate in held:
            lines += wrapped(f"{name}: {fate.words()}", width)
        if not held:
            missing = ", ".join(name for name, _ in every)
            lines += wrapped(f"{missing}: no such dim", width) if missing else []
    told = ", ".join(f"{mark} {result}" for result, mark in MARKS.items())
    lines += [[], *wrapped(told, width), []]
    rows_of_changes = [("before", "after", "groups x size", "result")]
    for change in scene.changes[:MOST_LINES]:
        before, after = "+".join(change.before) or "-", "+".join(change.after) or "-"
        rows_of_changes.append((before, after, change.counts, change.result))
    if scene.changes:
        lines += _aligned(list(zip(*rows_of_changes, strict=True)), width)
    if len(scene.changes) > MOST_LINES:
        lines += wrapped(f"and {len(scene.changes) - MOST_LINES:,} more", width)
    return lines


# ---- mappings ----------------------------------------------------------------------------------


def _matrix(scene: MatrixScene, width: int, bar: str) -> list[Line]:
    lines = wrapped(scene.title, width)
    for words in (*scene.notes, *summary(scene)):
        lines += wrapped(words, width)
    most = _MOST_SIDE
    found = amounts_of(scene, most)
    while most > 1 and _wide(found.columns, found.rows) > width:
        most //= 2
        found = amounts_of(scene, most)
    rows, columns = (tuple(map(plain, names)) for names in (found.rows, found.columns))
    left = max(len("from"), *map(len, rows))
    each = max(5, *map(len, columns)) + 1
    heads = "".join(name.rjust(each) for name in columns)
    lines += [[], *wrapped(f"to {found.kind}", width)]
    lines.append([Piece(f"{'from'.ljust(left)} {bar}{heads}")])
    largest = int((found.amounts - found.stays).max(initial=0))
    for row, name in enumerate(rows):
        line = [Piece(f"{name.ljust(left)} {bar}")]
        for amount, stays in zip(
            found.amounts[row].tolist(), found.stays[row].tolist(), strict=True
        ):
            moves = amount - stays
            text = amount_words(moves or stays, scene.unit, short=True) if amount else "."
            text = f"({text})" if stays and not moves else text
            fill = AMOUNTS[shade(moves, largest)] if moves else MIXED if stays else ""
            line += [Piece(" " * (each - len(text))), Piece(text, fill)]
        lines.append(line)
    if ((found.stays > 0) & (found.stays == found.amounts)).any():
        lines += wrapped("(in brackets: stays on its rank)", width)
    return lines


def _wide(columns: Sequence[str], rows: Sequence[str]) -> int:
    each = max(5, *map(len, columns)) + 1
    return max(4, *map(len, rows)) + 2 + each * len(columns)
