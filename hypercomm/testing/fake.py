"""A world of any size in this process, on torch's fake backend."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from hypercomm.errors import CreationError, LayoutError, WorldSizeError
from hypercomm.layout.checks import as_int, as_world_size
from hypercomm.process_groups.options import check_timeout


@contextlib.contextmanager
def fake_world(
    world_size: int, rank: int = 0, *, timeout: timedelta | None = None
) -> Iterator[None]:
    """Make torch.distributed believe that this process is one rank of a large job.

    A grid's groups in it are all fake, whatever backend they ask for, and options of that go with
    it.
    Collectives on the fake backend return at once and move nothing: a fake world proves which
    groups a rank is a member of, never that ranks can communicate. On leaving, the fake job and
    every group in it are gone.

    Args:
        world_size: The number of ranks of the job, at most 2**24.
        rank: The rank that this process is.
        timeout: The job's timeout; default: torch's.

    Raises:
        LayoutError: `world_size` or `rank` is no int, or out of range.
        GroupOptionsError: `timeout` is no length of time.
        WorldSizeError: torch.distributed is initialised already.
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
            f"torch.distributed is initialised already, with {dist.get_world_size()} ranks; "
            f"leave or destroy that world before entering a fake one"
        )
    dist.init_process_group(
        "fake", store=_fake_store(), world_size=world_size, rank=rank, timeout=timeout
    )
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _fake_store() -> Any:
    """Return the store of a fake world; importing its module registers torch's fake backend."""
    try:
        fake = importlib.import_module("torch.testing._internal.distributed.fake_pg")
        return fake.FakeStore()
    except (AttributeError, ImportError) as error:
        raise CreationError(
            f"torch {torch.version.__version__} has no fake backend ({error}); use "
            f"hypercomm.testing.run_ranks, whose ranks are real, or another release of torch"
        ) from error
