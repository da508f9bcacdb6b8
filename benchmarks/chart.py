"""Draws the time to create a rank's five groups against the size of the world."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import matplotlib as mpl

COLORS = {
    "hypercomm": "#0b6e4f",
    "megatron-core HyperCommGrid": "#c1121f",
    "torch DeviceMesh": "#e09f3e",
    "new_group loop": "#6c757d",
}


def draw(rows: list[dict[str, Any]], file: Path) -> None:
    """Draw the medians of the growth tables, with their spread, on logarithmic axes."""
    mpl.use("Agg")
    from matplotlib import pyplot as plt

    curves: dict[str, list[tuple[int, float, float, float]]] = {}
    for row in rows:
        if not row["what"].startswith("growth:"):
            continue
        ranks = int(row["what"].split(", ")[-1].split()[0].replace(",", ""))
        curves.setdefault(row["who"], []).append((ranks, row["median"], row["min"], row["max"]))
    figure, axes = plt.subplots(figsize=(7.5, 4.5), layout="constrained")
    for who, points in curves.items():
        ranks, medians, lows, highs = zip(*sorted(points), strict=True)
        axes.plot(ranks, medians, "o-", color=COLORS[who], label=who, markersize=4)
        axes.fill_between(ranks, lows, highs, color=COLORS[who], alpha=0.15, linewidth=0)
    axes.set(
        xscale="log",
        yscale="log",
        xlabel="ranks in the world",
        ylabel="milliseconds on one rank (fake backend)",
        title="Creating one rank's five process groups, each of constant size",
    )
    axes.legend(frameon=False)
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=120)
    plt.close(figure)
