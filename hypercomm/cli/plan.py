"""`hypercomm plan`: what a layout looks like, from arithmetic alone."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import chain, combinations
from typing import TypedDict

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from hypercomm.errors import LayoutError
from hypercomm.layout import RankLayout
from hypercomm.layout.notation import format_coords
from hypercomm.layout.placement import hosts_touched

_EXAMPLE = 16
"""Ranks of an example group that a report holds, at most."""

_MANY_DIMS = 6
"""More dims than this have too many combinations to look at."""

_MOST_RANKS = 2**24
"""Ranks that are enumerated in a fraction of a second for each combination."""

_PIPED_WIDTH = 120
"""Columns of the table where no terminal sets them."""


class GroupsPlan(TypedDict):
    """The groups over some dims; the example is the beginning of the rank's own group."""

    dims: list[str]
    groups: int
    size: int
    strides: list[int]
    example: list[int]
    last: int
    hosts_per_group: list[int]


class PlanReport(TypedDict):
    """A layout, a rank of it, and its groups."""

    layout: str
    ranks: int
    rank_offset: int
    hosts: int
    gpus_per_node: int
    rank: int
    coords: dict[str, int]
    groups: list[GroupsPlan]


def combinations_of(layout: RankLayout) -> list[tuple[str, ...]]:
    """List every combination of dims, of many dims only the pairs; dims of size 1 add no ranks."""
    long = [name for name in layout.dim_names if layout.size_of(name) > 1]
    most = len(long) if len(long) <= _MANY_DIMS else 2
    single = [(name,) for name in layout.dim_names]
    return single + list(
        chain.from_iterable(combinations(long, count) for count in range(2, most + 1))
    )


def report(
    layout: RankLayout,
    wanted: Iterable[Sequence[str]] | None,
    gpus_per_node: int,
    rank: int | None,
) -> PlanReport:
    """Work out the plan; the example groups are those of `rank`, by default the smallest."""
    if layout.size > _MOST_RANKS:
        raise LayoutError(f"{layout} has {layout.size:,} ranks; plan shows up to {_MOST_RANKS:,}")
    rank = layout.rank_offset if rank is None else rank
    coords = layout.coords(rank)
    every_rank = layout.groups(*layout.dim_names)
    return PlanReport(
        layout=str(layout),
        ranks=layout.size,
        rank_offset=layout.rank_offset,
        hosts=hosts_touched(every_rank, gpus_per_node)[1],
        gpus_per_node=gpus_per_node,
        rank=rank,
        coords=coords,
        groups=[
            _groups_plan(layout, layout.order_dims(dims), gpus_per_node, rank)
            for dims in (combinations_of(layout) if wanted is None else wanted)
        ],
    )


def _groups_plan(
    layout: RankLayout, dims: Sequence[str], gpus_per_node: int, rank: int
) -> GroupsPlan:
    groups = layout.groups(*dims)
    return GroupsPlan(
        dims=list(dims),
        groups=len(groups),
        size=groups.group_size,
        strides=[layout.strides[layout.dim_names.index(dim)] for dim in dims],
        example=list(groups.of(rank)[:_EXAMPLE]),
        last=groups.of(rank)[-1],
        hosts_per_group=list(hosts_touched(groups, gpus_per_node)),
    )


def show(plan: PlanReport, *, as_json: bool) -> None:
    """Print the plan."""
    if as_json:
        print(json.dumps(plan))
        return
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_PIPED_WIDTH)
    last = plan["rank_offset"] + plan["ranks"] - 1
    at = format_coords(plan["coords"])
    console.print(
        f"[bold]{escape(plan['layout'])}[/]: {plan['ranks']:,} ranks "
        f"{plan['rank_offset']}..{last}; the first dim varies fastest\n"
        f"{plan['hosts']:,} host{'s' * (plan['hosts'] > 1)} of {plan['gpus_per_node']}; "
        f"rank {plan['rank']} is at {escape(at)}",
        soft_wrap=True,
    )
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("dims")
    for title in ("groups", "size", "strides", "hosts"):
        table.add_column(title, justify="right", no_wrap=True)
    table.add_column(f"group of rank {plan['rank']}", no_wrap=True)
    for row in plan["groups"]:
        table.add_row(
            escape("+".join(row["dims"])),
            f"{row['groups']:,}",
            f"{row['size']:,}",
            " ".join(map(str, row["strides"])),
            "..".join(f"{count:,}" for count in dict.fromkeys(row["hosts_per_group"])),
            _shorten(row["example"], row["size"], row["last"]),
        )
    console.print(table)
    console.print("hosts: how many of them each group reaches")


def _shorten(example: Sequence[int], size: int, last: int) -> str:
    """Write the ranks of a group, leaving out the middle of a long one."""
    if size <= 4:
        return " ".join(map(str, example))
    return f"{example[0]} {example[1]} .. {last}"
