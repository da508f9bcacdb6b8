"""What one local rank does between its start and its end; `launch` is the other side.

The rank and its parent talk over one pipe. On the way up go pickled pairs (kind, value): "port"
from rank 0, then "message", and "returned" or "raised". On the way down go plain bytes: the port,
to the other ranks, and b"leave" once every rank has returned.
"""

from __future__ import annotations

import contextlib
import faulthandler
import gc
import os
import pickle
import queue
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from multiprocessing import connection, reduction
from typing import Any

import attrs

from hypercomm.errors import LaunchError, NotInitializedError

_LOOPBACK = "127.0.0.1"
_JOINED, _ALL_JOINED = "hypercomm/joined", "hypercomm/all joined"
"""Keys of the job's store: how many ranks have joined, and that all have."""


@attrs.frozen
class RankJob:
    """What the ranks of one job have in common."""

    function: bytes
    args: bytes
    nprocs: int
    backend: str
    group_timeout: timedelta | None
    environment: dict[str, str]


@attrs.frozen
class InheritedFd:
    """A file descriptor that travels with the process being started; in there, it is an int."""

    fd: int

    def __reduce__(self) -> tuple[Callable[[Any], int], tuple[Any]]:
        return _detach, (reduction.DupFd(self.fd),)


def _detach(duplicate: Any) -> int:
    return int(duplicate.detach())


def pickled(value: object, what: str) -> bytes:
    """Pickle what goes to another process.

    Raises:
        LaunchError: It cannot be pickled; the message says `what` it is.
    """
    try:
        return pickle.dumps(value)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise LaunchError(
            f"{what} must travel to another process by pickle, and cannot: {error}; functions "
            f"must be defined at the top of a module"
        ) from error


@attrs.define
class _Parent:
    """The way to the parent, if this process is a local rank."""

    link: connection.Connection | None = None
    _lock: threading.Lock = attrs.field(factory=threading.Lock)

    def send(self, kind: str, value: object) -> None:
        if self.link is None:
            raise NotInitializedError("report() works only inside a rank that run_ranks() started")
        what = "what the function returned" if kind == "returned" else "what was reported"
        message = pickled((kind, value), what)
        with self._lock:
            self.link.send_bytes(message)


_parent = _Parent()


def report(value: object) -> None:
    """Send a value to the process that called `run_ranks`, while this rank goes on.

    Raises:
        NotInitializedError: This process is not a rank that `run_ranks` started.
    """
    _parent.send("message", value)


def serve(job: RankJob, rank: int, link: connection.Connection, fds: list[int]) -> None:
    """Be one rank: join the job, run the function, say what came of it, wait for the others."""
    os.setpgid(0, 0)  # so that what this rank starts ends with it
    gc.freeze()  # else its first full collection walks all of torch, and copies it page by page
    stdout, stderr, stack = fds
    os.dup2(stdout, 1)
    os.dup2(stderr, 2)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends the ranks
    faulthandler.register(signal.SIGUSR1, file=stack)  # any thread may be the one that hears it
    os.environ.clear()
    os.environ.update(_environment(job, rank))
    _parent.link = link
    inbox: queue.Queue[bytes] = queue.Queue()
    threading.Thread(target=_listen, args=(link, inbox), daemon=True).start()
    try:
        _join_job(job, rank, inbox)
        value = pickle.loads(job.function)(*pickle.loads(job.args))  # noqa: S301 - from our parent
        _parent.send("returned", value)
    except BaseException as error:  # noqa: BLE001 - whatever it was, the parent must hear of it
        _parent.send("raised", (time.monotonic(), _describe(error)))
    inbox.get()  # every rank has returned
    sys.stdout.flush()
    _leave_job()


def _listen(link: connection.Connection, inbox: queue.Queue[bytes]) -> None:
    while True:
        try:
            inbox.put(link.recv_bytes())
        except (EOFError, OSError):
            os.killpg(0, signal.SIGKILL)  # the parent is gone, and nobody would end this rank


def _environment(job: RankJob, rank: int) -> dict[str, str]:
    """The parent's environment, what torchrun would set, and loopback for gloo."""
    interfaces = [name for _, name in socket.if_nameindex()]
    loopback = next((name for name in ("lo", "lo0") if name in interfaces), None)
    defaults = {} if loopback is None else {"GLOO_SOCKET_IFNAME": loopback}
    return {
        **defaults,
        **job.environment,
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(job.nprocs),
        "LOCAL_WORLD_SIZE": str(job.nprocs),
        "MASTER_ADDR": _LOOPBACK,
    }


def _join_job(job: RankJob, rank: int, inbox: queue.Queue[bytes]) -> None:
    """Initialise torch.distributed on a port that rank 0 gets from the system and passes on."""
    import torch
    import torch.distributed as dist

    # As torchrun does: ranks share the processors. torch was loaded with another environment.
    threads = os.environ.get("OMP_NUM_THREADS", "1")
    torch.set_num_threads(int(threads) if threads.isdecimal() and int(threads) else 1)
    if "nccl" in job.backend:
        torch.cuda.set_device(rank)
    listener = socket.create_server((_LOOPBACK, 0), backlog=job.nprocs) if rank == 0 else None
    port = listener.getsockname()[1] if listener else int(inbox.get())
    store = dist.TCPStore(  # type: ignore[attr-defined]
        _LOOPBACK,
        port,
        job.nprocs,
        is_master=listener is not None,
        wait_for_workers=False,
        # A store that opens its own port listens on every interface; handing it one needs the
        # older of torch's two servers.
        master_listen_fd=listener.detach() if listener else None,
        use_libuv=False,
    )
    if rank == 0:
        _parent.send("port", port)
    os.environ["MASTER_PORT"] = str(port)
    with no_stdout():
        dist.init_process_group(
            job.backend, store=store, rank=rank, world_size=job.nprocs, timeout=job.group_timeout
        )
    # gloo cannot connect to a rank that has left, and a function may begin by leaving.
    if store.add(_JOINED, 1) == job.nprocs:
        store.set(_ALL_JOINED, "")
    store.wait([_ALL_JOINED])
    # The store waits as long as the job's groups do, as it does where torch makes it itself.
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
    """The traceback from the user's function on; our own frame above it says nothing."""
    trace = error.__traceback__
    inner = trace.tb_next if trace is not None and trace.tb_next is not None else trace
    return "".join(traceback.format_exception(type(error), error, inner)).rstrip()
