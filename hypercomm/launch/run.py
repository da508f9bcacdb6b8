"""`run_ranks`: start local processes that form one torch.distributed job.

A fork server loads torch once for the lifetime of the calling process. Each rank is a fork of the
server. A rank and its parent communicate over one pipe. The rank sends pickled pairs (kind, value),
with the kind "message", "returned", "unhandled" or "failed". The parent sends one message when all
ranks have returned. On a signal of the parent, a rank writes its stack into a file.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import gc
import io
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from multiprocessing import connection, forkserver, resource_tracker
from multiprocessing.context import ForkServerProcess
from typing import IO, Any, TypeVar

import attrs

from hypercomm.errors import (
    GroupOptionsError,
    LaunchError,
    LayoutError,
    NotInitializedError,
)
from hypercomm.launch.failures import Failure, explain, failure_of, places_of
from hypercomm.layout.checks import as_tuple, check_duration, is_positive, positive
from hypercomm.layout.text import short_repr
from hypercomm.lazy import required

T = TypeVar("T")

preloads = ["hypercomm.grid", "hypercomm.launch.fork_server", "hypercomm.launch.run", "cloudpickle"]
"""Modules that the fork server imports before it starts the first rank. They import torch."""

_starting = threading.Lock()
_LIBRARIES = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Variables that set the number of threads of numerical libraries."""

_LOOPBACK = "127.0.0.1"

_LONGEST_S = 1e6
"""The longest wait in seconds. The system counts milliseconds in a C int."""

_GRACE_S = 0.3
"""The time to wait, after a rank has failed, for a message about an earlier failure."""

_LONG_GRACE_S = 3.0
"""The time to wait for the cause, if ranks have only failed because of another rank."""

_STACK_S = 1.5
"""The time for ranks to write their stacks. A stopped process never writes its stack."""

_LONGEST_STACK = 2**20
"""The most bytes of a stack."""

_ASK = signal.SIGURG
"""The signal on which a rank writes its stack. Programs rarely use it."""

_UNGUARDED = 113
"""The exit code of a rank that called `run_ranks` while it imported the main module."""

_BYTES_OF_A_RANK = 100 * 2**20
"""The memory that one rank needs, in addition to the pages that all ranks share."""

_LEAVING_S = 5.0
"""The time for a rank to exit after all ranks have returned."""

_JOINED = "hypercomm/joined"
"""The key of the number of ranks that have joined, in the job's store."""

_ALL_JOINED = "hypercomm/all joined"
"""The key that exists when all ranks have joined."""


@attrs.frozen
class _Job:
    """The arguments that all ranks of one job share.

    Attributes:
        call: The pickled function and its arguments.
        nprocs: The number of ranks.
        backend: The backend of the job.
        group_timeout: The timeout of WORLD. None selects torch's default.
        environment: The parent's environment.
        port: The port of the job's store.
    """

    call: bytes
    nprocs: int
    backend: str
    group_timeout: timedelta | None
    environment: dict[str, str]
    port: int


@attrs.frozen(eq=False)
class _Rank:
    """A rank as the parent sees it. `stack` is the file that receives the rank's stack."""

    number: int
    process: ForkServerProcess
    link: connection.Connection
    stack: IO[bytes]


def run_ranks(
    function: Callable[..., T],
    nprocs: int,
    *,
    args: Sequence[Any] = (),
    backend: str = "gloo",
    timeout: float = 300.0,
    group_timeout: timedelta | None = None,
    max_ranks: int | None = None,
    on_message: Callable[[int, Any], None] | None = None,
) -> list[T]:
    """Run a function on real local ranks and return the list of results, by rank.

    Every rank is a process with torch.distributed initialised over loopback. If a rank fails, or
    the caller is interrupted, all ranks are ended before this returns. The fork server that starts
    the ranks is kept for the next call, and ends with the calling process.

    Functions, arguments and results are pickled with cloudpickle, so lambdas, closures, methods and
    functions of a notebook cell work. For unsupported objects, cloudpickle raises its own error.

    Args:
        function: The function that each rank runs.
        nprocs: The number of ranks.
        args: Arguments of `function`, equal on every rank.
        backend: The backend of the job. If it contains "nccl", rank i uses device i.
        timeout: The time for all ranks to return, in seconds. After this time, the ranks are ended.
        group_timeout: The timeout of the job's default process group, a timedelta. Default: torch's
            default timeout.
        max_ranks: The largest number of ranks to start. Default: 4 for each processor, but at least
            8, and one for each 100 MiB of memory.
        on_message: A function that this process calls with (rank, value) for each `report(value)`
            of a rank.

    Raises:
        RankFailedError: A rank raised, died, or did not return in time. The error names the rank
            that failed first, and shows its traceback or the stack at which it hangs. The errors of
            other ranks follow, then what the remaining ranks did, then the connections that ranks
            lost as a consequence.
        MissingPackageError: cloudpickle is not installed.
        LaunchError: A script calls this outside of `if __name__ == "__main__"`, or this machine has
            no address 127.0.0.1.
        LayoutError: `function` cannot be called, `nprocs` is not a positive int or is larger than
            `max_ranks`, or `args` is not a sequence.
        GroupOptionsError: A timeout is not positive, or has the wrong type.

    Example:
        >>> import torch.distributed as dist
        >>> from hypercomm import run_ranks
        >>> run_ranks(lambda offset: offset + dist.get_rank(), 3, args=[10])
        [10, 11, 12]
    """
    if getattr(multiprocessing.current_process(), "_inheriting", False):
        os._exit(_UNGUARDED)  # this is a rank, which imports the main module before it starts
    if not callable(function):
        raise LayoutError(
            f"function must be a function, got {short_repr(function)}; pass the function without "
            f"calling it, as in run_ranks(f, 2), and its arguments as args="
        )
    positive(nprocs, "nprocs")
    most = most_ranks() if max_ranks is None else max_ranks
    if nprocs > most:
        raise LayoutError(
            f"nprocs={nprocs} would start more than {most} processes on this machine; to start "
            f"them, pass max_ranks={nprocs}"
        )
    if not is_positive(timeout):
        raise GroupOptionsError(
            f"timeout must be a number of seconds above 0, got {short_repr(timeout)}; write the "
            f"seconds as a number, such as 300"
        )
    if group_timeout is not None:
        check_duration(group_timeout, "group_timeout")
    call = dumps((function, as_args(args)))
    timeout = min(timeout, _LONGEST_S)
    _start_fork_server()
    ranks: list[_Rank] = []
    with _listener(nprocs) as listener:
        port = listener.getsockname()[1]
        job = _Job(call, nprocs, backend, group_timeout, dict(os.environ), port)
        try:
            ranks.extend(_start(job, at, None if at else listener) for at in range(nprocs))
            listener.close()
            returned = _results(ranks, timeout, on_message)
            _release(ranks)
        finally:
            _end(ranks)
    return returned


def as_args(args: object) -> tuple[Any, ...]:
    """Return the arguments of a function as a tuple.

    Raises:
        LayoutError: The value is not a sequence, or is a string.

    Example:
        >>> as_args(3)
        Traceback (most recent call last):
        hypercomm.errors.LayoutError: args must be a sequence, as in args=(3,), got 3
    """
    try:
        return as_tuple(args, "args")
    except LayoutError:
        given = short_repr(args)
        raise LayoutError(f"args must be a sequence, as in args=({given},), got {given}") from None


def report(value: object) -> None:
    """Send a value from a rank to the process that called `run_ranks`.

    Args:
        value: The value. It is pickled with cloudpickle.

    Raises:
        NotInitializedError: This process is not a rank that `run_ranks` started.

    Example:
        >>> from hypercomm import run_ranks
        >>> run_ranks(report, 1, args=["ready"], on_message=print)
        0 ready
        [None]
    """
    _send("message", value)


def dumps(value: object, kind: Any = None) -> bytes:
    """Pickle a value with cloudpickle. Functions keep their file names for tracebacks.

    Args:
        value: The value. Functions that the receiver cannot import are pickled as code.
        kind: A subclass of cloudpickle's Pickler. Default: cloudpickle's Pickler.

    Raises:
        MissingPackageError: cloudpickle is not installed.

    Example:
        >>> pickle.loads(dumps(lambda number: number + 1))(2)
        3
    """
    cloudpickle = required("cloudpickle", "run_ranks")
    buffer = io.BytesIO()
    kind = kind or cloudpickle.Pickler
    reducers = dict(kind.dispatch_table)

    def reduce_code(code: types.CodeType) -> Any:
        # cloudpickle 3.1.3 replaces the file name by "<dynamic-code>".
        make, arguments, *more = reducers[types.CodeType](code)
        kept = (code.co_filename if one == "<dynamic-code>" else one for one in arguments)
        return make, tuple(kept), *more

    # Python's C pickler reads the dispatch table only from its class.
    table = {"dispatch_table": {**reducers, types.CodeType: reduce_code}}
    type(kind.__name__, (kind,), table)(buffer).dump(value)
    return buffer.getvalue()


def most_ranks() -> int:
    """Return the largest number of ranks that should be started on this machine.

    Example:
        >>> most_ranks() >= 8
        True
    """
    has_affinity = hasattr(os, "sched_getaffinity")
    by_processors = 4 * (len(os.sched_getaffinity(0)) if has_affinity else os.cpu_count() or 1)
    memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(8, min(by_processors, memory // _BYTES_OF_A_RANK))


# ---- in the parent ------------------------------------------------------------------------------


def _start_fork_server() -> None:
    """Start the fork server if it is not running. The server and its forks block Ctrl-C."""
    with _starting:
        main = sys.modules["__main__"]
        if getattr(main, "__file__", "") == "<stdin>":  # a rank would try to import this file
            del main.__file__
        multiprocessing.get_context("forkserver").set_forkserver_preload(preloads)
        resource_tracker.ensure_running()  # its start unblocks signals, so SIGINT is blocked later
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        # The server inherits these variables, so that numerical libraries start no threads in it: a
        # process with threads should not fork. They are restored, because this process uses them.
        kept = {name: os.environ.get(name) for name in _LIBRARIES}
        try:
            os.environ.update(dict.fromkeys(_LIBRARIES, "1"))
            forkserver.ensure_running()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            for name, value in kept.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


def _listener(nprocs: int) -> socket.socket:
    try:
        return socket.create_server((_LOOPBACK, 0), backlog=nprocs)
    except OSError as error:
        raise LaunchError(
            f"ranks communicate over {_LOOPBACK}, which this machine lacks: {error}; enable its "
            f"loopback interface, as with `ip link set lo up`"
        ) from error


def _start(job: _Job, number: int, listener: socket.socket | None) -> _Rank:
    context = multiprocessing.get_context("forkserver")
    ours, theirs = context.Pipe()
    stack = tempfile.TemporaryFile()  # noqa: SIM115 - _end closes it
    # multiprocessing passes the file descriptors of connections to the new process
    files = [connection.Connection(os.dup(fd)) for fd in (1, 2, stack.fileno())]
    args = (job, number, theirs, files, listener)
    process = context.Process(target=_serve, args=args, name=f"rank {number}", daemon=True)
    process.start()
    theirs.close()
    return _Rank(number, process, ours, stack)


def _results(
    ranks: list[_Rank], timeout: float, on_message: Callable[[int, Any], None] | None
) -> list[Any]:
    """Receive messages until all ranks have returned, a rank has failed, or the time is over."""
    deadline = time.monotonic() + timeout
    returned: dict[int, Any] = {}
    failures: list[Failure] = []
    unhandled: list[Failure] = []
    waiting = list(ranks)
    while waiting and (left_s := deadline - time.monotonic()) > 0:
        sources: dict[Any, _Rank] = {rank.link: rank for rank in waiting}
        sources |= {rank.process.sentinel: rank for rank in waiting}
        for rank in {sources[source] for source in connection.wait(sources, left_s)}:
            kind, value = _receive(rank)
            if kind == "message" and on_message is not None:
                on_message(rank.number, value)
            elif kind == "unhandled":
                unhandled.append(value)
            elif kind == "returned":
                returned[rank.number] = value
            elif kind == "failed":
                failures.append(value)
                grace_s = _LONG_GRACE_S if value.is_consequence else _GRACE_S
                deadline = min(deadline, time.monotonic() + grace_s)
            if kind in ("returned", "failed"):
                waiting.remove(rank)
    if waiting or failures:
        late = f"it had not returned after {timeout:g} s"
        places = places_of(_stacks(waiting))
        raise explain(failures + unhandled, returned, places, late)
    return [returned[rank.number] for rank in ranks]


def _receive(rank: _Rank) -> tuple[str, Any]:
    """Return the next message of a rank, or "failed" and the failure."""
    with contextlib.suppress(EOFError, OSError):
        if rank.link.poll():  # a rank may have sent a message before it died
            return pickle.loads(rank.link.recv_bytes())  # type: ignore[no-any-return]  # noqa: S301
    rank.process.join(5)
    code = rank.process.exitcode
    if code == _UNGUARDED:
        raise LaunchError(
            "each rank imports this program, and the import calls run_ranks(); call run_ranks() "
            "under if __name__ == '__main__':"
        )
    reason = (
        f"its process ended with exit code {code} before the function returned; its messages are "
        f"on stderr"
    )
    if code is not None and code < 0:
        names = {one.value: one.name for one in signal.Signals}  # real-time signals have no name
        reason = f"killed by signal {-code} ({names.get(-code) or signal.strsignal(-code)})"
    if code == -signal.SIGABRT:
        reason += (
            "; its last messages are on stderr; gloo aborts a process if a message has an "
            "unexpected size: with TORCH_DISTRIBUTED_DEBUG=DETAIL, torch names the ranks whose "
            "shapes differ"
        )
    stack = _stack(rank)
    if stack:
        reason += f"\n{places_of({rank.number: stack})[0]}"
    # A dead rank causes errors on others, so it sorts first.
    return "failed", Failure(rank.number, reason, at=0.0)


def _stack(rank: _Rank) -> str:
    # The rank writes with the same file offset, so it must not move.
    return os.pread(rank.stack.fileno(), _LONGEST_STACK, 0).decode(errors="replace")


def _stacks(ranks: Sequence[_Rank]) -> dict[int, str]:
    """Return the stack of each rank, or "" for a rank that does not respond."""
    for rank in ranks:
        with contextlib.suppress(ProcessLookupError):
            os.kill(rank.process.pid or 0, _ASK)
    deadline = time.monotonic() + _STACK_S
    while True:
        stacks = {rank.number: _stack(rank) for rank in ranks}
        # The stack of the main thread is written last, and ends with the frames of `_serve`.
        if time.monotonic() > deadline or all(" in _serve\n" in text for text in stacks.values()):
            return stacks
        time.sleep(0.01)


def _release(ranks: list[_Rank]) -> None:
    for rank in ranks:
        with contextlib.suppress(OSError):  # if the rank has died
            rank.link.send_bytes(b"all returned")
    deadline = time.monotonic() + _LEAVING_S
    for rank in ranks:
        rank.process.join(max(0.0, deadline - time.monotonic()))


def _end(ranks: list[_Rank]) -> None:
    for rank in ranks:
        rank.process.kill()
        with contextlib.suppress(ProcessLookupError):  # the rank has ended, or leads no group yet
            os.killpg(rank.process.pid or 0, signal.SIGKILL)  # ends processes that the rank started
    for rank in ranks:
        rank.process.join()
        rank.process.close()
        rank.link.close()
        rank.stack.close()


# ---- in a rank ----------------------------------------------------------------------------------


_to_parent: list[connection.Connection] = []
"""The connection to the parent, if this process is a local rank."""

_sending = threading.Lock()


def _send(kind: str, value: object) -> None:
    if not _to_parent:
        raise NotInitializedError("report() works only in a rank that run_ranks() started")
    message = dumps((kind, value))
    with _sending:
        _to_parent[0].send_bytes(message)


def _send_unhandled(rank: int, hook: Callable[[Any], object], unhandled: Any) -> None:
    """Send an error that Python only prints. It is the cause if the job fails later.

    The error may be raised by a destructor while this thread sends another message. In this case,
    the error is not sent.
    """
    if unhandled.exc_value is not None and _sending.acquire(timeout=1):
        _sending.release()
        _send("unhandled", failure_of(rank, unhandled.exc_value))
    hook(unhandled)


def _serve(
    job: _Job,
    rank: int,
    link: connection.Connection,
    files: Sequence[connection.Connection],
    listener: socket.socket | None,
) -> None:
    """Join the job, run the function, send its result, and wait for the other ranks."""
    sys.excepthook = sys.__excepthook__  # the fork server replaced the hook
    os.setpgid(0, 0)  # so that processes that this rank starts end with it
    gc.freeze()  # without this call, the first full collection copies the pages of torch
    stdout, stderr, stack = (file.fileno() for file in files)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends the ranks
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the fork server blocked it
    os.environ.clear()
    os.environ.update(_environment(job, rank))
    _to_parent.append(link)
    all_returned = threading.Event()
    threading.Thread(target=_listen, args=(link, all_returned), daemon=True).start()
    faulthandler.enable(stack)  # in case a signal ends this process
    faulthandler.register(_ASK, stack)
    threading.excepthook = functools.partial(_send_unhandled, rank, threading.excepthook)
    sys.unraisablehook = functools.partial(_send_unhandled, rank, sys.unraisablehook)
    try:
        _join(job, rank, listener)
        function, args = pickle.loads(job.call)  # noqa: S301 - from our parent
        _send_result(rank, function(*args))
    except BaseException as error:  # noqa: BLE001 - the parent reports any error
        _send("failed", failure_of(rank, error))
    all_returned.wait()
    sys.stdout.flush()
    if (dist := sys.modules["torch.distributed"]).is_initialized():
        dist.destroy_process_group()
    if groups := sys.modules.get("hypercomm.process_groups.torch_internals"):
        groups.release()


def _send_result(rank: int, result: object) -> None:
    try:
        _send("returned", result)
    except Exception as error:  # noqa: BLE001 - of a class of the user
        kind = type(result)
        what = (
            f"it returned a {kind.__module__}.{kind.__qualname__} that cannot be pickled: {error}"
        )
        _send("failed", Failure(rank, f"{what}; return numbers, strings, lists or tensors"))


def _listen(link: connection.Connection, all_returned: threading.Event) -> None:
    with contextlib.suppress(EOFError, OSError):
        link.recv_bytes()
        all_returned.set()
        link.recv_bytes()
    os.killpg(0, signal.SIGKILL)  # the parent has ended, and nothing else would end this rank


def _environment(job: _Job, rank: int) -> dict[str, str]:
    """Return the parent's environment with torchrun's variables, and with loopback for gloo."""
    loopback = {"GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo"}
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    values = (rank, rank, job.nprocs, job.nprocs, _LOOPBACK, job.port)
    return loopback | job.environment | dict(zip(names, map(str, values), strict=True))


def _join(job: _Job, rank: int, listener: socket.socket | None) -> None:
    """Initialise torch.distributed with a store on the port that the parent reserved."""
    import torch
    import torch.distributed as dist

    # Ranks share the processors, so each has one thread, as with torchrun. torch has not
    # read the variable of this rank, because the fork server loaded torch before.
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    torch.set_num_threads(int(threads) if threads.isdecimal() and int(threads) else 1)
    if "nccl" in job.backend:
        torch.cuda.set_device(rank)
    store = dist.TCPStore(
        _LOOPBACK,
        job.port,
        job.nprocs,
        is_master=listener is not None,
        wait_for_workers=False,
        # Without this socket, the store would listen on every interface. Only the server without
        # libuv accepts a socket.
        master_listen_fd=listener.detach() if listener else None,
        use_libuv=False,
    )
    with no_stdout():
        dist.init_process_group(
            job.backend, store=store, rank=rank, world_size=job.nprocs, timeout=job.group_timeout
        )
    # gloo cannot connect to a rank that has left, and a function may leave the job immediately, so
    # each rank waits here until all ranks have joined.
    if store.add(_JOINED, 1) == job.nprocs:
        store.set(_ALL_JOINED, "")
    store.wait([_ALL_JOINED])
    # torch would have set this timeout if it had created the store.
    store.set_timeout(job.group_timeout or dist.constants.default_pg_timeout)


@contextlib.contextmanager
def no_stdout() -> Iterator[None]:
    """Discard output to stdout. gloo of torch 2.10 prints a line for each group."""
    stdout = os.dup(1)
    null = os.open(os.devnull, os.O_WRONLY)
    sys.stdout.flush()
    os.dup2(null, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)
        os.close(null)
