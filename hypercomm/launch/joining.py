"""`join`: initialise torch.distributed for the job that a launcher started this process for."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Any

import attrs
import torch
import torch.distributed as dist

from hypercomm.errors import HyperCommError, JoinError, LaunchError
from hypercomm.launch import devices
from hypercomm.launchers import FoundJob, find_job, none_found
from hypercomm.layout.checks import as_int
from hypercomm.process_groups import torch_internals as c10d
from hypercomm.process_groups.options import check_known, check_timeout

if TYPE_CHECKING:
    from typing_extensions import Self  # typing has it from Python 3.11 on


@attrs.frozen
class Joined:
    """The job that this process takes part in.

    A context manager: on exit it destroys the process group that `join` created, and no other.

    Attributes:
        launcher: Where rank and size come from: "torchrun", "srun", "Open MPI", ..., "the call" if
            they were arguments, "nobody" in a world of one.
        rank: The rank of this process.
        size: The number of ranks.
        local_rank: The index of the rank on its host; None if unknown.
        local_size: The number of ranks on the host; None if unknown.
        host: The name of this host.
        address: The host of rank 0; None if the ranks did not meet over a network.
        port: The port there.
        backend: The backend of WORLD.
        device: The device for this rank's tensors.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int | None
    local_size: int | None
    host: str
    address: str | None
    port: int | None
    backend: str
    device: torch.device
    _made: list[Any] = attrs.field(factory=list, repr=False, eq=False)

    def leave(self) -> None:
        """Destroy the process group that `join` created for this object, if it still is WORLD.

        A process group that existed before is left alone. May be called twice.

        Example:
            >>> import hypercomm
            >>> job = hypercomm.join(rank=0, size=1)
            >>> job.leave()
            >>> dist.is_initialized()
            False
        """
        made = self._made.pop() if self._made else None
        if made is not None and dist.group.WORLD is made:
            c10d.destroy_world()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.leave()

    def __str__(self) -> str:
        of = "" if self.local_size is None else f" of {self.local_size}"
        local = "" if self.local_rank is None else f", local {self.local_rank}{of}"
        place = "" if self.address is None else f", at {self.address}:{self.port}"
        return (
            f"rank {self.rank} of {self.size}{local} on {self.host}, by {self.launcher}{place}; "
            f"{self.backend} on {self.device}"
        )


def join(
    *,
    backend: str | None = None,
    device: torch.device | str | int | None = None,
    timeout: timedelta | None = None,
    rank: int | None = None,
    size: int | None = None,
    local_rank: int | None = None,
    address: str | None = None,
    port: int | None = None,
    environment: Mapping[str, str] | None = None,
    need_launcher: bool = False,
) -> Joined:
    """Join the job that a launcher started this process for: initialise torch.distributed.

    Reads the environment variables of torchrun, srun, Open MPI and MPICH, or RANK and WORLD_SIZE
    set by hand. Without any of them the world is this process alone, without a network. If
    torch.distributed is already initialised, nothing changes, and the live job is returned; then
    only `rank`, `size` and `backend` are compared with it, and the other arguments are not used.

    With srun, and with Open MPI on one host, the ranks agree on the host of rank 0 and a port;
    MASTER_ADDR and MASTER_PORT override that. The environment is not changed.

    Args:
        backend: The backend of WORLD; default: gloo, with GPUs "cpu:gloo,cuda:nccl".
        device: The device of this rank, which becomes the current one; default: the GPU of its
            local number, if the host has GPUs.
        timeout: How long to wait for the other ranks, and for a collective; default: torch's.
        rank: The rank of this process; requires `size`. Default: the launcher's.
        size: The number of ranks.
        local_rank: The index of this rank on its host.
        address: The host of rank 0.
        port: A port there.
        environment: The variables to read instead of `os.environ`.
        need_launcher: Raise an error instead of creating a world of one.

    Returns:
        The job; a context manager that leaves it.

    Raises:
        LaunchError: The variables of launchers are incomplete or contradict each other, an
            argument contradicts the live job, the address of rank 0 is unknown, or the device does
            not exist.
        GroupOptionsError: The backend is unknown or cannot run here, or `timeout` is not a
            positive timedelta.
        LayoutError: A number is not an int.
        JoinError: The other ranks did not arrive in time, or rank 0 cannot be reached.

    Example:
        >>> with join(environment={}) as job:
        ...     print(job.rank, job.size, job.launcher, job.backend, job.device)
        0 1 nobody gloo cpu
        >>> torch.distributed.is_initialized()
        False
    """
    check_timeout(timeout)
    _check_numbers(rank, size)
    variables = os.environ if environment is None else environment
    if dist.is_initialized():
        return _live(rank, size, backend, variables)
    job = _job(rank, size, variables, need_launcher=need_launcher or bool(address or port))
    job = attrs.evolve(
        job,
        local_rank=job.local_rank if local_rank is None else local_rank,
        address=address.strip() if address else job.address,
        port=port or job.port,
    )
    if job.size == 1 and job.local_rank is None:
        job = attrs.evolve(job, local_rank=0, local_size=1)
    alone = job.size == 1 and (job.address is None or job.port is None)
    if alone:
        job = attrs.evolve(job, address=None, port=None)
    else:
        job.rendezvous()
    backend, chosen = devices.choose(backend, device, job.local_rank, job.local_size)
    agent = not (address or port) and variables.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    _initialise(job, backend, chosen, timeout, by_env=agent and environment is None, agent=agent)
    return _joined(job, backend, chosen, [dist.group.WORLD])


def _check_numbers(rank: int | None, size: int | None) -> None:
    if rank is None and size is None:
        return
    if rank is None or size is None:
        raise LaunchError(
            f"rank={rank} and size={size}: give both, or neither to use the launcher's"
        )
    if not 0 <= as_int(rank, "rank") < as_int(size, "size"):
        raise LaunchError(f"rank={rank} and size={size}: the ranks are 0 to size - 1")


def _job(
    rank: int | None, size: int | None, variables: Mapping[str, str], *, need_launcher: bool
) -> FoundJob:
    """Return the job of the arguments, else of the environment, else of this process alone.

    Raises:
        LaunchError: There is none, and one is needed.
    """
    if rank is not None and size is not None:
        found = None
        with contextlib.suppress(LaunchError):  # the arguments count
            found = find_job(variables)
        job = FoundJob("the call", rank, size, source=f"rank={rank} and size={size} of the call")
        if found is not None and (found.rank, found.size) == (rank, size):
            job = attrs.evolve(found, launcher=job.launcher, source=job.source)
        return job
    found = find_job(variables)
    if found is None and need_launcher:
        advice = "use torchrun, srun or mpirun, or give rank=, size=, address= and port="
        raise LaunchError(none_found(advice))
    return found or FoundJob("nobody", 0, 1, source="no launcher")


def _initialise(
    job: FoundJob,
    backend: str,
    device: torch.device,
    timeout: timedelta | None,
    *,
    by_env: bool,
    agent: bool,
) -> None:
    """Create WORLD on the device, or leave torch.distributed as it was."""
    options: dict[str, Any] = {"rank": job.rank, "world_size": job.size, "timeout": timeout}
    if device.type != "cpu":
        torch.get_device_module(device.type).set_device(device)
        if c10d.parts_of(backend)[device.type] in c10d.NCCL:
            options["device_id"] = device
    stores: Any = dist  # has them, but not for type checkers
    try:
        if by_env:
            options["init_method"] = "env://"  # torch knows where in its agent's store they meet
        elif job.address is None:
            options["store"] = stores.HashStore()
        else:
            store = stores.TCPStore(
                *(job.address, job.port, job.size),
                is_master=job.rank == 0 and not agent,
                timeout=timeout or dist.constants.default_pg_timeout,
                multi_tenant=True,  # so that a process may join, leave and join
            )
            # As torch does with an address: init_process_group by hand can meet these ranks.
            options["store"] = stores.PrefixStore("default_pg", store)
        dist.init_process_group(backend, **options)
    except BaseException as error:
        if dist.is_initialized():
            dist.destroy_process_group()
        if not isinstance(error, Exception) or isinstance(error, HyperCommError):
            raise
        said = " ".join(str(error).split())
        where = "" if job.address is None else f" at {job.address}, port {job.port}"
        if "EADDRINUSE" in said:
            said += "; another program uses this port: set MASTER_PORT, or give port="
        raise JoinError(
            f"rank {job.rank} of {job.size} on {socket.gethostname()} could not join{where} "
            f"({job.source}): {said}"
        ) from error


def _live(
    rank: int | None, size: int | None, backend: str | None, variables: Mapping[str, str]
) -> Joined:
    """Describe the live job.

    Raises:
        LaunchError: An argument contradicts it.
    """
    here = (dist.get_rank(), dist.get_world_size())
    live = c10d.default_backend()
    if backend is not None:
        check_known(backend)
        if c10d.parts_of(backend).items() <= c10d.parts_of_world().items():
            backend = live
    asked, actual = (rank, size, backend), (*here, live)
    for name, wanted, value in zip(("rank", "size", "backend"), asked, actual, strict=True):
        if wanted not in {None, value}:
            raise LaunchError(
                f"torch.distributed is already initialised with {name} {value!r}, but {name}="
                f"{wanted!r} was given; leave it out, or call destroy_process_group() first"
            )
    found = None
    with contextlib.suppress(LaunchError):
        found = find_job(variables)
    if found is None or (found.rank, found.size) != here:
        found = FoundJob("torch.distributed", *here)
    address, port = c10d.meeting_place() or (None, None)
    job = attrs.evolve(found, address=address, port=port)
    return _joined(job, live, devices.device_of_world(dist.group.WORLD), [])


def _joined(job: FoundJob, backend: str, device: torch.device, made: list[Any]) -> Joined:
    return Joined(
        *(job.launcher, job.rank, job.size, job.local_rank, job.local_size, socket.gethostname()),
        *(job.address, job.port, backend, device, made),
    )
