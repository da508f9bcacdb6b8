"""Changes as SVG: the grid before beside the grid after, and what becomes of each group."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from hypercomm.draw.palette import MARKS
from hypercomm.draw.parts.cells import MOST_RANKS
from hypercomm.draw.parts.fates import MOST_RANKS_OF_ALL, Fate, fates
from hypercomm.draw.scenes import ChangeScene
from hypercomm.draw.svg.blocks import (
    Block,
    below,
    fitted,
    label,
    moved,
    rectangle,
    text_width,
)
from hypercomm.draw.svg.panel import Look, Looks, panel
from hypercomm.draw.svg.sheet import WIDTH, sheet, table
from hypercomm.tools.place import Topology

_GAP = 36
_MOST_ROWS = 24
_PATTERN = {"kept": "", "gone": "stripes", "new": "dots"}
_MEANING = {"kept": "kept, the same ranks", "gone": "gone", "new": "new"}


def svg_of_change(scene: ChangeScene, most_ranks: int = MOST_RANKS) -> str:
    """Write a change as SVG; at most so many ranks have a cell each."""
    largest = max(scene.before.size, scene.after.size)
    most = most_ranks if largest <= most_ranks else 0  # both sides by host, or none
    rows = [
        below([label_of(name), _sides(before, after, scene.topology, most, largest)], 4)
        for name, before, after in fates(scene)
    ]
    lines = [scene.summary] if scene.summary else []
    return sheet(scene.title, lines, [_key(), *rows, *_table(scene)])


def label_of(name: str) -> Block:
    """Write the name of some dims."""
    return Block(
        text_width(fitted(name, WIDTH, 17), 17),
        18,
        label(0, 14, fitted(name, WIDTH, 17), "h2", title=name),
    )


class _ByFate(Looks):
    """Groups in the colour, with the pattern and the mark of what becomes of them."""

    def __init__(self, fate: Fate) -> None:
        self._fate = fate

    def of(self, group: int) -> Look:
        result = self._fate.of(group)
        return Look(result, _PATTERN[result], MARKS[result], result)

    def words(self, groups: NDArray[np.int64]) -> str:
        if groups.size == 1:
            return f"g{groups[0]} {self._fate.of(int(groups[0]))}"
        kept = int(np.count_nonzero(self._fate.kept[groups]))
        return f"{kept:,} of {groups.size:,} kept"


def _sides(
    before: Fate | None, after: Fate | None, topology: Topology | None, most: int, largest: int
) -> Block:
    """Beside each other where both are small, else one below the other."""
    if largest > MOST_RANKS_OF_ALL:
        return below(
            [
                _side("before", before, topology, WIDTH, most),
                _side("after", after, topology, WIDTH, most),
            ],
            14,
        )
    half = (WIDTH - _GAP) / 2
    sides = [
        _side("before", before, topology, half, most),
        _side("after", after, topology, half, most),
    ]
    step = max(side.width for side in sides) + _GAP
    markup = moved(sides[0], 0, 0) + moved(sides[1], step, 0)
    return Block(step + sides[1].width, max(side.height for side in sides), markup)


def _side(
    when: str, fate: Fate | None, topology: Topology | None, width: float, most: int
) -> Block:
    words = f"{when}: {fate.words() if fate else 'no such dim'}"
    head = Block(text_width(words, 12), 16, label(0, 12, words, "soft"))
    if fate is None:
        return head
    inside = panel(fate.lit.numbering, fate.lit.dims, topology, width, _ByFate(fate), most)
    return below([head, inside], 4)


def _key() -> Block:
    """What the colours mean."""
    parts, x = [], 0.0
    for result, mark in MARKS.items():
        box = rectangle(x, 0, 26, 18, result, 3)
        if _PATTERN[result]:
            box += box.replace(f'class="{result}"', f'fill="url(#hc-{_PATTERN[result]})"')
        parts.append(f'<g class="cells">{box}{label(x + 13, 13, mark, "strong", "m")}</g>')
        parts.append(label(x + 34, 13, _MEANING[result]))
        x += 34 + text_width(_MEANING[result], 12) + 24
    return Block(x, 18, "".join(parts))


def _table(scene: ChangeScene) -> list[Block]:
    if not scene.changes:
        return []
    rows = [("before", "after", "groups x size", "result")]
    for change in scene.changes[:_MOST_ROWS]:
        before, after = "+".join(change.before) or "-", "+".join(change.after) or "-"
        rows.append((before, after, change.counts, change.result))
    if len(scene.changes) > _MOST_ROWS:
        rows.append((f"and {len(scene.changes) - _MOST_ROWS:,} more", "", "", ""))
    return [table(rows, (False, False, True, False))]
