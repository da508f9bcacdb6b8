"""A fake world on torch's fake backend, and the groups that torch has registered."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator, Mapping
from datetime import timedelta
from typing import Any

import attrs
import torch.distributed as dist

from hypercomm.errors import LayoutError
from hypercomm.layout.checks import as_int, as_world_size
from hypercomm.layout.text import short_repr
from hypercomm.process_groups import torch_internals as torchdist
from hypercomm.process_groups.spec import check_timeout
from hypercomm.process_groups.world import World, current, note


@contextlib.contextmanager
def fake_world(
    world_size: int,
    rank: int = 0,
    *,
    parts: Mapping[str, int] | None = None,
    timeout: timedelta | None = None,
) -> Iterator[World]:
    """Make torch.distributed act as one rank of a large job within a `with` block.

    All groups of a grid are fake in the block, whatever their backend is. Collectives on the fake
    backend return immediately and do not move data, so a fake world can show the groups of a rank,
    but not whether ranks can communicate. The fake job and its groups end with the block.

    Args:
        world_size: The number of ranks of the job, at most 2**24.
        rank: The rank of this process.
        parts: The number of ranks of each part, by name, if the job consists of joined jobs, as in
            `join_world`.
        timeout: The timeout of the job. Default: torch's.

    Yields:
        The world.

    Raises:
        LayoutError: `world_size` or `rank` is not an int, or is out of range, or the sizes of the
            parts do not add up to `world_size`.
        GroupOptionsError: `timeout` is not a positive timedelta.
        ValueError: torch.distributed is already initialised.
        ImportError: The installed torch has no fake backend.

    Example:
        >>> import torch.distributed as dist
        >>> from hypercomm.testing import fake_world
        >>> with fake_world(4096, rank=7):
        ...     dist.get_rank(), dist.get_world_size()
        (7, 4096)
        >>> dist.is_initialized()
        False
        >>> from hypercomm import GridSet
        >>> with fake_world(12, rank=9, parts={"trainer": 8, "engine": 4}) as world:
        ...     with GridSet({"trainer": "tp=4,dp=2", "engine": "tp=4"}, world=world) as grids:
        ...         print(world.title(9), grids["engine"].coords())
        engine rank 1 of 4 {'tp': 1}
    """
    as_world_size(world_size)
    check_timeout(timeout)
    as_int(rank, "rank", 0, world_size - 1)
    if parts is not None and sum(parts.values()) != world_size:
        raise LayoutError(
            f"parts={short_repr(parts)} contains {sum(parts.values())} ranks, but world_size is "
            f"{world_size}"
        )
    if dist.is_initialized():  # a simulated job would ignore the fake job
        raise ValueError("torch.distributed is already initialised; call fake_world() before that")
    fake: Any = importlib.import_module("torch.testing._internal.distributed.fake_pg")
    store = fake.FakeStore()  # importing the module has registered the backend
    dist.init_process_group("fake", store=store, world_size=world_size, rank=rank, timeout=timeout)
    world = attrs.evolve(current(), parts=dict(parts or {}))
    note(world, torchdist.world_group())
    try:
        yield world
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def registered_groups() -> set[dist.ProcessGroup]:
    """Return the process groups that torch has registered in this process, including WORLD.

    Tests can check with this function that no group is left over.

    Example:
        >>> from hypercomm import HyperCommGrid
        >>> from hypercomm.testing import fake_world
        >>> with fake_world(4):
        ...     before = registered_groups()
        ...     with HyperCommGrid([2, 2], ["tp", "dp"]) as grid:
        ...         group = grid.create_pg("tp")
        ...         registered_groups() - before == {group}
        ...     registered_groups() == before
        True
        True
    """
    return torchdist.registered()
