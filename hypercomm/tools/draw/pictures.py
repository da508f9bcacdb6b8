"""The content of pictures, as data: boxes, cells, rows of a terminal, and tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hypercomm.layout import RankLayout, RankMapping
from hypercomm.layout.difference import COLUMNS, LayoutDifference
from hypercomm.layout.text import counted, format_coords, format_ranks, plural
from hypercomm.tools.place import Level

# Up to so many ranks, a picture shows each rank; above, a schematic.
EACH_RANK = 64

# The same for a change, and where the caller selects the groups.
EACH_RANK_SELECTED = 256

# The most repetitions that a schematic draws one by one.
MOST_DRAWN = 4

# The link between the ranks of a unit; other levels use their own name.
LINKS = {"host": "NVLink", "sub-domain": "NVLink", "domain": "NVLink domain"}

# Dims whose coordinates are stages, with an arrow from each to the next.
PIPELINES = {"pp", "pipe", "pipeline"}

# The fill and the mark of what a change does to groups.
FATES = {
    "kept": ("#99DDFF", "="),
    "partly": ("#EEDD88", "~"),
    "gone": ("#EE8866", "-"),
    "new": ("#BBCC33", "+"),
}

# From little to much, in one hue.
AMOUNTS = ("#E1EEF9", "#BCD8F0", "#8FBDE3", "#5C9CD0")

# Paul Tol's "light" scheme, for labelled cells (https://personal.sron.nl/~pault/).
FILLS = ("#77AADD", "#EE8866", "#EEDD88", "#FFAABB", "#99DDFF", "#44BB99", "#BBCC33", "#AAAA00")

Dims = tuple[str, ...]
Levels = Sequence[Level]


class Cell(NamedTuple):
    """A text on a fill.

    Args:
        text: The text, such as a rank.
        fill: The colour.
        below: A smaller text below.
        tip: The text for hovering.
        group: The text of a terminal, in the row of the groups.
    """

    text: str
    fill: str = ""
    below: str = ""
    tip: str = ""
    group: str = ""


class Box(NamedTuple):
    """A frame with a title and a bold text, around cells or other parts.

    Args:
        title: The text at the left; without a frame, a line above.
        bold: The text at the right.
        inside: Cells only, or other parts only.
        columns: How many of them fit into a row.
        sheets: How many further frames lie behind, where what is inside repeats.
        arrows: The text of the arrow from each part inside to the next.
        framed: Whether there is a frame.
    """

    title: str
    bold: str
    inside: Sequence[Part]
    columns: int = 8
    sheets: int = 0
    arrows: Sequence[str] = ()
    framed: bool = True


class Row(NamedTuple):
    """The groups over some dims: their name, a line of words, and the cell of each rank."""

    name: str
    words: str
    cells: dict[int, Cell]


class Ranks(NamedTuple):
    """Every rank of a layout on its host: a row of a terminal, or a panel, for each of the rows."""

    hosts: dict[str, list[int]]
    rows: list[Row]
    caption: str = ""


# Rows of cells, of which the first has the heads.
Table = list[list[Cell]]

Part = Cell | Box | Ranks | Table


class Picture(NamedTuple):
    """A title, lines below it, and the parts below these."""

    title: str
    lines: Sequence[str]
    parts: Sequence[Part]


# ---- layouts -----------------------------------------------------------------------------------


def layout_picture(layout: RankLayout, levels: Levels, lit: Sequence[Dims]) -> Picture:
    """Return the picture of one layout; `lit` are the groups that have colours, if selected."""
    every = lit or _each_dim(layout)
    parts: list[Part] = []
    if layout.size <= (EACH_RANK_SELECTED if lit else EACH_RANK):
        rows = [_row_of(layout, levels, dims) for dims in every]
        parts.append(Ranks(_hosts_of(layout, levels), rows))
    else:
        parts += [_schematic_of(layout, levels, dims) for dims in lit or every[:1]]
        parts.append(_dims_table(layout, levels, lit))
    return Picture(str(layout), [_size_of([layout], levels)], parts)


def set_picture(layouts: Mapping[str, RankLayout], levels: Levels, lit: Sequence[Dims]) -> Picture:
    """Return the picture of a set of grids, next to each other."""
    boxes = []
    for name, layout in layouts.items():
        parts = layout_picture(layout, levels, _within(layout, lit)).parts
        boxes.append(Box(f"{layout}, {_ranks(layout.ranks)}", name, parts, columns=1))
    lines = [_size_of(layouts.values(), levels)]
    return Picture(" + ".join(layouts), lines, [Box("", "", boxes, framed=False)])


def _each_dim(layout: RankLayout) -> list[Dims]:
    """Return the dims larger than 1; the first one where there is none."""
    names = [dim for dim in layout.dim_names if layout.size_of(dim) > 1]
    return [(dim,) for dim in names or layout.dim_names[:1]]


def _within(layout: RankLayout, lit: Sequence[Dims]) -> list[Dims]:
    """Return the selected dims that a layout has."""
    return [dims for dims in lit if {*dims} <= {*layout.dim_names}]


def _size_of(layouts: Iterable[RankLayout], levels: Levels) -> str:
    ranks = np.unique(np.concatenate([np.array(layout.ranks) for layout in layouts]))
    units = [counted(np.unique(level.of_rank[ranks]).size, level.name) for level in levels]
    where = f" on {', '.join(units)}" if units else ""
    return f"{counted(ranks.size, 'rank')}{where}; the first dim varies fastest"


def _row_of(layout: RankLayout, levels: Levels, dims: Dims, fates: Sequence[str] = ()) -> Row:
    """Return the groups over some dims; below a rank are the coordinates that its group shares."""
    cells, name, long = {}, "+".join(dims), _each_dim(layout)
    for index, ranks in enumerate(layout.groups(*dims)):
        fill, mark, fate = FILLS[index % len(FILLS)], "", ""
        if fates:
            fill, mark = FATES[fates[index]]
            fate = f": {fates[index]}"
        for rank in ranks:
            coords = layout.coords(rank)
            below = ",".join("*" if dim in dims else f"{coords[dim]}" for (dim,) in long)
            if len(below) > 8 or all(dim in dims for (dim,) in long):
                below = f"g{index}"
            places = ", ".join(level.name_of(rank) for level in levels)
            tip = f"rank {rank}: {format_coords(coords)}\n{name} group {index}{fate}\n{places}"
            cells[rank] = Cell(f"{rank}", fill, below + mark, tip.strip(), f"{index}{mark}")
    counts = ", ".join(f"{fates.count(one):,} {one}" for one in dict.fromkeys(fates))
    words, _ = _reach(layout, levels, dims)
    return Row(name, f"{words}: {counts}" if counts else words, cells)


def _hosts_of(layout: RankLayout, levels: Levels) -> dict[str, list[int]]:
    """Return the ranks of each host, with the names of the outer units that hold several hosts."""
    outer = [level for level in levels[1:] if 1 < level.units < levels[0].units]
    hosts: dict[str, list[int]] = {}
    for rank in sorted(layout.ranks):
        names = [level.name_of(rank) for level in (*reversed(outer), *levels[:1])]
        hosts.setdefault(", ".join(names), []).append(rank)
    return hosts


def _reach(layout: RankLayout, levels: Levels, dims: Iterable[str]) -> tuple[str, str]:
    """Return how many groups there are and how far each reaches, and what connects its ranks."""
    groups = layout.groups(*dims).to_array()
    words, link = f"{counted(len(groups), 'group')} of {groups.shape[1]:,}", ""
    each = " each" if len(groups) > 1 else ""
    for level in levels:
        units = np.sort(level.of_rank[groups], axis=1)
        counts = 1 + np.count_nonzero(np.diff(units, axis=1), axis=1)
        least, most = int(counts.min()), int(counts.max())
        if most == 1:
            return f"{words},{each} inside one {level.name}", LINKS.get(level.name, level.name)
        some = f"{least:,}" if least == most else f"{least:,} to {most:,}"
        link = f"across {plural(level.name)}"
        words += f",{each} on {some} {plural(level.name)}"
    return words, link


def _dims_table(layout: RankLayout, levels: Levels, lit: Sequence[Dims]) -> Table:
    """Return a table of the dims: sizes, distances, groups and links."""
    rows = [["dim", "size", "ranks apart", "groups", "link"]]
    for dims in dict.fromkeys([*((dim,) for dim in layout.dim_names), *lit]):
        steps = np.diff(layout.groups(*dims).to_array(), axis=1)
        size = f"{layout.size_of(*dims):,}"
        rows.append(["+".join(dims), size, _one_of(steps) or "-", *_reach(layout, levels, dims)])
    columns = 5 if levels else 4  # links are known on a machine
    return [[Cell(text) for text in row[:columns]] for row in rows]


def _one_of(steps: NDArray[np.int64]) -> str:
    """Return the one number that all of these are, or nothing."""
    return f"{steps.flat[0]:,}" if np.unique(steps).size == 1 else ""


# ---- schematics --------------------------------------------------------------------------------


class _Factor(NamedTuple):
    """A dim, or a part of one, that repeats blocks.

    Args:
        dim: Its name.
        times: How many times it repeats.
        words: The ranks from each repetition to the next, and what connects them.
        stride: The blocks from each repetition to the next.
        drawn: The repetitions that a picture shows.
        is_staged: Whether the repetitions are stages of a pipeline.
    """

    dim: str
    times: int
    words: str
    stride: int
    drawn: Sequence[int]
    is_staged: bool


def _schematic_of(layout: RankLayout, levels: Levels, lit: Dims, caption: str = "") -> Box:
    """Return a schematic: one block of ranks, what repeats it, and pipeline stages as columns.

    A block is a host where the dims fill hosts evenly, else some ranks that the first dims number.
    """
    host, blocks = _blocks_of(layout, levels)
    size = blocks.shape[1]
    inner, outer = _split(layout, size) or ({}, {})
    factors = _factors(layout, levels, outer, blocks[:, 0])
    has_stages = any(factor.is_staged for factor in factors)
    groups = layout.groups(*lit)
    name = "+".join(lit)

    def cell(rank: int) -> Cell:
        group = groups.index_of(rank)
        tip = f"rank {rank}: {format_coords(layout.coords(rank))}\n{name} group {group}"
        return Cell(f"{rank}", FILLS[group % len(FILLS)], tip=tip)

    def nested(factors: Sequence[_Factor], first: int) -> Box:
        if not factors:
            held = blocks[first].tolist()
            title = host.name_of(held[0]) if host else _ranks(blocks[first])
            columns = min(4 if has_stages else 8, next(iter(inner.values()), 1))
            return Box(title, "", [cell(rank) for rank in held], columns)
        *others, last = factors
        inside = [nested(others, first + index * last.stride) for index in last.drawn]
        if not last.is_staged:
            sheets = 2 if len(last.drawn) < last.times else 0
            columns = 1 if has_stages else 8
            return Box(last.words, f"x {last.times:,} {last.dim}", inside, columns, sheets)
        stages = blocks.reshape(-1, last.times, last.stride * size)
        columns_of_stages = [
            Box(_ranks(stages[:, index]), f"{last.dim}={index}", [part])
            for index, part in zip(last.drawn, inside, strict=True)
        ]
        left_out = [there - here - 1 for here, there in pairwise(last.drawn)]
        arrows = [f"{count:,} more" if count else "" for count in left_out]
        title = f"{last.times:,} stages of {last.dim}"
        return Box(last.words, title, columns_of_stages, arrows=arrows, framed=False)

    product = " x ".join(f"{times:,} {dim}" for dim, times in inner.items()) or "1"
    repeats = "".join(f" x {factor.times:,} {factor.dim}" for factor in factors)
    note = "; the dims do not fill hosts evenly" if levels and not host else ""
    title = (
        f"{caption}{layout.size:,} ranks = ({product} in each {host.name if host else 'box'})"
        f"{repeats}; colours: {name} groups{note}"
    )
    return Box(title, "", [nested(factors, 0)], framed=False)


def _blocks_of(layout: RankLayout, levels: Levels) -> tuple[Level | None, NDArray[np.int64]]:
    """Return the level of hosts, if the dims fill them evenly, and the ranks of each block."""
    ranks = np.array(layout.ranks)
    for host in levels[:1]:
        units = host.of_rank[ranks]
        size = int(np.count_nonzero(units == units[0]))
        if size <= EACH_RANK_SELECTED and ranks.size % size == 0 and _split(layout, size):
            rows = units.reshape(-1, size)
            if (rows == rows[:, :1]).all() and np.unique(units).size == len(rows):
                return host, ranks.reshape(rows.shape)
    size = next(size for size in range(16, 0, -1) if _split(layout, size))
    return None, ranks.reshape(-1, size)


def _split(layout: RankLayout, size: int) -> tuple[dict[str, int], dict[str, int]] | None:
    """Split the dims into those inside a block of some ranks and those outside, if that is even."""
    inside, outside, left = {}, {}, size
    for (dim,) in _each_dim(layout):
        inside[dim] = math.gcd(left, layout.size_of(dim))
        outside[dim] = layout.size_of(dim) // inside[dim]
        if inside[dim] != left and outside[dim] > 1:
            return None
        left //= inside[dim]
    inner = {dim: times for dim, times in inside.items() if times > 1}
    return inner, {dim: times for dim, times in outside.items() if times > 1}


def _factors(
    layout: RankLayout, levels: Levels, repeats: Mapping[str, int], firsts: NDArray[np.int64]
) -> list[_Factor]:
    """Return what repeats the blocks with these first ranks, innermost first, the pipeline last."""
    factors, stride, blocks = [], 1, 1
    for dim, times in repeats.items():
        apart = _one_of(np.diff(firsts.reshape(-1, times, stride), axis=1))
        words = [f"ranks +{apart}" if apart else "", _reach(layout, levels, [dim])[1]]
        is_staged = dim in PIPELINES and times == layout.size_of(dim)
        if is_staged:
            drawn: Sequence[int] = range(times) if times <= MOST_DRAWN else (0, 1, times - 1)
        else:
            blocks *= times
            drawn = range(times if blocks <= MOST_DRAWN else 1)
        text = ", ".join(filter(None, words))
        factors.append(_Factor(dim, times, text, stride, drawn, is_staged))
        stride *= times
    return sorted(factors, key=lambda factor: factor.is_staged)


def _ranks(ranks: Sequence[int] | NDArray[np.int64]) -> str:
    ranges = format_ranks(np.sort(ranks, axis=None).tolist()).split(", ")
    return f"ranks {', '.join([*ranges[:2], '...'] if len(ranges) > 2 else ranges)}"


# ---- changes and mappings ----------------------------------------------------------------------


def change_picture(found: LayoutDifference, levels: Levels, lit: Sequence[Dims]) -> Picture:
    """Return both layouts of a change, and a table of what happens to the groups."""
    parts: list[Part] = []
    for side, other, otherwise in (("before", "after", "gone"), ("after", "before", "new")):
        here, there = getattr(found, side), getattr(found, other)
        own = _within(here, lit) or _each_dim(here)
        if max(here.size, there.size) > EACH_RANK_SELECTED:
            parts.append(_schematic_of(here, levels, own[0], f"{side}: "))
            continue
        theirs = [getattr(change, other) for change in found.changes if change.kept]
        kept = {(rank,) for rank in there.ranks}.union(*(there.groups(*dims) for dims in theirs))
        rows = []
        for dims in own:
            fates = ["kept" if ranks in kept else otherwise for ranks in here.groups(*dims)]
            rows.append(_row_of(here, levels, dims, fates))
        parts.append(Ranks(_hosts_of(here, levels), rows, f"{side}: {here}"))
    table = [[Cell(text) for text in COLUMNS]]
    for change in found.changes:
        *texts, result = change.cells
        table.append([*map(Cell, texts), Cell(result, FATES[change.result][0])])
    title, _, summary = found.summary.partition(": ")
    return Picture(title, [summary], [*parts, table])


def mapping_picture(mapping: RankMapping, most: int) -> Picture:
    """Return what each source sends to each target, in at most so many rows and columns."""
    table = mapping.table()
    amounts = (table["stop"] - table["start"]).prod(axis=1)
    is_moved = table["source"] != table["target"]
    sources, targets = np.sort(mapping.source_ranks), np.sort(mapping.target_ranks)
    size = -(-max(len(sources), len(targets)) // most)  # ranks of each row and column
    rows, columns = (
        [format_ranks(ranks[at : at + size].tolist()) for at in range(0, len(ranks), size)]
        for ranks in (sources, targets)
    )
    row = np.searchsorted(sources, table["source"]) // size
    column = np.searchsorted(targets, table["target"]) // size
    moved = np.zeros((len(rows), len(columns)), dtype=np.int64)
    np.add.at(moved, (row, column), amounts * is_moved)
    cells = [[Cell("from \\ to"), *map(Cell, columns), Cell("sends")]]
    for source, sent in zip(rows, moved.tolist(), strict=True):
        line = [Cell(source)]
        for target, amount in zip(columns, sent, strict=True):
            fill = AMOUNTS[min(3, 4 * amount // moved.max())] if amount else ""
            tip = f"{source} to {target}: {counted(amount, 'part')}"
            line.append(Cell(f"{amount:,}" if amount else ".", fill, tip=tip))
        cells.append([*line, Cell(f"{sum(sent):,}")])
    whole = table["stop"].max(axis=0).prod()
    messages = counted(is_moved.sum(), "message")
    kept = counted(amounts[~is_moved].sum(), "part")
    summary = f"{counted(moved.sum(), 'part')} moved in {messages}, {kept} kept in place"
    lines = [summary, f"a part is 1/{whole:,} of the tensor"]
    return Picture(str(mapping), lines, [cells])
