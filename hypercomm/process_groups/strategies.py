"""The ways of creating the process groups of some dims, and the one place that chooses.

local      each rank creates its own group, under a name that all members derive alike
split      every rank of WORLD splits its communicator once, where WORLD is bound to a device
enumerate  every rank walks every group: torch.distributed.new_subgroups_by_enumeration

Members are in the order of the groups, which a layout that lists its ranks may not sort.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container
from functools import cached_property
from inspect import signature
from typing import TYPE_CHECKING, Any, NamedTuple

import attrs
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypercomm.errors import CreationError, RankOutsideError
from hypercomm.layout import RankGroups
from hypercomm.process_groups import torch_internals as c10d
from hypercomm.process_groups import world
from hypercomm.process_groups.job import current, current_or_none
from hypercomm.process_groups.torch_internals.gloo import Wait, lazy_init

if TYPE_CHECKING:
    from hypercomm.process_groups.spec import GroupSpec


class OwnGroup(NamedTuple):
    """The group of the calling rank; its name is the same on all members."""

    name: str
    rank: int
    ranks: tuple[int, ...]


@attrs.frozen(slots=False)
class Attempt:
    """One attempt to create the groups of a spec.

    Attributes:
        name: The name of the groups, the same on all ranks.
        spec: The spec.
        wait: Waits for other members; None where the rank has nobody to wait for.
    """

    name: str
    spec: GroupSpec
    wait: Wait | None

    @cached_property
    def own(self) -> OwnGroup | None:
        """The group of the calling rank; None where it is not a member."""
        rank, groups = world.rank(), self.spec.groups
        try:
            index, _ = groups.locate(rank)
        except RankOutsideError:
            return None
        ranks = groups[index]
        return OwnGroup(f"{self.name}/{index}", rank, ranks)


class Choice(NamedTuple):
    """A way of creating groups, and why it was taken."""

    strategy: str
    reason: str


NOT_YET = Choice("enumerate", "torch.distributed is not initialised")
ADOPTED = Choice("adopted", "a DeviceMesh created it, and stays its owner")


@attrs.frozen
class Wanted:
    """What is to be created.

    Attributes:
        backend: In lower case.
        groups: What is created; None: groups whose members ascend.
        lazily: Whether members connect at their first message.
        by_all: Whether every rank of the world comes to the creation.
    """

    backend: str
    groups: RankGroups | None = None
    lazily: bool | None = None
    by_all: bool = True

    @property
    def is_sorted(self) -> bool:
        """Whether the members of each group ascend."""
        return self.groups is None or self.groups.is_sorted


def choose(
    creation: str,
    backend: str | None,
    groups: RankGroups | None = None,
    *,
    lazily: bool | None = None,
    by_all: bool = True,
) -> Choice:
    """Decide how groups of `backend` (None: that of WORLD) are created in this world.

    Args:
        creation: "auto", or the name of a strategy.
        backend: The backend asked for.
        groups: What is created; default: groups whose members ascend.
        lazily: Whether members are to connect at their first message.
        by_all: Whether every rank of the world comes to the creation.

    Raises:
        CreationError: The strategy asked for cannot work here; says why, and which would.
    """
    job = current_or_none()
    if job is None:
        return NOT_YET
    wanted = Wanted((backend or job.backend).lower(), groups, lazily, by_all)
    if not wanted.is_sorted:  # what is said names the groups
        return _choose(creation, wanted)
    asked = creation, wanted.backend, lazily, by_all
    choice: Choice | None = job.choices.get(asked)
    if choice is None:
        choice = job.choices[asked] = _choose(creation, wanted)
    return choice


def _choose(creation: str, wanted: Wanted) -> Choice:
    if creation == "auto":
        return _auto(wanted)
    obstacle = STRATEGIES[creation].why_not(wanted)
    if obstacle is None:
        return Choice(creation, "asked for by name")
    usable = [name for name, way in STRATEGIES.items() if way.why_not(wanted) is None]
    raise CreationError(
        f"creation={creation!r} cannot create groups of backend {wanted.backend!r} here: "
        f"{obstacle}; " + (f"use one of {['auto', *usable]}" if usable else _SORT_THEM)
    )


def alternatives(
    strategy: str, backend: str | None, groups: RankGroups | None, *, lazily: bool | None = None
) -> dict[str, str]:
    """Say of each other way of creating groups what speaks against it."""
    job = current_or_none()
    if job is None:
        return {}
    wanted = Wanted((backend or job.backend).lower(), groups, lazily)
    return {
        name: way.why_not(wanted) or f"it would work too: {way.cost}"
        for name, way in STRATEGIES.items()
        if name != strategy
    }


def _auto(wanted: Wanted) -> Choice:
    not_split, not_local = _why_not_split(wanted), _why_not_local(wanted)
    if not_split is None and (wanted.by_all or not_local is not None):
        return Choice("split", f"WORLD is bound to a device, and {STRATEGIES['split'].cost}")
    if not_local is None:
        return Choice("local", STRATEGIES["local"].cost)
    not_enumerate = _why_not_enumerate(wanted)
    if not_enumerate is None:
        return Choice("enumerate", f"{not_local}, and {not_split}")
    raise CreationError(
        f"nothing can create groups of backend {wanted.backend!r} here: {not_split}; {not_local}; "
        f"{not_enumerate}; {_SORT_THEM}"
    )


_SORT_THEM = "use a layout whose ranks ascend along each dim"


# ---- local -------------------------------------------------------------------------------------


def _why_not_local(wanted: Wanted) -> str | None:
    lacks = c10d.missing()
    if lacks:
        return f"in this torch, {', and '.join(lacks)}"
    if "mpi" in c10d.single_backends(wanted.backend):
        return "MPI creates a group only with all ranks of the world"
    return c10d.why_not_alone(wanted.backend) or c10d.replaces_new_group()


def _create_local(attempt: Attempt) -> ProcessGroup | None:
    if attempt.own is None:
        return None
    return c10d.new_group(
        attempt.own.name,
        attempt.own.ranks,
        backend=attempt.spec.options.backend or current().backend,
        timeout=attempt.spec.options.timeout,
        pg_options=attempt.spec.options.pg_options,
        group_desc=attempt.spec.options.group_desc or attempt.name,
        lazily=attempt.spec.options.lazy_init,
        wait=attempt.wait,
    )


# ---- split -------------------------------------------------------------------------------------


def _why_not_split(wanted: Wanted) -> str | None:
    if wanted.lazily:
        return "a split connects all members at once, unlike lazy_init=True"
    obstacle = c10d.why_not_split(wanted.backend)
    if obstacle is None and not (wanted.is_sorted or c10d.keeps_order()):
        return (
            f"torch.distributed.split_group of this torch sorts the ranks of each group, unlike "
            f"{wanted.groups!r}"
        )
    return obstacle


def _create_split(attempt: Attempt) -> ProcessGroup | None:
    # Every rank of WORLD must call, but torch looks only at the caller's own group in the list.
    # A rank that is a member of none passes one that it is not in, and is told that it is in none.
    own = -1 if attempt.own is None else attempt.spec.groups.index_of(attempt.own.rank)
    group = None
    for turn in split_turns(attempt.spec.groups):
        index = own if own in turn else int(own == 0)
        part = c10d.split_group(
            attempt.own.name if attempt.own is not None and own in turn else None,
            attempt.spec.groups[index],
            backend=attempt.spec.options.backend or current().backend,
            timeout=attempt.spec.options.timeout,
            pg_options=attempt.spec.options.pg_options,
            group_desc=attempt.spec.options.group_desc,
        )
        group = part or group
    return group


def split_turns(groups: RankGroups) -> list[Container[int]]:
    """Say which groups can be split off WORLD at once, by their indices: all, as a rule.

    torch tells them apart by a colour, which it derives from the ranks by a hash. Groups of equal
    colours would become one communicator, without a word; each of them is split off in its own
    turn, in the same order on every rank.
    """
    colors = c10d.split_colors(groups.to_array())
    if len(set(colors)) == len(colors):
        return [range(len(colors))]
    seen: Counter[int] = Counter()
    turns: list[list[int]] = []
    for index, color in enumerate(colors):
        if seen[color] == len(turns):
            turns.append([])
        turns[seen[color]].append(index)
        seen[color] += 1
    return [frozenset(turn) for turn in turns]


# ---- enumerate ---------------------------------------------------------------------------------


def _why_not_enumerate(wanted: Wanted) -> str | None:
    of_nccl = wanted.lazily is not None and c10d.is_nccl(wanted.backend)
    if of_nccl and not c10d.connects_as_told(wanted.backend):
        return f"torch connects NCCL groups as it sees fit there, unlike lazy_init={wanted.lazily}"
    if wanted.is_sorted or "sort_ranks" in signature(dist.new_group).parameters:
        return None
    return f"new_group of this torch sorts the ranks of each group, unlike {wanted.groups!r}"


def _create_enumerate(attempt: Attempt) -> ProcessGroup | None:
    options = attempt.spec.options
    with lazy_init.set_to(options.lazy_init):
        group = _enumerate(attempt)
    if dist.is_initialized():
        c10d.forget_non_members()
    return group


def _enumerate(attempt: Attempt) -> ProcessGroup | None:
    """Create all groups in order, and return the caller's."""
    ranks = attempt.spec.groups.to_array().tolist()
    options = {"backend": attempt.spec.options.backend, **attempt.spec.options.given()}
    if attempt.spec.options.lazy_init:
        backend, timeout = attempt.spec.options.backend or "", attempt.spec.options.timeout
        lazy = c10d.lazy_options(backend, attempt.spec.options.pg_options, timeout)
        options |= {} if lazy is None else {"pg_options": lazy}
    if attempt.spec.groups.is_sorted:
        enumerate_groups: Any = dist.new_subgroups_by_enumeration  # has no types before torch 2.14
        return c10d.as_member(enumerate_groups(ranks, **options)[0])
    groups = [dist.new_group(members, sort_ranks=False, **options) for members in ranks]
    own = None if attempt.own is None else groups[attempt.spec.groups.index_of(attempt.own.rank)]
    return c10d.as_member(own)


class Strategy(NamedTuple):
    """A way of creating groups: what keeps it from working, its cost, and what it does."""

    why_not: Callable[[Wanted], str | None]
    cost: str
    create: Callable[[Attempt], ProcessGroup | None]


STRATEGIES = {
    "local": Strategy(
        _why_not_local,
        "each rank creates only the groups that it is a member of",
        _create_local,
    ),
    "split": Strategy(
        _why_not_split,
        "one split, by every rank of the world, makes all groups at once",
        _create_split,
    ),
    "enumerate": Strategy(
        _why_not_enumerate,
        "every rank walks every group of the world",
        _create_enumerate,
    ),
}
"""The ways of creating groups, by name."""
