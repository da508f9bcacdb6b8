"""`join` initialises torch.distributed for a launcher's job; `renew_world` replaces its WORLD."""

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
from hypercomm.process_groups.agreement.driver import agree, limit_of
from hypercomm.process_groups.agreement.scope import Scope
from hypercomm.process_groups.options import check_backend, check_known, check_timeout
from hypercomm.process_groups.world import World, current, note

if TYPE_CHECKING:
    from typing_extensions import Self  # typing has it from Python 3.11 on

_RENEW = "renew_world()"


@attrs.frozen(kw_only=True)
class Joined(FoundJob):
    """The job that this process takes part in.

    A context manager: on exit it destroys the process group that `join` created, and no other.

    Attributes:
        launcher: Where rank and size come from: "torchrun", "srun", "Open MPI", ..., "the call" if
            they were arguments, "nobody" in a world of one.
        rank: The rank of this process.
        size: The number of ranks.
        local_rank: The index of the rank on its host; None if unknown.
        local_size: The number of ranks on the host; None if unknown.
        address: The host of rank 0; None if the ranks did not meet over a network.
        port: The port there.
        source: The variables or arguments that rank and size come from.
        host: The name of this host.
        backend: The backend of WORLD.
        device: The device for this rank's tensors.
    """

    host: str = attrs.field(factory=socket.gethostname)
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
            argument contradicts the live job, the address of rank 0 is unknown, the device does
            not fit, or the other ranks did not arrive in time.
        GroupOptionsError: The backend is unknown or cannot run here, or `timeout` is not a
            positive timedelta.
        LayoutError: A number is not an int.

    Example:
        >>> with join(environment={}) as job:
        ...     print(job.rank, job.size, job.launcher, job.backend, job.device)
        0 1 nobody gloo cpu
        >>> torch.distributed.is_initialized()
        False
    """
    check_timeout(timeout)
    variables = os.environ if environment is None else environment
    if (rank is None) != (size is None):
        raise LaunchError(
            f"rank={rank} and size={size}: give both, or neither to use the launcher's"
        )
    if rank is not None and not 0 <= as_int(rank, "rank") < as_int(size, "size"):
        raise LaunchError(f"rank={rank} and size={size}: the ranks are 0 to size - 1")
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
        job = FoundJob("nobody", 0, 1, source="no launcher")
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
    _initialise(job, backend, chosen, timeout)
    made = [dist.group.WORLD]
    return Joined(**attrs.asdict(job), backend=backend, device=chosen, made=made)


def _launched(variables: Mapping[str, str], rank: int, size: int) -> FoundJob:
    """Return the launcher's job if it has this rank and size, else a job of these alone."""
    with contextlib.suppress(LaunchError):
        found = find_job(variables)
        if found is not None and (found.rank, found.size) == (rank, size):
            return found
    return FoundJob("torch.distributed", rank, size)


def _live(
    rank: int | None, size: int | None, backend: str | None, variables: Mapping[str, str]
) -> Joined:
    """Describe the live job.

    Raises:
        LaunchError: An argument contradicts it.
    """
    live, here = torchdist.default_backend(), (dist.get_rank(), dist.get_world_size())
    is_same = rank is None or (rank, size) == here
    if backend is not None:
        check_known(backend)
        is_same &= torchdist.parts_of(backend).items() <= torchdist.parts_of_world().items()
    if not is_same:
        raise LaunchError(
            f"torch.distributed is already initialised with rank={here[0]}, size={here[1]} and "
            f"backend={live!r}, but rank={rank}, size={size} and backend={backend!r} were given; "
            f"leave them out, or call destroy_process_group() first"
        )
    address, port = torchdist.store_address() or (None, None)
    job = attrs.evolve(_launched(variables, *here), address=address, port=port)
    kind = torchdist.devices_made_for(live)
    device = torch.device("cpu")
    if kind != "cpu" and _count(kind):  # a fake world may be for absent devices
        device = torch.device(kind, torch.get_device_module(kind).current_device())
    return Joined(**attrs.asdict(job), backend=live, device=device)


def _initialise(
    job: FoundJob, backend: str, device: torch.device, timeout: timedelta | None
) -> None:
    """Create WORLD on the device, or leave torch.distributed as it was."""
    options: dict[str, Any] = {"rank": job.rank, "world_size": job.size, "timeout": timeout}
    if device.type != "cpu":
        torch.get_device_module(device.type).set_device(device)
        if torchdist.parts_of(backend)[device.type] in torchdist.NCCL:
            options["device_id"] = device
    if job.address is None:
        stores: Any = dist  # has them, but not for type checkers
        options["store"] = stores.HashStore()
    else:  # torch knows whether torchrun's agent or rank 0 serves the store
        host = f"[{job.address}]" if ":" in job.address else job.address
        options["init_method"] = f"tcp://{host}:{job.port}"
    try:
        dist.init_process_group(backend, **options)
    except BaseException as error:
        torchdist.destroy_world()
        if not isinstance(error, Exception) or isinstance(error, HyperCommError):
            raise
        where = "" if job.address is None else f" at {job.address}, port {job.port}"
        is_taken = "EADDRINUSE" in str(error)
        advice = "; another program uses this port: set MASTER_PORT, or give port=" * is_taken
        raise LaunchError(
            f"rank {job.rank} of {job.size} on {socket.gethostname()} could not join{where} "
            f"({job.source}): {' '.join(str(error).split())}{advice}"
        ) from error


# ---- the device and the backend of a rank -------------------------------------------------------


def _choose(
    backend: str | None, device: torch.device | str | int | None, job: FoundJob
) -> tuple[str, torch.device]:
    """Return the backend of WORLD and the device of this rank: those given, else the host's.

    Raises:
        GroupOptionsError: The backend is unknown, or cannot run here.
        LaunchError: The backend is not for the device, there are fewer devices than ranks, or it
            is unknown which one belongs to this rank.
    """
    check_backend(backend)
    if device is None:
        device = _accelerator() if backend is None else torchdist.devices_made_for(backend)
    chosen = torch.device(device)
    if chosen.index is None and chosen.type != "cpu":
        chosen = torch.device(chosen.type, _index_of_rank(chosen.type, job))
    if backend is None:
        own = dist.Backend.default_device_backend_map.get(chosen.type, "gloo")
        backend = "gloo" if own == "gloo" else f"cpu:gloo,{chosen.type}:{own}"
    parts = torchdist.parts_of(backend)
    if chosen.type not in parts:
        raise LaunchError(
            f"device {str(chosen)!r} does not fit backend {backend!r}, which is for tensors on "
            f"{' and '.join(sorted(parts))}; leave one of them out, or give a backend such as "
            f"'cpu:gloo,cuda:nccl'"
        )
    return backend, chosen


def _index_of_rank(kind: str, job: FoundJob) -> int:
    count = _count(kind)
    if count == 1:  # a launcher may show each rank only its own
        return 0
    ranks = max(job.local_size or 0, (job.local_rank or 0) + 1)
    if ranks > count or job.local_rank is None:
        raise LaunchError(
            f"rank {job.rank} has local rank {job.local_rank}, {ranks} ranks on this host need a "
            f"device each, and it has {count} of type {kind!r}; set LOCAL_RANK, give join() "
            f"local_rank= or device=, or use fewer ranks or backend 'gloo'"
        )
    return job.local_rank


def _accelerator() -> str:
    """Return the type of this host's accelerator if torch has a backend for it; else "cpu"."""
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
    """A job that continues with some ranks of another one, which have new numbers.

    Attributes:
        numbers: The new number of each rank, by its number in the old WORLD.
    """

    numbers: dict[int, int] = attrs.field(factory=dict)


def renew_world(
    ranks: Iterable[int], *, store: Any = None, timeout: timedelta | None = None
) -> Renewed:
    """Create a new WORLD of some ranks of this one, such as those that are left after a failure.

    For code that uses WORLD by default. Exactly the given ranks call this. They meet in the job's
    store first, so nothing has changed if one of them does not arrive. Then each destroys the old
    WORLD with all of its process groups, and initialises the new one with the same backend and
    timeout. The ranks are numbered in the order of `ranks`. Grids continue with
    `grid.reshape(target, ranks=...)`, which takes the new numbers.

    With `store` the ranks do not meet first: the old WORLD is destroyed even if a rank is missing.

    Args:
        ranks: Ranks of the old WORLD, in the order of the new one; the same on all of them.
        store: A new store of torch, such as a FileStore, in which to create the new WORLD. Use it
            if the process that serves the job's store (rank 0, or torchrun's agent) is lost.
            Default: the job's store.
        timeout: How long to wait for the other ranks in the job's store; default: the timeout of
            WORLD.

    Returns:
        The new job, and each rank's number in it; a context manager like that of `join`.

    Raises:
        RankOutsideError: The calling rank is not one of the ranks.
        LayoutError: `ranks` are not ranks of WORLD.
        LaunchError: The world is a fake one, or the new WORLD could not be created: the old one is
            then gone, so restart the job.
        GroupCreationTimeout: A rank did not arrive; names it (`error.missing`).
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
    given = as_ranks(ranks, "ranks", old.size)
    if not torchdist.has_ranks() or torchdist.is_other_world():
        raise LaunchError("this is a fake or simulated world: its other ranks do not exist")
    if store is None and not old.has_store:
        raise LaunchError("this torch does not expose the job's store; pass a store as store=")
    if old.rank not in given:
        raise RankOutsideError(
            f"rank {old.rank} is not among ranks, {format_ranks(sorted(given))}; only those of the "
            f"new WORLD call renew_world(): end this process"
        )
    if store is None:  # one record for all lists of ranks, so that other lists are an error
        key = _meet(old, given, timeout)
        store = torchdist.default_store()
    else:
        digest = hashlib.sha256(json.dumps(given).encode()).hexdigest()[:16]
        key = f"hypercomm/new world {digest}"
    return _renew(old, given, dist.PrefixStore(key, store))


def _meet(old: World, ranks: tuple[int, ...], timeout: timedelta | None) -> str:
    """Wait in the old WORLD until all ranks have joined; return a key that is new for each call."""
    names: list[str] = []
    entries = [f"{_RENEW} with ranks {list(ranks)}"]
    title = f"{_RENEW} of ranks {format_ranks(sorted(ranks))}"
    scope, limit_s = Scope(old, "new world", ranks, is_fenced=True), limit_of(timeout, old)
    agree(scope, title, lambda: entries, limit_s, lambda turn: names.append(turn.name)).get()
    return names[0]


def _renew(old: World, ranks: tuple[int, ...], store: Any) -> Renewed:
    """Destroy the old WORLD, and create the new one."""
    options: dict[str, Any] = {"timeout": old.timeout_of(old.backend)}
    if (device := torchdist.bound_device()) is not None:
        options["device_id"] = device
    rank, size = ranks.index(old.rank), len(ranks)
    torchdist.end_world()
    try:
        dist.init_process_group(old.backend, store=store, rank=rank, world_size=size, **options)
    except Exception as error:
        torchdist.destroy_world()
        raise LaunchError(
            f"rank {old.rank} could not join the new WORLD of ranks {format_ranks(sorted(ranks))} "
            f"({' '.join(str(error).split())}); the old one is gone: restart the job"
        ) from error
    world = attrs.evolve(current(), before=old, numbers=ranks)
    note(world, torchdist.world_group())
    facts = attrs.asdict(join(environment={}), filter=lambda field, _: field.name != "_made")
    facts |= {"launcher": _RENEW, "made": [dist.group.WORLD]}
    return Renewed(**facts, numbers={number: at for at, number in enumerate(ranks)})
