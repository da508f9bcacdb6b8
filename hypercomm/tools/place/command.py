"""`hypercomm place`: show which groups cross hosts, domains and switches, and the best order."""

from __future__ import annotations

import json
from pathlib import Path

import click
from rich.markup import escape
from rich.table import Column, Table

from hypercomm.cli import options
from hypercomm.cli.printing import console, table
from hypercomm.errors import FileKeptError, NotationError
from hypercomm.tools.place.live import machine
from hypercomm.tools.place.place import Placed, place

_NARROW = 60
"""Terminals with fewer columns show tables without lines."""


@click.command("place", short_help="Show which groups cross hosts and domains, and a better order.")
@options.sizes
@click.option(
    *("--on", "on"),
    required=True,
    multiple=True,
    help="The machine: GPUs per host and domain (8 or 4,72), a hostfile, a node list, "
    "topology.conf, topology.yaml, switches by host as JSON, or 'live' in a job. May be repeated: "
    "the first one that names hosts sets their order, the others add levels.",
)
@click.option("--traffic", help="Bytes that a rank sends in a step, as in tp=40G,dp=6.5G,pp=100M.")
@click.option("--overlap", default="", help="Dims whose traffic overlaps with computation: dp.")
@click.option(
    "--weights", default="", help="Cost of a byte that crosses a level, as in domain=1,leaf=7."
)
@click.option("--groups", default="", metavar="DIMS", help="More groups to report, as in tp+dp.")
@click.option("--gpus-per-node", type=int, help="GPUs of hosts that are listed without a number.")
@click.option(
    "--write",
    type=(click.Choice(["rankfile"]), click.Path(dir_okay=False)),
    multiple=True,
    metavar="rankfile FILE",
    help="Write the host of each rank, for Open MPI.",
)
@click.option("--force", is_flag=True, help="Replace files that exist.")
@options.as_json
def place_command(
    sizes: str,
    on: tuple[str, ...],
    traffic: str | None,
    overlap: str,
    weights: str,
    groups: str,
    gpus_per_node: int | None,
    write: tuple[tuple[str, str], ...],
    force: bool,
    as_json: bool,
) -> int:
    """Show how the groups of a layout such as tp=4,dp=16,pp=4 are spread over a machine.

    The table shows how many groups of each dim leave their host, domain or switch, and the bytes
    that cross. It is followed by the best order of the dims. No process is started, and torch is
    loaded for --on live only.
    """
    where = machine(on)
    if where is None:
        return 0
    found = place(
        sizes,
        where,
        traffic=traffic,
        overlapped=overlap,
        weights=weights,
        groups=groups,
        gpus_per_host=gpus_per_node,
    )
    for _, path in write:
        _save(found.rankfile(), path, force)
    if as_json:
        better = found.better and {"advice": found.advice, **found.better.to_dict()}
        print(json.dumps({**found.to_dict(), "notes": found.notes, "better": better}))
    else:
        _show(found)
    return 0


def _save(text: str, path: str, force: bool) -> None:
    try:
        with Path(path).open("w" if force else "x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise FileKeptError(f"{path} exists, and is kept; --force replaces it") from error
    except OSError as error:
        raise NotationError(f"{path} cannot be written: {error.strerror}") from error


def _show(found: Placed) -> None:
    out = console()
    out.print(found.headline, markup=False, soft_wrap=True)
    rows = _table(out.width, found)
    for spread in found.spreads:
        cells = [escape(cell) for cell in spread.cells[: len(rows.columns)]]
        if spread.across < spread.groups:
            cells[2] = f"[{'yellow' if spread.across else 'green'}]{cells[2]}[/]"
        rows.add_row(*cells)
    out.print(rows)
    for note in found.notes:
        out.print(note, markup=False)
    for warning in found.warnings:
        out.print(f"[bold red]warning:[/] {escape(warning)}")
    if found.better:
        _, _, advice = found.advice.partition(": ")
        out.print(f"\n[bold cyan]order:[/] {escape(advice)}")
        changes = _table(out.width, found)
        for row in found.changes:
            changes.add_row(*map(escape, row))
        out.print(changes)
    elif found.is_searched:
        out.print("no order of the dims is better on this machine", markup=False)


def _table(width: int, found: Placed) -> Table:
    titles = list(found.columns)
    look = {}
    if width < _NARROW:
        titles[3:] = ["units", "bytes"][: len(titles) - 3]
        look = {"box": None, "padding": (0, 1, 0, 0)}
    columns = [Column(title, no_wrap=True) for title in titles[:2]]
    columns += [Column(title, justify="right") for title in titles[2:]]
    return table(*columns, **look)
