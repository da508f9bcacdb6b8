"""Pictures as boxes and tables of cells, which `svg` and `terminal` render."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import attrs
import numpy as np
from numpy.typing import NDArray

from hypercomm.layout import RankLayout
from hypercomm.layout.difference import COLUMNS, LayoutDifference
from hypercomm.layout.text import format_coords, format_ranks, plural, pluralize
from hypercomm.layout.views import Views
from hypercomm.tools.place import Level
from hypercomm.tools.place.placing import units_of_groups
from hypercomm.tools.place.traffic import kind_of
from hypercomm.transfers.mapping import RankMapping

# The most ranks of a picture that shows each rank. Larger pictures are schematics.
MOST_RANKS = 64

# The largest number of repetitions, and of pipeline stages, that a schematic draws individually.
MOST_DRAWN = 4
MOST_STAGES = 3

# The largest number of ranks in one table. Each rank is a column.
IN_ROW = 8

# The most ranks of a picture that has a row of coordinates. It needs wide columns.
MOST_WITH_COORDS = 16

# The most rows and columns of a mapping's matrix. In larger mappings, ranks share a row or column.
MOST_ROWS = 16

# A schematic may split a dim into a part within a host and a part across hosts. The name of the
# part across hosts has this suffix.
OUTER = "/outer"

# The link between ranks of the same host or NVLink domain. For any other level, the link has the
# name of the level.
LINKS = {"host": "NVLink", "domain": "NVLink domain"}

# The fill of a group and the mark in its label show the effect of a change on the group.
FATES = {"kept": "#99DDFF", "partly": "#EEDD88", "gone": "#EE8866", "new": "#BBCC33"}
MARKS = {"kept": "=", "gone": "-", "new": "+"}

# The fill of amounts, from small to large.
AMOUNTS = ("#E1EEF9", "#BCD8F0", "#8FBDE3", "#5C9CD0")

# Paul Tol's "light" scheme, for labelled cells (https://personal.sron.nl/~pault/).
FILLS = ("#77AADD", "#EE8866", "#EEDD88", "#FFAABB", "#99DDFF", "#44BB99", "#BBCC33", "#AAAA00")

Dims = tuple[str, ...]
Groups = Collection[tuple[int, ...]]


class Cell(NamedTuple):
    """A text with a fill, and a tip that hovering shows."""

    text: str
    fill: str = ""
    tip: str = ""


class Table(NamedTuple):
    """Rows of cells. The first row has the titles, and the first column the names of the rows.

    Args:
        rows: The cells.
        is_text: Whether columns are texts, which are aligned on the left. Numbers are centred.
    """

    rows: list[list[Cell]]
    is_text: bool = False


class Box(NamedTuple):
    """A heading above cells or other parts.

    Args:
        bold: The start of the heading, in bold.
        words: The rest of the heading.
        inside: The cells or the other parts. A box does not mix cells with other parts.
        columns: The number of parts in a row. Default: as many as fit.
        framed: Whether the box has a frame.
        is_repeated: Whether the box represents several equal boxes.
    """

    bold: str
    words: str
    inside: Sequence[Part]
    columns: int = 0
    framed: bool = False
    is_repeated: bool = False


# A str is the text of an arrow between the part before it and the part after it.
Part = Cell | Box | Table | str


# ---- layouts -----------------------------------------------------------------------------------


@attrs.frozen(slots=False)
class Scene:
    """A layout on a machine, for drawing.

    Args:
        layout: The layout.
        levels: The levels of the machine, if it is shown.
        views: The views of the layout, whose groups can have colours.
    """

    layout: RankLayout
    levels: Sequence[Level]
    views: Views

    def picture(self, lit: Sequence[Dims]) -> Box:
        """Return the picture: all ranks or a schematic, and a table of the dims.

        Args:
            lit: The dims whose groups have colours, if the caller selected some.
        """
        units = []
        for level in self.levels:
            used = np.bincount(self._units(level)) > 0
            units.append(pluralize(int(used.sum()), level.name))
        where = f" on {', '.join(units)}" if units else ""
        every = lit or self.dims_above_one
        reaches = {
            dims: self._reach(dims) for dims in dict.fromkeys([*self.dims_above_one, *every])
        }
        if self.layout.size <= MOST_RANKS:
            parts = self.ranks(every)
            legend = "in a row, one number is one group"
        else:
            links = {dims: link for dims, (_, link) in reaches.items()}
            parts = [self._schematic(every[0], links)]
            legend = f"a cell has a rank and, after the colon, its {_name_of(every[0])}"
        table = [[Cell("dim"), Cell("groups"), Cell("link")]]
        table += [[Cell("+".join(dims)), *map(Cell, reach)] for dims, reach in reaches.items()]
        columns = 3 if self.levels else 2  # without a machine, links are unknown
        about = Table([row[:columns] for row in table], is_text=True)
        line = f"{pluralize(self.layout.size, 'rank')}{where}; {legend}"
        return Box(str(self.layout), line, [*parts, about])

    @cached_property
    def dims_above_one(self) -> list[Dims]:
        """The dims larger than 1, or the first dim if all have size 1."""
        names = [dim for dim, size in self.layout.sizes.items() if size > 1]
        return [(dim,) for dim in names or self.layout.dim_names[:1]]

    def ranks(self, every: Sequence[Dims], kept: Groups = (), otherwise: str = "") -> list[Part]:
        """Return a table for each host, with a column for each rank and a row for each dim.

        Args:
            every: The dims of the rows.
            kept: The groups that a change keeps. They have one colour.
            otherwise: The effect of the change on all other groups.
        """
        hosts: dict[str, list[int]] = {}
        for rank in sorted(self.layout.ranks):
            units = ", ".join(level.name_of(rank) for level in reversed(self.levels))
            hosts.setdefault(f"{units} rank".strip(), []).append(rank)
        tables = []
        for host, held in hosts.items():
            for some in (held[at : at + IN_ROW] for at in range(0, len(held), IN_ROW)):
                rows = [[Cell(text) for text in (host, *map(str, some))]]
                if self.layout.size <= MOST_WITH_COORDS:
                    rows.append(self._coords(some))
                for dims in every:
                    groups = self._layout_of(dims).groups(*dims)
                    fates = ["kept" if groups.of(rank) in kept else otherwise for rank in some]
                    cells = map(self._cell, some, [dims] * len(some), fates)
                    rows.append([Cell(_name_of(dims)), *cells])
                tables.append(rows)
        return _aligned(tables)

    def _coords(self, ranks: Sequence[int]) -> list[Cell]:
        """Return a row with the coordinates of some ranks."""
        dims = [dim for (dim,) in self.dims_above_one]
        texts = [",".join(dims)]
        for rank in ranks:
            coords = self.layout.coords(rank)
            texts.append(",".join(f"{coords[dim]}" for dim in dims))
        return [*map(Cell, texts)]

    def _layout_of(self, dims: Dims) -> RankLayout:
        """Return the layout or the view that has some dims."""
        return self.views.layout_of(self.views.view_with(dims)[0])

    def _cell(self, rank: int, dims: Dims, fate: str = "") -> Cell:
        """Return a cell with the number of a rank's group, coloured by it or a change's effect."""
        layout = self._layout_of(dims)
        index = layout.groups(*dims).index_of(rank)
        text = f"{index}{MARKS.get(fate, '')}"
        group = f"{_name_of(dims)} {index}{f': {fate}' if fate else ''}"
        places = ", ".join(level.name_of(rank) for level in self.levels)
        tip = f"rank {rank}: {format_coords(layout.coords(rank))}\n{group}\n{places}".strip()
        return Cell(text, FATES.get(fate, FILLS[index % len(FILLS)]), tip)

    def _reach(self, dims: Dims) -> tuple[str, str]:
        """Return a description of the groups over some dims, and the name of their link."""
        host, layout, inner, outer = self._blocks
        own = self._layout_of(dims)
        groups = some = own.groups(*dims)
        # All hosts have the same groups of the layout, so some of these groups are enough.
        if host and own is self.layout:
            outside = [dim for dim in outer if dim.removesuffix(OUTER) in dims]
            fixed = inner if outside else outer
            some = layout.select(**dict.fromkeys(fixed, 0)).groups(*(outside or dims))
        words = f"{pluralize(len(groups), 'group')} of {groups.group_size:,}"
        link = ""
        each = " each" if len(groups) > 1 else ""
        for level in self.levels:
            counts = units_of_groups(level.of_rank[some.to_array()])
            least, most = int(np.min(counts)), int(np.max(counts))
            if most == 1:
                return f"{words},{each} inside one {level.name}", LINKS.get(level.name, level.name)
            span = f"{least:,}" if least == most else f"{least:,} to {most:,}"
            link = f"across {plural(level.name)}"
            words += f",{each} on {span} {plural(level.name)}"
        return words, link

    # ---- schematics -----------------------------------------------------------------------------

    def _schematic(self, lit: Dims, links: Mapping[Dims, str]) -> Box:
        """Return a schematic: one block of ranks, in a box for each dim that repeats the block.

        Pipeline stages are columns.

        Args:
            lit: The dims whose groups have colours.
            links: The link between the ranks of each group.
        """
        host, layout, inner, outer = self._blocks
        stage = next((dim for dim in outer if kind_of(dim) == "pp" and (dim,) in links), "")
        columns = 1 if stage else 0  # stages are side by side, so their hosts are not
        repeated = [dim for dim in outer if dim != stage and layout.size_of(dim) > 1]
        last_group = len(self._layout_of(lit).groups(*lit)) - 1
        longest = len(f"{layout.last_rank}:{last_group}")

        def nested(dims: Sequence[str], part: RankLayout) -> Box:
            """Return the box of the last dim around the boxes of the other dims."""
            if not dims:
                title = host.name_of(part.ranks[0]) if host else "ranks"
                words = " x ".join(f"{layout.size_of(dim):,} {dim}" for dim in inner)
                cells = []
                for rank in part.ranks:
                    cell = self._cell(rank, lit)
                    cells.append(cell._replace(text=f"{rank}:{cell.text}".rjust(longest)))
                return Box(title, words, cells, columns=4, framed=True)
            *others, dim = dims
            name = dim.removesuffix(OUTER)
            times = layout.size_of(dim)
            drawn = times if times <= MOST_DRAWN and not others else 1
            repeats = drawn < times
            boxes = [nested(others, part.select(**{dim: index})) for index in range(drawn)]
            title = f"{'x ' if repeats else ''}{times:,} {name}"
            return Box(title, links[name,], boxes, columns, framed=True, is_repeated=repeats)

        note = "the dims do not fill hosts evenly" if self.levels and not host else ""
        if not stage:
            return Box("", note, [nested(repeated, layout)])
        times = layout.size_of(stage)
        parts: list[Part] = []
        for index in range(times) if times <= MOST_STAGES else (0, 1, times - 1):
            part = layout.select(**{stage: index})
            ranks = f"{part.size:,} ranks in {part.rank_offset}..{part.last_rank}"
            arrow = f"{times - MOST_STAGES:,} more" if index >= MOST_STAGES else ""
            parts += [arrow, Box(f"{stage}={index}", ranks, [nested(repeated, part)], framed=True)]
        words = "; ".join(filter(None, [links[stage,], note]))
        return Box(f"{times:,} stages of {stage}", words, parts[1:], columns=len(parts))

    @cached_property
    def _blocks(self) -> tuple[Level | None, RankLayout, Dims, Dims]:
        """The layout as equal blocks of ranks.

        A block is a host if the first dims fill each host exactly. The last of these dims may be
        split in two for this purpose. Otherwise, a block spans the first dim larger than 1. The
        four values are: the level of the hosts, or None if blocks are not hosts; the layout, in
        which a dim may have been split; the dims inside a block; and the dims outside a block.
        """
        for host in self.levels[:1]:
            units = self._units(host)
            size = int(np.count_nonzero(units == units[0]))
            layout, inner, outer = self._split(size if size <= MOST_RANKS else 1)
            rows = units.reshape(-1, layout.size_of(*inner))
            is_even = rows.shape[1] == size and (rows == rows[:, :1]).all()
            if is_even and np.max(np.bincount(rows[:, 0])) == 1:
                return host, layout, inner, outer
        size = self.layout.size_of(*self.dims_above_one[0])
        return None, *self._split(size if size <= MOST_RANKS else 1)

    def _split(self, size: int) -> tuple[RankLayout, Dims, Dims]:
        """Split the layout into blocks of `size` ranks, or of 1 rank if that is not possible."""
        layout = self.layout
        for count, (dim, length) in enumerate(layout.sizes.items(), 1):
            inside = math.gcd(size, length)
            size //= inside
            if size > 1 and inside < length:
                break
            if inside < length:
                layout = layout.split(dim, **{dim: inside, dim + OUTER: length // inside})
            if size == 1:
                return layout, layout.dim_names[:count], layout.dim_names[count:]
        return self._split(1)

    def _units(self, level: Level) -> NDArray[np.int64]:
        """Return the unit of each rank, in the order of the layout's numbering."""
        ranks = self.layout.ranks
        # There may be 2**24 ranks, and a slice copies none of them.
        some = slice(ranks.start, ranks.stop) if isinstance(ranks, range) else list(ranks)
        return level.of_rank[some]


def _name_of(dims: Dims) -> str:
    return f"{'+'.join(dims)} group"


def _aligned(tables: list[list[list[Cell]]]) -> list[Part]:
    """Return tables whose columns all have the same width, by spaces before numbers."""
    every = [row for rows in tables for row in rows]
    name = max(len(row[0].text) for row in every)
    number = max(len(cell.text) for row in every for cell in row[1:])
    for row in every:
        row[0] = row[0]._replace(text=row[0].text.ljust(name))
        row[1:] = [cell._replace(text=cell.text.rjust(number)) for cell in row[1:]]
    return [*map(Table, tables)]


# ---- changes and mappings ----------------------------------------------------------------------


def change_picture(found: LayoutDifference, levels: Sequence[Level]) -> Box:
    """Return a table of a change's effect on groups, and both layouts if they are small."""
    before = found.before
    after = found.after
    parts: list[Part] = []
    if max(before.size, after.size) <= MOST_RANKS:
        kept = {(rank,) for rank in {*before.ranks} & {*after.ranks}}
        for change in found.changes:
            if change.kept:
                kept |= {*before.groups(*change.before)} & {*after.groups(*change.after)}
        for side, layout, otherwise in (("before", before, "gone"), ("after", after, "new")):
            scene = Scene(layout, levels, Views(layout))
            tables = scene.ranks(scene.dims_above_one, kept, otherwise)
            legend = f"{MARKS['kept']} kept, {MARKS[otherwise]} {otherwise}"
            parts.append(Box(f"{side}: {layout}", legend, tables))
    table = [[Cell(text) for text in COLUMNS]]
    for change in found.changes:
        *texts, result = change.cells
        table.append([*map(Cell, texts), Cell(result, FATES[change.result])])
    title, _, summary = found.summary.partition(": ")
    return Box(title, summary, [*parts, Table(table, is_text=True)])


def mapping_picture(mapping: RankMapping) -> Box:
    """Return a matrix of the parts that each source rank sends to each target rank.

    Parts that stay on their rank are marked "=". In large mappings, ranks share a row or
    column.
    """
    table = mapping.table()
    amounts = (table["stop"] - table["start"]).prod(axis=1)
    is_moved = table["source"] != table["target"]
    ends = np.sort(mapping.source_ranks), np.sort(mapping.target_ranks)
    size = -(-max(map(len, ends)) // MOST_ROWS)  # ranks of each row and column
    rows, columns = (
        [format_ranks(ranks[at : at + size].tolist()) for at in range(0, len(ranks), size)]
        for ranks in ends
    )
    row = np.searchsorted(ends[0], table["source"]) // size
    column = np.searchsorted(ends[1], table["target"]) // size
    moved = np.zeros((len(rows), len(columns)), dtype=np.int64)
    np.add.at(moved, (row, column), amounts * is_moved)
    kept = np.zeros_like(moved)
    np.add.at(kept, (row, column), amounts * ~is_moved)
    most = int(np.max(moved))
    cells = [[Cell("from \\ to"), *map(Cell, columns)]]
    for at, source in enumerate(rows):
        cells.append([Cell(source)])
        for to, target in enumerate(columns):
            pair = f"{source} to {target}"
            cells[-1].append(_amount_cell(pair, int(moved[at, to]), int(kept[at, to]), most))
    messages = pluralize(int(is_moved.sum()), "message")
    summary = (
        f"{pluralize(int(moved.sum()), 'part')} moved in {messages}, "
        f"{pluralize(int(kept.sum()), 'part')} kept in place"
    )
    whole = int(np.prod(np.max(table["stop"], axis=0)))
    part = f"a part is 1/{whole:,} of the tensor"
    legend = Box("", "= marks kept parts, . no parts", _aligned([cells]))
    title, _, how = str(mapping).partition(": ")
    return Box(title, how, [Box("", f"{summary}; {part}", [legend])])


def _amount_cell(pair: str, moved: int, kept: int, most: int) -> Cell:
    """Return a cell of the matrix: the number of moved parts, "=" for kept parts, "." for none."""
    tip = f"{pair}: {pluralize(moved, 'part')}"
    if kept:
        tip += f", {pluralize(kept, 'part')} kept in place"
    text = f"{moved:,}" if moved else ""
    if kept:
        text += MARKS["kept"]
    fill = FATES["kept"] if kept else ""
    if moved:
        fill = AMOUNTS[min(3, 4 * moved // most)]
    return Cell(text or ".", fill, tip)
