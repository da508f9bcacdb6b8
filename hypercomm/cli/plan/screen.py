"""What `hypercomm plan` prints: on one screen, unless more is asked for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.markup import escape
from rich.table import Column
from rich.text import Text

from hypercomm.cli.plan.keys import AskedViews, Key
from hypercomm.cli.plan.picture import picture
from hypercomm.cli.printing import console, numbers, table
from hypercomm.layout import RankLayout
from hypercomm.layout.text import counted, format_coords

_LINES, _COLUMNS = 24, 80
"""The screen that is thought of where there is none."""

_NARROW = 72
"""Columns below which strides and sockets are left out."""

_FIXED = 2 + 3 + 2
"""Lines that are always there: the head of the groups, the communicators, and what they say."""


def headlines(
    layout: RankLayout, found: dict[str, Any], keys: Sequence[Key] | None = None
) -> list[str]:
    """Return the lines above the groups, the small world itself among them.

    Args:
        layout: The layout.
        found: What is known, as JSON has it.
        keys: What is shown below as far as there is room, for which the small world gives way;
            default: nothing that the screen must hold.
    """
    last = found["rank_offset"] + found["ranks"] - 1
    hosts = f"{counted(found['hosts'], 'host')} of {found['gpus_per_node']}"
    ranks = f"{found['ranks']:,} ranks {found['rank_offset']}..{last}"
    lines = [
        f"{found['layout']}: {ranks}; the first dim varies fastest",
        f"{hosts}; rank {found['rank']} is at {format_coords(found['coords'])}",
    ]
    lines += [
        f"{name}: {view['layout']}; there it is at {format_coords(view['coords'])}"
        for name, view in found["views"].items()
    ]
    room = None if keys is None else _room_below(lines) - _fewest(keys)
    return lines + picture(layout, found["gpus_per_node"], found["rank"], _screen()[1], room)


def room_for(keys: Sequence[Key], lines: Sequence[str]) -> int:
    """Return how many sets of groups fit on the screen; those of single dims are shown always.

    Args:
        keys: All of them, those of single dims first.
        lines: What stands above.
    """
    room = _room_below(lines)
    return (
        len(keys)
        if len(keys) <= room
        else max(_single(keys), room - _height(_more(len(keys), len(keys))))
    )


def _screen() -> tuple[int, int]:
    """The lines and columns that there are."""
    out = console()
    return (out.height, out.width) if out.is_terminal else (_LINES, _COLUMNS)


def _height(line: str) -> int:
    """The lines of the screen that a line takes."""
    return max(1, len(Text(line).wrap(console(), _screen()[1])))


def _room_below(lines: Sequence[str]) -> int:
    """The lines for groups below some lines, the shell's next one being kept."""
    return _screen()[0] - 1 - _FIXED - sum(map(_height, lines))


def _fewest(keys: Sequence[Key]) -> int:
    """The lines of the groups of single dims, and of what tells of others."""
    single = _single(keys)
    return single + (_height(_more(len(keys), len(keys))) if len(keys) > single else 0)


def _single(keys: Sequence[Key]) -> int:
    return sum(len(key.dims) == 1 for key in keys)


def _more(left_out: int, every: int) -> str:
    """What tells of sets of groups that are not shown."""
    return f"and {left_out} more of {every}: --max-dims, or --groups, shows them"


def show(lines: Sequence[str], found: dict[str, Any], left_out: int) -> None:
    """Print a plan.

    Args:
        lines: What stands above the groups.
        found: What is known, as JSON has it.
        left_out: How many sets of groups are not shown.
    """
    out = console()
    for line in lines:
        out.print(escape(line), soft_wrap=not out.is_terminal)
    out.print(_groups(found))
    if left_out:
        out.print(_more(left_out, len(found["groups"]) + left_out))
    _show_communicators(found)


def _groups(found: dict[str, Any]) -> Any:
    is_narrow = console().width < _NARROW
    titles = map(numbers, ("groups", "size", *(() if is_narrow else ("strides",)), "hosts"))
    title = f"rank {found['rank']}'s" if is_narrow else f"group of rank {found['rank']}"
    own = Column(title, no_wrap=True)
    names = [escape(str(Key(groups["view"], groups["dims"]))) for groups in found["groups"]]
    dims = Column("dims", no_wrap=True, min_width=max(map(len, names), default=0))
    made = table(dims, *titles, own, show_edge=False, padding=(0, 0 if is_narrow else 1))
    for name, groups in zip(names, found["groups"], strict=True):
        example = groups["example"]
        made.add_row(
            name,
            f"{groups['groups']:,}",
            f"{groups['size']:,}",
            *(() if is_narrow else (" ".join(map(str, groups["strides"])),)),
            "..".join(f"{count:,}" for count in dict.fromkeys(groups["hosts_per_group"])),
            " ".join(map(str, example))
            if groups["size"] <= 4
            else f"{example[0]} {example[1]} .. {groups['last']}",
        )
    return made


def _show_communicators(found: dict[str, Any]) -> None:
    out, all_of_them = console(), found["communicators"]
    is_narrow = out.width < _NARROW
    sockets = () if is_narrow else ("gloo",)
    titles = ("groups", "NCCL", *sockets, "shared", "NCCL", *sockets)
    label = Column("" if is_narrow else "each rank's", no_wrap=True)
    made = table(label, *map(numbers, titles), box=None, header_style="bold")
    listed = len(found["groups"])
    rows = {"single dims": "single_dims", f"all {listed} above": "groups"}
    for title, key in rows.items():
        cells: list[str] = []
        for costs in (all_of_them[key]["never"], all_of_them[key]["identical"]):
            cells += [f"{costs['process_groups']:,}", _size(costs["nccl_bytes"])]
            cells += [f"{costs['gloo_sockets']:,}" for _ in sockets]
        made.add_row(title.rpartition(" ")[0] if is_narrow else title, *cells)
    out.print(made)
    each = _size(all_of_them["nccl_bytes_each"])
    out.print(
        f'hosts: that each group reaches; shared: with share="identical"; gloo: sockets\n'
        f"NCCL: about {each} each, of 2 ranks or more on {all_of_them['nccl_channels']} "
        f"channels (--nccl-channels)",
        no_wrap=True,
        overflow="ellipsis",
    )


def show_places(layout: RankLayout, views: AskedViews, places: Sequence[dict[str, Any]]) -> None:
    """Print where ranks are, a line for each.

    Args:
        layout: The layout.
        views: Its other factorisations.
        places: As JSON has them.
    """
    heads = ["rank", *layout.dim_names]
    heads += [f"{name}:{dim}" for name, view, _ in views for dim in view.dim_names]
    heads.append("host")
    lines = [
        [place["rank"], *place["coords"].values()]
        + [index for coords in place["views"].values() for index in coords.values()]
        + [place["host"]]
        for place in places
    ]
    wide = [
        max(len(head), len(str(max((line[at] for line in lines), default=0))))
        for at, head in enumerate(heads)
    ]
    for line in [heads, *lines]:
        print("  ".join(f"{cell:>{width}}" for cell, width in zip(line, wide, strict=True)))


def _size(count: int) -> str:
    """Write a number of bytes.

    >>> _size(0), _size(308281344), _size(4 * 2**30)
    ('0', '294 MiB', '4.0 GiB')
    """
    if count == 0:
        return "0"
    return f"{count / 2**20:.0f} MiB" if count < 2**30 else f"{count / 2**30:,.1f} GiB"
