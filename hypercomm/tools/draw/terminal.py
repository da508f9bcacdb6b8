"""Pictures as lines of a terminal, for rich to print."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from rich import box
from rich.columns import Columns
from rich.table import Table as RichTable
from rich.text import Text

from hypercomm.tools.draw.pictures import Box, Cell, Part, Picture, Ranks, Table


def lines_of(picture: Picture, width: int, bar: str) -> Iterator[Text | RichTable | Columns]:
    """Return the lines and tables of a picture; `bar` separates names from ranks."""
    yield from map(Text, [picture.title, *picture.lines])
    for part in picture.parts:
        yield Text("")
        yield from _lines(part, width, bar, 0)


def _lines(part: Part, width: int, bar: str, depth: int) -> Iterator[Text | RichTable | Columns]:
    if isinstance(part, Ranks):
        yield from _ranks(part, width, bar)
    elif isinstance(part, list):
        yield _table(part)
    elif isinstance(part, Box):
        head = Text("  " * depth + "  ".join(filter(None, [part.bold, part.title])))
        cells = [one for one in part.inside if isinstance(one, Cell)]
        if cells:
            head.append(f" {bar}").append_text(_row((one.text, one.fill) for one in cells))
        if head:
            yield head
        for index, one in enumerate(part.inside[len(cells) :]):
            yield from _lines(one, width, bar, depth + part.framed)
            if index < len(part.arrows):
                yield Text("  " * depth + f"-> {part.arrows[index]}")


def _row(texts: Iterable[tuple[str, str]], wide: int = 0) -> Text:
    """Return texts on fills, each with at least so many letters."""
    row = Text()
    for text, fill in texts:
        row.append(f" {text:>{wide}}", f"black on {fill}" if fill else "")
    return row


def _ranks(ranks: Ranks, width: int, bar: str) -> Iterator[Text | Columns]:
    """Return hosts next to each other: a column for each rank, a row for each dim."""
    if ranks.caption:
        yield Text(ranks.caption)
    left = max(len(name) for name in ["rank", *(row.name for row in ranks.rows)])
    cells = [cell for row in ranks.rows for cell in row.cells.values()]
    wide = max(len(text) for cell in cells for text in (cell.text, cell.group))
    most = max(1, (width - left - 3) // (wide + 1))
    blocks = []
    for host, held in ranks.hosts.items():
        for some in (held[at : at + most] for at in range(0, len(held), most)):
            lines = [Text(f"{'':{left}}   {host}")] if host else []
            numbers = _row(((f"{rank}", "") for rank in some), wide)
            lines.append(Text(f"{'rank':{left}} {bar}").append_text(numbers))
            for row in ranks.rows:
                groups = ((row.cells[rank].group, row.cells[rank].fill) for rank in some)
                lines.append(Text(f"{row.name:{left}} {bar}").append_text(_row(groups, wide)))
            blocks.append(Text("\n").join(lines))
    yield Columns(blocks, padding=(1, 3))
    yield Text("")
    yield from (Text(f"{row.name}: {row.words}") for row in ranks.rows)


def _table(table: Table) -> RichTable:
    heads, *rows = table
    found = RichTable(*(cell.text for cell in heads), box=box.SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        found.add_row(
            *(Text(cell.text, f"black on {cell.fill}" if cell.fill else "") for cell in row)
        )
    return found
