"""The process groups of one grid: reserved, created, shared between keys, and destroyed once."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from math import inf
from typing import Any

import attrs
from torch.distributed import ProcessGroup

from hypercomm.errors import (
    CreationError,
    GridDestroyedError,
    GroupExistsError,
    GroupMissingError,
    GroupOptionsError,
)
from hypercomm.layout import RankLayout
from hypercomm.process_groups import torch_internals as c10d
from hypercomm.process_groups.agreement.driver import Round, agree, limit_of, refusing
from hypercomm.process_groups.agreement.grid import GridAgreement
from hypercomm.process_groups.agreement.scope import Scope
from hypercomm.process_groups.agreement.system import system
from hypercomm.process_groups.options import GroupOptions, check_backend
from hypercomm.process_groups.spec import Explanation, GroupKey, GroupSpec, check_once, specify
from hypercomm.process_groups.strategies import ADOPTED, connects, create
from hypercomm.process_groups.torch_internals.gloo import one_device
from hypercomm.process_groups.torch_internals.store import forget
from hypercomm.process_groups.world import World, current, current_or_none, rank_in_world

logger = logging.getLogger(__name__)

CREATE = "create_pgs()"


class _ReleasedError(Exception):
    """The key was released while this thread waited for its creation."""


@attrs.define(eq=False, repr=False)
class Group:
    """One process group of the calling rank, and the keys that have it.

    Attributes:
        spec: The spec that it is created from.
        owner: The grid that creates it.
        pg: The process group; None before it is created, and where the rank is not a member.
        is_created: Whether it exists.
        is_owned: Whether a grid created it, and destroys it with its last key.
        is_shared: Whether a key of it was made with share="identical".
        users: The keys that have it, or are to have it, with their grids.
        lock: Held by the thread that creates it.
    """

    spec: GroupSpec
    owner: GroupOwner
    pg: ProcessGroup | None = None
    is_created: bool = False
    is_owned: bool = True
    is_shared: bool = False
    users: dict[tuple[GroupOwner, GroupKey], None] = attrs.field(factory=dict)
    lock: Any = attrs.field(factory=lambda: system.lock())  # noqa: PLW0108


class Pool:
    """The groups that keys of one grid, and of the grids that borrow from it, may share.

    Args:
        lender: The pool of the grid whose groups may serve this one.

    Attributes:
        lock: Held while keys are registered or removed, here and in the lender.
    """

    def __init__(self, lender: Pool | None = None) -> None:
        self.lock: threading.RLock = threading.RLock() if lender is None else lender.lock
        self._lender = lender
        self.groups: dict[Group, None] = {}

    def find(self, spec: GroupSpec) -> Group | None:
        """Return the group of another key that can serve a spec, the lender's first."""
        if spec.share != "identical":
            return None
        shared = [group for group in self.groups if group.is_shared and group.is_owned]
        own = (group for group in shared if group.spec.can_serve(spec))
        return self.lent(spec) or next(own, None)

    def lent(self, spec: GroupSpec) -> Group | None:
        """Return the lender's group that can serve a spec."""
        return None if self._lender is None else self._lender.find(spec)


class GroupOwner:
    """Creates, looks up and destroys the process groups of one grid.

    Args:
        layout: The grid's.
        creation: The strategy: "auto", "local", "split" or "enumerate".
        pool: The groups that keys may share.
        agreement: The keys by which the ranks of the grid agree.
        is_verified: Whether all ranks of the grid agree on each creation, not only the members.
        world: The world that the grid was given; None: the default one, whichever that is.

    Attributes:
        specs: The reserved or created groups, by key.
        groups: The groups of these keys.
        created: The groups that exist, by key, in the order of creation.
        ended: The keys whose groups `end_groups` has ended, with those that can be reconfigured.
        given_world: The world that the grid was given; None: the default one.
        origin: The world whose ranks the layout numbers; None before there is one.
        is_reshaping: Whether a reshape is under way, which would lose what others create.
    """

    def __init__(
        self,
        layout: RankLayout,
        creation: str,
        pool: Pool,
        agreement: GridAgreement,
        *,
        is_verified: bool,
        world: World | None = None,
    ) -> None:
        self.layout = layout
        self.creation = creation
        self.pool = pool
        self.agreement = agreement
        self.is_verified = is_verified
        self.specs: dict[GroupKey, GroupSpec] = {}
        self.groups: dict[GroupKey, Group] = {}
        self.created: dict[GroupKey, Group] = {}
        self.ended: dict[GroupKey, ProcessGroup | None] = {}
        self.is_destroyed = False
        self.is_reshaping = False
        self.given_world = None if world is None or world.is_default else world
        self.origin = self.world
        self._process = os.getpid()
        self._warned: set[str] = set()
        if self.given_world is not None:
            self.given_world.owners.add(self)

    @property
    def world(self) -> World | None:
        """The world of the grid; None before there is one."""
        return self.given_world or current_or_none()

    def rank(self, explicit: int | None = None) -> int:
        """Return the calling rank in the world of the grid, unless another one is given."""
        return rank_in_world(explicit, self.given_world)

    # ---- one group ------------------------------------------------------------------------------

    def create(self, spec: GroupSpec) -> ProcessGroup | None:
        """Create a group, or leave everything as it was."""
        return self.fulfil(spec.key, self.reserve(spec), is_new=True)

    def ensure(self, spec: GroupSpec) -> ProcessGroup | None:
        """Create a group at the first call; return the same group afterwards."""
        while True:
            with self.pool.lock:
                if spec.key in self.ended:
                    raise GroupMissingError(spec.key.says_ended())
                existing = self.specs.get(spec.key)
                if existing is not None:
                    existing.check_same(spec)
                group = self.groups[spec.key] if existing is not None else self.reserve(spec)
            try:
                return self.fulfil(spec.key, group, is_new=existing is None)
            except _ReleasedError:  # by the thread that reserved it, whose creation has failed
                continue

    def reserve(self, spec: GroupSpec) -> Group:
        """Register a key whose group is to be created.

        Raises:
            GroupExistsError: The key is taken.
        """
        self.check_steady()
        if self.origin is not None and spec.options.backend != self.origin.backend:
            check_backend(spec.options.backend)
        strategy, reason = spec.choice
        asked_for = spec.given.creation or self.creation
        if strategy == "enumerate" and asked_for == "auto" and reason not in self._warned:
            self._warned.add(reason)
            logger.warning("creating groups by enumeration: %s", reason)
        with self.pool.lock:
            if spec.key in self.ended:
                raise GroupExistsError(spec.key.says_ended())
            if spec.key in self.specs:
                raise GroupExistsError(spec.key.says_exists(is_created=spec.key in self.created))
            group = self.pool.find(spec) or Group(spec, self)
            self.attach(spec, group)
        return group

    def attach(self, spec: GroupSpec, group: Group) -> None:
        """Register a key with its group."""
        group.users[self, spec.key] = None
        group.is_shared |= spec.share == "identical"
        self.pool.groups[group] = None
        self.specs[spec.key], self.groups[spec.key] = spec, group
        if group.is_created:
            self.created[spec.key] = group

    def fulfil(self, key: GroupKey, group: Group, *, is_new: bool = False) -> ProcessGroup | None:
        """Create the group of a reserved key, unless it exists, and return it.

        Args:
            key: The key.
            group: Its group.
            is_new: Whether this call has reserved the key, and releases it on failure.
        """
        pending: BaseException | None = None
        if not group.is_created:
            releasing = partial(self._releasing, key, group) if is_new else contextlib.nullcontext
            with releasing(), group.lock, releasing():  # the second acts before others go on
                if not is_new and self.groups.get(key) is not group:
                    self.check_alive()
                    raise _ReleasedError
                if not group.is_created:
                    pending = group.owner._create(group)
        with self.pool.lock:
            self.check_alive()
            if self.groups.get(key) is group:
                self.created[key] = group
        if pending is not None:
            raise pending
        return group.pg

    @contextlib.contextmanager
    def _releasing(self, key: GroupKey, group: Group) -> Iterator[None]:
        """Release a key if its creation fails within a `with` block."""
        try:
            yield
        except BaseException:
            with self.pool.lock:
                if key not in self.created and self.groups.get(key) is group:
                    self.release([key])
            raise

    def _create(self, group: Group) -> BaseException | None:
        """Create a group with its other members; return what interrupted this rank afterwards."""
        world, spec = self.world, group.spec
        if world is None:  # torch's own function may have been replaced, as in tests
            group.pg, group.is_created = create(spec, str(spec.key), None, []), True
            return None
        scope = self._scope(spec, world)
        if scope is None:  # this rank is not a member
            group.is_created = True
            return None
        made: list[ProcessGroup | None] = []

        def work(turn: Round) -> None:
            made.append(create(spec, self._name(spec, scope, turn), turn, scope.memory.stale))

        def undo() -> None:
            discard(made, scope)

        title = f"create_pg({spec.key.as_call()}) of {self.layout}"
        limit_s = limit_of(spec.options.timeout, world)
        result = agree(
            scope,
            title,
            lambda: [spec.describe()],
            limit_s,
            work,
            undo,
            is_connecting=connects([spec]),
        )
        self.register([group], made)
        return result.pending

    def _scope(self, spec: GroupSpec, world: World) -> Scope | None:
        """Return the ranks that create a group together; None where this rank takes no part."""
        if spec.choice.strategy != "local":
            return self.agreement.scope(world, f"{spec.key}/all", range(world.size))
        if self.is_verified:
            return self.grid_scope(world)
        if spec.own is None:
            return None
        index, ranks = spec.own
        return self.agreement.scope(world, f"{spec.key}/{index}", ranks)

    def grid_scope(self, world: World) -> Scope:
        """Return the scope of the calls that all ranks of the grid make."""
        return self.agreement.scope(world, "calls")

    def _name(self, spec: GroupSpec, scope: Scope, turn: Round) -> str:
        record = scope.path.rpartition("/")[2]
        return turn.name if record.isdecimal() else f"{turn.name}/{spec.key}"

    def register(self, groups: Iterable[Group], made: Iterable[ProcessGroup | None]) -> None:
        """Note that groups exist; destroy those that no key has any more."""
        unused = []
        with self.pool.lock:
            for group, pg in zip(groups, made, strict=True):
                group.pg, group.is_created = pg, True
                for owner, key in list(group.users):
                    owner.created.setdefault(key, group)
                if not group.users and pg is not None:
                    unused.append(pg)
        if unused:
            c10d.destroy(unused)

    def release(self, keys: Iterable[GroupKey]) -> list[ProcessGroup]:
        """Remove keys; return the process groups that no key has any more."""
        unused = []
        with self.pool.lock:
            for key in keys:
                group = self.groups.pop(key, None)
                self.specs.pop(key, None)
                self.created.pop(key, None)
                if group is None:
                    continue
                group.users.pop((self, key), None)
                if group.users:
                    continue
                self.pool.groups.pop(group, None)
                if group.owner is not self:
                    group.owner.pool.groups.pop(group, None)
                pg, group.is_created = group.pg, False
                if pg is not None and group.is_owned:
                    unused.append(pg)
        return unused

    def get(self, key: GroupKey) -> ProcessGroup | None:
        """Return the group of a key.

        Raises:
            GroupMissingError: It was not created.
        """
        try:
            return self.created[key].pg
        except KeyError:
            if key in self.ended:
                raise GroupMissingError(key.says_ended()) from None
            raise GroupMissingError(key.says_missing(self.created)) from None

    def adopt(self, dim: str, pg: ProcessGroup | None) -> None:
        """Register a group that another object owns."""
        options = GroupOptions(backend=None if pg is None else c10d.backend_of(pg))
        spec = specify(
            *(GroupKey((dim,)), None, self.layout, None, GroupOptions(), "never"),
            *(self.creation, None),
        )
        spec = attrs.evolve(spec, options=options, choice=ADOPTED)
        self.attach(spec, Group(spec, self, pg, is_created=True, is_owned=False))

    def remove(self, key: GroupKey) -> None:
        """Destroy one group, unless it serves other keys too."""
        self.get(key)
        self.check_steady()
        c10d.destroy(self.release([key]))

    def explain(self, spec: GroupSpec) -> Explanation:
        """Return how a group was created, or would be, and why."""
        group = self.groups.get(spec.key) or self.pool.find(spec)
        spec, served_by = self.specs.get(spec.key, spec), None
        owner, key = (self, spec.key) if group is None else next(iter(group.users))
        if owner is not self or key != spec.key:
            served_by = str(key) if owner is self else "another grid"
        return Explanation.of(spec, served_by)

    # ---- with all ranks -------------------------------------------------------------------------

    def verify(self, timeout: timedelta | None) -> None:
        """Check that all ranks of the grid have the same groups, and wait for them."""
        self.check_alive()
        with self.pool.lock:
            entries = sorted(spec.describe() for spec in self.specs.values())
        world = self.world or current()
        agree(
            self.grid_scope(world),
            f"verify() of {self.layout}",
            lambda: ["verify()", *entries],
            limit_of(timeout, world),
        ).get()

    # ---- the end --------------------------------------------------------------------------------

    def check_outlasts(self, timeout: timedelta) -> None:
        """Raise unless a timeout is longer than those of the groups, in which peers may wait.

        Raises:
            GroupOptionsError: Names the longest one.
        """
        limits = {
            key: limit_of(group.spec.options.timeout, self.world)
            for key, group in self.created.items()
            if not group.spec.options.enable_reconfigure  # peers fail as soon as one calls this
        }
        longest = max(limits, key=lambda key: limits[key], default=None)
        if longest is None or timeout.total_seconds() > limits[longest] or limits[longest] == inf:
            return
        raise GroupOptionsError(
            f"timeout={timeout} is too short: other ranks may wait in the process groups over "
            f"{longest} for {timedelta(seconds=limits[longest])}, and would be left behind; pass "
            f"more than timedelta(seconds={limits[longest]:g}), or create groups with a shorter "
            f"timeout"
        )

    def end_groups(self) -> None:
        """Abort the groups that no other grid has, and keep their keys for a reshape.

        Groups that can be reconfigured stay, with the calling rank as their only member.
        """
        unused: list[ProcessGroup] = []
        isolated: list[ProcessGroup] = []
        with self.pool.lock:
            for key, group in list(self.created.items()):
                if not group.is_owned or any(owner is not self for owner, _ in group.users):
                    continue
                del self.created[key]
                pg, group.pg, group.is_created = group.pg, None, False
                stays = group.spec.options.enable_reconfigure
                self.ended[key] = pg if stays else None
                if pg is not None:
                    (isolated if stays else unused).append(pg)
        with contextlib.ExitStack() as endings:  # each is called, also after an error
            endings.callback(c10d.abort, reversed(unused))
            for pg in isolated:
                endings.callback(c10d.isolate, pg)

    def _release_all(self) -> list[ProcessGroup]:
        """Release all keys; return the groups that no other grid has, the last one first."""
        unused = self.release(dict.fromkeys([*reversed(self.created), *self.specs]))
        unused += [pg for pg in self.ended.values() if pg is not None]
        self.ended = dict.fromkeys(self.ended)
        return unused

    def end(self, ending: Callable[[Iterable[ProcessGroup]], None]) -> None:
        """Destroy or abort the groups that no other grid has, the last one first."""
        with self.pool.lock:
            self.is_destroyed = True
            unused = self._release_all()
        if os.getpid() == self._process:
            ending(unused)

    def forget(self) -> None:
        """Abort all groups and release their keys: their world has another incarnation."""
        with self.pool.lock:
            unused = self._release_all()
        c10d.abort(unused)

    def live(self) -> list[GroupKey]:
        """Return the keys of the groups that this owner must end."""
        if os.getpid() != self._process or c10d.is_other_world():
            return []
        return [
            key
            for key, group in self.created.items()
            if group.is_owned and group.pg and c10d.is_registered(group.pg)
        ]

    # ---- checks ---------------------------------------------------------------------------------

    def check_steady(self) -> None:
        """Raise if another thread's reshape would lose a change."""
        if self.is_reshaping:
            raise CreationError(
                "another thread reshapes this grid; wait until it is done, and use its new dims"
            )

    def check_alive(self) -> None:
        """Raise if the grid was destroyed, or belongs to the process that forked this one."""
        if os.getpid() != self._process:
            raise GridDestroyedError(
                f"this grid ({self.layout}) was made in process {self._process}, which forked this "
                f"one, and its process groups do not work here; call init_process_group() in this "
                f"process, and make a new grid"
            )
        if self.is_destroyed:
            raise GridDestroyedError(f"this grid ({self.layout}) was destroyed; build a new one")

    def check_numbers(self, world: World) -> None:
        """Raise if the ranks of the world have other numbers than those of the grid."""
        self.origin = self.origin or world
        if world is not self.origin and world.numbers_in(self.origin) is not None:
            raise CreationError(
                f"this grid ({self.layout}) has numbers of ranks from before WORLD was renewed; "
                f"call reshape(target, ranks=...) with those of the new one"
            )


def discard(
    groups: Iterable[ProcessGroup | None], scope: Scope, stay: Collection[ProcessGroup] = ()
) -> None:
    """Destroy what a call has made that fails on other ranks, the last one first; some stay."""
    try:
        c10d.destroy(reversed([group for group in groups if group and group not in stay]))
    finally:
        with contextlib.suppress(RuntimeError):  # the store is gone
            forget(scope.world.store, scope.memory.take_stale())


# ---- several groups in one call ----------------------------------------------------------------


class Batch:
    """Groups of one grid that one call creates, all of them or none.

    Args:
        owner: The owner.
        specs: The groups to create, in order.
    """

    def __init__(self, owner: GroupOwner, specs: Sequence[GroupSpec]) -> None:
        self.owner = owner
        self.specs = specs
        self._reserved: list[GroupKey] = []
        self._new: list[Group] = []
        self._made: list[ProcessGroup | None] = []

    def reserve(self) -> None:
        """Reserve all keys, or none."""
        check_once(self.specs)
        try:
            with self.owner.pool.lock:
                for spec in self.specs:
                    group = self.owner.reserve(spec)
                    self._reserved.append(spec.key)
                    if not group.is_created and group not in self._new:
                        self._new.append(group)
        except BaseException:
            self.release()
            raise

    def entries(self) -> list[str]:
        """Return the entries that must be equal on all ranks."""
        return [spec.describe() for spec in self.specs]

    def limit_s(self) -> float:
        """Return the longest timeout of the groups, in seconds."""
        world = self.owner.world
        return max((limit_of(spec.options.timeout, world) for spec in self.specs), default=0.0)

    def create(self, turn: Round, scope: Scope, grid: str) -> None:
        """Create the groups in order, named by the call and the name of the grid in it."""
        prefix = f"{turn.name}/{grid and grid + ': '}"
        for group in self._new:
            turn.check()
            name = f"{prefix}{group.spec.key}"
            pg = create(group.spec, name, turn, scope.memory.stale)
            self._made.append(pg)  # `undo`, which another thread may call, replaces the list

    def is_connecting(self) -> bool:
        """Return whether the creation of a group needs its other members."""
        return connects(group.spec for group in self._new)

    def undo(self, scope: Scope, backend: str | None = None) -> None:
        """Destroy what was created, on one backend or all of it."""
        made = [pg for pg in self._made if pg and backend in (None, c10d.backend_of(pg))]
        self._made = [pg for pg in self._made if pg not in made]
        discard(made, scope)

    def register(self) -> list[ProcessGroup | None]:
        """Register what was created, and return the groups in the order of the specs."""
        self.owner.register(self._new, self._made)
        return [self.owner.fulfil(spec.key, self.owner.groups[spec.key]) for spec in self.specs]

    def release(self) -> None:
        """Release the keys: nothing was created for them."""
        self.owner.release(self._reserved)
        self._reserved, self._new = [], []


def create_all(
    owner: GroupOwner, find: Callable[[], Sequence[GroupSpec]]
) -> list[ProcessGroup | None]:
    """Create several groups in order, on all ranks of the grid or on none.

    Args:
        owner: The owner.
        find: Returns the specs; where it raises, the other ranks hear of it.

    Raises:
        GroupExistsError: A key is there twice, or exists.
        PlanMismatchError: Another rank creates something else.
        CreationError: Another rank failed.
        GroupCreationTimeout: A rank is missing; names it.
    """
    owner.check_alive()
    world = owner.world
    if world is None:
        if not find():
            return []
        world = current()  # raises
    scope = owner.grid_scope(world)
    with refusing(scope):
        specs = find()
        batch = Batch(owner, specs)
        batch.reserve()
    if not specs:
        return []
    return create_batches(scope, CREATE, {"": batch}, batch.limit_s())[""]


def create_batches(
    scope: Scope, title: str, batches: dict[str, Batch], limit_s: float
) -> dict[str, list[ProcessGroup | None]]:
    """Create the groups of reserved batches in one call of a scope, by the name of each batch."""

    def entries() -> list[str]:
        every = [(name, entry) for name, one in batches.items() for entry in one.entries()]
        return [f"{name}: {entry}" if name else entry for name, entry in every]

    def work(turn: Round) -> None:
        with one_device(partial(undo, "gloo")):
            for name, batch in batches.items():
                batch.create(turn, scope, name)

    def undo(backend: str | None = None) -> None:
        for batch in reversed(batches.values()):
            batch.undo(scope, backend)

    is_connecting = any(batch.is_connecting() for batch in batches.values())
    try:
        result = agree(scope, title, entries, limit_s, work, undo, is_connecting=is_connecting)
    except BaseException:
        for batch in batches.values():
            batch.release()
        raise
    created = {name: batch.register() for name, batch in batches.items()}
    result.get()
    return created


@contextlib.contextmanager
def reshaping(owner: GroupOwner) -> Iterator[None]:
    """Forbid the creation and destruction of groups within a `with` block.

    Raises:
        CreationError: Another thread reshapes the grid.
    """
    with owner.pool.lock:
        owner.check_steady()
        owner.is_reshaping = True
    try:
        yield
    finally:
        owner.is_reshaping = False
