"""`hypercomm diff`: what becomes of groups and ranks when a layout changes."""

from __future__ import annotations

import json

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hypercomm.errors import NotationError
from hypercomm.layout import RankLayout
from hypercomm.layout.difference import COLUMNS, LayoutDifference
from hypercomm.layout.notation import OPEN, parse_sizes

_COLOURS = {"kept": "green", "partly": "yellow", "gone": "red", "new": "cyan"}

_PIPED_WIDTH = 120
"""Columns of the table where no terminal sets them."""


def read(
    before: str, after: str, world_size: int | None, before_offset: int, after_offset: int
) -> tuple[RankLayout, RankLayout]:
    """Read both layouts; without a world size, an open size makes them equally large.

    Args:
        before: The sizes before, as in tp=2,cp=2,dp=2.
        after: The sizes after.
        world_size: The number of ranks that either must have, if given.
        before_offset: The smallest rank before.
        after_offset: The smallest rank after.

    Raises:
        NotationError: A text cannot be read, or both have an open size and no world size is given.
        WorldSizeError: The sizes do not multiply to the world size.

    Example:
        >>> [str(layout) for layout in read("tp=2,cp=2,dp=8", "tp=4,dp", None, 0, 0)]
        ['tp=2,cp=2,dp=8', 'tp=4,dp=8']
    """
    is_open = [OPEN in parse_sizes(text).values() for text in (before, after)]
    if world_size is None and all(is_open):
        raise NotationError(
            f"both {before!r} and {after!r} have an open size; give one of them all its sizes, or "
            f"the number of ranks with --world-size"
        )
    if world_size is None and is_open[0]:
        there = RankLayout.parse(after, rank_offset=after_offset)
        return RankLayout.parse(before, world_size=there.size, rank_offset=before_offset), there
    here = RankLayout.parse(before, world_size=world_size, rank_offset=before_offset)
    if world_size is None and is_open[1]:
        world_size = here.size
    return here, RankLayout.parse(after, world_size=world_size, rank_offset=after_offset)


def show(changes: LayoutDifference, *, as_json: bool) -> None:
    """Print what changes."""
    if as_json:
        print(json.dumps(_json_form(changes)))
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_PIPED_WIDTH)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for title in COLUMNS:
        is_number = title == "groups x size"
        table.add_column(title, justify="right" if is_number else "left", no_wrap=is_number)
    for change in changes.changes:
        *cells, result = map(escape, change.cells)
        table.add_row(*cells, f"[{_COLOURS[change.result]}]{result}[/]")
    if changes.changes:
        console.print(table)
    console.print(changes.summary, markup=False, soft_wrap=True)


def _json_form(changes: LayoutDifference) -> dict[str, object]:
    return {
        "before": str(changes.before),
        "before_offset": changes.before.rank_offset,
        "after": str(changes.after),
        "after_offset": changes.after.rank_offset,
        "changes": [
            {
                "before": list(change.before),
                "after": list(change.after),
                "groups_before": change.groups_before,
                "groups_after": change.groups_after,
                "size": change.size,
                "kept": change.kept,
                "result": change.result,
            }
            for change in changes.changes
        ],
        "groups": {
            "kept": changes.groups_kept,
            "gone": changes.groups_gone,
            "new": changes.groups_new,
        },
        "ranks": {
            "shared": changes.ranks_shared,
            "moved": changes.ranks_moved,
            "gone": changes.ranks_gone,
            "new": changes.ranks_new,
        },
    }
