"""Connections: what connecting the process groups of the calling rank has taken, as a table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs

from hypercomm.layout.text import aligned, as_html, counted, format_ranks

_COLUMNS = ("connected", "ranks", "backend", "seconds", "bytes")


@attrs.frozen
class Connection:
    """One communicator, or one edge of a pipeline, that the calling rank is at.

    Attributes:
        keys: Those whose process group it is, as "dp+cp"; of a set with the grid, "llm: tp".
        ranks: The members, or the two ends of the edge.
        backend: Such as "gloo"; of the group's backend, where it has several, one alone.
        seconds: From this rank's call until it was done; 0 where there is nobody to connect to.
        bytes: By how much the free memory of the device has shrunk meanwhile; None on a CPU.
        is_edge: Whether it is an edge, connected both ways.
    """

    keys: tuple[str, ...]
    ranks: tuple[int, ...]
    backend: str
    seconds: float = 0.0
    bytes: int | None = None
    is_edge: bool = False

    @property
    def title(self) -> str:
        """The keys, and that it is an edge if it is."""
        return f"{', '.join(self.keys)}{' edge' if self.is_edge else ''}"

    def cells(self) -> tuple[str, ...]:
        """Return what the table has of it."""
        size = "" if self.bytes is None else f"{self.bytes:,}"
        ranks = " <-> ".join(map(str, self.ranks)) if self.is_edge else format_ranks(self.ranks)
        return self.title, ranks, self.backend, f"{self.seconds:.6f}", size


@attrs.frozen(repr=False)
class Connections:
    """What `connect()` has connected on the calling rank, in the order in which it did.

    Attributes:
        rows: One for each communicator, and each edge, that the rank is at.
        meeting_seconds: How long the ranks met before, to compare what they connect.
    """

    rows: tuple[Connection, ...] = ()
    meeting_seconds: float = 0.0

    def __iter__(self) -> Iterator[Connection]:
        return iter(self.rows)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, position: int) -> Connection:
        return self.rows[position]

    @property
    def seconds(self) -> float:
        """How long all of them took, the meeting aside."""
        return sum(row.seconds for row in self.rows)

    @property
    def bytes(self) -> int | None:
        """The device memory of all of them; None where no device was asked."""
        known = [row.bytes for row in self.rows if row.bytes is not None]
        return sum(known) if known else None

    def to_dict(self) -> dict[str, Any]:
        """Return all of it as JSON can hold it."""
        rows = [attrs.asdict(row, value_serializer=_plain) for row in self.rows]
        return {"rows": rows, "meeting_seconds": self.meeting_seconds}

    def _headline(self) -> str:
        edges = sum(row.is_edge for row in self.rows)
        groups = counted(len(self.rows) - edges, "communicator")
        more = f" and {counted(edges, 'edge')}" if edges else ""
        return (
            f"{groups}{more} in {self.seconds:.3f} s, after a meeting of "
            f"{self.meeting_seconds:.3f} s"
        )

    def _cells(self) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
        most = len(_COLUMNS) - (self.bytes is None)
        return _COLUMNS[:most], [row.cells()[:most] for row in self.rows]

    def __repr__(self) -> str:
        return f"<Connections: {self._headline()}>"

    def __str__(self) -> str:
        columns, rows = self._cells()
        return "\n".join([self._headline(), *(aligned([columns, *rows]) if rows else ())])

    def _repr_html_(self) -> str:
        columns, rows = self._cells()
        return as_html(self._headline(), columns, rows)


def _plain(_: type, __: Any, value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value
