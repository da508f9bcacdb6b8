"""The ranks of a small world as rows of text, hosts apart from each other."""

from __future__ import annotations

import math
from itertools import accumulate
from operator import mul

from hypercomm.layout import RankLayout

_MOST_IN_ROW, _MOST_ROWS = 16, 8


def picture(
    layout: RankLayout, ranks_per_host: int, rank: int, width: int = 80, height: int | None = None
) -> list[str]:
    """Draw the ranks, the first dims from left to right, with a bar between hosts.

    Args:
        layout: Whose.
        ranks_per_host: The number n of ranks on each host; host k holds k*n .. (k+1)*n - 1.
        rank: The rank that is marked.
        width: The columns that there are; rows of fewer dims are tried where they do not suffice.
        height: The lines that there are; default: as many as a picture may have.

    Returns:
        No lines where there are too many ranks.

    Example:
        >>> for line in picture(RankLayout.parse("tp=2,dp=2,pp=2"), 4, 6):
        ...     print(line)
              tp then dp from left to right
        pp=0  0 1  2 3
        pp=1  4 5  6*7
        >>> picture(RankLayout.parse("tp=2,dp=2,pp=2"), 4, 6, height=2)
        []
    """
    most_rows = _MOST_ROWS if height is None else min(_MOST_ROWS, height - 1)
    for inner in _dims_in_row(layout, most_rows):
        lines = _rows(layout, inner, ranks_per_host, rank)
        if max(map(len, lines)) > width:  # the title needs no place above the ranks
            lines[0] = lines[0].lstrip()
        if max(map(len, lines)) <= width:
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
    wide, own = max(map(len, labels)), len(str(layout.rank_offset + layout.size - 1))
    block = layout.size_of(inner[0])
    title = f"{' then '.join(inner)} from left to right"
    lines = [f"{'':{wide}}  {title}"]
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


def _dims_in_row(layout: RankLayout, most_rows: int) -> list[tuple[str, ...]]:
    """The first dims: as many as fit beside each other, with two rows or a few, then fewer."""
    fitting = [
        count for count, size in enumerate(accumulate(layout.shape, mul), 1) if size <= _MOST_IN_ROW
    ]
    several = [count for count in fitting if math.prod(layout.shape[count:]) > 1] or fitting
    return [
        layout.dim_names[:count]
        for count in reversed(several)
        if math.prod(layout.shape[count:]) <= most_rows
    ]
