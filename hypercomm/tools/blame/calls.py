"""The calls that the ranks of a job recorded, in one form for dumps and simulations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import attrs

from hypercomm.layout import RankLayout
from hypercomm.layout.text import format_coords, format_ranks

WORLD = "WORLD"
"""The title of the group of all ranks."""

FROM_ANYBODY = "recv_anysource"
"""The op of a receive without a source."""

_ONE_SHAPE = frozenset(
    {"all_reduce", "broadcast", "reduce", "all_gather_into_tensor"}
    | {"reduce_scatter_tensor", "send", "recv"}
)
"""Ops whose first tensors have the same size on every rank; those of other ops may be uneven."""


@attrs.frozen(cache_hash=True)
class Group:
    """A process group: torch's name and its ranks, which may be unknown (empty)."""

    name: str
    ranks: Sequence[int]


@attrs.define(eq=False)
class Call:
    """One collective, send or receive of one rank, or one creation of a group.

    Attributes:
        op: The name in torch.distributed, "all_reduce".
        group: The group.
        number: The position in its lane (the collectives of a group, or a channel), from 1.
        order: The position among all calls of the rank.
        state: "queued", "started" or "finished".
        terms: The values that must be equal on all members: op, shape, dtype, root and others.
        shapes: The shapes of the first tensors.
        dtypes: Their dtypes.
        where: The line of the user's code; "" if unknown.
        peer: The other rank of a send or receive.
        channel: "" for a collective, "send 0->1" for a message, "recv anybody" without a source.
        root: The root of a broadcast, as a rank of the group.
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
    root: int | None = None
    source: Any = None

    def __str__(self) -> str:
        shapes = ", ".join(map(str, self.shapes[:2])) + (", ..." if len(self.shapes) > 2 else "")
        of = f" of {shapes} {' '.join(dict.fromkeys(self.dtypes))}".rstrip() if shapes else ""
        root = f" from rank {self.root} of the group" if self.root else ""
        return self.op + of + root + self.at

    @property
    def at(self) -> str:
        """The line in words: " at train.py:40 in step"."""
        return f" at {self.where}" if self.where else ""

    def agree_on_tensors(self) -> None:
        """Set the terms from op, shapes, dtypes and root; of shapes, compare the sizes."""
        is_even = self.op in _ONE_SHAPE
        op = "message" if self.channel else self.op
        sizes = tuple(math.prod(shape) for shape in self.shapes) if is_even else ()
        dtypes = self.dtypes if is_even else tuple(sorted(set(self.dtypes)))
        self.terms = op, sizes, dtypes, self.root


Lane = tuple[Group, str]
"""A group and a channel: calls of one lane are numbered together."""


@attrs.define(eq=False)
class Record:
    """The calls of one rank, and what its dump says about its process.

    Attributes:
        rank: The rank.
        lanes: The calls of each lane, in order.
        counts: The number of the last call of each lane.
        titles: The names of groups by dims: "tp", "cp+dp of expert".
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
    titles: dict[Group, str] = attrs.field(factory=dict)
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
        layout: A layout from the user, which replaces those of the dumps.
        notes: Remarks about the files.
    """

    ranks: dict[int, Record]
    world_size: int
    unreadable: dict[int, str] = attrs.field(factory=dict)
    layout: RankLayout | None = None
    notes: list[str] = attrs.field(factory=list)

    def last(self, rank: int, group: Group, channel: str = "") -> float:
        """Return the number of the last call of a rank in a lane; infinite if it is unknown."""
        record = self.ranks.get(rank)
        if record is None:
            return 0
        return record.counts.get((group, channel), 0 if record.is_whole else math.inf)

    @cached_property
    def lanes(self) -> dict[Lane, dict[int, list[Call]]]:
        """The calls of each lane, by rank."""
        found: dict[Lane, dict[int, list[Call]]] = {}
        for record in self.ranks.values():
            for lane, calls in record.lanes.items():
                found.setdefault(lane, {})[record.rank] = calls
        return found

    @cached_property
    def _titles(self) -> dict[Group, str]:
        found: dict[Group, str] = {}
        for record in self.ranks.values():
            found.update(record.titles)
        for group, title in found.items():
            if self.layout is not None and (not title or title == f"group {group.name}"):
                found[group] = _dims_of(group.ranks, self.layout) or title
        return found

    def title(self, group: Group) -> str:
        """Return the name of a group: its dims, "WORLD", else torch's name."""
        return self._titles.get(group) or f"group {group.name}"

    def members(self, group: Group) -> Iterable[int]:
        """Return the ranks of a group, also if its dump does not list them."""
        if not group.ranks and self.title(group) == WORLD:
            return range(self.world_size)
        return group.ranks or [rank for rank, one in self.ranks.items() if group in one.titles]

    def coords(self, rank: int) -> dict[str, int]:
        """Return the coordinates of a rank; empty if no layout is known."""
        layout = self.layout or self._grid
        return layout.coords(rank) if layout is not None and rank in layout else {}

    @cached_property
    def _grid(self) -> RankLayout | None:
        return next((one.layout for one in self.ranks.values() if one.layout is not None), None)

    def describe_rank(self, rank: int) -> str:
        """Return a rank with its position: "rank 3 (tp=1, dp=1; host a)"."""
        host = self.ranks[rank].host if rank in self.ranks else ""
        known = [format_coords(self.coords(rank)), f"host {host}" if host else ""]
        details = "; ".join(filter(None, known))
        return f"rank {rank} ({details})" if details else f"rank {rank}"

    def describe_group(self, group: Group) -> str:
        """Return a group with its ranks: "tp (ranks 2..3)"."""
        ranks = f" (ranks {format_ranks(group.ranks)})" if group.ranks else ""
        return self.title(group) + ranks

    def describe_call(self, call: Call) -> str:
        """Return a call with its number and group: "all_reduce number 5 of tp (ranks 2..3)"."""
        group = self.describe_group(call.group)
        if not call.channel:
            return f"{call.op} number {call.number} of {group}"
        if call.peer is None:
            return f"recv number {call.number} from any rank in {group}"
        way = "to" if call.op == "send" else "from"
        return f"{call.op} number {call.number} {way} rank {call.peer} in {group}"


def _dims_of(ranks: Sequence[int], layout: RankLayout) -> str:
    """Return the dims that vary among ranks, if these dims make exactly this group."""
    if len(ranks) < 2 or any(rank not in layout for rank in ranks):
        return ""
    places = [layout.coords(rank) for rank in ranks]
    dims = [dim for dim in layout.dim_names if len({place[dim] for place in places}) > 1]
    is_group = math.prod(layout.size_of(dim) for dim in dims) == len(ranks)
    return "+".join(dims) if is_group else ""
