"""Scopes: sets of ranks that meet. The identity of a grid is part of the keys of its scopes."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import os
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import attrs

from hypercomm.layout import RankLayout
from hypercomm.process_groups import torch_internals as torchdist
from hypercomm.process_groups.world import Memory, World
from hypercomm.version import __version__

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


# ---- the connection to the store ----------------------------------------------------------------

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
        yield store if is_free else clone(store)
    finally:
        if is_free:
            with _busy_lock:
                _busy[:] = [one for one in _busy if one is not own]


def clone(store: Any) -> Any:
    """Return a new connection to a store, or the store itself if it has only one client."""
    try:
        return store.clone()
    except (AttributeError, NotImplementedError):
        return store
    except RuntimeError as error:
        if "pure virtual" in str(error):  # the store is written in Python, and has no clone()
            return store
        raise
