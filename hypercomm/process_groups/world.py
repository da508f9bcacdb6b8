"""The world size and the rank of this process.

An explicit argument takes precedence, then the live torch.distributed job, then the environment of
the launcher, read as `hypercomm.join` reads it.
"""

from __future__ import annotations

import os

import torch.distributed as dist

from hypercomm.errors import LaunchError, NotInitializedError, WorldSizeError
from hypercomm.launchers import find_number


def world_size(explicit: int | None = None) -> int:
    """Return the number of ranks of the job.

    Raises:
        NotInitializedError: Neither torch.distributed nor the environment has it.
        WorldSizeError: The variables of a launcher hold no number, or contradict each other.
    """
    if explicit is not None:
        return explicit
    return dist.get_world_size() if dist.is_initialized() else _from_environment("WORLD_SIZE")


def rank(explicit: int | None = None) -> int:
    """Return the rank of this process; raises as `world_size` does."""
    if explicit is not None:
        return explicit
    return dist.get_rank() if dist.is_initialized() else _from_environment("RANK")


def _from_environment(variable: str) -> int:
    try:
        found = find_number(variable, os.environ)
    except LaunchError as error:
        raise WorldSizeError(str(error)) from error
    if found is not None:
        return found[0]
    argument = ", or pass world_size=" if variable == "WORLD_SIZE" else ""
    raise NotInitializedError(
        f"the {variable.lower().replace('_', ' ')} is unknown: torch.distributed is not "
        f"initialised and the environment has no {variable}; call hypercomm.join() or "
        f"torch.distributed.init_process_group() first, start the program with torchrun{argument}"
    )
