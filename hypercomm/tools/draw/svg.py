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
_PATTERNS = """<defs><pattern id="hc-p1" width="8" height="8" patternUnits="userSpaceOnUse"><path
d="M-1 7 7 -1M5 9 9 5M-1 1 1 -1" stroke="#000" stroke-opacity=".25"/></pattern><pattern
id="hc-p2" width="8" height="8" patternUnits="userSpaceOnUse"><path d="M1 2h2M5 6h2"
stroke="#000" stroke-opacity=".3" stroke-width="2"/></pattern><pattern id="hc-p3" width="8"
height="8" patternUnits="userSpaceOnUse"><path d="M2 0V8M6 0V8" stroke="#000"
stroke-opacity=".2"/></pattern></defs>"""


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
        f"<title>{_escape(picture.title)}</title><style>{_LIGHT}{_FIXED}"
        f"@media (prefers-color-scheme:dark){{{_DARK}}}</style>{_PATTERNS}"
        f'<rect width="100%" height="100%" class="paper"/>{_moved(inside, 20, 20)}</svg>\n'
    )


def _block(part: Part) -> _Block:
    if isinstance(part, Cell):
        return _cell(part, _width(part.text) + 8)
    if isinstance(part, Box):
        return _box(part)
    return _ranks(part) if isinstance(part, Ranks) else _table(part)


def _escape(text: str) -> str:
    return html.escape("".join(one if one.isprintable() or one == "\n" else "?" for one in text))


def _width(text: str, size: float = 12) -> float:
    """Estimate the width of a text; east Asian letters are wide."""
    return sum(size * (0.58 if ord(letter) < 0x1100 else 1.0) for letter in text)


def _text(x: float, y: float, text: str, look: str, room: float = WIDTH) -> str:
    """Return a text at its base line, cut in the middle where there is less room than it needs."""
    most = 1 + int(room / 14)
    shown = text if _width(text) <= room else f"{text[: most - 1]}…{text[-most:]}"
    tip = f"<title>{_escape(text)}</title>" if shown != text else ""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{look}">{tip}{_escape(shown)}</text>'


def _line(text: str, look: str, size: float = 12) -> _Block:
    return _Block(min(WIDTH, _width(text, size)), size + 4, _text(0, size, text, look))


def _rectangle(x: float, y: float, width: float, height: float, look: str) -> str:
    size = f'width="{width:.1f}" height="{height:.1f}"'
    return f'<rect x="{x:.1f}" y="{y:.1f}" {size} rx="4" {look}/>'


def _moved(block: _Block, x: float, y: float) -> str:
    return f'<g transform="translate({x:.1f} {y:.1f})">{block.markup}</g>'


def _below(blocks: Sequence[_Block], gap: float) -> _Block:
    y, parts = -gap, []
    for block in blocks:
        parts.append(_moved(block, 0, y + gap))
        y += block.height + gap
    return _Block(max(block.width for block in blocks), y, "".join(parts))


def _beside(blocks: Sequence[_Block], gap: float, columns: int) -> _Block:
    """Put blocks next to each other: in one row, else in full rows of equally wide columns."""
    columns = min(columns, len(blocks))
    full = (count for count in range(columns, columns // 2, -1) if len(blocks) % count == 0)
    columns, widest = next(full, columns), max(block.width for block in blocks)
    rows = []
    for start in range(0, len(blocks), columns):
        x, parts, row = -gap, [], blocks[start : start + columns]
        for block in row:
            parts.append(_moved(block, x + gap, 0))
            x += gap + (block.width if columns == len(blocks) else widest)
        rows.append(_Block(x, max(block.height for block in row), "".join(parts)))
    return _below(rows, gap)


def _cell(cell: Cell, width: float) -> _Block:
    height = 38.0 if cell.below else 24.0
    fills = [f'fill="{cell.fill}"'] * bool(cell.fill)
    fills += [f'fill="url(#hc-p{cell.pattern})"'] * bool(cell.pattern)
    parts = [f"<title>{_escape(cell.tip)}</title>"] * bool(cell.tip)
    parts += [_rectangle(0, 0, width, height, fill) for fill in fills]
    parts.append(_text(width / 2, 16, cell.text, "m bold" if cell.below else "m"))
    parts += [_text(width / 2, 31, cell.below, "m small")] * bool(cell.below)
    return _Block(width, height, f'<g class="{"cell" * bool(cell.fill)}">{"".join(parts)}</g>')


def _box(box: Box) -> _Block:
    """Parts next to each other below a title; in a frame, if the box has one."""
    cells = [one for one in box.inside if isinstance(one, Cell)]
    wide = max(
        [_width(one.text) for one in cells] + [_width(one.below, 10) for one in cells] + [26]
    )
    blocks = [_cell(one, wide + 8) if isinstance(one, Cell) else _block(one) for one in box.inside]
    has_frames = all(isinstance(one, Box) and one.framed for one in box.inside)
    gap = 3 if cells else 56 if box.arrows else 10 if has_frames else 28
    step = max(block.width for block in blocks) + gap
    fitting = 99 if box.arrows else max(1, int((WIDTH + gap) // step))
    inside = _beside(blocks, gap, min(fitting, box.columns))
    width = max(inside.width + 16, min(_width(box.title) + _width(box.bold) + 32, 400))
    arrows = [
        _arrow(sum(one.width + gap for one in blocks[: index + 1]) - 50, inside.height / 2, text)
        for index, text in enumerate(box.arrows)
        if text is not None
    ]
    inside = inside._replace(markup=inside.markup + "".join(arrows))
    if not box.framed:
        start = min(600, _width(box.bold, 14)) + 10 * bool(box.bold)
        head = _text(0, 14, box.bold, "h2", 600) + _text(start, 14, box.title, "soft")
        y = 24 if box.title or box.bold else 0
        width = max(inside.width, min(WIDTH, start + _width(box.title)))
        return _Block(width, inside.height + y, head + _moved(inside, 0, y))
    corners = [6 * sheet for sheet in range(box.sheets, -1, -1)]
    frames = [_rectangle(one, one, width, inside.height + 34, 'class="pane"') for one in corners]
    head = _text(8, 17, box.title, "soft", width - min(200, _width(box.bold)) - 24)
    head += _text(width - 8, 17, box.bold, "bold e", 200) + _moved(
        inside, (width - inside.width) / 2, 26
    )
    return _Block(width + corners[0], inside.height + 34 + corners[0], "".join(frames) + head)


def _arrow(x: float, y: float, text: str) -> str:
    line = f'<path d="M{x:.1f} {y:.1f}h36" class="line"/>'
    tip = f'<path d="M{x + 36:.1f} {y - 5:.1f}v10l9 -5z" class="tip"/>'
    return line + tip + _text(x + 22, y - 10, text, "small soft m")


def _ranks(ranks: Ranks) -> _Block:
    """A panel for each dims: ranks on their hosts, groups as colours, patterns and labels."""
    panels = []
    for name, words, cells, _ in ranks.rows[: ranks.panels]:
        hosts = [
            Box(host, "", [cells[rank] for rank in held], 8 if host else 16, framed=bool(host))
            for host, held in ranks.hosts.items()
        ]
        panels.append(Box(words, name, hosts, columns=99, framed=False))
    return _box(Box("", ranks.caption, panels, columns=99, framed=False))


def _table(table: Table) -> _Block:
    columns = [*zip(*table, strict=True)]
    widths = [min(520, max(_width(cell.text) for cell in column)) + 20 for column in columns]
    parts = [f'<path d="M0 21H{sum(widths):.0f}" class="line"/>']
    for row, cells in enumerate(table):
        for column, cell in enumerate(cells):
            x, y = sum(widths[:column]), 27 * row
            block = _cell(cell, widths[column] - 2) if cell.fill else None
            text = _text(x + 4, y + 16, cell.text, "" if row else "soft", widths[column])
            parts.append(_moved(block, x, y) if block else text)
    return _Block(sum(widths), 27 * len(table), "".join(parts))
