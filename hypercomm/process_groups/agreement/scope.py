"""The ranks that agree, and what the calling rank remembers of their earlier calls."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import socket
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any
from uuid import uuid4
from weakref import WeakKeyDictionary

import attrs

from hypercomm.layout import RankLayout
from hypercomm.process_groups import torch_internals as torchdist
from hypercomm.process_groups.agreement.records import Read, Steps
from hypercomm.process_groups.agreement.system import system
from hypercomm.process_groups.world import World

_WORLD_ADDRESS = "cpu//0/0"
"""The key, within WORLD's own store, of the address of rank 0 of a gloo WORLD."""

MOST = 8
"""How many missing ranks of a call are named, and followed to the ranks that they wait for."""


@functools.cache
def this_host() -> str:
    """Return the name of the machine that this process runs on."""
    return socket.gethostname()


@attrs.define(eq=False)
class Memory:
    """What the calling rank remembers of its calls in a world.

    Attributes:
        namespace: The prefix of all keys; None before it is known.
        process: Distinguishes this process from an earlier one of the same rank.
        entered: The last round of each record that this rank has entered, by the record's path.
        left: The last round of each record that this rank has left.
        agreed: The last round of each record that this rank has agreed in.
        reported: The tokens of the outcomes that this rank has raised.
        is_reporting: Whether the store holds a report that this rank waits or has failed.
        stale: Keys that no rank needs any more; the next call deletes them.
    """

    namespace: str | None = None
    process: str = attrs.field(factory=lambda: uuid4().hex[:8])
    entered: dict[str, int] = attrs.field(factory=dict)
    left: dict[str, int] = attrs.field(factory=dict)
    agreed: dict[str, int] = attrs.field(factory=dict)
    reported: set[str] = attrs.field(factory=set)
    is_reporting: bool = False
    stale: list[str] = attrs.field(factory=list)
    _locks: dict[str, Any] = attrs.field(factory=dict)
    _counts: Counter[str] = attrs.field(factory=Counter)
    _lock: threading.Lock = attrs.field(factory=threading.Lock)

    def lock_of(self, path: str) -> Any:
        """Return the lock that a thread holds while it makes a call at a record."""
        with self._lock:
            return self._locks.setdefault(path, system.lock())

    def next_number(self, path: str) -> int:
        """Return how often this was called before: names what one rank creates alone."""
        with self._lock:
            self._counts[path] += 1
            return self._counts[path] - 1

    def leave(self, path: str, number: int) -> None:
        """Note that this rank has left a round."""
        self.left[path] = max(self.left.get(path, -1), number)

    def take_stale(self) -> list[str]:
        """Return the keys in `stale`, and remove them there."""
        with self._lock:
            keys = self.stale[:]
            del self.stale[: len(keys)]
        return keys


_busy: list[Any] = []
"""The clients of stores that calls of this process use now, without the prefixes of their keys."""

_busy_lock = threading.Lock()

os.register_at_fork(after_in_child=_busy.clear)


@contextlib.contextmanager
def client_of(store: Any) -> Iterator[Any]:
    """Use a client of a store that no other call of this process uses, within a `with` block.

    A request that blocks, such as a wait, holds its client, and worlds may share one. A second call
    at the same time gets a connection of its own, which is closed afterwards.
    """
    own = torchdist.without_prefix(store)
    with _busy_lock:
        is_free = all(one is not own for one in _busy)
        if is_free:
            _busy.append(own)
    try:
        yield store if is_free else _clone(store)
    finally:
        if is_free:
            with _busy_lock:
                _busy[:] = [one for one in _busy if one is not own]


def _clone(store: Any) -> Any:
    try:
        return store.clone()
    except (AttributeError, NotImplementedError):  # a store that has one client
        return store


_memories: WeakKeyDictionary[World, Memory] = WeakKeyDictionary()


def memory_of(world: World) -> Memory:
    """Return what the calling rank remembers of its calls in a world."""
    try:
        return _memories[world]
    except KeyError:
        return _memories.setdefault(world, Memory())


def forget(world: World) -> None:
    """Forget all calls in a world: it begins anew."""
    _memories.pop(world, None)


@attrs.frozen
class Scope:
    """Ranks that make calls together, one after the other, and the record that they use.

    Attributes:
        world: The world that the ranks are of.
        path: The key of the record, within the world's part of the store.
        ranks: The ranks, in the same order on all of them.
        layout: The layout in whose coordinates errors name ranks.
        grid: The grid, as text that is compared where ranks wait for each other; "" without one.
        is_fenced: Whether ranks that agree continue without all others, whose next calls fail.
        is_claimed: Whether processes claim their ranks before: a newer one may be in the round.
        memory: What the calling rank remembers; default: of its calls in the world.
    """

    world: World
    path: str
    ranks: Sequence[int]
    layout: RankLayout | None = None
    grid: str = ""
    is_fenced: bool = False
    is_claimed: bool = False
    memory: Memory = attrs.field(
        default=attrs.Factory(lambda self: memory_of(self.world), takes_self=True), repr=False
    )

    @property
    def is_alone(self) -> bool:
        """Whether the calling rank has nobody to agree with."""
        is_one = len(self.ranks) < 2 and not self.is_fenced
        return not self.world.has_store or is_one or self.world.rank not in self.ranks

    @property
    def position(self) -> int:
        """The position of the calling rank among the ranks."""
        return self.ranks.index(self.world.rank)

    @property
    def name(self) -> str:
        """The calling rank and its host, for errors."""
        world = self.world
        return f"{world.title(world.rank)} (host {this_host()})"

    def read_namespace(self) -> Steps[str]:
        """Return the prefix of all keys of the world; the first call of a job asks the store.

        It holds the number of ranks, and a digest of the address that rank 0 of a gloo WORLD has
        published, which is new in each job that uses the same store.
        """
        if self.memory.namespace is None:
            address = yield Read(_WORLD_ADDRESS)
            token = (
                "" if address is None else "/" + hashlib.sha256(address.encode()).hexdigest()[:8]
            )
            self.memory.namespace = f"hypercomm/{self.world.size}{token}"
        return self.memory.namespace

    def read_key(self) -> Steps[str]:
        """Return the key of the record."""
        return f"{yield from self.read_namespace()}/{self.path}"
