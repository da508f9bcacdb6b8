"""Job: the torch.distributed job that this process takes part in; a new WORLD is a new job."""

from __future__ import annotations

import hashlib
import threading
from collections import Counter
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import attrs
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypercomm.process_groups import torch_internals as c10d
from hypercomm.process_groups.torch_internals.gloo import world_address_key
from hypercomm.process_groups.torch_internals.store import answer


@attrs.define(eq=False)
class Job:
    """One job, as the calling rank sees it.

    Attributes:
        rank: The calling rank.
        size: The number of ranks.
        backend: The backend of WORLD.
        has_store: Whether ranks share a store; a fake world has none.
        before: The job that `renew_world` made this one from; None without one.
        numbers: The number in that job of each of its ranks.
        reported: The tokens of the mismatches that this rank has raised.
        seen: The last round of each record that this rank has left.
        agreed: The last round of each record that this rank has agreed in.
        is_reporting: Whether the store holds a report that this rank waits or has failed.
        choices: The strategies that were chosen, by what the choice depends on.
    """

    rank: int
    size: int
    backend: str
    has_store: bool
    before: Job | None = None
    numbers: tuple[int, ...] = ()
    reported: set[str] = attrs.field(factory=set)
    seen: dict[str, int] = attrs.field(factory=dict)
    agreed: dict[str, int] = attrs.field(factory=dict)
    is_reporting: bool = False
    choices: dict[tuple[object, ...], Any] = attrs.field(factory=dict)
    _namespace: str | None = None
    _locks: dict[str, threading.Lock] = attrs.field(factory=dict)
    _counts: Counter[str] = attrs.field(factory=Counter)
    _options: dict[str, Any] = attrs.field(factory=dict)

    @property
    def namespace(self) -> str:
        """The prefix of all keys of the job; another job in the same store has another one.

        It holds the number of ranks, and a digest of the address that rank 0 of a gloo WORLD has
        published, which is new in each job.
        """
        if self._namespace is None:
            address = None
            if self.has_store:
                address = answer(lambda: c10d.read_bytes(world_address_key(0)))
            token = "" if address is None else f"/{hashlib.sha256(address).hexdigest()[:8]}"
            self._namespace = f"hypercomm/{self.size}{token}"
        return self._namespace

    @property
    def is_named(self) -> bool:
        """Whether the namespace is known without asking the store."""
        return self._namespace is not None or not self.has_store

    def timeout_of(self, backend: str) -> timedelta | None:
        """Return the timeout of WORLD, preferably that of its part that runs `backend`.

        None if torch does not show it: a fake backend has no options.
        """
        if backend not in self._options:
            self._options[backend] = c10d.world_options(backend)
        timeout: timedelta | None = getattr(self._options[backend], "_timeout", None)
        return timeout

    def lock_of(self, key: str) -> threading.Lock:
        """Return the lock that a thread holds while it makes a call at a record."""
        with _lock:
            return self._locks.setdefault(key, threading.Lock())

    def next_number(self, key: str) -> int:
        """Return how often this was called before with a key: names what one rank creates alone."""
        with _lock:
            self._counts[key] += 1
            return self._counts[key] - 1

    def comes_of(self, before: Job, numbers: tuple[int, ...]) -> None:
        """Note which job this one came of, and the number there of each of its ranks."""
        self.before, self.numbers = before, numbers

    def numbers_in(self, other: Job | None) -> tuple[int, ...] | None:
        """Return the number of each rank in a job that this one came of; None: it did not."""
        numbers, at = tuple(range(self.size)), self
        while at is not other:
            if at.before is None:
                return None
            numbers, at = tuple(at.numbers[number] for number in numbers), at.before
        return numbers


_lock = threading.Lock()
_jobs: WeakKeyDictionary[ProcessGroup, Job] = WeakKeyDictionary()


def _new_job(world: ProcessGroup) -> Job:
    backend, has_store = c10d.default_backend(), c10d.has_ranks()
    job = Job(dist.get_rank(), dist.get_world_size(), backend, has_store)
    with _lock:  # another thread may have been faster
        return _jobs.setdefault(world, job)


def current_or_none() -> Job | None:
    """Return the job that this process takes part in; None before there is one."""
    world = dist.group.WORLD
    return None if world is None else _jobs.get(world) or _new_job(world)


def current() -> Job:
    """Return the job that this process takes part in.

    Raises:
        NotInitializedError: torch.distributed is not initialised.
    """
    world = c10d.world_group()
    return _jobs.get(world) or _new_job(world)
