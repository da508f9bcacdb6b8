"""Reshaping: the groups of a grid for another layout of the same ranks; what survives is kept.

Groups are created before any is destroyed, and ranks compare before and meet after, so that a
reshape that fails on one rank fails on all of them, and leaves what there was.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator, Sequence

import attrs

from hypercomm.errors import CreationError
from hypercomm.layout import RankLayout
from hypercomm.layout.difference import Lost
from hypercomm.layout.views import Views
from hypercomm.process_groups.agreement.steps import NOTHING, Step, Steps, all_or_none, refusing
from hypercomm.process_groups.creation import BATCH_PATIENCE_S, destroy
from hypercomm.process_groups.job import current_or_none
from hypercomm.process_groups.owner import Batch, GroupOwner
from hypercomm.process_groups.planned import PlannedGroup, PooledGroup
from hypercomm.process_groups.spec import GroupKey, GroupSpec, specify

logger = logging.getLogger(__name__)

CALL = "reshape()"
_SHARED = "identical"


@attrs.frozen(repr=False)
class Reshaped:
    """What a reshape did to the process groups of the calling rank; str() says it in lines.

    Attributes:
        before: The layout that was.
        after: The layout that is.
        kept: Each key whose group survived, with the key that it had.
        created: The keys whose groups were created, in that order.
        destroyed: The keys whose groups were destroyed, or that are no more.
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
        """What is lost with the ranks that the grid goes on without, as they were numbered."""
        if self.numbers is None:
            return Lost(self.before, self.after)
        ranks, after = [self.numbers[rank] for rank in self.after.ranks], self.after
        return Lost(self.before, RankLayout(after.shape, after.dim_names, ranks=ranks))


@attrs.define
class _Draft:
    """What an owner has, in another one.

    Attributes:
        owner: The other one.
        groups: What it is to have, in an order that all ranks have.
        kept: Each key whose group survives, with the key that it had.
    """

    owner: GroupOwner
    groups: list[PlannedGroup]
    kept: list[tuple[GroupKey, GroupKey]]

    @classmethod
    def of(cls, old: GroupOwner, fresh: GroupOwner, specs: Sequence[GroupSpec]) -> _Draft:
        """Plan in a fresh owner what an old one has; asks nobody."""
        job = current_or_none()
        groups = [fresh.draft(spec, job) for spec in specs]
        is_same_job = old.job is None or old.job is job
        kept = _take_over(old, fresh, groups) if fresh.steps is old.steps and is_same_job else []
        return cls(fresh, groups, kept)

    def missing(self) -> Batch:
        """Return what does not survive, and is to be created."""
        created = self.owner.created
        return Batch(self.owner, [one.spec for one in self.groups if one.key not in created])

    def in_words(self) -> list[str]:
        """Say what is planned, as all ranks must alike."""
        return [f"{draft.key}: {draft.describe()}" for draft in self.groups]


def reshape(
    old: GroupOwner,
    make: Callable[[str], GroupOwner],
    views: Views,
    steps: Steps,
    limit_s: float,
) -> tuple[GroupOwner, Reshaped, BaseException | None]:
    """Create what an owner has in a fresh one, for other views, and keep the groups that serve.

    Args:
        old: Keeps what it has until it is destroyed.
        make: Makes a fresh owner, whose groups are named by the word given; one that fails is
            released.
        views: Those that the fresh one is for.
        steps: Those of the ranks that reshape. Where they are others than the old one's, no group
            is kept: one of a rank that is lost may have broken it.
        limit_s: Seconds within which all must be done.

    Returns:
        The fresh owner, what it has, and what has interrupted this rank though all have reshaped.

    Raises:
        PlanMismatchError: Another rank reshapes to something else, or failed.
        GroupCreationTimeout: A rank did not call this in time; names it.
        CreationError: A group could not be created, on this rank or another, or the others gave up
            on this one.
    """
    deadline = time.monotonic() + limit_s
    drafts: list[tuple[_Draft, Batch]] = []
    with refusing(steps, CALL):
        specs = list(_specs(old, views))
        plan = _Draft.of(old, make(""), specs)
        if steps is not old.steps:
            steps.agreement.layout = plan.owner.layout  # in whose terms ranks are named
            _check_alone(plan)
        named = [f"with view {name}: {view}" for name, view in sorted(views.items())]
        entries = [f"reshape to {plan.owner.layout.to_json()}", *named, *plan.in_words()]
        plan.owner.release()
    met = all_or_none(steps, entries, limit_s, CALL, *NOTHING)
    with refusing(steps, CALL):
        met.get()

    def work(step: Step) -> None:
        draft = _Draft.of(old, make(step.name), specs)
        drafts.append((draft, draft.missing()))
        drafts[-1][1].create(step)

    def take_back() -> None:
        if drafts:
            draft, batch = drafts.pop()
            try:
                batch.take_back()
                destroy(draft.owner.release(), BATCH_PATIENCE_S)
            except Exception as error:  # noqa: BLE001 - the error at hand tells more
                logger.warning("taking back what a reshape has created: %s", error)

    left_s = max(0.0, deadline - time.monotonic())
    goes_on = [f"{CALL} goes on"]
    done = all_or_none(steps, goes_on, left_s, CALL, work, take_back, follows=True)
    draft, batch = drafts.pop()
    new = [spec.key for spec in batch.specs]
    fresh, kept = draft.owner, dict(draft.kept)
    keys = [one.key for one in draft.groups]  # all ranks have them in this order
    fresh.planned = {key: fresh.planned[key] for key in keys}
    fresh.created = {key: fresh.created[key] for key in keys}
    still = [*kept.values(), *fresh.created]
    survivors = {planned.pooled for planned in fresh.created.values()}
    gone = [
        key
        for key, planned in old.created.items()
        if planned.pooled not in survivors or not any(_same(key, other) for other in still)
    ]
    kept_keys, job = tuple(draft.kept), current_or_none()
    numbers = None if job is None or job is old.job else job.numbers_in(old.job)
    told = Reshaped(old.layout, fresh.layout, kept_keys, tuple(new), tuple(gone), numbers)
    return fresh, told, done.pending


@contextlib.contextmanager
def alone(owner: GroupOwner) -> Iterator[None]:
    """Let nothing be planned or destroyed for the length of a `with` block.

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


@contextlib.contextmanager
def steps_of(owner: GroupOwner, ranks: Sequence[int] | None) -> Iterator[Steps]:
    """Give, for the length of a `with` block, the steps of those that reshape.

    They are an owner's own, or, where ranks are given, those of the ranks that are left, or that
    came: the store says that this rank goes on with them, unless that fails.
    """
    if ranks is None:
        yield owner.steps
        return
    heirs, steps = owner.successions.of(ranks)
    heirs.publish(steps.next_register())
    try:
        yield steps
    except BaseException:
        with contextlib.suppress(RuntimeError):  # the store is gone
            heirs.take_back()
        raise


def _check_alone(plan: _Draft) -> None:
    """Refuse groups that ranks of the world would have to create which are not asked.

    Raises:
        CreationError: Names one.
    """
    job, layout = current_or_none(), plan.owner.layout
    if job is None or layout.size == job.size:
        return
    for draft in plan.groups:
        if draft.choice.strategy != "local":
            raise CreationError(
                f"the process groups over {draft.key} would be created with "
                f"creation={draft.choice.strategy!r}, which every rank of the world must call, and "
                f"{job.size - layout.size} of its {job.size} ranks are not among ranks; "
                f"creation='local' creates groups without them"
            )


def check_settled(owner: GroupOwner) -> None:
    """Refuse a reshape while something is planned that was not created.

    Raises:
        CreationError: Names it.
    """
    waiting = [str(key) for key in owner.planned if key not in owner.created]
    if waiting:
        raise CreationError(
            f"the process groups over {', '.join(waiting)} are planned, and a reshape would "
            f"void their plans; call create() of each, then reshape()"
        )


def _specs(old: GroupOwner, views: Views) -> Iterator[GroupSpec]:
    """Ask for all that was created, of other views and their base; what has no dims is left.

    In an order that all ranks have, whatever order each has created it in: few dims first.
    """

    def place(planned: PlannedGroup) -> tuple[str, int, tuple[int, ...], str]:
        key, names = planned.key, planned.spec.layout.dim_names
        at = tuple(names.index(dim) for dim in key.dims)
        return key.view or "", len(at), at, key.name or ""

    for planned in sorted(old.planned.values(), key=place):
        key = planned.key
        view = None if key.view is None else views[key.view]
        layout = views.base if view is None else view.layout
        if set(key.dims) <= set(layout.dim_names):
            found, dims = views.find(key.dims, key.view)
            new = GroupKey(dims, key.name, None if found is None else found.name)
            spec = planned.spec
            yield specify(new, view, views.base, spec.derive, spec.given, spec.share)


def _take_over(
    old: GroupOwner, fresh: GroupOwner, drafts: Sequence[PlannedGroup]
) -> list[tuple[GroupKey, GroupKey]]:
    """File the groups that survive in a fresh owner, those of the same key first; asks nobody.

    All members of a group decide alike: what they compare is the same for all of them.
    """
    in_order = sorted(old.created.values(), key=lambda one: str(one.key))  # threads create in any
    pairs = [(draft, planned) for draft in drafts for planned in in_order]
    pairs.sort(key=lambda pair: not _same(pair[0].key, pair[1].key))
    kept: dict[GroupKey, GroupKey] = {}
    uses: dict[PooledGroup, str] = {}
    for draft, planned in pairs:
        pooled = planned.pooled
        if pooled is None or draft.key in kept or not _survives(planned, draft):
            continue
        is_alone = pooled not in uses and all(
            one.owner is old for one in pooled.users() if one.is_filed
        )
        shares = {planned.spec.share, draft.spec.share, uses.get(pooled, _SHARED)} == {_SHARED}
        if is_alone or shares:
            if planned.is_adopted:
                draft.choice, draft.options = planned.choice, planned.options
            fresh.take(draft, pooled)
            uses[pooled], kept[draft.key] = draft.spec.share, planned.key
    return [(draft.key, kept[draft.key]) for draft in drafts if draft.key in kept]


def _survives(old: PlannedGroup, draft: PlannedGroup) -> bool:
    """Tell whether the group of an old key is the one that a new key needs."""
    if old.is_adopted:
        return _same(old.key, draft.key) and old.groups == draft.groups
    if current_or_none() is None:
        return False
    is_local = draft.choice.strategy == "local"
    if is_local and not old.has_member() and not draft.has_member():
        return _same(old.key, draft.key)  # this rank has None, and keeps it
    return old.can_serve(draft)


def _same(one: GroupKey, other: GroupKey) -> bool:
    """Tell whether two keys are one to a user: each layout has the dims in its own order."""
    return (set(one.dims), one.name, one.view) == (set(other.dims), other.name, other.view)
