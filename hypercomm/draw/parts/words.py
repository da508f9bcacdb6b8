"""Words below a title: how many ranks, on how many hosts, and what stands for what."""

from __future__ import annotations

import numpy as np

from hypercomm.draw.parts.cells import MOST_RANKS, MOST_UNITS, cells_of
from hypercomm.draw.scenes import GridScene, distinct, ranks_of
from hypercomm.layout.text import counted
from hypercomm.topology import Topology


def about(
    scene: GridScene,
    most_ranks: int = MOST_RANKS,
    most_units: int = MOST_UNITS,
    place: str = "cell",
) -> list[str]:
    """Say of grids how many ranks they have and where, and what a cell is, if not a rank."""
    ranks = distinct(np.concatenate([ranks_of(numbering) for _, numbering in scene.grids]))
    lines = [f"{counted(ranks.size, 'rank')}{on(scene.topology, ranks)}"]
    largest = max((numbering for _, numbering in scene.grids), key=lambda each: each.size)
    lines[0] += "; the first dim varies fastest" * (len(largest.dim_names) > 1)
    if largest.size > most_ranks:
        kind = cells_of(largest, scene.topology, most_ranks, most_units).kind
        article = "an" if kind[0] in "aeiou" else "a"
        lines.append(
            f"each {place} is {article} {kind}; it shows how many ranks it holds, and the groups "
            f"that they are in"
        )
    return lines


def on(topology: Topology | None, ranks: object) -> str:
    """Say on how many units of each level ranks are.

    >>> on(None, [0, 1])
    ''
    """
    if topology is None:
        return ""
    used = np.asarray(ranks)
    told = [counted(distinct(level.of_rank[used]).size, level.name) for level in topology.levels]
    return f" on {', '.join(told)}"
