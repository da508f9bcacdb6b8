"""Pictures as lines of a terminal, for rich to print."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich import box
from rich.columns import Columns
from rich.table import Table as RichTable
from rich.text import Text

from hypercomm.tools.draw.pictures import Box, Cell, Part, Picture, Ranks, Table


def lines_of(picture: Picture, width: int, bar: str) -> Iterator[Text | RichTable | Columns]:
    """Return the lines and tables of a picture; `bar` is put between hosts."""
    yield from map(_text, [picture.title, *picture.lines])
    shows_ranks = any(isinstance(part, Ranks) for part in picture.parts)
    for part in picture.parts:
        if isinstance(part, list) and shows_ranks and part[0][0].text == "dim":
            continue  # each row of ranks has the same words
        yield Text("")
        yield from _lines(part, width, bar, 0)


def _text(text: str, fill: str = "") -> Text:
    """Return a text that cannot move the cursor."""
    shown = "".join(one if one.isprintable() else "?" for one in text)
    return Text(shown, f"black on {fill}" if fill else "")


def _lines(part: Part, width: int, bar: str, depth: int) -> Iterator[Text | RichTable | Columns]:
    if isinstance(part, Ranks):
        yield from _ranks(part, width, bar)
    elif isinstance(part, list):
        yield _table(part)
    elif isinstance(part, Box):
        head = _text("  " * depth + "  ".join(filter(None, [part.bold, part.title])))
        cells = [one for one in part.inside if isinstance(one, Cell)]
        yield head.append(f" {bar}" * bool(cells)).append_text(_row(cells, 0))
        for index, one in enumerate(part.inside[len(cells) :]):
            yield from _lines(one, width, bar, depth + part.framed)
            if index < len(part.arrows) and part.arrows[index] is not None:
                yield _text("  " * depth + f"-> {part.arrows[index]}")


def _row(cells: Sequence[Cell], wide: int) -> Text:
    return Text("").join(_text(f" {cell.text:>{wide}}", cell.fill) for cell in cells)


def _ranks(ranks: Ranks, width: int, bar: str) -> Iterator[Text | Columns]:
    """Hosts next to each other: a column for each rank, a row of group numbers for each dims."""
    yield from [_text(ranks.caption)] * bool(ranks.caption)
    own = {rank: f"{rank}" for rank in ranks.rows[0].cells}
    rows = [("rank", own, {}), *((row.name, row.groups, row.cells) for row in ranks.rows)]
    left = max(len(name[: max(4, width // 4)]) for name, *_ in rows)
    wide = max(len(text) for _, texts, _ in rows for text in texts.values())
    most = max(1, (width - left - 3) // (wide + 1))
    blocks = []
    for host, held in ranks.hosts.items():
        for some in (held[at : at + most] for at in range(0, len(held), most)):
            tail = host[-max(8, len(some) * (wide + 1)) :]  # names of hosts differ at their ends
            lines = [_text(f"{'':{left}}   {tail}")] * bool(host)
            for name, texts, fills in rows:
                cells = [Cell(texts[rank], fills[rank].fill if fills else "") for rank in some]
                head = _text(f"{name[:left]:{left}} {bar}")
                lines.append(head.append_text(_row(cells, wide)))
            blocks.append(Text("\n").join(lines))
    yield Columns(blocks, padding=(1, 3))
    yield Text("")
    yield from (_text(f"{row.name}: {row.words}") for row in ranks.rows)


def _table(table: Table) -> RichTable:
    heads, *rows = table
    found = RichTable(*(cell.text for cell in heads), box=box.SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        found.add_row(*(_text(cell.text, cell.fill) for cell in row))
    return found
