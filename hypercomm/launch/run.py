"""`run_ranks`: start local processes that form one torch.distributed job.

A fork server loads torch once for the life of the calling process; each rank is a fork of it.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import re
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.context import ForkServerProcess
from typing import IO, Any, TypeVar

import attrs

from hypercomm.errors import LaunchError, RankFailedError
from hypercomm.launch.local_rank import LOOPBACK, RankJob, pickled, serve
from hypercomm.layout.checks import check_duration, positive
from hypercomm.layout.text import shown

T = TypeVar("T")

preloads = ["hypercomm.launch.preload"]
"""Modules that the fork server imports before it starts the first rank."""

_LONGEST_S = 1e6
"""No wait is longer: the system counts milliseconds in a C int."""

_MOST_RANKS = 4096
"""The most ranks on one machine: each is a process and several open files."""

_GRACE_S = 0.3
"""After one rank fails, how long to wait for the report of an earlier failure."""

_STACK_S = 2.0
"""How long to wait until late ranks have written down where they are; a stopped one never does."""

_LEAVING_S = 5.0
"""The longest that a rank may take to exit after all have returned."""


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

    Every rank is a process with torch.distributed initialised over loopback. If one fails, or the
    caller is interrupted, all of them are ended before this returns. The fork server that starts
    them is kept for the next call, and ends with the calling process.

    Functions, arguments and results are pickled with cloudpickle: lambdas, closures, methods and
    functions of a notebook cell work.

    Args:
        function: The function that each rank runs.
        nprocs: The number of ranks, at most 4096.
        args: Arguments of `function`, the same on every rank.
        backend: Backend of the job: "gloo", or one with "nccl", which gives rank i device i.
        timeout: Seconds until ranks that have not returned are ended.
        group_timeout: Timeout of the job's default process group; default: torch's.
        on_message: Called in this process with (rank, value) for each `report(value)` of a rank.

    Raises:
        RankFailedError: A rank raised, died, or did not return in time; the first one, with its
            traceback, or the place where it hangs.
        LaunchError: The function or the arguments cannot be pickled, or another argument is wrong.
        MissingPackageError: cloudpickle is not installed.
        LayoutError: `nprocs` is not a positive int.

    Example:
        >>> import torch.distributed as dist
        >>> from hypercomm import run_ranks
        >>> run_ranks(lambda offset: offset + dist.get_rank(), 3, args=[10])
        [10, 11, 12]
    """
    if positive(nprocs, "nprocs") > _MOST_RANKS:
        raise LaunchError(
            f"nprocs must be at most {_MOST_RANKS}, got {nprocs}; use fake_world() or simulate() "
            f"of hypercomm.testing for larger jobs"
        )
    check_call(function, args)
    check_seconds(timeout)
    if group_timeout is not None:
        check_duration("group_timeout", group_timeout, LaunchError)
    check_devices(backend, nprocs)
    timeout = min(timeout, _LONGEST_S)
    with socket.create_server((LOOPBACK, 0), backlog=nprocs) as listener:
        job = RankJob(
            function=pickled(function, "function"),
            args=pickled(tuple(args), "args"),
            nprocs=nprocs,
            backend=backend,
            timeout=timeout,
            group_timeout=group_timeout,
            environment=dict(os.environ),
            port=listener.getsockname()[1],
        )
        with _started(job, listener) as ranks:
            return _Conversation(ranks, on_message).results(timeout)


def check_seconds(timeout: object) -> None:
    """Raise an error unless a timeout is a positive number of seconds.

    Raises:
        LaunchError: With the value.
    """
    if not isinstance(timeout, (int, float)) or not timeout > 0:
        raise LaunchError(
            f"timeout must be a number of seconds larger than 0, got {shown(timeout)}"
        )


def check_call(function: object, args: object) -> None:
    """Raise an error unless a function can be called with a sequence of arguments.

    Raises:
        LaunchError: With the wrong value.
    """
    if not callable(function):
        raise LaunchError(f"function must be callable, got {shown(function)}")
    if isinstance(args, str) or not isinstance(args, Sequence):
        raise LaunchError(f"args must be a sequence of arguments, got {shown(args)}")


def check_devices(backend: str, ranks: int) -> None:
    """Raise an error if the backend needs more GPUs than this machine has.

    Raises:
        LaunchError: With both numbers.
    """
    if "nccl" not in backend:
        return
    import torch

    devices = torch.cuda.device_count()
    if ranks > devices:
        raise LaunchError(
            f"backend {backend!r} needs a GPU for each of {ranks} ranks, and this machine has "
            f"{devices}; use backend 'gloo', or fewer ranks"
        )


@attrs.frozen(eq=False)
class _Rank:
    """A started rank, as its parent sees it; `stack` is where it writes down its stack."""

    number: int
    process: ForkServerProcess
    link: connection.Connection
    stack: IO[bytes]


@contextlib.contextmanager
def _started(job: RankJob, listener: socket.socket) -> Iterator[list[_Rank]]:
    """Start the ranks of a job; end all of them on exit."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(preloads)
    _start_fork_server()
    ranks: list[_Rank] = []
    with contextlib.ExitStack() as stack:
        stack.callback(_end, ranks)
        for number in range(job.nprocs):
            ours, theirs = context.Pipe()
            dump = stack.enter_context(tempfile.TemporaryFile())
            # multiprocessing passes file descriptors on if they are those of connections
            files = [connection.Connection(os.dup(fd)) for fd in (1, 2, dump.fileno())]
            process = context.Process(
                target=serve,
                args=(job, number, theirs, files, listener if number == 0 else None),
                name=f"rank {number}",
                daemon=True,
            )
            process.start()
            theirs.close()
            ranks.append(_Rank(number, process, ours, dump))
        listener.close()
        yield ranks


def _start_fork_server() -> None:
    """Start the fork server if there is none; it ignores Ctrl-C from the beginning."""
    resource_tracker.ensure_running()  # it unblocks signals once it has started
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        forkserver.ensure_running()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end(ranks: list[_Rank]) -> None:
    for rank in ranks:
        rank.process.kill()
        with contextlib.suppress(ProcessLookupError):  # it has ended, or leads no group yet
            os.killpg(rank.process.pid or 0, signal.SIGKILL)  # what the rank started
    for rank in ranks:
        rank.process.join()
        rank.process.close()
        rank.link.close()


@attrs.define
class _Conversation:
    """Receives from the ranks until all have returned, or one has failed.

    Attributes:
        ranks: The ranks.
        on_message: Called with the rank and the value of each report.
        returned: The result of each rank that has returned.
        failed: When a rank failed, which one, and why.
    """

    ranks: list[_Rank]
    on_message: Callable[[int, Any], None] | None
    returned: dict[int, Any] = attrs.field(factory=dict)
    failed: list[tuple[float, int, str]] = attrs.field(factory=list)

    def results(self, timeout: float) -> list[Any]:
        deadline = time.monotonic() + timeout
        while len(self.returned) < len(self.ranks) and not self.failed:
            if not self._receive(deadline):
                late = [rank for rank in self.ranks if rank.number not in self.returned]
                reason = f"it had not returned after {timeout:g} s\n{_places(late)}"
                self.failed.append((0.0, late[0].number, reason))
        if self.failed:
            grace = time.monotonic() + _GRACE_S
            while self._receive(grace):
                pass
            _, first, reason = min(self.failed)
            raise RankFailedError(first, reason)
        for rank in self.ranks:
            with contextlib.suppress(OSError):  # it has died
                rank.link.send_bytes(b"all returned")
        deadline = min(deadline, time.monotonic() + _LEAVING_S)
        for rank in self.ranks:
            rank.process.join(max(0.0, deadline - time.monotonic()))
        return [self.returned[rank.number] for rank in self.ranks]

    def _receive(self, deadline: float) -> bool:
        """Receive what is next; return False if nothing came until the deadline."""
        known = {failure[1] for failure in self.failed} | set(self.returned)
        links = {rank.link: rank for rank in self.ranks if rank.number not in known}
        if not links:
            return False
        deaths = [rank.process.sentinel for rank in links.values()]
        ready = connection.wait([*links, *deaths], max(0.0, deadline - time.monotonic()))
        for link, rank in links.items():
            if link in ready:  # what a rank sent before it died counts
                self._take(rank)
            elif rank.process.sentinel in ready:
                self.failed.append((0.0, rank.number, _death(rank)))
        return bool(ready)

    def _take(self, rank: _Rank) -> None:
        # A death precedes the errors that it causes on other ranks, whatever arrives first.
        when, reason = 0.0, ""
        try:
            kind, value = pickle.loads(rank.link.recv_bytes())  # noqa: S301 - from our own child
        except (EOFError, OSError):
            reason = _death(rank)
        except Exception as error:  # noqa: BLE001 - unpickling runs the user's code
            reason = f"what it sent cannot be unpickled: {error!r}"
        else:
            if kind == "message" and self.on_message is not None:
                self.on_message(rank.number, value)
            elif kind == "returned":
                self.returned[rank.number] = value
            elif kind == "raised":
                when, reason = value
        if reason:
            self.failed.append((when, rank.number, reason))


def _places(late: Sequence[_Rank]) -> str:
    """Return the stacks that ranks have written down, with the ranks that are at each."""
    end = time.monotonic() + _STACK_S
    files = [rank.stack.fileno() for rank in late]
    while time.monotonic() < end and not all(os.fstat(file).st_size for file in files):
        time.sleep(_GRACE_S / 10)
    time.sleep(_GRACE_S)  # until the last one is complete
    places: dict[str, list[int]] = {}
    for rank in late:
        rank.stack.seek(0)
        places.setdefault(_frames(rank.stack.read().decode(errors="replace")), []).append(
            rank.number
        )
    return "\n".join(f"ranks {ranks} are at\n{place}" for place, ranks in places.items())


def _frames(dump: str) -> str:
    """Return the frames of the main thread, which faulthandler writes last, innermost first."""
    main = re.split(r"^(?:Current t|T)hread 0x", dump, flags=re.MULTILINE)[-1]
    lines = [line for line in main.splitlines() if line.startswith("  File ")]
    ours = [at for at, line in enumerate(lines) if line.endswith(" in serve")]
    return "\n".join(lines[: ours[-1]] if ours else lines) or "  (it does not answer)"


def _death(rank: _Rank) -> str:
    rank.process.join(5)
    code = rank.process.exitcode
    if code is not None and code < 0:
        names = {one.value: one.name for one in signal.Signals}  # real-time signals have none
        return f"killed by signal {-code} ({names.get(-code) or signal.strsignal(-code)})"
    return (
        f"its process ended with exit code {code} before the function returned; its messages are "
        f"on stderr. A script must call run_ranks() under if __name__ == '__main__':"
    )
