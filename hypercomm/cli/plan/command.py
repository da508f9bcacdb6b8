"""The command `hypercomm plan`: its options, and what it finds out."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import attrs
import click

from hypercomm.cli import options
from hypercomm.cli.plan import screen
from hypercomm.cli.plan.communicators import NCCL_CHANNELS, count, nccl_bytes
from hypercomm.cli.plan.keys import (
    AskedViews,
    Key,
    most_used_first,
    read_keys,
    read_views,
)
from hypercomm.cli.plan.schema import SCHEMA
from hypercomm.cli.printing import schema_option
from hypercomm.errors import LayoutError, NotationError
from hypercomm.layout import RankLayout
from hypercomm.layout.groups import hosts_touched

_EXAMPLE = 16
"""Ranks of an example group that JSON shows, at most."""

_MOST_RANKS = 2**24
"""Ranks that are enumerated in a fraction of a second for each combination."""

_MOST_PLACES = 2**20
"""Ranks whose places are listed in a few seconds."""


@click.command(
    short_help="Show coordinates and groups of a layout of any size, and what they cost."
)
@options.sizes
@click.option(
    "--world-size",
    type=int,
    help="Infer the one size that is -1 from this. Default: the job's, where a launcher tells.",
)
@click.option("--rank-offset", default=0, help="The smallest rank.")
@click.option("--rank", type=int, help="Show where this rank is, and its groups.")
@click.option(
    "--ranks",
    metavar="RANKS",
    help="Show where these are, in place of the groups, as in 0..7,12 or all.",
)
@click.option(
    "--gpus-per-node",
    type=click.IntRange(min=1),
    default=8,
    show_default=True,
    help="Ranks on each host.",
)
@options.groups
@click.option(
    "--max-dims",
    type=click.IntRange(min=1),
    help="Every combination of up to so many dims. Default: what fits on the screen, first those "
    "that Megatron and FSDP use.",
)
@click.option(
    *("--view", "views"),
    multiple=True,
    metavar="NAME:SIZES",
    help="Show another factorisation, too, as in expert:ep=4,rest=-1. May be given several times.",
)
@click.option(
    "--nccl-channels",
    type=click.IntRange(min=1, max=64),
    default=NCCL_CHANNELS,
    show_default=True,
    help='What NCCL\'s log calls "coll channels"; its memory grows with them.',
)
@options.as_json
@schema_option(SCHEMA)
def plan(
    sizes: str,
    world_size: int | None,
    rank_offset: int,
    rank: int | None,
    ranks: str | None,
    gpus_per_node: int,
    wanted: list[tuple[str, ...]] | None,
    max_dims: int | None,
    views: Sequence[str],
    nccl_channels: int,
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
    others = read_views(layout, views)
    asked = Plan(layout, others, gpus_per_node, nccl_channels, rank)
    head = asked.head()
    if ranks is not None:
        places = asked.places(_read_ranks(ranks, layout))
        if as_json:
            print(json.dumps(head | asked.groups([]) | {"places": places}))
        else:
            screen.show_places(layout, others, places)
        return
    every = _keys(layout, others, wanted, max_dims)
    if as_json:
        print(json.dumps(head | asked.groups(every)))
        return
    if wanted is None:
        every = most_used_first(every)
    if wanted is None and max_dims is None:
        lines = screen.headlines(layout, head, every)
        shown = every[: screen.room_for(every, lines)]
    else:
        lines, shown = screen.headlines(layout, head), every
    screen.show(lines, head | asked.groups(shown), left_out=len(every) - len(shown))


def _keys(
    layout: RankLayout,
    views: AskedViews,
    wanted: Sequence[tuple[str, ...]] | None,
    max_dims: int | None,
) -> list[Key]:
    if wanted is not None and max_dims is not None:
        raise NotationError("--groups and --max-dims both say which groups to show; give one")
    many = sum(size > 1 for size in layout.shape)
    if wanted is None and max_dims is not None and many > 12 and max_dims > 3:
        raise LayoutError(
            f"{layout} has {many} dims, and so too many combinations of up to {max_dims}; give "
            f"--max-dims of at most 3, or --groups"
        )
    return read_keys(layout, views, wanted, max_dims)


def _read_ranks(text: str, layout: RankLayout) -> list[int]:
    """Read ranks such as "0..7,12", or "all" of a layout.

    Raises:
        NotationError: The text cannot be read, or there are too many.
    """
    first, last = layout.rank_offset, layout.rank_offset + layout.size - 1
    found: list[int] = []
    for part in [f"{first}..{last}"] if text.strip() == "all" else text.split(","):
        begin, dots, end = part.partition("..")
        ends = [begin, end if dots else begin]
        if not all(number.strip().isascii() and number.strip().isdigit() for number in ends):
            raise NotationError(f"{part.strip()!r} is no rank; write ranks like '0..7,12' or 'all'")
        low, high = map(int, ends)
        if high < low:
            raise NotationError(f"{part.strip()!r} ends before it begins; write it like '0..7'")
        if len(found) + high - low >= _MOST_PLACES:
            raise NotationError(f"--ranks {text!r} are more than {_MOST_PLACES:,}, the most listed")
        found += range(low, high + 1)
    return found


@attrs.frozen
class Plan:
    """What a layout is looked at for.

    Attributes:
        layout: The layout.
        views: Its other factorisations.
        gpus_per_node: Ranks on each host.
        nccl_channels: Of each communicator.
        asked_rank: The rank whose groups are shown; default: the smallest.
    """

    layout: RankLayout
    views: AskedViews
    gpus_per_node: int
    nccl_channels: int
    asked_rank: int | None

    @property
    def rank(self) -> int:
        """The rank whose groups are shown."""
        return self.layout.rank_offset if self.asked_rank is None else self.asked_rank

    def head(self) -> dict[str, Any]:
        """Return what there is to know of the layout and the rank, as JSON can hold it.

        Raises:
            RankOutsideError: The layout has no such rank.
        """
        layout = self.layout
        return {
            "layout": str(layout),
            "ranks": layout.size,
            "rank_offset": layout.rank_offset,
            "hosts": hosts_touched(layout.groups(*layout.dim_names), self.gpus_per_node)[1],
            "gpus_per_node": self.gpus_per_node,
            "rank": self.rank,
            "coords": layout.coords(self.rank),
            "views": {
                name: {
                    "layout": str(view),
                    "shared_dims": list(shared),
                    "coords": view.coords(self.rank),
                }
                for name, view, shared in self.views
            },
        }

    def groups(self, keys: Sequence[Key]) -> dict[str, Any]:
        """Return what there is to know of groups, and of the communicators that they make.

        Raises:
            UnknownDimError: Neither the layout nor a view has the dims.
        """
        single = [Key(None, (name,)) for name in self.layout.dim_names]
        for name, view, shared in self.views:
            single += [Key(name, (dim,)) for dim in view.dim_names if dim not in shared]
        return {
            "groups": [self._groups_over(key) for key in keys],
            "communicators": {
                "nccl_channels": self.nccl_channels,
                "nccl_bytes_each": nccl_bytes(self.nccl_channels),
                "single_dims": self._communicators(single),
                "groups": self._communicators(keys),
            },
        }

    def places(self, ranks: Sequence[int]) -> list[dict[str, Any]]:
        """Return where ranks are.

        Raises:
            RankOutsideError: The layout has no such rank.
        """
        return [
            {
                "rank": rank,
                "host": rank // self.gpus_per_node,
                "coords": self.layout.coords(rank),
                "views": {name: view.coords(rank) for name, view, _ in self.views},
            }
            for rank in ranks
        ]

    def _layout_of(self, key: Key) -> RankLayout:
        return next((view for name, view, _ in self.views if name == key.view), self.layout)

    def _groups_over(self, key: Key) -> dict[str, Any]:
        """Describe the groups over some dims, and the beginning of the rank's own."""
        layout = self._layout_of(key)
        groups = layout.groups(*key.dims)
        own = groups.of(self.rank)
        return {
            "view": key.view,
            "dims": key.dims,
            "groups": len(groups),
            "size": groups.group_size,
            "strides": [layout.strides[layout.dim_names.index(dim)] for dim in key.dims],
            "example": own[:_EXAMPLE],
            "last": own[-1],
            "hosts_per_group": hosts_touched(groups, self.gpus_per_node),
        }

    def _communicators(self, keys: Sequence[Key]) -> dict[str, Any]:
        """Count those of each rank that creates these groups."""
        each = nccl_bytes(self.nccl_channels)
        return {
            share: {
                "process_groups": found.groups,
                "communicators": found.connected,
                "nccl_bytes": found.connected * each,
                "gloo_sockets": found.sockets,
            }
            for share, found in zip(
                ("never", "identical"), count(keys, self._layout_of), strict=True
            )
        }
