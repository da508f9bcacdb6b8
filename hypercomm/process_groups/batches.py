"""Batches: several groups of one grid in one call, all or none on all of its ranks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

import attrs
from torch.distributed import ProcessGroup

from hypercomm.errors import CreationError
from hypercomm.process_groups.agreement.steps import Step, limit_of
from hypercomm.process_groups.agreement.together import all_or_none
from hypercomm.process_groups.creation import (
    BATCH_PATIENCE_S,
    CreatedGroup,
    destroy,
    give_up,
    together,
)
from hypercomm.process_groups.owner import Alike, GroupOwner
from hypercomm.process_groups.planned import PlannedGroup, PooledGroup
from hypercomm.process_groups.spec import GroupSpec, check_once

CALL = "create_pgs()"


@attrs.define(eq=False)
class Batch:
    """Groups of one grid that one call creates.

    Attributes:
        owner: Whose they are.
        specs: What is asked for.
        plans: What was planned for them.
        new: Those that the call has created, rather than found.
    """

    owner: GroupOwner
    specs: Sequence[GroupSpec]
    plans: list[PlannedGroup] = attrs.field(factory=list)
    new: list[PooledGroup] = attrs.field(factory=list)

    def plan(self) -> None:
        """Reserve the keys of the groups."""
        alike: Alike = {}
        try:
            with self.owner.pool.lock:
                for spec in self.specs:
                    self.plans.append(self.owner.reserve(spec, alike))
        except BaseException:
            self.forget()
            raise

    def words(self) -> list[str]:
        """Say what is planned, as all ranks must alike."""
        return [planned.describe() for planned in self.plans]

    def limit_s(self) -> float:
        """Return within how many seconds all of it must be created: the longest timeout."""
        return max(limit_of(planned.options.timeout) for planned in self.plans)

    def create(self, step: Step) -> list[ProcessGroup | None]:
        """Create the groups, in the order of the call."""
        if not self.plans:
            self.plan()
        owner = self.owner
        with owner.pool.lock:
            for planned in self.plans:
                planned.attempt = owner.attempt(planned, step)
            pooled = dict.fromkeys(one.pooled for one in self.plans if one.pooled is not None)
            self.new = [one for one in pooled if one.created is None]
        begin = time.monotonic()
        with together():
            return [owner.obtain(planned, begin).group for planned in self.plans]

    def take_back(self) -> None:
        """Destroy what was created, and forget all: it has failed, here or elsewhere."""
        namers = [one.namer for one in self.new if one.created is None]
        attempts = [namer.attempt for namer in namers if namer.attempt is not None]
        created = self._unfile()
        self.forget()
        with contextlib.suppress(RuntimeError):  # the store is gone
            give_up(attempts)
        destroy(reversed(created), BATCH_PATIENCE_S)

    def forget(self) -> None:
        """Give the keys back; those that are asked for again are planned anew."""
        self.owner.forget(self.plans)
        self.plans, self.new = [], []

    def _unfile(self) -> list[CreatedGroup]:
        """Take groups back that were created; plans that they served from before stay plans."""
        with self.owner.pool.lock:
            for pooled in list(self.new):
                if any(one.is_obtained for one in pooled.users() if one not in self.plans):
                    self.new.remove(pooled)  # another thread was given it meanwhile
            for planned in (*self.plans, *(one for new in self.new for one in new.users())):
                if planned.is_filed:
                    planned.owner.unfile(planned)
            created = [pooled.created for pooled in self.new if pooled.created is not None]
            for pooled in self.new:
                pooled.created = None
            return created


@contextlib.contextmanager
def only_call(owner: GroupOwner) -> Iterator[None]:
    """Let one thread at a time make a step of a grid, as ranks tell steps apart by their order.

    Raises:
        CreationError: Another thread makes one.
    """
    if not owner.calls.acquire(blocking=False):
        raise CreationError(
            "another thread calls create_pgs() of this grid; ranks tell such calls apart by "
            "their order, so let one thread make them, or use create_pg, which tells its calls "
            "apart by their keys"
        )
    try:
        yield
    finally:
        owner.calls.release()


def create_all(owner: GroupOwner, specs: Sequence[GroupSpec]) -> list[ProcessGroup | None]:
    """Create several groups in the order given, on all ranks of the grid or on none.

    Raises:
        CreationError: Another thread does so, or as for `GroupOwner.create`.
        GroupExistsError: A key is there twice, or was planned before.
        PlanMismatchError: Another rank creates something else, or failed.
        GroupCreationTimeout: A rank did not come in time.
    """
    check_once(specs)
    batch = Batch(owner, specs)
    if not specs:
        return []
    with only_call(owner):
        batch.plan()
        try:
            # A derived group is looked through here, where nobody waits for this rank so far.
            is_needed = owner.agreement.compares() or any(one.derive for one in specs)
            entries = batch.words() if is_needed else [str(one.key) for one in specs]
            return all_or_none(
                owner.steps, entries, batch.limit_s(), CALL, batch.create, batch.take_back
            ).get()
        except BaseException:
            batch.forget()
            raise
