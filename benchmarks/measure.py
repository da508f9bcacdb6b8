"""Interleaved runs, medians with their spread, and goals for the medians."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import attrs

MANY = 4
"""The least number of rounds for which quartiles are computed."""


@attrs.frozen
class Goal:
    """The goal that a median is at most `limit`, or at most `limit` times the median of `of`."""

    limit: float
    of: str | None = None

    def is_reached(self, median: float, medians: Mapping[str, float]) -> bool:
        return median <= self.limit * (medians[self.of] if self.of else 1)

    def text(self, unit: str) -> str:
        return f"at most {self.limit:g} {'of ' + self.of if self.of else unit}"


@attrs.frozen
class Table:
    """The measurements of several libraries or methods that do the same thing.

    Attributes:
        what: The name of the measurement.
        unit: The unit of all samples.
        samples: The measured values of all runs, by the name of the library or method.
        reference: The library or method whose median has ratio 1.
        goals: The goals, by the name of the library or method.
    """

    what: str
    unit: str
    samples: Mapping[str, list[float]]
    reference: str
    goals: Mapping[str, Goal] = attrs.field(factory=dict)

    def medians(self) -> dict[str, float]:
        return {who: statistics.median(seen) for who, seen in self.samples.items()}

    def noise(self, who: str) -> float:
        """Return the distance between the quartiles of the ratios of all rounds."""
        peer = self.samples[self.reference]
        ratios = [own / other for own, other in zip(self.samples[who], peer, strict=False) if other]
        if len(ratios) < MANY:
            return 0.0
        lower, _, upper = statistics.quantiles(ratios, n=4)
        return upper - lower

    def rows(self) -> list[dict[str, Any]]:
        """Return one row for each way, ready for JSON."""
        medians = self.medians()
        rows = []
        for who, seen in self.samples.items():
            goal = self.goals.get(who)
            rows.append(
                {
                    "what": self.what,
                    "who": who,
                    "unit": self.unit,
                    "median": medians[who],
                    "min": min(seen),
                    "max": max(seen),
                    "runs": len(seen),
                    "ratio": medians[who] / medians[self.reference],
                    "ratio_to": self.reference,
                    "noise": self.noise(who),
                    "goal": goal and goal.text(self.unit),
                    "reached": goal and goal.is_reached(medians[who], medians),
                }
            )
        return rows


def interleaved(
    ways: Mapping[str, Callable[[], float]], runs: int, warm_up: int = 1
) -> dict[str, list[float]]:
    """Measure each way once per round. The first `warm_up` rounds do not count."""
    seen: dict[str, list[float]] = {who: [] for who in ways}
    for run in range(warm_up + runs):
        for who, measure in ways.items():
            gc.collect()  # otherwise, a way may pay for the garbage of the way before it
            value = measure()
            if run >= warm_up:
                seen[who].append(value)
    return seen


def as_text(rows: list[dict[str, Any]]) -> str:
    """Return all rows as one table."""
    header = ("measured", "by", "median", "spread", "ratio", "goal")
    lines = [header]
    last = None
    for row in rows:
        reached = {None: "", True: ": reached", False: ": NOT reached"}[row["reached"]]
        lines.append(
            (
                "" if row["what"] == last else row["what"],
                row["who"],
                f"{_number(row['median'])} {row['unit']}",
                f"{_number(row['min'])}..{_number(row['max'])}",
                "1" if row["who"] == row["ratio_to"] else _number(row["ratio"]),
                f"{row['goal'] or ''}{reached}",
            )
        )
        last = row["what"]
    widths = [max(len(line[column]) for line in lines) for column in range(len(header))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _number(value: float) -> str:
    """Format a value, with about three significant digits."""
    if value == 0 or abs(value) >= 100:
        return f"{value:,.0f}"
    digits = 2 if abs(value) >= 1 else 4 if abs(value) < 0.01 else 3
    return f"{value:.{digits}f}" if abs(value) < 10 else f"{value:.1f}"
