"""What a grid files for each key, and when one group may serve two keys."""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import torch.distributed as dist

from hypercomm.layout import RankGroups
from hypercomm.process_groups.creation import CreatedGroup
from hypercomm.process_groups.options import GroupOptions


@attrs.frozen
class Wanted:
    """The groups of a key, with their options as given and as filled in from the live world."""

    groups: RankGroups
    given: GroupOptions
    resolved: GroupOptions


@attrs.frozen
class Entry:
    """A process group that a grid holds, and what was wanted."""

    wanted: Wanted
    created: CreatedGroup
    share: str


def find_twin(wanted: Wanted, entries: Iterable[Entry], strategy: str) -> Entry | None:
    """Find the first entry that is to be shared, with the same ranks and options."""
    for entry in entries:
        if (
            entry.share == "identical"
            and _same_options(entry.wanted, wanted)
            and _same_ranks(entry.wanted.groups, wanted.groups, strategy)
        ):
            return entry
    return None


def _same_options(one: Wanted, other: Wanted) -> bool:
    """Only the default description may differ."""
    return (
        one.resolved.backend == other.resolved.backend
        and one.resolved.timeout == other.resolved.timeout
        and one.given.pg_options is other.given.pg_options
        and one.given.group_desc == other.given.group_desc
    )


def _same_ranks(one: RankGroups, other: RankGroups, strategy: str) -> bool:
    """Where a rank creates only its own group, that one counts: all of its members see the same.

    Where every rank takes part in a creation, those outside must decide alike: all groups count.
    """
    if strategy != "local":
        return one == other
    rank = dist.get_rank()
    return (
        one.has_member(rank)
        and other.has_member(rank)
        and one.group_size == other.group_size
        and one.of(rank) == other.of(rank)
    )
