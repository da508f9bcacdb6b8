"""The command line: plan, draw, place and compare layouts, check groups, and explain hangs.

Only `main` turns errors into messages and exit codes. The exit code is 0 for success, 1 if a check
failed, 2 for a wrong call, and 130 for Ctrl-C. In a launched job, only rank 0 prints an error.
"""

from __future__ import annotations

import importlib
import os
import re
import sys
import time
from collections.abc import Sequence
from typing import NamedTuple

import click

from hypercomm.errors import HyperCommError, LaunchError
from hypercomm.version import __version__

_GRACE_S = 3.0
"""The time that rank 0 has to print an error before another rank exits.

Launchers end all ranks when one rank exits.
"""


class _Command(NamedTuple):
    """A command that is imported when it is called.

    Attributes:
        home: The module that defines the command, a colon, and the command's name in it.
        summary: The description of the command in `hypercomm --help`.
        example: The arguments of a typical call.
    """

    home: str
    summary: str
    example: str


_COMMANDS = {
    "plan": _Command(
        "hypercomm.tools.plan:plan", "Show a layout and its groups.", "tp=8,cp=2,dp=64"
    ),
    "draw": _Command(
        "hypercomm.tools.draw.command:draw",
        "Draw a layout, a change or a mapping.",
        "tp=8,dp=4 -o layout.svg",
    ),
    "place": _Command(
        "hypercomm.tools.place.command:place_command",
        "Place a layout on a machine.",
        "tp=8,dp=4,pp=4 --on 8",
    ),
    "diff": _Command(
        "hypercomm.tools.diff:diff",
        "Compare the groups of two layouts.",
        "tp=2,dp=4 tp=4,dp=2",
    ),
    "check": _Command(
        "hypercomm.tools.check:check",
        "Run every group of a layout on real ranks.",
        "tp=2,cp=2,dp=2",
    ),
    "doctor": _Command("hypercomm.cli.doctor:doctor", "Show what is installed and what works.", ""),
    "blame": _Command(
        "hypercomm.tools.blame:blame",
        "Find the rank that a hung job waits for.",
        "hypercomm_watch",
    ),
}

_USUAL_NAMES = {
    "--gpus-per-node": "--on 8",
    "--gpus-per-host": "--on 8",
    "--nproc-per-node": "--on 8",
    "--hostfile": "--on FILE",
    "--nprocs": "--world-size",
    "--nproc": "--world-size",
    "-n": "--world-size",
    "--dims": "--groups",
}
"""Maps options of launchers and of other commands to the options of this command line."""


class _LazyGroup(click.Group):
    """A group whose commands are imported by name; `--help` lists them without importing any."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        del ctx
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        del ctx
        if cmd_name not in _COMMANDS:
            return None
        module, _, attribute = _COMMANDS[cmd_name].home.partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name in _COMMANDS or name.startswith("-") or ctx.resilient_parsing:
            return super().resolve_command(ctx, args)
        from hypercomm.layout.text import did_you_mean

        hint = did_you_mean(name, [*_COMMANDS, "--help", "--version"])
        hint = hint or f"; the commands are {', '.join(_COMMANDS)}"
        raise click.UsageError(f"No such command {name!r}{hint}", ctx)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        del ctx
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.summary) for name, command in _COMMANDS.items()])


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="hypercomm")
def cli() -> None:
    """Plan and compare grids of ranks, check their process groups, and explain hangs."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        argv: The arguments. Default: the arguments of the process.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        result = cli.main(arguments, prog_name="hypercomm", standalone_mode=False)
    except click.ClickException as error:
        if _is_first():
            _with_hint(error, arguments[0] if arguments else "").show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        _say("interrupted; every rank that was started has been ended")
        return 130
    except HyperCommError as error:
        if _is_first():
            from hypercomm.cli.options import in_options

            _say(in_options(str(error)))
        return 2
    return result if isinstance(result, int) else 0


def _with_hint(error: click.ClickException, name: str) -> click.ClickException:
    """Return an error with an example call, or with the right name of an unknown option.

    Args:
        error: The error.
        name: The name of the command.
    """
    if isinstance(error, click.NoSuchOption):
        parameters = error.ctx.command.params if error.ctx else []
        hint = _option_hint(error.option_name, parameters)
        if hint:
            return click.UsageError(f"No such option {error.option_name!r}{hint}", error.ctx)
    elif isinstance(error, click.UsageError) and name in _COMMANDS:
        is_about_value = isinstance(error, click.BadParameter)
        if not is_about_value or isinstance(error, click.MissingParameter):
            said = error.format_message().rstrip(".")
            example = f"hypercomm {name} {_COMMANDS[name].example}"
            return click.UsageError(f"{said}. For example: {example}", error.ctx)
    return error


def _option_hint(given: str, parameters: Sequence[click.Parameter]) -> str:
    """Return a clause with what to write in place of an option, or "" if click knows better.

    Args:
        given: The option that does not exist.
        parameters: The parameters of the command.
    """
    usual = _USUAL_NAMES.get(given, "")
    if any(usual.split()[:1] == [option] for one in parameters for option in one.opts):
        return f"; did you mean {usual!r}?"
    arguments = {one.name for one in parameters if isinstance(one, click.Argument)}
    is_size = re.fullmatch(r"--?([a-z-_]*parallel[-_]size|[tpced]p([-_]size)?)", given)
    if is_size and arguments & {"sizes", "before"}:
        return "; write sizes as tp=2,dp=4"
    if given == "--on":  # click would suggest --json
        return "; plan, draw and place have this option"
    return ""


def _is_first() -> bool:
    """Return whether this process prints errors: rank 0, or a process outside a job.

    Any other rank first waits until rank 0 has had time to print.
    """
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
