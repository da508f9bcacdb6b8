"""The ranks of a small world as rows of text, with bars between hosts."""

from __future__ import annotations

import math
from itertools import accumulate
from operator import mul

from hypercomm.layout import RankLayout

_MOST_IN_ROW, _MOST_ROWS, _COLUMNS = 16, 8, 80


def picture(layout: RankLayout, ranks_per_host: int, rank: int) -> list[str]:
    """Draw the ranks, the first dims from left to right, with a bar between hosts.

    Args:
        layout: The layout.
        ranks_per_host: The number n of ranks on each host; host k holds k*n .. (k+1)*n - 1.
        rank: The rank that is marked.

    Returns:
        The lines; none if there are too many ranks.

    Example:
        >>> for line in picture(RankLayout.parse("tp=2,dp=2,pp=2"), 4, 6):
        ...     print(line)
              tp then dp from left to right
        pp=0  0 1  2 3
        pp=1  4 5  6*7
    """
    sizes = list(accumulate(layout.shape, mul))
    fitting = [count for count, size in enumerate(sizes, 1) if size <= _MOST_IN_ROW]
    several = [count for count in fitting if sizes[count - 1] < layout.size] or fitting
    for count in reversed(several):  # as many dims as fit into a row, with two rows or more
        if math.prod(layout.shape[count:]) <= _MOST_ROWS:
            lines = _rows(layout, layout.dim_names[:count], ranks_per_host, rank)
            if max(map(len, lines)) <= _COLUMNS:
                return lines
    return []


def _rows(layout: RankLayout, inner: tuple[str, ...], ranks_per_host: int, rank: int) -> list[str]:
    """A title, and a row for each group over the inner dims."""
    outer = [name for name in reversed(layout.dim_names) if name not in inner]
    rows = layout.groups(*inner).to_array().tolist()
    labels = [
        " ".join(f"{dim}={layout.coords(row[0])[dim]}" for dim in outer if layout.size_of(dim) > 1)
        for row in rows
    ]
    wide, own = max(map(len, labels)), len(str(layout.last_rank))
    block = layout.size_of(inner[0])
    lines = [f"{'':{wide}}  {' then '.join(inner)} from left to right"]
    for label, row in zip(labels, rows, strict=True):
        text = ""
        for place, one in enumerate(row):
            if place and one // ranks_per_host != row[place - 1] // ranks_per_host:
                text += "| "
            elif place and place % block == 0 and block > 1:
                text += " "
            text += f"{one:>{own}}{'*' if one == rank else ' '}"
        lines.append(f"{label:{wide}}  {text}".rstrip())
    return lines
