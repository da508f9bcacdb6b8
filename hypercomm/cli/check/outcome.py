"""What a check has come to: gathered from all ranks, shown while it runs and in the end."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator

import attrs
from rich.console import Console, Group
from rich.live import Live
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from hypercomm.cli.check.figures import Row, groups_table, make_row, place_of, sweep_table
from hypercomm.cli.check.request import COLLECTIVES, Figures, Message, Request
from hypercomm.cli.plan.keys import Key
from hypercomm.cli.printing import console
from hypercomm.errors import RankFailedError

_SHOWN_FAILURES = 8


@attrs.define
class Outcome:
    """Gathers what the ranks tell, shows progress on stderr and the result on stdout.

    Attributes:
        request: What was wanted.
        failed: The rank that failed, if one did.
        seen: What this rank of a launched job saw, when it may be another that failed.
    """

    request: Request
    failed: RankFailedError | None = None
    seen: str = ""
    _rows: list[Row] = attrs.field(factory=list)
    _started: float = attrs.field(factory=time.monotonic)
    _first: float | None = None
    _hosts: set[str] = attrs.field(factory=set)
    _steps: set[tuple[Key, str]] = attrs.field(factory=set)
    _at: dict[int, tuple[Key, str]] = attrs.field(factory=dict)
    _told: dict[Key, dict[int, Figures]] = attrs.field(factory=dict)
    _console: Console = attrs.field(factory=lambda: Console(stderr=True, highlight=False))

    @contextlib.contextmanager
    def progress(self) -> Iterator[None]:
        """Show within a `with` block how far the check is, on a terminal as a table that grows."""
        if not self._console.is_terminal:
            yield
            return
        with Live(
            get_renderable=self._look, console=self._console, transient=True, refresh_per_second=4
        ):
            yield

    def hear(self, message: Message) -> None:
        """Take in what one rank tells."""
        rank, key, what = message
        if isinstance(what, str):
            self._at[rank] = key, what
            self._steps.add((key, what))
            self._first = self._first or time.monotonic()
            return
        told = self._told.setdefault(key, {})
        told[rank] = what
        self._hosts.add(what["host"])
        if len(told) == self.request.layout.size:
            self._rows.append(make_row(self.request.layout_of(key), key, told))
            if not self._console.is_terminal:
                self._console.print(self._done(), markup=False)

    def place_of(self, rank: int) -> str:
        """Say where a rank is: its coordinates, its group, and what it does there."""
        key, step = self._at.get(rank, (None, ""))
        layout = self.request.layout if key is None else self.request.layout_of(key)
        return place_of(layout, rank, key) + (f", in {step}" if step else "")

    def show(self, *, as_json: bool) -> int:
        """Print the result and return the exit code."""
        wrong = [line for row in self._rows for line in row.wrong]
        complete = len(self._rows) == len(self.request.keys)
        ok = complete and not (wrong or self.failed or self.seen)
        if as_json:
            print(json.dumps(self._json_form(ok)))
            return 0 if ok else 1
        if self._rows:
            tables = console()
            tables.print(self._groups_table(self._rows))
            if any(row.sweep for row in self._rows):
                tables.print(sweep_table(self._rows, with_hosts=len(self._hosts) > 1))
        out = Console(highlight=False, soft_wrap=True)
        for line in wrong[:_SHOWN_FAILURES]:
            out.print(f"[red]wrong[/] {escape(line)}")
        if len(wrong) > _SHOWN_FAILURES:
            out.print(f"... and {len(wrong) - _SHOWN_FAILURES} more")
        out.print(self._verdict(ok), markup=False)
        return 0 if ok else 1

    def _look(self) -> Group | Text:
        """What a terminal shows while the check runs."""
        rows = list(self._rows)
        if self._first is None:
            request = self.request
            return Text(f"starting {request.layout.size} {request.backend} ranks")
        now = ", ".join(f"{key}: {step}" for key, step in list(self._at.values())[:1])
        line = Text(" - ".join(filter(None, [self._done(), f"now {now}", self._left()])))
        return Group(self._groups_table(rows), line) if rows else Group(line)

    def _groups_table(self, rows: list[Row]) -> Table:
        return groups_table(rows, self.request.backend, with_hosts=len(self._hosts) > 1)

    def _done(self) -> str:
        last = f", last {Key(self._rows[-1].view, self._rows[-1].dims)}" if self._rows else ""
        return f"{len(self._rows)} of {len(self.request.keys)} checked{last}"

    def _left(self) -> str:
        """Say how long it may still take, as all steps were alike."""
        steps = 2 + len(COLLECTIVES) * bool(self.request.sweep.sizes)
        done, every = len(self._steps) - 1, steps * len(self.request.keys)
        if self._first is None or done < steps:
            return ""
        seconds = (time.monotonic() - self._first) / done * max(every - done, 0)
        minutes = round(seconds / 60)
        return f"about {f'{minutes} min' if minutes > 1 else f'{seconds:.0f} s'} left"

    def _json_form(self, ok: bool) -> dict[str, object]:
        request, failed = self.request, self.failed
        key, step = self._at.get(failed.rank, (None, None)) if failed else (None, None)
        return {
            "layout": str(request.layout),
            "views": {name: str(view) for name, view, _ in request.views},
            "ranks": request.layout.size,
            "backend": request.backend,
            "ok": ok,
            "seconds": time.monotonic() - self._started,
            "groups": list(map(attrs.asdict, self._rows)),
            "failed": failed
            and {
                "rank": failed.rank,
                "view": key and key.view,
                "dims": key and key.dims,
                "step": step,
                "reason": failed.reason,
            },
            "seen": self.seen,
        }

    def _verdict(self, ok: bool) -> str:
        layout, keys = self.request.layout, self.request.keys
        if ok:
            lacking = {name for row in self._rows for name in row.lacking}
            *names, last = (name for name in COLLECTIVES if name not in lacking)
            return (
                f"{layout}: {', '.join(names)} and {last} are right over every group, "
                f"on {layout.size} {self.request.backend} ranks, "
                f"in {time.monotonic() - self._started:.1f} s"
            )
        if self.seen:
            return f"failed after {len(self._rows)} of {len(keys)}: {self.seen}"
        if self.failed is None:
            return f"{layout}: some results are wrong, see above"
        return f"failed: {self.place_of(self.failed.rank)}: {self.failed.reason}"
