"""`hypercomm plan`: what a layout looks like, from arithmetic alone."""

from __future__ import annotations

import json
from collections.abc import Sequence
from itertools import chain, combinations
from typing import Any

import click
from rich.markup import escape
from rich.table import Column

from hypercomm.cli import options
from hypercomm.cli.printing import console, numbers, table
from hypercomm.errors import LayoutError
from hypercomm.layout import RankLayout
from hypercomm.layout.groups.hosts import hosts_touched
from hypercomm.layout.reading.notation import format_coords

_EXAMPLE = 16
"""Ranks of an example group that JSON shows, at most."""

_MANY_DIMS = 6
"""More dims than this have too many combinations to look at."""

_MOST_RANKS = 2**24
"""Ranks that are enumerated in a fraction of a second for each combination."""


@click.command(short_help="Show coordinates and groups of a layout of any size.")
@options.sizes
@click.option(
    "--world-size",
    type=int,
    help="Infer the one size that is -1 from this. Default: the job's, where a launcher tells.",
)
@click.option("--rank-offset", default=0, help="The smallest rank.")
@click.option("--rank", type=int, help="Show where this rank is, and its groups.")
@click.option(
    "--gpus-per-node",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    help="Ranks on each host.",
)
@options.groups
@options.as_json
def plan(
    sizes: str,
    world_size: int | None,
    rank_offset: int,
    rank: int | None,
    gpus_per_node: int,
    wanted: list[tuple[str, ...]] | None,
    as_json: bool,
) -> None:
    """Show coordinates and groups of a layout such as tp=8,cp=2,dp=64,pp=8.

    The first dim varies fastest. Nothing is started, and torch is not loaded.
    """
    room = ""
    if world_size is None and options.is_open(sizes):
        world_size, room = options.size_of_job()
    layout = options.read_layout(
        sizes, world_size, "--world-size", room=room, rank_offset=rank_offset
    )
    if layout.size > _MOST_RANKS:
        raise LayoutError(f"{layout} has {layout.size:,} ranks; plan shows up to {_MOST_RANKS:,}")
    rank = layout.rank_offset if rank is None else rank
    found = {
        "layout": str(layout),
        "ranks": layout.size,
        "rank_offset": layout.rank_offset,
        "hosts": hosts_touched(layout.groups(*layout.dim_names), gpus_per_node)[1],
        "gpus_per_node": gpus_per_node,
        "rank": rank,
        "coords": layout.coords(rank),
        "groups": [
            _groups_over(layout, layout.order_dims(dims), gpus_per_node, rank)
            for dims in wanted or combinations_of(layout)
        ],
    }
    if as_json:
        print(json.dumps(found))
    else:
        _show(found)


def combinations_of(layout: RankLayout) -> list[tuple[str, ...]]:
    """List every combination of dims, of many dims only the pairs; dims of size 1 add no ranks."""
    long = [name for name in layout.dim_names if layout.size_of(name) > 1]
    most = len(long) if len(long) <= _MANY_DIMS else 2
    several = (combinations(long, count) for count in range(2, most + 1))
    return [(name,) for name in layout.dim_names] + list(chain.from_iterable(several))


def _groups_over(
    layout: RankLayout, dims: Sequence[str], gpus_per_node: int, rank: int
) -> dict[str, Any]:
    """Describe the groups over some dims, and the beginning of the rank's own."""
    groups = layout.groups(*dims)
    own = groups.of(rank)
    return {
        "dims": dims,
        "groups": len(groups),
        "size": groups.group_size,
        "strides": [layout.strides[layout.dim_names.index(dim)] for dim in dims],
        "example": own[:_EXAMPLE],
        "last": own[-1],
        "hosts_per_group": hosts_touched(groups, gpus_per_node),
    }


def _show(found: dict[str, Any]) -> None:
    out = console()
    last = found["rank_offset"] + found["ranks"] - 1
    out.print(
        f"[bold]{escape(found['layout'])}[/]: {found['ranks']:,} ranks "
        f"{found['rank_offset']}..{last}; the first dim varies fastest\n"
        f"{found['hosts']:,} host{'s' * (found['hosts'] > 1)} of {found['gpus_per_node']}; "
        f"rank {found['rank']} is at {escape(format_coords(found['coords']))}",
        soft_wrap=True,
    )
    titles = map(numbers, ("groups", "size", "strides", "hosts"))
    rows = table("dims", *titles, Column(f"group of rank {found['rank']}", no_wrap=True))
    for groups in found["groups"]:
        example = groups["example"]
        rows.add_row(
            escape("+".join(groups["dims"])),
            f"{groups['groups']:,}",
            f"{groups['size']:,}",
            " ".join(map(str, groups["strides"])),
            "..".join(f"{count:,}" for count in dict.fromkeys(groups["hosts_per_group"])),
            " ".join(map(str, example))
            if groups["size"] <= 4
            else f"{example[0]} {example[1]} .. {groups['last']}",
        )
    out.print(rows)
    out.print("hosts: how many of them each group reaches")
