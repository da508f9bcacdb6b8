"""Implements a page of torch's debug server with the ranks, their calls and the verdict."""

from __future__ import annotations

import functools
import itertools
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

from hypercomm.blame.analysis import Verdict
from hypercomm.blame.evidence import Evidence, RankLog, read_dumps
from hypercomm.errors import ToolError
from hypercomm.layout.text import format_coords
from hypercomm.process_groups.torch_internals.debug_server import (
    DebugHandler,
    NavLink,
    Route,
    fetch_all,
    register_handler,
)

_ENDPOINT = "hypercomm_watch"

_PAGE = """
{% extends "base.html" %}
{% block header %}<h1>{% block title %}Grid{% endblock %}</h1>{% endblock %}
{% block content %}
    <pre>{{ verdict | e }}</pre>
    {% for columns, rows in tables %}
        <table border="1" cellpadding="4" style="border-collapse: collapse; margin: 16px 0">
        <tr>{% for column in columns %}<th>{{ column }}</th>{% endfor %}</tr>
        {% for row in rows %}
            <tr>{% for cell in row %}<td>{{ cell | e }}</td>{% endfor %}</tr>
        {% endfor %}
        </table>
    {% endfor %}
{% endblock %}
"""

_APART_S = 1.0

_RANKS = ("rank", "coordinates", "host", "last call", "state", "line")


class GridPage(DebugHandler):
    """The page "/grid" of torch's debug server. `Watch.debug_page` creates the page."""

    def routes(self) -> list[Route]:
        """Return the path of the page."""
        return [Route("/grid", self._show)]

    def nav_links(self) -> list[NavLink]:
        """Return the link to the page."""
        return [NavLink("/grid", "Grid")]

    def templates(self) -> dict[str, str]:
        """Return the Jinja template of the page."""
        return {"grid.html": _PAGE}

    def dump(self) -> str:
        """Return the verdict, for the server's `dump_dir`."""
        return str(self._judge())

    def dump_filename(self) -> str:
        """Return the name of this page in the server's `enabled_dumps`."""
        return "grid"

    def _show(self, request: Any) -> bytes:
        verdict = self._judge()
        tables: list[Any] = []
        if isinstance(verdict, Verdict):
            waits = [wait.to_row() for wait in verdict.waits]
            tables = [(verdict.COLUMNS, waits), (_RANKS, _describe_ranks(verdict.evidence))]
        page: bytes = request.frontend.render_template("grid.html", verdict=verdict, tables=tables)
        return page

    def _judge(self) -> Verdict | str:
        """Return the verdict on calls that have been pending for a second, or an error as text."""
        try:
            before = self._read()
            time.sleep(_APART_S)
            now = self._read()
        except ToolError as error:
            return str(error)
        for rank, record in now.ranks.items():
            earlier = before.ranks.get(rank, RankLog(rank))
            for call in itertools.chain.from_iterable(record.lanes.values()):
                calls = earlier.lanes.get((call.group, call.channel), [])
                if all(one.number != call.number or one.state == "finished" for one in calls):
                    call.state = "finished"  # not pending, because it has just started
        return Verdict(now)

    def _read(self) -> Evidence:
        addresses, answers = fetch_all(_ENDPOINT, timeout=self.fetch_timeout)
        dumps = [
            (rank, address, functools.partial(_fields_of, answer))
            for rank, (address, answer) in enumerate(zip(addresses, answers, strict=True))
        ]
        return read_dumps(dumps, None, "the debug server")


def _fields_of(answer: Any) -> Any:
    if answer.status_code != 200:
        raise ValueError(f"{answer.status_code} {answer.text}")
    return json.loads(answer.text)


def _describe_ranks(evidence: Evidence) -> Iterator[tuple[object, ...]]:
    """Yield the row of each rank: its coordinates, its host and its last call."""
    for rank in range(evidence.world_size):
        known = evidence.describe(rank)
        record = evidence.ranks.get(rank)
        calls = [] if record is None else [call for own in record.lanes.values() for call in own]
        last = max(calls, key=lambda call: call.order, default=None)
        call = evidence.unreadable.get(rank, "none") if last is None else last
        state, where = ("", "") if last is None else (last.state, last.where)
        yield rank, format_coords(known["coords"]), known["host"], call, state, where


@functools.cache
def serve(record: Callable[[], dict[str, Any] | None]) -> None:
    """Serve this process's recorded calls to the debug server. Without a watch, answer 404."""

    def answer(_request: Any, response: Any) -> None:
        found = record()
        response.set_status(404 if found is None else 200)
        text = "this rank has no watch" if found is None else json.dumps(found)
        response.set_content(text, "application/json")

    register_handler(_ENDPOINT, answer)
