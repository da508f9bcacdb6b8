"""`renew_world`: a new WORLD of the ranks that are left of a job, or of some of them."""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import attrs
import torch.distributed as dist

from hypercomm.errors import JoinError, RankOutsideError
from hypercomm.joining.devices import device_of_world
from hypercomm.joining.joined import Joined
from hypercomm.layout.checks import as_ranks
from hypercomm.layout.text import format_ranks, shown
from hypercomm.process_groups import torch_internals as c10d
from hypercomm.process_groups.agreement.calls import Scope, limit_of, together
from hypercomm.process_groups.job import Job, current
from hypercomm.process_groups.options import check_timeout
from hypercomm.process_groups.torch_internals.split import bound_device
from hypercomm.process_groups.torch_internals.store import store as store_of_world

CALL = "renew_world()"


@attrs.frozen(kw_only=True)
class Renewed(Joined):
    """A job that goes on with some ranks of another one, which have new numbers.

    Attributes:
        numbers: The number that each rank of the old WORLD has in the new one.
    """

    numbers: dict[int, int] = attrs.field(factory=dict)


def renew_world(
    ranks: Iterable[int], *, store: Any = None, timeout: timedelta | None = None
) -> Renewed:
    """Make a new WORLD of some ranks of this one, as of those that are left after a death.

    For what takes WORLD by default, and for a torch that cannot reconfigure one. All of `ranks`
    call this, and nobody else; they meet in the job's store first, so that nothing has changed
    where one does not come. Then the old WORLD is ended, with every process group of this process,
    and the new one initialised with its backend and timeout. Ranks are numbered as they stand in
    `ranks`. Grids go on by `grid.reshape(target, ranks=...)`, in the new numbers; what it lists as
    lost is told in the old ones.

    With `store` nobody waits: the old WORLD ends first, also where a rank does not come then.

    Args:
        ranks: Numbers of the old WORLD, in the order of the new one; the same on all of them.
        store: A store of torch's, such as a FileStore, that the new WORLD is made in, a new one
            each time; default: the job's, which is there as long as the process that serves it:
            rank 0, or torchrun's agent. It is for where that one is lost.
        timeout: How long to wait for the others in the job's store; default: the timeout of WORLD,
            which holds with `store`.

    Returns:
        The new job, and each rank's number in it; a context manager like that of `join`.

    Raises:
        RankOutsideError: The calling rank is not among the ranks.
        LayoutError: The ranks cannot be read.
        JoinError: There is nowhere to meet, or the new WORLD could not be made: the old one is
            then gone, so start the job again.
        GroupCreationTimeout: A rank did not come; names it (`error.missing`).
        OutcomeUnknownError: The job's store is gone.
        NotInitializedError: torch.distributed is not initialised.
        GroupOptionsError: `timeout` is no positive timedelta.

    Example:
        >>> import hypercomm
        >>> _ = hypercomm.join(rank=0, size=1)
        >>> with renew_world([0]) as job:  # with others, those of survivors()
        ...     print(job.rank, job.size, job.numbers)
        0 1 {0: 0}
    """
    check_timeout(timeout)
    old = current()
    given = as_ranks(ranks, "ranks", old.size)
    if store is not None and not isinstance(store, dist.Store):  # type: ignore[attr-defined]
        raise JoinError(f"store must be a store of torch.distributed, got {shown(store)}")
    if not c10d.has_ranks() or c10d.is_other_world():
        raise JoinError("the ranks of this world are not there: it is a fake or a simulated one")
    if store is None and not old.has_store:
        raise JoinError("this torch does not tell the job's store; give store= to meet in")
    if old.rank not in given:
        raise RankOutsideError(
            f"rank {old.rank} is not among ranks, {format_ranks(sorted(given))}; only those of the "
            f"new WORLD call renew_world(): end this process"
        )
    if store is None:
        place = _meet(old, given, f"{old.namespace}/new world", timeout)
        store = store_of_world()
    else:
        digest = hashlib.sha256(json.dumps(given).encode()).hexdigest()[:16]
        place = f"hypercomm/new world {digest}"
    return _renew(old, given, dist.PrefixStore(place, store))  # type: ignore[attr-defined]


def _meet(job: Job, ranks: tuple[int, ...], place: str, timeout: timedelta | None) -> str:
    """Wait until all ranks have joined, while the old WORLD is there; return a new prefix."""
    names: list[str] = []
    scope = Scope(job, place, ranks)
    title = f"{CALL} of ranks {format_ranks(sorted(ranks))}"
    entries = [f"{CALL} with ranks {list(ranks)}"]
    limit_s = limit_of(timeout)
    together(scope, title, lambda: entries, limit_s, lambda call: names.append(call.name)).get()
    return names[0]


def _renew(old: Job, ranks: tuple[int, ...], store: Any) -> Renewed:
    """End the old WORLD, and make the new one."""
    backend, timeout = old.backend, c10d.world_timeout(old.backend)
    options: dict[str, Any] = {"timeout": timeout}
    if (device := bound_device()) is not None:
        options["device_id"] = device
    rank, size = ranks.index(old.rank), len(ranks)
    c10d.end_world()
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, **options)
    except Exception as error:
        c10d.destroy_world()
        raise JoinError(
            f"rank {old.rank} could not join the new WORLD of ranks {format_ranks(sorted(ranks))} "
            f"({' '.join(str(error).split())}); the old one is gone: start the job again"
        ) from error
    current().comes_of(old, ranks)
    address, port = c10d.meeting_place() or (None, None)
    world = dist.group.WORLD
    return Renewed(
        launcher=CALL,
        rank=rank,
        size=size,
        local_rank=None,
        local_size=None,
        host=socket.gethostname(),
        address=address,
        port=port,
        backend=backend,
        device=device_of_world(world),
        made=[world],
        numbers={number: at for at, number in enumerate(ranks)},
    )
