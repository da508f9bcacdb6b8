"""Whether the last page still holds: a few ratios measured anew, and held against it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import large_worlds
import megatron_state
import real_ranks
from measure import Table

LAUNCHES = 3
"""Launches of real processes: what differs from one to the next is noise, too."""

SHARE = 0.25
"""How much of a ratio may differ between two builds of torch, or two hours of one machine."""


def tables() -> Iterator[Table]:
    """What takes a minute and tells most: creation on fake and on real ranks, and Megatron's."""
    yield from large_worlds.creation(5, 16_384, 2)
    yield from megatron_state.large_worlds(4096, 5, None)
    yield from real_ranks.creation([8], LAUNCHES, 5)


def worse_than(
    page: Path, measure: Callable[[], Iterator[Table]] = tables, say: Callable[[str], None] = print
) -> list[str]:
    """Say of each of our ratios how it stands to the page's; return those that became worse.

    That is by more than the noise, from the lower to the upper quartile of the ratios of its own
    rounds, and than a quarter; and when it is measured a second time, again.
    """
    last = {(row["what"], row["who"]): row["ratio"] for row in json.loads(page.read_text())["rows"]}
    worse: list[str] = []
    for attempt in ("", "again: "):
        worse = []
        for row in (row for table in measure() for row in table.rows()):
            was = last.get((row["what"], row["who"]))
            if was is None or not row["who"].startswith("hypercomm"):
                continue
            line = f"{row['what']}: {row['who']}: {_standing(row, was)}"
            say(attempt + line)
            if line.endswith("worse"):
                worse.append(line)
        if not worse:
            break
    return worse


def _standing(row: dict[str, Any], was: float) -> str:
    change, bound = row["ratio"] - was, max(row["noise"], SHARE * was)
    verdict = "as it was" if abs(change) <= bound else "worse" if change > 0 else "better"
    return (
        f"{row['ratio']:.3g} of {row['ratio_to']}, {was:.3g} on the page; noise "
        f"{row['noise']:.2g}: {verdict}"
    )
