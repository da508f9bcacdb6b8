"""`hypercomm blame`: find the rank that a hung job waits for, from its dumps."""

from __future__ import annotations

import click

from hypercomm.blame.analysis import Verdict
from hypercomm.blame.evidence import read_folder
from hypercomm.cli import options
from hypercomm.cli.options import read_layout
from hypercomm.cli.printing import print_json, print_lines
from hypercomm.layout.text import aligned

_MOST_ROWS = 20


@click.command()
@click.argument("folder")
@click.option(
    "--layout", "sizes", help="The layout, as in tp=2,dp=4, if the dumps do not contain it."
)
@options.as_json
def blame(folder: str, sizes: str | None, as_json: bool) -> int:
    """Find the rank that a hung job waits for.

    Show which rank has not entered which collective, and which ranks wait for it. FOLDER contains
    the dumps of torch's flight recorder (TORCH_NCCL_DUMP_ON_TIMEOUT) or of grid.watch(). Torch is
    not loaded, and no code in a dump is run. The exit code is 0 if no rank waits, 1 if a rank
    waits, and 2 if the folder has no usable dumps.
    """
    verdict = Verdict(read_folder(folder, None if sizes is None else read_layout(sizes)))
    if as_json:
        print_json(verdict.to_dict())
    else:
        _show(verdict)
    return 0 if verdict.outcome == "clear" else 1


def _show(verdict: Verdict) -> None:
    evidence = verdict.evidence
    lines = [str(verdict)]
    if verdict.waits:
        rows = [wait.to_row() for wait in verdict.waits[:_MOST_ROWS]]
        lines += aligned([verdict.COLUMNS, *rows])
    if len(verdict.waits) > _MOST_ROWS:
        lines.append(f"and {len(verdict.waits) - _MOST_ROWS} more; --json shows all of them")
    lines.append(f"{len(evidence.ranks)} dumps of {evidence.world_size} ranks")
    print_lines([*lines, *(f"note: {note}" for note in evidence.unreadable.values())])
