"""`grid.watch`: records the collectives of this process, and writes them when nothing moves.

While a watch is on, the communicating methods of torch's ProcessGroup class are replaced by ones
that record the call first. The watch sees every call from Python, including those of FSDP and of
pipelines, but no calls from C++: the buckets of DistributedDataParallel and functional
collectives (DTensor, compiled code).
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import os
import re
import socket
import sys
import sysconfig
import threading
import time
import traceback
import uuid
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any
from weakref import WeakKeyDictionary

import attrs
import torch
import torch.distributed as dist
import typing_extensions
from torch import Tensor
from torch.distributed import ProcessGroup

import hypercomm
from hypercomm.errors import WatchError
from hypercomm.layout import RankLayout
from hypercomm.layout.text import shown
from hypercomm.process_groups import job
from hypercomm.process_groups import torch_internals as c10d
from hypercomm.process_groups.spec import GroupKey
from hypercomm.process_groups.torch_internals.store import answer
from hypercomm.tools.blame.calls import FROM_ANYBODY, KEPT
from hypercomm.tools.blame.reading import FORM, MARK

__all__ = ["Watch"]

logger = logging.getLogger(__name__)

_SHORTEST_POLL_S, _LONGEST_POLL_S = 0.02, 1.0
_LONGEST_S = 1e6
_MOST_PENDING = 1000
"""Calls that are polled for their end; gloo never reports the end of an unawaited message."""

_MOST_CHARACTERS = 120
_MOST_TENSORS = 8
_ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})
_PYTHON = f"{sysconfig.get_path('stdlib')}/"
_LIBRARIES = (
    *(f"{Path(module.__file__ or '').parent}/" for module in (torch, hypercomm)),
    *(module.__file__ or "" for module in (contextlib, functools, typing_extensions)),
)

_current: Watch | None = None
_lock = threading.Lock()


@attrs.define(eq=False)
class _Entry:
    op: str
    order: int
    where: str
    number: int = 0
    tensors: list[tuple[torch.Size, torch.dtype]] = attrs.field(factory=list)
    peer: int | None = None
    channel: str = ""
    root: int | None = None
    state: str = "started"
    error: str = ""
    begin: float = attrs.field(factory=time.time)
    work: Any = None

    def poll(self) -> bool:
        """Return whether the call has ended."""
        if self.work is not None and self.state == "started" and self.work.is_completed():
            self.work, self.state = None, "finished"
        return self.state != "started"

    def fail(self, error: BaseException) -> None:
        self.work, self.state, self.error = None, "failed", _short(error)


class _GroupCalls:
    def __init__(self, group: ProcessGroup) -> None:
        self.ranks = tuple(dist.get_process_group_ranks(group))
        self.name, self.description = group.group_name, group.group_desc
        self.counts: Counter[str] = Counter()
        self.entries: deque[_Entry] = deque(maxlen=KEPT)


class _Recorder:
    """Records the calls of this process while it is on."""

    def __init__(self) -> None:
        self.groups: WeakKeyDictionary[ProcessGroup, _GroupCalls] = WeakKeyDictionary()
        self.moves = 0
        self.lock = threading.Lock()
        self._order = itertools.count(1)
        self._pending: deque[_Entry] = deque(maxlen=_MOST_PENDING)
        self._originals: dict[str, Any] = {}

    def start(self) -> None:
        for method, op in c10d.calls_of_groups().items():
            self._originals[method] = vars(ProcessGroup).get(method)  # None if it is inherited
            setattr(ProcessGroup, method, self._recorded(op, getattr(ProcessGroup, method)))

    def stop(self) -> None:
        """Restore torch's methods, except those that another library has replaced since."""
        for method, original in self._originals.items():
            if getattr(getattr(ProcessGroup, method), "recorder", None) is not self:
                continue
            if original is None:
                delattr(ProcessGroup, method)
            else:
                setattr(ProcessGroup, method, original)

    def poll(self, most: int = _MOST_PENDING) -> None:
        """Find calls that have ended; the caller holds the lock."""
        for _ in range(min(most, len(self._pending))):
            entry = self._pending.popleft()
            if entry.poll():
                self.moves += 1
            else:
                self._pending.append(entry)

    def fail(self, error: BaseException) -> None:
        """Mark the last call as failed if the error was raised in it, as by `work.wait()`."""
        frames = [*traceback.walk_tb(error.__traceback__)]
        if not frames or "/torch/distributed/" not in frames[-1][0].f_code.co_filename:
            return
        passed = {_frame(frame.f_code, line) for frame, line in frames}
        every = [entry for calls in self.groups.values() for entry in calls.entries]
        last = max(every, key=lambda entry: entry.order, default=None)
        if last is not None and last.where in passed:
            last.fail(error)

    def _recorded(self, op: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            entry = self._enter(group, op, args)
            try:
                work = original(group, *args, **kwargs)
            except BaseException as error:
                entry.fail(error)
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

    def _enter(self, group: ProcessGroup, op: str, args: tuple[Any, ...]) -> _Entry:
        entry = _Entry(op, next(self._order), _caller(sys._getframe(2)))
        entry.tensors = list(itertools.islice(_tensors(args[:2]), _MOST_TENSORS))
        if op in _ROOTED and args:
            entry.root = getattr(args[-1], "rootRank", None)
        if op in {"send", "recv"} and len(args) == 3:
            own, entry.peer = group.rank(), args[1]
            ends = (own, entry.peer) if op == "send" else (entry.peer, own)
            entry.channel = f"{ends[0]}->{ends[1]}" + (f" tag {args[2]}" if args[2] else "")
        lane = f"{op} {entry.channel}" if entry.channel or op == FROM_ANYBODY else ""
        with self.lock:
            self.poll(2)  # so that ended calls do not keep tensors alive
            calls = self.groups.get(group)
            if calls is None:
                calls = self.groups[group] = _GroupCalls(group)
            calls.counts[lane] += 1
            entry.number = calls.counts[lane]
            calls.entries.append(entry)
            self.moves += 1
        return entry


class Watch:
    """Records the collectives of this rank until `stop()`; made by `grid.watch`.

    Args:
        seconds: The time without a call that starts or ends, after which the record is written.
        folder: The folder of the record.
        layouts: The layouts of the grid, "", and of its views, by name.
        pgs: Returns the existing groups by key.

    Attributes:
        seconds: As given.
        file: The file that is written.

    Raises:
        WatchError: The seconds or the folder cannot be used, or this process has a watch.
        NotInitializedError: torch.distributed is not initialised.
    """

    def __init__(
        self,
        seconds: float,
        folder: str | os.PathLike[str],
        layouts: Mapping[str, RankLayout],
        pgs: Callable[[], Mapping[GroupKey, ProcessGroup | None]],
    ) -> None:
        global _current  # noqa: PLW0603 - it records the calls of a process, so there is one
        self.seconds = _check_seconds(seconds)
        directory = _check_folder(folder)
        here = job.current()
        self.file = directory / f"hypercomm_watch_{here.rank}.json"
        self._layouts, self._pgs = dict(layouts), pgs
        self._here, self._job = here, _identity(here)
        self._recorder = _Recorder()
        self._over, self._writing = threading.Event(), threading.Lock()
        with _lock:
            if _current is not None:
                raise WatchError(
                    f"this process has a watch, which writes {_current.file}; stop() it first: "
                    f"one watch records all groups"
                )
            _make_writable(directory, self.file)
            _current = self
            self._recorder.start()
        self._thread = threading.Thread(target=self._run, name="hypercomm watch", daemon=True)
        self._thread.start()

    def __enter__(self) -> Watch:  # noqa: PYI034 - Self needs Python 3.11
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            with self._recorder.lock:
                self._recorder.poll()
            self._recorder.fail(error)
        self._stop("left the watch" if error is None else f"raised {_short(error)}")

    def stop(self) -> None:
        """Stop recording and write the record; a second call does nothing."""
        self._stop("left the watch")

    @property
    def is_over(self) -> bool:
        """Whether it has stopped."""
        return self._over.is_set()

    def write(self) -> Path:
        """Write the record now, and return its file."""
        self._write("was asked for it")
        return self.file

    def _stop(self, why: str) -> None:
        global _current  # noqa: PLW0603
        with _lock:
            if self._over.is_set():
                return
            self._over.set()
            self._recorder.stop()
            _current = None
        self._thread.join()
        self._try_to_write(why)

    def _run(self) -> None:
        poll = min(max(self.seconds / 4, _SHORTEST_POLL_S), _LONGEST_POLL_S)
        seen, since, is_written = -1, time.monotonic(), False
        while not self._over.wait(poll):
            with self._recorder.lock:
                self._recorder.poll()
            now = time.monotonic()
            if self._recorder.moves != seen:
                seen, since = self._recorder.moves, now
                if is_written:  # the record is out of date
                    with contextlib.suppress(OSError):
                        self.file.unlink(missing_ok=True)
                    is_written = False
            elif not is_written and now - since >= self.seconds:
                self._try_to_write(f"has not moved for {self.seconds:g} s")
                is_written = True

    def _try_to_write(self, why: str) -> None:
        try:
            self._write(why)
        except Exception as error:  # noqa: BLE001 - the program continues without a record
            logger.warning("the watch cannot write %s: %s", self.file, error)

    def _write(self, why: str) -> None:
        record = self._record(why)
        draft = self.file.with_suffix(".part")
        with self._writing:
            draft.write_text(json.dumps(record))
            draft.replace(self.file)  # atomic: no reader sees half of it

    def _record(self, why: str) -> dict[str, Any]:
        stacks = _stacks()
        keys = {group: key for key, group in self._pgs().items() if group is not None}
        with self._recorder.lock:  # other threads keep calling
            self._recorder.poll()
            groups = [
                _group_dict(group, calls, keys.pop(group, None))
                for group, calls in self._recorder.groups.items()
            ]
        for group, key in keys.items():
            with contextlib.suppress(KeyError, ValueError, RuntimeError):  # destroyed by its user
                groups.append(_group_dict(group, _GroupCalls(group), key))
        return {
            MARK: FORM,
            "job": self._job,
            "rank": self._here.rank,
            "world_size": self._here.size,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "time": time.time(),
            "why": why,
            "torch": torch.version.__version__,
            "hypercomm": hypercomm.__version__,
            "layouts": {name: layout.to_dict() for name, layout in self._layouts.items()},
            "groups": groups,
            "place": [frame for frame in stacks.get("MainThread", []) if _is_users(frame)],
            "stacks": stacks,
        }


def _check_seconds(seconds: float) -> float:
    is_number = isinstance(seconds, (int, float)) and not isinstance(seconds, bool)
    if not is_number or not 0 < seconds <= _LONGEST_S:
        raise WatchError(
            f"seconds must be a number above 0, at most {_LONGEST_S:,.0f}, got {shown(seconds)}; "
            f"take a fraction of the groups' timeout, such as 60"
        )
    return float(seconds)


def _check_folder(folder: str | os.PathLike[str]) -> Path:
    is_path = isinstance(folder, (str, os.PathLike)) and "\0" not in os.fspath(folder)
    if not is_path or not os.fspath(folder):
        raise WatchError(f"folder must be the path of a folder, got {shown(folder)}")
    return Path(folder).absolute()


def _make_writable(folder: Path, file: Path) -> None:
    """Create the folder, and delete the record of an earlier job."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text("")
        file.unlink()
    except OSError as error:
        raise WatchError(
            f"cannot write to the folder {shown(str(folder))}: {error.strerror}; give one that "
            f"this process may write to"
        ) from None


def _identity(here: job.Job) -> str:
    """Return an identity of the job, which the first rank publishes in the job's store."""
    mine = uuid.uuid4().hex[:12]
    if not here.has_store:
        return mine
    return answer(lambda: c10d.exchange(f"{here.namespace}/watch", "", mine)) or mine


def _group_dict(group: ProcessGroup, calls: _GroupCalls, key: GroupKey | None) -> dict[str, Any]:
    if key is not None:
        title = str(key)
    elif group is dist.group.WORLD:
        title = "WORLD"
    else:
        is_named = calls.description not in {"", "undefined"}
        title = calls.description if is_named else f"group {calls.name}"
    return {
        "name": calls.name,
        "title": title,
        "dims": None if key is None else list(key.dims),
        "ranks": list(calls.ranks),
        "calls": [_entry_dict(entry, calls.ranks) for entry in calls.entries],
    }


def _entry_dict(entry: _Entry, ranks: tuple[int, ...]) -> dict[str, Any]:
    fields = ("op", "number", "order", "state", "where", "channel", "root", "error")
    return {
        **{field: getattr(entry, field) for field in fields},
        "time": entry.begin,
        "shapes": [list(shape) for shape, _ in entry.tensors],
        "dtypes": [re.sub(r"^torch\.", "", str(dtype)) for _, dtype in entry.tensors],
        "peer": None if entry.peer is None else ranks[entry.peer],
    }


def _tensors(values: Any) -> Iterator[tuple[torch.Size, torch.dtype]]:
    for value in values[:_MOST_TENSORS]:
        if isinstance(value, Tensor):
            yield value.shape, value.dtype
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _caller(frame: Any) -> str:
    """Return the innermost frame outside torch and hypercomm."""
    while frame is not None:
        if not frame.f_code.co_filename.startswith(_LIBRARIES):
            return _frame(frame.f_code, frame.f_lineno)
        frame = frame.f_back
    return ""


def _frame(code: Any, line: int) -> str:
    return f"{code.co_filename}:{line} in {code.co_name}"


def _short(error: BaseException) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return text[:_MOST_CHARACTERS]


def _stacks() -> dict[str, list[str]]:
    """Return the frames of all threads, innermost first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        names.get(ident, f"thread {ident}"): [
            _frame(each.f_code, line) for each, line in traceback.walk_stack(frame)
        ]
        for ident, frame in sys._current_frames().items()
    }


def _is_users(frame: str) -> bool:
    is_python = frame.startswith(_PYTHON) and "site-packages" not in frame
    return not is_python and not frame.startswith(("<", *_LIBRARIES))
