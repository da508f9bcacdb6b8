"""`join` initialises torch.distributed for a launcher's job. `renew_world` replaces its WORLD."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import socket
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import attrs
import torch
import torch.distributed as dist

from hypercomm.errors import HyperCommError, LaunchError, RankOutsideError
from hypercomm.job_environment import FoundJob, find_job
from hypercomm.layout.checks import as_int, as_ranks
from hypercomm.layout.text import format_ranks
from hypercomm.process_groups import torch_internals as torchdist
from hypercomm.process_groups.meeting import agree
from hypercomm.process_groups.spec import check_backend, check_known, check_timeout
from hypercomm.process_groups.world import Scope, World, current, note

if TYPE_CHECKING:
    from typing_extensions import Self  # typing has it from Python 3.11 on

_RENEW = "renew_world()"

_JOB = "hypercomm/job"
"""The key of the id of rank 0's job, in the store at the address of the job."""

_JOB_IDS = ("TORCHELASTIC_RUN_ID", "SLURM_JOB_ID", "PMIX_NAMESPACE")
"""Variables with an id that all ranks of a job share. torchrun's default is "none"."""

_FOR_RANK_0 = timedelta(seconds=10)
"""The time for rank 0 to write the id of its job, if it calls `join`, too."""


@attrs.frozen(kw_only=True)
class Joined(FoundJob):
    """The job that this process takes part in.

    As a context manager, it leaves the job on exit: it destroys the process group that `join`
    created, and no other process group.

    Attributes:
        launcher: The launcher, such as "torchrun", "srun" or "Open MPI". "the call" if rank and
            size were arguments. "none" if no launcher was found and the world has one rank.
        rank: The rank of this process.
        size: The number of ranks.
        local_rank: The index of the rank on its host, or None if unknown.
        local_size: The number of ranks on the host, or None if unknown.
        address: The host of rank 0, or None if the ranks did not connect over a network.
        port: The port on that host, or None.
        source: The variables or arguments from which rank and size were read.
        host: The name of this host.
        backend: The backend of WORLD.
        device: The device for this rank's tensors.
    """

    host: str = attrs.field(factory=socket.gethostname)
    backend: str
    device: torch.device
    _made: list[Any] = attrs.field(factory=list, repr=False, eq=False)

    def leave(self) -> None:
        """Destroy the process group that `join` created for this object, if it is still WORLD.

        A process group that existed before is not destroyed. A second call does nothing.

        Example:
            >>> import hypercomm
            >>> job = hypercomm.join(rank=0, size=1)
            >>> job.leave()
            >>> dist.is_initialized()
            False
        """
        made = self._made.pop() if self._made else None
        if made is not None and dist.group.WORLD is made:
            torchdist.destroy_world()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()


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
    """Initialise torch.distributed for the job in which a launcher started this process.

    Reads the environment variables of torchrun, srun, Open MPI and MPICH, or RANK and WORLD_SIZE
    set by hand. If none of these are set, the world consists of this process alone, and no network
    is used. If torch.distributed is already initialised, nothing changes, and the existing job is
    returned. In this case `rank`, `size` and `backend` are compared with that job, and the other
    arguments are ignored.

    With srun, and with Open MPI on one host, all ranks derive the same address and port of rank 0
    from the environment. MASTER_ADDR and MASTER_PORT override them. The environment is not changed.

    Args:
        backend: The backend of WORLD. Default: gloo; with GPUs "cpu:gloo,cuda:nccl".
        device: The device of this rank, which becomes the current device. Default: the GPU with the
            index of the local rank, if the host has GPUs.
        timeout: How long to wait for the other ranks to join, and the timeout of collectives.
            Default: torch's default timeout.
        rank: The rank of this process. Requires `size`. Default: the rank from the launcher.
        size: The number of ranks.
        local_rank: The index of this rank on its host.
        address: The host of rank 0.
        port: A port on the host of rank 0.
        environment: The variables to read instead of `os.environ`.
        need_launcher: Whether to raise an error instead of creating a world of one rank.

    Returns:
        The job. As a context manager, it leaves the job on exit.

    Raises:
        LaunchError: The variables of launchers are incomplete or contradict each other, an
            argument contradicts the existing job, the address of rank 0 is unknown, the device
            does not fit, the other ranks did not join in time, or another job uses the address.
            Without a launcher's job id, another job is noticed if two processes join as one rank.
        GroupOptionsError: The backend is unknown or cannot run here, or `timeout` is not a
            positive timedelta.
        LayoutError: `rank` or `size` is not an int.

    Example:
        >>> with join(environment={}) as job:
        ...     print(job.rank, job.size, job.launcher, job.backend, job.device)
        0 1 none gloo cpu
        >>> torch.distributed.is_initialized()
        False
    """
    check_timeout(timeout)
    variables = os.environ if environment is None else environment
    if (rank is None) != (size is None):
        raise LaunchError(
            f"rank={rank} and size={size}: give both, or omit both to use the launcher's values"
        )
    if rank is not None and not 0 <= as_int(rank, "rank") < as_int(size, "size"):
        raise LaunchError(f"rank={rank} and size={size}: rank= must be from 0 to size - 1")
    if dist.is_initialized():
        return _live(rank, size, backend, variables)
    if rank is not None and size is not None:
        found = _launched(variables, rank, size)
        job = attrs.evolve(found, launcher="the call", source=f"rank={rank} and size={size}")
    elif (started := find_job(variables)) is not None:
        job = started
    elif need_launcher or address or port:
        raise LaunchError(
            "no launcher was found: RANK and WORLD_SIZE are not set; use torchrun, srun or mpirun, "
            "or give rank=, size=, address= and port="
        )
    else:
        job = FoundJob("none", 0, 1, source="no launcher")
    job = attrs.evolve(
        job,
        local_rank=job.local_rank if local_rank is None else local_rank,
        address=address.strip() if address else job.address,
        port=port or job.port,
    )
    if job.size == 1 and job.local_rank is None:
        job = attrs.evolve(job, local_rank=0, local_size=1)
    if job.size == 1 and (job.address is None or job.port is None):
        job = attrs.evolve(job, address=None, port=None)
    else:
        job.rendezvous()
    backend, chosen = _choose(backend, device, job)
    _initialise(job, backend, chosen, timeout, _id_of(job, variables))
    made = [dist.group.WORLD]
    return Joined(**attrs.asdict(job), backend=backend, device=chosen, made=made)


def _launched(variables: Mapping[str, str], rank: int, size: int) -> FoundJob:
    """Return the launcher's job if it has this rank and size, else a job of unknown origin."""
    with contextlib.suppress(LaunchError):
        found = find_job(variables)
        if found is not None and (found.rank, found.size) == (rank, size):
            return found
    return FoundJob("torch.distributed", rank, size)


def _live(
    rank: int | None, size: int | None, backend: str | None, variables: Mapping[str, str]
) -> Joined:
    """Return the job for which torch.distributed is initialised.

    Raises:
        LaunchError: An argument contradicts that job.
    """
    live = torchdist.default_backend()
    here = (dist.get_rank(), dist.get_world_size())
    is_same = rank is None or (rank, size) == here
    if backend is not None:
        check_known(backend)
        is_same &= torchdist.parts_of(backend).items() <= torchdist.parts_of_world().items()
    if not is_same:
        raise LaunchError(
            f"torch.distributed is already initialised with rank={here[0]}, size={here[1]} and "
            f"backend={live!r}, but rank={rank}, size={size} and backend={backend!r} were given; "
            f"omit these arguments, or call destroy_process_group() first"
        )
    address, port = torchdist.store_address() or (None, None)
    job = attrs.evolve(_launched(variables, *here), address=address, port=port)
    kind = torchdist.devices_made_for(live)
    device = torch.device("cpu")
    if kind != "cpu" and _count(kind):  # the devices of a fake world may not exist
        device = torch.device(kind, torch.get_device_module(kind).current_device())
    return Joined(**attrs.asdict(job), backend=live, device=device)


def _id_of(job: FoundJob, variables: Mapping[str, str]) -> str:
    """Return the id of a launcher's job with its variable, or "" if it is unknown."""
    tasks = variables.get("SLURM_STEP_NUM_TASKS") or variables.get("SLURM_NTASKS")
    for name in () if job.launcher == "the call" else _JOB_IDS:
        value = variables.get(name, "none")
        # A user may join the processes of several allocations by hand.
        is_part = name == "SLURM_JOB_ID" and tasks not in {None, str(job.size)}
        if value not in {"", "none"} and not is_part:
            return f"{name}={value}"
    return ""


def _check_job(store: dist.Store, job: FoundJob, job_id: str) -> None:
    """Raise if this rank has connected to the store of another job. Makes one request.

    Raises:
        LaunchError: Rank 0 belongs to another job, or another process has joined as this rank.
    """
    where = f"at {job.address}, port {job.port}"
    if job_id and job.rank == 0:
        store.set(_JOB, job_id)
    elif job_id:
        store.set_timeout(_FOR_RANK_0)
        there = job_id
        with contextlib.suppress(dist.DistStoreError):  # rank 0 does not call join()
            there = store.get(_JOB).decode()
        if there != job_id:
            raise LaunchError(
                f"rank {job.rank} belongs to the job {job_id}, but {where}, there is rank 0 of the "
                f"job {there}; give each job its own MASTER_PORT"
            )
    else:
        me = f"process {os.getpid()} on {socket.gethostname()}"
        there = store.compare_set(f"{_JOB} rank {job.rank}", "", me).decode()
        if there != me:
            raise LaunchError(
                f"{there} has joined as rank {job.rank} {where}, and so does this {me}; give each "
                f"job its own MASTER_PORT, and restart all ranks of a job together"
            )


def _initialise(
    job: FoundJob, backend: str, device: torch.device, timeout: timedelta | None, job_id: str
) -> None:
    """Create WORLD on the device. On an error, torch.distributed remains uninitialised."""
    options: dict[str, Any] = {"rank": job.rank, "world_size": job.size, "timeout": timeout}
    if device.type != "cpu":
        torch.get_device_module(device.type).set_device(device)
        if torchdist.parts_of(backend)[device.type] in torchdist.NCCL:
            options["device_id"] = device
    if job.address is None:
        stores: Any = dist  # type checkers do not know the stores of torch
        options["store"] = stores.HashStore()
    try:
        if job.address is not None:
            options["store"] = _store_of(job, timeout or torchdist.default_timeout(backend), job_id)
        dist.init_process_group(backend, **options)
    except BaseException as error:
        torchdist.destroy_world()
        if not isinstance(error, Exception) or isinstance(error, HyperCommError):
            raise
        where = "" if job.address is None else f" at {job.address}, port {job.port}"
        advice = ""
        if "EADDRINUSE" in str(error):
            advice = "; another program uses this port: set MASTER_PORT, or give port="
        raise LaunchError(
            f"rank {job.rank} of {job.size} on {socket.gethostname()} could not join{where} "
            f"({job.source}): {' '.join(str(error).split())}{advice}"
        ) from error


def _store_of(job: FoundJob, timeout: timedelta, job_id: str) -> dist.Store:
    """Connect to the job's store. torch finds out whether torchrun's agent or rank 0 serves it."""
    host = f"[{job.address}]" if ":" in str(job.address) else job.address
    url = f"tcp://{host}:{job.port}"
    store, _, _ = next(dist.rendezvous(url, job.rank, job.size, timeout=timeout))
    _check_job(store, job, job_id)
    store.set_timeout(timeout)
    return dist.PrefixStore("default_pg", store)  # as torch, whose ranks may be in the job


# ---- the device and the backend of a rank -------------------------------------------------------


def _choose(
    backend: str | None, device: torch.device | str | int | None, job: FoundJob
) -> tuple[str, torch.device]:
    """Return the backend of WORLD and the device of this rank. Defaults depend on the host.

    Raises:
        GroupOptionsError: The backend is unknown, or cannot run here.
        LaunchError: The backend does not support the device, the host has fewer devices than
            ranks, or the device of this rank is unknown.
    """
    check_backend(backend)
    if device is None:
        device = _accelerator() if backend is None else torchdist.devices_made_for(backend)
    chosen = torch.device(device)
    if chosen.index is None and chosen.type != "cpu":
        chosen = torch.device(chosen.type, _index_of_rank(chosen.type, job))
    if backend is None:
        default = dist.Backend.default_device_backend_map.get(chosen.type, "gloo")
        backend = "gloo" if default == "gloo" else f"cpu:gloo,{chosen.type}:{default}"
    parts = torchdist.parts_of(backend)
    if chosen.type not in parts:
        raise LaunchError(
            f"device {str(chosen)!r} does not fit backend {backend!r}, which is for tensors on "
            f"{' and '.join(sorted(parts))}; omit device= or backend=, or give a backend such as "
            f"'cpu:gloo,cuda:nccl'"
        )
    return backend, chosen


def _index_of_rank(kind: str, job: FoundJob) -> int:
    count = _count(kind)
    if count == 1:  # a launcher may make one device visible to each rank
        return 0
    ranks = max(job.local_size or 0, (job.local_rank or 0) + 1)
    if ranks > count or job.local_rank is None:
        raise LaunchError(
            f"rank {job.rank} has local rank {job.local_rank}, and {ranks} ranks on this host need "
            f"a device each, but the host has {count} of type {kind!r}; set LOCAL_RANK, give "
            f"join() local_rank= or device=, or use fewer ranks or backend='gloo'"
        )
    return job.local_rank


def _accelerator() -> str:
    """Return the type of this host's accelerator if torch has a backend for it, else "cpu"."""
    found = torch.accelerator.current_accelerator(check_available=True)
    backend = found and dist.Backend.default_device_backend_map.get(found.type)
    if found is None or backend in {None, "gloo"} or torchdist.why_unavailable(str(backend)):
        return "cpu"
    return found.type


def _count(kind: str) -> int:
    module = torch.get_device_module(kind)
    return int(module.device_count()) if module.is_available() else 0


# ---- a new WORLD ---------------------------------------------------------------------------------


@attrs.frozen(kw_only=True)
class Renewed(Joined):
    """A job that continues with some processes of an earlier job, under new ranks.

    Attributes:
        numbers: Maps the rank of each process in the old WORLD to its rank in the new one.
    """

    numbers: dict[int, int] = attrs.field(factory=dict)


def renew_world(
    ranks: Iterable[int], *, store: Any = None, timeout: timedelta | None = None
) -> Renewed:
    """Replace WORLD by a new WORLD of some of its ranks, such as the survivors of a failure.

    Use it for code that uses WORLD by default. Exactly the given ranks must call this. First, they
    wait for each other in the job's store, so nothing has changed if a rank does not join. Then
    each rank destroys the old WORLD with all its process groups, and initialises the new WORLD with
    the same backend and timeout. The ranks are numbered in the order of `ranks`. Grids continue
    with `grid.reshape(target, ranks=...)`, which takes ranks of the new WORLD.

    With `store`, the ranks do not wait for each other before they destroy the old WORLD. The old
    WORLD is destroyed even if a rank is missing.

    Args:
        ranks: Ranks of the old WORLD, in the order of the new WORLD. All of these ranks must pass
            the same list.
        store: A new store of torch, such as a FileStore, for the new WORLD. Use it if the process
            that serves the job's store (rank 0, or torchrun's agent) is lost. Default: the job's
            store.
        timeout: How long to wait for the other ranks in the job's store. Default: the timeout of
            WORLD.

    Returns:
        The new job, with the new rank of each process. As a context manager, it leaves the job on
        exit.

    Raises:
        RankOutsideError: `ranks` does not contain the calling rank.
        LayoutError: `ranks` is not a list of distinct ranks of WORLD.
        LaunchError: The world is a fake one, or the new WORLD could not be created. In the second
            case the old WORLD no longer exists: restart the job.
        GroupCreationTimeout: A rank did not join in time. `error.missing` lists the missing ranks.
        OutcomeUnknownError: The job's store is lost.
        NotInitializedError: torch.distributed is not initialised.
        GroupOptionsError: `timeout` is not a positive timedelta.

    Example:
        >>> import hypercomm
        >>> _ = hypercomm.join(rank=0, size=1)
        >>> with renew_world([0]) as job:  # in a larger job: the ranks that survivors() returns
        ...     print(job.rank, job.size, job.numbers)
        0 1 {0: 0}
    """
    check_timeout(timeout)
    old = current()
    given = as_ranks(ranks, "ranks=", old.size)
    if not torchdist.has_ranks() or torchdist.is_patched_world():
        raise LaunchError("this is a fake or simulated world: its other ranks do not exist")
    if store is None and not old.has_store:
        raise LaunchError("this torch does not expose the job's store; pass a store as store=")
    if old.rank not in given:
        raise RankOutsideError(
            f"ranks={format_ranks(sorted(given))} does not include this process (rank {old.rank}); "
            f"only ranks of the new WORLD call renew_world(): end this process"
        )
    if store is None:  # ranks with different lists meet at the same key, which raises an error
        title = f"{_RENEW} of ranks {format_ranks(sorted(given))}"
        scope = Scope(old, "new world", given, is_fenced=True)
        entries = [f"{_RENEW} with ranks {list(given)}"]
        key = agree(scope, title, entries, old.limit_s(timeout))  # new for each call
        store = torchdist.default_store()
    else:
        digest = hashlib.sha256(json.dumps(given).encode()).hexdigest()[:16]
        key = f"hypercomm/new world {digest}"
    return _renew(old, given, dist.PrefixStore(key, store))


def _renew(old: World, ranks: tuple[int, ...], store: Any) -> Renewed:
    """Destroy the old WORLD, and create the new one."""
    options: dict[str, Any] = {"timeout": old.timeout_of(old.backend)}
    if (device := torchdist.bound_device()) is not None:
        options["device_id"] = device
    rank = ranks.index(old.rank)
    size = len(ranks)
    torchdist.end_world()
    try:
        dist.init_process_group(old.backend, store=store, rank=rank, world_size=size, **options)
    except Exception as error:
        torchdist.destroy_world()
        raise LaunchError(
            f"rank {old.rank} could not join the new WORLD of ranks {format_ranks(sorted(ranks))} "
            f"({' '.join(str(error).split())}); the old WORLD no longer exists: restart the job"
        ) from error
    world = attrs.evolve(current(), before=old, numbers=ranks)
    note(world, torchdist.world_group())
    facts = attrs.asdict(join(environment={}), filter=lambda field, _: field.name != "_made")
    facts |= {"launcher": _RENEW, "made": [dist.group.WORLD]}
    return Renewed(**facts, numbers={number: at for at, number in enumerate(ranks)})
