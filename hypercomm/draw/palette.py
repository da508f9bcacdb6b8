"""Colours that readers of any colour vision tell apart, and the second sign beside each.

The fills are Paul Tol's "light" scheme, made for filling labelled cells with black labels, without
its grey, which stands for "no one group" here. Source: P. Tol, Colour Schemes, SRON/EPS/TN/09-002,
issue 3.2, https://personal.sron.nl/~pault/. There are more groups than colours, so each cell
also holds its group's number, and each round of colours has a pattern of its own.
"""

from __future__ import annotations

FILLS = (
    *("#77AADD", "#EE8866", "#EEDD88", "#FFAABB"),  # light blue, orange, light yellow, pink
    *("#99DDFF", "#44BB99", "#BBCC33", "#AAAA00"),  # light cyan, mint, pear, olive
)
"""One for each group, in turns."""

MIXED = "#DDDDDD"
"""What holds ranks of many groups: pale grey, of the same scheme."""

RESULTS = {"kept": "#99DDFF", "gone": "#EE8866", "new": "#BBCC33"}
"""What becomes of a group."""

MARKS = {"kept": "=", "gone": "-", "new": "+"}
"""The second sign beside each of `RESULTS`."""

PATTERNS = ("", "stripes", "dots", "bars")
"""Drawn over the fills of the first, second, ... round of colours."""

AMOUNTS = ("#E1EEF9", "#BCD8F0", "#8FBDE3", "#5C9CD0", "#3277B3", "#155290")
"""From little to much: one hue, ever darker, so that it also reads in grey."""


def fill(group: int) -> str:
    """Return the fill of a group.

    >>> fill(0), fill(8) == fill(0)
    ('#77AADD', True)
    """
    return FILLS[group % len(FILLS)]


def pattern(group: int) -> str:
    """Return the pattern over the fill of a group; "" for none.

    >>> pattern(0), pattern(8), pattern(32)
    ('', 'stripes', '')
    """
    return PATTERNS[group // len(FILLS) % len(PATTERNS)]


def shade(amount: int, largest: int) -> int:
    """Return the index in `AMOUNTS` of an amount above 0.

    >>> shade(1, 100), shade(100, 100), shade(5, 5)
    (0, 5, 5)
    """
    return min(len(AMOUNTS) - 1, amount * len(AMOUNTS) // max(largest, 1))
