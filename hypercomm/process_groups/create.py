"""Ending process groups, and the check that a reshape needs no other ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

from torch.distributed import ProcessGroup

from hypercomm.errors import CreationError
from hypercomm.process_groups import torch_internals as c10d
from hypercomm.process_groups.spec import GroupSpec
from hypercomm.process_groups.torch_internals.store import forget
from hypercomm.process_groups.world import World

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
