"""Amounts: a mapping's bytes from each rank, host or block of ranks to each other, and in words."""

from __future__ import annotations

import attrs
import numpy as np
from numpy.typing import NDArray

from hypercomm.draw.scenes import MatrixScene
from hypercomm.layout.text import counted, format_ranks

MOST_SIDE = 48
"""Rows and columns that a picture of a matrix has at most."""

_UNITS = ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei")


@attrs.frozen(eq=False)
class Amounts:
    """A matrix of what goes from where to where.

    Args:
        rows: The names of what sends.
        columns: The names of what receives.
        amounts: Of each row to each column.
        stays: The part of it that a rank sends to itself: it does not move.
        kind: What rows and columns are: "rank", "host", "block of ranks".
    """

    rows: tuple[str, ...]
    columns: tuple[str, ...]
    amounts: NDArray[np.int64]
    stays: NDArray[np.int64]
    kind: str


def amounts_of(scene: MatrixScene, most: int = MOST_SIDE) -> Amounts:
    """Add up the messages of a mapping for as many rows and columns as can be shown.

    Args:
        scene: The mapping.
        most: The most rows, and the most columns.

    Example:
        >>> scene = MatrixScene("", (0, 1), (1, 2), [(0, 1, 4), (1, 1, 4), (1, 2, 2)], "B")
        >>> found = amounts_of(scene)
        >>> found.rows, found.columns, found.amounts.tolist(), found.stays.tolist()
        (('0', '1'), ('1', '2'), [[4, 0], [4, 2]], [[0, 0], [4, 0]])
    """
    rows, row_of, kind = _bins(scene, scene.sources, most)
    columns, column_of, other = _bins(scene, scene.targets, most)
    shape = len(rows), len(columns)
    amounts, stays = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    if scene.cells.size:
        sources, targets, sent = scene.cells.T
        places = _find(scene.sources, sources, row_of), _find(scene.targets, targets, column_of)
        np.add.at(amounts, places, sent)
        np.add.at(stays, places, np.where(sources == targets, sent, 0))
    return Amounts(rows, columns, amounts, stays, kind if kind == other else "rank or block")


def _bins(
    scene: MatrixScene, ranks: tuple[int, ...], most: int
) -> tuple[tuple[str, ...], NDArray[np.int64], str]:
    """Name the rows or columns, and say in which each rank is, by rank."""
    ordered = np.sort(np.asarray(ranks, dtype=np.int64))
    if ordered.size <= most:
        return tuple(map(str, ordered.tolist())), np.arange(ordered.size), "rank"
    for level in scene.topology.levels if scene.topology else ():
        used, bins = np.unique(level.of_rank[ordered], return_inverse=True)
        if used.size <= most:
            return tuple(level.names[unit] for unit in used), bins.reshape(-1), level.name
    block = 1
    while -(-ordered.size // block) > most:
        block *= 2
    starts = range(0, ordered.size, block)
    names = tuple(format_ranks(ordered[start : start + block].tolist()) for start in starts)
    return names, np.arange(ordered.size) // block, "block of ranks"


def _find(
    ranks: tuple[int, ...], wanted: NDArray[np.int64], bins: NDArray[np.int64]
) -> NDArray[np.int64]:
    return bins[np.searchsorted(np.sort(np.asarray(ranks, dtype=np.int64)), wanted)]


def amount_words(amount: int, unit: str, short: bool = False) -> str:
    """Write an amount.

    Args:
        amount: The number.
        unit: "B" for bytes, which are written in powers of 1024; or a word.
        short: Whether there is little room.

    Example:
        >>> amount_words(1536, "B"), amount_words(1536, "B", short=True)
        ('1.5 KiB', '1.5K')
        >>> amount_words(1200, "elements"), amount_words(1_250_000, "elements", short=True)
        ('1,200 elements', '1.2M')
        >>> amount_words(1, "parts"), amount_words(1, "B")
        ('1 part', '1 B')
    """
    if unit != "B" and not short:
        return f"{amount:,} {unit.removesuffix('s') if amount == 1 else unit}"
    base = 1024 if unit == "B" else 1000
    value, power = float(amount), 0
    while round(value, 1) >= base and power < len(_UNITS) - 1:
        value, power = value / base, power + 1
    text = f"{value:.0f}" if power == 0 or value >= 99.95 else f"{value:.1f}".removesuffix(".0")
    return f"{text}{_UNITS[power][:1]}" if short else f"{text} {_UNITS[power]}{unit}"


def summary(scene: MatrixScene) -> list[str]:
    """Say how much moves in how many messages, and which rank sends most.

    >>> summary(MatrixScene("", (0, 1), (1, 2), [(0, 1, 4), (1, 1, 4), (1, 2, 2)], "B"))
    ['6 B move in 2 messages, 4 B stay on their rank', 'rank 0 sends most: 4 B']
    """
    if not len(scene.cells):
        return ["nothing moves"]
    sources, targets, sent = scene.cells.T
    moves = sources != targets
    moved, stay = int(sent[moves].sum()), int(sent[~moves].sum())
    messages = int(np.count_nonzero(moves))
    line = f"{amount_words(moved, scene.unit)} move{'s' * (moved == 1)}"
    line += f" in {counted(messages, 'message')}"
    if not moved:
        line = f"nothing moves: {amount_words(stay, scene.unit)} stay on their rank"
    elif stay:
        line += f", {amount_words(stay, scene.unit)} stay on their rank"
    lines = [line]
    if moved:
        ranks, index = np.unique(sources[moves], return_inverse=True)
        totals = np.bincount(index.reshape(-1), weights=sent[moves]).astype(np.int64)
        most = int(np.argmax(totals))
        busiest = f"rank {ranks[most]} sends most:"
        if (totals == totals[0]).all() and ranks.size > 1:
            busiest = f"each of {ranks.size:,} ranks sends"
        lines.append(f"{busiest} {amount_words(int(totals[most]), scene.unit)}")
    if scene.unit == "parts" and scene.whole:
        lines.append(f"a part is 1/{scene.whole:,} of the tensor")
    return lines
