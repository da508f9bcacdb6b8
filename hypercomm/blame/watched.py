"""What `grid.watch` wrote, read again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from hypercomm.blame.records import FROM_ANYBODY, Call, GroupId, RankRecord
from hypercomm.layout import RankLayout

MARK = "hypercomm_watch"
"""The field that says that a JSON file is of a watch, and which form it has."""

FORM = 1
"""The form that is written now."""

KEPT = 100
"""The most calls of one group that are written, the last ones."""


def read(found: Mapping[str, Any], file: str) -> RankRecord:
    """Read what one rank's watch wrote.

    Args:
        found: The file's content.
        file: Its name.

    Raises:
        KeyError, TypeError, ValueError: It has another form.
    """
    if found[MARK] != FORM:
        raise ValueError(f"it has form {found[MARK]!r} of a watch; this hypercomm reads {FORM}")
    record = RankRecord(
        rank=int(found["rank"]),
        file=file,
        source="watch",
        world_size=int(found["world_size"]),
        job=str(found["job"]),
        host=str(found["host"]),
        pid=int(found["pid"]),
        versions={"torch": str(found["torch"]), "hypercomm": str(found["hypercomm"])},
        why=str(found["why"]),
        place=tuple(map(str, found["place"])),
        layouts={
            name: RankLayout.from_json(json.dumps(fields))
            for name, fields in found["layouts"].items()
        },
    )
    for entry in found["groups"]:
        group = GroupId(str(entry["name"]), tuple(map(int, entry["ranks"])))
        record.names[group] = str(entry["title"])
        for fields in entry["calls"]:
            call = _call(fields)
            if call.op == FROM_ANYBODY:  # numbered by itself, and of no sender
                record.messages.setdefault(group, {}).setdefault("recv anybody", []).append(call)
            elif call.peer is None:
                record.calls.setdefault(group, []).append(call)
            else:
                channels = record.messages.setdefault(group, {})
                channels.setdefault(f"{call.op} {call.channel}", []).append(call)
    return record


def _call(fields: Mapping[str, Any]) -> Call:
    peer, root = fields.get("peer"), fields.get("root")
    return Call(
        op=str(fields["op"]),
        number=int(fields["number"]),
        order=int(fields["order"]),
        state=str(fields["state"]),
        shapes=tuple(tuple(map(int, shape)) for shape in fields["shapes"]),
        dtypes=tuple(map(str, fields["dtypes"])),
        where=str(fields["where"]),
        peer=None if peer is None else int(peer),
        channel=str(fields.get("channel", "")),
        root=None if root is None else int(root),
        error=str(fields.get("error", "")),
    )
