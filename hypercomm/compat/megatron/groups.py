"""Which of Megatron's globals is which groups of which grid, as a table."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import attrs

from hypercomm.compat.megatron.configuration import Configuration, RanksFunction, hybrid_sizes
from hypercomm.errors import LayoutError
from hypercomm.layout import RankGroups, RankLayout
from hypercomm.layout.checks import as_ordered

Derived = RankGroups | list[RankGroups] | dict[int, RankGroups] | None
Derive = Callable[[Configuration, RankLayout, RankGroups], Derived]


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


def _plain(_: Configuration, __: RankLayout, groups: RankGroups) -> Derived:
    return groups


def _all_gather(config: Configuration, _: RankLayout, groups: RankGroups) -> Derived:
    return groups if config.create_all_gather_group else None


def _instance(config: Configuration, _: RankLayout, groups: RankGroups) -> Derived:
    """The part of each group that is in one distributed optimizer instance."""
    instances = config.num_distributed_optimizer_instances
    return groups.chunks(groups.group_size // instances) if instances > 1 else None


def _across_instances(config: Configuration, _: RankLayout, groups: RankGroups) -> Derived:
    """The members of each group that are at one place in all optimizer instances."""
    instances = config.num_distributed_optimizer_instances
    sizes = [groups.group_size // instances, instances]
    return groups.levels(sizes)[1] if instances > 1 else None


def _whole_instance(config: Configuration, layout: RankLayout, _: RankGroups) -> Derived:
    """All ranks of one optimizer instance: dp in as many parts as there are instances."""
    split = layout.split("dp", dp=-1, instance=config.num_distributed_optimizer_instances)
    return split.groups("tp", "ep", "pp", "dp")


def _hierarchy(config: Configuration, _: RankLayout, groups: RankGroups) -> Derived:
    sizes = config.hierarchical_context_parallel_sizes
    return list(groups.levels(sizes)) if sizes else None


def _hybrid(config: Configuration, _: RankLayout, groups: RankGroups) -> Derived:
    wanted = hybrid_sizes(groups.group_size) if config.hybrid_context_parallel else []
    return {size: groups.chunks(size) for size in wanted}


def _picked(groups: RankGroups, function: RanksFunction | None, default: RanksFunction) -> Derived:
    own = function or default
    picked = groups.pick(lambda ranks: own(list(ranks)))
    if function is not None:
        picked.to_array()  # what is wrong with one pipeline must fail on the ranks of all
    return picked


def _embedding(config: Configuration, _: RankLayout, groups: RankGroups) -> Derived:
    return _picked(groups, config.get_embedding_ranks, default_embedding_ranks)


def _position_embedding(config: Configuration, _: RankLayout, groups: RankGroups) -> Derived:
    return _picked(groups, config.get_position_embedding_ranks, default_position_embedding_ranks)


@attrs.frozen
class GroupRow:
    """One of Megatron's groups.

    Attributes:
        grid: The grid whose groups these are.
        dims: The dims that the groups span.
        key: The key in an NCCL configuration.
        field: The field of a `ProcessGroupCollection`.
        name: The global that holds the calling rank's group.
        ranks: The global that holds the ranks of the group.
        gloo: Whether a gloo twin exists; its global has the same name with _GLOO behind.
        derive: Makes the groups, one or many, of those over `dims`; None for no groups.
        otherwise: The global whose group stands in where there are none.
        option: The argument that makes these groups, for error messages.
        overlaps: Whether the group exists so that its traffic overlaps that of another.
    """

    grid: Literal["dense", "expert"]
    dims: str
    key: str
    field: str | None
    name: str
    ranks: str | None = None
    gloo: bool = False
    derive: Derive = _plain
    otherwise: str | None = None
    option: str | None = None
    overlaps: bool = False

    @property
    def description(self) -> str:
        """What torch's logs show: the name of the global, as that of one group."""
        return self.name.lstrip("_").removesuffix("S")

    @property
    def plain(self) -> bool:
        """Whether the groups are those over `dims` as they are."""
        return self.derive is _plain


_dense, _expert = partial(GroupRow, "dense"), partial(GroupRow, "expert")
_DP_CP, _EXPERT_DP = "_DATA_PARALLEL_GROUP_WITH_CP", "_EXPERT_DATA_PARALLEL_GROUP"
_INSTANCES = "num_distributed_optimizer_instances"

# Columns: dims, NCCL key, field of a collection, global of the group, global of its ranks. The rows
# are in the order of creation, with dp-cp first: SHARP is for the first communicator.
# fmt: off
TABLE = (
    _dense("dp-cp", "dp_cp", "dp_cp", _DP_CP, "_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP", gloo=True),
    _dense("dp-cp", "dp_cp", "dp_cp_ag", "_DATA_PARALLEL_GROUP_WITH_CP_AG",
           derive=_all_gather, option="create_all_gather_group", overlaps=True),
    _dense("dp-cp", "intra_dp_cp", "intra_dp_cp", "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP",
           gloo=True, derive=_instance, otherwise=_DP_CP),
    _dense("dp-cp", "dp_cp", None, "_HYBRID_DP_CP_GROUPS",
           derive=_hybrid, option="hybrid_context_parallel"),
    _dense("dp", "dp", "dp", "_DATA_PARALLEL_GROUP", "_DATA_PARALLEL_GLOBAL_RANKS", gloo=True),
    _dense("cp", "cp", "cp", "_CONTEXT_PARALLEL_GROUP", "_CONTEXT_PARALLEL_GLOBAL_RANKS"),
    _dense("cp", "hcp", "hcp", "_HIERARCHICAL_CONTEXT_PARALLEL_GROUPS",
           derive=_hierarchy, option="hierarchical_context_parallel_sizes"),
    _dense("tp-pp", "mp", "mp", "_MODEL_PARALLEL_GROUP", "_MODEL_PARALLEL_GLOBAL_RANKS"),
    _dense("tp", "tp", "tp", "_TENSOR_MODEL_PARALLEL_GROUP", "_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS"),
    _dense("pp", "pp", "pp", "_PIPELINE_MODEL_PARALLEL_GROUP", "_PIPELINE_GLOBAL_RANKS"),
    _dense("pp", "embd", "embd", "_EMBEDDING_GROUP", "_EMBEDDING_GLOBAL_RANKS",
           derive=_embedding),
    _dense("pp", "pos_embd", "pos_embd", "_POSITION_EMBEDDING_GROUP",
           "_POSITION_EMBEDDING_GLOBAL_RANKS", derive=_position_embedding),
    _dense("tp-dp-cp", "tp_dp_cp", "tp_dp_cp", "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP"),
    _dense("tp-dp", "tp_dp", None, "_TENSOR_AND_DATA_PARALLEL_GROUP"),
    _dense("tp-cp", "tp_cp", "tp_cp", "_TENSOR_AND_CONTEXT_PARALLEL_GROUP"),
    _expert("ep", "ep", "ep", "_EXPERT_MODEL_PARALLEL_GROUP", "_EXPERT_MODEL_PARALLEL_RANKS"),
    _expert("tp", "ep_tp", "expt_tp", "_EXPERT_TENSOR_PARALLEL_GROUP"),
    _expert("tp-ep", "tp_ep_mp", "tp_ep", "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP"),
    _expert("tp-ep-pp", "tp_ep_pp", "tp_ep_pp", "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP"),
    _expert("dp", "ep_dp", "expt_dp", _EXPERT_DP, gloo=True),
    _expert("dp", "intra_ep_dp", "intra_expt_dp", "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP",
            gloo=True, derive=_instance, otherwise=_EXPERT_DP),
    _expert("dp", "inter_ep_dp", "inter_dist_opt", "_INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP",
            derive=_across_instances, option=_INSTANCES),
    _expert("tp-ep-dp-pp", "intra_dist_opt_instance", "intra_dist_opt",
            "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP", derive=_whole_instance),
)
# fmt: on

NCCL_KEYS = tuple(dict.fromkeys(row.key for row in TABLE))
"""The keys that an NCCL configuration may have."""

GLOO = "_GLOO"
"""What stands behind the name of a gloo twin's global."""

ROWS = {row.name: row for row in TABLE} | {row.name + GLOO: row for row in TABLE if row.gloo}
"""The row of each global that holds a group."""
