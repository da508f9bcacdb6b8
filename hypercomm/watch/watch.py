"""Watch: writes down where a rank is when nothing has moved for a while."""

from __future__ import annotations

import contextlib
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
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

import hypercomm
from hypercomm.blame.watched import FORM, MARK
from hypercomm.errors import WatchError
from hypercomm.layout import RankLayout
from hypercomm.layout.text import shown
from hypercomm.process_groups import job
from hypercomm.process_groups import torch_internals as c10d
from hypercomm.process_groups.spec import GroupKey
from hypercomm.process_groups.torch_internals.store import answer
from hypercomm.watch.recorder import LIBRARIES, MOST_WORDS, Entry, GroupCalls, Recorder

logger = logging.getLogger(__name__)

_SHORTEST_POLL_S, _LONGEST_POLL_S = 0.02, 1.0
_LONGEST_S = 1e6
_PYTHON = f"{sysconfig.get_path('stdlib')}/"

_current: Watch | None = None
_lock = threading.Lock()


class Watch:
    """Watches what this rank calls, from its start to `stop()`; use `grid.watch`.

    Args:
        seconds: After how long without a call that starts or ends the rank's record is written.
        folder: Where to.
        layouts: Of the grid, "", and of its views, by name.
        pgs: Returns the groups that exist, by key.

    Attributes:
        seconds: As given.
        file: What is written.

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
        global _current  # noqa: PLW0603 - what it records is the process's, so it is one
        self.seconds = check_seconds(seconds)
        self._folder = _check_folder(folder)
        here = job.current()
        self.file = self._folder / f"hypercomm_watch_{here.rank}.json"
        self._layouts, self._pgs = dict(layouts), pgs
        self._rank, self._world_size = here.rank, here.size
        self._job = _identity(here)
        self._recorder = Recorder()
        self._over = threading.Event()
        self._writing = threading.Lock()
        with _lock:
            if _current is not None:
                raise WatchError(
                    f"this process is watched already, by the watch that writes {_current.file}; "
                    f"stop() that first: one watch sees all groups"
                )
            _make(self._folder, self.file)
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
        if error is None:
            self._stop("left the watch")
        else:
            self._recorder.look()
            self._recorder.fail(error)
            self._stop(_raised(error))

    def stop(self) -> None:
        """End the watch, and write that it has ended; may be called twice."""
        self._stop("left the watch")

    @property
    def is_over(self) -> bool:
        """Whether it has ended."""
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
            if _current is self:
                _current = None
        self._thread.join()
        self._try_to_write(why)

    def _run(self) -> None:
        poll = min(max(self.seconds / 4, _SHORTEST_POLL_S), _LONGEST_POLL_S)
        seen, since, is_written = -1, time.monotonic(), False
        while not self._over.wait(poll):
            self._recorder.look()
            now = time.monotonic()
            if self._recorder.moves != seen:
                seen, since = self._recorder.moves, now
                if is_written:  # what it says is no longer so
                    with contextlib.suppress(OSError):
                        self.file.unlink(missing_ok=True)
                    is_written = False
            elif not is_written and now - since >= self.seconds:
                self._try_to_write(f"has not moved for {self.seconds:g} s")
                is_written = True

    def _try_to_write(self, why: str) -> None:
        """Write the record; the program goes on where that cannot be."""
        try:
            self._write(why)
        except Exception as error:  # noqa: BLE001 - another thread may change what is read
            logger.warning("the watch cannot write %s: %s", self.file, error)

    def _write(self, why: str) -> None:
        self._recorder.look()
        record = self._record(why)
        draft = self.file.with_suffix(".part")
        with self._writing:
            draft.write_text(json.dumps(record))
            draft.replace(self.file)  # so that nobody reads half of it

    def _record(self, why: str) -> dict[str, Any]:
        stacks = _stacks()
        keys = {group: key for key, group in self._pgs().items() if group is not None}
        with self._recorder.lock:  # another thread may call meanwhile
            groups = [(group, calls.copy()) for group, calls in self._recorder.groups.items()]
        used = {group for group, _ in groups}
        for group in keys.keys() - used:
            with contextlib.suppress(KeyError, ValueError, RuntimeError):  # destroyed by its user
                groups.append((group, GroupCalls(group)))
        return {
            MARK: FORM,
            "job": self._job,
            "rank": self._rank,
            "world_size": self._world_size,
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "time": time.time(),
            "why": why,
            "torch": torch.version.__version__,
            "hypercomm": hypercomm.__version__,
            "layouts": {name: layout.to_dict() for name, layout in self._layouts.items()},
            "groups": [_group_form(group, calls, keys.get(group)) for group, calls in groups],
            "place": [frame for frame in stacks.get("MainThread", []) if _is_users(frame)],
            "stacks": stacks,
        }


def check_seconds(seconds: float) -> float:
    """Return how long nothing may move.

    Raises:
        WatchError: It is no number of seconds above 0.

    Example:
        >>> check_seconds(30)
        30.0
    """
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


def _make(folder: Path, file: Path) -> None:
    """Make the folder, and see that files can be written there; what an earlier job left goes."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text("")
        file.unlink()
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise WatchError(
            f"cannot write to the folder {str(folder)!r}: {why}; give one that every rank can "
            f"write to, best on a disk that the hosts share"
        ) from None


def _identity(here: job.Job) -> str:
    """What tells this job's files from another's: the first rank's word in the job's store."""
    mine = uuid.uuid4().hex[:12]
    if not here.has_store:
        return mine
    found = answer(lambda: c10d.exchange(f"{here.namespace}/watch", "", mine))
    return found or mine


def _raised(error: BaseException) -> str:
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return f"raised {text[:MOST_WORDS]}"


def _group_form(group: ProcessGroup, calls: GroupCalls, key: GroupKey | None) -> dict[str, Any]:
    if key is not None:
        title = str(key)
    elif group is dist.group.WORLD:
        title = "WORLD"
    else:
        has_desc = calls.desc not in {"", "undefined"}
        title = calls.desc if has_desc else f"group {calls.name}"
    return {
        "name": calls.name,
        "desc": calls.desc,
        "title": title,
        "dims": None if key is None else list(key.dims),
        "view": None if key is None else key.view,
        "key": None if key is None else key.name,
        "ranks": list(calls.ranks),
        "calls": [_entry_form(entry, calls.ranks) for entry in list(calls.entries)],
    }


def _entry_form(entry: Entry, ranks: tuple[int, ...]) -> dict[str, Any]:
    form: dict[str, Any] = {
        "op": entry.op,
        "number": entry.number,
        "order": entry.order,
        "state": entry.state,
        "time": entry.begin,
        "shapes": [list(shape) for shape, _ in entry.tensors],
        "dtypes": [re.sub(r"^torch\.", "", str(dtype)) for _, dtype in entry.tensors],
        "where": "" if entry.where is None else _frame(*entry.where),
    }
    if entry.peer is not None:
        form |= {"peer": ranks[entry.peer], "channel": entry.channel}
    if entry.root is not None:
        form["root"] = entry.root
    if entry.error:
        form["error"] = entry.error
    return form


def _frame(file: str, line: int, function: str) -> str:
    return f"{file}:{line} in {function}"


def _stacks() -> dict[str, list[str]]:
    """The frames of all threads, innermost first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    return {
        names.get(ident, f"thread {ident}"): [
            _frame(code.filename, code.lineno or 0, code.name)
            for code in traceback.StackSummary.extract(
                traceback.walk_stack(frame), lookup_lines=False
            )
        ]
        for ident, frame in sys._current_frames().items()
    }


def _is_users(frame: str) -> bool:
    is_python = frame.startswith(_PYTHON) and "site-packages" not in frame
    return not is_python and not frame.startswith(("<", *LIBRARIES))
