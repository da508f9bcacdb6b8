"""Reshaping: the groups of a grid for another layout of the same ranks; what survives is kept.

Groups are created before any is destroyed, and ranks meet before and after, so that a reshape that
fails on one rank fails on all of them, and leaves what there was.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence

import attrs

from hypercomm.errors import PlanMismatchError
from hypercomm.layout import RankLayout
from hypercomm.layout.views import Views
from hypercomm.process_groups import c10d
from hypercomm.process_groups.creation import BATCH_PATIENCE_S, destroy, together
from hypercomm.process_groups.group_plan import CreatedGroup
from hypercomm.process_groups.keys import GroupKey, GroupRequest, describe
from hypercomm.process_groups.owner import GroupOwner
from hypercomm.process_groups.planned import PlannedGroup, can_serve

_CALL = "reshape()"
_SHARED = "identical"


@attrs.frozen
class Reshaped:
    """What a reshape did to the process groups of the calling rank; str() says it in lines.

    Attributes:
        before: The layout that was.
        after: The layout that is.
        kept: Each key whose group survived, with the key that it had.
        created: The keys whose groups were created, in that order.
        destroyed: The keys whose groups were destroyed, or that are no more.
    """

    before: RankLayout
    after: RankLayout
    kept: tuple[tuple[GroupKey, GroupKey], ...]
    created: tuple[GroupKey, ...]
    destroyed: tuple[GroupKey, ...]

    def __str__(self) -> str:
        kept = [str(new) if _same(new, old) else f"{new} (was {old})" for new, old in self.kept]
        lines = [("kept", kept), ("created", self.created), ("destroyed", self.destroyed)]
        return "\n".join(
            [f"{self.before} -> {self.after}"]
            + [f"  {what}: {', '.join(map(str, keys)) or 'none'}" for what, keys in lines]
        )


def reshape(
    old: GroupOwner, fresh: GroupOwner, requests: Sequence[GroupRequest], views: Views
) -> Reshaped:
    """Create what is requested in a fresh owner, with the groups of the old one where they serve.

    The old owner keeps what it has, until it is destroyed: then what the fresh one has lives on.

    Raises:
        PlanMismatchError: Another rank reshapes to something else, or failed.
        GroupCreationTimeout: A rank did not call this in time; names it.
        CreationError: A group could not be created, on this rank or another.
    """
    with declining(old):
        drafts = {request.key: fresh.draft(request) for request in requests}
        kept = _take_over(old, fresh, drafts)
        plan = [f"{key}: {describe(draft)}" for key, draft in drafts.items()]
    survivors = set(fresh.created.values())
    named = [f"with view {name}: {view}" for name, view in sorted(views.items())]
    old.meet([f"reshape to {fresh.layout.to_json()}", *named, *plan], None, _CALL)
    missing = [request for request in requests if request.key not in fresh.created]
    try:
        with together():
            for request in missing:
                fresh.create(request)
        fresh.meet(["created"], None, _CALL)
    except BaseException as error:
        if not isinstance(error, PlanMismatchError):  # whoever differs has told
            with contextlib.suppress(RuntimeError):
                fresh.tell(_failed(error))
        own = [planned.created for planned in fresh.planned.values() if planned.twin is None]
        created = [item for item in own if item is not None and item not in survivors]
        destroy(reversed(created), BATCH_PATIENCE_S)
        raise
    fresh.settle(list(drafts), old.is_verified)
    still = [*dict(kept).values(), *fresh.created]
    gone = [
        key
        for key, item in old.created.items()
        if item not in survivors or not any(_same(key, other) for other in still)
    ]
    new = [request.key for request in missing]
    return Reshaped(old.layout, fresh.layout, tuple(kept), tuple(new), tuple(gone))


@contextlib.contextmanager
def declining(old: GroupOwner) -> Iterator[None]:
    """Let the ranks that wait hear at once if this one fails before it meets them."""
    try:
        yield
    except BaseException as error:
        with contextlib.suppress(RuntimeError):  # the store is gone
            old.decline(_failed(error))
        raise


def _failed(error: BaseException) -> str:
    return f"could not reshape: {type(error).__name__}: {error}"


def _take_over(
    old: GroupOwner, fresh: GroupOwner, drafts: Mapping[GroupKey, PlannedGroup]
) -> list[tuple[GroupKey, GroupKey]]:
    """File the groups that survive in a fresh owner, those of the same key first; asks nobody.

    All members of a group decide alike: what they compare is the same for all of them.
    """
    in_order = sorted(old.created, key=str)  # threads may have created them in another
    pairs = [(key, old_key) for key in drafts for old_key in in_order]
    pairs.sort(key=lambda pair: not _same(*pair))
    kept: dict[GroupKey, GroupKey] = {}
    uses: dict[CreatedGroup, str] = {}
    for key, old_key in pairs:
        draft, planned, created = drafts[key], old.planned[old_key], old.created[old_key]
        is_alone = created not in uses and not created.is_held(besides=old)
        shares = {planned.share, draft.share, uses.get(created, _SHARED)} == {_SHARED}
        if key not in kept and (is_alone or shares) and _survives(old_key, planned, key, draft):
            fresh.file(key, planned if planned.is_adopted else draft, created)
            uses[created], kept[key] = draft.share, old_key
    return [(key, kept[key]) for key in drafts if key in kept]


def _survives(old_key: GroupKey, old: PlannedGroup, new_key: GroupKey, draft: PlannedGroup) -> bool:
    """Tell whether the group of an old key is the one that a new key needs."""
    if old.is_adopted:
        return _same(old_key, new_key) and old.groups == draft.groups
    if not c10d.is_live():
        return False
    is_local = draft.choice.strategy == "local"
    if is_local and not old.has_member() and not draft.has_member():
        return _same(old_key, new_key)  # this rank has None, and keeps it
    return can_serve(old, draft)


def _same(one: GroupKey, other: GroupKey) -> bool:
    """Tell whether two keys are one to a user: each layout has the dims in its own order."""
    return (set(one.dims), one.name, one.view) == (set(other.dims), other.name, other.view)
