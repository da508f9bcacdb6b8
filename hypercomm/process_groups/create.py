"""Creating and destroying the calling rank's process group of a spec."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypercomm.errors import CreationError, HyperCommError, NotInitializedError
from hypercomm.process_groups import torch_internals as c10d
from hypercomm.process_groups.agreement.calls import Call
from hypercomm.process_groups.spec import GroupSpec
from hypercomm.process_groups.strategies import STRATEGIES, Attempt
from hypercomm.process_groups.torch_internals.gloo import ConnectionFailedError
from hypercomm.process_groups.torch_internals.store import forget
from hypercomm.process_groups.world import World


def create(
    spec: GroupSpec, name: str, call: Call[Any] | None, stays: ProcessGroup | None = None
) -> ProcessGroup | None:
    """Create the group of the calling rank, and leave torch as it was if that fails.

    Args:
        spec: What is created.
        name: The name of the groups, the same on all ranks.
        call: The call that creates it; None where the rank has nobody to wait for.
        stays: The group that is to have these members; None: a new one is created.

    Returns:
        The group; None where the calling rank is not a member.

    Raises:
        ConnectionFailedError: The members of a gloo group could not connect.
    """
    attempt = Attempt(name, spec, None if call is None else call.wait, stays)
    before = c10d.registered()
    try:
        return STRATEGIES[spec.choice.strategy].create(attempt)
    except BaseException as error:
        with contextlib.suppress(Exception):  # the error at hand matters more
            destroy(_left_by(attempt, before))
        c10d.forget_non_members()
        if (spec.world is None or spec.world.is_default) and not dist.is_initialized():
            raise NotInitializedError(
                f"torch.distributed is not initialised, so the groups over {spec.key} cannot be "
                f"created; call hypercomm.join(), or torch.distributed.init_process_group()"
            ) from error
        known = (HyperCommError, dist.DistNetworkError, ConnectionFailedError)
        if isinstance(error, RuntimeError) and not isinstance(error, known):
            reason = (str(error).splitlines() or [""])[0]
            raise CreationError(
                f"the process group over {spec.key} was not created: {reason}"
            ) from error
        raise


def _left_by(attempt: Attempt, before: set[ProcessGroup]) -> set[ProcessGroup]:
    """Return what a failed creation has registered; other threads may have registered theirs."""
    strategy = attempt.spec.choice.strategy
    if strategy in {"local", "split"}:
        is_live = attempt.spec.world is not None  # else torch's own functions are replaced
        named = c10d.registered_as(attempt.own.name) if attempt.own and is_live else set()
        return named - before
    new = c10d.registered() - before - c10d.kept()  # torch has named it
    if not dist.is_initialized() or attempt.own is None:
        return new
    return {one for one in new if tuple(dist.get_process_group_ranks(one)) == attempt.own.ranks}


Ending = Callable[[Iterable[ProcessGroup]], None]
destroy: Ending = c10d.destroy
abort: Ending = c10d.abort


def discard(groups: Iterable[ProcessGroup | None], world: World) -> None:
    """Destroy what a call has made that fails on other ranks, the last one first."""
    try:
        destroy(reversed([group for group in groups if group is not None]))
    finally:
        with contextlib.suppress(RuntimeError):  # the store is gone
            forget(world.store, world.take_stale())


def check_strategy(spec: GroupSpec, ranks: int, world_size: int) -> None:
    """Raise if ranks outside of the grid would have to take part in a creation.

    Raises:
        CreationError: With a strategy that works.
    """
    if spec.choice.strategy != "local" and ranks < world_size:
        raise CreationError(
            f"the process groups over {spec.key} would be created with "
            f"creation={spec.choice.strategy!r}, which every rank of the world must call, and "
            f"{world_size - ranks} of its {world_size} ranks are not among ranks; "
            f"creation='local' creates groups without them"
        )
