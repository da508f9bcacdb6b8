"""`hypercomm plan`: show the coordinates and groups of a layout, without starting a process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import click
import numpy as np
from rich.markup import escape
from rich.table import Column

from hypercomm.cli import options
from hypercomm.cli.options import Key, read_keys, read_views
from hypercomm.cli.printing import console, numbers, print_json, table
from hypercomm.errors import LayoutError
from hypercomm.launchers import find_number
from hypercomm.layout import RankGroups, RankLayout
from hypercomm.layout.parsing import OPEN, parse_sizes
from hypercomm.layout.text import counted, format_coords

_EXAMPLE = 16
"""Ranks of an example group that JSON shows, at most."""

_MOST_RANKS = 2**24
"""Ranks that are enumerated in a fraction of a second for each combination."""


@click.command(short_help="Show coordinates and groups of a layout of any size.")
@options.sizes
@click.option(
    "--world-size",
    type=click.IntRange(min=1),
    help="Infer the one size that is -1 from this. Default: the job's, if a launcher sets it.",
)
@click.option("--rank-offset", type=click.IntRange(min=0), default=0, help="The smallest rank.")
@click.option("--rank", type=int, help="Show the coordinates of this rank, and its groups.")
@click.option(
    "--gpus-per-node",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    help="Ranks on each host.",
)
@options.groups
@options.views
@options.as_json
def plan(
    sizes: str,
    world_size: int | None,
    rank_offset: int,
    rank: int | None,
    gpus_per_node: int,
    wanted: list[tuple[str, ...]] | None,
    views: Sequence[str],
    as_json: bool,
) -> None:
    """Show coordinates and groups of a layout such as tp=8,cp=2,dp=64,pp=8.

    The first dim varies fastest. Nothing is started, and torch is not loaded.
    """
    layout = _read_layout(sizes, world_size, rank_offset)
    others = read_views(layout, views)
    if rank is None:
        rank = layout.rank_offset
    found: dict[str, Any] = {
        "layout": str(layout),
        "ranks": layout.size,
        "rank_offset": layout.rank_offset,
        "hosts": hosts_touched(layout.groups(*layout.dim_names), gpus_per_node)[1],
        "gpus_per_node": gpus_per_node,
        "rank": rank,
        "coords": layout.coords(rank),
        "views": {
            name: {
                "layout": str(view.layout),
                "shared_dims": view.shared_dims,
                "coords": view.layout.coords(rank),
            }
            for name, view in others.items()
        },
        "groups": [
            _groups_over(others.layout_of(key.view), key, rank, gpus_per_node)
            for key in read_keys(others, wanted)
        ],
    }
    if as_json:
        print_json(found)
    else:
        _show(layout, found)


def _read_layout(text: str, world_size: int | None, rank_offset: int) -> RankLayout:
    """Read sizes; one that is unspecified fills the job whose variables are set, if any."""
    room = "" if world_size is None else f"--world-size is {world_size}"
    if world_size is None and OPEN in parse_sizes(text).values():
        job = find_number("WORLD_SIZE", os.environ)
        if job is not None:
            world_size, room = job[0], f"the job has {job[0]} ({job[1]})"
    layout = options.read_layout(text, world_size, room, rank_offset)
    if layout.size > _MOST_RANKS:
        raise LayoutError(f"{layout} has {layout.size:,} ranks; plan shows up to {_MOST_RANKS:,}")
    return layout


def _groups_over(layout: RankLayout, key: Key, rank: int, gpus_per_node: int) -> dict[str, Any]:
    """Return the facts of the groups over some dims, with the rank's own as an example."""
    groups = layout.groups(*key.dims)
    own = groups.of(rank)
    return {
        "view": key.view,
        "dims": key.dims,
        "groups": len(groups),
        "size": groups.group_size,
        "strides": [layout.strides[layout.dim_names.index(dim)] for dim in key.dims],
        "example": own[:_EXAMPLE],
        "last": own[-1],
        "hosts_per_group": hosts_touched(groups, gpus_per_node),
    }


def hosts_touched(groups: RankGroups, ranks_per_host: int) -> tuple[int, int]:
    """Return the smallest and the largest number of hosts of a group.

    Example:
        >>> layout = RankLayout.parse("tp=4,dp=6")
        >>> hosts_touched(layout.groups("tp"), 8), hosts_touched(layout.groups("dp"), 8)
        ((1, 1), (3, 3))
    """
    hosts = np.sort(groups.to_array() // ranks_per_host, axis=1)
    counts = 1 + np.count_nonzero(np.diff(hosts, axis=1), axis=1)
    return int(counts.min()), int(counts.max())


def _show(layout: RankLayout, found: dict[str, Any]) -> None:
    hosts = f"{counted(found['hosts'], 'host')} of {found['gpus_per_node']}"
    ranks = f"{found['ranks']:,} ranks {layout.rank_offset}..{layout.last_rank}"
    lines = [
        f"{layout}: {ranks}; the first dim varies fastest",
        f"{hosts}; rank {found['rank']} is at {format_coords(found['coords'])}",
    ]
    lines += [
        f"{name}: {view['layout']}; rank {found['rank']} is at {format_coords(view['coords'])}"
        for name, view in found["views"].items()
    ]
    out = console()
    for line in lines:
        out.print(line, markup=False, soft_wrap=True)
    titles = map(numbers, ("groups", "size", "strides", "hosts"))
    own = Column(f"group of rank {found['rank']}", no_wrap=True)
    rows = table(Column("dims", no_wrap=True), *titles, own)
    for groups in found["groups"]:
        example = groups["example"]
        rows.add_row(
            escape(str(Key(groups["view"], groups["dims"]))),
            f"{groups['groups']:,}",
            f"{groups['size']:,}",
            " ".join(map(str, groups["strides"])),
            "..".join(f"{count:,}" for count in dict.fromkeys(groups["hosts_per_group"])),
            " ".join(map(str, example))
            if groups["size"] <= 4
            else f"{example[0]} {example[1]} .. {groups['last']}",
        )
    out.print(rows)
