"""The groups that the ranks of a simulated job create, and the calls that they make."""

from __future__ import annotations

import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Hashable, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch

from hypercomm.layout.text import some_of

OBJECTS = "objects"
"""The dtype of pickled objects."""

CREATE, CALL, BEGIN, WAIT = "create", "call", "begin", "wait"
"""The kinds of steps: create a group, call and wait, call without waiting, wait for a call."""

Step = tuple[str, Any]
"""A kind with a Creation, a Collective, or the index of the step that is waited for."""

_HIDDEN = (f"{Path(inspect.getfile(torch)).parent}/", f"{Path(__file__).parents[2]}/")
_SHOWN_RANKS, _SHOWN_SHAPES = 4, 2


class Creation(NamedTuple):
    """A process group that a rank would create.

    Attributes:
        name: Its name, which is the same on all members.
        ranks: The members, in group order.
        backend: Its backend.
        timeout: Its timeout.
        description: Its description in torch's logs; the dims of a grid's group.
    """

    name: str
    ranks: Sequence[int]
    backend: str
    timeout: timedelta
    description: str

    @property
    def called(self) -> str:
        """The description; without one, the name."""
        return self.name if self.description == "undefined" else self.description

    def __str__(self) -> str:
        shown = ", ".join(map(str, self.ranks[:_SHOWN_RANKS]))
        more = "" if len(self.ranks) <= _SHOWN_RANKS else f", ..., {self.ranks[-1]}"
        return f"{self.called} of ranks ({shown}{more})"


class Collective(NamedTuple):
    """A collective, send or receive that a rank of a simulated job called.

    Attributes:
        op: The name in torch.distributed.
        group: The process group.
        shapes: The shapes of the tensors, one if all are equal; of objects, their number.
        dtype: The dtype of the tensors, "objects" for pickled objects, or "" without either.
        reduction: The reduction, such as "sum"; "" without one.
        peer: The root, or the other rank of a send or receive, in the job; None without one.
        sends: The sizes that an all-to-all sends to each member.
        receives: The sizes that an all-to-all receives from each member.
        tag: The tag of a send or receive.
        place: The path and line of the call.
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
        """The op, its group and its place in words."""
        return f"{self.op} on {self.group.called}{self._at}"

    @property
    def _at(self) -> str:
        return f" at {Path(self.place).name}" if self.place else ""

    def __str__(self) -> str:
        shapes = some_of([str(list(shape)) for shape in self.shapes], _SHOWN_SHAPES)
        of = f" of {self.dtype}{shapes}" if self.dtype else ""
        how = f" ({self.reduction})" if self.reduction else ""
        toward = "to" if self.op.startswith(("send", "reduce", "gather")) else "from"
        peer = "" if self.peer is None else f" {toward} rank {self.peer}"
        tag = f" with tag {self.tag}" if self.tag else ""
        return f"{self.op}{of}{how}{peer}{tag}{self._at}"


class Book:
    """The steps of each rank, and the values that earlier ranks leave for later ones.

    Args:
        ranks: The simulated ranks, in ascending order.

    Attributes:
        programs: The steps of each rank, in its order.
        steps: The steps of the current rank.
    """

    def __init__(self, ranks: Collection[int]) -> None:
        self.programs: dict[int, list[Step]] = {}
        self.steps: list[Step] = []
        self._ranks = ranks
        self._rank = 0
        self._turns: Counter[str] = Counter()
        self._spread: dict[tuple[str, int], tuple[Hashable, Any]] = {}
        self._sent: defaultdict[tuple[str, int, int], list[tuple[int, Hashable, Any]]]
        self._sent = defaultdict(list)

    def begin(self, rank: int) -> None:
        """Record the next steps as those of a rank."""
        self._rank = rank
        self.steps = self.programs[rank] = []
        self._turns.clear()

    def call(self, *fields: Any) -> int:
        """Record a call with the fields of `Collective` but the place; return its index."""
        self.steps.append((BEGIN, Collective._make((*fields, _place()))))
        return len(self.steps) - 1

    def wait(self, steps: list[Step], index: int) -> None:
        """Record that the current rank waits for a call; ignored for a call of another rank."""
        if steps is not self.steps:
            return
        kind, call = steps[index]
        if index == len(steps) - 1:
            steps[index] = (CALL, call)
        elif kind == BEGIN:
            steps.append((WAIT, index))

    def has_later(self, ranks: Sequence[int]) -> bool:
        """Return whether any of some ranks is simulated after the current one."""
        return any(rank > self._rank and rank in self._ranks for rank in reversed(ranks))

    def spread(
        self, group: Creation, is_root: bool, kind: Hashable, value: Callable[[], Any]
    ) -> Any:
        """Keep the root's value for later members; return it to them, else None."""
        self._turns[group.name] += 1
        turn = (group.name, self._turns[group.name])
        if is_root:
            if self.has_later(group.ranks):
                self._spread[turn] = (kind, value())
            return None
        found = self._spread.get(turn)
        if found is not None and not self.has_later(group.ranks):
            del self._spread[turn]
        return found[1] if found is not None and found[0] == kind else None

    def send(
        self, group: Creation, to: int, tag: int, kind: Hashable, value: Callable[[], Any]
    ) -> None:
        """Keep a value for one rank, if it runs later."""
        if self.has_later([to]):
            self._sent[group.name, to, tag].append((self._rank, kind, value()))

    def receive(
        self, group: Creation, source: int | None, tag: int, kind: Hashable
    ) -> tuple[int, Any] | None:
        """Return the first sender and its value; None if no sender has run yet."""
        waiting = self._sent.get((group.name, self._rank, tag), [])
        for place, (sender, sent, value) in enumerate(waiting):
            if source in (None, sender):
                del waiting[place]
                return sender, value if sent == kind else None
        return None


_IS_HIDDEN: dict[str, bool] = {}


def _place() -> str:
    """Return the file and line of the call, outside torch and this library."""
    frame = inspect.currentframe()
    while frame is not None:
        path = frame.f_code.co_filename
        hidden = _IS_HIDDEN.get(path)
        if hidden is None:
            hidden = _IS_HIDDEN[path] = path.startswith(_HIDDEN) or path.endswith("/contextlib.py")
        if not hidden:
            return f"{path}:{frame.f_lineno}"
        frame = frame.f_back
    return ""
