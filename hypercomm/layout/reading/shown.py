"""How values are shown: one in a message, several in columns."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

_LONGEST = 400
"""Characters of a value that a message shows."""


def shown(value: object) -> str:
    """Write a value as `repr` does, cut where it is long; Python writes no int of 4,301 digits.

    >>> shown("tp"), shown(10**5000)
    ("'tp'", '<int too long to show>')
    """
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return f"<{type(value).__name__} too long to show>"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def did_you_mean(value: object, names: Iterable[str]) -> str:
    """Return the end of a sentence that proposes the name that is most like what was given.

    >>> did_you_mean("TP", ["tp", "dp"]), did_you_mean("x", ["tp"])
    ("; did you mean 'tp'?", '')
    """
    by_lower = {name.lower(): name for name in names}
    close = difflib.get_close_matches(value.lower(), by_lower, 1) if isinstance(value, str) else []
    return f"; did you mean {by_lower[close[0]]!r}?" if close else ""


def some_of(items: Sequence[object], most: int) -> str:
    """Write the first items, and how many more there are.

    >>> some_of([4, 2, 7], 3), some_of([4, 2, 7], 1)
    ('4, 2, 7', '4 and 2 more')
    """
    left = len(items) - most
    return ", ".join(map(str, items[:most])) + (f" and {left} more" if left > 0 else "")


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Write rows of cells, each column as wide as its widest cell.

    >>> aligned([("tp", "2"), ("expert", "16")])
    ['tp      2', 'expert  16']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(map(str.ljust, row, widths)).rstrip() for row in rows]
