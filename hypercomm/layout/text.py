"""Values as text: short representations for messages, and aligned columns."""

from __future__ import annotations

import difflib
import re
import reprlib
import traceback
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

_LONGEST = 400
"""The most characters of a value in a message."""

_MOST_RANGES = 8
"""The most ranges of ranks in a message."""


_SHORT = reprlib.Repr()
_SHORT.maxtuple = _SHORT.maxlist = _SHORT.maxset = _SHORT.maxfrozenset = 64
_SHORT.maxdict = 64
_SHORT.maxstring = 85
_SHORT.maxother = 200
_SHORT.maxlong = 200


def short_repr(value: object) -> str:
    """Return `repr(value)`, shortened if it is long. The keys of a dict are sorted.

    >>> short_repr("tp"), short_repr(10**5000), len(short_repr("a" * 1000))
    ("'tp'", '<int too long to show>', 85)
    """
    try:
        text = _SHORT.repr(value)
    except (ValueError, RecursionError):  # Python does not format ints of more than 4,300 digits
        return f"<{type(value).__name__} too long to show>"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def summary_of(error: BaseException) -> str:
    r"""Return the class and the first line of an error, as in the last lines of a traceback.

    >>> summary_of(ValueError("wrong\nin detail"))
    'ValueError: wrong'
    """
    text = "".join(traceback.format_exception_only(type(error), error))
    lines = [line for line in text.splitlines() if line[:1].strip()]
    return lines[0]  # the place of a SyntaxError precedes it, and is indented


def as_entry(headline: str, options: dict[str, object]) -> str:
    r"""Return a headline with a line for each option, as ranks compare calls.

    >>> as_entry("tp over 2 groups", {"timeout": "0:00:20", "share": "never"})
    'tp over 2 groups\ntimeout: 0:00:20\nshare: never'
    """
    return "\n".join([headline, *(f"{name}: {value}" for name, value in options.items())])


def did_you_mean(value: object, names: Iterable[str]) -> str:
    """Return a clause that suggests the name closest to a value, or an empty text.

    >>> did_you_mean("TP", ["tp", "dp"]), did_you_mean("x", ["tp"])
    ("; did you mean 'tp'?", '')
    >>> did_you_mean("pt", ["dp", "tp"])  # the same letters in another order
    "; did you mean 'tp'?"
    """
    if not isinstance(value, str) or len(value) > _LONGEST:
        return ""
    by_lower = {name.lower(): name for name in names}
    letters = sorted(value.lower())
    close = [name for name in by_lower if sorted(name) == letters]
    close = close or difflib.get_close_matches(value.lower(), by_lower, 1)
    return f"; did you mean {by_lower[close[0]]!r}?" if close else ""


def first_n(items: Sequence[object], most: int) -> str:
    """Format the first items, and the number of further items.

    >>> first_n([4, 2, 7], 3), first_n([4, 2, 7], 1)
    ('4, 2, 7', '4 and 2 more')
    """
    left = len(items) - most
    return ", ".join(map(str, items[:most])) + (f" and {left} more" if left > 0 else "")


def pluralize(count: int, what: str) -> str:
    """Format a count with its noun.

    >>> pluralize(1, "host"), pluralize(1200, "switch")
    ('1 host', '1,200 switches')
    """
    return f"{count:,} {plural(what, count)}"


def plural(what: str, count: int = 2) -> str:
    """Return the plural of a word, or the word itself if `count` is 1.

    >>> plural("host"), plural("leaf"), plural("switch"), plural("switch", 1)
    ('hosts', 'leaves', 'switches', 'switch')
    """
    if count == 1:
        return what
    if what.endswith("leaf"):
        return f"{what[:-1]}ves"
    return what + ("es" if what.endswith(("s", "x", "ch", "sh")) else "s")


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format rows of cells as lines, each column as wide as its widest cell.

    A column of numbers, such as 1,024 or 4 x 2, is aligned to the right, except the last column.

    >>> aligned([("dims", "size", "of rank 0"), ("tp", "2", "0"), ("expert", "16", "0 2")])
    ['dims    size  of rank 0', 'tp         2  0', 'expert    16  0 2']
    """
    columns = [*zip(*rows, strict=True)]
    cells = []
    for column in columns[:-1]:
        are_numbers = all(re.fullmatch("[0-9][0-9,. x]*", cell) for cell in column[1:])
        align = str.rjust if are_numbers else str.ljust
        width = max(map(len, column))
        cells.append([align(cell, width) for cell in column])
    return ["  ".join(row).rstrip() for row in zip(*cells, *columns[-1:], strict=True)]


def format_sizes(sizes: Mapping[str, int]) -> str:
    """Format sizes, the fastest varying dim first.

    >>> format_sizes({"tp": 2, "dp": 4})
    'tp=2,dp=4'
    """
    return ",".join([f"{name}={size}" for name, size in sizes.items()])


def format_range(least: int, most: int) -> str:
    """Format a smallest and a largest number, or one number if they are equal.

    >>> format_range(1, 1), format_range(2, 1024)
    ('1', '2..1,024')
    """
    return f"{least:,}" if least == most else f"{least:,}..{most:,}"


def format_coords(coords: Mapping[str, int]) -> str:
    """Format coordinates.

    >>> format_coords({"tp": 1, "dp": 0})
    'tp=1, dp=0'
    """
    return ", ".join(f"{dim}={index}" for dim, index in coords.items())


def format_ranks(ranks: Sequence[int]) -> str:
    """Format ascending ranks as ranges.

    >>> format_ranks([4, 5, 6, 7, 9, 12, 13])
    '4..7, 9, 12..13'
    """
    array = np.asarray(ranks, dtype=np.int64)
    parts = np.split(array, np.flatnonzero(np.diff(array) != 1) + 1)
    ends = [(int(part[0]), int(part[-1])) for part in parts[:_MOST_RANGES] if part.size]
    texts = [f"{first}..{last}" if last > first else f"{first}" for first, last in ends]
    return ", ".join([*texts, "..."] if len(parts) > _MOST_RANGES else texts)
