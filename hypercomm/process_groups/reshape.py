"""Reshaping: the groups of a grid for another layout of the same ranks; what survives is kept.

Groups are created before any is destroyed, and ranks agree before and after the creation. A reshape
that fails on one rank fails on all of them, and leaves what there was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import attrs
from torch.distributed import ProcessGroup

from hypercomm.errors import CreationError
from hypercomm.layout import RankLayout
from hypercomm.layout.difference import Lost
from hypercomm.layout.views import Views
from hypercomm.process_groups import torch_internals as torchdist
from hypercomm.process_groups.agreement.driver import refusing
from hypercomm.process_groups.agreement.grid import GridAgreement
from hypercomm.process_groups.agreement.scope import Scope
from hypercomm.process_groups.creation import Creation
from hypercomm.process_groups.spec import GroupKey, GroupSpec
from hypercomm.process_groups.table import ENDED, LIVE, Communicator, Entry, GroupTable, reserved

_SHARED = "identical"


@attrs.frozen(repr=False)
class Reshaped:
    """The result of a reshape for the process groups of the calling rank; str() returns lines.

    Attributes:
        before: The layout that was.
        after: The layout that is.
        kept: Each key whose group survived, with the key that it had.
        created: The keys whose groups were created, in that order.
        destroyed: The keys whose groups were destroyed, or that no longer exist.
        numbers: Where WORLD was renewed since, the number that each of its ranks had in the
            layout that was; else None.
    """

    before: RankLayout
    after: RankLayout
    kept: tuple[tuple[GroupKey, GroupKey], ...] = ()
    created: tuple[GroupKey, ...] = ()
    destroyed: tuple[GroupKey, ...] = ()
    numbers: tuple[int, ...] | None = None

    def __repr__(self) -> str:
        return (
            f"<Reshaped {self.before} -> {self.after}: {len(self.kept)} kept, "
            f"{len(self.created)} created, {len(self.destroyed)} destroyed>"
        )

    def __str__(self) -> str:
        kept = []
        for new, old in self.kept:
            kept.append(str(new) if new.is_same_to_users(old) else f"{new} (was {old})")
        lines = [
            f"{self.before} -> {self.after}",
            f"  kept: {', '.join(kept) or 'none'}",
            f"  created: {', '.join(map(str, self.created)) or 'none'}",
            f"  destroyed: {', '.join(map(str, self.destroyed)) or 'none'}",
        ]
        lost = self.lost
        return "\n".join([*lines, f"  lost: {lost.words}"] if lost.ranks else lines)

    @property
    def lost(self) -> Lost:
        """The losses due to the ranks that left the grid, in the numbers that they had."""
        after = self.after
        if self.numbers is not None:
            ranks = [self.numbers[rank] for rank in after.ranks]
            after = RankLayout(after.shape, after.dim_names, ranks=ranks)
        return Lost(self.before, after)


def successor(table: GroupTable, identity: GridAgreement, *, keeps: bool) -> GroupTable:
    """Return an empty table for another layout of a grid.

    Args:
        table: The table of the grid.
        identity: The other layout, and what its ranks agree on.
        keeps: Whether the groups of another grid may serve it, as they may serve `table`.
    """
    return GroupTable(
        identity,
        table.creation,
        is_verified=table.is_verified,
        world=table.given_world,
        lender=table.lender if keeps else None,
    )


def reshape(
    old: GroupTable,
    fresh: GroupTable,
    views: Views,
    scope: Scope,
    limit_s: float,
    *,
    keeps: bool,
) -> tuple[Reshaped, BaseException | None]:
    """Create in an empty table what an old one has, for other views, and keep groups that serve.

    Args:
        old: The old table, which keeps what it has.
        fresh: The empty one.
        views: The views of the fresh one.
        scope: The ranks that reshape together.
        limit_s: Seconds within which all must be done.
        keeps: Whether groups may be kept.

    Returns:
        The result for each key, and the exception that interrupted this rank after the agreement.

    Raises:
        PlanMismatchError, GroupCreationTimeout, CreationError: See `agree`. Both tables are as
            they were, except that groups that stay have ended, as after `survivors`.
    """
    world = scope.world
    is_same_world = old.origin is None or old.origin is world
    with contextlib.ExitStack() as stack:
        with refusing(scope):  # it runs functions of the user
            specs = _specs(old, fresh, views)
            for spec in specs:
                _check_strategy(spec, len(scope.ranks))
            kept = _survivors(old, specs) if keeps and is_same_world else {}
            communicators = {key: old.entries[former].communicator for key, former in kept.items()}
            specs = [_adopted(spec, communicators.get(spec.key)) for spec in specs]
            wanted = [(fresh, spec) for spec in specs]
            entries = stack.enter_context(reserved(wanted, communicators))
        staying = {} if keeps else _staying(old, entries)
        preamble = [f"reshape to {fresh.layout.to_json()}"]
        preamble += [f"with view {name}: {view}" for name, view in sorted(views.items())]
        creation = Creation(
            scope,
            f"reshape() of {old.label}",
            entries,
            limit_s,
            preamble=preamble,
            prepare=old.end_groups if staying else None,
        )
        result = creation.run()
    kept |= staying
    gone = list(_gone(old, fresh, kept))
    pairs = tuple((spec.key, kept[spec.key]) for spec in specs if spec.key in kept)
    created = tuple(spec.key for spec in specs if spec.key not in kept)
    numbers = None if is_same_world else world.numbers_in(old.origin)
    reshaped = Reshaped(old.layout, fresh.layout, pairs, created, tuple(gone), numbers)
    return reshaped, result.pending


def _specs(old: GroupTable, fresh: GroupTable, views: Views) -> list[GroupSpec]:
    """Return the specs of the fresh table, in an order that is the same on all ranks."""
    former = sorted((entry.spec for entry in old.entries.values()), key=GroupSpec.sort_key)
    specs = []
    for spec in former:
        key = spec.key
        if not set(key.dims) <= set(views.layout_of(key.view).dim_names):
            continue
        found, dims = views.find(key.dims, key.view)
        view = views.asked(key.view)
        request = attrs.evolve(
            spec.request,
            key=GroupKey(dims, key.name, None if found is None else found.name),
            layout=views.base if found is None else found.layout,
            view=view,
        )
        specs.append(fresh.resolve(request))
    return specs


def _check_strategy(spec: GroupSpec, ranks: int) -> None:
    """Raise if ranks outside of the grid would have to take part in a creation.

    Raises:
        CreationError: With a strategy that works.
    """
    size = spec.world.size
    if spec.strategy != "local" and ranks < size:
        raise CreationError(
            f"the process groups over {spec.key} would be created with "
            f"creation={spec.strategy!r}, which every rank of the world must call, and "
            f"{size - ranks} of its {size} ranks are not among ranks; "
            f"creation='local' creates groups without them"
        )


def _adopted(spec: GroupSpec, communicator: Communicator | None) -> GroupSpec:
    """Return a spec as one of a group that another object owns, if its communicator is such."""
    if communicator is None or communicator.is_owned:
        return spec
    adopted = communicator.spec
    return attrs.evolve(spec, strategy=adopted.strategy, reason=adopted.reason)


def _survivors(old: GroupTable, specs: Sequence[GroupSpec]) -> dict[GroupKey, GroupKey]:
    """Return the new keys whose groups survive, each with its old key, keys that stay first.

    All members of a group decide the same, because they compare the same values.
    """
    live = sorted(old.live().values(), key=lambda entry: str(entry.spec.key))  # threads create
    pairs = [(spec, entry) for spec in specs for entry in live]  # in any order
    pairs.sort(key=lambda pair: not pair[0].key.is_same_to_users(pair[1].spec.key))
    kept: dict[GroupKey, GroupKey] = {}
    uses: dict[Communicator, str] = {}
    for spec, entry in pairs:
        if spec.key in kept or not _survives(entry, spec):
            continue
        communicator = entry.communicator
        shares = {entry.spec.request.share, spec.request.share, uses.get(communicator, _SHARED)}
        is_alone = communicator not in uses and communicator.is_only_of(old)
        if is_alone or shares == {_SHARED}:
            uses[communicator] = spec.request.share
            kept[spec.key] = entry.spec.key
    return kept


def _survives(old: Entry, new: GroupSpec) -> bool:
    """Return whether the group of an old entry is the one that a new key needs."""
    is_same_key = old.spec.key.is_same_to_users(new.key)
    if not old.communicator.is_owned:
        return is_same_key and old.spec.groups == new.groups
    if new.strategy == "local" and old.spec.ranks is new.ranks is None:
        return is_same_key  # this rank has no group, and keeps none
    return old.spec.can_serve(new)


def _staying(old: GroupTable, entries: Sequence[Entry]) -> dict[GroupKey, GroupKey]:
    """Choose the process groups that stay and get other members, for communicators to create.

    Returns:
        Each new key that needs one, with itself.
    """
    candidates: list[Entry] = []
    for entry in old.entries.values():
        communicator = entry.communicator
        if communicator.is_owned and communicator.is_only_of(old):
            candidates.append(entry)
    taken: set[ProcessGroup] = set()
    staying: dict[GroupKey, GroupKey] = {}
    for entry in entries:
        spec = entry.communicator.spec
        is_new = entry.spec is spec
        if not is_new or not spec.options.enable_reconfigure or spec.own is None:
            continue
        for candidate in candidates:
            pg = candidate.communicator.pg
            is_free = pg is not None and pg not in taken and torchdist.is_registered(pg)
            if pg is not None and is_free and candidate.spec.key.is_same_to_users(spec.key):
                entry.communicator.former = pg
                taken.add(pg)
                staying[spec.key] = spec.key
                break
    return staying


def _gone(
    old: GroupTable, fresh: GroupTable, kept: Mapping[GroupKey, GroupKey]
) -> Iterator[GroupKey]:
    """Yield the old keys whose groups end; the old table loses the process groups that stay."""
    live = fresh.live()
    survivors = [entry.communicator for entry in live.values()]
    staying = {one.former for one in survivors if one.former is not None}
    known = [*kept.values(), *live]
    for key, entry in list(old.entries.items()):
        communicator = entry.communicator
        if communicator.pg in staying:
            communicator.pg = None
        elif entry.state == ENDED:
            yield key
        elif entry.state == LIVE:
            is_known = any(key.is_same_to_users(other) for other in known)
            if communicator not in survivors or not is_known:
                yield key
