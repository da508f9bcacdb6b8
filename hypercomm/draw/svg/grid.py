"""Grids as SVG: panels, arrows between modules, and a table of the dims."""

from __future__ import annotations

from hypercomm.draw.parts.cells import MOST_RANKS
from hypercomm.draw.parts.groups_lit import GroupsLit, dims_in
from hypercomm.draw.parts.words import about
from hypercomm.draw.scenes import Dims, GridScene
from hypercomm.draw.svg.blocks import (
    Block,
    below,
    escaped,
    fitted,
    flowed,
    label,
    moved,
    number,
    rectangle,
    text_width,
)
from hypercomm.draw.svg.panel import panel
from hypercomm.draw.svg.sheet import WIDTH, sheet, table
from hypercomm.layout import RankLayout
from hypercomm.topology import Topology

_MOST_ROWS = 12
"""Dims that the table below a picture tells of."""


def svg_of_grids(scene: GridScene, most_ranks: int = MOST_RANKS) -> str:
    """Write one grid, or the grids of a set, as SVG; at most so many ranks have a cell each."""
    several = len(scene.grids) > 1
    wanted = scene.panels or (scene.dims,)
    if several:
        blocks = [_modules(scene, wanted, most_ranks)]
    else:
        ((_, numbering),) = scene.grids
        blocks = [_panels(numbering, wanted, scene.topology, WIDTH, most_ranks)]
        blocks.append(_legend(numbering, wanted, scene.topology))
    return sheet(scene.title, about(scene, most_ranks), blocks)


def _panels(
    numbering: RankLayout,
    wanted: tuple[Dims, ...],
    topology: Topology | None,
    width: float,
    most: int,
) -> Block:
    lit = dict.fromkeys(dims_in(numbering, dims) for dims in wanted)
    blocks = [
        below([_caption(GroupsLit(numbering, dims), topology), each], 6)
        for dims in lit
        for each in [panel(numbering, dims, topology, width, most_ranks=most)]
    ]
    return flowed(blocks, width, 26)


def _caption(lit: GroupsLit, topology: Topology | None) -> Block:
    name = fitted(lit.name, 280, 17)
    words = lit.words(topology)
    start = text_width(name, 17) + 10
    markup = label(0, 14, name, "h2", title=lit.name) + label(start, 14, words, "soft")
    return Block(start + text_width(words, 12), 18, markup)


def _legend(numbering: RankLayout, wanted: tuple[Dims, ...], topology: Topology | None) -> Block:
    """The dims, one a row: those that are lit stand out."""
    several = [dims for dims in wanted if len(dims) > 1]
    every = [(dim,) for dim in numbering.dim_names] + several
    strides = dict(zip(numbering.dim_names, map(str, numbering.strides), strict=True))
    rows = [("dim", "size", "stride", "groups")]
    for dims in every[:_MOST_ROWS]:
        lit = GroupsLit(numbering, dims)
        stride = " ".join(strides[dim] for dim in dims)
        rows.append((lit.name, f"{lit.size:,}", stride, lit.words(topology)))
    if len(every) > _MOST_ROWS:
        rows.append((f"and {len(every) - _MOST_ROWS} more", "", "", ""))
    shown = {dims_in(numbering, dims) for dims in wanted}
    strong = [row for row, dims in enumerate(every, 1) if dims in shown]
    strong = strong if len(strong) < len(every) else []
    return table(rows, (False, True, True, False), strong)


def _modules(scene: GridScene, wanted: tuple[Dims, ...], most: int) -> Block:
    """Each grid in a box, one below the other, and an arrow for each edge."""
    lane = 22.0 * _lanes(scene)
    boxes, gap = {}, 44.0 if scene.edges else 22.0
    for name, numbering in scene.grids:
        inside = _panels(numbering, wanted, scene.topology, WIDTH - lane - 28, most)
        boxes[name] = _box(name, numbering, inside)
    widest = max(box.width for box in boxes.values())
    y, tops = 0.0, {}
    for name, box in boxes.items():
        tops[name] = y
        y += box.height + gap
    parts = [moved(box, lane, tops[name]) for name, box in boxes.items()]
    parts.append(_arrows(scene, boxes, tops, lane))
    return Block(lane + widest, y - gap, "".join(parts))


def _lanes(scene: GridScene) -> int:
    """How many arrows run on the left, as they pass grids in between or go up."""
    names = [name for name, _ in scene.grids]
    return sum(names.index(there) - names.index(here) != 1 for here, there in scene.edges)


def _box(name: str, numbering: RankLayout, inside: Block) -> Block:
    first, last = numbering.rank_offset, numbering.last_rank
    sizes = fitted(f"{numbering}: {numbering.size:,} ranks {first}..{last}", 560, 12)
    shown = fitted(name, 320, 17)
    width = max(inside.width, text_width(shown, 17) + 12 + text_width(sizes, 12)) + 28
    height = inside.height + 52
    parts = [
        rectangle(1, 1, width - 2, height - 2, "module", 8),
        label(14, 25, shown, "h2", title=name),
        label(26 + text_width(shown, 17), 25, sizes, "soft", title=str(numbering)),
        moved(inside, 14, 38),
    ]
    return Block(width, height, "".join(parts))


def _arrows(scene: GridScene, boxes: dict[str, Block], tops: dict[str, float], lane: float) -> str:
    """Straight down to the grid below; around on the left to any other."""
    names = list(boxes)
    parts, used = [], 0
    for here, there in scene.edges:
        start = tops[here] + boxes[here].height
        end = tops[there]
        words = f"{here} sends to {there}"
        if names.index(there) - names.index(here) == 1:
            x = lane + 60
            path = f"M{number(x)} {number(start)}V{number(end - 8)}"
            tip = f"M{number(x - 6)} {number(end - 10)}h12l-6 9z"
            parts.append(label(x + 14, (start + end) / 2 + 4, words, "soft"))
        else:
            x = lane - 8 - 22 * used
            used += 1
            out, into = start - 18, end + 22 + 9 * (used - 1)
            path = f"M{number(lane)} {number(out)}H{number(x)}V{number(into)}H{number(lane - 8)}"
            tip = f"M{number(lane - 9)} {number(into - 6)}v12l9 -6z"
        parts.append(f'<path d="{path}" class="arrow"><title>{escaped(words)}</title></path>')
        parts.append(f'<path d="{tip}" class="tip"/>')
    return "".join(parts)
