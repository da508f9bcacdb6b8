"""`hypercomm plan`: show the coordinates and groups of a layout, without starting a process."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from hypercomm.cli import options
from hypercomm.cli.options import Key, read_keys, read_layout, read_views
from hypercomm.cli.printing import print_json, print_lines
from hypercomm.errors import LayoutError
from hypercomm.job_environment import find_number
from hypercomm.layout import RankLayout
from hypercomm.layout.parsing import UNSPECIFIED, parse_sizes
from hypercomm.layout.text import aligned, format_coords, format_range, pluralize
from hypercomm.tools.launch_files.command import with_files
from hypercomm.tools.place.command import on_option
from hypercomm.tools.place.live import machine
from hypercomm.tools.place.placing import units_of_groups
from hypercomm.tools.place.reading import read_topology

_EXAMPLE = 16
"""JSON shows at most this many ranks of an example group."""

_MOST_RANKS = 2**24
"""The most ranks of a layout, chosen so that enumerating groups takes less than a second."""


@with_files("sizes")
@click.command()
@options.sizes
@options.world_size("Default in a job: the ranks of the job.")
@click.option("--rank-offset", type=click.IntRange(min=0), default=0, help="The smallest rank.")
@click.option("--rank", type=int, help="Show the coordinates of this rank, and its groups.")
@on_option("8")
@options.groups
@options.views
@options.as_json
def plan(
    sizes: str,
    world_size: int | None,
    rank_offset: int,
    rank: int | None,
    on: Sequence[str],
    wanted: list[tuple[str, ...]] | None,
    views: Sequence[str],
    as_json: bool,
) -> None:
    """Show a layout and its groups.

    For sizes such as tp=8,cp=2,dp=64,pp=8, show the coordinates of a rank, and its groups. The
    first dim varies fastest. No process is started, and torch is loaded for --on live only.
    """
    layout = _read_layout(sizes, world_size, rank_offset)
    where = machine(on)
    if where is None:
        return  # with --on live, only the first rank of the job prints
    topology = read_topology(where, layout.last_rank + 1)
    if "host" not in topology.names:
        raise LayoutError(
            f"--on describes {' and '.join(topology.names)}, but no hosts; add the GPUs per host, "
            f"as in --on 4"
        )
    hosts = topology.level("host").of_rank
    others = read_views(layout, views)
    if rank is None:
        rank = layout.rank_offset
    found: dict[str, Any] = {
        "layout": str(layout),
        "ranks": layout.size,
        "rank_offset": layout.rank_offset,
        **_hosts_of(layout, hosts),
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
            _groups_over(others.layout_of(key.view), key, rank, hosts)
            for key in read_keys(others, wanted)
        ],
    }
    if as_json:
        print_json(found)
    else:
        _show(layout, found)


def _read_layout(text: str, world_size: int | None, rank_offset: int) -> RankLayout:
    """Return the layout with the given sizes.

    Without a world size, a size of -1 is inferred from the number of ranks of a launcher's job.
    """
    room = ""
    if world_size is None and UNSPECIFIED in parse_sizes(text).values():
        job = find_number("WORLD_SIZE", os.environ)
        if job is not None:
            world_size, source = job
            room = f"the job has {world_size} ({source})"
    layout = read_layout(text, world_size, "--world-size", room, rank_offset)
    if layout.size > _MOST_RANKS:
        raise LayoutError(f"{layout} has {layout.size:,} ranks; plan shows up to {_MOST_RANKS:,}")
    return layout


def _hosts_of(layout: RankLayout, hosts: NDArray[np.int64]) -> dict[str, Any]:
    """Return the number of hosts, and the smallest and largest number of ranks on a host.

    >>> _hosts_of(RankLayout("tp=3", rank_offset=1), np.array([0, 0, 1, 1]))
    {'hosts': 2, 'ranks_per_host': (1, 2)}
    """
    counts = np.bincount(hosts[np.asarray(layout.ranks)])
    used = counts[counts > 0]
    return {"hosts": used.size, "ranks_per_host": (int(np.min(used)), int(np.max(used)))}


def _groups_over(
    layout: RankLayout, key: Key, rank: int, hosts: NDArray[np.int64]
) -> dict[str, Any]:
    """Return the table row of the groups over some dims.

    Args:
        layout: The layout or view that has the dims.
        key: The dims.
        rank: The rank whose group is shown as an example.
        hosts: The index of each rank's host.
    """
    groups = layout.groups(*key.dims)
    own = groups.of(rank)
    counts = units_of_groups(hosts[groups.to_array()])
    return {
        "view": key.view,
        "dims": key.dims,
        "groups": len(groups),
        "size": groups.group_size,
        "strides": [layout.strides[layout.dim_names.index(dim)] for dim in key.dims],
        "example": own[:_EXAMPLE],
        "last": own[-1],
        "hosts_per_group": (int(np.min(counts)), int(np.max(counts))),
    }


def _show(layout: RankLayout, found: dict[str, Any]) -> None:
    hosts = f"{pluralize(found['hosts'], 'host')} of {format_range(*found['ranks_per_host'])}"
    ranks = f"{found['ranks']:,} ranks {layout.rank_offset}..{layout.last_rank}"
    lines = [
        f"{layout}: {ranks}; the first dim varies fastest",
        f"{hosts}; rank {found['rank']} is at {format_coords(found['coords'])}",
    ]
    lines += [
        f"{name}: {view['layout']}; rank {found['rank']} is at {format_coords(view['coords'])}"
        for name, view in found["views"].items()
    ]
    rows = [("dims", "groups", "size", "strides", "hosts", f"group of rank {found['rank']}")]
    for groups in found["groups"]:
        example = groups["example"]
        own = " ".join(map(str, example))
        if groups["size"] > 4:
            own = f"{example[0]} {example[1]} .. {groups['last']}"
        rows.append(
            (
                str(Key(groups["view"], groups["dims"])),
                f"{groups['groups']:,}",
                f"{groups['size']:,}",
                " ".join(map(str, groups["strides"])),
                format_range(*groups["hosts_per_group"]),
                own,
            )
        )
    print_lines([*lines, *aligned(rows)])
