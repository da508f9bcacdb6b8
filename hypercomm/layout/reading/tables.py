"""Tables of values: as HTML for notebooks, and as a DataFrame where pandas is installed."""

from __future__ import annotations

import html
import importlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hypercomm.errors import MissingPackageError

MOST_ROWS = 20
"""Rows that a notebook shows."""


def as_html(
    headline: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    lines: Iterable[str] = (),
    *,
    more: int = 0,
) -> str:
    """Write a headline, a table and lines below it as HTML that needs nothing else.

    Args:
        headline: What is shown.
        columns: The heads of the columns; none: no table.
        rows: A cell for each column.
        lines: Texts for a list.
        more: How many rows are left out.

    Example:
        >>> as_html("a < b", [], [], ["one", "two"])
        '<p><b>a &lt; b</b></p><ul><li>one</li><li>two</li></ul>'
    """
    page = f"<p><b>{html.escape(headline)}</b></p>"
    if columns:
        body = "".join(_row("td", row) for row in rows)
        page += f"<table><thead>{_row('th', columns)}</thead><tbody>{body}</tbody></table>"
    told = [*([f"and {more:,} more"] if more > 0 else []), *lines]
    items = "".join(f"<li>{html.escape(line)}</li>" for line in told)
    return page + (f"<ul>{items}</ul>" if items else "")


def _row(tag: str, cells: Sequence[object]) -> str:
    inside = "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in cells)
    return f"<tr>{inside}</tr>"


def as_frame(columns: Mapping[Any, Any], index: str, values: Any) -> Any:
    """Make a pandas DataFrame of columns by name, with an index of its own.

    Raises:
        MissingPackageError: pandas is not installed; says how to install it.
    """
    try:
        pandas = importlib.import_module("pandas")
    except ModuleNotFoundError as error:
        raise MissingPackageError("to_pandas() needs pandas: pip install pandas") from error
    return pandas.DataFrame(dict(columns), index=pandas.Index(values, name=index))
