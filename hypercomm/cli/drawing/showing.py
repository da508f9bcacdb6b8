"""Showing drawings in the terminal, in as many colours as it has."""

from __future__ import annotations

from rich.text import Text

from hypercomm.cli.printing import console
from hypercomm.draw import Drawing
from hypercomm.draw.terminal import has_boxes, lines_of


def show(drawing: Drawing) -> None:
    """Print a drawing; rich takes the colours that the terminal has, if they are wanted."""
    out = console()
    for line in lines_of(drawing.scene, out.width, has_boxes()):
        text = Text(end="")
        for piece in line:
            text.append(piece.text, f"{ink_on(piece.fill)} on {piece.fill}" if piece.fill else "")
        text.rstrip()
        out.print(text, soft_wrap=True)


def ink_on(fill: str) -> str:
    """Return the colour of letters on a fill.

    >>> ink_on("#EEDD88"), ink_on("#155290")
    ('black', 'bright_white')
    """
    return "bright_white" if sum(bytes.fromhex(fill[1:])) < 380 else "black"
