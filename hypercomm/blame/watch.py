"""Implements `grid.watch`, which records collectives and writes a file if none makes progress.

While a watch is active, it replaces the communicating methods of torch's ProcessGroup class with
methods that record the call first. It records every call from Python, including the calls of FSDP
and of pipelines. It does not record calls from C++: the buckets of DistributedDataParallel, and
functional collectives (DTensor, compiled code). The file is JSON in the format of torch's flight
recorder, with an additional field "hypercomm" about the process.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import itertools
import json
import logging
import os
import socket
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, ClassVar
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
import typing_extensions
from torch import Tensor
from torch.distributed import ProcessGroup

from hypercomm.blame.evidence import FROM_ANYBODY, OPS
from hypercomm.errors import ToolError
from hypercomm.layout import RankLayout
from hypercomm.layout.checks import is_positive
from hypercomm.layout.text import short_repr

__all__ = ["Watch"]

logger = logging.getLogger(__name__)

_MOST_CHARACTERS = 120
_MOST_TENSORS = 8
_KEPT = 500  # calls of all groups together
_MOST_PENDING = 1000  # gloo does not report the end of a message unless the rank waits for it
_MOST_LANES = 1000  # of one group: each peer, direction and tag of messages is a lane

# Names of the flight recorder that differ from the names of torch.distributed.
_NAMES = {op: name for name, op in OPS.items() if name.startswith("_")}

_CALLS = {
    "broadcast": "broadcast",
    "reduce": "reduce",
    "gather": "gather",
    "scatter": "scatter",
    "reduce_scatter": "reduce_scatter",
    "barrier": "barrier",
    "monitored_barrier": "monitored_barrier",
    "send": "send",
    "recv": "recv",
    "recv_anysource": "recv_anysource",
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather_coalesced",
    "_allgather_base": "all_gather_into_tensor",
    "all_gather_single": "all_gather_into_tensor",
    "all_gather_single_coalesced": "all_gather_into_tensor_coalesced",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor_coalesced",
    "gather_single": "gather",
    "_reduce_scatter_base": "reduce_scatter_tensor",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor_coalesced",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "all_to_all_single": "all_to_all_single",
}
"""The methods of a ProcessGroup that communicate, with their names in torch.distributed."""

_ROOTED = frozenset({"broadcast", "reduce", "gather", "scatter"})
_LIBRARIES = (
    f"{Path(inspect.getfile(torch)).parent}/",
    f"{Path(__file__).parents[1]}/",
    *(module.__file__ or "" for module in (contextlib, typing_extensions)),
)


class _Group:
    """A recorded group. `counts` maps each channel to the number of calls in it.

    Like the collections of a watch, it is changed by atomic operations without a lock: a signal
    handler may make a call while the call that it interrupts is recorded.
    """

    def __init__(self, group: ProcessGroup) -> None:
        self.name = group.group_name
        self.description = group.group_desc
        self.ranks = dist.get_process_group_ranks(group)
        self.own = group.rank()
        self.backend = dist.get_backend(group).rpartition(":")[2]
        self.counts: dict[str, int] = {}
        self._numbers: dict[str, Iterator[int]] = {}

    def count(self, channel: str) -> tuple[str, int]:
        """Count a call. Return its channel and number.

        Messages beyond the largest number of channels are counted together, and are not matched.
        """
        if channel and channel not in self._numbers and len(self._numbers) >= _MOST_LANES:
            channel = FROM_ANYBODY
        number = next(self._numbers.setdefault(channel, itertools.count(1)))
        self.counts[channel] = number
        return channel, number


class Watch:
    """Records the collectives of this rank until `stop()`. `grid.watch` creates it.

    Args:
        seconds: The file is written when no call has started or ended for this many seconds.
        folder: The folder of the file.
        layouts: A function that returns a mapping of view names to layouts. The layout of the grid
            has the name "".
        pgs: A function that returns the existing groups.
        rank: The rank of this process.

    Attributes:
        rank: The rank of this process.
        file: The file that is written.

    Raises:
        ToolError: `seconds` is not a valid number, the folder cannot be used, or this process
            already has a watch.
        NotInitializedError: torch.distributed is not initialised.
    """

    _current: ClassVar[Watch | None] = None
    _starting: ClassVar[threading.Lock] = threading.Lock()

    def __init__(
        self,
        seconds: float,
        folder: str | os.PathLike[str],
        layouts: Callable[[], Mapping[str, RankLayout]],
        pgs: Callable[[], Sequence[ProcessGroup | None]],
        rank: int,
    ) -> None:
        if not is_positive(seconds, 1e6):
            raise ToolError(
                f"seconds= must be a number above 0 and at most 1e6, got {short_repr(seconds)}; "
                f"pass a number, as in seconds=60"
            )
        self._seconds = seconds
        self._layouts = layouts
        self._pgs = pgs
        self.rank = rank
        self.file = Path(folder).absolute() / f"hypercomm_watch_{self.rank}.json"
        self._groups: WeakKeyDictionary[ProcessGroup, _Group] = WeakKeyDictionary()
        self._entries: deque[dict[str, Any]] = deque(maxlen=_KEPT)
        self._pending: deque[tuple[dict[str, Any], Any]] = deque(maxlen=_MOST_PENDING)
        self._moves = 0
        self._ids = itertools.count()
        self._over = threading.Event()
        self._originals: dict[str, Any] = {}
        self._thread = threading.Thread(target=self._run, name="hypercomm watch", daemon=True)
        with Watch._starting:
            self._start()

    def _start(self) -> None:
        """Replace the methods of ProcessGroup. Raise if another watch has replaced them."""
        if Watch._current is not None:
            known = Watch._current.file
            raise ToolError(
                f"this process already has a watch, which writes {known}; call its stop() first"
            )
        folder = self.file.parent
        try:
            folder.mkdir(exist_ok=True)  # without parents, as the name may be mistyped
            self.file.write_text("")  # removes the record of an earlier job
            self.file.unlink()
        except OSError as error:
            raise ToolError(
                f"cannot write to the folder {short_repr(str(folder))}: {error}; only the last "
                f"folder of the path is created"
            ) from None
        for method, op in _CALLS.items():
            if not hasattr(ProcessGroup, method):
                continue
            self._originals[method] = vars(ProcessGroup)[method]
            setattr(ProcessGroup, method, self._recorded(op, getattr(ProcessGroup, method)))
        self._thread.start()
        Watch._current = self

    def __enter__(self) -> Watch:  # noqa: PYI034 - Self needs Python 3.11
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.stop(error)

    def stop(self, error: BaseException | None = None) -> None:
        """Stop recording and write the record. A second call does nothing.

        Args:
            error: The exception that ended the program. It is recorded too.
        """
        if self._over.is_set():
            return
        self._over.set()
        for method, original in self._originals.items():
            setattr(ProcessGroup, method, original)
        Watch._current = None
        self._thread.join()
        text = "left the watch" if error is None else f"raised {type(error).__name__}: {error}"
        self._write(" ".join(text.split())[:_MOST_CHARACTERS], error)

    # ---- recording ------------------------------------------------------------------------------

    def _recorded(self, op: str, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(group: ProcessGroup, *args: Any, **kwargs: Any) -> Any:
            entry = self._enter(group, op, args)
            work = original(group, *args, **kwargs)
            self._pending.append((entry, work))
            return work

        return call

    def _enter(self, group: ProcessGroup, op: str, args: tuple[Any, ...]) -> dict[str, Any]:
        outputs = list(_tensors(args[:1]))
        inputs = list(_tensors(args[1:2])) or outputs
        self._poll(2)  # releases the tensors of ended calls
        known = self._groups.get(group) or self._groups.setdefault(group, _Group(group))
        name = _NAMES.get(op, op)
        lane = FROM_ANYBODY if op == "recv_anysource" else ""
        is_p2p = op in {"send", "recv"} and len(args) == 3
        if is_p2p:
            own = known.own
            peer = args[1]
            tag = f" tag {args[2]}" if args[2] else ""
            name = f"{op} {own}{'->' if op == 'send' else '<-'}{peer}{tag}"
            lane = f"send {own}->{peer}{tag}" if op == "send" else f"recv {peer}->{own}{tag}"
        lane, number = known.count(lane)
        entry = {
            "frames": [_caller(sys._getframe(2))],
            "record_id": next(self._ids),
            "pg_id": 0,
            "process_group": (known.name, known.description),
            "collective_seq_id": 0 if lane else number,
            "p2p_seq_id": number if lane else 0,
            "profiling_name": f"{known.backend}:{name}",
            "time_created_ns": time.time_ns(),
            "input_sizes": [list(one.shape) for one in inputs],
            "input_dtypes": [str(one.dtype).removeprefix("torch.") for one in inputs],
            "output_sizes": [list(one.shape) for one in outputs],
            "output_dtypes": [str(one.dtype).removeprefix("torch.") for one in outputs],
            "state": "started",
            "retired": False,
            "is_p2p": is_p2p,
            "root": getattr(args[-1], "rootRank", None) if op in _ROOTED and args else None,
        }
        self._entries.append(entry)
        self._moves += 1
        return entry

    def _poll(self, most: int = _MOST_PENDING) -> None:
        """Mark pending calls that have ended."""
        for _ in range(min(most, len(self._pending))):
            with contextlib.suppress(IndexError):  # another thread or a signal handler was faster
                entry, work = self._pending.popleft()
                if work is None or work.is_completed():
                    entry.update(state="completed", retired=True)
                    self._moves += 1
                else:
                    self._pending.append((entry, work))

    # ---- writing --------------------------------------------------------------------------------

    def _run(self) -> None:
        seen = -1
        since = time.monotonic()
        written: list[dict[str, Any]] = []  # the stack in the file, or nothing without a file
        while not self._over.wait(min(max(self._seconds / 4, 0.02), 1)):
            self._poll()
            if self._moves != seen:
                seen = self._moves
                since = time.monotonic()
                if written:  # the record is out of date
                    self.file.unlink(missing_ok=True)
                    written = []
            elif time.monotonic() - since >= self._seconds:
                since = time.monotonic()
                stack = _main_stack()
                if stack != written:  # it changes after calls that are not recorded
                    self._write(f"has not moved for {self._seconds:g} s")
                    written = stack

    def _write(self, why: str, error: BaseException | None = None) -> None:
        draft = self.file.with_suffix(".part")
        try:
            draft.write_text(json.dumps(self._record(why, error)))
            draft.replace(self.file)  # atomic, so no reader sees an incomplete file
        except Exception as failure:  # noqa: BLE001 - the program continues without a record
            logger.warning("the watch cannot write %s: %s", self.file, failure)

    def _record(self, why: str, error: BaseException | None) -> dict[str, Any]:
        """Return the calls so far in the format of torch's flight recorder."""
        self._poll()
        living = [group for ref in self._groups.keyrefs() if (group := ref()) is not None]
        groups = {group: self._groups[group] for group in living}
        pending = [entry for entry, _ in self._pending.copy() if not entry["is_p2p"]]
        pending.sort(key=itemgetter("record_id"), reverse=True)
        oldest = {entry["process_group"]: entry for entry in pending}  # a rank may wait in it
        kept = {entry["record_id"]: entry for entry in [*oldest.values(), *self._entries.copy()]}
        entries = [dict(kept[number]) for number in sorted(kept)]
        counts = {one.name: dict(one.counts) for one in groups.values()}
        if error is not None and entries:
            _reopen(entries[-1], error)
        for group in filter(None, [dist.group.WORLD, *self._pgs()]):
            with contextlib.suppress(KeyError, ValueError, RuntimeError):  # a destroyed group
                counts.setdefault(groups.setdefault(group, _Group(group)).name, {})
        stack = _main_stack()
        if error is not None:
            frames = [*traceback.walk_tb(error.__traceback__)]
            stack = [_frame(each.f_code, line) for each, line in reversed(frames)]
        return {
            "version": "2.10",
            "pg_config": {
                one.name: {"name": one.name, "desc": one.description, "ranks": str(one.ranks)}
                for one in groups.values()
            },
            "entries": entries,
            "hypercomm": {
                "host": socket.gethostname(),
                "why": why,
                "layouts": {name: layout.to_dict() for name, layout in self._layouts().items()},
                "counts": counts,
                "stack": stack,
            },
        }


def _reopen(entry: dict[str, Any], error: BaseException) -> None:
    """Mark a call as not ended if the call raised `error`, for example at a timeout."""
    lines = [(f.f_code.co_filename, line) for f, line in traceback.walk_tb(error.__traceback__)]
    is_in_call = any((one["filename"], one["line"]) in lines for one in entry["frames"])
    if is_in_call and "/torch/distributed/" in lines[-1][0]:
        entry.update(state="started", retired=False)


def _tensors(values: Any) -> Iterator[Tensor]:
    for value in values[:_MOST_TENSORS]:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, (list, tuple)):
            yield from _tensors(value)


def _caller(frame: Any) -> dict[str, Any]:
    """Return the innermost frame outside torch and hypercomm."""
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    return _frame(frame.f_code, frame.f_lineno)


def _main_stack() -> list[dict[str, Any]]:
    """Return the stack of the main thread, innermost frame first."""
    frame = sys._current_frames()[threading.main_thread().ident or 0]
    return [_frame(each.f_code, line) for each, line in traceback.walk_stack(frame)]


def _frame(code: Any, line: int) -> dict[str, Any]:
    return {"name": code.co_name, "filename": code.co_filename, "line": line}
