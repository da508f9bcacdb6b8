"""Ranks on this machine: start local processes that form one torch.distributed job.

A fork server loads torch once for the life of the calling process; each rank is a fork of it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.context import ForkServerProcess
from typing import IO, Any, TypeVar

import attrs

from hypercomm.errors import LaunchError, RankFailedError
from hypercomm.launch.local_rank import InheritedFd, RankJob, pickled, report, serve
from hypercomm.launch.stacks import grouped, inwards, is_whole, of_main_thread
from hypercomm.layout.checks import check_duration, positive
from hypercomm.layout.text import shown

__all__ = ["report", "run_ranks"]

T = TypeVar("T")

_LONGEST_S = 1e6
"""No wait is longer: the system counts milliseconds in a C int."""

_MOST_RANKS = 4096
"""The most ranks on one machine: each is a process, and three open files."""

_GRACE_S = 0.3
"""After one rank fails, how long to wait for an earlier failure to be heard of."""

_STACK_S = 2.0
"""How long a rank may take to write down its stack; one that stands still never does."""

_LEAVING_S = 5.0
"""The longest that a rank may take to exit after it has returned."""


def run_ranks(
    function: Callable[..., T],
    nprocs: int,
    *,
    args: Sequence[Any] = (),
    backend: str = "gloo",
    timeout: float = 300.0,
    group_timeout: timedelta | None = None,
    on_message: Callable[[int, Any], None] | None = None,
) -> list[T]:
    """Run a function on real local ranks and return what each returned, by rank.

    Every rank is a process of its own with torch.distributed initialised over loopback. When
    one fails, or the caller is interrupted, all of them are ended before this returns. The fork
    server that they come from stays for the next call, and ends with the calling process.

    Args:
        function: What each rank runs; it must be importable: defined at the top of a module, not in
            a cell of a notebook.
        nprocs: The number of ranks, at most 4096.
        args: Arguments of `function`, the same on every rank. They, and what it returns, travel
            by pickle.
        backend: Backend of the job: "gloo", or one with "nccl", where rank i is on device i.
        timeout: Seconds until ranks that have not returned are ended.
        group_timeout: Timeout of the job's default process group; default: torch's.
        on_message: Called here with (rank, value) for each `report(value)` that a rank makes.

    Raises:
        RankFailedError: A rank raised, died, or did not return in time; the first one, with its
            traceback, or the place where it hangs.
        LaunchError, LayoutError: An argument cannot work.

    Example:
        >>> import torch.distributed as dist
        >>> from hypercomm.testing import run_ranks
        >>> run_ranks(dist.get_rank, 3)
        [0, 1, 2]
    """
    if positive(nprocs, "nprocs") > _MOST_RANKS:
        raise LaunchError(
            f"nprocs must be at most {_MOST_RANKS}, got {nprocs}; hypercomm.testing's fake_world() "
            f"and simulate() stand for larger jobs"
        )
    check_call(function, args)
    check_importable(function)
    check_seconds(timeout)
    if group_timeout is not None:
        check_duration("group_timeout", group_timeout, LaunchError)
    if not isinstance(backend, str):
        raise LaunchError(f"backend must be a name such as 'gloo', got {shown(backend)}")
    if on_message is not None and not callable(on_message):
        raise LaunchError(f"on_message must be callable, got {shown(on_message)}")
    check_devices(backend, nprocs)
    job = RankJob(
        function=pickled(function, "function"),
        args=pickled(tuple(args), "args"),
        nprocs=nprocs,
        backend=backend,
        group_timeout=group_timeout,
        environment=dict(os.environ),
    )
    with _started(job) as ranks:
        return _Conversation(ranks, min(timeout, _LONGEST_S), on_message).results()


def check_seconds(timeout: object) -> None:
    """Refuse a timeout that is no number of seconds larger than 0.

    Raises:
        LaunchError: Shows it.
    """
    if isinstance(timeout, bool) or not isinstance(timeout, (int, float)) or not timeout > 0:
        raise LaunchError(
            f"timeout must be a number of seconds larger than 0, got {shown(timeout)}"
        )


def check_call(function: object, args: object) -> None:
    """Refuse what is no function, and arguments that are no sequence.

    Raises:
        LaunchError: Says what was given.
    """
    if not callable(function):
        raise LaunchError(f"function must be callable, got {shown(function)}")
    if isinstance(args, str) or not isinstance(args, Sequence):
        raise LaunchError(f"args must be a sequence of arguments, got {shown(args)}")


def check_importable(function: Callable[..., object]) -> None:
    """Refuse a function that other processes do not find.

    Raises:
        LaunchError: Says where it is defined.
    """
    while isinstance(function, partial):
        function = function.func
    main = sys.modules["__main__"]
    if getattr(function, "__module__", "") == "__main__" and not hasattr(main, "__file__"):
        name = getattr(function, "__qualname__", shown(function))
        raise LaunchError(
            f"{name} is defined where there is no file (a notebook, a prompt, python -c), and "
            f"ranks, which are processes, do not find it; write it to a file, in a notebook with "
            f"%%writefile, and import it"
        )


def check_devices(backend: str, ranks: int) -> None:
    """Refuse more ranks on this machine than it has GPUs, where the backend needs one for each.

    Raises:
        LaunchError: With both numbers.
    """
    if "nccl" not in backend:
        return
    import torch

    devices = torch.cuda.device_count()
    if ranks > devices:
        raise LaunchError(
            f"backend {backend!r} needs a GPU for each of {ranks} ranks, and this machine shows "
            f"{devices}; use backend 'gloo', or fewer ranks"
        )


@attrs.frozen(eq=False)
class _Rank:
    """A started rank, as its parent sees it."""

    number: int
    pid: int
    process: ForkServerProcess
    link: connection.Connection
    stack: IO[bytes]


@contextlib.contextmanager
def _started(job: RankJob) -> Iterator[list[_Rank]]:
    """Start the ranks of a job; on leaving, all of them are gone."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["hypercomm.launch.preload", *_loaded_here()])
    _start_fork_server()
    ranks: list[_Rank] = []
    with contextlib.ExitStack() as stack:
        stack.callback(_end, ranks)
        for number in range(job.nprocs):
            ours, theirs = context.Pipe()
            dump = stack.enter_context(tempfile.TemporaryFile())
            process = context.Process(
                target=serve,
                args=(job, number, theirs, [InheritedFd(fd) for fd in (1, 2, dump.fileno())]),
                name=f"rank {number}",
                daemon=True,
            )
            process.start()
            theirs.close()
            ranks.append(_Rank(number, _pid(process), process, ours, dump))
        yield ranks


def _loaded_here() -> list[str]:
    """What ranks of a test import with its module, and the fork server can load once for all."""
    testing = "hypercomm.testing"
    loads = {
        "pytest": ["pytest"],
        "hypothesis": ["hypothesis.strategies"],
        f"{testing}.on_ranks": [f"{testing}.on_ranks", "torch.distributed.tensor"],  # assert_close
        f"{testing}.given": [f"{testing}.given"],
    }
    return [name for module, names in loads.items() if module in sys.modules for name in names]


def _start_fork_server() -> None:
    """Start the fork server, if there is none; Ctrl-C does not reach it before it ignores it."""
    resource_tracker.ensure_running()  # which lets signals through again once it has started
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end(ranks: list[_Rank]) -> None:
    for rank in ranks:
        rank.process.kill()
        with contextlib.suppress(ProcessLookupError):  # it has ended, or had not begun to lead
            os.killpg(rank.pid, signal.SIGKILL)  # what the rank started
    for rank in ranks:
        rank.process.join()
        rank.process.close()
        rank.link.close()


@attrs.define
class _Conversation:
    """Hears the ranks until all have returned, or one has failed."""

    ranks: list[_Rank]
    timeout: float
    on_message: Callable[[int, Any], None] | None
    returned: dict[int, Any] = attrs.field(factory=dict)
    failed: list[tuple[float, int, str]] = attrs.field(factory=list)

    def results(self) -> list[Any]:
        deadline = time.monotonic() + self.timeout
        while len(self.returned) < len(self.ranks) and not self.failed:
            if not self._hear(deadline):
                self._fail_unfinished()
        if self.failed:
            grace = time.monotonic() + _GRACE_S
            while self._hear(grace):
                pass
            _, first, reason = min(self.failed)
            raise RankFailedError(first, reason)
        for rank in self.ranks:
            _send(rank, b"leave")
        deadline = min(deadline, time.monotonic() + _LEAVING_S)
        for rank in self.ranks:
            rank.process.join(max(0.0, deadline - time.monotonic()))
        return [self.returned[rank.number] for rank in self.ranks]

    def _hear(self, deadline: float) -> bool:
        """Take in what comes next; False when nothing came until the deadline."""
        known = {failure[1] for failure in self.failed} | set(self.returned)
        links = {rank.link: rank for rank in self.ranks if rank.number not in known}
        if not links:
            return False
        deaths = [rank.process.sentinel for rank in links.values()]
        ready = connection.wait([*links, *deaths], max(0.0, deadline - time.monotonic()))
        for link, rank in links.items():
            if link in ready:  # what a rank said before it died counts
                self._take(rank)
            elif rank.process.sentinel in ready:
                self._take_death(rank)
        return bool(ready)

    def _take(self, rank: _Rank) -> None:
        try:
            message = rank.link.recv_bytes()
        except (EOFError, OSError):
            self._take_death(rank)
            return
        try:
            kind, value = pickle.loads(message)  # noqa: S301 - from our own child
        except Exception as error:  # noqa: BLE001 - unpickling runs the user's code
            self.failed.append((0.0, rank.number, f"what it sent cannot be unpickled: {error!r}"))
            return
        if kind == "message" and self.on_message is not None:
            self.on_message(rank.number, value)
        elif kind == "port":
            for other in self.ranks[1:]:
                _send(other, str(value).encode())
        elif kind == "returned":
            self.returned[rank.number] = value
        elif kind == "raised":
            when, text = value
            self.failed.append((when, rank.number, text))

    def _take_death(self, rank: _Rank) -> None:
        # A death comes before the errors that it causes elsewhere, whatever is heard first.
        self.failed.append((0.0, rank.number, _death(rank)))

    def _fail_unfinished(self) -> None:
        """Fail the first rank that is late, and tell where each of them is."""
        late = [rank for rank in self.ranks if rank.number not in self.returned]
        for rank in late:
            with contextlib.suppress(ProcessLookupError):
                os.kill(rank.pid, signal.SIGUSR1)  # makes it write down its stack
        _wait_for_stacks(late)
        told = "\n".join(
            f"ranks {numbers} are at\n{place}"
            for numbers, place in grouped(
                {rank.number: inwards(of_main_thread(_dump(rank))) for rank in late}
            )
        )
        reason = f"it had not returned after {self.timeout:g} s\n{told}"
        self.failed.append((0.0, late[0].number, reason))


def _wait_for_stacks(ranks: Sequence[_Rank]) -> None:
    """Wait until each rank has written all, which takes a busy machine a moment."""
    end = time.monotonic() + _STACK_S
    while time.monotonic() < end and not all(is_whole(_dump(rank)) for rank in ranks):
        time.sleep(_GRACE_S / 10)


def _dump(rank: _Rank) -> str:
    """What a rank has written of where it is; the place where it writes on is shared, and stays."""
    file = rank.stack.fileno()
    return os.pread(file, os.fstat(file).st_size, 0).decode(errors="replace")


def _pid(process: ForkServerProcess) -> int:
    if process.pid is None:
        raise LaunchError(f"{process.name} was not started")
    return process.pid


def _send(rank: _Rank, message: bytes) -> None:
    with contextlib.suppress(OSError):  # it died, which is heard of in another way
        rank.link.send_bytes(message)


def _death(rank: _Rank) -> str:
    rank.process.join(5)
    code = rank.process.exitcode
    if code is not None and code < 0:
        return f"killed by signal {-code} ({signal.Signals(-code).name})"
    return (
        f"its process ended with exit code {code} before the function returned; what it said is on "
        f"stderr. A script must call run_ranks() under if __name__ == '__main__':"
    )
