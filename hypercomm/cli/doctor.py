"""`hypercomm doctor`: show what is installed, what works of it here, and why the rest does not."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence

from rich import box
from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.table import Table

from hypercomm.cli.diagnosis import (
    OF_BUILD,
    VARIABLES,
    Backend,
    Report,
    SelfCheck,
    Strategy,
    reader_of,
    report,
)

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


def run(*, everything: bool, as_json: bool) -> int:
    """Look at this machine, show what is found, and return an exit code.

    Args:
        everything: Whether to show every self-check, rather than those that are lost.
        as_json: Whether to print JSON, which has everything.

    Raises:
        WorldSizeError: torch.distributed is initialised already.
    """
    with Console(stderr=True).status("looking at torch"):
        found = report()
    if as_json:
        print(json.dumps(found, indent=2, sort_keys=True))
    else:
        _show(found, everything=everything)
    return 0 if found["ok"] else 1


def _show(found: Report, *, everything: bool) -> None:
    """Print the report as tables and lines."""
    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_PIPED_WIDTH)
    for part in _parts(found, everything=everything):
        console.print(escape(part) if isinstance(part, str) else part)
        console.print()
    for problem in found["problems"]:
        console.print(f"[red]problem[/]: {escape(problem)}")
    if found["ok"]:
        console.print("all that this torch is to have works here")
    console.print("a bug report needs what 'hypercomm doctor --json' prints", markup=False)


def _parts(found: Report, *, everything: bool) -> Iterator[str | Table]:
    """Make what stands between empty lines."""
    yield _versions_table(found)
    if found["backends"]:
        yield _backends_table(found["backends"])
        yield _strategies_table(found["strategies"])
        yield from _how_created(found)
        yield _summary(found, everything=everything)
    shown = [check for check in found["self_checks"] if everything or check["state"] == "lost"]
    if shown:
        yield _checks_table(shown)
    if found["environment"]:
        yield _environment_table(found["environment"])
    else:
        yield "no environment variable that matters is set"


def _table(*titles: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for title in titles:
        table.add_column(title, overflow="fold")
    return table


def _versions_table(found: Report) -> Table:
    table = _table("what", "version")
    absent = dict.fromkeys(OF_BUILD, "unknown" if found["gpus"] is None else "not in this build")
    for name, version in found["versions"].items():
        shown = version or absent.get(name, "not installed")
        table.add_row(_TITLES.get(name, name), escape(shown))
    table.add_row("GPUs", escape(_gpus_shown(found["gpus"])))
    return table


def _gpus_shown(gpus: Sequence[str] | None) -> str:
    if not gpus:
        return "unknown" if gpus is None else "none that torch sees"
    return ", ".join(f"{count} x {name}" for name, count in Counter(gpus).items())


def _backends_table(backends: Sequence[Backend]) -> Table:
    """Make a table with a row for each reason."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for backend in backends:
        state = "available" if backend["reason"] is None else "not here"
        rows.setdefault((state, backend["reason"] or ""), []).append(backend["name"])
    return _filled(_table("backends", "result", "why not"), rows)


def _strategies_table(strategies: Sequence[Strategy]) -> Table:
    """Make a table with a row for each reason."""
    rows: dict[tuple[str, ...], list[str]] = {}
    for strategy in strategies:
        seconds = strategy["seconds"]
        shown = "-" if seconds is None else f"{seconds * 1e3:.1f} ms"
        rows.setdefault((strategy["state"], shown, strategy["says"]), []).append(strategy["name"])
    titles = ("strategy", "result", "time", "what it does, or why it does not work")
    return _filled(_table(*titles), rows)


def _filled(table: Table, rows: dict[tuple[str, ...], list[str]]) -> Table:
    """Add rows, each with the names of all that it is about."""
    for (state, *cells), names in rows.items():
        table.add_row(escape(", ".join(names)), _coloured(state), *map(escape, cells))
    return table


def _how_created(found: Report) -> Iterator[str]:
    """Say what the strategies were tried on, and which one a grid takes by itself."""
    lines = []
    if found["auto"] is not None:
        lines.append(
            f"tried with an all-reduce on a world of one gloo rank, where creation='auto' takes "
            f"{found['auto']}"
        )
    if found["nccl_job"] is not None:
        lines.append(found["nccl_job"])
    if lines:
        yield "\n".join(lines)


def _summary(found: Report, *, everything: bool) -> str:
    """Count the self-checks by what came of them."""
    checks = found["self_checks"]
    count = Counter(check["state"] for check in checks)
    parts = [
        f"{count[state]} {one if count[state] == 1 else many}"
        for state, (one, many) in _COUNTED.items()
        if count[state]
    ]
    hint = "" if everything else "; see --all"
    return (
        f"{len(checks)} private names of torch: {', '.join(parts)} "
        f"({(found['self_checks_s'] or 0) * 1e3:.1f} ms{hint})"
    )


def _checks_table(checks: Sequence[SelfCheck]) -> Table:
    table = Table.grid(padding=(0, 2))
    for check in checks:
        title, *lines = _lines(check)
        table.add_row(_coloured(check["state"]), escape(title))
        for line in lines:
            table.add_row("", Padding(escape(line), (0, 0, 0, 2)))
    return table


def _lines(check: SelfCheck) -> list[str]:
    if check["state"] != "lost":
        return [check["name"], check["gives"]]
    return [
        f"{check['name']} {check['reason']}",
        f"it gives: {check['gives']}",
        f"without it: {check['without']}",
    ]


def _environment_table(variables: dict[str, str]) -> Table:
    table = _table("environment", "read by", "value")
    for reader in VARIABLES:
        for name in sorted(variables):
            if reader_of(name) == reader:
                table.add_row(escape(name), reader, escape(variables[name] or "(empty)"))
    return table


def _coloured(state: str) -> str:
    return f"[{_COLOURS[state]}]{state}[/]"
