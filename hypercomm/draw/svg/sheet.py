"""Sheets: a whole SVG: its colours in light and dark, its title, and a table below the picture."""

from __future__ import annotations

from collections.abc import Sequence

from hypercomm.draw.palette import AMOUNTS, FILLS, MIXED, RESULTS
from hypercomm.draw.svg.blocks import Block, below, escaped, fitted, label, number, text_width

MARGIN = 20
"""Around everything, in pixels."""

WIDTH = 1_160
"""A picture is at most this wide; 16 pixels make a letter of a title, 10 the smallest one."""

_LIGHT = {
    "ink": "#1B1F24",
    "soft": "#59636E",
    "paper": "#FFFFFF",
    "pane": "#F6F8FA",
    "edge": "#AFB8C1",
    "line": "#57606A",
}
_DARK = {
    "ink": "#F0F3F6",
    "soft": "#9EA7B3",
    "paper": "#0D1117",
    "pane": "#1A202A",
    "edge": "#4A5260",
    "line": "#9EA7B3",
}


def _colours(of: dict[str, str]) -> list[str]:
    return [
        f".hc text{{fill:{of['ink']}}}",
        f".hc .soft{{fill:{of['soft']}}}",
        f".hc .paper{{fill:{of['paper']}}}",
        f".hc .pane{{fill:{of['pane']};stroke:{of['edge']}}}",
        f".hc .outer{{fill:none;stroke:{of['line']};stroke-width:1.5}}",
        f".hc .module{{fill:{of['paper']};stroke:{of['line']};stroke-width:2}}",
        f".hc .rule{{stroke:{of['edge']};fill:none}}",
        f".hc .arrow{{stroke:{of['line']};stroke-width:2;fill:none}}",
        f".hc .tip{{fill:{of['line']}}}",
    ]


def _css() -> str:
    """The look. Readers of SVG that know no @media, as those that write PNG, take the light one."""
    fixed = [
        ".hc text{font:12px system-ui,'Segoe UI','DejaVu Sans',Arial,sans-serif}",
        ".hc .h1{font-size:18px;font-weight:600}",
        ".hc .h2{font-size:14px;font-weight:600}",
        ".hc .small{font-size:10px}",
        ".hc .strong{font-weight:600}",
        ".hc .m{text-anchor:middle}",
        ".hc .e{text-anchor:end}",
        *(f".hc .f{index}{{fill:{colour}}}" for index, colour in enumerate(FILLS)),
        *(f".hc .a{index}{{fill:{colour}}}" for index, colour in enumerate(AMOUNTS)),
        *(f".hc .{result}{{fill:{colour}}}" for result, colour in RESULTS.items()),
        f".hc .mixed{{fill:{MIXED}}}",
        ".hc .cells text{fill:#111}",
        ".hc .cells .light{fill:#fff}",
        ".hc .cells:hover .g{opacity:.22}",
        ".hc .cells:hover .g:hover{opacity:1}",
    ]
    dark = "".join(_colours(_DARK))
    return "".join([*_colours(_LIGHT), *fixed, f"@media (prefers-color-scheme:dark){{{dark}}}"])


_PATTERNS = {
    "stripes": '<path d="M-1 7 7 -1M5 9 9 5M-1 1 1 -1" {}/>',
    "dots": '<circle cx="2" cy="2" r="1" {}/><circle cx="6" cy="6" r="1" {}/>',
    "bars": '<path d="M2 0V8M6 0V8" {}/>',
}


def _definitions() -> str:
    look = 'stroke="#000" stroke-opacity=".2" fill="#000" fill-opacity=".2"'
    patterns = [
        f'<pattern id="hc-{name}" width="8" height="8" patternUnits="userSpaceOnUse">'
        f"{marks.format(look, look)}</pattern>"
        for name, marks in _PATTERNS.items()
    ]
    return f"<defs>{''.join(patterns)}</defs>"


def sheet(title: str, lines: Sequence[str], blocks: Sequence[Block]) -> str:
    """Write a whole SVG.

    Args:
        title: The headline, and what a screen reader says first.
        lines: Further lines below it.
        blocks: What is drawn, one below the other.
    """
    head = [label(0, 16, fitted(title, WIDTH, 22), "h1", title=title)]
    head += [label(0, 38 + 17 * row, line, "soft") for row, line in enumerate(lines)]
    widths = [text_width(fitted(title, WIDTH, 22), 22), *(text_width(line, 12) for line in lines)]
    top = Block(max(widths), 24 + 17 * len(lines), "".join(head))
    inside = below([top, *blocks], 20)
    width, height = inside.width + 2 * MARGIN, inside.height + 2 * MARGIN
    size = f'width="{number(width)}" height="{number(height)}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="hc" role="img" {size} '
        f'viewBox="0 0 {number(width)} {number(height)}" aria-label="{escaped(title)}">'
        f"<title>{escaped(title)}</title><style>{_css()}</style>{_definitions()}"
        f'<rect width="100%" height="100%" class="paper"/>'
        f'<g transform="translate({MARGIN} {MARGIN})">{inside.markup}</g></svg>\n'
    )


def table(
    rows: Sequence[Sequence[str]], right: Sequence[bool], strong: Sequence[int] = ()
) -> Block:
    """Write a table; its first row has the heads.

    Args:
        rows: The texts of the cells.
        right: For each column whether it is of numbers.
        strong: The rows that stand out.
    """
    longest = 640.0
    widths = [
        min(longest, max(text_width(text, 12.5) for text in column))
        for column in zip(*rows, strict=True)
    ]
    parts = []
    for row, texts in enumerate(rows):
        x = 0.0
        for column, text in enumerate(texts):
            at = x + widths[column] * right[column]
            look = "soft" if row == 0 else "strong" if row in strong else ""
            cut = fitted(text, longest, 12.5)
            parts.append(label(at, 13 + 20 * row, cut, look, "e" * right[column], text))
            x += widths[column] + 22
    width = sum(widths) + 22 * (len(widths) - 1)
    parts.append(f'<path d="M0 19.5H{number(width)}" class="rule"/>')
    return Block(width, 20 * len(rows), "".join(parts))
