"""What the ranks of a simulated job call, in few bytes for each call."""

from __future__ import annotations

import inspect
from array import array
from collections.abc import Iterator, Mapping, Sequence
from enum import IntEnum
from pathlib import Path
from typing import Any

import attrs
import torch

from hypercomm.layout.text import some_of
from hypercomm.testing.simulation.creations import Creation, who_waits

_HIDDEN = (f"{Path(inspect.getfile(torch)).parent}/", f"{Path(__file__).parents[2]}/")
"""Where no user's code is: torch and this library."""
_SHOWN = 2
"""Shapes of one call that a text shows."""

OBJECTS = "objects"
"""Stands for the dtype of what is pickled."""


class Kind(IntEnum):
    """What a rank does at one place of its sequence; the value goes with it."""

    CREATES = 0
    """It creates a group and waits for the members; which of its creations."""
    CALLS = 1
    """It calls a collective and waits for it; which record."""
    BEGINS = 2
    """It calls one and goes on; which record."""
    WAITS = 3
    """It waits for one that it has begun; where in its sequence that was."""


@attrs.frozen
class Collective:
    """A collective that a rank of a simulated job called, or a send or receive.

    Attributes:
        op: What was called, as torch.distributed names it.
        group: The process group.
        shapes: The shapes of the tensors, one where all are alike; of objects, their number.
        dtype: The dtype of the tensors, "objects" for pickled objects, or "" without either.
        reduction: How it reduces, such as "sum"; "" if it does not.
        peer: The rank of the job that it sends to or receives from; None if there is none.
        sends: Of an all-to-all, how much goes to each member.
        receives: Of an all-to-all, how much comes from each member.
        tag: The tag of a send or receive.
        place: Where it was called: path and line.
    """

    op: str
    group: Creation
    shapes: tuple[tuple[int, ...], ...]
    dtype: str
    reduction: str
    peer: int | None
    sends: tuple[Any, ...] | None
    receives: tuple[Any, ...] | None
    tag: int
    place: str

    @property
    def where(self) -> str:
        """The op, its group and its place, in words."""
        return f"{self.op} on {self.group.called}{self._at}"

    @property
    def _at(self) -> str:
        return f" at {Path(self.place).name}" if self.place else ""

    def __str__(self) -> str:
        shapes = some_of([str(list(shape)) for shape in self.shapes], _SHOWN)
        of = f" of {self.dtype}{shapes}" if self.dtype else ""
        how = f" ({self.reduction})" if self.reduction else ""
        toward = "to" if self.op.startswith(("send", "reduce", "gather")) else "from"
        peer = "" if self.peer is None else f" {toward} rank {self.peer}"
        tag = f" with tag {self.tag}" if self.tag else ""
        return f"{self.op}{of}{how}{peer}{tag}{self._at}"


@attrs.frozen
class CallDisagreement:
    """A collective that would not meet, or a message without its other end; str() says why.

    Attributes:
        group: The process group.
        number: Which call it is: of a collective, of those of this group on each rank, from 1; of
            a message, of those from one rank to another.
        calls: What ranks called, by rank.
        absent: Why each other rank does not come, by rank.
        differs: How the calls do not fit together; "" if they do.
    """

    group: Creation
    number: int
    calls: Mapping[int, Collective]
    absent: Mapping[int, str]
    differs: str = ""

    @property
    def waiting(self) -> tuple[int, ...]:
        """The ranks that called."""
        return tuple(sorted(self.calls))

    def __str__(self) -> str:
        call = self.calls[self.waiting[0]]
        if self.differs:
            return f"call {self.number} on {self.group}: {self.differs}"
        what = f"call {self.number} on {self.group}, {call}"
        return f"{what}: {who_waits(self.waiting, self.absent)}"


@attrs.frozen
class Key:
    """All that is recorded of a call, as it comes: equal calls share one."""

    group: int
    op: str
    shapes: tuple[tuple[int, ...], ...]
    dtype: object
    reduction: str
    peer: int | None
    sends: tuple[Any, ...] | None
    receives: tuple[Any, ...] | None
    tag: int

    @property
    def agrees(self) -> tuple[object, ...]:
        """What has to be the same for all members."""
        return self.op, self.shapes, self.dtype, self.reduction, self.peer


class Ledger:
    """What the ranks of a job do, in their order: creations, collectives, sends and receives.

    Attributes:
        groups: The groups that anything was called on, as the first rank sees them.
        streams: By rank, what it does: values of `Kind` with what goes with it, four times that.
    """

    def __init__(self) -> None:
        self.groups: list[Creation] = []
        self.streams: dict[int, array[int]] = {}
        self._group_ids: dict[str, int] = {}
        self._ids: dict[tuple[object, ...], int] = {}
        self._keys: list[tuple[Key, str, int]] = []
        self._known: dict[int, Collective] = {}
        self._stream: array[int] = array("q")
        self._counts: dict[int, int] = {}
        self._creations = 0

    def begin(self, rank: int) -> None:
        """Write down what comes as that of a rank."""
        self._stream = self.streams[rank] = array("q")
        self._counts = {}
        self._creations = 0

    def number_of(self, group: Creation) -> int:
        """Return the number of a group, by its name."""
        number = self._group_ids.setdefault(group.name, len(self.groups))
        if number == len(self.groups):
            self.groups.append(group)
        return number

    def create(self) -> None:
        """Write down that the rank creates its next group."""
        self._stream.append(self._creations << 2 | Kind.CREATES)
        self._creations += 1

    def call(self, *fields: Any) -> int:
        """Write down a call, whose fields are those of `Key`; return its place in the sequence."""
        path, line = _place()
        key = (*fields, path, line)
        found = self._ids.get(key)
        if found is None:
            found = self._ids[key] = len(self._keys)
            self._keys.append((Key(*fields), path, line))
        self._stream.append(found << 2 | Kind.BEGINS)
        return len(self._stream) - 1

    def count(self, group: int) -> int:
        """Count the collectives of a group on this rank, and return how many were before."""
        before = self._counts.get(group, 0)
        self._counts[group] = before + 1
        return before

    def wait(self, stream: array[int], place: int) -> None:
        """Write down that the rank waits for what it called at a place of its sequence."""
        if stream is not self._stream:
            return  # another rank's
        if place == len(stream) - 1:
            stream[place] = stream[place] >> 2 << 2 | Kind.CALLS
        elif stream[place] & 3 == Kind.BEGINS:
            stream.append(place << 2 | Kind.WAITS)

    @property
    def current(self) -> array[int]:
        """The sequence of the rank whose turn it is."""
        return self._stream

    def key(self, record: int) -> Key:
        """Return what is recorded of a call."""
        return self._keys[record][0]

    def collective(self, record: int) -> Collective:
        """Return a call as users see it."""
        if record not in self._known:
            key, path, line = self._keys[record]
            dtype = "" if key.dtype is None else str(key.dtype).removeprefix("torch.")
            self._known[record] = Collective(
                key.op,
                self.groups[key.group],
                tuple(tuple(map(int, shape)) for shape in key.shapes),
                dtype,
                key.reduction,
                key.peer,
                key.sends,
                key.receives,
                key.tag,
                f"{path}:{line}" if path else "",
            )
        return self._known[record]


class Collectives(Mapping[int, Sequence[Collective]]):
    """What each rank called, in its order; made when asked for."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger

    def __getitem__(self, rank: int) -> tuple[Collective, ...]:
        return tuple(
            self._ledger.collective(token >> 2)
            for token in self._ledger.streams[rank]
            if token & 3 in (Kind.CALLS, Kind.BEGINS)
        )

    def __iter__(self) -> Iterator[int]:
        return iter(self._ledger.streams)

    def __len__(self) -> int:
        return len(self._ledger.streams)

    def count(self, rank: int) -> int:
        """Return how many calls a rank made."""
        return sum(token & 3 in (Kind.CALLS, Kind.BEGINS) for token in self._ledger.streams[rank])

    def __repr__(self) -> str:
        return f"<collectives of {len(self):,} ranks>"


_IS_HIDDEN: dict[str, bool] = {}


def _place() -> tuple[str, int]:
    """Return the file and the line that called, leaving out torch and this library."""
    frame = inspect.currentframe()
    while frame is not None:
        path = frame.f_code.co_filename
        hidden = _IS_HIDDEN.get(path)
        if hidden is None:
            hidden = _IS_HIDDEN[path] = path.startswith(_HIDDEN) or path.endswith("/contextlib.py")
        if not hidden:
            return path, frame.f_lineno
        frame = frame.f_back
    return "", 0
