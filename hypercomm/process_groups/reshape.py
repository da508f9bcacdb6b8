"""Reshapes a grid: creates its groups for another layout, and keeps the groups that still fit.

New groups are created before old ones are destroyed. A reshape that fails on one rank fails on all
ranks, and changes nothing.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs
from torch.distributed import ProcessGroup

from hypercomm.layout import RankLayout
from hypercomm.layout.difference import Lost
from hypercomm.layout.views import Views
from hypercomm.process_groups import torch_internals as torchdist
from hypercomm.process_groups.agreement.driver import refusing
from hypercomm.process_groups.agreement.grid import GridAgreement
from hypercomm.process_groups.agreement.scope import Scope
from hypercomm.process_groups.creation import Creation, check_strategy
from hypercomm.process_groups.spec import GroupKey, GroupSpec
from hypercomm.process_groups.table import ENDED, LIVE, Communicator, Entry, GroupTable, reserved

_SHARED = "identical"


@attrs.frozen(repr=False)
class Reshaped:
    """The result of a reshape for the calling rank. str() returns the result as lines of text.

    Attributes:
        before: The old layout.
        after: The new layout.
        kept: The new key and the old key of each group that was kept.
        created: The keys of the groups that were created, in the order of creation.
        destroyed: The old keys whose groups were destroyed, and the old keys without a new key.
        numbers: For each rank of the new WORLD, its number in the old layout. None if WORLD was
            not renewed before the reshape.
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
            former = "" if new.is_same_to_users(old) else f" (was {old})"
            kept.append(f"{new}{former}")
        lines = [
            f"{self.before} -> {self.after}",
            f"  kept: {', '.join(kept) or 'none'}",
            f"  created: {', '.join(map(str, self.created)) or 'none'}",
            f"  destroyed: {', '.join(map(str, self.destroyed)) or 'none'}",
        ]
        lost = self.lost
        if lost.ranks:
            lines.append(f"  lost: {lost.words}")
        return "\n".join(lines)

    @property
    def lost(self) -> Lost:
        """The losses due to ranks that left the grid. These ranks have their old numbers."""
        after = self.after
        if self.numbers is not None:
            ranks = [self.numbers[rank] for rank in after.ranks]
            after = RankLayout(after.shape, after.dim_names, ranks=ranks)
        return Lost(self.before, after)


def successor(table: GroupTable, identity: GridAgreement, *, keeps: bool) -> GroupTable:
    """Return an empty table for another layout of a grid.

    Args:
        table: The table of the grid.
        identity: The identity of the grid with that layout.
        keeps: Whether the new table may share communicators with another grid, as `table` may.
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
    switch: Callable[[], None],
) -> tuple[Reshaped, BaseException | None]:
    """Create the keys of an old table in an empty table, and keep the groups that still fit.

    Args:
        old: The old table. Its entries remain, and the caller ends the table.
        fresh: The empty table.
        views: The views of the empty table.
        scope: The ranks that reshape together.
        limit_s: The time within which all ranks must finish, in seconds.
        keeps: Whether groups may be kept.
        switch: Makes the grid use the new table. `switch` is called once all ranks have agreed,
            even if this rank is interrupted.

    Returns:
        The result, and the exception that interrupted this rank after the agreement.

    Raises:
        PlanMismatchError, GroupCreationTimeout, CreationError: See `agree`. Both tables are
            unchanged. Only groups that were about to be reconfigured may have ended, as after
            `survivors`.
    """
    world = scope.world
    is_same_world = old.origin is None or old.origin is world
    with contextlib.ExitStack() as stack:
        with refusing(scope):  # functions of the user, such as `derive`, may raise
            specs = _specs(old, fresh, views)
            for spec in specs:
                check_strategy(spec, len(scope.ranks))
            kept = _survivors(old, specs) if keeps and is_same_world else {}
            communicators = {key: old.entries[former].communicator for key, former in kept.items()}
            specs = [_adopted(spec, communicators.get(spec.key)) for spec in specs]
            wanted = [(fresh, spec) for spec in specs]
            entries = stack.enter_context(reserved(wanted, communicators))
        staying = {} if keeps else _staying(old, entries)
        gone: list[GroupKey] = []

        def finish() -> None:
            gone.extend(_gone(old, fresh, {**kept, **staying}))
            switch()

        preamble = [f"reshape to {fresh.layout.to_json()}"]
        preamble += [f"with view {name}: {view}" for name, view in sorted(views.items())]
        creation = Creation(
            scope,
            f"reshape() of {old.label}",
            entries,
            limit_s,
            preamble=preamble,
            prepare=old.end_groups if staying else None,
            then=finish,
        )
        result = creation.run()
    kept |= staying
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


def _adopted(spec: GroupSpec, communicator: Communicator | None) -> GroupSpec:
    """Return a spec, with the strategy "adopted" if another object owns the communicator."""
    if communicator is None or communicator.is_owned:
        return spec
    adopted = communicator.spec
    return attrs.evolve(spec, strategy=adopted.strategy, reason=adopted.reason)


def _survivors(old: GroupTable, specs: Sequence[GroupSpec]) -> dict[GroupKey, GroupKey]:
    """Map each new key whose group is kept to its old key.

    A group is kept under the same key if possible. All members of a group make the same decision,
    because they compare the same values in the same order.
    """
    # Sort by key: if several threads create groups, the order of creation may differ between ranks.
    live = sorted(old.live().values(), key=lambda entry: str(entry.spec.key))
    pairs = [(spec, entry) for spec in specs for entry in live]
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
    """Return whether the group of an old entry fits a new spec."""
    is_same_key = old.spec.key.is_same_to_users(new.key)
    if not old.communicator.is_owned:
        return is_same_key and old.spec.groups == new.groups
    if new.strategy == "local" and old.spec.ranks is new.ranks is None:
        return is_same_key  # the calling rank has neither an old nor a new group
    return old.spec.can_serve(new)


def _staying(old: GroupTable, entries: Sequence[Entry]) -> dict[GroupKey, GroupKey]:
    """Choose existing process groups to reconfigure, instead of creating new ones.

    Returns:
        The keys whose process groups will be reconfigured, each mapped to itself.
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
            if pg is None or pg in taken or not torchdist.is_registered(pg):
                continue
            if candidate.spec.key.is_same_to_users(spec.key):
                entry.communicator.former = pg
                taken.add(pg)
                staying[spec.key] = spec.key
                break
    return staying


def _gone(
    old: GroupTable, fresh: GroupTable, kept: Mapping[GroupKey, GroupKey]
) -> Iterator[GroupKey]:
    """Yield the old keys whose groups end.

    Also remove the process groups that were reconfigured from the old table.
    """
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
