"""Reshapes a grid: creates its groups for another layout, and keeps the groups that still fit.

New groups are created before old ones are destroyed. The ranks meet a second time in between, so a
reshape that fails on one rank fails on all ranks, and changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs
from torch.distributed import ProcessGroup

from hypercomm.errors import CreationError, GroupCreationTimeout, LateRankError
from hypercomm.layout import RankLayout
from hypercomm.layout.difference import Lost
from hypercomm.layout.text import format_ranks
from hypercomm.layout.views import Views
from hypercomm.process_groups import torch_internals as torchdist
from hypercomm.process_groups.creation import batch_call, check_strategy, create_entries
from hypercomm.process_groups.meeting import Call, agree, meet, refusing
from hypercomm.process_groups.spec import GroupKey, GroupSpec
from hypercomm.process_groups.table import ENDED, LIVE, Communicator, Entry, GroupTable, reserve
from hypercomm.process_groups.world import GridIdentity, Scope, World, digest_of

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
            lines.append(f"  without ranks {lost.summary}")
        return "\n".join(lines)

    @property
    def lost(self) -> Lost:
        """The losses due to ranks that left the grid. These ranks have their old numbers."""
        after = self.after
        if self.numbers is not None:
            ranks = [self.numbers[rank] for rank in after.ranks]
            after = RankLayout(after.shape, after.dim_names, ranks=ranks)
        return Lost(self.before, after)


def successor(
    table: GroupTable, identity: GridIdentity, views: Views, *, keeps: bool
) -> GroupTable:
    """Return an empty table for another layout of a grid.

    Args:
        table: The table of the grid.
        identity: The identity of the grid with that layout.
        views: The views of that layout.
        keeps: Whether the new table may share communicators with another grid, as `table` may.
    """
    fresh = GroupTable(identity, views, table.options, world=table.given_world)
    fresh.lender = table.lender if keeps else None
    return fresh


def reshape(
    old: GroupTable,
    fresh: GroupTable,
    scope: Scope,
    limit_s: float,
    *,
    keeps: bool,
    switch: Callable[[], None],
) -> Reshaped:
    """Create the keys of an old table in an empty table, and keep the groups that still fit.

    Args:
        old: The old table. Its entries remain, and the caller ends the table.
        fresh: The empty table.
        scope: The ranks that reshape together.
        limit_s: The time within which all ranks must arrive, in seconds.
        keeps: Whether groups may be kept.
        switch: Makes the grid use the new table. It is called once all ranks have all groups.

    Raises:
        PlanMismatchError, GroupCreationTimeout, CreationError: See `meet`. Both tables are
            unchanged. Only groups that were about to be reconfigured may have ended, as after
            `survivors`.
    """
    world = scope.world
    is_same_world = old.origin is None or old.origin is world
    entries: list[Entry] = []
    try:
        with refusing(scope):  # functions of the user, such as `derive`, may raise
            specs = _specs(old, fresh)
            for spec in specs:
                check_strategy(spec, len(scope.ranks))
            kept = _survivors(old, specs) if keeps and is_same_world else {}
            communicators = {key: old.entries[former].communicator for key, former in kept.items()}
            specs = [_adopted(spec, communicators.get(spec.key)) for spec in specs]
            entries = reserve([(fresh, spec) for spec in specs], communicators)
        staying = {} if keeps else _staying(old, entries)
        title = f"reshape() of {old.label}"
        lines = [f"reshape to {fresh.layout.to_json()}"]
        lines += [f"with view {name}: {view}" for name, view in sorted(fresh.views.items())]
        with meet(scope, batch_call(title, entries, preamble=lines), limit_s) as meeting:
            if staying:
                old.end_groups()
            confirmation = Call.of(title, ["reshape() has created its groups"])
            create_entries(meeting, entries, confirmation=confirmation)
            gone = tuple(_gone(old, fresh, {**kept, **staying}))
            switch()
    finally:
        for entry in entries:
            entry.settle()
    kept |= staying
    pairs = tuple((spec.key, kept[spec.key]) for spec in specs if spec.key in kept)
    created = tuple(spec.key for spec in specs if spec.key not in kept)
    numbers = None if is_same_world else world.numbers_in(old.origin)
    return Reshaped(old.layout, fresh.layout, pairs, created, gone, numbers)


def _specs(old: GroupTable, fresh: GroupTable) -> list[GroupSpec]:
    """Return the specs of the fresh table, in an order that is the same on all ranks."""
    former = sorted((entry.spec for entry in old.entries.values()), key=GroupSpec.sort_key)
    specs = []
    for spec in former:
        key = spec.key
        if set(key.dims) <= set(fresh.views.layout_of(key.view).dim_names):
            request = attrs.evolve(spec.request, dims=key.dims, view=key.view)
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
        shares = {entry.spec.share, spec.share, uses.get(communicator, _SHARED)}
        is_alone = communicator not in uses and communicator.is_only_of(old)
        if is_alone or shares == {_SHARED}:
            uses[communicator] = spec.share
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


# ---- after a loss -------------------------------------------------------------------------------


def find_survivors(
    identity: GridIdentity, world: World | None, limit_s: float, min_ranks: int
) -> tuple[int, ...]:
    """Return the ranks of a grid that arrive in time. All these ranks get the same result.

    The first rank that times out writes the missing ranks into the outcome of the round. The
    remaining ranks then confirm in another round that all of them are present.

    Args:
        identity: The identity of the grid.
        world: The world of the grid, or None before there is one.
        limit_s: The limit of each round, in seconds.
        min_ranks: The smallest number of ranks that may continue.

    Raises:
        CreationError: The other ranks continue without this rank, or fewer than `min_ranks`
            ranks are left.
    """
    ranks = tuple(identity.layout.ranks)
    while world is not None:
        record = f"survivors {digest_of(sorted(ranks))}"
        scope = identity.scope(world, record, ranks, is_fenced=True)
        try:
            agree(scope, "survivors()", ["survivors()"], limit_s)
            break
        except GroupCreationTimeout as error:
            ranks = tuple(rank for rank in ranks if rank not in error.absent)
        except LateRankError as error:
            raise CreationError(
                f"the other ranks have continued without {world.title(world.rank)}, which arrived "
                f"too late in survivors(); end this process, or start the job again"
            ) from error
    if len(ranks) < min_ranks:
        raise CreationError(
            f"survivors() found only {len(ranks)} ranks, {format_ranks(sorted(ranks))}, fewer "
            f"than min_ranks={min_ranks}; restart the job, or pass a smaller min_ranks="
        )
    return ranks
