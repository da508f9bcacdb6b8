"""Worlds and scopes. A world is a set of ranks that share a store; a scope, of ranks that meet.

torch's default process group is the default world. `hypercomm.join_world` makes other worlds, from
the processes of several jobs. Before torch.distributed is initialised, the size and the rank of the
default world come from an argument, or from the environment variables of the launcher.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import socket
import threading
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from math import inf
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import attrs
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypercomm.errors import LaunchError, LayoutError, NotInitializedError, WorldSizeError
from hypercomm.job_environment import find_number
from hypercomm.layout import RankLayout
from hypercomm.process_groups import torch_internals as torchdist
from hypercomm.process_groups.system import system
from hypercomm.version import __version__


@attrs.define(eq=False)
class Memory:
    """What the calling rank remembers of its meetings with other ranks of a world.

    Attributes:
        namespace: The prefix of all keys, or None before the first meeting.
        left: Maps the path of each scope to the last round that this rank has left.
        has_status: Whether the store holds a status of this rank.
        raised: The events of other scopes whose error this rank has raised.
        stale: Keys that no rank needs any more. A later meeting deletes them.
    """

    namespace: str | None = None
    left: dict[str, int] = attrs.field(factory=dict)
    has_status: bool = False
    raised: set[str] = attrs.field(factory=set)
    stale: list[str] = attrs.field(factory=list)
    _agreed: list[tuple[Sequence[int], list[str]]] = attrs.field(factory=list)
    _failed: dict[str, list[str]] = attrs.field(factory=dict)
    _is_due: bool = False
    _locks: dict[str, Any] = attrs.field(factory=dict)
    _counts: Counter[str] = attrs.field(factory=Counter)
    _lock: threading.Lock = attrs.field(factory=threading.Lock)

    def lock_of(self, path: str) -> Any:
        """Return the lock that a thread holds during a call in a scope."""
        with self._lock:
            return self._locks.setdefault(path, system.lock())

    def next_number(self, path: str) -> int:
        """Return how often this method was called before with the same path."""
        with self._lock:
            self._counts[path] += 1
            return self._counts[path] - 1

    def leave(self, path: str, number: int) -> None:
        """Note that this rank has left a round."""
        self.left[path] = max(self.left.get(path, -1), number)

    def note_failed(self, path: str, keys: Sequence[str]) -> None:
        """Note the keys of a failed round. A rank that is late to the round still needs them."""
        if keys:
            with self._lock:
                self._failed.setdefault(path, []).extend(keys)

    def note_agreed(
        self, path: str, ranks: Sequence[int], keys: Sequence[str], *, is_all: bool
    ) -> None:
        """Note the keys of an agreed round, and find keys that no rank needs any more.

        All ranks of the round have left the earlier rounds of its scope, and the agreed rounds of
        other scopes with the same ranks.

        Args:
            path: The path of the scope.
            ranks: The ranks of the scope.
            keys: The keys of the round that this rank must delete.
            is_all: Whether these are all ranks of the world.
        """
        with self._lock:
            failed = self._failed.pop(path, ())
            self.stale += failed
            self._is_due |= bool(failed)
            needed = []
            for others, old in self._agreed:
                if is_all or others == ranks:
                    self.stale += old
                else:
                    needed.append((others, old))
            if keys:
                needed.append((ranks, [*keys]))
            self._agreed = needed

    def take_stale(self, least: int) -> Iterable[str]:
        """Clear `stale` if it has this many keys, or keys of failed rounds. Return the keys."""
        if len(self.stale) < least and not self._is_due:
            return ()
        with self._lock:
            keys = self.stale[:]
            self.stale.clear()  # process groups hold the list, to add the keys of their addresses
            self._is_due = False
        return keys


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
        store_name: The words that errors use for the store and for the process that serves it.
        advice_if_store_lost: The advice in errors about a lost store.
        owners: The tables of process groups in a joined world.
        plans: The plans of `GroupTable` that hold for all groups of a grid's default options.
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
    store_name: str = "the job's store, which rank 0 usually serves,"
    advice_if_store_lost: str = "restart the job"
    owners: WeakSet[Any] = attrs.field(factory=WeakSet)
    plans: dict[object, Any] = attrs.field(factory=dict)
    _options: dict[str, Any] = attrs.field(factory=dict)
    _memory: Memory = attrs.field(factory=Memory)

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
    def memory(self) -> Memory:
        """What the calling rank remembers of its meetings."""
        return self._memory

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

    def why_ended(self, _store: Any) -> str:
        """Return why calls in this world cannot succeed any more, or "". May read the store."""
        return ""

    def limit_s(self, timeout: timedelta | None) -> float:
        """Return a timeout in seconds. None stands for the timeout of the world, if it has one."""
        timeout = timeout or self.timeout_of(self.backend)
        return timeout.total_seconds() if timeout else inf

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


# ---- scopes --------------------------------------------------------------------------------------

_WORLD_ADDRESS = "cpu//0/0"
"""The key in WORLD's store under which rank 0 of a gloo WORLD publishes its address."""

_MOST_LISTED = 64
"""A description of a grid lists at most this many ranks."""


def digest_of(facts: object) -> str:
    """Return a short digest of a value, which is equal for values with equal text."""
    return hashlib.sha256(repr(facts).encode(errors="replace")).hexdigest()[:12]


@functools.cache
def this_host() -> str:
    """Return the name of the machine that this process runs on."""
    return socket.gethostname()


@attrs.frozen
class Scope:
    """A set of ranks that make calls together, one call after the other.

    Attributes:
        world: The world of the ranks.
        path: The name of the scope in the store, without the prefix of the world.
        ranks: The ranks, in the same order on all of them.
        identity: The grid of the calls, for errors, or None.
        is_fenced: Whether a rank that was late to a round is excluded from the later ones.
        is_lobby: Whether processes meet here to join a world.
        memory: What the calling rank remembers. Default: its memory of the world.
    """

    world: World
    path: str
    ranks: Sequence[int]
    identity: GridIdentity | None = None
    is_fenced: bool = False
    is_lobby: bool = False
    memory: Memory = attrs.field(
        default=attrs.Factory(lambda self: self.world.memory, takes_self=True), repr=False
    )

    def of_all_ranks(self) -> Scope:
        """Return a scope for the same calls, in which every rank of the world takes part."""
        size = self.world.size
        if len(self.ranks) == size:
            return self
        return attrs.evolve(self, path=f"{self.path}/all", ranks=range(size))

    @property
    def is_alone(self) -> bool:
        """Whether the calling rank has no other rank to meet."""
        if not self.world.has_store or self.world.rank not in self.ranks:
            return True
        return len(self.ranks) < 2 and not (self.is_fenced or self.is_lobby)

    @property
    def name(self) -> str:
        """The calling rank and its host, for errors."""
        world = self.world
        return f"{world.title(world.rank)} (host {this_host()})"

    def read_key(self, store: Any) -> str:
        """Return the prefix of the keys of the scope. The first call of a job reads the store.

        The prefix contains the number of ranks, and a digest of the address that rank 0 of a gloo
        WORLD has published. The address is different in each job that uses the same store.
        """
        if self.memory.namespace is None:
            namespace = f"hypercomm/{self.world.size}"
            address = torchdist.read_bytes(store, _WORLD_ADDRESS)
            if address is not None:
                namespace += "/" + hashlib.sha256(address).hexdigest()[:8]
            self.memory.namespace = namespace
        return f"{self.memory.namespace}/{self.path}"


@attrs.frozen
class GridIdentity:
    """The properties of a grid that are equal on all of its ranks.

    Ranks that build the same grid use the same keys. Grids with the same layout, name and backend
    have the same scopes, and the n-th call of one rank meets the n-th call of the others.

    Attributes:
        layout: The layout of the grid.
        label: The name of the grid, if the user has given one.
        backend: The backend of the grid, if the user has given one.
        key: The name of the grid in the store.
    """

    layout: RankLayout
    label: str | None
    backend: str | None
    key: str

    @classmethod
    def of(cls, layout: RankLayout, label: str | None, backend: str | None) -> GridIdentity:
        """Return the identity of a grid."""
        digest = digest_of((layout.to_dict(), label, backend, __version__))
        return cls(layout, label, backend, f"{digest}.{label}" if label else digest)

    @property
    def text(self) -> str:
        """The properties as JSON, for errors."""
        layout = self.layout
        given = layout.to_dict()
        listed = given.get("ranks")
        if listed is not None and len(listed) > _MOST_LISTED:
            listed = f"{len(listed)} ranks with digest {digest_of(listed)}"
        facts = {
            "dims": "-".join(layout.dim_names),
            "shape": list(layout.shape),
            "rank_offset": layout.rank_offset,
            "strides": given.get("strides"),
            "ranks": listed,
            "name": self.label,
            "backend": self.backend,
            "hypercomm": __version__,
        }
        return json.dumps(facts)

    def scope(
        self,
        world: World,
        record: str,
        ranks: Sequence[int] | None = None,
        *,
        is_fenced: bool = False,
    ) -> Scope:
        """Return a scope of ranks of the grid.

        Args:
            world: The world of the grid.
            record: The name of the scope within the grid.
            ranks: The ranks that meet. Default: all ranks of the grid.
            is_fenced: See `Scope`.
        """
        ranks = self.layout.ranks if ranks is None else ranks
        return Scope(world, f"{self.key}/{record}", ranks, self, is_fenced)


# ---- the default world ---------------------------------------------------------------------------

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
        if not isinstance(world, World):
            raise LayoutError(f"world= must be a World, got {world!r}; give a size as world_size=")
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
