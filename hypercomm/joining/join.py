"""`join`: initialise torch.distributed as whatever started this process means it."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hypercomm.errors import HyperCommError, JoinError, LaunchError
from hypercomm.joining import devices
from hypercomm.joining.asked import Asked
from hypercomm.joining.joined import Joined
from hypercomm.launch.launchers import FoundJob, find_job
from hypercomm.process_groups import torch_internals as c10d
from hypercomm.process_groups.options import check_known


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
    """Join the job that a launcher has started this process for: initialise torch.distributed.

    Reads what torchrun, srun, mpirun and others leave in the environment. Where nothing started
    several processes, the world is this one alone, without a network. Where torch.distributed is
    initialised already, nothing changes, and what is there is returned. Ranks of mpirun on one
    host, and of srun, find the host of rank 0 and a port by themselves; MASTER_ADDR and
    MASTER_PORT outrank that. The environment is read, not written.

    Args:
        backend: Of WORLD; default: gloo, with GPUs "cpu:gloo,cuda:nccl".
        device: Of this rank, made the current one; default: the GPU of its local number, if the
            host has GPUs.
        timeout: How long the others are waited for, and how long a collective may take; default:
            torch's.
        rank: The rank of this process, with `size`; default: as the launcher says.
        size: The number of ranks.
        local_rank: The number of this rank among those of its host.
        address: The host of rank 0.
        port: A port there.
        environment: Read instead of `os.environ`.
        need_launcher: Refuse to be a world of one because no launcher was found.

    Raises:
        LaunchError: No launcher was found, or two contradict each other, or the arguments and the
            live job do; nothing tells where rank 0 is; the device does not exist.
        GroupOptionsError: The backend is unknown or cannot run here, or the timeout is none.
        LayoutError: A number is no integer.
        JoinError: The others did not come in time, or rank 0 cannot be reached.

    Example:
        >>> with join(environment={}) as job:
        ...     print(job.rank, job.size, job.launcher, job.backend, job.device)
        0 1 nobody gloo cpu
        >>> torch.distributed.is_initialized()
        False
    """
    asked = Asked(
        backend=backend,
        device=device,
        timeout=timeout,
        rank=rank,
        size=size,
        local_rank=local_rank,
        address=address,
        port=port,
        environment=environment,
        need_launcher=need_launcher,
    )
    asked.check()
    if dist.is_initialized():
        there = _there(asked)
        _check_agrees(asked, there)
        return there
    job = asked.job()
    alone = job.size == 1 and (job.address is None or job.port is None)
    if not alone:
        job.meeting_place()
    backend, chosen = devices.choose(backend, device, job.local_rank, job.local_size)
    with devices.used_unless_it_fails(chosen):
        _initialise(asked, job, backend, chosen)
    world = dist.group.WORLD
    return Joined(
        launcher=job.launcher.name,
        rank=job.rank,
        size=job.size,
        local_rank=job.local_rank,
        local_size=job.local_size,
        host=socket.gethostname(),
        address=None if alone else job.address,
        port=None if alone else job.port,
        backend=backend,
        device=chosen,
        made=[world],
    )


def _initialise(asked: Asked, job: FoundJob, backend: str, device: torch.device) -> None:
    """Make WORLD, or leave torch.distributed as it was."""
    options: dict[str, Any] = {"timeout": asked.timeout}
    if device.type != "cpu" and c10d.parts_of(backend)[device.type] in c10d.NCCL:
        options["device_id"] = device
    try:
        dist.init_process_group(backend, **_meeting(asked, job), **options)
    except BaseException as error:
        if dist.is_initialized():
            dist.destroy_process_group()
        if not isinstance(error, Exception) or isinstance(error, HyperCommError):
            raise
        said = " ".join(str(error).split())
        where = "" if job.address is None else f" at {job.address}, port {job.port}"
        if "EADDRINUSE" in said:
            said += "; another program has this port: set MASTER_PORT, or give port="
        raise JoinError(
            f"rank {job.rank} of {job.size} on {socket.gethostname()} could not join{where} "
            f"({job.told()}): {said}"
        ) from error


def _meeting(asked: Asked, job: FoundJob) -> dict[str, Any]:
    """Where the ranks meet, as arguments of `init_process_group`."""
    if job.address is None or job.port is None:
        return {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # type: ignore[attr-defined]
    has_agent = (
        asked.address is None
        and asked.port is None
        and asked.variables().get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    )
    if has_agent and asked.environment is None:
        # torch knows what the agent's store holds of other attempts.
        return {"init_method": "env://", "rank": job.rank, "world_size": job.size}
    time = asked.timeout or dist.constants.default_pg_timeout
    store = dist.TCPStore(  # type: ignore[attr-defined]
        job.address,
        job.port,
        job.size,
        is_master=job.rank == 0 and not has_agent,
        timeout=time,
        multi_tenant=True,  # so that a process may join, leave and join
    )
    # As torch does with an address: ranks that call init_process_group by hand can meet ours.
    kept = dist.PrefixStore("default_pg", store)  # type: ignore[attr-defined]
    return {"store": kept, "rank": job.rank, "world_size": job.size}


def _there(asked: Asked) -> Joined:
    """Describe the live job; of the environment what fits it."""
    world = c10d.world_group()
    found = None
    with contextlib.suppress(LaunchError):
        found = find_job(os.environ if asked.environment is None else asked.environment)
    rank, size = dist.get_rank(), dist.get_world_size()
    if found is not None and (found.rank, found.size) != (rank, size):
        found = None
    address, port = c10d.meeting_place() or (None, None)
    return Joined(
        launcher="torch.distributed" if found is None else found.launcher.name,
        rank=rank,
        size=size,
        local_rank=None if found is None else found.local_rank,
        local_size=None if found is None else found.local_size,
        host=socket.gethostname(),
        address=address,
        port=port,
        backend=c10d.default_backend(),
        device=devices.device_of_world(world),
    )


def _check_agrees(asked: Asked, there: Joined) -> None:
    """Refuse arguments that contradict the live job.

    Raises:
        LaunchError: Says which, and what is.
    """
    for name in ("rank", "size", "local_rank", "address", "port"):
        wanted, is_there = getattr(asked, name), getattr(there, name)
        if wanted is None or is_there is None or wanted == is_there:
            continue
        if name != "address" or not _is_same_host(wanted, is_there):
            raise _contradiction(name, wanted, is_there)
    found = None if asked.environment is None else find_job(asked.environment)
    if found is not None and (found.rank, found.size) != (there.rank, there.size):
        raise _contradiction("environment", found.told(), f"rank {there.rank} of {there.size}")
    _check_backend_agrees(asked, there)
    time = c10d.world_timeout(there.backend)
    if asked.timeout is not None and time is not None and asked.timeout != time:
        raise _contradiction("timeout", asked.timeout, time)


def _check_backend_agrees(asked: Asked, there: Joined) -> None:
    if asked.backend is not None:
        check_known(asked.backend)
        parts, live = c10d.parts_of(asked.backend), c10d.parts_of_world()
        if any(live.get(device) != single for device, single in parts.items()):
            raise _contradiction("backend", asked.backend, there.backend)
    if asked.device is not None:
        local = there.device.index if there.local_rank is None else there.local_rank
        _, device = devices.choose(None, asked.device, local, there.local_size)
        if device != there.device:
            raise _contradiction("device", str(device), str(there.device))


def _is_same_host(name: str, other: str) -> bool:
    """Tell whether two names are of one host."""
    try:
        found = [{info[4][0] for info in socket.getaddrinfo(one, None)} for one in (name, other)]
    except OSError:
        return False
    return bool(found[0] & found[1])


def _contradiction(name: str, wanted: object, there: object) -> LaunchError:
    said = repr(wanted) if isinstance(wanted, str) else wanted
    is_there = repr(there) if isinstance(there, str) else there
    return LaunchError(
        f"torch.distributed is initialised already, and {name}={said} contradicts what is there, "
        f"{is_there}; leave {name} out, or call torch.distributed.destroy_process_group() first"
    )
