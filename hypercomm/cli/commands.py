"""The `hypercomm` command group. A command's module is imported when the command is called."""

from __future__ import annotations

import importlib

import click

from hypercomm import __version__

_COMMANDS = {
    "plan": ("hypercomm.cli.plan:plan", "Show a layout and its groups."),
    "draw": ("hypercomm.tools.draw.command:draw", "Draw a layout, a change or a mapping."),
    "place": ("hypercomm.tools.place.command:place_command", "Place a layout on a machine."),
    "diff": ("hypercomm.cli.diff:diff", "Compare the groups of two layouts."),
    "check": ("hypercomm.cli.check:check", "Run every group of a layout on real ranks."),
    "doctor": ("hypercomm.cli.doctor:doctor", "Show what is installed and what works."),
    "blame": ("hypercomm.tools.blame.command:blame", "Find the rank that a hung job waits for."),
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
