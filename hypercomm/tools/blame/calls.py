"""The calls that the ranks of a job recorded, in one form for dumps and simulations."""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from functools import cached_property
from typing import Any

import attrs

from hypercomm.layout import RankLayout
from hypercomm.layout.text import format_coords, format_ranks, some_of

WORLD = "WORLD"  # the title of the group of all ranks
FROM_ANYBODY = "recv anybody"  # the channel of receives without a source


@attrs.frozen(cache_hash=True)
class Group:
    """A process group.

    Attributes:
        name: torch's name.
        ranks: Its ranks.
        title: Its dims, "cp+dp of expert", else "WORLD" or "group 7"; "" in a simulation.
    """

    name: str
    ranks: Sequence[int]
    title: str = attrs.field(default="", eq=False)


@attrs.define(eq=False)
class Call:
    """One collective, send or receive of one rank, or one creation of a group.

    Attributes:
        op: The name in torch.distributed, "all_reduce".
        group: The group.
        number: The position in its lane (the collectives of a group, or a channel), from 1.
        order: The position among all calls of the rank.
        state: "queued", "started" or "finished".
        terms: The values that must be equal on all members: op, sizes, dtypes and others.
        shapes: The shapes of the first tensors.
        dtypes: Their dtypes.
        where: The line of the user's code; "" if unknown.
        peer: The other rank of a send or receive.
        channel: "" for a collective, "send 0->1" for a message, "recv anybody" without a source.
        source: The object that the call was made from.
    """

    op: str
    group: Group
    number: int
    order: int
    state: str
    terms: tuple[object, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    where: str = ""
    peer: int | None = None
    channel: str = ""
    source: Any = None

    def __str__(self) -> str:
        """Return the call with its group: "all_reduce number 5 of tp (ranks 2..3)"."""
        end = ""
        if self.channel:
            peer = "any rank" if self.peer is None else f"rank {self.peer}"
            end = f" {'to' if self.op == 'send' else 'from'} {peer}"
        ranks = format_ranks(self.group.ranks)
        return f"{self.op} number {self.number}{end} of {self.group.title} (ranks {ranks})"

    @property
    def at(self) -> str:
        """The line in words: " at train.py:40 in step"."""
        return f" at {self.where}" if self.where else ""

    @property
    def tensors(self) -> str:
        """The tensors in words: " with (4, 8) float32"."""
        dtypes = " ".join(dict.fromkeys(self.dtypes))
        return f" with {some_of(self.shapes, 2)} {dtypes}" if self.shapes else ""


# A group and a channel: calls of one lane are numbered together.
Lane = tuple[Group, str]


@attrs.define(eq=False)
class Record:
    """The calls of one rank, and what its dump says about its process.

    Attributes:
        rank: The rank.
        lanes: The calls of each lane, in order.
        counts: The number of the last call of each lane.
        groups: The groups of the rank.
        is_whole: Whether a lane that is not counted had no calls; False if older ones are lost.
        file: The name of the dump.
        host: The host; "" if unknown.
        why: Why the dump was written.
        place: The frames of the main thread, innermost first.
        layout: The layout of the grid; None if unknown.
    """

    rank: int
    lanes: dict[Lane, list[Call]] = attrs.field(factory=dict)
    counts: dict[Lane, int] = attrs.field(factory=dict)
    groups: Collection[Group] = ()
    is_whole: bool = True
    file: str = ""
    host: str = ""
    why: str = ""
    place: tuple[str, ...] = ()
    layout: RankLayout | None = None

    def add(self, call: Call) -> None:
        """Append a call to its lane."""
        lane = call.group, call.channel
        self.lanes.setdefault(lane, []).append(call)
        self.counts[lane] = call.number

    def is_at(self, call: Call) -> bool:
        """Return whether the rank may be inside a call, going by its stack."""
        return not self.place or call.where in self.place


@attrs.define(eq=False)
class Evidence:
    """The records of the ranks of one job.

    Attributes:
        ranks: The records by rank.
        world_size: The number of ranks.
        unreadable: Why the dump of a rank cannot be read, by rank.
        layout: The layout of the job; None if unknown.
    """

    ranks: dict[int, Record]
    world_size: int
    unreadable: dict[int, str] = attrs.field(factory=dict)
    layout: RankLayout | None = None

    @property
    def missing(self) -> list[int]:
        """The ranks without a dump that can be read."""
        return [rank for rank in range(self.world_size) if rank not in self.ranks]

    @cached_property
    def lanes(self) -> dict[Lane, dict[int, list[Call]]]:
        """The calls of each lane, by rank."""
        found: dict[Lane, dict[int, list[Call]]] = {}
        for record in self.ranks.values():
            for lane, calls in record.lanes.items():
                found.setdefault(lane, {})[record.rank] = calls
        return found

    def last(self, rank: int, group: Group, channel: str = "") -> float:
        """Return the number of the last call of a rank in a lane; infinite if it is unknown."""
        record = self.ranks.get(rank)
        if record is None:
            return 0
        return record.counts.get((group, channel), 0 if record.is_whole else math.inf)

    def has_channels(self, rank: int, group: Group) -> bool:
        """Return whether the messages of a rank in a group can be matched with those of others."""
        record = self.ranks.get(rank)
        return record is None or (record.is_whole and (group, FROM_ANYBODY) not in record.lanes)

    def describe(self, rank: int) -> dict[str, Any]:
        """Return a rank with its coordinates and its host, as far as they are known."""
        layout, record = self.layout, self.ranks.get(rank)
        coords = layout.coords(rank) if layout is not None and rank in layout else {}
        return {"rank": rank, "coords": coords, "host": "" if record is None else record.host}

    def name(self, rank: int) -> str:
        """Return a rank with its position: "rank 3 (tp=1, dp=1; host a)"."""
        known = self.describe(rank)
        host = f"host {known['host']}" if known["host"] else ""
        details = "; ".join(filter(None, [format_coords(known["coords"]), host]))
        return f"rank {rank} ({details})" if details else f"rank {rank}"
