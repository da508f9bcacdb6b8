"""Checks whether the page is still right: measures a few ratios again, and compares them."""

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
"""The number of launches of real processes. Differences between launches count as noise, too."""

SHARE = 0.45
"""The fraction by which a ratio may change between builds of torch, or from hour to hour.

On two busy cores, `lazy_init` took 0.68 to 0.94 of megatron-core's time within a day, with the same
code.
"""

LEAST = 0.1
"""The smallest change of a ratio that counts.

In a fake world, hypercomm takes 2 ms and its peers 150 ms. Cold caches make 2 ms three times as
long if the process has loaded many packages. A cost that grows with the world changes the ratio
by more.
"""


def tables() -> Iterator[Table]:
    """Measure the main ratios in a minute: creation on fake and real ranks, and Megatron."""
    yield from large_worlds.creation(15, 16_384, 2)
    yield from megatron_state.large_worlds(4096, 15, None)
    yield from real_ranks.creation([8], LAUNCHES, 5)


def worse_than(
    page: Path, measure: Callable[[], Iterator[Table]] = tables, say: Callable[[str], None] = print
) -> list[str]:
    """Compare each ratio of hypercomm with the ratio on the page. Return a line per worse ratio.

    A ratio is worse if it has grown by more than the fraction `SHARE`, by more than `LEAST`, and by
    more than its noise, which is the distance between the quartiles of the ratios of all rounds. If
    any ratio is worse, all are measured again, and only the second measurement counts.
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
    change, bound = row["ratio"] - was, max(row["noise"], SHARE * was, LEAST)
    verdict = "as it was" if abs(change) <= bound else "worse" if change > 0 else "better"
    return (
        f"{row['ratio']:.3g} of {row['ratio_to']}, {was:.3g} on the page; noise "
        f"{row['noise']:.2g}: {verdict}"
    )
