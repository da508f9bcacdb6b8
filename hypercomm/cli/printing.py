"""Prints the tables and the JSON of the commands. In a pipe, trailing spaces are removed."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Column, Table


class _Output(Console):
    """Prints to stdout, without trailing spaces unless stdout is a terminal."""

    def print(self, *objects: Any, **options: Any) -> None:
        """Print as `rich.console.Console.print` does."""
        with self.capture() as captured:
            super().print(*objects, **options)
        text = captured.get()
        if not self.is_terminal:
            text = "\n".join(line.rstrip(" ") for line in text.split("\n"))
        write(text)


def console(piped_width: int = 120) -> Console:
    """Return a console for stdout, with `piped_width` columns unless stdout is a terminal."""
    found = _Output(highlight=False)
    return found if found.is_terminal else _Output(highlight=False, width=piped_width)


def write(text: str) -> None:
    """Write to stdout. Nothing is raised if the reader, such as `head`, has closed the pipe."""
    try:
        sys.stdout.write(text)
        sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def print_json(value: object, **options: Any) -> None:
    """Print a value as JSON. The options are passed to `json.dumps`."""
    write(json.dumps(value, **options) + "\n")


def table(*columns: Column | str) -> Table:
    """Return an empty table in the style that all commands share."""
    return Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)


def numbers(title: str) -> Column:
    """Return a column of numbers."""
    return Column(title, justify="right", no_wrap=True)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Discard warnings, logs and what libraries print on stdout within a `with` block."""
    from hypercomm.launch.run import no_stdout

    level = logging.root.manager.disable
    logging.disable()
    try:
        with no_stdout(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def one_line(error: BaseException) -> str:
    """Return the class and message of an error in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())
