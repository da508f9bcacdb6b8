"""Ending process groups."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

from torch.distributed import ProcessGroup

from hypercomm.process_groups import torch_internals as c10d
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
