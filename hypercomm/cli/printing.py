"""What is printed: tables, JSON and its schemas, and nothing of others."""

from __future__ import annotations

import contextlib
import json
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import click
from rich import box
from rich.console import Console
from rich.table import Column, Table

from hypercomm.launch.local_rank import no_stdout

Command = TypeVar("Command", bound=Callable[..., Any])


def console(piped_width: int = 120) -> Console:
    """Return what prints on stdout, in so many columns where it is no terminal."""
    found = Console(highlight=False)
    return found if found.is_terminal else Console(highlight=False, width=piped_width)


def table(*columns: Column | str, **look: Any) -> Table:
    """Return an empty table, which looks as all of them do but for what is said."""
    return Table(*columns, **{"box": box.SIMPLE_HEAD, "pad_edge": False, **look})


def numbers(title: str) -> Column:
    """Return a column of numbers."""
    return Column(title, justify="right", no_wrap=True)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Discard what libraries print on stdout, and their warnings, within a `with` block."""
    with no_stdout(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def one_line(error: BaseException) -> str:
    """Write what an error says in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())


def one_object(optional: tuple[str, ...] = (), /, **properties: Any) -> dict[str, Any]:
    """Describe an object that has these properties and no others.

    >>> one_object(rank={"type": "integer"})["required"]
    ['rank']
    """
    return {
        "type": "object",
        "properties": properties,
        "required": [name for name in properties if name not in optional],
        "additionalProperties": False,
    }


def by_name(schema: dict[str, Any]) -> dict[str, Any]:
    """Describe an object that has any names."""
    return {"type": "object", "additionalProperties": schema}


def list_of(schema: dict[str, Any]) -> dict[str, Any]:
    """Describe a list."""
    return {"type": "array", "items": schema}


def or_null(schema: dict[str, Any]) -> dict[str, Any]:
    """Describe what may be null."""
    return {"anyOf": [schema, {"type": "null"}]}


def said(schema: dict[str, Any], what: str) -> dict[str, Any]:
    """Say what something is."""
    return {**schema, "description": what}


def schema_option(schema: dict[str, Any]) -> Callable[[Command], Command]:
    """Return the option --json-schema, which prints the schema and nothing else."""

    def show(context: click.Context, _: object, asked: bool) -> None:
        if asked:
            print(json.dumps(schema, indent=2))
            context.exit()

    return click.option(
        "--json-schema",
        is_flag=True,
        is_eager=True,
        expose_value=False,
        callback=show,
        help="Print the JSON schema of what --json prints.",
    )
