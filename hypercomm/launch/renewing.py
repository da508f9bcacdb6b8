"""`renew_world`: a new WORLD of the ranks that are left of a job, or of some of them."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

import attrs
import torch.distributed as dist

from hypercomm.errors import LaunchError, RankOutsideError
from hypercomm.launch.joining import Joined, join
from hypercomm.layout.checks import as_ranks
from hypercomm.layout.text import format_ranks
from hypercomm.process_groups import torch_internals as c10d
from hypercomm.process_groups.agreement.calls import Scope, limit_of, together
from hypercomm.process_groups.job import Job, current
from hypercomm.process_groups.options import check_timeout
from hypercomm.process_groups.torch_internals.split import bound_device
from hypercomm.process_groups.torch_internals.store import store as store_of_world

CALL = "renew_world()"


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
    if not c10d.has_ranks() or c10d.is_other_world():
        raise LaunchError("this is a fake or simulated world: its other ranks do not exist")
    if store is None and not old.has_store:
        raise LaunchError("this torch does not expose the job's store; give store= to meet in")
    if old.rank not in given:
        raise RankOutsideError(
            f"rank {old.rank} is not among ranks, {format_ranks(sorted(given))}; only those of the "
            f"new WORLD call renew_world(): end this process"
        )
    if store is None:  # one record for all lists of ranks, so that other lists are an error
        key = _meet(old, given, timeout)
        store = store_of_world()
    else:
        digest = hashlib.sha256(json.dumps(given).encode()).hexdigest()[:16]
        key = f"hypercomm/new world {digest}"
    return _renew(old, given, dist.PrefixStore(key, store))  # type: ignore[attr-defined]


def _meet(job: Job, ranks: tuple[int, ...], timeout: timedelta | None) -> str:
    """Wait in the old WORLD until all ranks have joined; return a key that is new for each call."""
    names: list[str] = []
    entries = [f"{CALL} with ranks {list(ranks)}"]
    title = f"{CALL} of ranks {format_ranks(sorted(ranks))}"
    scope, limit_s = Scope(job, "new world", ranks, is_fenced=True), limit_of(timeout)
    together(scope, title, lambda: entries, limit_s, lambda call: names.append(call.name)).get()
    return names[0]


def _renew(old: Job, ranks: tuple[int, ...], store: Any) -> Renewed:
    """Destroy the old WORLD, and create the new one."""
    options: dict[str, Any] = {"timeout": old.timeout_of(old.backend)}
    if (device := bound_device()) is not None:
        options["device_id"] = device
    rank, size = ranks.index(old.rank), len(ranks)
    c10d.end_world()
    try:
        dist.init_process_group(old.backend, store=store, rank=rank, world_size=size, **options)
    except Exception as error:
        c10d.destroy_world()
        raise LaunchError(
            f"rank {old.rank} could not join the new WORLD of ranks {format_ranks(sorted(ranks))} "
            f"({' '.join(str(error).split())}); the old one is gone: restart the job"
        ) from error
    current().comes_of(old, ranks)
    facts = attrs.asdict(join(environment={}), filter=lambda field, _: field.name != "_made")
    facts |= {"launcher": CALL, "made": [dist.group.WORLD]}
    return Renewed(**facts, numbers={number: at for at, number in enumerate(ranks)})
