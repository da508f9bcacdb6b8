"""Source: one setting of a launch file, with its file and line. Commands import this file only."""

from __future__ import annotations

import os
import re
from typing import Any

import attrs


def is_launch_file(text: str) -> bool:
    """Return whether an argument is the path of a file or folder, rather than sizes.

    A folder whose name could be the name of a dim counts as sizes.

    Example:
        >>> is_launch_file("tp=2,dp=4"), is_launch_file("scripts/run.sh")
        (False, True)
    """
    is_name = re.fullmatch(r"[^=,\s]*(/[^=,\s]*|\.[A-Za-z]+)", text)
    if is_name or os.path.isfile(text):  # noqa: PTH113 - Path raises for a long text
        return True
    return os.path.isdir(text) and not text.isidentifier()  # noqa: PTH112


def printable(value: Any) -> Any:
    r"""Return a text without control characters, which a terminal would interpret.

    >>> printable("a\x1b[31mb"), printable(8)
    ('a\ufffd[31mb', 8)
    """
    if not isinstance(value, str) or value.isprintable():
        return value
    return re.sub("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u202a-\u202e]", "\ufffd", value)


def as_path(key: str) -> tuple[str, ...]:
    """Return the parts of a key, in lower case and with underscores.

    >>> as_path("+actor.Megatron.tensor-model-parallel-size")
    ('actor', 'megatron', 'tensor_model_parallel_size')
    """
    return tuple(key.strip("-+~ ").replace("-", "_").lower().split("."))


@attrs.frozen
class Source:
    """One setting in a launch file, with its file and line.

    Attributes:
        value: The value: a number, or a text in which the known variables are substituted.
        key: The key or flag as written. "" for a default.
        raw: The value as written, such as "${TP:-8}".
        file: The name of the file. "" for a text.
        line: The number of the line, starting at 1. 0 for a default.
        path: The parts of the key, in lower case, with underscores.
        words: The items of a list.
        others: The values on other paths through a script, with their lines.
    """

    value: Any = attrs.field(converter=printable)
    key: str = attrs.field(default="", converter=printable)
    raw: str = attrs.field(default="", converter=printable)
    file: str = attrs.field(default="", converter=printable)
    line: int = 0
    path: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    others: tuple[str, ...] = ()

    def with_value(self, value: Any) -> Source:
        """Return this setting with another value."""
        return attrs.evolve(self, value=value)

    def __str__(self) -> str:
        """Return the file, the line and the setting, as reports show them.

        >>> str(Source(8, "--tp", "$TP", "run.sh", 12)), str(Source(1))
        ('run.sh:12 --tp $TP', 'default')
        """
        where = f"{self.file}:{self.line}" if self.file else f"line {self.line}"
        return f"{where} {self.key} {self.raw}" if self.line else self.key or "default"
