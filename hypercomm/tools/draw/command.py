"""The command `hypercomm draw`."""

from __future__ import annotations

from pathlib import Path

import click

from hypercomm.cli.diff import read
from hypercomm.cli.printing import console
from hypercomm.layout import RankLayout, RankMapping
from hypercomm.layout.difference import difference
from hypercomm.tools.draw.drawing import ENDINGS
from hypercomm.tools.draw.drawing import draw as draw_picture
from hypercomm.tools.place.live import machine


@click.command(short_help="Draw a layout, a change of layout or a mapping.")
@click.argument("sizes")
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
@click.option("--groups", help="The dims whose groups have colours, as in tp,dp+cp.")
@click.option("--world-size", type=int, help="Infer the one size that is -1 from this.")
@click.option("--rank-offset", type=click.IntRange(0), default=0, help="The smallest rank.")
@click.option("--to-offset", type=click.IntRange(0), default=0, help="Smallest rank of --to.")
@click.option("--along", default="dp", show_default=True, help="With --to: the batch dim.")
@click.option("-o", "--output", metavar="FILE", help=f"Write a file: {', '.join(ENDINGS)}.")
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
def draw(
    sizes: str,
    after: str | None,
    target: str | None,
    on: tuple[str, ...],
    groups: str | None,
    world_size: int | None,
    rank_offset: int,
    to_offset: int,
    along: str,
    output: str | None,
    force: bool,
) -> None:
    """Draw a layout such as tp=8,dp=4,pp=2: ranks on their hosts, and groups as colours.

    With a second layout, draw which groups a change keeps, ends and creates; with --to, the
    messages of a mapping. Large layouts are schematics. Without -o, print to the terminal.
    """
    if after is not None and target is not None:
        raise click.UsageError("a second layout draws a change, --to a mapping; give one of them")
    where = None if on == ("none",) else machine(on)
    if where is None and on != ("none",):
        return  # --on live: the first rank of the job draws
    if target is not None:
        ends = read(sizes, target, world_size, rank_offset, to_offset)
        drawing = draw_picture(RankMapping(*ends, along), where, groups)
    elif after is not None:
        change = difference(*read(sizes, after, world_size, rank_offset, rank_offset))
        drawing = draw_picture(change, where, groups)
    else:
        layout = RankLayout.parse(sizes, world_size=world_size, rank_offset=rank_offset)
        drawing = draw_picture(layout, where, groups)
    if output is None:
        console().print(drawing)
    else:
        drawing.save(output, force)
        click.echo(f"{output}: {Path(output).stat().st_size:,} bytes", err=True)
