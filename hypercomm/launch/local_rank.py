"""The life of a local rank, from its start to its end; `run` is the parent's side.

A rank and its parent communicate over one pipe. The rank sends pickled pairs (kind, value):
"message", "returned" or "raised". The parent answers with one message once every rank has returned.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Sequence
from datetime import timedelta
from multiprocessing import connection

import attrs

from hypercomm.errors import LaunchError, MissingPackageError, NotInitializedError

LOOPBACK = "127.0.0.1"
_JOINED, _ALL_JOINED = "hypercomm/joined", "hypercomm/all joined"
"""Keys of the job's store: the number of ranks that have joined, and whether all have."""


@attrs.frozen
class RankJob:
    """The arguments that all ranks of one job share.

    Attributes:
        function: The pickled function.
        args: Its pickled arguments.
        nprocs: The number of ranks.
        backend: The backend of the job.
        timeout: Seconds after which a rank writes down where it is.
        group_timeout: The timeout of WORLD; None: torch's.
        environment: The parent's environment.
        port: The port of the job's store.
    """

    function: bytes
    args: bytes
    nprocs: int
    backend: str
    timeout: float
    group_timeout: timedelta | None
    environment: dict[str, str]
    port: int


def pickled(value: object, what: str) -> bytes:
    """Pickle a value for another process.

    Raises:
        LaunchError: It cannot be pickled; the message says `what` it is.
        MissingPackageError: cloudpickle is not installed.
    """
    try:
        import cloudpickle
    except ModuleNotFoundError:
        raise MissingPackageError("run_ranks needs cloudpickle: pip install cloudpickle") from None
    try:
        return bytes(cloudpickle.dumps(value))
    except Exception as error:  # noqa: BLE001 - pickling runs the user's code
        raise LaunchError(f"{what} cannot be sent to another process: {error}") from None


@attrs.define
class _Parent:
    """The connection to the parent, if this process is a local rank."""

    link: connection.Connection | None = None
    _lock: threading.Lock = attrs.field(factory=threading.Lock)

    def send(self, kind: str, value: object, what: str) -> None:
        if self.link is None:
            raise NotInitializedError("report() works only in a rank that run_ranks() started")
        message = pickled((kind, value), what)
        with self._lock:
            self.link.send_bytes(message)


_parent = _Parent()


def report(value: object) -> None:
    """Send a value from a rank to the process that called `run_ranks`.

    Args:
        value: The value; it is pickled with cloudpickle.

    Raises:
        NotInitializedError: This process is not a rank that `run_ranks` started.
        LaunchError: The value cannot be pickled.

    Example:
        >>> from hypercomm import run_ranks
        >>> run_ranks(report, 1, args=["ready"], on_message=print)
        0 ready
        [None]
    """
    _parent.send("message", value, "the reported value")


def serve(
    job: RankJob,
    rank: int,
    link: connection.Connection,
    files: Sequence[connection.Connection],
    listener: socket.socket | None,
) -> None:
    """Join the job, run the function, send its result, and wait for the other ranks."""
    os.setpgid(0, 0)  # so that processes that this rank starts end with it
    gc.freeze()  # else the first full collection walks all of torch, and copies it page by page
    stdout, stderr, stack = (file.fileno() for file in files)
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends the ranks
    faulthandler.dump_traceback_later(job.timeout, file=stack)
    os.environ.clear()
    os.environ.update(_environment(job, rank))
    _parent.link = link
    all_returned = threading.Event()
    threading.Thread(target=_listen, args=(link, all_returned), daemon=True).start()
    try:
        _join_job(job, rank, listener)
        value = pickle.loads(job.function)(*pickle.loads(job.args))  # noqa: S301 - from our parent
        _parent.send("returned", value, "the returned value")
    except BaseException as error:  # noqa: BLE001 - whatever it was, the parent reports it
        _parent.send("raised", (time.monotonic(), _describe(error)), "the error")
    all_returned.wait()
    sys.stdout.flush()
    _leave_job()


def _listen(link: connection.Connection, all_returned: threading.Event) -> None:
    with contextlib.suppress(EOFError, OSError):
        link.recv_bytes()
        all_returned.set()
        link.recv_bytes()
    os.killpg(0, signal.SIGKILL)  # the parent is gone, and nothing else would end this rank


def _environment(job: RankJob, rank: int) -> dict[str, str]:
    """Return the parent's environment, what torchrun would set, and loopback for gloo."""
    interfaces = [name for _, name in socket.if_nameindex()]
    loopback = next((name for name in ("lo", "lo0") if name in interfaces), None)
    defaults = {} if loopback is None else {"GLOO_SOCKET_IFNAME": loopback}
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    values = (rank, rank, job.nprocs, job.nprocs, job.port)
    job_of_rank = dict(zip(names, map(str, values), strict=True))
    return {**defaults, **job.environment, **job_of_rank, "MASTER_ADDR": LOOPBACK}


def _join_job(job: RankJob, rank: int, listener: socket.socket | None) -> None:
    """Initialise torch.distributed with a store on the port that the parent reserved."""
    import torch
    import torch.distributed as dist

    # As torchrun does: ranks share the processors. torch was loaded with another environment.
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    torch.set_num_threads(int(threads) if threads.isdecimal() and int(threads) else 1)
    if "nccl" in job.backend:
        torch.cuda.set_device(rank)
    store = dist.TCPStore(  # type: ignore[attr-defined]
        *(LOOPBACK, job.port, job.nprocs),
        is_master=listener is not None,
        wait_for_workers=False,
        # A store that opens its own port listens on every interface; only the older of torch's
        # two servers accepts a socket.
        master_listen_fd=listener.detach() if listener else None,
        use_libuv=False,
    )
    with no_stdout():
        dist.init_process_group(
            job.backend, store=store, rank=rank, world_size=job.nprocs, timeout=job.group_timeout
        )
    # gloo cannot connect to a rank that has left, and a function may begin by leaving.
    if store.add(_JOINED, 1) == job.nprocs:
        store.set(_ALL_JOINED, "")
    store.wait([_ALL_JOINED])
    # The timeout of a store that torch creates itself.
    store.set_timeout(job.group_timeout or dist.constants.default_pg_timeout)


@contextlib.contextmanager
def no_stdout() -> Iterator[None]:
    """Discard what is written to stdout: gloo of torch 2.10 prints a line for each group."""
    stdout, null = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    sys.stdout.flush()
    os.dup2(null, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        os.close(stdout)
        os.close(null)


def _leave_job() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def _describe(error: BaseException) -> str:
    """Format the traceback from the user's function on, without the frame of `serve`."""
    trace = error.__traceback__
    inner = trace.tb_next if trace is not None and trace.tb_next is not None else trace
    return "".join(traceback.format_exception(type(error), error, inner)).rstrip()
