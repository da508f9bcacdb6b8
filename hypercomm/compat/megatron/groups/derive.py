"""What Megatron makes of the groups over some dims: parts, levels, ends of pipelines."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import attrgetter

import numpy as np

from hypercomm.compat.megatron.groups.configuration import (
    Configuration,
    RanksFunction,
    hybrid_sizes,
)
from hypercomm.errors import LayoutError
from hypercomm.layout import RankGroups, RankLayout
from hypercomm.layout.checks import as_ordered
from hypercomm.layout.groups import Axis, StridedGroups
from hypercomm.layout.parsing import divisors

Derived = RankGroups | list[RankGroups] | dict[int, RankGroups] | None
Derive = Callable[[Configuration, RankGroups], Derived]


def no_groups(_: Configuration, __: RankGroups) -> Derived:
    """Make none: those of another row stand in."""
    return None


def all_gather(config: Configuration, groups: RankGroups) -> Derived:
    """Make the same groups once more."""
    return groups if config.create_all_gather_group else None


def hierarchy(config: Configuration, groups: RankGroups) -> Derived:
    """Make the levels of hierarchical context parallelism, innermost first."""
    sizes = config.hierarchical_context_parallel_sizes
    return list(groups.levels(sizes)) if sizes else None


def hybrid(config: Configuration, groups: RankGroups) -> Derived:
    """Make groups of 2, 4, 8, ... neighbours."""
    wanted = hybrid_sizes(groups.group_size) if config.hybrid_context_parallel else []
    return {size: groups.chunks(size) for size in wanted}


# ---- ends of pipelines --------------------------------------------------------------------------


def embedding(config: Configuration, groups: RankGroups) -> Derived:
    """Pick the ranks of each pipeline that hold word embeddings."""
    return _picked(groups, config.get_embedding_ranks, default_embedding_ranks)


def position_embedding(config: Configuration, groups: RankGroups) -> Derived:
    """Pick the ranks of each pipeline that hold position embeddings."""
    return _picked(groups, config.get_position_embedding_ranks, default_position_embedding_ranks)


def default_embedding_ranks(pp_ranks: list[int]) -> list[int]:
    """Return the ranks of a pipeline that hold word embeddings: its first and last stage.

    Example:
        >>> default_embedding_ranks([0, 4, 8]), default_embedding_ranks([3])
        ([0, 8], [3])
    """
    ranks = _pipeline(pp_ranks)
    return [ranks[0], ranks[-1]] if len(ranks) > 1 else [ranks[0]]


def default_position_embedding_ranks(pp_ranks: list[int]) -> list[int]:
    """Return the ranks of a pipeline that hold position embeddings: its first stage.

    Example:
        >>> default_position_embedding_ranks([0, 4, 8])
        [0]
    """
    return [_pipeline(pp_ranks)[0]]


def _pipeline(pp_ranks: Sequence[int]) -> tuple[int, ...]:
    ranks = as_ordered(pp_ranks, "pp_ranks")
    if not ranks:
        raise LayoutError("pp_ranks is empty; give the ranks of a pipeline")
    return ranks


def _picked(groups: RankGroups, function: RanksFunction | None, default: RanksFunction) -> Derived:
    own = function or default
    picked = groups.pick(lambda ranks: own(list(ranks)))
    if function is not None:
        picked.to_array()  # what is wrong with one pipeline must fail on the ranks of all
    return picked


# ---- instances of the distributed optimizer -----------------------------------------------------


def one_instance(config: Configuration, groups: RankGroups) -> Derived:
    """Make the part of each group that is in one instance."""
    part = _part(config, groups)
    return groups.chunks(part) if part < groups.group_size else None


def across_instances(config: Configuration, groups: RankGroups) -> Derived:
    """Make groups of the members of each group that are at one place in all instances."""
    instances = config.num_distributed_optimizer_instances
    return groups.levels([_part(config, groups), instances])[1] if instances > 1 else None


def whole_instance(config: Configuration, groups: RankGroups) -> RankGroups:
    """Make groups of all ranks of each instance: a part of each group, or all groups if it is one.

    Example:
        >>> config = Configuration(num_distributed_optimizer_instances=2)
        >>> list(whole_instance(config, RankLayout.parse("tp=2,dp=4").groups("dp")))
        [(0, 1, 2, 3), (4, 5, 6, 7)]
    """
    instances, part = config.num_distributed_optimizer_instances, _part(config, groups)
    if instances == 1:
        return groups
    if isinstance(groups, StridedGroups) and len(groups.inner) == 1:
        step = groups.inner[0].stride
        members = sorted([Axis(part, step), *groups.outer], key=attrgetter("stride"))
        return StridedGroups(groups.origin, [Axis(instances, part * step)], members)
    parts = groups.to_array().reshape(len(groups), instances, part).swapaxes(0, 1)
    ranks = np.sort(parts.reshape(instances, -1), axis=1)
    layout = RankLayout(
        [ranks.shape[1], instances], ["rank", "instance"], ranks=ranks.ravel().tolist()
    )
    return layout.groups("rank")


def _part(config: Configuration, groups: RankGroups) -> int:
    instances = config.num_distributed_optimizer_instances
    if groups.group_size % instances:
        raise LayoutError(
            f"num_distributed_optimizer_instances={instances} does not divide the "
            f"{groups.group_size} ranks of each group; use one of {divisors(groups.group_size)}"
        )
    return groups.group_size // instances
