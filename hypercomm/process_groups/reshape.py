"""Reshaping: the groups of a grid for another layout of the same ranks; what survives is kept.

Groups are created before any is destroyed, and ranks compare before and meet after, so that a
reshape that fails on one rank fails on all of them, and leaves what there was.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

import attrs
from torch.distributed import ProcessGroup

from hypercomm.errors import CreationError
from hypercomm.layout import RankLayout
from hypercomm.layout.difference import Lost
from hypercomm.layout.views import Views
from hypercomm.process_groups import torch_internals as c10d
from hypercomm.process_groups.agreement.driver import Round, agree, refusing
from hypercomm.process_groups.agreement.scope import Scope
from hypercomm.process_groups.owner import Group, GroupOwner, discard
from hypercomm.process_groups.spec import GroupKey, GroupSpec, specify
from hypercomm.process_groups.strategies import connects, create

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
    kept: tuple[tuple[GroupKey, GroupKey], ...]
    created: tuple[GroupKey, ...]
    destroyed: tuple[GroupKey, ...]
    numbers: tuple[int, ...] | None = None

    def __repr__(self) -> str:
        counts = len(self.kept), len(self.created), len(self.destroyed)
        told = "{} kept, {} created, {} destroyed".format(*counts)
        return f"<Reshaped {self.before} -> {self.after}: {told}>"

    def __str__(self) -> str:
        kept = [str(new) if _same(new, old) else f"{new} (was {old})" for new, old in self.kept]
        lines = [("kept", kept), ("created", self.created), ("destroyed", self.destroyed)]
        told = [f"{self.before} -> {self.after}"]
        told += [f"  {what}: {', '.join(map(str, keys)) or 'none'}" for what, keys in lines]
        lost = self.lost
        return "\n".join([*told, f"  lost: {lost.words}"] if lost.ranks else told)

    @property
    def lost(self) -> Lost:
        """The losses due to the ranks that left the grid, in the numbers that they had."""
        if self.numbers is None:
            return Lost(self.before, self.after)
        ranks, after = [self.numbers[rank] for rank in self.after.ranks], self.after
        return Lost(self.before, RankLayout(after.shape, after.dim_names, ranks=ranks))


def reshape(
    old: GroupOwner, fresh: GroupOwner, views: Views, scope: Scope | None, limit_s: float
) -> tuple[Reshaped, BaseException | None]:
    """Create in a fresh owner what an old one has, for other views, and keep the groups that serve.

    Args:
        old: The old owner, which keeps what it has.
        fresh: The new one, without groups; it shares the pool of the old one where groups are kept.
        views: The views of the fresh one.
        scope: The ranks that reshape together; None without torch.distributed.
        limit_s: Seconds within which all must be done.

    Returns:
        The result for each key, and the exception that interrupted this rank after the agreement.

    Raises:
        PlanMismatchError, GroupCreationTimeout, CreationError: As for `together`; both owners are
            as they were, except that groups that stay have ended, as after `survivors`.
    """
    world = old.world
    is_same_world = old.origin is None or old.origin is world
    with refusing(scope):  # it runs functions of the user
        specs = [*_specs(old, fresh, views)]
        if scope is not None:
            for spec in specs:
                _check_strategy(spec, len(scope.ranks), scope.world.size)
        keeps = fresh.pool is old.pool
        kept = _survivors(old, specs) if keeps and is_same_world else {}
        groups, new = _find_groups(old, fresh, specs, kept)
    stays = {} if keeps else _staying(old, new)
    made: list[ProcessGroup | None] = []

    def entries() -> list[str]:
        named = [f"with view {name}: {view}" for name, view in sorted(views.items())]
        return [
            f"reshape to {fresh.layout.to_json()}",
            *named,
            *(spec.describe() for spec in specs),
        ]

    def work(turn: Round) -> None:
        if stays:
            old.end_groups()
        for group in new:  # what was made before an error is discarded
            turn.check()
            name, former = f"{turn.name}/{group.spec.key}", stays.get(group.spec.key)
            stale = [] if scope is None else scope.memory.stale
            made.append(create(group.spec, name, turn, stale, former))

    pending = None
    if scope is not None:
        title = f"reshape() of {old.layout}"
        undo = partial(discard, made, scope, stays.values())
        is_connecting = connects(group.spec for group in new)
        pending = agree(
            scope, title, entries, limit_s, work, undo, is_connecting=is_connecting
        ).pending
    with old.pool.lock, fresh.pool.lock:
        for group, pg in zip(new, made, strict=True):
            group.pg, group.is_created = pg, True
        for spec in specs:
            group = groups[spec.key]
            fresh.attach(
                spec if group.is_owned else attrs.evolve(spec, choice=group.spec.choice), group
            )
    kept |= {key: key for key in stays}
    gone = _gone(old, fresh, kept, [*stays.values()])
    pairs = tuple((spec.key, kept[spec.key]) for spec in specs if spec.key in kept)
    created = tuple(spec.key for spec in specs if spec.key not in kept)
    numbers = None if world is None or is_same_world else world.numbers_in(old.origin)
    result = Reshaped(old.layout, fresh.layout, pairs, created, tuple(gone), numbers)
    return result, pending


def _gone(
    old: GroupOwner,
    fresh: GroupOwner,
    kept: dict[GroupKey, GroupKey],
    stays: Sequence[ProcessGroup],
) -> list[GroupKey]:
    """Return the old keys whose groups end; those that stay are no longer the old owner's."""
    still, survivors = [*kept.values(), *fresh.created], {*fresh.created.values()}
    gone = []
    for key, pg in old.ended.items():
        if pg in stays:
            old.ended[key] = None
        else:
            gone.append(key)
    for key, group in old.created.items():
        if group not in survivors or not any(_same(key, other) for other in still):
            gone.append(key)
    return gone


def _staying(old: GroupOwner, new: Sequence[Group]) -> dict[GroupKey, ProcessGroup]:
    """Return the process groups that stay and get other members, by the key that needs them."""
    own = [(key, group) for key, group in old.created.items() if group.is_owned]
    own = [(key, group) for key, group in own if all(owner is old for owner, _ in group.users)]
    held = {key: group.pg for key, group in own} | old.ended
    stays: dict[GroupKey, ProcessGroup] = {}
    for group in new:
        if not group.spec.options.enable_reconfigure or group.spec.own is None:
            continue
        for key, pg in held.items():
            is_free = pg is not None and pg not in stays.values() and c10d.is_registered(pg)
            if pg is not None and is_free and _same(key, group.spec.key):
                stays[group.spec.key] = pg
    return stays


def check_settled(owner: GroupOwner) -> None:
    """Raise if other threads are creating groups.

    Raises:
        CreationError: Names them.
    """
    there = {*owner.created, *owner.ended}
    waiting = [str(key) for key in owner.specs if key not in there]
    if waiting:
        raise CreationError(
            f"other threads are creating the process groups over {', '.join(waiting)}; reshape the "
            f"grid once they are done"
        )


def _check_strategy(spec: GroupSpec, ranks: int, world_size: int) -> None:
    """Raise if ranks outside of the grid would have to take part in a creation.

    Raises:
        CreationError: With a strategy that works.
    """
    if spec.choice.strategy != "local" and ranks < world_size:
        raise CreationError(
            f"the process groups over {spec.key} would be created with "
            f"creation={spec.choice.strategy!r}, which every rank of the world must call, and "
            f"{world_size - ranks} of its {world_size} ranks are not among ranks; "
            f"creation='local' creates groups without them"
        )


def _specs(old: GroupOwner, fresh: GroupOwner, views: Views) -> Iterator[GroupSpec]:
    """Yield the specs of the fresh owner, in an order that is the same on all ranks."""
    for spec in sorted(old.specs.values(), key=GroupSpec.place):
        key = spec.key
        if set(key.dims) <= set(views.layout_of(key.view).dim_names):
            found, dims = views.find(key.dims, key.view)
            new = GroupKey(dims, key.name, None if found is None else found.name)
            yield specify(
                *(new, views.asked(key.view), views.base, spec.derive, spec.given, spec.share),
                *(fresh.creation, old.world),
            )


def _survivors(old: GroupOwner, specs: Sequence[GroupSpec]) -> dict[GroupKey, GroupKey]:
    """Return the new keys whose groups survive, each with its old key, keys that stay first.

    All members of a group decide the same, because they compare the same values.
    """
    in_order = sorted(old.created, key=str)  # threads create in any order
    pairs = [(spec, key) for spec in specs for key in in_order]
    pairs.sort(key=lambda pair: not _same(pair[0].key, pair[1]))
    kept: dict[GroupKey, GroupKey] = {}
    uses: dict[Group, str] = {}
    for spec, key in pairs:
        group = old.created[key]
        if spec.key in kept or not _survives(old.specs[key], group, spec):
            continue
        is_alone = group not in uses and all(owner is old for owner, _ in group.users)
        if is_alone or {old.specs[key].share, spec.share, uses.get(group, _SHARED)} == {_SHARED}:
            uses[group], kept[spec.key] = spec.share, key
    return kept


def _survives(old: GroupSpec, group: Group, new: GroupSpec) -> bool:
    """Return whether the group of an old key is the one that a new key needs."""
    if not group.is_owned:
        return _same(old.key, new.key) and old.groups == new.groups
    world = new.world
    if world is None:
        return False
    is_member = old.groups.has_member(world.rank) or new.groups.has_member(world.rank)
    if new.choice.strategy == "local" and not is_member:
        return _same(old.key, new.key)  # this rank has None, and keeps it
    return old.can_serve(new)


def _find_groups(
    old: GroupOwner,
    fresh: GroupOwner,
    specs: Sequence[GroupSpec],
    kept: dict[GroupKey, GroupKey],
) -> tuple[dict[GroupKey, Group], list[Group]]:
    """Return the group of each new key, and those to create: one for keys that share."""
    groups: dict[GroupKey, Group] = {}
    new: list[Group] = []
    for spec in specs:
        group = old.created[kept[spec.key]] if spec.key in kept else fresh.pool.lent(spec)
        shared = (one for one in new if one.spec.share == _SHARED and one.spec.can_serve(spec))
        if group is None and spec.share == _SHARED:
            group = next(shared, None)
        if group is None:
            group = Group(spec, fresh)
            new.append(group)
        groups[spec.key] = group
    return groups, new


def _same(one: GroupKey, other: GroupKey) -> bool:
    """Return whether two keys are one to a user: each layout has the dims in its own order."""
    return (set(one.dims), one.name, one.view) == (set(other.dims), other.name, other.view)
