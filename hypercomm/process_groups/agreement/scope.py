"""Scopes, which are sets of ranks that agree, and the history of the calling rank's calls."""

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
"""The key in WORLD's store under which rank 0 of a gloo WORLD publishes its address."""

MOST = 8
"""Errors name at most this many missing ranks. Only the status of these ranks is read."""

MOST_LAYOUTS = 16
"""The largest number of layouts that a rank publishes."""


@functools.cache
def this_host() -> str:
    """Return the name of the machine that this process runs on."""
    return socket.gethostname()


@attrs.define(eq=False)
class Memory:
    """The history of the calling rank's calls in a world.

    Attributes:
        namespace: The prefix of all keys, or None before the first call.
        process: A token that distinguishes this process from earlier processes of the same rank.
        entered: Maps the path of each record to the last round in which this rank has set a bit.
        left: Maps the path of each record to the last round that this rank has left.
        agreed: Maps the path of each record to the last round in which this rank has agreed.
        reported: The tokens of outcomes that this rank must not raise again.
        is_reporting: Whether the store holds a status of this rank.
        layouts: Maps the text of each grid in which this rank has made calls with other ranks to
            the layout, as text. There are at most `MOST_LAYOUTS`.
        stale: Keys that no rank needs any more. The next call deletes these keys.
    """

    namespace: str | None = None
    process: str = attrs.field(factory=lambda: uuid4().hex[:8])
    entered: dict[str, int] = attrs.field(factory=dict)
    left: dict[str, int] = attrs.field(factory=dict)
    agreed: dict[str, int] = attrs.field(factory=dict)
    reported: set[str] = attrs.field(factory=set)
    is_reporting: bool = False
    layouts: dict[str, str] = attrs.field(factory=dict)
    stale: list[str] = attrs.field(factory=list)
    _publishes_layouts: bool = False
    _locks: dict[str, Any] = attrs.field(factory=dict)
    _counts: Counter[str] = attrs.field(factory=Counter)
    _lock: threading.Lock = attrs.field(factory=threading.Lock)

    def lock_of(self, path: str) -> Any:
        """Return the lock that a thread holds while it makes a call that uses a record."""
        with self._lock:
            return self._locks.setdefault(path, system.lock())

    def note_layout(self, grid: str, layout: RankLayout, *, is_partial: bool) -> bool:
        """Note the layout of a grid, and return whether this rank must publish its layouts.

        Args:
            grid: The text of the grid.
            layout: The layout of the grid.
            is_partial: Whether only some ranks of the grid make the call.
        """
        with self._lock:
            is_new = grid not in self.layouts and len(self.layouts) < MOST_LAYOUTS
            if is_new:
                self.layouts[grid] = str(layout)
            begins = is_partial and not self._publishes_layouts
            self._publishes_layouts |= is_partial
            return begins or (is_new and self._publishes_layouts)

    def next_number(self, path: str) -> int:
        """Return how often this method was called before with the same path."""
        with self._lock:
            self._counts[path] += 1
            return self._counts[path] - 1

    def leave(self, path: str, number: int) -> None:
        """Note that this rank has left a round."""
        self.left[path] = max(self.left.get(path, -1), number)

    def take_stale(self) -> list[str]:
        """Clear `stale`, and return its keys."""
        with self._lock:
            keys = self.stale[:]
            del self.stale[: len(keys)]
        return keys


_busy: list[Any] = []
"""The store clients, without prefixes, that calls of this process are using."""

_busy_lock = threading.Lock()


def _begin_again() -> None:
    """Forget the threads of the parent process after a fork."""
    global _busy_lock  # noqa: PLW0603 - a thread of the parent process may hold it
    _busy_lock = threading.Lock()
    _busy.clear()


os.register_at_fork(after_in_child=_begin_again)


@contextlib.contextmanager
def client_of(store: Any) -> Iterator[Any]:
    """Yield a client of a store that no other call of this process uses at the same time.

    A request that blocks, such as a wait, occupies its client, and several worlds may have the same
    client. If another call already uses the client, this call gets a new connection. The connection
    is closed after the `with` block, unless a process group that was created with it still uses it.
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
    except (AttributeError, NotImplementedError):  # this kind of store has only one client
        return store
    except RuntimeError as error:
        if "pure virtual" in str(error):  # the store is written in Python, and has no clone()
            return store
        raise


_memories: WeakKeyDictionary[World, Memory] = WeakKeyDictionary()


def memory_of(world: World) -> Memory:
    """Return the history of the calling rank's calls in a world."""
    try:
        return _memories[world]
    except KeyError:
        return _memories.setdefault(world, Memory())


def forget(world: World) -> None:
    """Forget all calls in a world, because the world begins again."""
    _memories.pop(world, None)


@attrs.frozen
class Scope:
    """A set of ranks that make calls together, one call after the other, through one record.

    Attributes:
        world: The world of the ranks.
        path: The key of the record, without the prefix of the world.
        ranks: The ranks, in the same order on all of them.
        layout: The layout from which errors take the coordinates of ranks, if any.
        grid: The grid as text, or "" for calls without a grid. Ranks that wait for each other
            compare this text.
        is_fenced: Whether a rank is excluded after it has missed a round in which the other ranks
            agreed. Later calls of an excluded rank fail.
        is_claimed: Whether a newer process may replace the process of a rank, as in a joined world.
        memory: The history of the calling rank. Default: the history of its calls in the world.
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

    def of_all_ranks(self) -> Scope:
        """Return a scope for the same calls, in which every rank of the world takes part."""
        size = self.world.size
        if len(self.ranks) == size:
            return self
        return attrs.evolve(self, path=f"{self.path}/all", ranks=range(size))

    @property
    def is_alone(self) -> bool:
        """Whether the calling rank has no other rank to agree with."""
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
        """Return the prefix of all keys of the world. The first call reads the store.

        The prefix contains the number of ranks, and a digest of the address that rank 0 of a gloo
        WORLD has published. The address is different in each job that uses the same store.
        """
        if self.memory.namespace is None:
            namespace = f"hypercomm/{self.world.size}"
            address = yield Read(_WORLD_ADDRESS)
            if address is not None:
                namespace += "/" + hashlib.sha256(address.encode()).hexdigest()[:8]
            self.memory.namespace = namespace
        return self.memory.namespace

    def read_key(self) -> Steps[str]:
        """Return the key of the record."""
        return f"{yield from self.read_namespace()}/{self.path}"
