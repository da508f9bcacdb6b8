"""`hypercomm blame`: find the rank that a hung job waits for, from its dumps."""

from __future__ import annotations

import click
from rich.markup import escape

from hypercomm.blame.analysis import Verdict
from hypercomm.blame.evidence import read_folder
from hypercomm.cli import options
from hypercomm.cli.options import read_sizes
from hypercomm.cli.printing import console, print_json, table
from hypercomm.layout import RankLayout

_COLOURS = {"clear": "green", "blamed": "red", "unclear": "yellow"}

_MOST_ROWS = 20


@click.command(short_help="Find the rank that a hung job waits for, from its dumps.")
@click.argument("folder")
@click.option(
    "--layout", "sizes", help="The layout, as in tp=2,dp=4, if the dumps do not contain it."
)
@options.as_json
def blame(folder: str, sizes: str | None, as_json: bool) -> int:
    """Show which rank has not entered which collective, and which ranks wait for it.

    FOLDER contains the dumps of torch's flight recorder (TORCH_NCCL_DUMP_ON_TIMEOUT) or of
    grid.watch(). Torch is not loaded, and no code in a dump is run. The exit code is 0 if no rank
    waits, 1 if a rank waits, and 2 if the folder has no usable dumps.
    """
    layout = None if sizes is None else RankLayout(read_sizes(sizes))
    verdict = Verdict(read_folder(folder, layout))
    if as_json:
        print_json(verdict.to_dict())
    else:
        _show(verdict)
    return 0 if verdict.outcome == "clear" else 1


def _show(verdict: Verdict) -> None:
    out = console()
    evidence = verdict.evidence
    for line in str(verdict).splitlines():
        out.print(f"[{_COLOURS[verdict.outcome]}]{escape(line)}[/]", soft_wrap=True)
    rows = table(*verdict.COLUMNS)
    for wait in verdict.waits[:_MOST_ROWS]:
        rows.add_row(*map(escape, wait.to_row()))
    if verdict.waits:
        out.print(rows)
    if len(verdict.waits) > _MOST_ROWS:
        out.print(f"and {len(verdict.waits) - _MOST_ROWS} more; --json shows all of them")
    out.print(f"{len(evidence.ranks)} dumps of {evidence.world_size} ranks")
    for note in evidence.unreadable.values():
        out.print(f"note: {note}", markup=False, soft_wrap=True)
