"""Placed: where the cells and the frames around them lie on the sheet."""

from __future__ import annotations

import attrs

from hypercomm.draw.parts.cells import Frame
from hypercomm.draw.svg.blocks import columns_for, fitted, label, rectangle

_PAD, _HEAD, _GAP, _BETWEEN = 7, 19, 9, 3
"""Inside a frame, above its cells for its name, between frames, between cells; pixels."""


_Framed = tuple[float, float, float, float, Frame]


@attrs.frozen
class Size:
    """The size of a cell, and how many lie beside each other in the innermost frame.

    Args:
        width: In pixels.
        height: In pixels.
        columns: At most so many.
    """

    width: float
    height: float
    columns: int


@attrs.frozen
class Placed:
    """A frame with all that is in it, from its left upper corner.

    Args:
        width: Its width.
        height: Its height.
        frames: x, y, width and height of each frame that has a name, outer ones first.
        cells: x and y of each cell.
    """

    width: float
    height: float
    frames: tuple[_Framed, ...]
    cells: dict[int, tuple[float, float]]


def place(frame: Frame, size: Size, width: float) -> Placed:
    """Lay a frame out in rows of at most a width; frames of one level are alike.

    Args:
        frame: The frame.
        size: The size of its cells.
        width: The most that it may take; more where one cell alone does.
    """
    most: list[int] = []
    _count(frame, 0, most)
    columns: list[int] = []
    widths = [0.0] * len(most)
    inner, gap = size.width, float(_BETWEEN)
    for depth in reversed(range(len(most))):
        room = width - 2 * _PAD * (depth + bool(frame.name))
        most_columns = size.columns if depth == len(most) - 1 else most[depth]
        fit = columns_for(most[depth], inner, room, gap)
        if fit > most_columns:
            fit = columns_for(most[depth], 1, most_columns, 0)
        columns.insert(0, fit)
        widths[depth] = inner
        pad = _PAD if depth or frame.name else 0
        inner, gap = fit * (inner + gap) - gap + 2 * pad, float(_GAP)
    return _place(frame, size, columns, widths, 0)


def _count(frame: Frame, depth: int, most: list[int]) -> None:
    """Find how many frames or cells a frame of each depth has, at most."""
    most += [0] * (depth + 1 - len(most))
    most[depth] = max(most[depth], len(frame.cells) or len(frame.frames))
    for each in frame.frames:
        _count(each, depth + 1, most)


def _place(
    frame: Frame, size: Size, every_columns: list[int], widths: list[float], depth: int
) -> Placed:
    pad, head = (_PAD, _HEAD) if frame.name else (0, 0)
    columns = every_columns[depth]
    frames: list[_Framed] = []
    cells: dict[int, tuple[float, float]] = {}
    if frame.cells:
        for index, cell in enumerate(frame.cells):
            row, column = divmod(index, columns)
            x = pad + column * (size.width + _BETWEEN)
            cells[cell] = (x, head + row * (size.height + _BETWEEN))
        rows = -(-len(frame.cells) // columns)
        inner = columns * (size.width + _BETWEEN) - _BETWEEN
        high = rows * (size.height + _BETWEEN) - _BETWEEN
    else:
        inside = [_place(each, size, every_columns, widths, depth + 1) for each in frame.frames]
        inner = columns * (widths[depth] + _GAP) - _GAP
        y = float(head)
        for start in range(0, len(inside), columns):
            row_of = inside[start : start + columns]
            for column, each in enumerate(row_of):
                x = pad + column * (widths[depth] + _GAP)
                frames += [(x + fx, y + fy, w, h, f) for fx, fy, w, h, f in each.frames]
                cells |= {cell: (x + cx, y + cy) for cell, (cx, cy) in each.cells.items()}
            y += max(each.height for each in row_of) + _GAP
        high = y - _GAP - head
    whole = inner + 2 * pad, head + high + pad
    if frame.name:
        frames.insert(0, (0, 0, *whole, frame))
    return Placed(*whole, tuple(frames), cells)


def draw_frames(placed: Placed) -> str:
    """Draw the frames with their names; only the innermost ones are filled."""
    parts = []
    for x, y, width, height, frame in placed.frames:
        look = "pane" if frame.cells else "outer"
        parts.append(rectangle(x + 0.5, y + 0.5, width - 1, height - 1, look, 4))
        name = fitted(frame.name, width - 2 * _PAD, 11)
        kind = frame.level if frame.level in frame.name else f"{frame.level} {frame.name}"
        parts.append(label(x + _PAD, y + 14, name, "soft small", title=kind))
    return "".join(parts)
