"""Arguments and options that several commands take, and how they are read."""

from __future__ import annotations

import os

import click

from hypercomm.errors import LayoutError, NotationError
from hypercomm.launch.worlds import told
from hypercomm.layout import RankLayout
from hypercomm.layout.checks import positive
from hypercomm.layout.parsing import (
    OPEN,
    check_one_open,
    close_sizes,
    parse_groups,
    parse_sizes,
    perhaps_meant,
)


def read_groups(_: object, __: object, text: str | None) -> list[tuple[str, ...]] | None:
    """Read what --groups is given."""
    return None if text is None else parse_groups(text)


sizes = click.argument("sizes")
groups = click.option(
    *("--groups", "wanted"),
    metavar="DIMS",
    callback=read_groups,
    help="As in tp,dp+cp. Default: every combination.",
)
as_json = click.option("--json", "as_json", is_flag=True, help="Print JSON instead of a table.")


def is_open(text: str) -> bool:
    """Tell whether sizes leave one to be found out.

    >>> is_open("tp=2,dp=-1"), is_open("tp=2,dp=4")
    (True, False)
    """
    return OPEN in parse_sizes(text).values()


def size_of_job() -> tuple[int | None, str]:
    """Return the number of ranks that a launcher's variables tell, and the clause that says so.

    Raises:
        LaunchError: They contradict each other.
    """
    found = told("WORLD_SIZE", os.environ)
    return (None, "") if found is None else (found.number, says(found.number, found.by))


def says(ranks: int, by: str) -> str:
    """Say how many ranks a job has, and who tells.

    >>> says(8, "WORLD_SIZE=8, of the environment")
    'the job has 8 (WORLD_SIZE=8, of the environment)'
    """
    return f"the job has {ranks} ({by})"


def read_layout(
    text: str,
    world_size: int | None,
    option: str,
    *,
    room: str = "",
    rank_offset: int = 0,
    offset_option: str = "--rank-offset",
) -> RankLayout:
    """Read sizes, where errors speak of the command's own option.

    Args:
        text: Sizes, as in "tp=2,dp=4"; one may be unspecified.
        world_size: The number of ranks that they must multiply to, if it is known.
        option: The option that gives it.
        room: The error's clause about that number; default: that the option is it.
        rank_offset: The smallest rank.
        offset_option: The option that gives it.

    Raises:
        LayoutError: A number is too small.
        NotationError: The text cannot be read, or a size is unspecified and cannot be inferred.
        WorldSizeError: The sizes do not multiply to the number of ranks.

    Example:
        >>> str(read_layout("tp=2,dp=-1", 8, "--world-size"))
        'tp=2,dp=4'
    """
    sizes = parse_sizes(text)
    unknown = check_one_open([name for name, size in sizes.items() if size == OPEN])
    if unknown is not None and world_size is None:
        raise NotationError(
            f"the size of dim {unknown!r} is unspecified; give it, or {option}"
            f"{perhaps_meant(unknown)}"
        )
    if world_size is not None:
        positive(world_size, option)
    if rank_offset < 0:
        raise LayoutError(f"{offset_option} must be non-negative, got {rank_offset}")
    closed = close_sizes(sizes, world_size, room or f"{option} is {world_size}")
    return RankLayout(tuple(closed.values()), tuple(closed), rank_offset)
