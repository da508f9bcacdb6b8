"""What is printed: tables, wide enough where no terminal says how wide, and nothing of others."""

from __future__ import annotations

import contextlib
import os
import sys
import warnings
from collections.abc import Iterator
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Column, Table


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
    """Keep what libraries print and warn of from the user: the command says what is wrong itself.

    Older versions of gloo greet on stdout for every group.
    """
    stdout, null = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    sys.stdout.flush()
    os.dup2(null, 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)
        os.close(null)


def one_line(error: BaseException) -> str:
    """Write what an error says in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())
