"""Where this process is: world size and rank.

An explicit argument wins, then the live torch.distributed job, then the environment that the
launcher left.
"""

from __future__ import annotations

import os

import torch.distributed as dist

from hypercomm.errors import NotInitializedError, WorldSizeError


def world_size(explicit: int | None = None) -> int:
    """Return the number of ranks of the job.

    Raises:
        NotInitializedError: Nothing tells.
        WorldSizeError: WORLD_SIZE does not hold a positive integer.
    """
    if explicit is not None:
        return explicit
    if dist.is_initialized():
        return dist.get_world_size()
    return _from_environment("WORLD_SIZE", 1)


def rank(explicit: int | None = None) -> int:
    """Return the rank of this process; raises as `world_size` does, for RANK."""
    if explicit is not None:
        return explicit
    if dist.is_initialized():
        return dist.get_rank()
    return _from_environment("RANK", 0)


def _from_environment(variable: str, smallest: int) -> int:
    text = os.environ.get(variable)
    if text is None:
        argument = variable.lower()
        raise NotInitializedError(
            f"cannot tell the {argument.replace('_', ' ')}: torch.distributed is not initialised "
            f"and the environment has no {variable}; call torch.distributed.init_process_group() "
            f"first, start the program with torchrun, or pass {argument}="
        )
    if not text.strip().isdecimal() or int(text) < smallest:
        raise WorldSizeError(
            f"the environment's {variable} must be an integer of at least {smallest}, got {text!r}"
        )
    return int(text)
