"""Creating and destroying the calling rank's process group of some dims, and nothing else.

gloo connects every pair of members while a group is created, and a member may be done before its
peer is: closing the group then breaks the peer's creation ("Connection closed by peer"). So each
member says in the store that it is connected, and `destroy` first looks that all have.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Iterable, Iterator
from contextvars import ContextVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypercomm.errors import CreationError, NotInitializedError
from hypercomm.layout.notation import format_coords
from hypercomm.process_groups import c10d
from hypercomm.process_groups.gloo import address_key, devices
from hypercomm.process_groups.group_plan import CreatedGroup, GroupPlan, OwnGroup
from hypercomm.process_groups.strategies import STRATEGIES
from hypercomm.process_groups.world import process_wide

logger = logging.getLogger(__name__)

PATIENCE_S = 5.0
"""How long the destruction of groups may wait for members that are still connecting."""

BATCH_PATIENCE_S = 1.0
"""The same where a creation failed, and members may be gone."""

_POLL_S = 0.002

_to_tell: ContextVar[list[str] | None] = ContextVar("to tell", default=None)


class GridNames:
    """Tells grids of the same kind apart: the first is 0, the next is 1, on every rank alike.

    The count is kept for each store: a process that takes part in a new job counts from 0 like
    those that are new with it, and a store that serves several worlds never sees a name twice.
    """

    def __init__(self) -> None:
        self._counts: dict[tuple[str, str], itertools.count[int]] = {}

    def claim(self, kind: str, store: str) -> str:
        """Return a new name for a grid of this kind, in the job that has this store."""
        return f"{kind}/{next(self._counts.setdefault((store, kind), itertools.count()))}"

    @contextlib.contextmanager
    def fresh(self) -> Iterator[None]:
        """Count from 0 for a while: a fake world has no store, and each of its ranks is alike."""
        counts, self._counts = self._counts, {}
        try:
            yield
        finally:
            self._counts = counts


grid_names = GridNames()
process_wide.add(grid_names)


def create(plan: GroupPlan, strategy: str) -> CreatedGroup:
    """Create the group of the calling rank, and leave torch as it was if that fails."""
    before = c10d.registered()
    try:
        group = STRATEGIES[strategy][2](plan)
        _tell_connected(plan)
        return CreatedGroup(group, plan.meeting)
    except BaseException as error:
        for leftover in _left_by(plan, strategy, before):
            c10d.destroy(leftover)
        c10d.forget_non_members()
        if isinstance(error, (RuntimeError, ValueError)):
            _explain(plan, error)
        raise


def _left_by(plan: GroupPlan, strategy: str, before: set[ProcessGroup]) -> set[ProcessGroup]:
    """What a creation that failed has registered; other threads may have registered theirs."""
    if strategy == "local":
        return c10d.registered_as(plan.own.name) if plan.own and c10d.is_live() else set()
    return c10d.registered() - before  # torch has named it


def _explain(plan: GroupPlan, error: Exception) -> None:
    """Raise an error of ours where we know better than torch what went wrong."""
    if not dist.is_initialized():
        raise NotInitializedError(
            f"torch.distributed is not initialised, so the groups over {plan.name} cannot be "
            f"created; call torch.distributed.init_process_group() first, or start the program "
            f"with torchrun"
        ) from error
    absent = _absent(plan)
    if absent:
        raise CreationError(
            f"the group {plan.name} of ranks {plan.own and plan.own.ranks} was not created "
            f"within {plan.options.timeout}: {', '.join(absent)} did not come; every rank of the "
            f"grid must create it, in the same order"
        ) from error


def destroy(created: Iterable[CreatedGroup], patience_s: float = PATIENCE_S) -> None:
    """Destroy groups, in the order given, once all of their members are connected.

    A member that died while it connected never says so, and is waited for a few seconds.
    """
    deadline = time.monotonic() + patience_s
    members = [(item.group, item.meeting) for item in created if item.group is not None]
    if members and c10d.has_store():
        c10d.let_threads_finish()
    errors = []
    for group, meeting in members:
        if not c10d.is_registered(group):
            continue  # torch destroyed it together with WORLD
        if meeting is not None:
            _await_connected(meeting, deadline)
        try:
            c10d.destroy(group)
        except Exception as error:  # noqa: BLE001 - the other groups must go too
            errors.append(error)
    if errors:
        raise errors[0]


def _absent(plan: GroupPlan) -> list[str]:
    """Name the members of the caller's group that never began to create it, with coordinates.

    A member that began has left its address in the store, for the others to connect to.
    """
    if plan.meeting is None:
        return []
    store, name, ranks = c10d.store(), plan.meeting.name, plan.meeting.ranks
    came = [store.check([address_key(name, position)]) for position in range(len(ranks))]
    if not came[ranks.index(plan.meeting.rank)]:
        return []  # this torch keeps addresses elsewhere
    return [
        f"rank {rank} ({format_coords(plan.layout.coords(rank))})"
        for rank, here in zip(ranks, came, strict=True)
        if not here
    ]


@contextlib.contextmanager
def together() -> Iterator[None]:
    """Create several groups within a `with` block for less than one by one.

    The store is told of all creations at the end, in one message, and gloo groups share devices.
    """
    keys: list[str] = []
    token = _to_tell.set(keys)
    try:
        with devices.shared():
            yield
    finally:
        _to_tell.reset(token)
        try:
            c10d.set_keys(keys)
        except RuntimeError as error:  # the store is gone
            logger.warning("cannot tell that groups are connected: %s", error)


def _tell_connected(plan: GroupPlan) -> None:
    # One key for each member: setting it does not wait for an answer, as adding to a count does.
    if plan.meeting is None:
        return
    keys, key = _to_tell.get(), plan.meeting.key("connected", plan.meeting.rank)
    if keys is None:
        c10d.set_keys([key])
    else:
        keys.append(key)


def _await_connected(own: OwnGroup, deadline: float) -> None:
    store, keys = c10d.store(), [own.key("connected", member) for member in own.ranks]
    try:
        while not store.check(keys):
            if time.monotonic() > deadline:
                logger.warning("destroying a group whose members are not all connected")
                return
            time.sleep(_POLL_S)
    except RuntimeError as error:  # the store is gone
        logger.warning("destroying a group that may not be connected: %s", error)
