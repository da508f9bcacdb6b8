"""Creates process groups: a single group, or several groups in one call.

    spec = table.resolve(request)              find the groups, options and strategy
    entries = reserve([(table, spec)])         reserve the keys, until the entries are settled
    with meet(table.scope_of(spec), ...):      all ranks that must take part have arrived
        create the groups, and enter them into their tables

Until all ranks have arrived, nothing has changed on any rank. If torch fails after that, the groups
of the call are destroyed on this rank, and the error says that all ranks had arrived.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta

from torch.distributed import ProcessGroup

from hypercomm.errors import CreationError, GroupExistsError
from hypercomm.process_groups import torch_internals as torchdist
from hypercomm.process_groups.meeting import Call, Meeting, agree, meet, refusing
from hypercomm.process_groups.spec import GroupKey, GroupRequest, GroupSpec
from hypercomm.process_groups.strategies import create_group
from hypercomm.process_groups.table import LIVE, Communicator, Entry, GroupTable, enter, reserve
from hypercomm.process_groups.world import Scope


def create_one(table: GroupTable, request: GroupRequest) -> ProcessGroup | None:
    """Create a group together with its other members.

    Raises:
        GroupExistsError: The key already has an entry.
        PlanMismatchError, GroupCreationTimeout, LateRankError, CreationError: See `meet`.
    """
    return _create_one(table, table.resolve(request))


def _create_one(table: GroupTable, spec: GroupSpec) -> ProcessGroup | None:
    entries = reserve([(table, spec)])
    communicator = entries[0].communicator
    try:
        scope = None if communicator.is_created else table.scope_of(spec)
        if scope is None:
            enter(entries, {})
        else:
            call = Call(
                spec.facts,
                lambda: f"create_pg({spec.key.as_call()}) of {table.label}",
                lambda: [spec.describe()],
            )
            with meet(scope, call, spec.world.limit_s(spec.options.timeout)) as meeting:
                made = create_group(spec, f"{meeting.name}/{spec.title}", meeting)
                torchdist.destroy(enter(entries, {communicator: made}))
    finally:
        entries[0].settle()
    table.check_alive()
    return communicator.pg


def ensure(table: GroupTable, request: GroupRequest) -> ProcessGroup | None:
    """Create a group at the first call, and return the same group in later calls.

    Raises:
        GroupOptionsError: The group was created with other options, or for other ranks.
        Exception: The errors of `create_one`.
    """
    spec = table.resolve(request)
    while True:
        entry = table.find(spec)
        if entry is None:
            with contextlib.suppress(GroupExistsError):  # another thread was faster
                return _create_one(table, spec)
            continue
        entry.wait_until_settled()  # if another thread fails, this thread tries again
        if entry.state == LIVE:
            return entry.communicator.pg


def create_all(
    scope: Scope,
    title: str,
    find: Callable[[], Sequence[tuple[GroupTable, GroupRequest]]],
    labels: Mapping[GroupTable, str] | None = None,
) -> list[Entry]:
    """Create several groups in order, on all ranks of a scope.

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
    entries: list[Entry] = []
    try:
        with refusing(scope):
            wanted = [(table, table.resolve(request)) for table, request in find()]
            _check_once(wanted)
            for _, spec in wanted:
                check_strategy(spec, len(scope.ranks))
            entries = reserve(wanted)
        if entries:
            limit_s = max(spec.world.limit_s(spec.options.timeout) for _, spec in wanted)
            with meet(scope, batch_call(title, entries, labels), limit_s) as meeting:
                create_entries(meeting, entries, labels)
    finally:
        for entry in entries:
            entry.settle()
    for entry in entries:
        entry.table.check_alive()
    return entries


def batch_call(
    title: str,
    entries: Sequence[Entry],
    labels: Mapping[GroupTable, str] | None = None,
    preamble: Sequence[str] = (),
) -> Call:
    """Return the call that creates several groups.

    Args:
        title: The call, as users know it.
        entries: The reserved entries, in the order of creation.
        labels: See `create_all`.
        preamble: Lines that precede the groups.
    """
    names = [f"{labels[entry.table]}: " if labels else "" for entry in entries]

    def describe() -> list[str]:
        pairs = zip(names, entries, strict=True)
        return [*preamble, *(name + entry.spec.describe() for name, entry in pairs)]

    return Call(
        ([*preamble], names, [entry.spec.facts for entry in entries]), lambda: title, describe
    )


def create_entries(
    meeting: Meeting,
    entries: Sequence[Entry],
    labels: Mapping[GroupTable, str] | None = None,
    *,
    confirmation: Call | None = None,
) -> None:
    """Create the groups of reserved entries in order, and enter them into their tables.

    If this fails, the groups that were created are destroyed, but not the groups that were
    reconfigured. The names of groups are the same on all ranks, and new in each call.

    Args:
        meeting: The meeting of the ranks.
        entries: The entries.
        labels: See `create_all`.
        confirmation: A call with which the ranks meet again when they have created their groups,
            before they enter them. Default: they do not meet again.
    """
    made: dict[Communicator, ProcessGroup | None] = {}
    base = meeting.name
    are_created = False
    try:
        for entry in entries:
            communicator = entry.communicator
            if not communicator.is_created and communicator not in made:
                spec = communicator.spec
                title = f"{labels[entry.table]}: {spec.title}" if labels else spec.title
                former = communicator.former
                made[communicator] = create_group(spec, f"{base}/{title}", meeting, former)
        are_created = True
        if confirmation is not None:
            meeting.again(confirmation)
    except BaseException as error:
        _discard(made)
        if confirmation is not None and not are_created:
            meeting.refuse(error)
        raise
    torchdist.destroy(enter(entries, made))


def _discard(made: Mapping[Communicator, ProcessGroup | None]) -> None:
    """Destroy groups, the last one first, but not the groups that were reconfigured."""
    stay = [one.former for one in made]
    groups = [pg for pg in made.values() if pg and pg not in stay]
    torchdist.destroy(reversed(groups))


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
    entries = ["verify()", *sorted(spec.describe() for spec in specs)]
    agree(table.grid_scope(world), f"verify() of {table.label}", entries, world.limit_s(timeout))
