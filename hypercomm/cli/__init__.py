"""The command line: plan, draw, place and compare layouts, check groups, and explain hangs.

`main` is the one place that turns errors into messages and exit codes: 0 for success, 1 if a
check failed, 2 for a wrong call, 130 for Ctrl-C. One rank of a launched job prints the error.
"""

from __future__ import annotations

import importlib
import os
import sys
import time
from collections.abc import Sequence

import click

from hypercomm import __version__
from hypercomm.errors import HyperCommError, LaunchError

_GRACE_S = 3.0
"""The time that rank 0 has to print an error before another rank exits.

Launchers end all ranks when one exits.
"""

_COMMANDS = {
    "plan": ("hypercomm.tools.plan:plan", "Show a layout and its groups."),
    "draw": ("hypercomm.tools.draw.command:draw", "Draw a layout, a change or a mapping."),
    "place": ("hypercomm.tools.place.command:place_command", "Place a layout on a machine."),
    "diff": ("hypercomm.tools.launch_files.command:diff", "Compare the groups of two layouts."),
    "check": ("hypercomm.cli.check:check", "Run every group of a layout on real ranks."),
    "doctor": ("hypercomm.cli.doctor:doctor", "Show what is installed and what works."),
    "blame": ("hypercomm.tools.blame:blame", "Find the rank that a hung job waits for."),
}
"""Where each command is, and what `--help` says about it."""


class _LazyGroup(click.Group):
    """A group whose commands are imported by name; `--help` lists them without importing any."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        if cmd_name not in _COMMANDS:
            return None
        module, _, attribute = _COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, summary) in _COMMANDS.items()])


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="hypercomm")
def cli() -> None:
    """Plan and compare grids of ranks, check their process groups, and explain hangs."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        argv: The arguments; default: those of the process.
    """
    try:
        result = cli.main(argv, prog_name="hypercomm", standalone_mode=False)
    except click.ClickException as error:
        if _is_first():
            error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        _say("interrupted; every rank that was started has been ended")
        return 130
    except HyperCommError as error:
        if _is_first():
            _say(str(error))
        return 2
    return result if isinstance(result, int) else 0


def _is_first() -> bool:
    """Return whether this is rank 0, or no rank of a job; else wait until rank 0 has printed."""
    from hypercomm.job_environment import find_job

    try:
        job = find_job(os.environ)
    except LaunchError:
        return True
    if job is not None and job.rank:
        time.sleep(_GRACE_S)
    return job is None or not job.rank


def _say(message: str) -> None:
    print(f"hypercomm: {message}", file=sys.stderr)
