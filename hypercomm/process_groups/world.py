"""Worlds. A world is a set of ranks that share a store, and grids are built from its ranks.

torch's default process group is the default world. `hypercomm.join_world` makes other worlds, from
the processes of several jobs. Before torch.distributed is initialised, the size and the rank of the
default world come from an argument, or from the environment variables of the launcher.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Generator, Mapping
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import attrs
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypercomm.errors import LaunchError, NotInitializedError, WorldSizeError
from hypercomm.job_environment import find_number
from hypercomm.process_groups import torch_internals as torchdist


@attrs.frozen(eq=False, slots=False)
class World:
    """A set of ranks from which grids are built, as the calling rank sees it.

    Attributes:
        rank: The calling rank.
        size: The number of ranks.
        backend: The default backend of process groups.
        has_store: Whether the ranks share a store. A fake world has none.
        name: The name of a joined world, or "" for the default world.
        parts: Maps the name of each part of a joined world to its number of ranks. The ranks are
            numbered part by part. The default world has no parts.
        timeout: The default limit for calls to wait for other ranks, or None for torch's default.
        before: The world from which `renew_world` made this one, or None.
        numbers: For each rank of this world, its rank in the world `before`.
        choices: The results that `strategies.plan` has cached for this world.
        served: The words that errors use for the store and for the process that serves it.
        if_lost: The advice in errors about a lost store.
        owners: The tables of process groups in a joined world.
    """

    rank: int
    size: int
    backend: str
    has_store: bool
    name: str = ""
    parts: Mapping[str, int] = attrs.field(factory=dict)
    timeout: timedelta | None = None
    before: World | None = None
    numbers: tuple[int, ...] = ()
    choices: dict[tuple[object, ...], Any] = attrs.field(factory=dict)
    served: str = "the job's store, which rank 0 usually serves,"
    if_lost: str = "restart the job"
    owners: WeakSet[Any] = attrs.field(factory=WeakSet)
    _options: dict[str, Any] = attrs.field(factory=dict)

    def __repr__(self) -> str:
        name = f" {self.name!r}" if self.name else ""
        return (
            f"<World{name} of {self.size} ranks: {self.title(self.rank)}, backend {self.backend}>"
        )

    @property
    def is_default(self) -> bool:
        """Whether this is the world of torch's default process group."""
        return True

    @property
    def store(self) -> Any:
        """The store that the ranks share, from torch."""
        return torchdist.default_store()

    @property
    def serves(self) -> bool:
        """Whether this process may serve the store. If so, the process lingers after a failure."""
        return self.rank == 0

    @property
    def pg(self) -> ProcessGroup | None:
        """The process group of all ranks, or None for torch's default process group."""
        return None

    def title(self, rank: int) -> str:
        """Return the name that errors use for a rank.

        >>> World(0, 12, "gloo", True, parts={"trainer": 8, "engine": 4}).title(9)
        'engine rank 1 of 4'
        """
        first = 0
        for part, size in self.parts.items():
            if rank < first + size:
                return f"{part} rank {rank - first} of {size}"
            first += size
        return f"rank {rank}"

    def why_ended(self) -> Generator[Any, Any, str]:
        """Return the reason why calls in this world cannot succeed any more, or "".

        This method is a generator, like the steps of the agreement. It yields operations on the
        store, and is sent the replies.
        """
        return ""
        yield

    def timeout_of(self, backend: str) -> timedelta | None:
        """Return the timeout of the world.

        If the backends of WORLD have different timeouts, the timeout of `backend` is preferred. The
        result is None if torch shows no timeout, because a fake backend has no options.
        """
        if self.timeout is not None:
            return self.timeout
        if backend not in self._options:
            self._options[backend] = torchdist.world_options(backend)
        timeout: timedelta | None = getattr(self._options[backend], "_timeout", None)
        return timeout

    def numbers_in(self, other: World | None) -> tuple[int, ...] | None:
        """Return, for each rank of this world, its rank in `other`.

        The result is None if this world was not renewed from `other`.
        """
        numbers = tuple(range(self.size))
        world = self
        while world is not other:
            if world.before is None:
                return None
            numbers = tuple(world.numbers[number] for number in numbers)
            world = world.before
        return numbers


_lock = threading.Lock()
_worlds: WeakKeyDictionary[ProcessGroup, World] = WeakKeyDictionary()


def note(world: World, group: ProcessGroup) -> None:
    """Register `world` as the world of the default process group `group`."""
    _worlds[group] = world


def current_or_none() -> World | None:
    """Return the default world, or None before torch.distributed is initialised."""
    default = dist.group.WORLD
    return None if default is None else _worlds.get(default) or current()


def current() -> World:
    """Return the default world.

    Raises:
        NotInitializedError: torch.distributed is not initialised.
    """
    default = torchdist.world_group()
    world = _worlds.get(default)
    if world is None:
        backend = torchdist.default_backend()
        world = World(dist.get_rank(), dist.get_world_size(), backend, torchdist.has_ranks())
        with _lock:  # another thread may have been faster
            return _worlds.setdefault(default, world)
    return world


# ---- before there is a world --------------------------------------------------------------------


def size_of_world(explicit: int | None = None, world: World | None = None) -> int:
    """Return the number of ranks of a world.

    Args:
        explicit: The number, if the user has given it.
        world: The world; default: the default world.

    Raises:
        NotInitializedError: Neither torch.distributed nor the environment provides the number.
        WorldSizeError: The variables of a launcher are not numbers, or contradict each other.
    """
    if explicit is not None:
        return explicit
    if world is not None:
        return world.size
    return dist.get_world_size() if dist.is_initialized() else _from_environment("WORLD_SIZE")


def rank_in_world(explicit: int | None = None, world: World | None = None) -> int:
    """Return the rank of this process in a world.

    Args:
        explicit: The rank, if the user has given it.
        world: The world; default: the default world.

    Raises:
        NotInitializedError, WorldSizeError: See `size_of_world`.
    """
    if explicit is not None:
        return explicit
    if world is not None:
        return world.rank
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
        f"torch.distributed.init_process_group() first, or start the program with "
        f"torchrun{argument}"
    )
