"""The ways of creating the process groups of some dims, and the one place that chooses.

local      each rank creates its own group, under a name that all members derive alike
split      each rank splits WORLD's communicator once, where WORLD is bound to a device
enumerate  every rank walks every group: torch.distributed.new_subgroups_by_enumeration

gloo connects every pair of members while a group is created, and a member may be done before its
peer is: closing the group then breaks the peer's creation ("Connection closed by peer"). So each
member says in the store that it is connected, and `destroy` first looks that all have.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import time
from collections.abc import Callable, Iterable, Iterator
from contextvars import ContextVar
from functools import cached_property
from typing import NamedTuple

import attrs
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypercomm.errors import CreationError, NotInitializedError, RankOutsideError
from hypercomm.layout import RankGroups, RankLayout
from hypercomm.layout.notation import format_coords
from hypercomm.process_groups import c10d
from hypercomm.process_groups.gloo import address_key
from hypercomm.process_groups.options import GroupOptions

logger = logging.getLogger(__name__)

_PATIENCE_S = 5.0
"""How long the destruction of groups may wait for members that are still connecting."""

_POLL_S = 0.002

_to_tell: ContextVar[list[str] | None] = ContextVar("to tell", default=None)


class Choice(NamedTuple):
    """A way of creating groups, and why it was taken."""

    strategy: str
    reason: str


@attrs.frozen(slots=False)
class GroupPlan:
    """What to create: the groups of some dims, their common name and their options."""

    name: str
    layout: RankLayout
    groups: RankGroups
    options: GroupOptions

    @cached_property
    def own(self) -> OwnGroup | None:
        """The group of the calling rank; None where it is no member."""
        rank = dist.get_rank()
        try:
            index = self.groups.index_of(rank)
        except RankOutsideError:
            return None
        return OwnGroup(f"{self.name}/{index}", rank, self.groups[index])

    @cached_property
    def meeting(self) -> OwnGroup | None:
        """The group of the calling rank, if its members meet while it is created: gloo's do."""
        if not c10d.is_live() or self.options.backend is None:
            return None
        if "gloo" not in c10d.single_backends(self.options.backend):
            return None
        return self.own if self.own is not None and len(self.own.ranks) > 1 else None


class OwnGroup(NamedTuple):
    """One group as its members know it: the name is the same on all of them."""

    name: str
    rank: int
    ranks: tuple[int, ...]

    def key(self, word: str, rank: int) -> str:
        """Return the key under which `rank` says a word about this group in the store."""
        return f"{self.name}/{word}/{rank}"


@attrs.frozen(eq=False)
class CreatedGroup:
    """What came of a plan on the calling rank: None for the group where it is no member."""

    group: ProcessGroup | None
    meeting: OwnGroup | None = None
    """The group whose members say in the store that they are connected, if they must be."""
    owned: bool = True
    """Whether the grid created it, and destroys it."""


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


def choose(creation: str, backend: str | None) -> Choice:
    """Decide how groups of `backend` (None: that of WORLD) are created in this world.

    Args:
        creation: "auto", or the name of a strategy.
        backend: The backend asked for.

    Raises:
        CreationError: The strategy asked for cannot work here; says why, and which would.
    """
    if not c10d.is_live():
        logger.warning("creating groups by enumeration: torch.distributed is not initialised")
        return Choice("enumerate", "torch.distributed is not initialised")
    backend = (backend or c10d.default_backend()).lower()
    if creation == "auto":
        return _auto(backend)
    obstacle = STRATEGIES[creation][0](backend)
    if obstacle is None:
        return Choice(creation, "asked for by name")
    usable = [name for name, (why_not, _) in STRATEGIES.items() if why_not(backend) is None]
    raise CreationError(
        f"creation={creation!r} cannot create groups of backend {backend!r} here: "
        f"{obstacle}; use one of {['auto', *usable]}"
    )


def _auto(backend: str) -> Choice:
    not_split = _why_not_split(backend)
    if not_split is None:
        return Choice("split", "WORLD is bound to a device whose backend can be split")
    not_local = _why_not_local(backend)
    if not_local is None:
        return Choice("local", "each rank creates only the groups that it is a member of")
    reason = f"{not_local}, and {not_split}"
    logger.warning("creating groups by enumeration of the world: %s", reason)
    return Choice("enumerate", reason)


def create(plan: GroupPlan, strategy: str) -> CreatedGroup:
    """Create the group of the calling rank, and leave torch as it was if that fails."""
    before = c10d.registered()
    try:
        group = STRATEGIES[strategy][1](plan)
        _tell_connected(plan)
        return CreatedGroup(group, plan.meeting)
    except BaseException as error:
        for leftover in c10d.registered() - before:
            c10d.destroy(leftover)
        c10d.forget_non_members()
        if isinstance(error, (RuntimeError, ValueError)):
            _explain(plan, error)
        raise


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


def destroy(created: Iterable[CreatedGroup]) -> None:
    """Destroy groups, in the order given, once all of their members are connected.

    A member that died while it connected never says so, and is waited for a few seconds.
    """
    deadline = time.monotonic() + _PATIENCE_S
    members = [(item.group, item.meeting) for item in created if item.group is not None]
    if any(meeting for _, meeting in members):
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
def told_together() -> Iterator[None]:
    """Tell the store of all creations within a `with` block at its end, in one message."""
    keys: list[str] = []
    token = _to_tell.set(keys)
    try:
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


# ---- local ----------------------------------------------------------------------------------


def _why_not_local(backend: str) -> str | None:
    lacks = c10d.missing()
    if lacks:
        return f"this torch lacks {', '.join(lacks)}"
    if "mpi" in c10d.single_backends(backend):
        return "MPI creates a group only with all ranks of the world"
    device = c10d.split_device()
    if device is not None and c10d.device_backend(device) in c10d.single_backends(backend):
        return f"WORLD is bound to {device}, and every rank must take part in splitting it"
    return c10d.replaces_new_group()


def _create_local(plan: GroupPlan) -> ProcessGroup | None:
    if plan.own is None:
        return None
    return c10d.new_group(
        plan.own.name,
        plan.own.ranks,
        backend=plan.options.backend or c10d.default_backend(),
        timeout=plan.options.timeout,
        pg_options=plan.options.pg_options,
        group_desc=plan.options.group_desc or plan.name,
    )


# ---- split ----------------------------------------------------------------------------------


def _why_not_split(backend: str) -> str | None:
    device = c10d.split_device()
    if device is None:
        return "WORLD is not bound to a device: init_process_group(device_id=...) binds it"
    bound = c10d.device_backend(device)
    if not [bound] == c10d.single_backends(backend) == c10d.single_backends(c10d.default_backend()):
        return f"WORLD is bound to {device} with {bound!r}, and a split keeps all of its backends"
    return None


def _create_split(plan: GroupPlan) -> ProcessGroup | None:
    # Every rank of WORLD must call, but torch looks only at the caller's own group in the list.
    # A rank that is a member of none passes one that it is not in, and gets None.
    ranks = plan.groups[0] if plan.own is None else plan.own.ranks
    return dist.split_group(
        split_ranks=[list(ranks)],
        timeout=plan.options.timeout,
        pg_options=plan.options.pg_options,
        group_desc=plan.options.group_desc,
    )


# ---- enumerate ------------------------------------------------------------------------------


def _create_enumerate(plan: GroupPlan) -> ProcessGroup | None:
    group: ProcessGroup | None
    group, _ = dist.new_subgroups_by_enumeration(  # type: ignore[no-untyped-call]
        plan.groups.to_array().tolist(), backend=plan.options.backend, **plan.options.given()
    )
    if dist.is_initialized():
        c10d.forget_non_members()
    return group


STRATEGIES: dict[
    str, tuple[Callable[[str], str | None], Callable[[GroupPlan], ProcessGroup | None]]
] = {
    "local": (_why_not_local, _create_local),
    "split": (_why_not_split, _create_split),
    "enumerate": (lambda _backend: None, _create_enumerate),
}
"""By name: what keeps a strategy from working for a backend (None: nothing), and the strategy."""
