"""Which of Megatron's globals is which groups of which grid, as a table."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal, TypeVar

import attrs

from hypercomm.compat.megatron.groups import derive
from hypercomm.compat.megatron.groups.configuration import Configuration
from hypercomm.compat.megatron.groups.derive import Derive

WITH_GTP = "_WITH_GTP_REMAT"
"""What stands behind the name of a data parallel global for that with all GTP peers."""

Value = TypeVar("Value")


def _part_with_gtp(config: Configuration) -> str:
    """With GTP there is one optimizer instance, without it nothing to add to a part."""
    return _DP_CP + WITH_GTP if config.gtp_remat_size > 1 else _INTRA_DP_CP


def _expert_part_with_gtp(config: Configuration) -> str:
    return _EXPERT_DP + WITH_GTP if config.expert_gtp_remat_size > 1 else _INTRA_EXPERT_DP


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
        derive: Makes the groups, one or many, of those over `dims`, or no groups; None where they
            are it.
        gtp: Whether they are there because of GTP, and not without peers.
        otherwise: The global whose group stands in where there are none, or a function that says.
        option: The argument that makes these groups, for error messages.
        overlaps: Whether the group exists so that its traffic overlaps that of another.
        part: For a row that makes several groups: what stands before the place or size of one.
    """

    grid: Literal["dense", "expert"]
    dims: str
    key: str
    field: str | None
    name: str
    ranks: str | None = None
    gloo: bool = False
    derive: Derive | None = None
    gtp: bool = False
    otherwise: str | Callable[[Configuration], str] | None = None
    option: str | None = None
    overlaps: bool = False
    part: str | None = None

    @property
    def description(self) -> str:
        """What torch's logs show: the name of the global, as that of one group."""
        return self.name.lstrip("_").removesuffix("S")

    def names(self, config: Configuration) -> list[str]:
        """The globals of the group and of its gloo twin, if there is one."""
        return [self.name] + [self.name + GLOO] * (self.gloo and config.creates_gloo(self.grid))

    def dims_for(self, config: Configuration) -> str:
        """The dims whose groups `derive` takes; several whole instances are made of those of dp."""
        is_cut = config.num_distributed_optimizer_instances > 1
        return "dp" if is_cut and self.derive is derive.whole_instance else self.dims

    def filed_as(
        self, dims: tuple[str, ...], part: int | None = None, *, twin: bool = False
    ) -> str | None:
        """Return the name under which a grid has the group over its `dims`; None for plain ones.

        Args:
            dims: Those of the row that the grid has.
            part: Which one of several.
            twin: Whether it is the gloo twin.
        """
        own = "" if self.derive is None and dims else self.field or self.key
        return "_".join(filter(None, (own, self.place(part), "gloo" * twin))) or None

    def place(self, part: int | None) -> str:
        """Return what stands for one of several groups in names and descriptions; "" for none."""
        return "" if part is None else f"{self.part}{part}"

    def gather(self, parts: Mapping[Any, Value]) -> Value | dict[Any, Value] | list[Value] | None:
        """Return what a global holds of the row: its group, a list of levels, or a dict by size."""
        if self.part is None:
            return parts.get(None)
        return dict(parts) if self.field is None else list(parts.values()) or None

    def stands_in(self, config: Configuration) -> str | None:
        """The global whose group stands in where a configuration has no such groups."""
        return self.otherwise(config) if callable(self.otherwise) else self.otherwise


_dense, _expert = partial(GroupRow, "dense"), partial(GroupRow, "expert")
_DP, _EXPERT_DP = "_DATA_PARALLEL_GROUP", "_EXPERT_DATA_PARALLEL_GROUP"
_DP_CP = f"{_DP}_WITH_CP"
_INTRA_DP_CP, _INTRA_EXPERT_DP = f"_INTRA_PARTIAL{_DP_CP}", f"_INTRA_PARTIAL{_EXPERT_DP}"
_EXPERT_MP = "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP"
_INSTANCES = "num_distributed_optimizer_instances"

# Columns: dims, NCCL key, field of a collection, global of the group, global of its ranks. The rows
# are in the order of creation, with dp-cp first: SHARP is for the first communicator.
# fmt: off
TABLE = (
    _dense("dp-cp", "dp_cp", "dp_cp", _DP_CP, "_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP", gloo=True),
    _dense("dp-cp", "dp_cp", "dp_cp_ag", "_DATA_PARALLEL_GROUP_WITH_CP_AG",
           derive=derive.all_gather, option="create_all_gather_group", overlaps=True),
    _dense("dp-cp", "intra_dp_cp", "intra_dp_cp", _INTRA_DP_CP,
           gloo=True, derive=derive.one_instance, otherwise=_DP_CP),
    _dense("dp-cp", "dp_cp", None, "_HYBRID_DP_CP_GROUPS",
           derive=derive.hybrid, option="hybrid_context_parallel", part=""),
    _dense("dp", "dp", "dp", _DP, "_DATA_PARALLEL_GLOBAL_RANKS", gloo=True),
    _dense("gtp_remat", "gtp_remat", "gtp_remat", "_GTP_WEIGHT_REMAT_GROUP",
           "_GTP_WEIGHT_REMAT_GLOBAL_RANKS", gtp=True, option="gtp_remat_size"),
    _dense("gtp_remat-dp", "gtp_remat_dp", None, _DP + WITH_GTP, gtp=True, otherwise=_DP),
    _dense("gtp_remat-dp-cp", "gtp_remat_dp_cp", "dp_cp_gtp_remat", _DP_CP + WITH_GTP,
           gtp=True, otherwise=_DP_CP),
    _dense("gtp_remat-dp-cp", "gtp_remat_dp_cp", None, _INTRA_DP_CP + WITH_GTP,
           derive=derive.no_groups, otherwise=_part_with_gtp),
    _dense("cp", "cp", "cp", "_CONTEXT_PARALLEL_GROUP", "_CONTEXT_PARALLEL_GLOBAL_RANKS"),
    _dense("cp", "hcp", "hcp", "_HIERARCHICAL_CONTEXT_PARALLEL_GROUPS",
           derive=derive.hierarchy, option="hierarchical_context_parallel_sizes", part="L"),
    _dense("tp-gtp_remat-pp", "mp", "mp", "_MODEL_PARALLEL_GROUP", "_MODEL_PARALLEL_GLOBAL_RANKS"),
    _dense("tp", "tp", "tp", "_TENSOR_MODEL_PARALLEL_GROUP", "_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS"),
    _dense("pp", "pp", "pp", "_PIPELINE_MODEL_PARALLEL_GROUP", "_PIPELINE_GLOBAL_RANKS"),
    _dense("pp", "embd", "embd", "_EMBEDDING_GROUP", "_EMBEDDING_GLOBAL_RANKS",
           derive=derive.embedding),
    _dense("pp", "pos_embd", "pos_embd", "_POSITION_EMBEDDING_GROUP",
           "_POSITION_EMBEDDING_GLOBAL_RANKS", derive=derive.position_embedding),
    _dense("tp-gtp_remat-dp-cp", "tp_dp_cp", "tp_dp_cp", "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP"),
    _dense("tp-gtp_remat-dp", "tp_dp", None, "_TENSOR_AND_DATA_PARALLEL_GROUP"),
    _dense("tp-cp", "tp_cp", "tp_cp", "_TENSOR_AND_CONTEXT_PARALLEL_GROUP"),
    _expert("gtp_remat", "expt_gtp_remat", "expt_gtp_remat", "_EXPERT_GTP_WEIGHT_REMAT_GROUP",
            "_EXPERT_GTP_WEIGHT_REMAT_GLOBAL_RANKS", gtp=True,
            option="expert_gtp_remat_size"),
    _expert("ep", "ep", "ep", "_EXPERT_MODEL_PARALLEL_GROUP", "_EXPERT_MODEL_PARALLEL_RANKS"),
    _expert("tp", "ep_tp", "expt_tp", "_EXPERT_TENSOR_PARALLEL_GROUP"),
    _expert("tp-ep", "tp_ep_mp", "tp_ep", "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP"),
    _expert("tp-ep-pp", "tp_ep_pp", "tp_ep_pp", _EXPERT_MP),
    _expert("tp-ep-gtp_remat-pp", "tp_ep_gtp_remat_pp", "tp_ep_pp_with_egtp_remat",
            f"{_EXPERT_MP}_WITH_EGTP", gtp=True, otherwise=_EXPERT_MP),
    _expert("dp", "ep_dp", "expt_dp", _EXPERT_DP, gloo=True),
    _expert("dp", "intra_ep_dp", "intra_expt_dp", _INTRA_EXPERT_DP,
            gloo=True, derive=derive.one_instance, otherwise=_EXPERT_DP),
    _expert("dp", "inter_ep_dp", "inter_dist_opt", "_INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP",
            derive=derive.across_instances, option=_INSTANCES),
    _expert("gtp_remat-dp", "ep_gtp_remat_dp", "expt_dp_gtp_remat", _EXPERT_DP + WITH_GTP,
            gtp=True, otherwise=_EXPERT_DP),
    _expert("gtp_remat-dp", "ep_gtp_remat_dp", None, _INTRA_EXPERT_DP + WITH_GTP,
            derive=derive.no_groups, otherwise=_expert_part_with_gtp),
    _expert("tp-gtp_remat-ep-dp-pp", "intra_dist_opt_instance", "intra_dist_opt",
            "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP", derive=derive.whole_instance),
)
# fmt: on

EXPERT_ALL_GATHER = _expert(
    *("dp", "ep_dp", "expt_dp_ag", "_EXPERT_DATA_PARALLEL_GROUP_AG"),
    derive=derive.all_gather,
    option="create_all_gather_group",
    overlaps=True,
)
"""What `create_all_gather_groups` makes for experts, beside the table: no global holds it."""

NCCL_KEYS = tuple(dict.fromkeys(row.key for row in TABLE))
"""The keys that an NCCL configuration may have."""

GLOO = "_GLOO"
"""What stands behind the name of a gloo twin's global."""

FIELDS = {row.field: row.name for row in TABLE if row.field is not None}
"""The global of each field of a collection; the expert twin for all-gathers has none."""

ROWS = {row.name: row for row in TABLE} | {row.name + GLOO: row for row in TABLE if row.gloo}
"""The row of each global that holds a group."""
