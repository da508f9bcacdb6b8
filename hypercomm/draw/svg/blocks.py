"""Blocks: rectangles of SVG that are put below and beside each other."""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Sequence

import attrs

_NOT_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")
"""What no XML holds: control characters and halves of characters; XML 1.0, 2.2."""

_WIDE = 0.56
"""The width of a letter, in heights, of the fonts that may be there: most are narrower."""


@attrs.frozen
class Block:
    """A rectangle with its left upper corner at 0, 0.

    Args:
        width: Its width, in pixels.
        height: Its height.
        markup: What is in it.
    """

    width: float
    height: float
    markup: str


def escaped(value: object) -> str:
    """Write a value as the text of an element or an attribute.

    >>> escaped('a<b "c"'), escaped("bell: " + chr(7)) == "bell: " + chr(0xFFFD)
    ('a&lt;b &quot;c&quot;', True)
    """
    return html.escape(_NOT_XML.sub("\N{REPLACEMENT CHARACTER}", str(value)))


def text_width(text: str, size: float) -> float:
    """Estimate the width of a text; wide where letters are wide, as in east Asian names.

    >>> round(text_width("tp", 100))
    112
    """
    return sum(size * (_WIDE if ord(letter) < 0x1100 else 1.0) for letter in text)


def fitted(text: str, width: float, size: float) -> str:
    """Cut a text to a width, in the middle, where names of hosts are alike.

    >>> fitted("gpu-node-0017", 60, 10), fitted("gpu", 60, 10)
    ('gpu-n…0017', 'gpu')
    """
    if text_width(text, size) <= width:
        return text
    most = max(1, int(width / (size * _WIDE)) - 1)
    end = most // 2
    return f"{text[: most - end]}…{text[len(text) - end :]}"


def label(
    x: float, y: float, text: object, look: str = "", anchor: str = "", title: str = ""
) -> str:
    """Write a text at its base line.

    Args:
        x: Where it begins, or its middle or end.
        y: Its base line.
        text: The text.
        look: Its classes.
        anchor: "m" where x is its middle, "e" where it is its end.
        title: What hovering shows, where that is more than the text.
    """
    classes = " ".join(filter(None, (look, anchor)))
    attribute = f' class="{classes}"' if classes else ""
    tip = f"<title>{escaped(title)}</title>" if title and title != str(text) else ""
    return f'<text x="{number(x)}" y="{number(y)}"{attribute}>{tip}{escaped(text)}</text>'


def rectangle(x: float, y: float, width: float, height: float, look: str, rx: float = 0) -> str:
    """Draw a rectangle."""
    corner = f' rx="{number(rx)}"' if rx else ""
    return (
        f'<rect x="{number(x)}" y="{number(y)}" width="{number(width)}" '
        f'height="{number(height)}"{corner} class="{look}"/>'
    )


def number(value: float) -> str:
    """Write a length shortly."""
    return f"{value:.1f}".removesuffix(".0")


def moved(block: Block, x: float, y: float) -> str:
    """Put a block somewhere."""
    return f'<g transform="translate({number(x)} {number(y)})">{block.markup}</g>'


def below(blocks: Iterable[Block], gap: float) -> Block:
    """Put blocks below each other."""
    x, y, parts = 0.0, 0.0, []
    for block in blocks:
        parts.append(moved(block, 0, y))
        x, y = max(x, block.width), y + block.height + gap
    return Block(x, max(0.0, y - gap), "".join(parts))


def flowed(blocks: Sequence[Block], width: float, gap: float) -> Block:
    """Put blocks beside each other, in rows as wide as the widest block makes them."""
    if not blocks:
        return Block(0, 0, "")
    widest = max(block.width for block in blocks)
    columns = columns_for(len(blocks), widest, width, gap)
    rows = [blocks[start : start + columns] for start in range(0, len(blocks), columns)]
    return below([_beside(row, widest, gap) for row in rows], gap)


def _beside(blocks: Sequence[Block], step: float, gap: float) -> Block:
    parts = [moved(block, index * (step + gap), 0) for index, block in enumerate(blocks)]
    width = len(blocks) * (step + gap) - gap
    return Block(width, max(block.height for block in blocks), "".join(parts))


def columns_for(count: int, each: float, width: float, gap: float) -> int:
    """Return how many things of a width go into a row, such that rows are full if they can be.

    >>> columns_for(8, 100, 700, 0), columns_for(3, 100, 700, 0), columns_for(7, 100, 500, 0)
    (4, 3, 4)
    """
    most = max(1, min(count, int((width + gap) // (each + gap))))
    for columns in range(most, most // 2, -1):
        if count % columns == 0:
            return columns
    rows = -(-count // most)
    return -(-count // rows)
