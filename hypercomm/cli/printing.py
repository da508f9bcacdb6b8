"""Prints the lines and the JSON of the commands."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
import warnings
from collections.abc import Iterable, Iterator
from typing import Any


def print_lines(lines: Iterable[str]) -> None:
    """Print lines to stdout."""
    write("".join(f"{line}\n" for line in lines))


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
