"""The recorder: which collectives this process has called, in each group, and whether they ended.

While it is on, the methods of torch's ProcessGroup class that communicate are replaced by ones
that write down the call first. So it sees every call that is made from Python, however its
function was imported, also those that FSDP and pipelines make; it does not see what C++ calls by
itself: the buckets of DistributedDataParallel, and functional collectives (DTensor, compiled code).
"""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import typing_extensions
from torch import Tensor
from torch.distributed import ProcessGroup

import hypercomm
from hypercomm.blame.watched import KEPT
from hypercomm.process_groups import torch_internals as c10d

_MOST_PENDING = 1000
"""Calls whose end is looked for; of a message that nobody waits for, gloo never says it."""

MOST_WORDS = 120
"""Characters of an error that are kept."""

_MOST_TENSORS = 8
"""Tensors of one call whose shapes are kept, at most."""

_ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})
_MESSAGES = frozenset({"send", "recv"})

LIBRARIES = (
    *(f"{Path(module.__file__ or '').parent}/" for module in (torch, hypercomm)),
    *(module.__file__ or "" for module in (contextlib, functools, typing_extensions)),
)
"""How the names of files begin that are no user's: decorators of torch stand in the last ones."""


class Entry:
    """One call.

    Attributes:
        op: As in torch.distributed.
        number: Which one of its group, or of its channel, from 1 on.
        order: Which one of this process.
        tensors: Shape and dtype of each tensor.
        where: File, line and function of the user's code.
        peer: The other rank of a message, within the group.
        channel: Who sends to whom, within the group, under which tag.
        root: The group's rank that a broadcast comes from.
        state: "started", "finished" or "failed".
        error: What it raised.
        begin: When it was called.
    """

    __slots__ = (
        *("begin", "channel", "error", "number", "op", "order", "peer", "root", "state"),
        *("tensors", "where", "work"),
    )

    def __init__(self, op: str, order: int) -> None:
        self.op, self.order = op, order
        self.number = 0
        self.tensors: list[tuple[torch.Size, torch.dtype]] = []
        self.where: tuple[str, int, str] | None = None
        self.peer: int | None = None
        self.channel = ""
        self.root: int | None = None
        self.state = "started"
        self.error = ""
        self.begin = time.time()
        self.work: Any = None

    def look(self) -> bool:
        """See whether it has ended; tell whether it has."""
        work = self.work
        if work is not None and self.state == "started" and work.is_completed():
            self.work, self.state = None, "finished"
        return self.state != "started"


class GroupCalls:
    """The calls of one group.

    Attributes:
        ranks: The group's, as known when it was first used.
        name: torch's name of it.
        desc: Its description.
        counts: How many calls there were, by channel; "" for collectives.
        entries: The last of them.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self.name = _text_of(group, "group_name")
        self.desc = _text_of(group, "group_desc")
        self.counts: dict[str, int] = {}
        self.entries: deque[Entry] = deque(maxlen=KEPT)

    def copy(self) -> GroupCalls:
        """Return what stays as it is while others are added."""
        made = copy.copy(self)
        made.entries = self.entries.copy()
        return made


def _text_of(group: ProcessGroup, attribute: str) -> str:
    try:
        return str(getattr(group, attribute))
    except (AttributeError, RuntimeError):
        return ""


class Recorder:
    """Writes down what this process calls while at least one user wants that.

    Attributes:
        groups: What was called, by group.
        moves: How many calls have started or ended.
        lock: Held by who changes them, or reads them all.
    """

    def __init__(self) -> None:
        self.groups: WeakKeyDictionary[ProcessGroup, GroupCalls] = WeakKeyDictionary()
        self.moves = 0
        self._order = itertools.count(1)
        self._pending: deque[Entry] = deque(maxlen=_MOST_PENDING)
        self.lock = threading.Lock()
        self._originals: dict[str, Any] = {}

    def start(self) -> None:
        """Put our methods in the place of torch's."""
        for method, op in c10d.calls_of_groups().items():
            self._originals[method] = vars(ProcessGroup).get(method)  # which binds, once back
            ours = self._recorded(op, getattr(ProcessGroup, method))
            setattr(ProcessGroup, method, ours)

    def stop(self) -> None:
        """Put torch's methods back, but where somebody has replaced ours."""
        for method, original in self._originals.items():
            if getattr(getattr(ProcessGroup, method), "recorder", None) is not self:
                continue
            if original is None:
                delattr(ProcessGroup, method)
            else:
                setattr(ProcessGroup, method, original)
        self._originals.clear()

    def look(self) -> None:
        """See which calls have ended."""
        with self.lock:
            self._look(len(self._pending))

    def fail(self, error: BaseException) -> None:
        """Mark the last call as failed, where an error comes out of it.

        That it has ended is all that a call says in itself; a failed one says it, too.
        """
        frames = [*traceback.walk_tb(error.__traceback__)]
        if not frames or "/torch/distributed/" not in frames[-1][0].f_code.co_filename:
            return
        passed = {(f.f_code.co_filename, line, f.f_code.co_name) for f, line in frames}
        every = [entry for calls in self.groups.values() for entry in calls.entries]
        last = max(every, key=lambda entry: entry.order, default=None)
        if last is not None and last.where in passed:
            last.work, last.state = None, "failed"
            last.error = " ".join(f"{type(error).__name__}: {error}".split())[:MOST_WORDS]

    def _look(self, most: int) -> None:
        for _ in range(min(most, len(self._pending))):
            entry = self._pending.popleft()
            if entry.look():
                self.moves += 1
            else:
                self._pending.append(entry)

    def _recorded(self, op: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            entry = self._enter(group, op, args)
            try:
                work = original(group, *args, **kwargs)
            except BaseException as error:
                entry.state, entry.error = "failed", f"{type(error).__name__}: {error}"
                self.moves += 1
                raise
            if work is None:
                entry.state = "finished"
                self.moves += 1
            else:
                with self.lock:
                    entry.work = work
                    self._pending.append(entry)
            return work

        call.recorder = self  # type: ignore[attr-defined]
        return call

    def _enter(self, group: ProcessGroup, op: str, args: tuple[Any, ...]) -> Entry:
        entry = Entry(op, next(self._order))
        _describe(entry.tensors, args[:2])
        entry.where = _caller(sys._getframe(2))
        if op in _ROOTED and args:
            entry.root = getattr(args[-1], "rootRank", None)
        if op in _MESSAGES and len(args) == 3:
            own, entry.peer = group.rank(), args[1]
            ends = (own, entry.peer) if op == "send" else (entry.peer, own)
            entry.channel = f"{ends[0]}->{ends[1]}" + (f" tag {args[2]}" if args[2] else "")
        elif op == "recv_anysource":
            entry.channel = "anybody"
        with self.lock:
            self._look(2)  # so that ended calls hold no tensors for long
            calls = self.groups.get(group)
            if calls is None:
                calls = self.groups[group] = GroupCalls(group)
            counted = f"{op} {entry.channel}" if entry.channel else ""
            entry.number = calls.counts[counted] = calls.counts.get(counted, 0) + 1
            calls.entries.append(entry)
            self.moves += 1
        return entry


def _describe(found: list[tuple[torch.Size, torch.dtype]], values: Sequence[Any]) -> None:
    """Add shapes and dtypes of tensors, and of those in lists."""
    for value in values:
        if len(found) >= _MOST_TENSORS:
            return
        if isinstance(value, Tensor):
            found.append((value.shape, value.dtype))
        elif isinstance(value, (list, tuple)):
            _describe(found, value[:_MOST_TENSORS])


def _caller(frame: Any) -> tuple[str, int, str] | None:
    """The innermost frame that is neither torch's nor ours."""
    while frame is not None:
        code = frame.f_code
        if not code.co_filename.startswith(LIBRARIES):
            return code.co_filename, frame.f_lineno, code.co_name
        frame = frame.f_back
    return None
