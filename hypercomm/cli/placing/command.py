"""The command: its options, and what it prints."""

from __future__ import annotations

import os
from collections.abc import Sequence

import click
from click.core import ParameterSource
from rich.markup import escape
from rich.table import Column, Table

from hypercomm.cli import options
from hypercomm.cli.live import machine
from hypercomm.cli.placing.given import OPTIONS, read_card, read_numbers
from hypercomm.cli.printing import console, table
from hypercomm.draw.drawing import KINDS as PICTURES
from hypercomm.draw.drawing import writable
from hypercomm.errors import NotationError
from hypercomm.layout.checks import check_choice
from hypercomm.layout.parsing import parse_groups
from hypercomm.layout.placing import Placed
from hypercomm.layout.placing.place import place_named
from hypercomm.layout.placing.placed import COLUMNS, TAKEN
from hypercomm.layout.placing.writing import KINDS, save
from hypercomm.tools.files import as_new_file

_ROOMY = 60
"""The columns of a terminal in which tables have lines."""


@click.command("place", short_help="Show which groups cross hosts and domains, and a better order.")
@options.sizes
@click.option(
    *("--on", "on"),
    required=True,
    multiple=True,
    help="Where the ranks are: GPUs for each host and domain (8 or 4,72), a hostfile, a node list, "
    "topology.conf, topology.yaml, labels or switches as JSON, or 'live' in a job. Several times: "
    "the first names the hosts in order, others say more of them.",
)
@click.option("--traffic", help="Bytes that a rank sends in a step, as in tp=40G,dp=6.5G,pp=100M.")
@click.option("--overlap", default="", help="Dims whose traffic no step waits for, as in dp.")
@click.option(
    "--model",
    help="In place of the traffic: hidden=4096,layers=32,sequence=8192,micro_batches=8,"
    "parameters=7G, or a file of JSON.",
)
@click.option("--weights", help="What a byte costs that crosses a level, as in domain=1,leaf=7.")
@click.option("--gpus-per-node", type=int, help="GPUs of hosts of which nothing tells.")
@click.option(
    *("--groups", "wanted"),
    metavar="DIMS",
    callback=lambda _, __, text: None if text is None else parse_groups(text),
    help="More groups to look at, as in tp+dp. Default: those of each dim, and of the traffic.",
)
@click.option(
    "--write",
    type=(str, click.Path(dir_okay=False)),
    multiple=True,
    metavar="KIND FILE",
    help=f"Write what is taken as {', '.join(KINDS)}.",
)
@click.option(
    "--draw",
    "picture",
    metavar="FILE",
    help=f"Draw what is taken, as {', '.join(PICTURES)}.",
)
@click.option(
    "--take",
    type=click.Choice(TAKEN),
    default="best",
    show_default=True,
    help="What is written and drawn: a proposal, or the layout as it is given.",
)
@click.option("--force", is_flag=True, help="Replace files that exist.")
@options.as_json
def place_command(
    sizes: str,
    on: tuple[str, ...],
    traffic: str | None,
    overlap: str,
    model: str | None,
    weights: str | None,
    gpus_per_node: int | None,
    wanted: list[tuple[str, ...]] | None,
    write: tuple[tuple[str, str], ...],
    picture: str | None,
    take: str,
    force: bool,
    as_json: bool,
) -> int:
    """Show how the groups of a layout such as tp=4,dp=16,pp=4 lie on a machine.

    For each dim: how many groups lie in one host, domain, leaf or spine, and what crosses these.
    Then what would be better: another order of dims or hosts, a dim in two, GPUs left out.
    Nothing is started, and torch is not loaded, but with --on live.
    """
    if _is_given("take") and not write and picture is None:
        raise click.UsageError(
            f"--take {take} says what is written and drawn, and nothing is: give --write KIND FILE "
            f"or --draw FILE, too, or leave it out; all that is proposed is shown without it"
        )
    _check_apart(write, picture)
    for kind, path in write:
        check_choice("the kind to write", kind, tuple(KINDS), NotationError)
        as_new_file(path, force, NotationError)
    if picture is not None:
        writable(picture, force)
    where = machine(on)
    if where is None:
        return 0
    found = place_named(
        *(sizes, where, OPTIONS),
        traffic=traffic,
        model=None if model is None else read_card(model),
        overlapped=overlap or (),
        weights=None if weights is None else read_numbers(weights, OPTIONS["weights"]),
        gpus_per_host=gpus_per_node,
        groups=wanted or (),
    )
    taken = found.take(take)
    texts = [(taken.text_for(kind), path) for kind, path in write]
    if as_json:
        print(found.to_json())
    else:
        _show(found)
    for text, path in texts:
        save(text, path, force)
    if picture is not None:
        taken.draw().save(picture, force)
    return 0


def _is_given(parameter: str) -> bool:
    """Tell whether the user has given an option, or its default stands."""
    source = click.get_current_context().get_parameter_source(parameter)
    return source is not ParameterSource.DEFAULT


def _check_apart(write: Sequence[tuple[str, str]], picture: str | None) -> None:
    """Refuse two outputs of one path: the second would replace the first."""
    outputs = [(f"--write {kind}", path) for kind, path in write]
    known: dict[str, str] = {}
    for what, path in [*outputs, *([] if picture is None else [("--draw", picture)])]:
        file = os.path.realpath(path)
        if file in known:
            raise NotationError(
                f"{known[file]} and {what} both name {path!r}; give each a file of its own"
            )
        known[file] = what


def _show(found: Placed) -> None:
    out = console()
    out.print(found.headline, markup=False, soft_wrap=True)
    rows = _table(out.width, found)
    for spread in found.spreads:
        cells = [escape(cell) for cell in spread.cells[: len(rows.columns)]]
        if not spread.across:
            cells[2] = f"[green]{cells[2]}[/]"
        elif spread.is_partly:
            cells[2] = f"[yellow]{cells[2]}[/]"
        rows.add_row(*cells)
    out.print(rows)
    for note in found.notes:
        out.print(note, markup=False)
    for warning in found.warnings:
        out.print(f"[bold red]warning:[/] {escape(warning)}")
    for proposal in found.proposals:
        words = escape(proposal.headline.partition(": ")[2])
        out.print(f"\n[bold cyan]{escape(proposal.kind)}:[/] {words}")
        changes = _table(out.width, found)
        for row in proposal.changes:
            changes.add_row(*map(escape, row))
        if proposal.changes:
            out.print(changes)
    if not found.proposals and found.is_searched:
        out.print("nothing better is known for this machine", markup=False)


def _table(width: int, found: Placed) -> Table:
    """Return an empty table of spreads; where there is little room, without lines."""
    titles, look = list(COLUMNS), {}
    if width < _ROOMY:
        titles[3:] = ["units", "bytes"]
        look = {"box": None, "padding": (0, 1, 0, 0)}
    columns = [Column(title, no_wrap=True) for title in titles[:2]]
    columns += [Column(title, justify="right") for title in titles[2:]]
    return table(*(columns[:4] if found.is_assumed else columns), **look)
