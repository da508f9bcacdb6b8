"""Pictures as SVG, readable on white and on black: blocks that are put next to each other."""

from __future__ import annotations

import html
from collections.abc import Sequence
from typing import NamedTuple

from hypercomm.tools.draw.pictures import Box, Cell, Part, Picture, Ranks, Table

# Panels fill rows of at most this many pixels.
WIDTH = 1_120

_INKS = """
.hc text{{fill:{ink}}} .hc .soft{{fill:{soft}}} .hc .paper{{fill:{paper}}}
.hc .pane{{fill:{pane};stroke:{edge}}} .hc .tip{{fill:{line}}}
.hc .line{{stroke:{line};fill:none;stroke-width:1.5}}"""
_LIGHT = _INKS.format(
    ink="#1b1f24", soft="#59636e", paper="#fff", pane="#f6f8fa", edge="#afb8c1", line="#57606a"
)
_DARK = _INKS.format(
    ink="#f0f3f6", soft="#9ea7b3", paper="#0d1117", pane="#1a202a", edge="#4a5260", line="#9ea7b3"
)
_FIXED = """
.hc text{font:12px system-ui,'Segoe UI','DejaVu Sans',Arial,sans-serif}
.hc .h1{font-size:18px;font-weight:600} .hc .h2{font-size:14px;font-weight:600}
.hc .small{font-size:10px} .hc .bold{font-weight:600} .hc .cell text{fill:#111}
.hc .m{text-anchor:middle} .hc .e{text-anchor:end}"""


class _Block(NamedTuple):
    """A rectangle with its left upper corner at 0, 0, in pixels."""

    width: float
    height: float
    markup: str


def svg_of(picture: Picture) -> str:
    """Return a picture as SVG, which needs nothing else."""
    head = [_line(picture.title, "h1", 18), *(_line(line, "soft") for line in picture.lines)]
    inside = _below([_below(head, 4), *map(_block, picture.parts)], 24)
    width, height = f"{inside.width + 40:.0f}", f"{inside.height + 40:.0f}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="hc" role="img" width="{width}" '
        f'height="{height}" viewBox="0 0 {width} {height}">'
        f"<title>{html.escape(picture.title)}</title><style>{_LIGHT}{_FIXED}"
        f"@media (prefers-color-scheme:dark){{{_DARK}}}</style>"
        f'<rect width="100%" height="100%" class="paper"/>{_moved(inside, 20, 20)}</svg>\n'
    )


def _block(part: Part) -> _Block:
    if isinstance(part, Ranks):
        return _ranks(part)
    if isinstance(part, Box):
        return _box(part)
    return _cell(part, _cell_width(part)) if isinstance(part, Cell) else _table(part)


def _width(text: str, size: float = 12) -> float:
    """Estimate the width of a text."""
    return 0.58 * size * len(text)


def _text(x: float, y: float, text: str, look: str) -> str:
    """Return a text at its base line."""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{look}">{html.escape(text)}</text>'


def _line(text: str, look: str, size: float = 12) -> _Block:
    return _Block(_width(text, size), size + 4, _text(0, size, text, look))


def _rectangle(at: float, width: float, height: float, look: str) -> str:
    size = f'width="{width:.1f}" height="{height:.1f}"'
    return f'<rect x="{at:.1f}" y="{at:.1f}" {size} rx="4" {look}/>'


def _moved(block: _Block, x: float, y: float) -> str:
    return f'<g transform="translate({x:.1f} {y:.1f})">{block.markup}</g>'


def _below(blocks: Sequence[_Block], gap: float) -> _Block:
    y, parts = 0.0, []
    for block in blocks:
        parts.append(_moved(block, 0, y))
        y += block.height + gap
    return _Block(max(block.width for block in blocks), y - gap, "".join(parts))


def _in_rows(blocks: Sequence[_Block], gap: float, columns: int) -> _Block:
    """Put blocks next to each other: in one row, else in full rows of equally wide columns."""
    columns = min(columns, len(blocks))
    full = (count for count in range(columns, columns // 2, -1) if len(blocks) % count == 0)
    columns, widest = next(full, columns), max(block.width for block in blocks)
    rows = []
    for start in range(0, len(blocks), columns):
        x, parts, row = 0.0, [], blocks[start : start + columns]
        for block in row:
            parts.append(_moved(block, x, 0))
            x += gap + (block.width if columns == len(blocks) else widest)
        rows.append(_Block(x - gap, max(block.height for block in row), "".join(parts)))
    return _below(rows, gap)


def _cell_width(cell: Cell) -> float:
    return max(26, _width(cell.text), _width(cell.below, 10)) + 8


def _cell(cell: Cell, width: float) -> _Block:
    height = 38 if cell.below else 24
    tip = f"<title>{html.escape(cell.tip)}</title>" if cell.tip else ""
    markup = tip + _rectangle(0, width, height, f'fill="{cell.fill}"')
    markup += _text(width / 2, 16, cell.text, "m bold" if cell.below else "m")
    if cell.below:
        markup += _text(width / 2, 31, cell.below, "m small")
    return _Block(width, height, f'<g class="cell">{markup}</g>')


def _box(box: Box) -> _Block:
    """Return parts next to each other below a title; in a frame, if the box has one."""
    cells = [one for one in box.inside if isinstance(one, Cell)]
    if cells:
        wide = max(map(_cell_width, cells))
        blocks, gap = [_cell(cell, wide) for cell in cells], 3
    else:
        blocks = [_block(one) for one in box.inside]
        has_frames = all(isinstance(one, Box) and one.framed for one in box.inside)
        gap = 56 if box.arrows else 10 if has_frames else 28
    fitting = int((WIDTH + gap) // (max(block.width for block in blocks) + gap))
    columns = len(blocks) if box.arrows else min(max(1, fitting), box.columns)
    inside = _in_rows(blocks, gap, columns)
    x, arrows = -float(gap), ""
    for block, text in zip(blocks, box.arrows, strict=False):
        x += block.width + gap
        arrows += _arrow(x + 6, inside.height / 2, text)
    inside = inside._replace(markup=inside.markup + arrows)
    return _framed(box, inside) if box.framed else _titled(box, inside)


def _titled(box: Box, inside: _Block) -> _Block:
    if not box.title and not box.bold:
        return inside
    start = _width(box.bold, 15.5) + 10 if box.bold else 0
    head = _text(0, 14, box.bold, "h2") + _text(start, 14, box.title, "soft")
    width = max(inside.width, start + _width(box.title))
    return _Block(width, inside.height + 24, head + _moved(inside, 0, 24))


def _framed(box: Box, inside: _Block) -> _Block:
    width = 16 + max(inside.width, _width(box.title) + _width(box.bold) + 16)
    height, behind = inside.height + 34, 6 * box.sheets
    corners = range(behind, -1, -6)
    markup = "".join(_rectangle(at, width, height, 'class="pane"') for at in corners)
    markup += _text(8, 17, box.title, "soft") + _text(width - 8, 17, box.bold, "bold e")
    markup += _moved(inside, (width - inside.width) / 2, 26)
    return _Block(width + behind, height + behind, markup)


def _arrow(x: float, y: float, text: str) -> str:
    line = f'<path d="M{x:.1f} {y:.1f}h36" class="line"/>'
    tip = f'<path d="M{x + 36:.1f} {y - 5:.1f}v10l9 -5z" class="tip"/>'
    return line + tip + _text(x + 22, y - 10, text, "small soft m")


def _ranks(ranks: Ranks) -> _Block:
    """Return a panel for each row: ranks on their hosts, groups as colours and labels."""
    panels = []
    for name, words, cells in ranks.rows:
        hosts = [
            Box(host, "", [cells[rank] for rank in held], 8 if host else 16, framed=bool(host))
            for host, held in ranks.hosts.items()
        ]
        panels.append(Box(words, name, hosts, framed=False))
    return _box(Box("", ranks.caption, panels, framed=False))


def _table(table: Table) -> _Block:
    widths = [max(_width(cell.text) for cell in column) + 20 for column in zip(*table, strict=True)]
    parts = [f'<path d="M0 21H{sum(widths):.0f}" class="line"/>']
    for row, cells in enumerate(table):
        x, y = 0.0, 27 * row
        for cell, width in zip(cells, widths, strict=True):
            if cell.fill:
                parts.append(_moved(_cell(cell, width - 2), x, y))
            else:
                parts.append(_text(x + 4, y + 16, cell.text, "" if row else "soft"))
            x += width
    return _Block(sum(widths), 27 * len(table), "".join(parts))
