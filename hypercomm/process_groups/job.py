"""Job: the torch.distributed job that this process takes part in; a new WORLD is a new job."""

from __future__ import annotations

import hashlib
import threading
import uuid
from collections import Counter, defaultdict
from collections.abc import Hashable
from typing import Any
from weakref import WeakKeyDictionary

import attrs
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypercomm.process_groups import torch_internals as c10d
from hypercomm.process_groups.torch_internals.gloo import world_address_key
from hypercomm.process_groups.torch_internals.store import answer


class KnownGrids:
    """What this process knows of the grids of one job.

    Attributes:
        numbers: How many grids of a kind there are, where there is no store.
        passed: The slots that this rank has taken, or whose end it has obeyed.
        heard: What it was told that ranks differ in, by the place that it is about.
        latest: The slot of the grid that this rank came to last.
        waits: Whether the store says that this rank waits for others.
        transfers: By the places at which ranks agree on transfers: those that have ended, and may
            be in the store yet.
        lock: Held while a grid is named.
    """

    def __init__(self) -> None:
        self.numbers: dict[str, int] = defaultdict(int)
        self.passed: set[str] = set()
        self.heard: set[str] = set()
        self.latest = ""
        self.waits = False
        self.transfers: dict[str, range] = defaultdict(lambda: range(0))
        self.lock = threading.RLock()


@attrs.define(eq=False)
class Job:
    """One job, as the calling rank sees it.

    Attributes:
        rank: The calling rank.
        size: The number of ranks.
        backend: The backend of WORLD.
        has_store: Whether the ranks can meet in a store; those of a fake world are not there.
        choices: How groups are created in it, by what was asked for.
        renewals: How often its ranks have met to make a new one, by place.
        before: The job that it came of, if some ranks of that one made it.
        numbers: The number there of each of its ranks.
    """

    rank: int
    size: int
    backend: str
    has_store: bool
    choices: dict[Hashable, Any] = attrs.field(factory=dict)
    renewals: Counter[str] = attrs.field(factory=Counter)
    before: Job | None = None
    numbers: tuple[int, ...] = ()
    _grids: KnownGrids | None = None
    _namespace: str | None = None

    @property
    def grids(self) -> KnownGrids:
        """What is known of its grids; shared with earlier jobs that had the same keys."""
        if self._grids is None:
            identity = None
            if self.has_store and self.namespace == self._plain:
                mine = uuid.uuid4().hex
                identity = answer(lambda: c10d.exchange("hypercomm/store", "", mine))
            with _lock:  # all threads are to have the same
                if self._grids is None:
                    new = KnownGrids()
                    self._grids = new if identity is None else _grids.setdefault(identity, new)
        return self._grids

    @property
    def namespace(self) -> str:
        """What all keys of the job begin with; another one for a job that finds them in its store.

        A job has the number of its ranks, and the address that rank 0 of a gloo WORLD has left,
        which is new in each: it is asked for once.
        """
        if self._namespace is None:
            address = None
            if self.has_store:
                address = answer(lambda: c10d.read_bytes(world_address_key(0)))
            token = "" if address is None else f"/{hashlib.sha256(address).hexdigest()[:8]}"
            self._namespace = self._plain + token
        return self._namespace

    @property
    def _plain(self) -> str:
        """The namespace of a job that no address tells from others."""
        return f"hypercomm/{self.size}"

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

    def is_current(self) -> bool:
        """Whether this process still takes part in it."""
        return current_or_none() is self


_lock = threading.Lock()
_jobs: WeakKeyDictionary[ProcessGroup, Job] = WeakKeyDictionary()
_grids: dict[str, KnownGrids] = {}
"""What is known of the grids in each store, where jobs do not differ in their keys."""


def _new_job(world: ProcessGroup) -> Job:
    backend, has_store = c10d.default_backend(), c10d.has_ranks() and c10d.knows_store()
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
