"""The strategies that create the process groups of some dims, and the choice between them.

local      each rank creates its own group, under a name that is the same on all members
split      every rank of WORLD splits its communicator once, if WORLD is bound to a device
enumerate  every rank walks every group: torch.distributed.new_subgroups_by_enumeration

Members keep the order of their group, which may not be ascending if a layout lists its ranks.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from inspect import signature
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypercomm.errors import CreationError, HyperCommError, NotInitializedError
from hypercomm.layout import RankGroups
from hypercomm.process_groups import torch_internals as c10d
from hypercomm.process_groups.agreement.calls import Call
from hypercomm.process_groups.torch_internals.gloo import ConnectionFailedError, Wait, lazy_init
from hypercomm.process_groups.torch_internals.split import split_device
from hypercomm.process_groups.world import World, current

if TYPE_CHECKING:
    from hypercomm.process_groups.spec import GroupSpec


class Choice(NamedTuple):
    """A strategy, and why it was chosen."""

    strategy: str
    reason: str


NOT_YET = Choice("enumerate", "torch.distributed is not initialised")
ADOPTED = Choice("adopted", "a DeviceMesh created it, and stays its owner")


def choose(
    world: World,
    creation: str,
    backend: str | None,
    groups: RankGroups,
    *,
    lazily: bool | None = None,
    by_all: bool = True,
) -> Choice:
    """Decide how groups of `backend` (None: that of the world) are created in a world.

    Args:
        world: The world.
        creation: "auto", or the name of a strategy.
        backend: The requested backend.
        groups: The groups to create.
        lazily: Whether members are to connect at their first message.
        by_all: Whether every rank of the world takes part in the creation.

    Raises:
        CreationError: The requested strategy cannot work here; the message has the reason, and
            the strategies that would work.
    """
    backend = (backend or world.backend).lower()
    asked = creation, backend, lazily, by_all
    choice: Choice | None = world.choices.get(asked)
    if choice is None:
        choice = _choose(world, creation, backend, groups, lazily=lazily, by_all=by_all)
        if choice.strategy == "local" and split_device() is None:  # holds for all groups
            world.choices[asked] = choice
    return choice


def _choose(
    world: World,
    creation: str,
    backend: str,
    groups: RankGroups,
    *,
    lazily: bool | None,
    by_all: bool,
) -> Choice:
    against = obstacles(world, backend, groups, lazily, ("local", "split"))
    usable = [name for name, obstacle in against.items() if obstacle is None]
    if creation not in ("auto", *usable) or not usable:  # else it need not read all groups
        against = obstacles(world, backend, groups, lazily)
        usable = [name for name, obstacle in against.items() if obstacle is None]
    if creation in usable:
        return Choice(creation, "asked for by name")
    if creation == "auto" and usable:
        chosen = "split" if by_all and "split" in usable else usable[0]
        if chosen == "enumerate":
            return Choice(chosen, f"{against['local']}, and {against['split']}")
        bound = "WORLD is bound to a device, and " if chosen == "split" else ""
        return Choice(chosen, bound + STRATEGIES[chosen].cost)
    reasons = "; ".join(filter(None, [against.get(creation)] if usable else against.values()))
    raise CreationError(
        f"creation={creation!r} cannot create groups of backend {backend!r} here: {reasons}; use "
        + (f"one of {['auto', *usable]}" if usable else "a layout whose ranks ascend in each group")
    )


def obstacles(
    world: World | None,
    backend: str | None,
    groups: RankGroups,
    lazily: bool | None,
    names: Sequence[str] = (),
) -> dict[str, str | None]:
    """Return why each strategy cannot create groups here, by its name; None if it can.

    Args:
        world: The world; None before there is one.
        backend: The requested backend.
        groups: The groups to create.
        lazily: Whether members are to connect at their first message.
        names: The strategies; default: all.
    """
    if world is None:
        return {}
    backend, found = (backend or world.backend).lower(), {}
    for name in names or STRATEGIES:
        found[name] = STRATEGIES[name].why_not(backend, groups, lazily)
        if name != "local" and not world.is_default:
            found[name] = f"torch does so for WORLD only, and this is world {world.name!r}"
    return found


# ---- local -------------------------------------------------------------------------------------


def _why_not_local(backend: str, _groups: RankGroups, _lazily: bool | None) -> str | None:
    if "mpi" in c10d.single_backends(backend):
        return "MPI creates a group only with all ranks of the world"
    return c10d.why_not_members()


def _create_local(
    spec: GroupSpec, title: str, wait: Wait | None, stays: ProcessGroup | None
) -> ProcessGroup | None:
    if spec.own is None:
        return None
    world, options, (index, ranks) = spec.world or current(), spec.options, spec.own
    name = f"{title}/{index}"
    group = stays or c10d.new_group(name, ranks, options=options, world=world, wait=wait)
    if options.enable_reconfigure:
        c10d.reconfigure(group, name, ranks, timeout=options.timeout, world=world, wait=wait)
    return group


# ---- split -------------------------------------------------------------------------------------


def _why_not_split(backend: str, groups: RankGroups, lazily: bool | None) -> str | None:
    if lazily:
        return "a split connects all members when it creates a group, and lazy_init=True forbids it"
    obstacle = c10d.why_not_split(backend)
    if obstacle is None and not (groups.is_sorted or c10d.keeps_order()):
        return f"split_group of this torch sorts the ranks of each group, and {groups!r} are not"
    return obstacle


def _create_split(spec: GroupSpec, title: str, *_: object) -> ProcessGroup | None:
    # Every rank of WORLD must call, but torch looks only at the caller's own group in the list.
    # A rank that is not a member passes a group that it is not in, and gets None.
    own = -1 if spec.own is None else spec.own[0]
    options, group = spec.options, None
    for turn in split_turns(spec.groups):
        index = own if own in turn else int(own == 0)
        own_name = f"{title}/{own}" if own in turn else None
        backend = options.backend or current().backend
        part = c10d.split_group(own_name, spec.groups[index], options, backend)
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
    colors = chain.from_iterable(map(c10d.split_colors, rows))
    for index, color in enumerate(colors):
        turns[seen[color]].add(index)
        seen[color] += 1
    return list(turns.values())


# ---- enumerate ---------------------------------------------------------------------------------


def _why_not_enumerate(backend: str, groups: RankGroups, lazily: bool | None) -> str | None:
    if lazily is not None and c10d.is_nccl(backend) and not c10d.connects_as_told(backend):
        return f"new_group of this torch has no lazy_init={lazily} for NCCL"
    if groups.is_sorted or "sort_ranks" in signature(dist.new_group).parameters:
        return None
    return f"new_group of this torch sorts the ranks of each group, and {groups!r} are not"


def _create_enumerate(spec: GroupSpec, *_: object) -> ProcessGroup | None:
    options, groups = spec.options, spec.groups
    ranks = groups.to_lists()
    given: dict[str, Any] = {"backend": options.backend, **options.given()}
    if options.lazy_init:
        lazy = c10d.lazy_options(options.backend or "", options.pg_options, options.timeout)
        given |= {} if lazy is None else {"pg_options": lazy}
    with lazy_init.set_to(options.lazy_init):
        own: Any = None
        if groups.is_sorted:
            enumerate_groups: Any = dist.new_subgroups_by_enumeration  # no types before torch 2.14
            own = enumerate_groups(ranks, **given)[0]
        else:
            made = [dist.new_group(members, sort_ranks=False, **given) for members in ranks]
            if spec.own is not None:
                own = made[spec.own[0]]
    if dist.is_initialized():
        c10d.forget_non_members()
    return c10d.as_member(own)


class Strategy(NamedTuple):
    """A strategy: why it cannot work, its cost, and the function that creates a group.

    That function takes the spec, the name of its groups, which is the same on all ranks, what waits
    for other members, and the group of before that is to have these members.
    """

    why_not: Callable[[str, RankGroups, bool | None], str | None]
    cost: str
    create: Callable[[GroupSpec, str, Wait | None, ProcessGroup | None], ProcessGroup | None]


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


def create(
    spec: GroupSpec, name: str, call: Call[Any] | None, stays: ProcessGroup | None = None
) -> ProcessGroup | None:
    """Create the group of the calling rank, and leave torch as it was if that fails.

    Args:
        spec: What is created.
        name: The name of the groups, the same on all ranks.
        call: The call that creates it; None before there is a world.
        stays: The group that is to have these members; None: a new one is created.

    Returns:
        The group; None where the calling rank is not a member.

    Raises:
        ConnectionFailedError: The members of a gloo group could not connect.
    """
    before = c10d.registered()
    wait = None if call is None or call.scope.is_alone else call.wait
    try:
        return STRATEGIES[spec.choice.strategy].create(spec, name, wait, stays)
    except BaseException as error:
        with contextlib.suppress(Exception):  # the error at hand matters more
            c10d.destroy(_left_by(spec, name, before))
        c10d.forget_non_members()
        if (spec.world is None or spec.world.is_default) and not dist.is_initialized():
            raise NotInitializedError(
                f"torch.distributed is not initialised, so the groups over {spec.key} cannot be "
                f"created; call hypercomm.join(), or torch.distributed.init_process_group()"
            ) from error
        known = (HyperCommError, dist.DistNetworkError, ConnectionFailedError)
        if isinstance(error, RuntimeError) and not isinstance(error, known):
            reason = (str(error).splitlines() or [""])[0]
            raise CreationError(
                f"the process group over {spec.key} was not created: {reason}"
            ) from error
        raise


def _left_by(spec: GroupSpec, name: str, before: set[ProcessGroup]) -> set[ProcessGroup]:
    """Return what a failed creation has registered; other threads may have registered theirs."""
    new = c10d.registered() - before
    if spec.choice.strategy in {"local", "split"}:
        is_live = spec.world is not None  # else torch's own functions are replaced
        return new & c10d.registered_as(f"{name}/{spec.own[0]}") if spec.own and is_live else set()
    new -= c10d.kept()  # torch has named it
    if not dist.is_initialized() or spec.own is None:
        return new
    return {one for one in new if tuple(dist.get_process_group_ranks(one)) == spec.own[1]}
