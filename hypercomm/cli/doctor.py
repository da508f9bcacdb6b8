"""`hypercomm doctor`: show what is installed, what works of it here, and why the rest does not."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING

import attrs
import click
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Column, Table

from hypercomm.cli import options
from hypercomm.cli.diagnosis import OF_BUILD, VARIABLES, Report, reader_of, report
from hypercomm.cli.printing import console, table

if TYPE_CHECKING:  # it loads torch
    from hypercomm.cli.torch_trial import SelfCheck

_PIPED_WIDTH = 100
"""Columns of the tables where no terminal sets them."""

_TITLES = {
    "python": "Python",
    "torch_build": "torch is built for",
    "nccl": "NCCL",
    "deepspeed": "DeepSpeed",
}

_COLOURS = {
    **dict.fromkeys(("works", "available"), "green"),
    **dict.fromkeys(("lost", "failed"), "red"),
    **dict.fromkeys(("not due", "not here"), "dim"),
}

_COUNTED = {
    "works": ("works", "work"),
    "not due": ("is not due in this release", "are not due in this release"),
    "lost": ("is lost", "are lost"),
}
"""What is said of one self-check that came out so, and of several."""


@click.command(short_help="Show versions, what works here, and why the rest does not.")
@click.option("--all", "everything", is_flag=True, help="List every private name of torch.")
@options.as_json
def doctor(*, everything: bool, as_json: bool) -> int:
    """Show versions, backends, ways of creating groups, self-checks and environment variables.

    Creates groups of this process alone. The exit code is 1 where something that this torch is to
    have is lost, or no group can be created.
    """
    with Console(stderr=True).status("looking at torch"):
        found = report()
    if as_json:
        print(json.dumps({"ok": found.ok, **attrs.asdict(found)}, indent=2, sort_keys=True))
    else:
        _show(found, everything=everything)
    return 0 if found.ok else 1


def _show(found: Report, *, everything: bool) -> None:
    """Print the report as tables and lines."""
    out = console(_PIPED_WIDTH)
    for part in _parts(found, everything=everything):
        out.print(escape(part) if isinstance(part, str) else part)
        out.print()
    for problem in found.problems:
        out.print(f"[red]problem[/]: {escape(problem)}")
    if found.ok:
        out.print("all that this torch is to have works here")
    out.print("a bug report needs what 'hypercomm doctor --json' prints", markup=False)


def _parts(found: Report, *, everything: bool) -> Iterator[str | Table]:
    """Make what stands between empty lines."""
    yield _versions_table(found)
    if found.backends:
        yield _grouped(
            ("backends", "result", "why not"),
            (
                (backend.name, "not here" if backend.reason else "available", backend.reason or "")
                for backend in found.backends
            ),
        )
        yield _grouped(
            ("strategy", "result", "time", "what it does, or why it does not work"),
            (
                (each.name, each.state, _milliseconds(each.seconds), each.says)
                for each in found.strategies
            ),
        )
        tried = "tried with an all-reduce on a world of one gloo rank, where creation='auto' takes "
        lines = [tried + found.auto if found.auto else None, found.nccl_job]
        if any(lines):
            yield "\n".join(filter(None, lines))
        yield _summary(found, everything=everything)
    shown = [check for check in found.self_checks if everything or check.state == "lost"]
    if shown:
        yield _checks_table(shown)
    if found.environment:
        yield _environment_table(found.environment)
    else:
        yield "no environment variable that matters is set"


def _table(*titles: str) -> Table:
    return table(*(Column(title, overflow="fold") for title in titles), show_edge=False)


def _versions_table(found: Report) -> Table:
    rows = _table("what", "version")
    absent = dict.fromkeys(OF_BUILD, "unknown" if found.gpus is None else "not in this build")
    for name, version in found.versions.items():
        shown = version or absent.get(name, "not installed")
        rows.add_row(_TITLES.get(name, name), escape(shown))
    rows.add_row("GPUs", escape(_gpus_shown(found.gpus)))
    return rows


def _gpus_shown(gpus: Sequence[str] | None) -> str:
    if not gpus:
        return "unknown" if gpus is None else "none that torch sees"
    return ", ".join(f"{count} x {name}" for name, count in Counter(gpus).items())


def _milliseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{seconds * 1e3:.1f} ms"


def _grouped(titles: Sequence[str], items: Iterable[tuple[str, ...]]) -> Table:
    """Make a table of names, states and more, with one row for all names that have these alike."""
    names: dict[tuple[str, ...], list[str]] = {}
    for name, *cells in items:
        names.setdefault(tuple(cells), []).append(name)
    rows = _table(*titles)
    for (state, *cells), alike in names.items():
        rows.add_row(escape(", ".join(alike)), _coloured(state), *map(escape, cells))
    return rows


def _summary(found: Report, *, everything: bool) -> str:
    """Count the self-checks by what came of them."""
    count = Counter(check.state for check in found.self_checks)
    parts = [
        f"{count[state]} {one if count[state] == 1 else many}"
        for state, (one, many) in _COUNTED.items()
        if count[state]
    ]
    hint = "" if everything else "; see --all"
    return (
        f"{count.total()} private names of torch: {', '.join(parts)} "
        f"({_milliseconds(found.self_checks_s)}{hint})"
    )


def _checks_table(checks: Sequence[SelfCheck]) -> Table:
    rows = Table.grid(padding=(0, 2))
    for check in checks:
        title, *lines = (
            (check.name, check.gives)
            if check.state != "lost"
            else (
                f"{check.name} {check.reason}",
                f"it gives: {check.gives}",
                f"without it: {check.without}",
            )
        )
        rows.add_row(_coloured(check.state), escape(title))
        for line in lines:
            rows.add_row("", Padding(escape(line), (0, 0, 0, 2)))
    return rows


def _environment_table(variables: dict[str, str]) -> Table:
    rows = _table("environment", "read by", "value")
    for reader in VARIABLES:
        for name in sorted(variables):
            if reader_of(name) == reader:
                rows.add_row(escape(name), reader, escape(variables[name] or "(empty)"))
    return rows


def _coloured(state: str) -> str:
    return f"[{_COLOURS[state]}]{state}[/]"
