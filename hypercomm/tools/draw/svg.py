"""Pictures as SVG: rectangles with text, in rows and columns."""

from __future__ import annotations

import html
import re
import textwrap
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

from hypercomm.tools.draw.pictures import Box, Cell, Part, Table

# The largest width of a row, in pixels.
WIDTH = 1_240

# The width that a heading may have above narrower parts, and the height of its lines.
LEAST_WIDTH = 320
LINE = 18

_STYLE = """.hc text{font:12px system-ui,'Segoe UI','DejaVu Sans',Arial,sans-serif;fill:#1b1f24}
.hc .bold{font-size:13px;font-weight:600}
.hc .small{font-size:10px} .hc .soft{fill:#59636e} .hc .middle{text-anchor:middle}
.hc .frame{fill:#f6f8fa;stroke:#afb8c1} .hc .arrow{stroke:#57606a;fill:#57606a}
.hc .page{fill:#fff}
@media screen and (prefers-color-scheme:dark){.hc text{fill:#e6edf3} .hc .soft{fill:#9da7b3}
.hc .filled{fill:#1b1f24} .hc .page{fill:#0d1117}
.hc .frame{fill:#161b22;stroke:#57606a} .hc .arrow{stroke:#9da7b3;fill:#9da7b3}}"""


_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")


class _Block(NamedTuple):
    """A rectangle in pixels, with its upper left corner at 0, 0."""

    width: float
    height: float
    markup: str


def svg_of(picture: Box) -> str:
    """Return a picture as SVG without external files."""
    inside = _box(picture)
    width = f"{inside.width + 40:.0f}"
    height = f"{inside.height + 40:.0f}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="hc" role="img" width="{width}" '
        f'height="{height}" viewBox="0 0 {width} {height}"><title>{_escape(picture.bold)}'
        f'</title><style>{_STYLE}</style><rect width="100%" height="100%" class="page"/>'
        f"{_moved(inside, 20, 20)}</svg>\n"
    )


def _block(part: Part) -> _Block:
    if isinstance(part, str):
        text = _text(22, 55, part, "small soft middle")
        return _Block(44, 70, f'{text}<path d="M0 65h36v-5l8 5l-8 5v-5" class="arrow"/>')
    if isinstance(part, Cell):
        return _cell(part, max(34, _width(part.text) + 8), "middle")
    return _box(part) if isinstance(part, Box) else _table(part)


def _escape(text: str) -> str:
    """Return a text as XML. XML has no form for control characters."""
    return html.escape(_CONTROL.sub("\N{REPLACEMENT CHARACTER}", text))


def _width(text: str, size: float = 12) -> float:
    """Estimate the width of a text."""
    return 0.6 * size * len(text)


def _text(x: float, y: float, text: str, look: str) -> str:
    """Return the markup of a text whose base line is at `y`."""
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{look}">{_escape(text)}</text>'


def _rectangle(at: float, width: float, height: float, look: str) -> str:
    size = f'width="{width:.1f}" height="{height:.1f}"'
    return f'<rect x="{at:.1f}" y="{at:.1f}" {size} rx="4" {look}/>'


def _moved(block: _Block, x: float, y: float) -> str:
    return f'<g transform="translate({x:.1f} {y:.1f})">{block.markup}</g>'


def _in_column(blocks: Sequence[_Block], gap: float) -> _Block:
    tops = [*accumulate((block.height + gap for block in blocks), initial=0.0)]
    markup = "".join(_moved(block, 0, y) for block, y in zip(blocks, tops, strict=False))
    return _Block(max(block.width for block in blocks), tops[-1] - gap, markup)


def _in_row(blocks: Sequence[_Block], gap: float) -> _Block:
    lefts = [*accumulate((block.width + gap for block in blocks), initial=0.0)]
    markup = "".join(_moved(block, x, 0) for block, x in zip(blocks, lefts, strict=False))
    return _Block(lefts[-1] - gap, max(block.height for block in blocks), markup)


def _cell(cell: Cell, width: float, look: str) -> _Block:
    markup = f"<title>{_escape(cell.tip)}</title>" if cell.tip else ""
    look += " filled" if cell.fill else ""
    markup += _rectangle(0, width, 24, f'fill="{cell.fill or "none"}"')
    markup += _text(width / 2 if "middle" in look else 6, 16, cell.text, look)
    return _Block(width, 24, f'<g class="cell">{markup}</g>')


def _box(box: Box) -> _Block:
    """Return the parts of a box in rows below its heading."""
    blocks = [_block(part) for part in box.inside]
    gap = 3 if isinstance(box.inside[0], Cell) else 10 if box.framed else 20
    rows: list[list[_Block]] = [[]]
    for block in blocks:
        is_full = sum(one.width + gap for one in rows[-1]) + block.width > WIDTH
        if rows[-1] and (len(rows[-1]) == box.columns if box.columns else is_full):
            rows.append([])
        rows[-1].append(block)
    inside = _in_column([_in_row(row, gap) for row in rows], gap)
    heading = _heading(box, max(inside.width, LEAST_WIDTH))
    edge = 8 if box.framed else 0
    behind = 12 if box.is_repeated else 0
    top = heading.height or edge
    width = max(inside.width, heading.width) + 2 * edge
    height = top + inside.height + edge
    frames = [_rectangle(at, width, height, 'class="frame"') for at in range(behind, -1, -6)]
    markup = "".join(frames) if box.framed else ""
    markup += _moved(heading, edge, 0) + _moved(inside, edge, top)
    return _Block(width + behind, height + behind, markup)


def _heading(box: Box, room: float) -> _Block:
    """Return the bold start of a box's heading, and the words in lines of at most a width."""
    start = _width(box.bold, 14) + 10 if box.bold else 0
    bold = "x" * round(start / _width("x"))  # as long as the bold start of the first line
    lines = textwrap.wrap(
        f"{bold} {box.words}".strip(),
        int(room / _width("x")),
        break_long_words=False,
        break_on_hyphens=False,
    )
    markup = _text(0, 17, box.bold, "bold") if bold else ""
    for at, line in enumerate(lines):
        words = line if at else line[len(bold) :].strip()
        markup += _text(0 if at else start, 17 + LINE * at, words, "soft")
    height = 26 + LINE * (len(lines) - 1) if lines else 0
    return _Block(max(map(_width, lines), default=0), height, markup)


def _table(table: Table) -> _Block:
    columns: list[_Block] = []
    for column in zip(*table.rows, strict=True):
        width = max(_width(cell.text, 13) for cell in column) + 12
        look = "" if table.is_text or not columns else "middle"
        title, *others = column
        cells = [_cell(title, width, f"bold {look}"), *(_cell(one, width, look) for one in others)]
        columns.append(_in_column(cells, 3))
    return _in_row(columns, 3)
