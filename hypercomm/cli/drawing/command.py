"""The command `draw`: what it takes, what goes together, and what comes of it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import click

from hypercomm.cli import options
from hypercomm.cli.diff import read
from hypercomm.cli.drawing.showing import show
from hypercomm.cli.live import machine
from hypercomm.draw.drawing import writable
from hypercomm.errors import NotationError
from hypercomm.layout import RankLayout, RankMapping
from hypercomm.layout.difference import difference
from hypercomm.layout.parsing import parse_groups


def _read_shape(_: object, __: object, text: str | None) -> list[int] | None:
    if text is None:
        return None
    try:
        return [int(length) for length in text.split(",")]
    except ValueError as error:
        raise NotationError(f"--shape {text!r} must be lengths, as in 4096,8192") from error


def _read_dims(_: object, __: object, text: str | None) -> tuple[str, ...] | None:
    """Both tp+dp and tp,dp mean the groups over both."""
    return None if text is None else tuple(dim for dims in parse_groups(text) for dim in dims)


@click.command(short_help="Draw a layout, a change of layout or a mapping.")
@options.sizes
@click.argument("after", required=False)
@click.option("--to", "target", metavar="SIZES", help="Draw who sends what to whom: a mapping.")
@click.option(
    "--on",
    metavar="HOSTS",
    multiple=True,
    default=["8"],
    show_default=True,
    help="Where ranks are: GPUs for each host and domain (8 or 4,72), a hostfile, a node list, "
    "topology.conf, topology.yaml, labels or switches as JSON, or live in a job; none: not shown. "
    "Several times: the first names the hosts in order, others say more of them.",
)
@click.option(
    "--dims",
    metavar="DIMS",
    callback=_read_dims,
    help="The dims whose groups are lit, as in tp+dp. Default: each dim.",
)
@click.option(
    *("--groups", "wanted"),
    metavar="DIMS",
    callback=options.read_groups,
    help="Several such, each with a picture of its own, as in tp,dp+cp.",
)
@click.option("--world-size", type=int, help="Infer the one size that is -1 from this.")
@click.option("--rank-offset", default=0, help="The smallest rank.")
@click.option("--to-offset", type=int, help="With --to: the smallest rank there.  [default: 0]")
@click.option("--along", help="With --to: the dim that splits the batch.  [default: dp]")
@click.option(
    "--shape", metavar="LENGTHS", callback=_read_shape, help="With --to: the whole tensor's."
)
@click.option("--itemsize", type=int, help="With --shape: the bytes of an element.")
@click.option(
    *("-o", "--output"),
    metavar="FILE",
    help="Write a file: .svg, .html, .png or .txt. Default: show it in the terminal.",
)
@click.option("--force", is_flag=True, help="Replace the file where there is one.")
def draw(
    sizes: str,
    after: str | None,
    target: str | None,
    on: tuple[str, ...],
    dims: tuple[str, ...] | None,
    wanted: list[tuple[str, ...]] | None,
    world_size: int | None,
    rank_offset: int,
    to_offset: int | None,
    along: str | None,
    shape: list[int] | None,
    itemsize: int | None,
    output: str | None,
    force: bool,
) -> None:
    """Draw a layout such as tp=8,dp=4,pp=2: ranks on their hosts, and groups as colours.

    With a second layout, draw what a change to it keeps, ends and makes; with --to, who sends what
    to whom. Nothing is started, and torch is not loaded, but with --on live.
    """
    of_mappings = {
        "--to-offset": to_offset,
        "--along": along,
        "--shape": shape,
        "--itemsize": itemsize,
    }
    _check(after, target, {"--dims": dims, "--groups": wanted}, of_mappings)
    if force and output is None:
        raise click.UsageError("--force needs a file: -o grid.svg")
    if output is not None:
        writable(output, force)  # before anything is worked out
    where = None
    if on != ("none",):
        where = machine(on)
        if where is None:
            return
    if target is not None:
        mapping = RankMapping(
            _layout(sizes, world_size, rank_offset),
            _layout(target, world_size, to_offset or 0, "--to-offset"),
            along or "dp",
        )
        drawing = mapping.draw(shape, itemsize, on=where)
    elif after is not None:
        changes = difference(*read(sizes, after, world_size, rank_offset, rank_offset))
        drawing = changes.draw(where, dims)
    else:
        layout = _layout(sizes, world_size, rank_offset)
        drawing = layout.draw(where, dims, groups=wanted)
    if output is not None:
        drawing.save(output, force)
        click.echo(f"{output}: {Path(output).stat().st_size:,} bytes", err=True)
    else:
        show(drawing)


def _check(
    after: str | None,
    target: str | None,
    of_groups: Mapping[str, object],
    of_mappings: Mapping[str, object],
) -> None:
    """Refuse what does not go together."""

    def given(those: Mapping[str, object]) -> list[str]:
        return [option for option, value in those.items() if value is not None]

    if after is not None and target is not None:
        raise click.UsageError("a second layout draws a change, --to a mapping; give one of them")
    if len(given(of_groups)) > 1:
        raise click.UsageError("--dims lights groups in one picture, --groups in several; give one")
    if target is not None and given(of_groups):
        raise click.UsageError(f"a mapping has no groups; leave {given(of_groups)[0]} out")
    if after is not None and of_groups["--groups"] is not None:
        raise click.UsageError("a change is drawn for --dims; leave --groups out")
    if target is None and given(of_mappings):
        raise click.UsageError(f"{given(of_mappings)[0]} is about a mapping, which needs --to")


def _layout(
    text: str, world_size: int | None, rank_offset: int, option: str = "--rank-offset"
) -> RankLayout:
    room = ""
    if world_size is None and options.is_open(text):
        world_size, room = options.size_of_job()
    return options.read_layout(
        text,
        world_size,
        "--world-size",
        room=room,
        rank_offset=rank_offset,
        offset_option=option,
    )
