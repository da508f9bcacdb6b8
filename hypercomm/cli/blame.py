"""`hypercomm blame`: on whom a job that hangs waits, from what its ranks left behind."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click
from rich.markup import escape

from hypercomm.cli import options
from hypercomm.cli.printing import console, table
from hypercomm.layout.text import format_ranks

if TYPE_CHECKING:
    from hypercomm.blame.verdict import Verdict

_COLOURS = {"clear": "green", "blamed": "red"}

_MOST_ROWS = 20
"""Rows of the table, at most; JSON has all."""


@click.command(short_help="Say on whom a job that hangs waits, from its dumps.")
@click.argument("folder")
@click.option("--layout", "sizes", help="Coordinates, as in tp=2,dp=4, where the dumps have none.")
@options.as_json
def blame(folder: str, sizes: str | None, as_json: bool) -> int:
    """Say which rank has not entered which collective, and who waits for whom.

    FOLDER has what torch's flight recorder wrote (TORCH_NCCL_DUMP_ON_TIMEOUT), or grid.watch().
    Torch is not loaded, and no code in a dump is run. The exit code is 0 where nobody waits.
    """
    from hypercomm.blame.folder import read_folder  # other commands need none of it
    from hypercomm.blame.verdict import CLEAR, judge

    layout = None if sizes is None else options.read_layout(sizes, None, "all sizes")
    verdict = judge(read_folder(folder, layout))
    if as_json:
        print(json.dumps(verdict.to_dict()))
    else:
        _show(verdict)
    return 0 if verdict.outcome == CLEAR else 1


def _show(verdict: Verdict) -> None:
    out, evidence = console(), verdict.evidence
    colour = _COLOURS.get(verdict.outcome, "yellow")
    for line in str(verdict).splitlines():
        out.print(f"[{colour}]{escape(line)}[/]", soft_wrap=True)
    rows = table("group", "ranks", "call", "waiting in it", "not entered by")
    shown = [(group, wait) for group, waits in verdict.by_group().items() for wait in waits]
    for group, wait in shown[:_MOST_ROWS]:
        rows.add_row(
            escape(evidence.title(group)),
            format_ranks(group.ranks),
            escape(f"{wait.call.op} {wait.call.number}"),
            format_ranks(sorted(verdict.waiting_in(wait))),
            format_ranks(wait.absent) or "-",
        )
    if shown:
        out.print(rows)
    if len(shown) > _MOST_ROWS:
        out.print(f"and {len(shown) - _MOST_ROWS} more, which --json has")
    out.print(
        f"{len(evidence.ranks)} dumps of {evidence.world_size} ranks, by {evidence.source}",
        soft_wrap=True,
    )
    for note in evidence.notes:
        out.print(f"note: {note}", markup=False, soft_wrap=True)
