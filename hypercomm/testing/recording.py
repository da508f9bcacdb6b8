"""Records the groups that ranks of a simulated job create, and the collectives that they call."""

from __future__ import annotations

import functools
import inspect
import sys
from collections import Counter
from collections.abc import Collection, Sequence
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch

from hypercomm.blame.evidence import FROM_ANYBODY, LoggedCall, LoggedGroup
from hypercomm.layout.text import first_n

# The op that stands for the creation of a group.
CREATION = "create"

_HIDDEN = (f"{Path(inspect.getfile(torch)).parent}/", f"{Path(__file__).parents[1]}/")
# Functions of torch that call several collectives, but are recorded as one call.
_OBJECT_CALLS = frozenset(
    {"all_gather_object", "gather_object", "broadcast_object_list", "scatter_object_list"}
    | {"send_object_list", "recv_object_list"}
)


class RecordedGroup(NamedTuple):
    """A process group that a rank would create.

    Attributes:
        name: The name of the group, which is the same on all members.
        ranks: The members, in group order.
        backend: The backend of the group.
        timeout: The timeout of the group.
        description: The description of the group in torch's logs. For a group of a grid, it
            contains the dims.
    """

    name: str
    ranks: Sequence[int]
    backend: str
    timeout: timedelta
    description: str

    @property
    def called(self) -> str:
        """The description, or the name if there is no description."""
        return self.name if self.description == "undefined" else self.description

    def __str__(self) -> str:
        end = f", ..., {self.ranks[-1]}" if len(self.ranks) > 4 else ""
        return f"{self.called} of ranks ({', '.join(map(str, self.ranks[:4]))}{end})"


class Collective(NamedTuple):
    """A collective, send or receive that a rank of a simulated job called.

    Attributes:
        op: The name of the function in torch.distributed.
        group: The process group.
        shapes: The shapes of the tensors, or one shape if all are equal. For pickled objects,
            the number of objects.
        dtype: The dtype of the tensors, "objects" for pickled objects, or "" for a barrier.
        reduction: The reduction, such as "sum", or "".
        peer: The root, or the other rank of a send or receive, as a rank of the job, or None.
        tag: The tag of a send or receive.
        place: The path and line of the call.
    """

    op: str
    group: RecordedGroup
    shapes: tuple[tuple[int, ...], ...]
    dtype: str = ""
    reduction: str = ""
    peer: int | None = None
    tag: int = 0
    place: str = ""

    @property
    def called(self) -> str:
        """The op, its group and its source line as text."""
        return f"{self.op} on {self.group.called}{self._at}"

    @property
    def _at(self) -> str:
        return f" at {Path(self.place).name}" if self.place else ""

    def __str__(self) -> str:
        shapes = first_n([str(list(shape)) for shape in self.shapes], 2)
        of = f" of {self.dtype}{shapes}" if self.dtype else ""
        how = f" ({self.reduction})" if self.reduction else ""
        toward = "to" if self.op.startswith(("send", "reduce", "gather")) else "from"
        peer = "" if self.peer is None else f" {toward} rank {self.peer}"
        tag = f" with tag {self.tag}" if self.tag else ""
        return f"{self.op}{of}{how}{peer}{tag}{self._at}"


# A step of a rank is (False, call) if the rank starts a call, and (True, call) if the rank waits
# until the call has ended.
Step = tuple[bool, LoggedCall]


class Book:
    """Records the steps of each rank, and the values that a rank posts for later ranks.

    Args:
        simulated: The ranks that are simulated.

    Attributes:
        programs: The steps of each rank, in the order of its program.
        steps: The steps of the current rank.
        has_objects: Whether the last recorded call moves pickled objects.
    """

    def __init__(self, simulated: Collection[int]) -> None:
        self.programs: dict[int, list[Step]] = {}
        self.steps: list[Step] = []
        self.has_objects = False
        self._simulated = simulated
        self._groups: dict[str, LoggedGroup] = {}
        self._counts: Counter[tuple[LoggedGroup, str]] = Counter()
        self._objects: FrameType | None = None
        self._turns: Counter[tuple[str, str]] = Counter()
        self._values: dict[tuple[tuple[str, str], int], Any] = {}

    def begin(self, rank: int) -> None:
        """Record the following steps for a rank."""
        self._objects = None
        self.steps = self.programs[rank] = []
        self._counts.clear()
        self._turns.clear()

    def create(self, made: RecordedGroup) -> None:
        """Record that the rank creates a group and waits for the other members."""
        group = self._group(f"{CREATION} {made.name}", made)
        call = LoggedCall(CREATION, group, 1, len(self.steps), "started", terms=made, source=made)
        self.steps += [(False, call), (True, call)]

    def call(self, made: Collective, channel: str = "") -> LoggedCall:
        """Record a call and its source line. `channel` has the same meaning as in `LoggedCall`."""
        place, objects = _caller()
        self.has_objects = objects is not None
        if objects is not None and objects is self._objects:
            return self.steps[-1][1]  # a further collective of the same object call
        self._objects = objects
        if objects is not None:
            peer = made.peer
            if objects.f_code.co_name == "gather_object":
                peer = made.group.ranks[objects.f_locals["group_dst"]]
            made = made._replace(op=objects.f_code.co_name, dtype="objects", peer=peer)
        made = made._replace(place=place)
        group = self._group(made.group.name, made.group)
        state = "finished" if channel == FROM_ANYBODY else "started"
        terms: tuple[object, ...] = ("message", made.shapes, made.dtype)
        if not channel:
            terms = (made.op, made.shapes, made.dtype, made.peer, made.reduction)
        self._counts[group, channel] += 1
        number = self._counts[group, channel]
        call = LoggedCall(made.op, group, number, len(self.steps), state, terms, source=made)
        call.peer = made.peer
        call.channel = channel
        self.steps.append((False, call))
        return call

    def _group(self, name: str, made: RecordedGroup) -> LoggedGroup:
        if name not in self._groups:
            members = tuple(rank for rank in made.ranks if rank in self._simulated)
            self._groups[name] = LoggedGroup(name, members)
        return self._groups[name]

    def post(self, lane: tuple[str, str], value: Any) -> None:
        """Store a value. In each lane, the n-th `take` of another rank returns the n-th value.

        A lane is a pair: the name of a group, and the route of a message or "" for a collective.
        """
        self._turns[lane] += 1
        self._values[lane, self._turns[lane]] = value

    def take(self, lane: tuple[str, str]) -> Any:
        """Return the next value of a lane, or None if the rank that posts it has not run yet."""
        self._turns[lane] += 1
        return self._values.get((lane, self._turns[lane]))


def _caller() -> tuple[str, FrameType | None]:
    """Return the caller's file and line, and torch's frame if an object collective is active."""
    frame = sys._getframe()
    objects = None
    while frame.f_back is not None and _is_hidden(frame.f_code.co_filename):
        if frame.f_code.co_name in _OBJECT_CALLS:
            objects = frame
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}", objects


@functools.lru_cache(maxsize=4096)
def _is_hidden(path: str) -> bool:
    return path.startswith(_HIDDEN) or path.endswith("/contextlib.py")
