"""Creates process groups: a single group, several groups in one call, or the groups of a reshape.

    spec = table.resolve(request)                   find the groups, options and strategy
    scope = table.scope_of(spec)                    find the ranks that must agree
    with reserved([(table, spec)]) as entries:      reserve keys, and release them after an error
        Creation(...).run()                         agree, create the groups, make entries live

Entries become live once all ranks have agreed. A call that fails on one rank fails on all ranks,
and changes nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import attrs
from torch.distributed import ProcessGroup

from hypercomm.errors import CreationError, GroupExistsError
from hypercomm.process_groups import torch_internals as torchdist
from hypercomm.process_groups.agreement.driver import Result, Round, agree, limit_of, refusing
from hypercomm.process_groups.agreement.protocol import as_entry
from hypercomm.process_groups.agreement.scope import Scope
from hypercomm.process_groups.spec import BoundRequest, GroupKey, GroupSpec
from hypercomm.process_groups.strategies import connects, create_group, discard
from hypercomm.process_groups.table import LIVE, Communicator, Entry, GroupTable, enter, reserved


def create(table: GroupTable, spec: GroupSpec) -> ProcessGroup | None:
    """Create a group together with its other members. A call that fails changes nothing.

    Raises:
        GroupExistsError: The key already has an entry.
        PlanMismatchError, GroupCreationTimeout, LateRankError, CreationError: See `agree`.
    """
    with reserved([(table, spec)]) as entries:
        communicator = entries[0].communicator
        scope = None if communicator.is_created else table.scope_of(spec)
        title = f"create_pg({spec.key.as_call()}) of {table.label}"
        limit_s = limit_of(spec.options.timeout, spec.world)
        Creation(scope, title, entries, limit_s).run().get()
    return communicator.pg


def ensure(table: GroupTable, spec: GroupSpec) -> ProcessGroup | None:
    """Create a group at the first call, and return the same group in later calls.

    Raises:
        GroupOptionsError: The group was created with other options, or for other ranks.
        Exception: The errors of `create`.
    """
    while True:
        entry = table.find(spec)
        if entry is None:
            with contextlib.suppress(GroupExistsError):  # another thread was faster
                return create(table, spec)
            continue
        entry.settled.wait()  # if another thread fails to create the group, this thread tries again
        if entry.state == LIVE:
            return entry.communicator.pg


def create_all(
    scope: Scope,
    title: str,
    find: Callable[[], Sequence[tuple[GroupTable, BoundRequest]]],
    labels: Mapping[GroupTable, str] | None = None,
) -> list[Entry]:
    """Create several groups in order, on all ranks of a scope or on none.

    Args:
        scope: The ranks.
        title: The call, as users know it.
        find: Returns the requests. If it raises, the call also fails on the other ranks.
        labels: The name of each grid, if the groups belong to several grids.

    Returns:
        The entry of each request.

    Raises:
        GroupExistsError: A key is requested twice, or already has an entry.
        PlanMismatchError: Another rank creates other groups.
        CreationError: Another rank failed.
        GroupCreationTimeout: Ranks are missing. The message names these ranks.
    """
    with contextlib.ExitStack() as stack:
        with refusing(scope):
            wanted = [(table, table.resolve(request)) for table, request in find()]
            _check_once(wanted)
            for _, spec in wanted:
                check_strategy(spec, len(scope.ranks))
            entries = stack.enter_context(reserved(wanted))
        if entries:
            limits = [limit_of(spec.options.timeout, spec.world) for _, spec in wanted]
            Creation(scope, title, entries, max(limits), labels or {}).run().get()
    return entries


def check_strategy(spec: GroupSpec, ranks: int) -> None:
    """Raise if the strategy of a spec needs ranks that do not take part in a call.

    Args:
        spec: The spec.
        ranks: The number of ranks that take part.

    Raises:
        CreationError: Ranks are missing. The message names a strategy that works without them.
    """
    size = spec.world.size
    if spec.strategy != "local" and ranks < size:
        raise CreationError(
            f"the process groups over {spec.key} would be created with "
            f"creation={spec.strategy!r}, which needs every rank of the world, but {size - ranks} "
            f"of the {size} ranks do not take part; use creation='local', or pass "
            f"creation={spec.strategy!r} to the grid, so that its calls wait for all ranks"
        )


def _check_once(wanted: Sequence[tuple[GroupTable, GroupSpec]]) -> None:
    """Raise if a key is requested twice."""
    positions: dict[GroupTable, list[GroupKey]] = {}
    for table, spec in wanted:
        keys = positions.setdefault(table, [])
        if spec.key in keys:
            raise GroupExistsError(
                f"{spec.key.as_call()} is requested twice in one call, at positions "
                f"{keys.index(spec.key)} and {len(keys)}; remove one of the requests, or give it "
                f"another name=..."
            )
        keys.append(spec.key)


def verify(table: GroupTable, timeout: timedelta | None) -> None:
    """Wait for all ranks of the grid, and check that they have the same groups."""
    table.check_alive()
    world = table.live_world()
    specs = [entry.spec for entry in list(table.entries.values())]

    def proposal() -> list[str]:
        return ["verify()", *sorted(map(describe, specs))]

    title = f"verify() of {table.label}"
    agree(table.grid_scope(world), title, proposal, limit_of(timeout, world)).get()


def describe(spec: GroupSpec) -> str:
    """Return a spec as one entry of a proposal. The entry must be equal on all ranks."""
    request = spec.request
    options = spec.options
    members = ""
    if request.derive is not None:  # otherwise the dims determine the groups
        members = f" (members {spec.groups.digest()})"
    view = "" if request.view is None else f" in view {request.view}"
    return as_entry(
        f"{spec.title} over {spec.groups!r}{members}{view}",
        {
            "backend": options.backend,
            "timeout": request.options.timeout,
            "pg_options": type(options.pg_options).__name__,
            "group_desc": repr(spec.group_desc),
            "share": request.share,
            "creation": spec.strategy,
            "lazy_init": options.lazy_init,
            "enable_reconfigure": options.enable_reconfigure or None,
        },
    )


@attrs.define(eq=False)
class Creation:
    """Creates groups on several ranks: all groups on all ranks, or none.

    Attributes:
        scope: The ranks that take part, or None if the calling rank does not.
        title: The call, as users know it.
        entries: The reserved entries, in the order of creation.
        limit_s: The time within which all ranks must finish, in seconds.
        labels: The name of each grid, if the entries belong to several grids.
        preamble: Lines of the proposal that precede the groups.
        prepare: Called once all required ranks have arrived, before the groups are created.
        then: Called when the groups are in their tables, even if this rank is interrupted.
    """

    scope: Scope | None
    title: str
    entries: Sequence[Entry]
    limit_s: float
    labels: Mapping[GroupTable, str] = attrs.field(factory=dict)
    preamble: Sequence[str] = ()
    prepare: Callable[[], None] | None = None
    then: Callable[[], None] | None = None
    _made: dict[Communicator, ProcessGroup | None] = attrs.field(factory=dict, init=False)
    _unused: list[ProcessGroup] = attrs.field(factory=list, init=False)

    def run(self) -> Result[None]:
        """Agree with the other ranks, create the groups, and enter them into their tables.

        Returns:
            A result without a value. It holds the exception that interrupted this rank after all
            ranks had agreed, if there was one.

        Raises:
            PlanMismatchError, GroupCreationTimeout, LateRankError, CreationError: See `agree`.
                Nothing has changed.
            GridDestroyedError: Another thread has destroyed the grid since the call began.
        """
        result = Result(None)
        if self.scope is None:
            self.commit()
        else:
            result = agree(
                self.scope,
                self.title,
                self.proposal,
                self.limit_s,
                self.work,
                self.undo,
                self.commit,
                is_connecting=connects(entry.spec for entry in self.entries),
            )
        torchdist.destroy(self._unused)
        for entry in self.entries:
            entry.table.check_alive()
        return result

    def proposal(self) -> list[str]:
        """Return the proposal of this rank. Proposals must be equal on all ranks."""
        lines = list(self.preamble)
        for entry in self.entries:
            text = describe(entry.spec)
            lines.append(f"{self.labels[entry.table]}: {text}" if self.labels else text)
        return lines

    def work(self, current: Round) -> None:
        """Create the groups of the calling rank, in order.

        The names of groups are the same on all ranks, and new in each call.
        """
        if self.prepare is not None:
            self.prepare()
        missing: dict[Communicator, GroupTable] = {}
        for entry in self.entries:
            if not entry.communicator.is_created:
                missing.setdefault(entry.communicator, entry.table)
        with contextlib.ExitStack() as stack:
            if len(missing) > 1:
                stack.enter_context(torchdist.one_device(self._undo_gloo))
            for communicator, table in missing.items():
                current.check()
                spec = communicator.spec
                title = f"{self.labels[table]}: {spec.title}" if self.labels else spec.title
                pg = create_group(spec, f"{current.name}/{title}", current, communicator.former)
                self._made[communicator] = pg

    def undo(self) -> None:
        """Destroy the groups that were created, but not the groups that were reconfigured."""
        self._discard(list(self._made))

    def commit(self) -> None:
        """Enter the groups into their tables."""
        self._unused = enter(self.entries, self._made)
        if self.then is not None:
            self.then()

    def _undo_gloo(self) -> None:
        """Destroy the gloo groups that were created."""
        found = []
        for communicator, pg in self._made.items():
            if pg is not None and torchdist.backend_of(pg) == "gloo":
                found.append(communicator)
        self._discard(found)

    def _discard(self, communicators: Sequence[Communicator]) -> None:
        made = [self._made.pop(one, None) for one in communicators]
        formers = [one.former for one in communicators if one.former is not None]
        if self.scope is not None:
            discard(made, formers)
