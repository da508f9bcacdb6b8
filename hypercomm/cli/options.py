"""Arguments and options of several commands, and functions that read them."""

from __future__ import annotations

import click

from hypercomm.layout import RankLayout
from hypercomm.layout.parsing import close_sizes, parse_groups, parse_sizes


def _read_groups(_: object, __: object, text: str | None) -> list[tuple[str, ...]] | None:
    return None if text is None else parse_groups(text)


def _joined(_: object, __: object, texts: tuple[str, ...]) -> str:
    return " ".join(texts)  # the reader of sizes proposes commas


sizes = click.argument("sizes", nargs=-1, required=True, metavar="SIZES", callback=_joined)
groups = click.option(
    *("--groups", "wanted"),
    metavar="DIMS",
    callback=_read_groups,
    help="As in tp,dp+cp. Default: every combination, of more than 6 dims every pair.",
)
views = click.option(
    *("--view", "views"),
    multiple=True,
    metavar="NAME:SIZES",
    help="Another factorisation, too, as in expert:ep=4,rest=-1. May be given several times.",
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")


def read_layout(
    text: str, world_size: int | None, room: str = "", rank_offset: int = 0
) -> RankLayout:
    """Return a layout; its errors contain the source of the number of ranks.

    Args:
        text: Sizes, as in "tp=2,dp=4"; one may be unspecified.
        world_size: The number of ranks that they must multiply to, if it is known.
        room: The clause of the error about that number. Default: that the world has as many.
        rank_offset: The smallest rank.

    Raises:
        LayoutError: The text cannot be read, or a size cannot be inferred.
        WorldSizeError: The sizes do not multiply to the number of ranks.

    Example:
        >>> str(read_layout("tp=2,dp=-1", 8))
        'tp=2,dp=4'
        >>> read_layout("tp=3", 4, "--nprocs is 4")
        Traceback (most recent call last):
        hypercomm.errors.WorldSizeError: tp=3 needs 3 ranks; --nprocs is 4
    """
    closed = close_sizes(parse_sizes(text), world_size, room)
    return RankLayout(tuple(closed.values()), tuple(closed), rank_offset)
