"""`grid.watch`: records the collectives of this process, and writes them when nothing moves.

While a watch is on, the communicating methods of torch's ProcessGroup class are replaced by ones
that record the call first. The watch sees every call from Python, including those of FSDP and of
pipelines, but no calls from C++: the buckets of DistributedDataParallel and functional
collectives (DTensor, compiled code). The file has the form of torch's flight recorder as JSON,
with a further field "hypercomm" about the process.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

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
from hypercomm.tools.blame.calls import FROM_ANYBODY

__all__ = ["Watch"]

logger = logging.getLogger(__name__)

_SHORTEST_POLL_S, _LONGEST_POLL_S = 0.02, 1.0
_LONGEST_S = 1e6
_KEPT = 500
"""The number of calls that are kept, of all groups together."""

_MOST_PENDING = 1000
"""Calls that are polled for their end; gloo never reports the end of an unawaited message."""

_MOST_CHARACTERS = 120
_MOST_TENSORS = 8
_NAMES = {
    "all_gather_into_tensor": "_all_gather_base",
    "reduce_scatter_tensor": "_reduce_scatter_base",
    "all_reduce_coalesced": "allreduce_coalesced",
}
"""Names of the flight recorder that differ from those of torch.distributed."""

_ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})
_LIBRARIES = (
    *(f"{Path(module.__file__ or '').parent}/" for module in (torch, hypercomm)),
    *(module.__file__ or "" for module in (contextlib, functools, typing_extensions)),
)

_current: Watch | None = None


class _Group:
    """What is recorded of a group; `counts` has the number of calls of each lane."""

    def __init__(self, group: ProcessGroup) -> None:
        self.name, self.description = group.group_name, group.group_desc
        self.ranks, self.own = dist.get_process_group_ranks(group), group.rank()
        self.backend = dist.get_backend(group).rpartition(":")[2]
        self.counts: Counter[str] = Counter()


class _Recorder:
    """Records the calls of this process while it is on."""

    def __init__(self) -> None:
        self.groups: WeakKeyDictionary[ProcessGroup, _Group] = WeakKeyDictionary()
        self.entries: deque[dict[str, Any]] = deque(maxlen=_KEPT)
        self.moves = 0
        self.lock = threading.Lock()
        self._ids = itertools.count()
        self._pending: deque[tuple[dict[str, Any], Any]] = deque(maxlen=_MOST_PENDING)
        self._originals: dict[str, Any] = {}

    def start(self) -> None:
        for method, op in c10d.calls_of_groups().items():
            self._originals[method] = vars(ProcessGroup)[method]
            setattr(ProcessGroup, method, self._recorded(op, getattr(ProcessGroup, method)))

    def stop(self) -> None:
        """Restore torch's methods, except those that another library has replaced since."""
        for method, original in self._originals.items():
            if getattr(getattr(ProcessGroup, method), "recorder", None) is self:
                setattr(ProcessGroup, method, original)

    def poll(self, most: int = _MOST_PENDING) -> None:
        """Find calls that have ended; the caller holds the lock."""
        for _ in range(min(most, len(self._pending))):
            entry, work = self._pending.popleft()
            if work.is_completed():
                self._end(entry)
            else:
                self._pending.append((entry, work))

    def reopen(self, error: BaseException) -> None:
        """Mark the last call as not ended if the error was raised in it, as by a timeout."""
        lines = [(f.f_code.co_filename, line) for f, line in traceback.walk_tb(error.__traceback__)]
        if self.entries and lines and "/torch/distributed/" in lines[-1][0]:
            last = self.entries[-1]
            if any((one["filename"], one["line"]) in lines for one in last["frames"]):
                last.update(state="started", retired=False)

    def _end(self, entry: dict[str, Any]) -> None:
        entry.update(state="completed", retired=True)
        self.moves += 1

    def _recorded(self, op: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            entry = self._enter(group, op, args)
            work = original(group, *args, **kwargs)
            with self.lock:
                if work is None:
                    self._end(entry)
                else:
                    self._pending.append((entry, work))
            return work

        call.recorder = self  # type: ignore[attr-defined]
        return call

    def _enter(self, group: ProcessGroup, op: str, args: tuple[Any, ...]) -> dict[str, Any]:
        outputs = list(itertools.islice(_tensors(args[:1]), _MOST_TENSORS))
        inputs = list(itertools.islice(_tensors(args[1:2]), _MOST_TENSORS)) or outputs
        with self.lock:
            known = self.groups.get(group)
            if known is None:
                known = self.groups[group] = _Group(group)
        name, lane, is_p2p = _NAMES.get(op, op), "", op in {"send", "recv"} and len(args) == 3
        if is_p2p:
            own, peer, tag = known.own, args[1], f" tag {args[2]}" if args[2] else ""
            name = f"{op} {own}{'->' if op == 'send' else '<-'}{peer}{tag}"
            ends = (own, peer) if op == "send" else (peer, own)
            lane = f"{op} {ends[0]}->{ends[1]}{tag}"
        elif op == FROM_ANYBODY:
            lane = "recv anybody"
        entry = {
            "frames": [_caller(sys._getframe(2))],
            "pg_id": 0,
            "process_group": (known.name, known.description),
            "profiling_name": f"{known.backend}:{name}",
            "time_created_ns": time.time_ns(),
            "input_sizes": [list(shape) for shape, _ in inputs],
            "input_dtypes": [dtype for _, dtype in inputs],
            "output_sizes": [list(shape) for shape, _ in outputs],
            "output_dtypes": [dtype for _, dtype in outputs],
            "state": "started",
            "retired": False,
            "is_p2p": is_p2p,
            "root": getattr(args[-1], "rootRank", None) if op in _ROOTED and args else None,
        }
        with self.lock:
            self.poll(2)  # so that ended calls do not keep tensors alive
            known.counts[lane] += 1
            number = known.counts[lane]
            entry["record_id"] = next(self._ids)
            entry["collective_seq_id"], entry["p2p_seq_id"] = (0, number) if lane else (number, 0)
            self.entries.append(entry)
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
        rank: This rank.
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
        if not 0 < seconds <= _LONGEST_S:
            raise WatchError(
                f"seconds must be above 0, at most {_LONGEST_S:,.0f}, got {shown(seconds)}; take "
                f"a fraction of the groups' timeout, such as 60"
            )
        self._seconds = seconds
        self.rank = job.current().rank
        self.file = Path(folder).absolute() / f"hypercomm_watch_{self.rank}.json"
        self._layouts, self._pgs = dict(layouts), pgs
        if _current is not None:
            raise WatchError(
                f"this process has a watch, which writes {_current.file}; stop() it first: one "
                f"watch records all groups"
            )
        _make_writable(self.file)
        self._recorder, self._over = _Recorder(), threading.Event()
        self._recorder.start()
        self._thread = threading.Thread(target=self._run, name="hypercomm watch", daemon=True)
        self._thread.start()
        _current = self

    def __enter__(self) -> Watch:  # noqa: PYI034 - Self needs Python 3.11
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.stop(error)

    def stop(self, error: BaseException | None = None) -> None:
        """Stop recording and write the record; a second call does nothing.

        Args:
            error: The exception that ended the program, which is recorded too.
        """
        global _current  # noqa: PLW0603
        if self._over.is_set():
            return
        self._over.set()
        self._recorder.stop()
        _current = None
        self._thread.join()
        text = "left the watch" if error is None else f"raised {type(error).__name__}: {error}"
        self._write(" ".join(text.split())[:_MOST_CHARACTERS], error)

    def _run(self) -> None:
        poll = min(max(self._seconds / 4, _SHORTEST_POLL_S), _LONGEST_POLL_S)
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
            elif not is_written and now - since >= self._seconds:
                self._write(f"has not moved for {self._seconds:g} s")
                is_written = True

    def _write(self, why: str, error: BaseException | None = None) -> None:
        draft = self.file.with_suffix(".part")
        try:
            draft.write_text(json.dumps(self._record(why, error)))
            draft.replace(self.file)  # atomic: no reader sees half of it
        except Exception as failure:  # noqa: BLE001 - the program continues without a record
            logger.warning("the watch cannot write %s: %s", self.file, failure)

    def _record(self, why: str, error: BaseException | None) -> dict[str, Any]:
        recorder, world = self._recorder, dist.group.WORLD
        with recorder.lock:  # other threads keep calling
            recorder.poll()
            if error is not None:
                recorder.reopen(error)
            groups, entries = dict(recorder.groups), [dict(entry) for entry in recorder.entries]
        for group in filter(None, [world, *self._pgs().values()]):
            with contextlib.suppress(KeyError, ValueError, RuntimeError):  # destroyed by its user
                groups.setdefault(group, _Group(group))
        return {
            "version": "2.10",
            "pg_config": {
                one.name: {"name": one.name, "desc": one.description, "ranks": str(one.ranks)}
                for one in groups.values()
            },
            "entries": entries,
            "hypercomm": {
                "rank": self.rank,
                "host": socket.gethostname(),
                "why": why,
                "layouts": {name: layout.to_dict() for name, layout in self._layouts.items()},
                "counts": {one.name: one.counts for one in groups.values()},
                "stacks": _stacks(),
            },
        }


def _make_writable(file: Path) -> None:
    """Create the folder, and delete the record of an earlier job."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
        file.unlink()
    except OSError as error:
        raise WatchError(
            f"cannot write to the folder {shown(str(file.parent))}: {error.strerror}; give one "
            f"that this process may write to"
        ) from None


def _tensors(values: Any) -> Iterator[tuple[torch.Size, str]]:
    for value in values[:_MOST_TENSORS]:
        if isinstance(value, Tensor):
            yield value.shape, str(value.dtype).removeprefix("torch.")
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _caller(frame: Any) -> dict[str, Any]:
    """Return the innermost frame outside torch and hypercomm."""
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return _frame(frame.f_code, frame.f_lineno)


def _frame(code: Any, line: int) -> dict[str, Any]:
    return {"name": code.co_name, "filename": code.co_filename, "line": line}


def _stacks() -> dict[str, list[dict[str, Any]]]:
    """Return the frames of all threads, innermost first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        names.get(ident, f"thread {ident}"): [
            _frame(each.f_code, line) for each, line in traceback.walk_stack(frame)
        ]
        for ident, frame in sys._current_frames().items()
    }
