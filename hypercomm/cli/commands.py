"""The command line as a whole; each command is in the module named after it."""

from __future__ import annotations

import click

from hypercomm import __version__
from hypercomm.cli.blame import blame
from hypercomm.cli.check import check
from hypercomm.cli.diff import diff
from hypercomm.cli.doctor import doctor
from hypercomm.cli.drawing import draw
from hypercomm.cli.placing import place_command
from hypercomm.cli.plan import plan


@click.group(
    commands=[plan, draw, place_command, diff, check, doctor, blame],
    context_settings={"help_option_names": ["-h", "--help"]},
)
@click.version_option(__version__, prog_name="hypercomm")
def cli() -> None:
    """Plan and compare grids of ranks, check their process groups, and say why a job hangs."""
