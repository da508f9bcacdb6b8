"""The strategies that create the process groups of some dims, and the choice between them.

local      each rank creates its own group, under a name that is the same on all members
split      every rank of WORLD splits its communicator once, if WORLD is bound to a device
enumerate  every rank walks every group: torch.distributed.new_subgroups_by_enumeration

Members keep the order of their group, which may not be ascending if a layout lists its ranks.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Sequence
from inspect import signature
from itertools import chain
from typing import Any, NamedTuple

import attrs
import numpy as np
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypercomm.errors import CreationError, GroupOptionsError, HyperCommError
from hypercomm.layout import RankGroups
from hypercomm.process_groups import torch_internals as torchdist
from hypercomm.process_groups.agreement.driver import Round
from hypercomm.process_groups.options import GroupOptions
from hypercomm.process_groups.spec import GroupSpec
from hypercomm.process_groups.world import World

# ---- the choice --------------------------------------------------------------------------------


@attrs.frozen
class ResolvedOptions:
    """How groups with some options are created in a world.

    Attributes:
        options: The options with the defaults of the world.
        strategy: The name of the strategy.
        reason: Why by this strategy.
    """

    options: GroupOptions
    strategy: str
    reason: str


def plan(
    world: World, groups: RankGroups, given: GroupOptions, creation: str, *, by_all: bool
) -> ResolvedOptions:
    """Decide how groups are created in a world, and complete their options.

    A plan that holds for all groups is made once in a world.

    Args:
        world: The world.
        groups: The groups to create.
        given: The options as given.
        creation: "auto", or the name of a strategy, if the options name none.
        by_all: Whether every rank of the world takes part in the creation.

    Raises:
        GroupOptionsError: Options contradict each other, or would be ignored.
        CreationError: The requested strategy cannot work here; the message has the reason, and
            the strategies that would work.
    """
    asked = given, creation, by_all
    known: ResolvedOptions | None = world.choices.get(asked) if given.pg_options is None else None
    if known is not None:
        return known
    creation = given.creation or creation
    if given.enable_reconfigure and creation != "local":
        if creation != "auto":
            raise GroupOptionsError(
                f"creation={creation!r} cannot create groups with enable_reconfigure=True; use "
                f"'auto' or 'local'"
            )
        creation = "local"
    strategy, reason = _choose(world, groups, given, creation, by_all=by_all)
    made = ResolvedOptions(given.resolve(world), strategy, reason)
    depends_on_groups = strategy != "local" or torchdist.split_device() is not None
    if not depends_on_groups and given.pg_options is None:
        world.choices[asked] = made
    return made


def _choose(
    world: World, groups: RankGroups, given: GroupOptions, creation: str, *, by_all: bool
) -> tuple[str, str]:
    """Return the name of a strategy, and why it was chosen."""
    backend = (given.backend or world.backend).lower()
    against = obstacles(world, backend, groups, given.lazy_init, ("local", "split"))
    usable = [name for name, obstacle in against.items() if obstacle is None]
    if creation not in ("auto", *usable) or not usable:  # else it need not read all groups
        against = obstacles(world, backend, groups, given.lazy_init)
        usable = [name for name, obstacle in against.items() if obstacle is None]
    if creation in usable:
        return creation, "asked for by name"
    if creation == "auto" and usable:
        chosen = "split" if by_all and "split" in usable else usable[0]
        if chosen == "enumerate":
            return chosen, f"{against['local']}, and {against['split']}"
        bound = "WORLD is bound to a device, and " if chosen == "split" else ""
        return chosen, bound + STRATEGIES[chosen].cost
    reasons = "; ".join(filter(None, [against.get(creation)] if usable else against.values()))
    raise CreationError(
        f"creation={creation!r} cannot create groups of backend {backend!r} here: {reasons}; use "
        + (f"one of {['auto', *usable]}" if usable else "a layout whose ranks ascend in each group")
    )


def obstacles(
    world: World,
    backend: str,
    groups: RankGroups,
    lazily: bool | None,
    names: Sequence[str] = (),
) -> dict[str, str | None]:
    """Return why each strategy cannot create groups here, by its name, or None if it can.

    Args:
        world: The world.
        backend: The requested backend.
        groups: The groups to create.
        lazily: Whether members are to connect at their first message.
        names: The strategies; default: all.
    """
    found: dict[str, str | None] = {}
    for name in names or STRATEGIES:
        found[name] = STRATEGIES[name].why_not(backend, groups, lazily)
        if name != "local" and not world.is_default:
            found[name] = f"torch does so for WORLD only, and this is world {world.name!r}"
    return found


# ---- local -------------------------------------------------------------------------------------


def _why_not_local(backend: str, _groups: RankGroups, _lazily: bool | None) -> str | None:
    if "mpi" in torchdist.single_backends(backend):
        return "MPI creates a group only with all ranks of the world"
    return torchdist.why_not_members()


def _create_local(
    spec: GroupSpec, title: str, turn: Round, former: ProcessGroup | None
) -> ProcessGroup | None:
    if spec.own is None:
        return None
    index, ranks = spec.own
    name = f"{title}/{index}"
    world = spec.world
    options = spec.options
    shared: dict[str, Any] = {"rank": world.rank, "store": turn.store, "stale": turn.stale}
    group = former or torchdist.new_group(
        name,
        ranks,
        backend=options.backend or world.backend,
        timeout=options.timeout,
        pg_options=options.pg_options,
        group_desc=spec.group_desc,
        lazy_init=options.lazy_init,
        enable_reconfigure=options.enable_reconfigure,
        is_default=world.is_default,
        **shared,
    )
    if options.enable_reconfigure:
        torchdist.reconfigure(
            group, name, ranks, timeout=options.timeout, left_s=turn.left_s, **shared
        )
    return group


# ---- split -------------------------------------------------------------------------------------


def _why_not_split(backend: str, groups: RankGroups, lazily: bool | None) -> str | None:
    if lazily:
        return "a split connects all members when it creates a group, and lazy_init=True forbids it"
    obstacle = torchdist.why_not_split(backend)
    if obstacle is None and not (groups.is_sorted or torchdist.keeps_order()):
        return f"split_group of this torch sorts the ranks of each group, and {groups!r} are not"
    return obstacle


def _create_split(spec: GroupSpec, title: str, *_: object) -> ProcessGroup | None:
    # Every rank of WORLD must call, but torch looks only at the caller's own group in the list.
    # A rank that is not a member passes a group that it is not in, and gets None.
    own = -1 if spec.own is None else spec.own[0]
    options = spec.options
    group: ProcessGroup | None = None
    for turn in split_turns(spec.groups):
        index = own if own in turn else int(own == 0)
        part = torchdist.split_group(
            f"{title}/{own}" if own in turn else None,
            spec.groups[index],
            backend=options.backend or spec.world.backend,
            timeout=options.timeout,
            pg_options=options.pg_options,
            group_desc=spec.group_desc,
        )
        group = part or group
    return group


def split_turns(groups: RankGroups) -> list[set[int]]:
    """Return the indices of the groups that are split off WORLD together: usually all.

    torch distinguishes them by a colour, a hash of their ranks. Groups with equal colours would
    silently become one communicator, so each of them is split off in a separate turn, in the same
    order on every rank.
    """
    seen: Counter[int] = Counter()
    turns: defaultdict[int, set[int]] = defaultdict(set)
    rows = [groups.to_array()] if len(groups.sizes) == 1 else [np.array([one]) for one in groups]
    colors = chain.from_iterable(map(torchdist.split_colors, rows))
    for index, color in enumerate(colors):
        turns[seen[color]].add(index)
        seen[color] += 1
    return list(turns.values())


# ---- enumerate ---------------------------------------------------------------------------------


def _why_not_enumerate(backend: str, groups: RankGroups, lazily: bool | None) -> str | None:
    if (
        lazily is not None
        and torchdist.is_nccl(backend)
        and not torchdist.connects_as_told(backend)
    ):
        return f"new_group of this torch has no lazy_init={lazily} for NCCL"
    if groups.is_sorted or "sort_ranks" in signature(dist.new_group).parameters:
        return None
    return f"new_group of this torch sorts the ranks of each group, and {groups!r} are not"


def _create_enumerate(spec: GroupSpec, *_: object) -> ProcessGroup | None:
    options = spec.options
    groups = spec.groups
    ranks = groups.to_lists()
    pg_options = options.pg_options
    if options.lazy_init:
        backend = options.backend or spec.world.backend
        pg_options = torchdist.lazy_options(backend, pg_options, options.timeout)
    given: dict[str, Any] = {
        "backend": options.backend,
        "timeout": options.timeout,
        "pg_options": pg_options,
        "group_desc": spec.group_desc,
    }
    given = {name: value for name, value in given.items() if value is not None}
    with torchdist.lazy_init.set_to(options.lazy_init):
        own: Any = None
        if groups.is_sorted:
            enumerate_groups: Any = dist.new_subgroups_by_enumeration  # no types before torch 2.14
            own = enumerate_groups(ranks, **given)[0]
        else:
            made = [dist.new_group(members, sort_ranks=False, **given) for members in ranks]
            if spec.own is not None:
                own = made[spec.own[0]]
    torchdist.forget_non_members()
    return torchdist.as_member(own)


class Strategy(NamedTuple):
    """A strategy: why it cannot work, its cost, and the function that creates a group.

    Attributes:
        why_not: Returns why it cannot create groups, by backend, groups and `lazy_init`.
        cost: Its cost, for explanations.
        create: Creates a group; takes the arguments of `create` below.
    """

    why_not: Callable[[str, RankGroups, bool | None], str | None]
    cost: str
    create: Callable[[GroupSpec, str, Round, ProcessGroup | None], ProcessGroup | None]


STRATEGIES = {
    "local": Strategy(
        _why_not_local,
        "each rank creates only the groups that it is a member of",
        _create_local,
    ),
    "split": Strategy(
        _why_not_split,
        "one split by every rank of the world creates all groups",
        _create_split,
    ),
    "enumerate": Strategy(
        _why_not_enumerate,
        "every rank walks every group of the world",
        _create_enumerate,
    ),
}
"""The strategies, by name; "auto" uses the first that works, split first if all ranks call."""


# ---- one creation ------------------------------------------------------------------------------


def connects(specs: Iterable[GroupSpec]) -> bool:
    """Return whether the creation of one of some groups needs its other members.

    The answer is equal on all ranks, whichever of the groups exist on a rank already.
    """
    return any(
        spec.strategy != "local"
        or spec.options.enable_reconfigure
        or torchdist.connects_at_creation(
            spec.options.backend or spec.world.backend, spec.options.lazy_init
        )
        for spec in specs
    )


def create(
    spec: GroupSpec, name: str, turn: Round, former: ProcessGroup | None = None
) -> ProcessGroup | None:
    """Create the group of the calling rank, and leave torch as it was if that fails.

    Args:
        spec: The group.
        name: The name of the groups over its dims, the same on all ranks.
        turn: The round of the creation.
        former: An existing group that is given these members; None creates a new one.

    Returns:
        The group, or None if the calling rank is not a member.

    Raises:
        ConnectionFailedError: The members of a gloo group could not connect.
        CreationError: torch could not create the group.
    """
    before = torchdist.registered() if spec.strategy == "enumerate" else set()
    try:
        return STRATEGIES[spec.strategy].create(spec, name, turn, former)
    except BaseException as error:
        with contextlib.suppress(Exception):  # the error at hand matters more
            torchdist.destroy(_left_by(spec, name, before))
        torchdist.forget_non_members()
        known = (HyperCommError, dist.DistNetworkError, torchdist.ConnectionFailedError)
        if isinstance(error, RuntimeError) and not isinstance(error, known):
            reason = (str(error).splitlines() or [""])[0]
            raise CreationError(
                f"the process group over {spec.key} was not created: {reason}"
            ) from error
        raise


def _left_by(spec: GroupSpec, name: str, before: set[ProcessGroup]) -> set[ProcessGroup]:
    """Return what a failed creation has registered; other threads may have registered theirs."""
    if spec.strategy != "enumerate":
        return torchdist.registered_as(f"{name}/{spec.own[0]}") if spec.own else set()
    new = torchdist.registered() - before - torchdist.kept()  # torch has named it
    if spec.own is None:
        return new
    return {one for one in new if tuple(dist.get_process_group_ranks(one)) == spec.own[1]}


def discard(groups: Iterable[ProcessGroup | None], stay: Collection[ProcessGroup] = ()) -> None:
    """Destroy the groups of a call that fails on other ranks, the last one first.

    Args:
        groups: The groups, in the order of creation.
        stay: Groups among them that are not destroyed.
    """
    torchdist.destroy(reversed([group for group in groups if group and group not in stay]))
