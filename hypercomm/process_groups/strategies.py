"""Creates the process groups over some dims with one of three strategies, and chooses it.

local      each rank creates only its own group, under a name that is the same on all members
split      every rank of WORLD splits WORLD's communicator, if WORLD is bound to a device
enumerate  every rank calls torch.distributed.new_subgroups_by_enumeration with all groups

The members of a group have the order of the layout, which is not always ascending.
"""

from __future__ import annotations

import contextlib
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from itertools import chain
from typing import Any, NamedTuple

import attrs
import numpy as np
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypercomm.errors import CreationError, GroupOptionsError, HyperCommError
from hypercomm.layout import RankGroups
from hypercomm.layout.groups import format_counts
from hypercomm.process_groups import torch_internals as torchdist
from hypercomm.process_groups.meeting import Meeting
from hypercomm.process_groups.spec import GroupKey, GroupOptions, GroupSpec
from hypercomm.process_groups.world import World

Creator = Callable[[GroupSpec, str, Meeting, ProcessGroup | None], ProcessGroup | None]

# ---- the choice --------------------------------------------------------------------------------


@attrs.frozen
class Plan:
    """How groups are created: the resolved options, and the strategy.

    Attributes:
        options: The options with the defaults of a world.
        strategy: The name of the strategy.
        reason: The reason for the strategy.
        is_general: Whether the plan is the same for all groups of these options.
    """

    options: GroupOptions
    strategy: str
    reason: str
    is_general: bool


def plan(
    world: World, groups: RankGroups, given: GroupOptions, creation: str, *, by_all: bool
) -> Plan:
    """Add the defaults of a world to options, and choose a strategy.

    Args:
        world: The world.
        groups: The groups to create.
        given: The options of the request, with the defaults of the grid.
        creation: The strategy of the grid, or "auto". A strategy in `given` takes precedence.
        by_all: Whether every rank of the world takes part in the creation.

    Raises:
        GroupOptionsError: Options contradict each other, or would be ignored.
        CreationError: The requested strategy cannot create the groups. The message gives the
            reason, and names the strategies that would work.
    """
    creation = given.creation or creation
    if given.enable_reconfigure and creation != "local":
        if creation != "auto":
            raise GroupOptionsError(
                f"creation={creation!r} cannot create groups with enable_reconfigure=True; use "
                f"'auto' or 'local'"
            )
        creation = "local"
    strategy, reason = _choose(world, groups, given, creation, by_all=by_all)
    depends_on_groups = strategy != "local" or torchdist.split_device() is not None
    is_general = not depends_on_groups and given.pg_options is None
    options = given.resolve(world)
    return Plan(options, strategy, reason, is_general)


def _choose(
    world: World, groups: RankGroups, given: GroupOptions, creation: str, *, by_all: bool
) -> tuple[str, str]:
    """Return the name of a strategy, and the reason for it."""
    backend = (given.backend or world.backend).lower()
    against = obstacles(world, backend, groups, given.lazy_init, ("local", "split"))
    usable = [name for name, obstacle in against.items() if obstacle is None]
    if creation not in ("auto", *usable) or not usable:
        # Check "enumerate" only if necessary, because this check may read all groups.
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
    if usable:
        reasons = against[creation]
        hint = f"one of {['auto', *usable]}"
    else:
        reasons = "; ".join(obstacle for obstacle in against.values() if obstacle is not None)
        hint = "a layout whose ranks ascend in each group"
    raise CreationError(
        f"creation={creation!r} cannot create groups of backend {backend!r} here: {reasons}; use "
        f"{hint}"
    )


def obstacles(
    world: World,
    backend: str,
    groups: RankGroups,
    lazily: bool | None,
    names: Sequence[str] = (),
) -> dict[str, str | None]:
    """Map the name of each strategy to the reason against it, or to None if the strategy works.

    Args:
        world: The world.
        backend: The requested backend.
        groups: The groups to create.
        lazily: The option `lazy_init`.
        names: The strategies to check; default: all.
    """
    found: dict[str, str | None] = {}
    for name in names or STRATEGIES:
        found[name] = STRATEGIES[name].why_not(backend, groups, lazily)
        if name != "local" and not world.is_default:
            found[name] = f"torch supports this only in WORLD, not in world {world.name!r}"
    return found


# ---- local -------------------------------------------------------------------------------------


def _why_not_local(backend: str, _groups: RankGroups, _lazily: bool | None) -> str | None:
    if "mpi" in torchdist.single_backends(backend):
        return "MPI needs all ranks of the world to create a group"
    return torchdist.why_not_members()


def _create_local(
    spec: GroupSpec, title: str, meeting: Meeting, former: ProcessGroup | None
) -> ProcessGroup | None:
    if spec.own is None:
        return None
    index, ranks = spec.own
    name = f"{title}/{index}"
    world = spec.world
    options = spec.options
    group = former
    if group is None:
        group = torchdist.new_group(
            name,
            ranks,
            rank=world.rank,
            backend=options.backend or world.backend,
            store=meeting.store,
            timeout=options.timeout,
            pg_options=options.pg_options,
            group_desc=spec.group_desc,
            lazy_init=options.lazy_init,
            enable_reconfigure=options.enable_reconfigure,
            is_default=world.is_default,
            stale=meeting.stale,
        )
    if options.enable_reconfigure:
        torchdist.reconfigure(
            group,
            name,
            ranks,
            rank=world.rank,
            store=meeting.store,
            timeout=options.timeout,
            stale=meeting.stale,
            left_s=meeting.left_s,
        )
    return group


# ---- split -------------------------------------------------------------------------------------


def _why_not_split(backend: str, groups: RankGroups, lazily: bool | None) -> str | None:
    if lazily:
        return "a split connects all members at the creation, which lazy_init=True forbids"
    obstacle = torchdist.why_not_split(backend)
    if obstacle is None and not (groups.is_sorted or torchdist.keeps_order()):
        return f"split_group of this torch sorts each group, and {groups!r} are not sorted"
    return obstacle


def _create_split(spec: GroupSpec, title: str, *_: object) -> ProcessGroup | None:
    # Every rank of WORLD must call torch in every turn. A rank whose group is in the turn passes
    # this group. Any other rank passes a group of other ranks, and gets None.
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
    """Return sets of group indices. The groups of one set can be split off WORLD in one call.

    torch distinguishes groups by a colour, which is a hash of their ranks. Groups with equal
    colours would silently become one communicator. Such groups are therefore split off one after
    the other, in the same order on every rank. Usually there is one set with all groups.
    """
    seen: Counter[int] = Counter()
    turns: defaultdict[int, set[int]] = defaultdict(set)
    if len(groups.sizes) == 1:
        rows = [groups.to_array()]
    else:
        rows = [np.array([ranks]) for ranks in groups]
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
    return f"new_group of this torch sorts each group, and {groups!r} are not sorted"


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
    with torchdist.lazy_init(options.lazy_init):
        own: Any = None
        if groups.is_sorted:
            enumerate_groups: Any = dist.new_subgroups_by_enumeration  # untyped before torch 2.14
            own = enumerate_groups(ranks, **given)[0]
        else:
            made = [dist.new_group(members, sort_ranks=False, **given) for members in ranks]
            if spec.own is not None:
                own = made[spec.own[0]]
    torchdist.forget_non_members()
    group = torchdist.as_member(own)
    if group is not None:
        torchdist.note_creation(group)
    return group


class Strategy(NamedTuple):
    """A way to create groups.

    Attributes:
        why_not: Takes a backend, groups and `lazy_init`. Returns the reason why the strategy
            cannot create the groups, or None if it can.
        cost: The calls that the strategy needs, as text for explanations.
        create: Creates a group. It takes the arguments of `create_group`.
    """

    why_not: Callable[[str, RankGroups, bool | None], str | None]
    cost: str
    create: Creator


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
        "every rank iterates over every group of the world",
        _create_enumerate,
    ),
}
"""The strategies, by name.

"auto" uses the first strategy that works. If all ranks of the world take part, it prefers "split".
"""


# ---- explanations --------------------------------------------------------------------------------


@attrs.frozen(repr=False)
class Explanation:
    """An explanation of how a process group was created, or would be created.

    str() returns the explanation as lines of text.

    Attributes:
        key: The key of the group.
        groups: All groups over the dims of the key.
        backend: The backend, or None before torch.distributed is initialised.
        strategy: "local", "split" or "enumerate", or "adopted" for a group of a DeviceMesh.
        reason: The reason for the strategy.
        alternatives: Maps the name of each other strategy to the reason against it.
        served_by: The key whose group also serves this key (`share="identical"`), or None.
    """

    key: GroupKey
    groups: RankGroups
    backend: str | None
    strategy: str
    reason: str
    alternatives: Mapping[str, str]
    served_by: str | None

    @classmethod
    def of(cls, spec: GroupSpec, served_by: str | None) -> Explanation:
        """Explain a spec. `served_by` is another key whose group also serves this key, or None."""
        options = spec.options
        others: dict[str, str] = {}
        if spec.strategy != "adopted":
            backend = options.backend or spec.world.backend
            lazily = spec.given.lazy_init
            against = obstacles(spec.world, backend, spec.groups, lazily)
            del against[spec.strategy]
            for name, obstacle in against.items():
                others[name] = obstacle or f"it would work too: {STRATEGIES[name].cost}"
        reason = spec.reason
        turns = len(split_turns(spec.groups)) if spec.strategy == "split" else 1
        if turns > 1:
            reason += f", in {turns} turns, because torch gives some groups the same colour"
        return cls(spec.key, spec.groups, options.backend, spec.strategy, reason, others, served_by)

    @property
    def _headline(self) -> str:
        backend = f", {self.backend}" if self.backend else ""
        return f"{self.key}: {format_counts(self.groups)}{backend}"

    def __repr__(self) -> str:
        return f"<Explanation of {self._headline}: {self.strategy}>"

    def __str__(self) -> str:
        lines = [self._headline]
        if self.served_by is not None:
            lines.append(
                f"  served by the group over {self.served_by}, with the same ranks and options"
            )
        lines.append(f"  {self.strategy}: {self.reason}")
        lines += [f"  not {name}: {reason}" for name, reason in self.alternatives.items()]
        return "\n".join(lines)


# ---- one creation ------------------------------------------------------------------------------


def create_group(
    spec: GroupSpec, name: str, meeting: Meeting, former: ProcessGroup | None = None
) -> ProcessGroup | None:
    """Create the group of the calling rank. After a failure, torch has no such group registered.

    Args:
        spec: The spec of the group.
        name: The common name of all groups over the dims of the spec. It is equal on all ranks.
        meeting: The meeting of the ranks that create groups.
        former: An existing group that is reconfigured for these members; default: none.

    Returns:
        The group, or None if the calling rank is not a member.

    Raises:
        CreationError: torch could not create the group, although all ranks had arrived.
    """
    before = torchdist.registered() if spec.strategy == "enumerate" else set()
    try:
        return STRATEGIES[spec.strategy].create(spec, name, meeting, former)
    except BaseException as error:
        with contextlib.suppress(Exception):  # the original error is raised
            torchdist.destroy(_left_by(spec, name, before))
        torchdist.forget_non_members()
        if isinstance(error, RuntimeError) and not isinstance(error, HyperCommError):
            reason = (str(error).splitlines() or [""])[0]
            raise CreationError(
                f"torch could not create the process group over {spec.key}, although all of its "
                f"ranks had arrived: {reason}; if a process has died, restart the job, otherwise "
                f"destroy the grid on all ranks, and create it again"
            ) from error
        raise


def _left_by(spec: GroupSpec, name: str, before: set[ProcessGroup]) -> set[ProcessGroup]:
    """Return the groups that a failed creation has registered, without groups of other threads."""
    if spec.strategy != "enumerate":
        return torchdist.registered_as(f"{name}/{spec.own[0]}") if spec.own else set()
    new = torchdist.registered() - before - torchdist.kept()  # torch has chosen their names
    if spec.own is None:
        return new
    return {one for one in new if tuple(dist.get_process_group_ranks(one)) == spec.own[1]}
