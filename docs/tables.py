"""Tables of the pages that are made from the code: `python docs/tables.py --write` writes them.

Each stands between `<!-- NAME, by docs/tables.py -->` and `<!-- end -->`; a test notices when
one is not what the code says.
"""

import importlib
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from hypercomm import errors

DOCS = Path(__file__).parent
_PART = re.compile(r"(<!-- (\w+), by docs/tables\.py -->\n).*?(<!-- end -->)", re.DOTALL)

PUBLIC = (
    "hypercomm",
    "hypercomm.compat.deepspeed",
    "hypercomm.compat.ezpz",
    "hypercomm.compat.megatron",
    "hypercomm.compat.torchtitan",
    "hypercomm.launch",
    "hypercomm.layout",
    "hypercomm.testing",
    "hypercomm.tools.blame",
    "hypercomm.tools.draw",
    "hypercomm.tools.place",
    "hypercomm.training",
)
"""The modules whose `__all__` the reference must hold."""

_MODULES = {
    "parallel_state": "as `megatron.core.parallel_state`",
    "tp": "as `ezpz.tp`",
    "version": "which release of Megatron is followed",
}
"""Public names that are modules, of which a page says whose names they have."""


def table(titles: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Write a table of Markdown."""
    titles = list(titles)
    lines = [titles, ["---"] * len(titles), *rows]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def code(*names: str) -> str:
    """Write names as code."""
    return ", ".join(f"`{name}`" for name in names)


def first_paragraph(thing: object) -> str:
    """Return the first paragraph of a docstring in one line."""
    text = (getattr(thing, "__doc__", None) or "").strip().split("\n\n")[0]
    return " ".join(text.split()).replace("|", "\\|")


def error_table() -> str:
    """List every error: the builtin that it derives from, its cause and its cure."""

    def row(name: str) -> list[str]:
        error = getattr(errors, name)
        bases = [base for base in error.__mro__ if base.__module__ == "builtins"]
        general = (Exception, BaseException, object, LookupError, OSError)
        builtins = [base.__name__ for base in bases if base not in general]
        ours = [base.__name__ for base in error.__bases__ if base.__module__ == errors.__name__]
        parents = [*(name for name in ours if name != "HyperCommError"), *builtins]
        cause, _, cure = first_paragraph(error).partition(": ")
        cure = cure[:1].upper() + cure[1:].removesuffix(".")
        return [f"`{name}`", code(*parents) or "`Exception`", cause, cure]

    return table(("class", "is also", "cause", "cure"), map(row, errors.__all__))


def name_table() -> str:
    """List every public name but the errors, and what it is."""

    def rows() -> Iterator[list[str]]:
        for module in PUBLIC:
            for name in names_of(module):
                if name.startswith("__") or name in errors.__all__:
                    continue
                thing = getattr(importlib.import_module(module), name)
                says = _MODULES.get(name) or first_paragraph(thing)
                yield [f"`{name}`", f"`{module}`", says]

    return table(("name", "in", "what it is"), rows())


def names_of(module: str) -> list[str]:
    """List the public names of a module: `__all__`, or what is defined beneath it."""
    found = importlib.import_module(module)
    if module == "hypercomm" or hasattr(found, "__all__"):
        return sorted(found.__all__)
    return sorted(
        name
        for name, value in vars(found).items()
        if not name.startswith("_") and getattr(value, "__module__", "").startswith(module)
    )


def command_table() -> str:
    """Describe every command and its options, as `--help` does."""
    import click

    from hypercomm.cli.commands import cli

    parts = []
    context = click.Context(cli)
    for name in cli.list_commands(context):
        command = cli.get_command(context, name)
        if command is None:
            continue
        arguments = [p for p in command.params if isinstance(p, click.Argument)]
        usage = " ".join(["hypercomm", name, *(p.name.upper() for p in arguments if p.name)])
        says = (command.help or "").split("\n\n")
        rows = [
            [code(*parameter.opts), " ".join((parameter.help or "").split()), _default(parameter)]
            for parameter in command.params
            if isinstance(parameter, click.Option)
        ]
        parts += [f"## {usage}\n\n", *(f"{' '.join(text.split())}\n\n" for text in says)]
        parts += [table(("option", "what it does", "default"), rows), "\n"]
    return "".join(parts)


def _default(parameter: Any) -> str:
    return f"`{parameter.default}`" if parameter.show_default else ""


def launcher_table() -> str:
    """List the variables of every launcher."""
    from hypercomm.launchers import LAUNCHERS

    titles = ("launcher", "rank", "size", "local rank", "local size", "known by")
    return table(
        titles,
        (
            [
                launcher.name,
                code(launcher.rank),
                code(*launcher.size),
                *(
                    code(name) if name else ""
                    for name in (launcher.local_rank, launcher.local_size)
                ),
                code(launcher.mark) if launcher.mark else "",
            ]
            for launcher in LAUNCHERS
        ),
    )


PARTS: dict[str, Callable[[], str]] = {
    "cli": command_table,
    "errors": error_table,
    "launchers": launcher_table,
    "names": name_table,
}


def with_tables(page: str) -> str:
    """Return the text of a page with its tables made anew."""

    def anew(part: re.Match[str]) -> str:
        return f"{part[1]}\n{PARTS[part[2]]().strip()}\n\n{part[3]}"

    return _PART.sub(anew, page)


def main(arguments: list[str]) -> None:
    """Write the tables, or say which pages would change."""
    for path in sorted(DOCS.rglob("*.md")):
        before = path.read_text()
        after = with_tables(before)
        if after != before:
            print(path.relative_to(DOCS))
            if arguments == ["--write"]:
                path.write_text(after)


if __name__ == "__main__":
    main(sys.argv[1:])
