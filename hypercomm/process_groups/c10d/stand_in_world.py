"""What torch.distributed sees of another job, which is simulated."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hypercomm.errors import CreationError

_MESHES = "torch.distributed.device_mesh"

_is_entered = False


def is_other_world() -> bool:
    """Tell whether `other_world` is entered."""
    return _is_entered


@contextlib.contextmanager
def other_world(
    tables: Sequence[str],
    create: Callable[..., tuple[Any, None]],
    begin: Callable[..., None],
    end: Callable[..., None],
    timeout: Callable[[str], timedelta],
) -> Iterator[Any]:
    """Let torch.distributed see another job within a `with` block: no store, no process group.

    torch keeps all that it knows of a job in one object, and lets tests of its own replace that.

    Args:
        tables: Names of the dicts that the object holds.
        create: Makes the groups of a rank, with the arguments of torch's own helper.
        begin: Takes the place of `init_process_group`.
        end: Takes the place of `destroy_process_group`.
        timeout: What torch gives a group of a backend when nobody says anything.

    Raises:
        CreationError: This torch keeps what it knows elsewhere.
    """
    c10d: Any = dist.distributed_c10d
    lacks = [name for name in ("_world", "_new_process_group_helper") if not hasattr(c10d, name)]
    if lacks:
        raise CreationError(f"this torch cannot be simulated: it has no {' and no '.join(lacks)}")
    world = type("OtherWorld", (type(c10d._world),), dict.fromkeys((*tables, "group_count")))()
    world.group_count = 0
    for table in tables:
        setattr(world, table, {})
    stands_in = {
        "_world": world,
        "_new_process_group_helper": create,
        "_store_based_barrier": _do_nothing,
        "_get_default_timeout": timeout,  # without the warning of a build that lacks the backend
        "init_process_group": begin,
        "destroy_process_group": end,
        "barrier": _do_nothing,
        "monitored_barrier": _do_nothing,
        "_resolve_process_group": lambda name: next(
            group for group, known in world.pg_names.items() if known == name
        ),
        "_get_msg_dict": lambda *_, **__: {},  # of a logger, which would ask NCCL for its version
    }
    global _is_entered  # noqa: PLW0603 - as torch's own state, it is the process's
    with contextlib.ExitStack() as stack:
        for module in (c10d, dist, dist.c10d_logger, importlib.import_module(_MESHES)):
            for name, value in stands_in.items():
                if hasattr(module, name):
                    stack.callback(setattr, module, name, getattr(module, name))
                    setattr(module, name, value)
        _is_entered = True
        try:
            yield world
        finally:
            _is_entered = False


def _do_nothing(*_: object, **__: object) -> None:
    pass
