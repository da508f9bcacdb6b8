"""Tables of the pages that are made from the code: `python docs/tables.py --write` writes them.

Each is between `<!-- NAME, by docs/tables.py -->` and `<!-- end -->`. A test fails when one
differs from the code.
"""

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
sys.path.insert(0, str(ROOT))  # the checkout, also where another copy is installed

from hypercomm import errors

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
    "hypercomm.testing.properties",
    "hypercomm.blame",
    "hypercomm.tools.draw",
    "hypercomm.tools.launch_files",
    "hypercomm.tools.place",
    "hypercomm.training",
)
"""The modules whose `__all__` the reference must hold."""

_MODULES = {
    "parallel_state": ("compat.md#megatron", "The names of `megatron.core.parallel_state`."),
    "properties": ("testing.md#ready-properties-of-layers", "Ready properties of layers."),
    "tp": ("compat.md#ezpz", "The names of `ezpz.tp`."),
    "version": ("compat.md#version", "The release of Megatron whose behaviour is followed."),
}
"""The links and summaries of public names that are modules."""


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


FIRST = (
    *("HyperCommGrid", "GridDims", "join", "run_ranks", "RankLayout", "RankGroups", "GridSet"),
    *(
        "RankMapping",
        "transfer",
        "transfer_state",
        "fake_world",
        "clip_grad_norm_",
        "draw",
        "place",
    ),
)
"""The names of the package that most programs use, in this order."""


def name_table() -> str:
    """List every public name but the errors, by module and with a link; each name once."""
    links, seen, parts = reference_links(), set(), []
    for module in PUBLIC:
        rows = []
        names = [name for name in names_of(module) if not name.startswith("__")]
        for name in sorted(names, key=lambda name: (name not in FIRST, *order(name))):
            thing = getattr(importlib.import_module(module), name)
            if name in errors.__all__ or id(thing) in seen:
                continue
            seen.add(id(thing))
            link, summary = links.get(id(thing)), first_paragraph(thing)
            link, summary = _MODULES.get(name, (link, summary))
            rows.append([f"[`{name}`]({link})" if link else f"`{name}`", summary])
        if rows:
            parts += [f"## {module}\n\n", table(("name", "summary"), rows), "\n"]
    return "".join(parts)


def order(name: str) -> tuple[int, str]:
    """Return the sort key of a name: its index in `FIRST`, then the alphabet."""
    return (FIRST.index(name) if name in FIRST else 0, name)


def reference_links() -> dict[int, str]:
    """Map the identity of each object of the reference to its page and anchor."""
    links: dict[int, str] = {}
    for path in sorted((DOCS / "reference").glob("*.md")):
        for target, options in re.findall(_TARGET, path.read_text()):
            thing = resolved(target)
            members = re.search(r"members: \[(.*?)\]", options)
            names = members[1].split(", ") if members else getattr(thing, "__all__", ())
            if "show_root_heading: false" not in options:
                package, _, name = target.rpartition(".")
                both = thing, getattr(importlib.import_module(package), name)
                links |= {id(one): f"{path.name}#{target}" for one in both if id(one) not in links}
            elif not isinstance(thing, type):
                names = names or [name for name in vars(thing) if not name.startswith("_")]
                for name in names:
                    links.setdefault(id(getattr(thing, name)), f"{path.name}#{target}.{name}")
    return links


_TARGET = re.compile(r"^::: ([\w.]+)(?:\n    (.+))?", re.MULTILINE)


def resolved(target: str) -> Any:
    """Return the object that has a dotted name; a module if both have it."""
    module, _, name = target.rpartition(".")
    try:
        return importlib.import_module(target)
    except ModuleNotFoundError:
        return getattr(importlib.import_module(module), name)


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

    from hypercomm.cli import cli

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
        parts += [table(("option", "effect", "default"), rows), "\n"]
    return "".join(parts)


def _default(parameter: Any) -> str:
    if isinstance(parameter.show_default, str):
        return f"`{parameter.show_default}`"
    return f"`{parameter.default}`" if parameter.show_default else ""


def launcher_table() -> str:
    """List the variables of every launcher."""
    from hypercomm.job_environment import LAUNCHERS

    titles = ("launcher", "rank and size", "local rank and local size", "identified by")
    return table(
        titles,
        (
            [
                launcher.name,
                code(launcher.rank, *launcher.size),
                code(*filter(None, (launcher.local_rank, launcher.local_size))),
                code(launcher.mark) if launcher.mark else "",
            ]
            for launcher in LAUNCHERS
        ),
    )


def shown_table(page: str) -> str:
    """List the names that a page of the reference shows, with the files that define them."""
    rows: list[list[str]] = []
    sources: dict[str, None] = {}
    for anchor, name, thing in shown_names(page):
        summary = re.split(r"(?<=[.:]) (?=[A-Z])", first_paragraph(thing))[0]
        if summary:  # else an attribute, which the docstring of its class describes
            rows.append([f"[`{name}{arguments_of(thing)}`](#{anchor})", summary])
            sources[source_of(thing)] = None
    files = [f'<a href="../../{file}">{file}</a>' for file in sources if file]
    return f'{table(("name", "summary"), rows)}\n<p class="raw">Source: {", ".join(files)}</p>'


def shown_names(page: str) -> Iterator[tuple[str, str, object]]:
    """Yield the anchor, the name and the object of each entry of a page of the reference."""
    for target, options in re.findall(_TARGET, page):
        package, _, name = target.rpartition(".")
        thing = getattr(importlib.import_module(package), name, None)
        if thing is None or "show_root_heading: false" in options:
            thing = resolved(target)  # a module may have the name of its function
        if "show_root_heading: false" not in options:
            yield target, name, thing
        for member in members_of(thing, options):
            is_prefixed = isinstance(thing, type) or name in _MODULES
            title = f"{name}.{member}" if is_prefixed else member
            yield f"{target}.{member}", title, getattr(thing, member)


def members_of(thing: object, options: str) -> list[str]:
    """List the members of a class that are listed on the page, or the names of a module."""
    listed = re.search(r"members: \[(.*?)\]", options)
    if listed:
        return listed[1].split(", ")
    return names_of(thing.__name__) if inspect.ismodule(thing) else []


def arguments_of(thing: object) -> str:
    """Write the names of the first arguments of a function: `(dims, *more, name=)`."""
    if not inspect.isroutine(thing):
        return ""
    found = [one for one in inspect.signature(thing).parameters.values() if one.name != "self"]
    stars = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
    names = [
        f"{stars.get(one.kind, '')}{one.name}{'=' if one.kind is one.KEYWORD_ONLY else ''}"
        for one in found
    ]
    return f"({', '.join([*names[:_MOST], *(['...'] if names[_MOST:] else [])])})"


_MOST = 5
"""How many arguments of a function are written."""


def source_of(thing: Any) -> str:
    """Return the file that defines an object, as a path in the repository; "" for others."""
    module = thing.__name__ if inspect.ismodule(thing) else getattr(thing, "__module__", "")
    if not module.startswith("hypercomm"):
        return ""
    return str(Path(inspect.getfile(importlib.import_module(module))).relative_to(ROOT))


PARTS: dict[str, Callable[[], str]] = {
    "cli": command_table,
    "errors": error_table,
    "launchers": launcher_table,
    "names": name_table,
}


def with_tables(page: str) -> str:
    """Return the text of a page with its tables made anew."""

    def anew(part: re.Match[str]) -> str:
        text = shown_table(page) if part[2] == "shown" else PARTS[part[2]]()
        return f"{part[1]}\n{text.strip()}\n\n{part[3]}"

    return _PART.sub(anew, page)


def main(arguments: list[str]) -> None:
    """Write the tables, or print the pages that would change."""
    for path in sorted(DOCS.rglob("*.md")):
        before = path.read_text()
        after = with_tables(before)
        if after != before:
            print(path.relative_to(DOCS))
            if arguments == ["--write"]:
                path.write_text(after)


if __name__ == "__main__":
    main(sys.argv[1:])
