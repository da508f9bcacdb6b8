"""Stores the process groups of one grid, by key. Each entry is reserved, live or ended.

Each entry uses a communicator, which is a process group with the entries that use it. Entries with
`share="identical"` may use the same communicator. A communicator is destroyed when the last entry
that uses it is removed.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from math import inf
from typing import Any, Literal

import attrs
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypercomm.errors import (
    CreationError,
    GridDestroyedError,
    GroupExistsError,
    GroupMissingError,
    GroupOptionsError,
    NotInitializedError,
    UnknownDimError,
)
from hypercomm.layout.checks import world_too_small
from hypercomm.layout.parsing import Dims
from hypercomm.layout.views import View, Views
from hypercomm.process_groups import torch_internals as torchdist
from hypercomm.process_groups.spec import (
    GridOptions,
    GroupKey,
    GroupOptions,
    GroupRequest,
    GroupSpec,
    check_backend,
    check_choices,
    check_name,
)
from hypercomm.process_groups.strategies import Explanation, Plan, plan
from hypercomm.process_groups.system import system
from hypercomm.process_groups.world import (
    GridIdentity,
    Scope,
    World,
    current_or_none,
    rank_in_world,
)

logger = logging.getLogger(__name__)

RESERVED: Literal["reserved"] = "reserved"
LIVE: Literal["live"] = "live"
ENDED: Literal["ended"] = "ended"

_lock = threading.RLock()
"""A thread holds this lock while it changes any table, but never while it waits for other ranks."""


@attrs.define(eq=False)
class Communicator:
    """A process group, and the entries that use it.

    Attributes:
        spec: The spec from which the process group is created.
        pg: The process group. None before it is created, and on a rank that is not a member.
        is_created: Whether the members have created the process group.
        is_owned: Whether the process group is destroyed when its last user is removed. If not,
            another object owns the group.
        users: The entries that use the process group, which was created for the first entry.
        former: An existing process group that is reconfigured for these members, or None to create
            a new one.
    """

    spec: GroupSpec
    pg: ProcessGroup | None = None
    is_created: bool = False
    is_owned: bool = True
    users: dict[Entry, None] = attrs.field(factory=dict, repr=False)
    former: ProcessGroup | None = None

    def is_only_of(self, table: GroupTable) -> bool:
        """Return whether all users of the process group are entries of `table`."""
        return all(user.table is table for user in self.users)


@attrs.define(eq=False)
class Entry:
    """A key of a table, with its spec and its communicator.

    Attributes:
        table: The table.
        spec: The resolved request.
        communicator: The communicator.
        state: "reserved" during the creation, "live" after it, and "ended" after `end_groups`.
    """

    table: GroupTable = attrs.field(repr=False)
    spec: GroupSpec
    communicator: Communicator
    state: Literal["reserved", "live", "ended"] = RESERVED
    _settled: Any = None

    def wait_until_settled(self) -> None:
        """Wait until the creation in another thread has succeeded or failed."""
        with _lock:
            if self.state != RESERVED or self.table.entries.get(self.spec.key) is not self:
                return
            self._settled = settled = self._settled or system.event()
        settled.wait()

    def settle(self) -> None:
        """Release the entry if it has not become live, and wake the threads that wait for it."""
        with _lock:
            if self.state == RESERVED:
                self.table.release([self])
            if self._settled is not None:
                self._settled.set()


class GroupTable:
    """The process groups of one grid.

    Args:
        identity: The layout of the grid, and the scopes of its calls.
        views: The views of the layout.
        options: The options of the grid, which are the defaults of requests.
        world: The world of the grid, if the user has given one; default: the default world.

    Attributes:
        lender: Returns the table of another grid, whose communicators may serve keys of this table,
            or None.
        entries: The entries, by key. Live entries are in the order of creation.
        given_world: The joined world of the grid, or None for the default world.
        origin: The world whose ranks the layout contains, or None before that world exists.
        is_reshaping: Whether a thread reshapes the grid. Other threads must not change the grid.
    """

    def __init__(
        self,
        identity: GridIdentity,
        views: Views,
        options: GridOptions,
        world: World | None = None,
    ) -> None:
        self.identity = identity
        self.layout = identity.layout
        self.views = views
        self.options = options
        self.lender: Callable[[], GroupTable] | None = None
        self.entries: dict[GroupKey, Entry] = {}
        self.is_destroyed = False
        self.is_reshaping = False
        self.given_world = None if world is None or world.is_default else world
        self.origin = self.world
        self._checked_world: World | None = None
        self._process = os.getpid()
        self._warned: set[str] = set()
        if self.given_world is not None:
            self.given_world.owners.add(self)

    @property
    def label(self) -> str:
        """The layout as text, for the titles of calls."""
        return str(self.layout)

    # ---- the world ------------------------------------------------------------------------------

    @property
    def world(self) -> World | None:
        """The world of the grid, or None before torch.distributed is initialised."""
        return self.given_world or current_or_none()

    def rank(self, explicit: int | None = None) -> int:
        """Return the calling rank in the world of the grid, or `explicit` if that is given."""
        return rank_in_world(explicit, self.given_world)

    def live_world(self, key: GroupKey | None = None) -> World:
        """Return the world of the grid, and check that it contains the ranks of the layout.

        Args:
            key: The key of the groups to create, if any, for the error.

        Raises:
            NotInitializedError: torch.distributed is not initialised.
            CreationError: The layout contains ranks of the WORLD that `renew_world` has replaced.
            WorldSizeError: The world is smaller than the grid.
        """
        world = self.given_world or current_or_none()
        if world is None:
            groups = "process groups" if key is None else f"the groups over {key}"
            raise NotInitializedError(
                f"torch.distributed is not initialised, so {groups} cannot be created; call "
                f"hypercomm.join(), or torch.distributed.init_process_group()"
            )
        if world is not self._checked_world:
            self._check_world(world)
        return world

    def _check_world(self, world: World) -> None:
        self.origin = self.origin or world
        if world is not self.origin and world.numbers_in(self.origin) is not None:
            raise CreationError(
                f"this grid ({self.layout}) still uses the rank numbers from before WORLD was "
                f"renewed; call reshape(target, ranks=...) with ranks of the new WORLD"
            )
        last = self.layout.last_rank
        if last >= world.size:
            raise world_too_small(f"the grid {self.layout}", last, world.size)
        self._checked_world = world

    # ---- requests -------------------------------------------------------------------------------

    def find_key(
        self, dims: Dims, name: str | None, view: str | None
    ) -> tuple[GroupKey, View | None]:
        """Return the key of a group, and the view that the call names.

        The key has no view if the view shares the dims with the grid.
        """
        self.check_usable()
        if name is not None:
            check_name(name)
        if view is None:
            # Otherwise, the error of `view_and_dims` names a view that has the dims.
            with contextlib.suppress(UnknownDimError):
                return GroupKey(self.layout.order_dims(dims), name), None
        found, ordered = self.views.view_and_dims(dims, view)
        key = GroupKey(ordered, name, None if found is None else found.name)
        return key, None if view is None else self.views.view_or_none(view)

    def resolve(self, request: GroupRequest) -> GroupSpec:
        """Check a request, and return it with its groups, options and strategy resolved.

        Raises:
            UnknownDimError, LayoutError: The grid has no such dims.
            GroupOptionsError: An option or `derive` is wrong.
            CreationError: The strategy cannot create these groups.
            NotInitializedError, WorldSizeError: See `live_world`.
        """
        if request.creation is not None or request.share is not None:
            check_choices(request.creation, request.share)
        key, view = self.find_key(request.dims, request.name, request.view)
        layout = self.layout if key.view is None or view is None else view.layout
        usual = self.options.of_groups
        given = request.options(usual)
        world = self.live_world(key)
        groups = request.find_groups(key, layout)
        creation = self.options.creation
        by_all = self.layout.size == world.size
        known: Plan | None = world.plans.get((given, creation, by_all)) if given is usual else None
        if known is None:
            known = plan(world, groups, given, creation, by_all=by_all)
            if given is usual and known.is_general:
                world.plans[given, creation, by_all] = known
        return GroupSpec(
            request,
            key,
            layout,
            view,
            groups,
            given,
            request.share or self.options.share,
            known.options,
            known.strategy,
            known.reason,
            world,
            groups.find(world.rank),
        )

    # ---- entries --------------------------------------------------------------------------------

    def get(self, key: GroupKey) -> ProcessGroup | None:
        """Return the group of a key.

        Raises:
            GroupMissingError: The group was not created, or has ended.
        """
        entry = self.entries.get(key)
        if entry is not None and entry.state == LIVE:
            return entry.communicator.pg
        if entry is not None and entry.state == ENDED:
            raise GroupMissingError(_has_ended(key))
        created = ", ".join(map(str, self.live())) or "none yet"
        raise GroupMissingError(
            f"Process group for {_in_words(key)} hasn't been created; call "
            f"create_pg({key.as_call()}) first, on every rank of the grid; created so far: "
            f"{created}"
        )

    def live(self) -> dict[GroupKey, Entry]:
        """Return the live entries, by key, in the order of creation."""
        entries = list(self.entries.items())
        return {key: entry for key, entry in entries if entry.state == LIVE}

    def find(self, spec: GroupSpec) -> Entry | None:
        """Return the reserved or live entry of a spec's key, or None if there is none.

        Raises:
            GroupMissingError: The group has ended.
            GroupOptionsError: The entry has other options or groups than the spec.
            GridDestroyedError: The grid was destroyed.
        """
        self.check_alive()
        entry = self.entries.get(spec.key)
        if entry is not None and entry.state == ENDED:
            raise GroupMissingError(_has_ended(spec.key))
        if entry is not None:
            entry.spec.check_same(spec)
        return entry

    def find_shared(self, spec: GroupSpec) -> Communicator | None:
        """Return a communicator that can serve a spec with `share="identical"`, or None.

        A communicator of the lender is preferred.
        """
        lent = None if self.lender is None else self.lender().find_shared(spec)
        if lent is not None:
            return lent
        for entry in list(self.entries.values()):
            is_shared = entry.spec.share == "identical" and entry.state != ENDED
            communicator = entry.communicator
            if is_shared and communicator.is_owned and communicator.spec.can_serve(spec):
                return communicator
        return None

    def adopt(self, dim: str, pg: ProcessGroup | None) -> None:
        """Add an entry for the group over a dim. A DeviceMesh owns this group."""
        spec = attrs.evolve(
            self.resolve(GroupRequest(dim)),
            options=GroupOptions(backend=None if pg is None else torchdist.backend_of(pg)),
            strategy="adopted",
            reason="a DeviceMesh created it, and remains its owner",
        )
        communicator = Communicator(spec, pg, is_created=True, is_owned=False)
        entry = Entry(self, spec, communicator, LIVE)
        communicator.users[entry] = None
        self.entries[spec.key] = entry

    def explain(self, request: GroupRequest) -> Explanation:
        """Return an explanation of how a group was created, or would be created."""
        key, view = self.find_key(request.dims, request.name, request.view)
        entry = self.entries.get(key)
        if entry is None and self.world is None:
            layout = self.layout if key.view is None or view is None else view.layout
            backend = request.options(self.options.of_groups).backend
            groups = request.find_groups(key, layout)
            reason = "torch.distributed is not initialised"
            return Explanation(key, groups, backend, "enumerate", reason, {}, None)
        spec = self.resolve(request) if entry is None else entry.spec
        communicator = None if entry is None else entry.communicator
        if entry is None and spec.share == "identical":
            communicator = self.find_shared(spec)
        served_by = None
        creator = entry if communicator is None else next(iter(communicator.users))
        if creator is not None and creator is not entry:
            served_by = str(creator.spec.key) if creator.table is self else "another grid"
        return Explanation.of(spec, served_by)

    # ---- scopes ---------------------------------------------------------------------------------

    def scope_of(self, spec: GroupSpec) -> Scope | None:
        """Return the ranks that must meet to create a group, or None if this rank need not."""
        world = spec.world
        if spec.strategy != "local":
            return self.identity.scope(world, f"{spec.title}/all", range(world.size))
        if self.options.verify:
            return self.grid_scope(world)
        if spec.own is None:
            return None
        index, ranks = spec.own
        return self.identity.scope(world, f"{spec.title}/{index}", ranks)

    def grid_scope(self, world: World) -> Scope:
        """Return the scope of the calls that all ranks of the grid make."""
        return self.identity.scope(world, "calls")

    @property
    def needs_all_ranks(self) -> bool:
        """Whether every rank of the world takes part when the grid creates groups."""
        return self.options.creation in ("split", "enumerate")

    def reshape_scope(self, world: World, ranks: Iterable[int] | None) -> Scope:
        """Return the scope of a reshape: all ranks of the grid, or the ranks that continue."""
        if ranks is None:
            return self.grid_scope(world)
        # All lists of ranks use the same scope, so a meeting of one list excludes other ranks.
        return self.identity.scope(world, "continues", tuple(sorted(ranks)), is_fenced=True)

    # ---- changes --------------------------------------------------------------------------------

    def reserve(self, spec: GroupSpec, communicator: Communicator | None = None) -> Entry:
        """Add an entry for the key of a spec, in the state "reserved".

        Args:
            spec: The spec.
            communicator: A communicator that can serve the spec. Default: an existing communicator
                that can be shared, or else a new communicator.

        Raises:
            GroupExistsError: The key already has an entry.
            GroupOptionsError: The backend cannot run here.
            CreationError: Another thread reshapes the grid.
        """
        if self.is_reshaping:
            self.check_steady()  # raises
        key = spec.key
        existing = self.entries.get(key)
        if existing is not None:
            raise GroupExistsError(_is_taken(existing))
        if spec.options.backend != spec.world.backend:
            check_backend(spec.options.backend)
        if spec.strategy == "enumerate":
            self._warn_of_enumeration(spec)
        if communicator is None and spec.share == "identical":
            communicator = self.find_shared(spec)
        if communicator is None:
            communicator = Communicator(spec)
        entry = Entry(self, spec, communicator)
        communicator.users[entry] = None
        self.entries[key] = entry
        return entry

    def _warn_of_enumeration(self, spec: GroupSpec) -> None:
        asked_for = spec.given.creation or self.options.creation
        if asked_for == "auto" and spec.reason not in self._warned:
            self._warned.add(spec.reason)
            logger.warning("creating groups by enumeration: %s", spec.reason)

    def release(self, entries: Iterable[Entry]) -> list[ProcessGroup]:
        """Remove entries; return the process groups that no entry uses any more."""
        unused: list[ProcessGroup] = []
        for entry in entries:
            key = entry.spec.key
            if self.entries.get(key) is not entry:
                continue
            del self.entries[key]
            communicator = entry.communicator
            del communicator.users[entry]
            is_unused = not communicator.users and communicator.is_owned
            if is_unused and communicator.pg is not None:
                unused.append(communicator.pg)
        return unused

    def remove(self, key: GroupKey) -> None:
        """Remove a key, and destroy its group unless the group also serves other keys."""
        self.get(key)
        self.check_steady()
        with _lock:
            entry = self.entries.get(key)
            unused = [] if entry is None else self.release([entry])
        torchdist.destroy(unused)

    def end_groups(self) -> None:
        """Abort the groups that no other grid uses, and keep their keys for a reshape.

        Groups that can be reconfigured remain, with the calling rank as their only member.
        """
        unused: list[ProcessGroup] = []
        isolated: list[ProcessGroup] = []
        with _lock:
            for entry in self.live().values():
                communicator = entry.communicator
                if not communicator.is_owned or not communicator.is_only_of(self):
                    continue
                entry.state = ENDED
                pg = communicator.pg
                if pg is None:
                    continue
                if communicator.spec.options.enable_reconfigure:
                    isolated.append(pg)
                else:
                    communicator.pg = None
                    unused.append(pg)
        with contextlib.ExitStack() as endings:  # calls every callback, even after an error
            endings.callback(torchdist.abort, list(dict.fromkeys(reversed(unused))))
            for pg in dict.fromkeys(isolated):
                endings.callback(torchdist.isolate, pg)

    def end(self, ending: Callable[[Iterable[ProcessGroup]], None]) -> None:
        """Destroy or abort the groups that no other grid uses, the last group first."""
        self.is_destroyed = True
        unused = self._release_all()
        if os.getpid() == self._process:
            ending(unused)

    def forget(self) -> None:
        """Abort all groups and release their keys, because the world begins a new incarnation."""
        torchdist.abort(self._release_all())

    def _release_all(self) -> list[ProcessGroup]:
        with _lock:
            return self.release(reversed(list(self.entries.values())))

    def leaked(self) -> list[GroupKey]:
        """Return the keys of groups that still exist although the grid should have ended them."""
        if os.getpid() != self._process or torchdist.is_patched_world():
            return []
        found = []
        for key, entry in self.live().items():
            pg = entry.communicator.pg
            if entry.communicator.is_owned and pg is not None and torchdist.is_registered(pg):
                found.append(key)
        return found

    @contextlib.contextmanager
    def reshaping(self) -> Iterator[None]:
        """Forbid the creation and destruction of groups within a `with` block.

        Raises:
            CreationError: Another thread reshapes the grid.
        """
        with _lock:
            self.check_steady()
            self.is_reshaping = True
        try:
            yield
        finally:
            self.is_reshaping = False

    # ---- checks ---------------------------------------------------------------------------------

    def check_steady(self) -> None:
        """Raise if another thread reshapes the grid, because the reshape would undo any change."""
        if self.is_reshaping:
            raise CreationError(
                "another thread is reshaping this grid; wait until the reshape is done, and use "
                "the new dims"
            )

    def check_alive(self) -> None:
        """Raise if the grid was destroyed, or was built in the parent of this forked process."""
        if os.getpid() != self._process:
            raise GridDestroyedError(
                f"this grid ({self.layout}) was built in process {self._process}, and its process "
                f"groups do not work in this forked process; call init_process_group() in this "
                f"process, and build a new grid"
            )
        if self.is_destroyed:
            raise GridDestroyedError(f"this grid ({self.layout}) was destroyed; build a new one")

    def check_usable(self) -> None:
        """Raise if the grid is not alive, or if its job has ended.

        Raises:
            GridDestroyedError: See `check_alive`.
            NotInitializedError: torch.distributed was initialised when the grid was built, but no
                longer is.
        """
        if self.is_destroyed or os.getpid() != self._process:
            self.check_alive()  # raises
        if self.given_world is None and self.origin is not None and dist.group.WORLD is None:
            torchdist.world_group()  # raises

    def check_settled(self) -> None:
        """Raise if other threads are creating groups.

        Raises:
            CreationError: The message names the groups.
        """
        entries = list(self.entries.items())
        waiting = [str(key) for key, entry in entries if entry.state == RESERVED]
        if waiting:
            raise CreationError(
                f"other threads are creating the process groups over {', '.join(waiting)}; reshape "
                f"the grid after these calls"
            )

    def check_outlasts(self, timeout: timedelta) -> None:
        """Raise unless a timeout is longer than the timeout of each live group.

        Other ranks may wait in a collective until the timeout of its group.

        Raises:
            GroupOptionsError: The message names the group with the longest timeout.
        """
        limits: dict[GroupKey, float] = {}
        for key, entry in self.live().items():
            spec = entry.communicator.spec
            # Groups that can be reconfigured end their collectives as soon as one member leaves.
            if not spec.options.enable_reconfigure:
                limits[key] = spec.world.limit_s(spec.options.timeout)
        longest = max(limits, key=lambda key: limits[key], default=None)
        if longest is None or timeout.total_seconds() > limits[longest] or limits[longest] == inf:
            return
        raise GroupOptionsError(
            f"timeout={timeout} is too short: other ranks may wait in the process groups over "
            f"{longest} for {timedelta(seconds=limits[longest])}, and would count as lost; pass "
            f"more than timedelta(seconds={limits[longest]:g}), or create groups with a shorter "
            f"timeout"
        )


# ---- reservations ------------------------------------------------------------------------------


def reserve(
    wanted: Sequence[tuple[GroupTable, GroupSpec]],
    kept: Mapping[GroupKey, Communicator] | None = None,
) -> list[Entry]:
    """Reserve keys, all of them or none. The caller settles the entries.

    Args:
        wanted: The specs of the keys, with their tables.
        kept: Maps keys to existing communicators that serve them.

    Returns:
        The entries, in the order of `wanted`.

    Raises:
        GroupExistsError: A key has an entry.
    """
    while True:
        with _lock:
            other = _created_elsewhere(wanted)
            if other is None:
                return _reserve_all(wanted, kept or {})
        other.wait_until_settled()


def _created_elsewhere(wanted: Sequence[tuple[GroupTable, GroupSpec]]) -> Entry | None:
    """Return an entry of another thread, which creates a group that one of the keys will share."""
    for table, spec in wanted:
        if spec.share == "identical":
            communicator = table.find_shared(spec)
            if communicator is not None and not communicator.is_created:
                return next(iter(communicator.users))
    return None


def _reserve_all(
    wanted: Sequence[tuple[GroupTable, GroupSpec]], kept: Mapping[GroupKey, Communicator]
) -> list[Entry]:
    entries: list[Entry] = []
    try:
        for table, spec in wanted:
            entries.append(table.reserve(spec, kept.get(spec.key)))
    except BaseException:
        for entry in entries:
            entry.settle()
        raise
    return entries


def enter(
    entries: Iterable[Entry], made: Mapping[Communicator, ProcessGroup | None]
) -> list[ProcessGroup]:
    """Make reserved entries live.

    Args:
        entries: The entries, in the order of creation.
        made: Maps communicators to the process groups that were created for them.

    Returns:
        The process groups whose entries another thread has removed in the meantime.
    """
    with _lock:
        for communicator, pg in made.items():
            communicator.pg = pg
        for entry in entries:
            entry.communicator.is_created = True
            key = entry.spec.key
            known = entry.table.entries
            if known.get(key) is entry:
                entry.state = LIVE
                known[key] = known.pop(key)
        unused = []
        for communicator, pg in made.items():
            if pg is not None and not communicator.users:
                unused.append(pg)
        return unused


# ---- the texts of errors -----------------------------------------------------------------------


def _is_taken(entry: Entry) -> str:
    key = entry.spec.key
    if entry.state == ENDED:
        return _has_ended(key)
    if entry.state == RESERVED:
        return f"another thread is creating the process group {key.as_call()}; wait for it"
    return (
        f"Process group {_in_words(key)} has already been created; get it with "
        f"get_pg({key.as_call()}), use ensure_pg to create it only once, or pass another name=..."
    )


def _has_ended(key: GroupKey) -> str:
    return (
        f"survivors() has ended the process group over {key.as_call()}; call "
        f"reshape(target, ranks=...) with the ranks that survivors() returned"
    )


def _in_words(key: GroupKey) -> str:
    """Return the key as Megatron's errors write it."""
    view = f" for view {key.view!r}" if key.view else ""
    return attrs.evolve(key, view=None).as_call() + view
