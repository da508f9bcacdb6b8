"""Pictures as text and tables for a terminal, which rich prints."""

from __future__ import annotations

from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.columns import Columns
from rich.table import Table as RichTable
from rich.text import Text

from hypercomm.tools.draw.pictures import Box, Cell, Table


def lines_of(box: Box, indent: str = "") -> Iterator[Text | RichTable | Columns]:
    """Yield the lines and tables of a box."""
    head = Text(f"{indent}{box.bold}  {box.words}".rstrip())
    for cell in box.inside:
        if isinstance(cell, Cell):
            head.append(" ").append_text(_text(cell))
    if head:
        yield head
    tables = [one for one in box.inside if isinstance(one, Table) and not one.is_text]
    if tables:
        yield Columns([_table(table) for table in tables], padding=(0, 3))
    for one in box.inside:
        if isinstance(one, Table) and one.is_text:
            yield _table(one)
        elif isinstance(one, Box):
            yield from lines_of(one, indent + "  ")
        elif isinstance(one, str):
            yield Text(f"{indent}-> {one}")


def _table(table: Table) -> RichTable:
    padding = 1 if table.is_text else 0
    found = RichTable(box=SIMPLE_HEAD, pad_edge=False, padding=(0, padding))
    heads, *rows = table.rows
    for at, head in enumerate(heads):
        found.add_column(_text(head), justify="right" if at and not table.is_text else "left")
    for row in rows:
        found.add_row(*map(_text, row))
    return found


def _text(cell: Cell) -> Text:
    return Text(cell.text, f"black on {cell.fill}" if cell.fill else "")
