"""Creates process groups: one, several in one call, and the groups of a reshape.

    spec = table.resolve(request)                   values only: groups, options, strategy
    scope = table.scope_of(spec)                    the ranks that must agree
    with reserved([(table, spec)]) as entries:      released if anything below fails
        Creation(...).run()                         agree, ask torch, and enter the groups

Entries are registered once all ranks agree, so that a call which fails on one rank fails on all of
them, and leaves what there was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

import attrs
from torch.distributed import ProcessGroup

from hypercomm.errors import GroupExistsError
from hypercomm.process_groups import torch_internals as torchdist
from hypercomm.process_groups.agreement.driver import Result, Round, agree, limit_of, refusing
from hypercomm.process_groups.agreement.protocol import as_entry
from hypercomm.process_groups.agreement.scope import Scope
from hypercomm.process_groups.spec import BoundRequest, GroupKey, GroupSpec
from hypercomm.process_groups.strategies import connects, discard
from hypercomm.process_groups.strategies import create as create_group
from hypercomm.process_groups.table import LIVE, Communicator, Entry, GroupTable, enter, reserved


def create(table: GroupTable, spec: GroupSpec) -> ProcessGroup | None:
    """Create a group with its other members, or leave everything as it was.

    Raises:
        GroupExistsError: The key is taken.
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
    """Create a group at the first call; return the same group afterwards.

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
        entry.settled.wait()  # for another thread, whose creation may fail
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
        find: Returns the requests; if it raises, the call fails on the other ranks too.
        labels: The name of each grid, where there are several.

    Returns:
        The entry of each request.

    Raises:
        GroupExistsError: A key is there twice, or exists.
        PlanMismatchError: Another rank creates something else.
        CreationError: Another rank failed.
        GroupCreationTimeout: A rank is missing; names it.
    """
    with contextlib.ExitStack() as stack:
        with refusing(scope):
            wanted = [(table, table.resolve(request)) for table, request in find()]
            _check_once(wanted)
            entries = stack.enter_context(reserved(wanted))
        if entries:
            limits = [limit_of(spec.options.timeout, spec.world) for _, spec in wanted]
            Creation(scope, title, entries, max(limits), labels or {}).run().get()
    return entries


def _check_once(wanted: Sequence[tuple[GroupTable, GroupSpec]]) -> None:
    """Raise if one call asks for a key twice."""
    positions: dict[GroupTable, list[GroupKey]] = {}
    for table, spec in wanted:
        keys = positions.setdefault(table, [])
        if spec.key in keys:
            raise GroupExistsError(
                f"{spec.key.as_call()} is asked for twice in one call, at positions "
                f"{keys.index(spec.key)} and {len(keys)}; leave one out, or give it a name of its "
                f"own, name=..."
            )
        keys.append(spec.key)


def verify(table: GroupTable, timeout: timedelta | None) -> None:
    """Check that all ranks of the grid have the same groups, and wait for them."""
    table.check_alive()
    world = table.live_world()
    specs = [entry.spec for entry in list(table.entries.values())]

    def proposal() -> list[str]:
        return ["verify()", *sorted(map(describe, specs))]

    title = f"verify() of {table.label}"
    agree(table.grid_scope(world), title, proposal, limit_of(timeout, world)).get()


def describe(spec: GroupSpec) -> str:
    """Return a spec as one entry of a proposal; it must be equal on all ranks."""
    request = spec.request
    options = spec.options
    members = ""
    if request.derive is not None:  # else the dims say all
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
    """Groups that ranks create together: all of them on all ranks, or none.

    Attributes:
        scope: The ranks, or None if the calling rank does not take part.
        title: The call, as users know it.
        entries: The reserved entries, in the order of creation.
        limit_s: Within how many seconds all ranks must have finished.
        labels: The name of each grid, where there are several.
        preamble: Further lines that must be equal on all ranks.
        prepare: Called once all ranks have arrived, before the groups are created.
    """

    scope: Scope | None
    title: str
    entries: Sequence[Entry]
    limit_s: float
    labels: Mapping[GroupTable, str] = attrs.field(factory=dict)
    preamble: Sequence[str] = ()
    prepare: Callable[[], None] | None = None
    _made: dict[Communicator, ProcessGroup | None] = attrs.field(factory=dict, init=False)

    def run(self) -> Result[None]:
        """Agree with the other ranks, create the groups, and enter them.

        Returns:
            A result that holds what interrupted this rank once all ranks agreed.

        Raises:
            PlanMismatchError, GroupCreationTimeout, LateRankError, CreationError: As for
                `agree`; nothing has changed.
            GridDestroyedError: Another thread has destroyed the grid in the meantime.
        """
        result = Result(None)
        if self.scope is not None:
            result = agree(
                self.scope,
                self.title,
                self.proposal,
                self.limit_s,
                self.work,
                self.undo,
                is_connecting=connects(entry.spec for entry in self.entries),
            )
        self.commit()
        return result

    def proposal(self) -> list[str]:
        """Return what must be equal on all ranks."""
        lines = list(self.preamble)
        for entry in self.entries:
            text = describe(entry.spec)
            lines.append(f"{self.labels[entry.table]}: {text}" if self.labels else text)
        return lines

    def work(self, turn: Round) -> None:
        """Create the groups of the calling rank, in order.

        Names of groups are equal on all ranks and new in each call.
        """
        if self.prepare is not None:
            self.prepare()
        missing: dict[Communicator, GroupTable] = {}
        for entry in self.entries:
            if not entry.communicator.is_created:
                missing.setdefault(entry.communicator, entry.table)
        is_batch = len(missing) > 1
        with torchdist.one_device(self._undo_gloo) if is_batch else contextlib.nullcontext():
            for communicator, table in missing.items():
                turn.check()
                spec = communicator.spec
                title = f"{self.labels[table]}: {spec.title}" if self.labels else spec.title
                pg = create_group(spec, f"{turn.name}/{title}", turn, communicator.former)
                self._made[communicator] = pg

    def undo(self) -> None:
        """Destroy what was created, except for groups that existed before."""
        self._discard(list(self._made))

    def commit(self) -> None:
        """Enter the groups; destroy those whose entries another thread has removed.

        Raises:
            GridDestroyedError: Another thread has destroyed the grid.
        """
        enter(self.entries, self._made)
        for entry in self.entries:
            entry.table.check_alive()

    def _undo_gloo(self) -> None:
        made = [(one, pg) for one, pg in self._made.items() if pg is not None]
        self._discard([one for one, pg in made if torchdist.backend_of(pg) == "gloo"])

    def _discard(self, communicators: Sequence[Communicator]) -> None:
        made = [self._made.pop(one, None) for one in communicators]
        formers = [one.former for one in communicators if one.former is not None]
        if self.scope is not None:
            discard(made, formers)
