"""Mappings as SVG: a matrix of who sends, who receives, and how much."""

from __future__ import annotations

from hypercomm.draw.palette import AMOUNTS, shade
from hypercomm.draw.parts.amounts import Amounts, amount_words, amounts_of, summary
from hypercomm.draw.scenes import MatrixScene
from hypercomm.draw.svg.blocks import Block, escaped, fitted, label, number, rectangle, text_width
from hypercomm.draw.svg.sheet import WIDTH, sheet

_WIDE, _NARROW = (46.0, 26.0), (20.0, 20.0)
_FEW = 16
"""Up to so many columns there is room for amounts in them."""

_DARK_FROM = 4
"""Shades from this one on have white letters."""


def svg_of_matrix(scene: MatrixScene) -> str:
    """Write a mapping as SVG."""
    found = amounts_of(scene)
    lines = [*scene.notes, *summary(scene)]
    if found.kind != "rank":
        lines.append(f"each row and column is a {found.kind}")
    return sheet(scene.title, lines, [_matrix(scene, found), _key(scene, found)])


def _matrix(scene: MatrixScene, found: Amounts) -> Block:
    has_room = len(found.columns) <= _FEW
    wide, high = _WIDE if has_room else _NARROW
    longest = max(text_width(name, 11) for name in found.rows)
    left = min(160.0, max(longest, 30)) + 10
    standing = not has_room or any(text_width(name, 11) > wide for name in found.columns)
    tall = min(120.0, max(text_width(name, 11) for name in found.columns)) if standing else 12.0
    top = 22 + tall + 6
    parts = [label(left, 12, f"to {found.kind}", "soft")]
    parts.append(label(left - 10, top - 6, "from", "soft", "e"))
    for column, name in enumerate(found.columns):
        parts.append(_head(left + (column + 0.5) * wide, top - 6, name, standing, tall))
    sums = left + len(found.columns) * wide + 12
    parts.append(label(sums, top - 6, "sends", "soft"))
    for row, name in enumerate(found.rows):
        y = top + (row + 0.5) * high + 4
        parts.append(label(left - 10, y, fitted(name, left - 10, 11), "small", "e", name))
        total = int(found.amounts[row].sum() - found.stays[row].sum())
        words = amount_words(total, scene.unit, short=True) if total else "-"
        tip = f"{found.kind} {name} sends {amount_words(total, scene.unit)}"
        parts.append(label(sums, y, words, "small", title=tip))
    bottom = top + len(found.rows) * high
    parts.append(rectangle(left, top, len(found.columns) * wide, len(found.rows) * high, "pane"))
    parts.append(f'<g class="cells">{_cells(scene, found, left, top, wide, high)}</g>')
    return Block(min(WIDTH * 2.0, sums + 60), bottom, "".join(parts))


def _head(x: float, y: float, name: str, standing: bool, room: float) -> str:
    if not standing:
        return label(x, y, name, "small", "m")
    cut = escaped(fitted(name, room, 11))
    where = f"translate({number(x + 4)} {number(y)}) rotate(-90)"
    return f'<text transform="{where}" class="small"><title>{escaped(name)}</title>{cut}</text>'


def _cells(
    scene: MatrixScene, found: Amounts, left: float, top: float, wide: float, high: float
) -> str:
    largest = int((found.amounts - found.stays).max(initial=0))
    parts = []
    rows, columns = found.amounts.nonzero()
    for row, column in zip(rows.tolist(), columns.tolist(), strict=True):
        stays = int(found.stays[row, column])
        moves = int(found.amounts[row, column]) - stays
        amount = moves or stays  # the letters of a cell; its words say both
        x, y = left + column * wide, top + row * high
        index = shade(moves, largest)
        tip = f"{found.kind} {found.rows[row]} to {found.columns[column]}: "
        tip += _exactly(amount, scene.unit)
        look = f"a{index}" if moves else "mixed"
        if stays:
            more = f"; {_exactly(stays, scene.unit)} more stay on their rank"
            tip += more if moves else ", stays where it is"
        box = rectangle(x + 1, y + 1, wide - 2, high - 2, look, 2)
        text = ""
        if wide > 40:
            light = "small light" if index >= _DARK_FROM and look != "mixed" else "small"
            words = amount_words(amount, scene.unit, short=True)
            text = label(x + wide / 2, y + high / 2 + 4, words, light, "m")
        parts.append(f'<g class="g"><title>{escaped(tip)}</title>{box}{text}</g>')
    return "".join(parts)


def _exactly(amount: int, unit: str) -> str:
    return amount_words(amount, unit) + (f" ({amount:,} B)" if unit == "B" else "")


def _key(scene: MatrixScene, found: Amounts) -> Block:
    """What the shades mean."""
    parts, x = [], 0.0
    largest = int((found.amounts - found.stays).max(initial=0))
    if largest:
        shades = range(len(AMOUNTS))
        parts += [rectangle(index * 26.0, 0, 24, 16, f"a{index}", 2) for index in shades]
        words = f"up to {amount_words(largest, scene.unit)}"
        x = len(AMOUNTS) * 26.0 + 8
        parts.append(label(x, 12, words, "soft"))
        x += text_width(words, 12) + 24
    if ((found.stays > 0) & (found.stays == found.amounts)).any():
        parts.append(rectangle(x, 0, 24, 16, "mixed", 2))
        parts.append(label(x + 32, 12, "stays on its rank", "soft"))
        x += 32 + text_width("stays on its rank", 12)
    return Block(x, 18, "".join(parts))
