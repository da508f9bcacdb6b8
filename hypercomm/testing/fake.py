"""A world of any size in this process, on torch's fake backend, and the groups of this process."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from datetime import timedelta

import torch
import torch.distributed as dist

from hypercomm.errors import CreationError, LayoutError, WorldSizeError
from hypercomm.layout.checks import as_int, as_world_size
from hypercomm.process_groups import torch_internals as c10d
from hypercomm.process_groups.options import check_timeout


@contextlib.contextmanager
def fake_world(
    world_size: int, rank: int = 0, *, timeout: timedelta | None = None
) -> Iterator[None]:
    """Make torch.distributed act as one rank of a large job within a `with` block.

    All groups of a grid are fake in it, whatever backend they ask for. Collectives on the fake
    backend return immediately and move nothing: a fake world shows which groups a rank is a
    member of, not that the ranks can communicate. The fake job and its groups end with the block.

    Args:
        world_size: The number of ranks of the job, at most 2**24.
        rank: The rank of this process.
        timeout: The timeout of the job; default: torch's.

    Raises:
        LayoutError: `world_size` or `rank` is not an int, or is out of range.
        GroupOptionsError: `timeout` is not a duration.
        WorldSizeError: torch.distributed is already initialised.
        CreationError: The installed torch has no fake backend.

    Example:
        >>> import torch.distributed as dist
        >>> from hypercomm.testing import fake_world
        >>> with fake_world(4096, rank=7):
        ...     dist.get_rank(), dist.get_world_size()
        (7, 4096)
        >>> dist.is_initialized()
        False
    """
    as_world_size(world_size)
    check_timeout(timeout)
    if not 0 <= as_int(rank, "rank") < world_size:
        raise LayoutError(f"rank must be in range({world_size}), got {rank}")
    if dist.is_initialized():
        raise WorldSizeError(
            f"torch.distributed is already initialised, with {dist.get_world_size()} ranks; "
            f"leave or destroy that world before entering a fake one"
        )
    try:  # importing the module registers the backend
        fake = importlib.import_module("torch.testing._internal.distributed.fake_pg")
        store = fake.FakeStore()
    except (AttributeError, ImportError) as error:
        raise CreationError(
            f"torch {torch.version.__version__} has no fake backend ({error}); use "
            f"hypercomm.testing.run_ranks, whose ranks are real, or another release of torch"
        ) from error
    dist.init_process_group("fake", store=store, world_size=world_size, rank=rank, timeout=timeout)
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def registered_groups() -> set[dist.ProcessGroup]:
    """Return the process groups of this process, WORLD included: for tests that none is left.

    Returns:
        The groups that torch has registered.

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
    return c10d.registered()
