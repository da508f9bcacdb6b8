"""`hypercomm diff`: show how a change of layout affects groups and ranks."""

from __future__ import annotations

import attrs
import click

from hypercomm.cli import options
from hypercomm.cli.options import read_layout
from hypercomm.cli.printing import print_json, print_lines
from hypercomm.errors import LayoutError
from hypercomm.layout import RankLayout
from hypercomm.layout.difference import COLUMNS, LayoutDifference, difference
from hypercomm.layout.parsing import UNSPECIFIED, parse_sizes
from hypercomm.layout.text import aligned
from hypercomm.tools.launch_files.command import with_files


@with_files("before", "after")
@click.command()
@click.argument("before")
@click.argument("after")
@options.world_size("Default: the ranks of the other layout.")
@options.as_json
def diff(before: str, after: str, world_size: int | None, as_json: bool) -> None:
    """Compare the groups of two layouts.

    Show what changes from a layout such as tp=2,cp=2,dp=2 to another such as tp=4,dp=2. For every
    combination of dims, the table shows the dims that make the same groups afterwards, and how many
    groups are kept, gone or new. No process is started, and torch is not loaded.
    """
    changes = difference(*read(before, after, world_size))
    if as_json:
        print_json(_json_form(changes))
    else:
        rows = [COLUMNS, *(change.cells for change in changes.changes)]
        print_lines([*(aligned(rows) if changes.changes else []), changes.summary])


def read(before: str, after: str, world_size: int | None = None) -> tuple[RankLayout, RankLayout]:
    """Read both layouts. An unspecified size is inferred from the size of the other layout.

    Args:
        before: The sizes before the change, as in tp=2,cp=2,dp=2.
        after: The sizes after the change.
        world_size: The number of ranks of both layouts, or None.

    Raises:
        LayoutError: A text cannot be read, or both layouts have an unspecified size and no world
            size is given.
        WorldSizeError: The sizes do not multiply to the world size.

    Example:
        >>> [str(layout) for layout in read("tp=2,cp=2,dp=8", "tp=4,dp")]
        ['tp=2,cp=2,dp=8', 'tp=4,dp=8']
    """
    sizes = [parse_sizes(text) for text in (before, after)]
    is_open = [UNSPECIFIED in given.values() for given in sizes]
    if world_size is None and all(is_open):
        raise LayoutError(
            f"both {before!r} and {after!r} have an unspecified size; give all sizes of one "
            f"layout, or the number of ranks with --world-size"
        )
    room = ""
    if world_size is None and any(is_open):
        world_size = RankLayout(sizes[0 if is_open[1] else 1]).size
        room = f"the other layout has {world_size}"
    one, other = (read_layout(text, world_size, "--world-size", room) for text in (before, after))
    return one, other


def _json_form(changes: LayoutDifference) -> dict[str, object]:
    def counts(of: str, *whats: str) -> dict[str, int]:
        return {what: getattr(changes, f"{of}_{what}") for what in whats}

    return {
        "before": str(changes.before),
        "after": str(changes.after),
        "changes": [attrs.asdict(change) | {"result": change.result} for change in changes.changes],
        "groups": counts("groups", "kept", "gone", "new"),
        "ranks": counts("ranks", "shared", "moved", "gone", "new"),
    }
