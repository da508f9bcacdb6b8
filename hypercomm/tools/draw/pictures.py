"""The content of pictures, as data: boxes, cells, rows of a terminal, and tables."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hypercomm.errors import LayoutError
from hypercomm.layout import RankLayout, RankMapping
from hypercomm.layout.checks import positive
from hypercomm.layout.difference import COLUMNS, LayoutDifference
from hypercomm.layout.text import counted, format_coords, format_ranks, plural
from hypercomm.tools.place import Level, Topology

# Up to so many ranks, an SVG has a panel for each dim; above, for the first.
EACH_DIM = 64

# Up to so many ranks, a picture shows each rank; above, a schematic only.
EACH_RANK = 256

# The most repetitions that a schematic draws one by one.
MOST_DRAWN = 4

# The link between the ranks of a unit; other levels use their own name.
LINKS = {"host": "NVLink", "sub-domain": "NVLink", "domain": "NVLink domain"}

# Dims whose coordinates are stages, with an arrow from each to the next.
PIPELINES = {"pp", "pipe", "pipeline"}

# The fill and the mark of a group that a change keeps, ends or creates.
FATES = {"kept": ("#99DDFF", "="), "gone": ("#EE8866", "-"), "new": ("#BBCC33", "+")}

# From little to much, in one hue.
AMOUNTS = ("#E1EEF9", "#BCD8F0", "#8FBDE3", "#5C9CD0")

# Paul Tol's "light" scheme, for labelled cells (https://personal.sron.nl/~pault/).
FILLS = ("#77AADD", "#EE8866", "#EEDD88", "#FFAABB", "#99DDFF", "#44BB99", "#BBCC33", "#AAAA00")

Dims = tuple[str, ...]
Sizes = list[tuple[str, int]]


class Cell(NamedTuple):
    """A text on a fill, with a smaller text below, a pattern (1 to 3), and a text for hovering."""

    text: str
    fill: str = ""
    below: str = ""
    pattern: int = 0
    tip: str = ""


class Box(NamedTuple):
    """A frame with a title and a bold text, around cells or boxes.

    Args:
        title: The text at the left; without a frame, a line above.
        bold: The text at the right.
        inside: Cells, boxes or other parts.
        columns: How many cells fit into a row.
        sheets: How many further frames lie behind, where what is inside repeats.
        arrows: The text of the arrow from each part inside to the next; None for no arrow.
        framed: Whether there is a frame.
    """

    title: str
    bold: str
    inside: Sequence[Part]
    columns: int = 8
    sheets: int = 0
    arrows: tuple[str | None, ...] = ()
    framed: bool = True


class Row(NamedTuple):
    """The groups over some dims: their name, a line of words, each rank's cell and group."""

    name: str
    words: str
    cells: dict[int, Cell]
    groups: dict[int, str]


class Ranks(NamedTuple):
    """Every rank of a layout on its host; an SVG has a panel for each of the first rows."""

    hosts: dict[str, list[int]]
    rows: list[Row]
    panels: int
    caption: str = ""


# Rows of cells, of which the first has the heads.
Table = list[list[Cell]]

Part = Box | Cell | Ranks | Table


class Picture(NamedTuple):
    """A title, lines below it, and the parts below these."""

    title: str
    lines: list[str]
    parts: Sequence[Part]


# ---- layouts -----------------------------------------------------------------------------------


def long_dims(layout: RankLayout) -> Dims:
    """Return the dims larger than 1; the first one where there is none."""
    return tuple(dim for dim in layout.dim_names if layout.size_of(dim) > 1) or layout.dim_names[:1]


def parts_of(
    layout: RankLayout, topology: Topology | None, lit: Sequence[Dims], each_dim: int = EACH_DIM
) -> list[Part]:
    """Return the parts of one layout; without `lit`, panels of each dim up to `each_dim` ranks."""
    every = list(lit) or [(dim,) for dim in long_dims(layout)]
    parts: list[Part] = []
    if layout.size > (EACH_RANK if lit else EACH_DIM):
        parts += [scheme_of(layout, topology, dims) for dims in lit or every[:1]]
    if layout.size <= EACH_RANK:
        rows = [row_of(layout, topology, dims) for dims in every]
        panels = len(rows) if lit or layout.size <= each_dim else 1
        parts.append(Ranks(hosts_of(layout, topology), rows, panels))
    return parts


def grids_of(
    layouts: Mapping[str, RankLayout],
    topology: Topology | None,
    lit: Sequence[Dims],
    edges: Sequence[tuple[str, str]],
) -> Box:
    """Return the grids of a set next to each other, with an arrow for each of the edges."""
    boxes = []
    for name, layout in layouts.items():
        own = [dims for dims in lit if {*dims} <= {*layout.dim_names}]
        words = f"{layout}, ranks {layout.rank_offset}..{layout.last_rank}"
        boxes.append(Box(words, name, parts_of(layout, topology, own, each_dim=1)))
    near = [*pairwise(layouts)]
    arrows = tuple("" if pair in edges else None for pair in near) if edges else ()
    far = ", ".join(
        f"{here} sends to {there}" for here, there in edges if (here, there) not in near
    )
    return Box(far, "", boxes, len(boxes), arrows=arrows, framed=False)


def row_of(
    layout: RankLayout, topology: Topology | None, dims: Dims, fates: Sequence[str] = ()
) -> Row:
    """Return the groups over some dims; below a rank are the coordinates that its group shares."""
    cells, groups, long = {}, {}, long_dims(layout)
    for index, ranks in enumerate(layout.groups(*dims)):
        pattern, fill = index // len(FILLS) % 4, FILLS[index % len(FILLS)]
        mark, words = "", f"{'+'.join(dims)} group {index}"
        if fates:
            pattern, words = list(FATES).index(fates[index]), f"{words}: {fates[index]}"
            fill, mark = FATES[fates[index]]
        for rank in ranks:
            coords = layout.coords(rank)
            below = ",".join("*" if dim in dims else f"{coords[dim]}" for dim in long)
            below = below if len(below) < 9 and {*long} - {*dims} else f"g{index}"
            places = [level.name_of(rank) for level in (topology.levels if topology else ())]
            tip = "\n".join([f"rank {rank}: {format_coords(coords)}", words, ", ".join(places)])
            cells[rank] = Cell(f"{rank}", fill, below + mark, pattern, tip.strip())
            groups[rank] = f"{index}{mark}"
    return Row("+".join(dims), reach(layout, topology, dims)[0], cells, groups)


def hosts_of(layout: RankLayout, topology: Topology | None) -> dict[str, list[int]]:
    """Return the ranks of each host, with the names of the outer units that hold several hosts."""
    levels = topology.levels if topology else ()
    hosts: dict[str, list[int]] = {}
    for rank in sorted(layout.ranks):
        names = [level.name_of(rank) for level in levels[:1]]
        names += [level.name_of(rank) for level in levels[1:] if 1 < level.units < levels[0].units]
        hosts.setdefault(" · ".join(reversed(names)), []).append(rank)
    return hosts


def reach(layout: RankLayout, topology: Topology | None, dims: Iterable[str]) -> tuple[str, str]:
    """Return how many groups there are and how far each reaches, and what connects its ranks."""
    groups = layout.groups(*dims).to_array()
    words, link = f"{counted(len(groups), 'group')} of {groups.shape[1]:,}", ""
    each = " each" if len(groups) > 1 else ""
    for level in topology.levels if topology else ():
        units = np.sort(level.of_rank[groups], axis=1)
        counts = 1 + np.count_nonzero(np.diff(units, axis=1), axis=1)
        least, most = int(counts.min()), int(counts.max())
        if most == 1:
            return f"{words},{each} inside one {level.name}", LINKS.get(level.name, level.name)
        some = f"{least:,}" if least == most else f"{least:,} to {most:,}"
        words, link = f"{words},{each} on {some} {plural(level.name)}", level.name
    return words, f"across {plural(link)}" if link else ""


def dims_table(layout: RankLayout, topology: Topology | None, lit: Sequence[Dims]) -> Table:
    """Return a table of the dims: sizes, distances, groups and links."""
    rows = [["dim", "size", "ranks apart", "groups", "link"][: 5 if topology else 4]]
    for dims in dict.fromkeys([*((dim,) for dim in layout.dim_names), *lit]):
        steps = np.unique(np.diff(layout.groups(*dims).to_array(), axis=1))
        apart = f"{steps[0]:,}" if steps.size == 1 else "varies" if steps.size else "-"
        words, link = reach(layout, topology, dims)
        row = ["+".join(dims), f"{layout.size_of(*dims):,}", apart, words, link]
        rows.append(row[: len(rows[0])])
    return [[Cell(text) for text in row] for row in rows]


# ---- schematics --------------------------------------------------------------------------------


def scheme_of(layout: RankLayout, topology: Topology | None, lit: Dims, caption: str = "") -> Box:
    """Return a schematic: one block of ranks, what repeats it, and pipeline stages as columns.

    A block is a host where the dims fill hosts evenly, else some ranks that the first dims number.
    """
    ranks = np.array(layout.ranks)
    sizes: list[tuple[Level | None, int]] = [(None, size) for size in range(16, 0, -1)]
    for host in topology.levels[:1] if topology else ():
        size = int(np.count_nonzero(host.of_rank[ranks] == host.of_rank[ranks[0]]))
        sizes = [(host, size)] * _are_alike(host, ranks, size) + sizes
    level, size, split = next(
        (level, size, split) for level, size in sizes if (split := _split(layout, size))
    )
    note = "; the dims do not fill hosts evenly" if topology and not level else ""
    blocks, groups = ranks.reshape(-1, size), layout.groups(*lit)
    factors = _factors(layout, topology, split[1], blocks[:, 0])
    has_stages = any(factor.is_staged for factor in factors)
    columns = min(4 if has_stages else 8, split[0][0][1]) if split[0] else 1

    def cell(rank: int) -> Cell:
        group, coords = groups.index_of(rank), format_coords(layout.coords(rank))
        tip = f"rank {rank}: {coords}\n{'+'.join(lit)} group {group}"
        return Cell(f"{rank}", FILLS[group % len(FILLS)], "", group // len(FILLS) % 4, tip)

    def nested(factors: Sequence[_Factor], first: int) -> Box:
        if not factors:
            held = blocks[first].tolist()
            title = level.name_of(held[0]) if level else _ranks(blocks[first])
            return Box(title, "", [*map(cell, held)], columns)
        *inner, (is_staged, dim, times, words, stride, drawn) = factors
        inside = [nested(inner, first + index * stride) for index in drawn]
        if is_staged:
            stages = blocks.reshape(-1, times, stride * size)
            inside = [
                Box(_ranks(stages[:, index]), f"{dim}={index}", [part])
                for index, part in zip(drawn, inside, strict=True)
            ]
            gaps = (there - here - 1 for here, there in pairwise(drawn))
            arrows = tuple(f"{gap:,} more" if gap else "" for gap in gaps)
            return Box(words, f"{times:,} stages of {dim}", inside, 9, arrows=arrows, framed=False)
        repeats = 2 if len(drawn) < times else 0
        return Box(words, f"x {times:,} {dim}", inside, 1 if has_stages else 8, repeats)

    product = " x ".join(f"{times:,} {dim}" for dim, times in split[0]) or "1"
    product = f"({product} in each {level.name if level else 'box'})"
    product += "".join(f" x {times:,} {dim}" for _, dim, times, *_ in factors)
    title = f"{layout.size:,} ranks = {product}; colours: {'+'.join(lit)} groups{note}"
    return Box(f"{caption}{title}", "", [nested(factors, 0)], framed=False)


class _Factor(NamedTuple):
    """A dim, or a part of one, that repeats blocks.

    Args:
        is_staged: Whether the repetitions are stages of a pipeline.
        dim: Its name.
        times: How many times it repeats.
        words: The ranks from each repetition to the next, and what connects them.
        stride: The blocks from each repetition to the next.
        drawn: The repetitions that a picture shows.
    """

    is_staged: bool
    dim: str
    times: int
    words: str
    stride: int
    drawn: Sequence[int]


def _factors(
    layout: RankLayout, topology: Topology | None, repeats: Sizes, firsts: NDArray[np.int64]
) -> list[_Factor]:
    """Return what repeats the blocks with these first ranks, innermost first, the pipeline last."""
    factors, stride, shown = [], 1, 1
    for dim, times in repeats:
        steps = np.unique(np.diff(firsts.reshape(-1, times, stride), axis=1))
        link = reach(layout, topology, [dim])[1]
        words = [f"ranks +{steps[0]:,}"] * (steps.size == 1) + [link] * bool(link)
        is_staged = dim in PIPELINES and times == layout.size_of(dim)
        shown *= 1 if is_staged else times
        least = (0, 1, times - 1) if is_staged else (0,)
        is_shown = times <= MOST_DRAWN and (is_staged or shown <= MOST_DRAWN)
        drawn = range(times) if is_shown else least
        factors.append(_Factor(is_staged, dim, times, " · ".join(words), stride, drawn))
        stride *= times
    return sorted(factors, key=lambda factor: factor.is_staged)


def _split(layout: RankLayout, size: int) -> tuple[Sizes, Sizes] | None:
    """Split the dims into those inside a block of some ranks and those outside, if that is even."""
    inside, outside, left = [], [], size
    for dim in long_dims(layout):
        times = math.gcd(left, layout.size_of(dim))
        if times not in (left, layout.size_of(dim)):
            return None
        left //= times
        inside += [(dim, times)] * (times > 1)
        outside += [(dim, layout.size_of(dim) // times)] * (layout.size_of(dim) > times)
    return inside, outside


def _are_alike(level: Level, ranks: NDArray[np.int64], size: int) -> bool:
    """Return whether each host holds so many of the ranks, which follow each other."""
    if ranks.size % size or size > EACH_RANK:
        return False
    hosts = level.of_rank[ranks].reshape(-1, size)
    return bool((hosts == hosts[:, :1]).all()) and np.unique(hosts).size == len(hosts)


def _ranks(ranks: NDArray[np.int64]) -> str:
    return f"ranks {format_ranks(np.sort(ranks, axis=None).tolist())}"


# ---- changes -----------------------------------------------------------------------------------


def change_of(found: LayoutDifference, topology: Topology | None, lit: Dims = ()) -> list[Part]:
    """Return both layouts of a change, and a table of what happens to the groups."""
    parts: list[Part] = []
    for here, there, otherwise in (
        (found.before, found.after, "gone"),
        (found.after, found.before, "new"),
    ):
        caption = "before: " if otherwise == "gone" else "after: "
        if not {*lit} <= {*here.dim_names}:
            parts.append(Box(f"no {'+'.join(lit)}", f"{caption}{here}", [Cell("")], framed=False))
            continue
        wanted = [lit] if lit else [(dim,) for dim in long_dims(here)]
        if max(here.size, there.size) > EACH_RANK:
            parts.append(scheme_of(here, topology, wanted[0], caption))
            continue
        rows = []
        for dims in wanted:
            kept = {(rank,) for rank in there.ranks}
            for change in found.changes:
                ours, theirs = (change.before, change.after)[:: 1 if otherwise == "gone" else -1]
                kept |= {*there.groups(*theirs)} if ours == dims and change.kept else set()
            fates = ["kept" if one in kept else otherwise for one in here.groups(*dims)]
            counts = ", ".join(f"{fates.count(one):,} {one}" for one in dict.fromkeys(fates))
            words = f"{counted(len(fates), 'group')} of {here.size_of(*dims):,}: {counts}"
            rows.append(row_of(here, topology, dims, fates)._replace(words=words))
        parts.append(Ranks(hosts_of(here, topology), rows, len(rows), f"{caption}{here}"))
    table = [[Cell(text) for text in COLUMNS]]
    for change in found.changes:
        *texts, result = change.cells
        fill = FATES.get(change.result, ("#EEDD88",))[0]
        table.append([*map(Cell, texts), Cell(result, fill)])
    return [*parts, table]


# ---- mappings ----------------------------------------------------------------------------------


def matrix_of(
    mapping: RankMapping, shape: Sequence[int] | None, itemsize: int | None, most: int
) -> Picture:
    """Return the amounts from each source to each target, in at most so many rows and columns."""
    each = 1 if itemsize is None else positive(itemsize, "itemsize")
    if shape is None and itemsize is not None:
        raise LayoutError(f"itemsize {itemsize} needs the shape of the tensor; give shape=")
    table = mapping.table()
    source, target = table["source"], table["target"]
    amounts = (table["stop"] - table["start"]).prod(axis=1)
    whole, unit = math.prod(table["stop"].max(axis=0).tolist()), "parts"
    if shape is not None:
        mapping.sends(int(source[0]))[0].global_slices(shape)  # checks the shape
        total = math.prod(shape) * each
        if total > np.iinfo(np.int64).max:
            raise LayoutError(f"a tensor of shape {tuple(shape)} is too large to count its parts")
        amounts, unit = amounts * (total // whole), "elements" if itemsize is None else "B"
    ends = [np.sort(mapping.source_ranks), np.sort(mapping.target_ranks)]
    size = -(-max(map(len, ends)) // most)  # ranks of each row and column
    rows, columns = (
        [format_ranks(end[at : at + size].tolist()) for at in range(0, len(end), size)]
        for end in ends
    )
    place = np.searchsorted(ends[0], source) // size, np.searchsorted(ends[1], target) // size
    is_moved = (source != target).astype(np.int64)
    found = np.zeros((2, len(rows), len(columns)), dtype=np.int64)
    np.add.at(found, (is_moved, *place), amounts)
    stays, moves = found.tolist()
    cells = [[Cell("from \\ to"), *map(Cell, columns), Cell("sends")]]
    for name, kept, moved in zip(rows, stays, moves, strict=True):
        line = [
            _amount(f"{name} to {there}", pair, unit, int(found[1].max()))
            for there, *pair in zip(columns, kept, moved, strict=True)
        ]
        cells.append([Cell(name), *line, Cell(amount_words(sum(moved), unit, short=True))])
    in_place, moving = (amount_words(int(one.sum()), unit) for one in found)
    lines = [f"{moving} moved in {counted(int(is_moved.sum()), 'message')}"]
    lines[0] += f", {in_place} kept in place" * bool(found[0].any())
    lines += [f"a part is 1/{whole:,} of the tensor"] * (unit == "parts")
    return Picture(str(mapping), lines, [cells])


def _amount(ends: str, pair: Sequence[int], unit: str, largest: int) -> Cell:
    """Return the cell of what is kept in place and what moves from some ranks to others."""
    kept, moved = pair
    if not kept and not moved:
        return Cell(".")
    text = amount_words(moved or kept, unit, short=True)
    fill = AMOUNTS[min(3, 4 * moved // largest)] if moved else "#DDDDDD"
    tip = f"{ends}: {amount_words(moved, unit)} moved, {amount_words(kept, unit)} kept in place"
    return Cell(text if moved else f"({text})", fill, tip=tip)


def amount_words(amount: int, unit: str, short: bool = False) -> str:
    """Return an amount with its unit, or shortly without it.

    >>> amount_words(1536, "B"), amount_words(1536, "B", short=True), amount_words(1, "parts")
    ('1.5 KiB', '1.5K', '1 part')
    """
    if unit != "B" and not short:
        return counted(amount, unit.removesuffix("s"))
    base, value, power = 1024 if unit == "B" else 1000, float(amount), 0
    while round(value, 1) >= base:
        value, power = value / base, power + 1
    text = f"{value:.0f}" if power == 0 or value >= 99.95 else f"{value:.1f}".removesuffix(".0")
    prefix = ("", "K", "M", "G", "T", "P", "E")[power]
    return f"{text}{prefix}" if short else f"{text} {prefix}{'i' * bool(prefix)}{unit}"
