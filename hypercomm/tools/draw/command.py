"""The command `hypercomm draw`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from hypercomm.cli import options
from hypercomm.cli.diff import read
from hypercomm.cli.printing import console
from hypercomm.errors import NotationError
from hypercomm.layout import RankLayout, RankMapping
from hypercomm.layout.difference import difference
from hypercomm.layout.parsing import parse_groups
from hypercomm.tools.draw.drawing import ENDINGS, checked_file
from hypercomm.tools.draw.drawing import draw as draw_picture
from hypercomm.tools.place import machine


def _read_shape(_: object, __: object, text: str | None) -> list[int] | None:
    try:
        return None if text is None else [int(length) for length in text.split(",")]
    except ValueError as error:
        raise NotationError(f"--shape {text!r} must be lengths, as in 4096,8192") from error


def _read_dims(_: object, __: object, text: str | None) -> tuple[str, ...] | None:
    """Both tp+dp and tp,dp mean the groups over both."""
    return None if text is None else tuple(dim for dims in parse_groups(text) for dim in dims)


@click.command(short_help="Draw a layout, a change of layout or a mapping.")
@options.sizes
@click.argument("after", required=False)
@click.option("--to", "target", metavar="SIZES", help="Draw the messages of a mapping to SIZES.")
@click.option(
    "--on",
    metavar="HOSTS",
    multiple=True,
    default=["8"],
    show_default=True,
    help="Where ranks are, as for hypercomm place; none: not shown.",
)
@click.option("--dims", callback=_read_dims, help="Show the groups over these, as in tp+dp.")
@click.option(
    "--groups", callback=options.read_groups, help="Several panels of groups, as in tp,dp+cp."
)
@click.option("--world-size", type=int, help="Infer the one size that is -1 from this.")
@click.option("--rank-offset", default=0, help="The smallest rank.")
@click.option("--to-offset", type=int, help="With --to: its smallest rank.  [default: 0]")
@click.option("--along", help="With --to: the dim that splits the batch.  [default: dp]")
@click.option("--shape", callback=_read_shape, help="With --to: the tensor's, as in 4096,8192.")
@click.option("--itemsize", type=int, help="With --shape: the bytes of an element.")
@click.option("-o", "--output", metavar="FILE", help=f"Write a file: {', '.join(ENDINGS)}.")
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
def draw(
    sizes: str,
    after: str | None,
    target: str | None,
    on: tuple[str, ...],
    world_size: int | None,
    rank_offset: int,
    to_offset: int | None,
    along: str | None,
    output: str | None,
    force: bool,
    **given: Any,
) -> None:
    """Draw a layout such as tp=8,dp=4,pp=2: ranks on their hosts, and groups as colours.

    With a second layout, draw which groups a change keeps, ends and creates; with --to, the
    messages of a mapping. Above 256 ranks, draw a schematic. Without -o, print to the terminal.
    """
    if after is not None and target is not None:
        raise click.UsageError("a second layout draws a change, --to a mapping; give one of them")
    if target is None and (to_offset is not None or along is not None):
        raise click.UsageError("--to-offset and --along apply to a mapping, which needs --to")
    if output is not None:
        checked_file(output, force)  # before anything is computed
    where = None if on == ("none",) else machine(on)
    if where is None and on != ("none",):
        return  # --on live: the first rank of the job draws
    what: Any
    if after is not None:
        what = difference(*read(sizes, after, world_size, rank_offset, rank_offset))
    else:
        what = _layout(sizes, world_size, rank_offset, "--rank-offset")
    if target is not None:
        there = _layout(target, world_size, to_offset or 0, "--to-offset")
        what = RankMapping(what, there, along or "dp")
    drawing = draw_picture(what, where, **given)
    if output is None:
        console().print(drawing)
    else:
        drawing.save(output, force)
        click.echo(f"{output}: {Path(output).stat().st_size:,} bytes", err=True)


def _layout(text: str, world_size: int | None, rank_offset: int, option: str) -> RankLayout:
    room = ""
    if world_size is None and options.is_open(text):
        world_size, room = options.size_of_job()
    return options.read_layout(
        text, world_size, "--world-size", room=room, rank_offset=rank_offset, offset_option=option
    )
