"""What the ranks of a job left behind, in one form, whoever wrote it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cached_property
from typing import Any

import attrs

from hypercomm.layout import RankLayout
from hypercomm.layout.text import format_coords, format_ranks

FINISHED = "finished"
"""The state of a call that has ended well; others: "queued", "started", "failed"."""

WORLD = "WORLD"
"""What the group of all ranks is called."""

FROM_ANYBODY = "recv_anysource"
"""What torch calls a receive that takes what any member sends."""

Sizes = tuple[tuple[int, ...], ...]

_ONE_SHAPE = {"all_reduce", "broadcast", "reduce", "all_gather_into_tensor"}
_ONE_SHAPE |= {"reduce_scatter_tensor", "send", "recv"}
"""What moves as much on every rank, by its first tensors; others may be uneven."""


@attrs.frozen
class GroupId:
    """Which group calls are made in: torch's name of it and its ranks, which may be unknown."""

    name: str
    ranks: tuple[int, ...]


@attrs.define(eq=False, slots=True)
class Call:
    """One collective, send or receive of one rank.

    Attributes:
        op: As in torch.distributed, "all_reduce".
        number: Which one of the group it is, from 1 on; of sends and receives, between two ranks.
        order: Which one of the rank it is.
        state: "queued", "started", "finished" or "failed".
        shapes: Of the tensors that are compared.
        dtypes: Of these.
        where: The place in the user's code; "" where nothing tells.
        peer: The other rank of a send or receive.
        channel: What sends and receives are counted by.
        root: The rank that a broadcast comes from, within the group.
        error: What a call that failed said.
    """

    op: str
    number: int
    order: int
    state: str
    shapes: Sizes = ()
    dtypes: tuple[str, ...] = ()
    where: str = ""
    peer: int | None = None
    channel: str = ""
    root: int | None = None
    error: str = ""

    @property
    def is_finished(self) -> bool:
        """Whether it has ended well."""
        return self.state == FINISHED

    @property
    def is_message(self) -> bool:
        """Whether it is a send or receive."""
        return self.peer is not None or self.op == FROM_ANYBODY

    def signature(self) -> tuple[object, ...]:
        """Return what must be equal on all members; of shapes, the number of elements."""
        op = "message" if self.peer is not None else self.op
        is_even = self.op in _ONE_SHAPE
        counts = tuple(map(math.prod, self.shapes)) if is_even else ()
        dtypes = self.dtypes if is_even else tuple(sorted(set(self.dtypes)))
        return op, counts, dtypes, self.root

    def in_words(self) -> str:
        """Return the call as one reads it: "all_reduce of (4, 2) float32"."""
        shapes = ", ".join(f"{tuple(shape)}" for shape in self.shapes[:2])
        if len(self.shapes) > 2:
            shapes += ", ..."
        dtypes = " ".join(dict.fromkeys(self.dtypes))
        of = f" of {shapes} {dtypes}".rstrip() if shapes else ""
        return self.op + of + (f" from rank {self.root} of the group" if self.root else "")


@attrs.define(eq=False)
class RankRecord:
    """What one rank left behind.

    Attributes:
        rank: The rank.
        file: The name of the file.
        source: "watch" or "flight recorder".
        world_size: The number of ranks of the job, if the file says it.
        job: What tells its job from others; "" where nothing does.
        host: Where it ran; "" where nothing tells.
        pid: Its process.
        versions: Of what wrote the file, by name.
        why: Why the file was written.
        place: The frames of its main thread, innermost first.
        layouts: Of its grid and the grid's views, by name; "" is the grid's own.
        calls: Its collectives, by group, in order.
        messages: Its sends and receives, by group and channel, in order.
        names: What groups are called where dims are known: "tp", "cp+dp of expert".
        is_whole: Whether no call is lost, as a recorder's ring may have turned.
    """

    rank: int
    file: str
    source: str
    world_size: int | None = None
    job: str = ""
    host: str = ""
    pid: int | None = None
    versions: dict[str, str] = attrs.field(factory=dict)
    why: str = ""
    place: tuple[str, ...] = ()
    layouts: dict[str, RankLayout] = attrs.field(factory=dict)
    calls: dict[GroupId, list[Call]] = attrs.field(factory=dict)
    messages: dict[GroupId, dict[str, list[Call]]] = attrs.field(factory=dict)
    names: dict[GroupId, str] = attrs.field(factory=dict)
    is_whole: bool = True

    def last(self, group: GroupId) -> int:
        """Return the number of the last collective that it entered in a group; 0 for none."""
        calls = self.calls.get(group)
        return calls[-1].number if calls else 0

    def waits_in(self, group: GroupId) -> Call | None:
        """Return its first collective of a group that has not ended; None where all have."""
        calls = self.calls.get(group, ())
        return next((call for call in calls if not call.is_finished), None)


@attrs.define(eq=False)
class Evidence:
    """What the ranks of one job left behind.

    Attributes:
        ranks: By rank.
        world_size: The number of ranks, as far as the files tell.
        source: "watch" or "flight recorder".
        unreadable: Files that cannot be read, by the rank in their name, and why.
        layout: As given, in place of what the files hold.
        notes: What to know of the files, in sentences.
    """

    ranks: dict[int, RankRecord]
    world_size: int
    source: str
    unreadable: dict[int, str] = attrs.field(factory=dict)
    layout: RankLayout | None = None
    notes: list[str] = attrs.field(factory=list)

    @cached_property
    def members(self) -> dict[GroupId, list[RankRecord]]:
        """The records of each group's members; all of them for the group of all ranks."""
        found: dict[GroupId, list[RankRecord]] = {}
        for record in self.ranks.values():
            for group in {**record.names, **record.calls, **record.messages}:
                found.setdefault(group, []).append(record)
        for group, records in found.items():
            if len(group.ranks) > len(records):
                found[group] = [self.ranks[rank] for rank in group.ranks if rank in self.ranks]
        return found

    @cached_property
    def _titles(self) -> dict[GroupId, str]:
        return {
            group: title
            for record in self.ranks.values()
            for group, title in record.names.items()
            if title
        }

    def title(self, group: GroupId) -> str:
        """Return what a group is called: its dims, "WORLD", else torch's name."""
        title = self._titles.get(group, "")
        by_layout = self._dims_of(group) if self.layout is not None else ""
        if by_layout and (not title or title == f"group {group.name}"):
            return by_layout
        return title or f"group {group.name}"

    def _dims_of(self, group: GroupId) -> str:
        """The dims of a given layout that vary among a group's ranks, if they make the group."""
        layout = self.layout
        if layout is None or len(group.ranks) < 2:
            return ""
        if any(rank not in layout for rank in group.ranks):
            return ""
        places = [layout.coords(rank) for rank in group.ranks]
        dims = [dim for dim in layout.dim_names if len({place[dim] for place in places}) > 1]
        sizes = [layout.size_of(dim) for dim in dims]
        return "+".join(dims) if math.prod(sizes) == len(group.ranks) else ""

    def coords(self, rank: int) -> dict[str, int]:
        """Return the coordinates of a rank; none where no layout tells."""
        for layout in self._layouts:
            if rank in layout:
                return layout.coords(rank)
        return {}

    @cached_property
    def _layouts(self) -> list[RankLayout]:
        if self.layout is not None:
            return [self.layout]
        found = {r.layouts[""]: None for r in self.ranks.values() if "" in r.layouts}
        return list(found)

    def who(self, rank: int) -> str:
        """Return a rank with where it is: "rank 3 (tp=1, dp=1; host a)"."""
        record, coords = self.ranks.get(rank), self.coords(rank)
        host = f"host {record.host}" if record and record.host else ""
        told = "; ".join(filter(None, [format_coords(coords), host]))
        return f"rank {rank} ({told})" if told else f"rank {rank}"

    def group_in_words(self, group: GroupId) -> str:
        """Return a group with its ranks: "tp (ranks 2..3)"."""
        ranks = f" (ranks {format_ranks(group.ranks)})" if group.ranks else ""
        return self.title(group) + ranks

    def group_form(self, group: GroupId) -> dict[str, Any]:
        """Return a group as JSON has it."""
        return {
            "dims": self.title(group),
            "torch_name": group.name,
            "ranks": list(group.ranks),
        }


def call_form(call: Call) -> Mapping[str, Any]:
    """Return a call as JSON has it."""
    return {
        "op": call.op,
        "number": call.number,
        "state": call.state,
        "shapes": [list(shape) for shape in call.shapes],
        "dtypes": list(call.dtypes),
        "peer": call.peer,
        "where": call.where,
    }
