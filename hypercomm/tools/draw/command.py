"""The command `hypercomm draw`."""

from __future__ import annotations

from collections.abc import Sequence

import click
from rich.console import Console

from hypercomm.cli import options
from hypercomm.cli.options import read_layout, read_views
from hypercomm.cli.printing import print_lines
from hypercomm.errors import LayoutError
from hypercomm.layout import RankLayout
from hypercomm.layout.difference import LayoutDifference, difference
from hypercomm.layout.parsing import UNSPECIFIED, parse_sizes
from hypercomm.layout.text import short_repr
from hypercomm.layout.views import Views
from hypercomm.tools.diff import read
from hypercomm.tools.draw.drawing import draw as draw_picture
from hypercomm.tools.launch_files.command import with_files
from hypercomm.tools.place.command import on_option
from hypercomm.tools.place.live import machine
from hypercomm.transfers.mapping import RankMapping

_PIPED_WIDTH = 120
"""The width of the text, in characters, unless stdout is a terminal."""


def _not_a_picture(_: object, __: object, text: str | None) -> str | None:
    if text is not None and text.endswith((".svg", ".png")):
        raise LayoutError(f"{short_repr(text)} is not a layout; to write a picture, add -o {text}")
    return text


@with_files("sizes", "after")
@click.command()
@click.argument("sizes")
@click.argument("after", required=False, callback=_not_a_picture)
@click.option("--to", "target", metavar="SIZES", help="Draw the messages of a mapping to SIZES.")
@options.world_size("Default of a change or a mapping: the ranks of the other layout.")
@on_option("8")
@click.option("--groups", help="The dims whose groups have colours, as in tp,dp+cp.")
@options.views
@click.option("-o", "--output", metavar="FILE", help="Write a file: .svg or .png.")
@click.option("--force", is_flag=True, help="Replace the file if it exists.")
def draw(
    sizes: str,
    after: str | None,
    target: str | None,
    world_size: int | None,
    on: tuple[str, ...],
    groups: str | None,
    views: Sequence[str],
    output: str | None,
    force: bool,
) -> None:
    """Draw a layout, a change or a mapping.

    Of a layout such as tp=8,dp=4,pp=2, draw the ranks on their hosts, and groups as colours. With a
    second layout, draw which groups a change keeps, ends and creates. With --to, draw the messages
    of a mapping. Large layouts are drawn as schematics. Without -o, print to the terminal. With -o,
    print the path of the file. With --on none, draw no hosts.
    """
    if after is not None and target is not None:
        raise LayoutError(
            "a second layout requests a picture of a change, and --to requests a picture of a "
            "mapping; give only one of them"
        )
    if views and (after is not None or target is not None):
        raise LayoutError("--view applies to a layout; leave it out for a change or a mapping")
    where = None if on == ("none",) else machine(on)
    if where is None and on != ("none",):
        return  # with --on live, only the first rank of the job draws
    what: Views | RankMapping | LayoutDifference
    if target is not None:
        what = _mapping(*read(_filled(sizes, world_size), _filled(target, world_size)))
    elif after is not None:
        what = difference(*read(_filled(sizes, world_size), _filled(after, world_size)))
    else:
        what = read_views(read_layout(sizes, world_size, "--world-size"), views)
        layouts = [what.base, *(view.layout for view in what.values())]
        dims = dict.fromkeys(
            dim for one in layouts for dim in one.dim_names if one.size_of(dim) > 1
        )
        groups = groups or (",".join(dims) if views else None)
    drawing = draw_picture(what, where, groups)
    screen = Console()
    if output is not None:
        drawing.save(output, force)
        print_lines([output])
    elif screen.is_terminal:
        screen.print(drawing)
    else:
        print_lines([drawing.text(_PIPED_WIDTH)])


def _filled(text: str, world_size: int | None) -> str:
    """Return sizes as text, with a size of -1 inferred from a number of ranks that is given."""
    if world_size is None or UNSPECIFIED not in parse_sizes(text).values():
        return text
    return str(read_layout(text, world_size, "--world-size"))


def _mapping(source: RankLayout, target: RankLayout) -> RankMapping:
    """Return the mapping that splits a batch along dp."""
    if "dp" not in source.dim_names and "dp" not in target.dim_names:
        raise LayoutError(
            f"--to maps a batch that is split along dim 'dp', and neither {source} nor {target} "
            f"has this dim; add it, as in '{source},dp=1'"
        )
    return RankMapping(source, target)
