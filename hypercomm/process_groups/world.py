"""Where this process is: world size and rank.

An explicit argument wins, then the live torch.distributed job, then the environment that the
launcher left, read as `hypercomm.join` reads it.
"""

from __future__ import annotations

import os

import torch.distributed as dist

from hypercomm.errors import LaunchError, NotInitializedError, WorldSizeError
from hypercomm.launchers import find_number


def world_size(explicit: int | None = None) -> int:
    """Return the number of ranks of the job.

    Raises:
        NotInitializedError: Nothing tells.
        WorldSizeError: What a launcher left holds no number, or contradicts itself.
    """
    if explicit is not None:
        return explicit
    if dist.is_initialized():
        return dist.get_world_size()
    return _from_environment("WORLD_SIZE")


def rank(explicit: int | None = None) -> int:
    """Return the rank of this process; raises as `world_size` does."""
    if explicit is not None:
        return explicit
    if dist.is_initialized():
        return dist.get_rank()
    return _from_environment("RANK")


def _from_environment(variable: str) -> int:
    try:
        found = find_number(variable, os.environ)
    except LaunchError as error:
        raise WorldSizeError(str(error)) from error
    if found is not None:
        return found[0]
    what = variable.lower().replace("_", " ")
    argument = ", or pass world_size=" if variable == "WORLD_SIZE" else ""
    raise NotInitializedError(
        f"cannot tell the {what}: torch.distributed is not initialised and "
        f"the environment has no {variable}; call hypercomm.join() or "
        f"torch.distributed.init_process_group() first, start the program with torchrun{argument}"
    )
