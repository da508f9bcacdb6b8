"""The arguments of a Megatron model, and the table of its process groups.

A `Configuration` returns the layouts, and `rows` yields the groups of a model. All code that
creates, lists, collects or finds groups reads the table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any, Literal, NamedTuple, get_args

import attrs
import numpy as np

from hypercomm.compat.layouts import EXPERT, GTP, SIZES, Layouts, layouts_of
from hypercomm.compat.megatron import version
from hypercomm.errors import ConfigurationError, LayoutError
from hypercomm.layout import RankGroups, RankLayout
from hypercomm.layout.checks import as_world_size, check_choice, check_duration, positive
from hypercomm.layout.groups import groups_of_rows
from hypercomm.process_groups.spec import GroupRequest, Share

RanksFunction = Callable[[list[int]], Sequence[int]]


@attrs.frozen
class Configuration:
    """A Megatron configuration. `initialize_model_parallel` documents the arguments.

    Example:
        >>> layouts = Configuration(2, expert_model_parallel_size=4).layouts(16)
        >>> str(layouts.dense), str(layouts.expert)
        ('tp=2,cp=1,ep=1,dp=8,pp=1', 'tp=2,cp=1,ep=4,dp=2,pp=1')
    """

    tensor_model_parallel_size: int = 1
    pipeline_model_parallel_size: int = 1
    virtual_pipeline_model_parallel_size: int | None = None
    pipeline_model_parallel_comm_backend: str | None = None
    use_sharp: bool = False
    context_parallel_size: int = 1
    hierarchical_context_parallel_sizes: Sequence[int] | None = None
    expert_model_parallel_size: int = 1
    num_distributed_optimizer_instances: int = 1
    expert_tensor_parallel_size: int | None = None
    nccl_communicator_config_path: str | None = None
    distributed_timeout_minutes: float = 30
    order: str = "tp-cp-ep-dp-pp"
    get_embedding_ranks: RanksFunction | None = None
    get_position_embedding_ranks: RanksFunction | None = None
    create_gloo_process_groups: bool = True
    high_priority_stream_groups: Sequence[str] | None = None
    sharp_enabled_group: str | None = None
    hybrid_context_parallel: bool = attrs.field(default=False, converter=bool, kw_only=True)
    dynamic_context_parallel: bool = attrs.field(default=False, converter=bool, kw_only=True)
    min_dynamic_context_parallel_size: int = attrs.field(default=1, kw_only=True)
    create_all_gather_group: bool = attrs.field(default=False, converter=bool, kw_only=True)
    gtp_remat_size: int = attrs.field(default=1, kw_only=True)
    expert_gtp_remat_size: int = attrs.field(default=1, kw_only=True)
    rank_offset: int = attrs.field(default=0, kw_only=True)
    local_world_size: int | None = attrs.field(default=None, kw_only=True)
    share: Share = attrs.field(default="never", kw_only=True)
    strict: bool = attrs.field(default=False, kw_only=True)
    changes: frozenset[str] = attrs.field(factory=version.changes, init=False)

    def __attrs_post_init__(self) -> None:
        name = "num_distributed_optimizer_instances"
        instances = positive(self.num_distributed_optimizer_instances, name)
        positive(self.min_dynamic_context_parallel_size, "min_dynamic_context_parallel_size")
        if self.hybrid_context_parallel and self.dynamic_context_parallel:
            raise ConfigurationError(
                "hybrid_context_parallel and dynamic_context_parallel are names of one feature in "
                "two branches of Megatron; give only one"
            )
        if self.use_sharp or self.sharp_enabled_group is not None:
            raise ConfigurationError(
                f"use_sharp={self.use_sharp} and sharp_enabled_group={self.sharp_enabled_group!r} "
                f"are not supported; NCCL_COLLNET_ENABLE=1 lets NCCL use SHARP for all groups"
            )
        if (backend := self.pipeline_model_parallel_comm_backend) is not None:
            argument = "pipeline_model_parallel_comm_backend"
            check_choice(argument, backend, ("nccl",), ConfigurationError)
        check_duration(self.timeout)
        check_choice("share", self.share, get_args(Share))
        if instances > 1 and self.has_gtp:
            raise ConfigurationError(
                f"GTP sizes above 1 work with one optimizer instance only, got {name}={instances}"
            )

    @property
    def has_gtp(self) -> bool:
        """Whether dense layers or experts have GTP peers."""
        return self.gtp_remat_size > 1 or self.expert_gtp_remat_size > 1

    def creates_gloo(self, grid: str) -> bool:
        """Return whether the "dense" or "expert" layers have gloo groups, which GTP excludes."""
        with_gtp = self.gtp_remat_size > 1 or (grid == "expert" and self.has_gtp)
        return bool(self.create_gloo_process_groups) and not with_gtp

    @property
    def timeout(self) -> timedelta:
        """The timeout of every group."""
        return timedelta(minutes=self.distributed_timeout_minutes)

    def layouts(self, world_size: int) -> Layouts:
        """Check all arguments, and return the dense and the expert layout.

        Raises:
            LayoutError: A size is not a positive int, or the order cannot be read.
            WorldSizeError: The sizes do not divide the world.
            ConfigurationError, UnknownDimError: The order omits a dim, or names an unknown dim.
            ConfigurationError: Two choices contradict each other.
        """
        if self.local_world_size is not None:
            world_size = as_world_size(self.local_world_size, "local_world_size")
        sizes = {argument: getattr(self, argument) for argument in SIZES}
        anchor = "cp" if "cp_before_gtp_remat" in self.changes else "tp"
        layouts = layouts_of(
            sizes, self.order, world_size, rank_offset=self.rank_offset, anchor=anchor
        )
        if (stages := self.virtual_pipeline_model_parallel_size) is not None:
            positive(stages, "virtual_pipeline_model_parallel_size")
            if layouts.dense.size_of("pp") == 1:
                raise ConfigurationError(
                    f"virtual_pipeline_model_parallel_size={stages} needs at least 2 stages, got 1"
                )
        return layouts


_DEFAULTS = {field.name: field.default for field in attrs.fields(Configuration) if field.init}


# ---- names --------------------------------------------------------------------------------------

GLOO = "_GLOO"
"""Suffix of the global with the gloo group of a data parallel group."""

WITH_GTP = "_WITH_GTP_REMAT"
"""Suffix of the global with the data parallel group that includes all GTP peers."""

Side = Literal["dense", "expert"]

# ---- groups derived from the groups over dims ---------------------------------------------------


def hierarchy(config: Configuration, groups: RankGroups, level: int) -> RankGroups:
    """Return the groups of one level of hierarchical context parallelism. Level 0 is innermost."""
    return groups.levels(config.hierarchical_context_parallel_sizes or ())[level]


def hybrid(_: Configuration, groups: RankGroups, size: Any) -> RankGroups:
    """Return groups of `size` neighbours. The last group within a dp-cp group may be smaller.

    Example:
        >>> hybrid(Configuration(), RankLayout("dp=6").groups("dp"), 4).to_lists()
        [[0, 1, 2, 3], [4, 5]]
    """
    if groups.group_size % size == 0:
        return groups.chunks(size)
    starts = range(0, groups.group_size, size)
    return RankGroups([group[start : start + size] for group in groups for start in starts])


def embedding(config: Configuration, groups: RankGroups, _: Any) -> RankGroups:
    """Return the ranks of each pipeline that have word embeddings."""
    return _picked(groups, config.get_embedding_ranks or default_embedding_ranks)


def position_embedding(config: Configuration, groups: RankGroups, _: Any) -> RankGroups:
    """Return the ranks of each pipeline that have position embeddings."""
    return _picked(groups, config.get_position_embedding_ranks or default_position_embedding_ranks)


def default_embedding_ranks(pp_ranks: Sequence[int]) -> list[int]:
    """Return the ranks of a pipeline that have word embeddings: its first and last stage.

    Example:
        >>> default_embedding_ranks([0, 4, 8]), default_embedding_ranks([3])
        ([0, 8], [3])
    """
    return list(dict.fromkeys([*default_position_embedding_ranks(pp_ranks), pp_ranks[-1]]))


def default_position_embedding_ranks(pp_ranks: Sequence[int]) -> list[int]:
    """Return the rank of a pipeline that has position embeddings: its first stage.

    Example:
        >>> default_position_embedding_ranks([0, 4, 8])
        [0]
    """
    return [pp_ranks[0]]


def _picked(groups: RankGroups, function: Callable[[list[int]], Sequence[int]]) -> RankGroups:
    if function in (default_embedding_ranks, default_position_embedding_ranks):
        # the same stages of every pipeline, so there is no call for each pipeline
        return groups_of_rows(groups.to_array()[:, function([*range(groups.group_size)])])
    picked = groups.pick(lambda ranks: function(list(ranks)))
    picked.to_array()  # reads all pipelines, so that all ranks raise the same error
    return picked


def one_instance(config: Configuration, groups: RankGroups, _: Any) -> RankGroups:
    """Return the part of each group within one optimizer instance."""
    return _by_instance(config, groups)[0]


def across_instances(config: Configuration, groups: RankGroups, _: Any) -> RankGroups:
    """Return groups of ranks that have the same position in different optimizer instances."""
    return _by_instance(config, groups)[1]


def whole_instance(config: Configuration, groups: RankGroups, _: Any) -> RankGroups:
    """Return one group for each optimizer instance, with all ranks of the instance.

    Example:
        >>> config = Configuration(num_distributed_optimizer_instances=2)
        >>> list(whole_instance(config, RankLayout("tp=2,dp=4").groups("dp"), None))
        [(0, 1, 2, 3), (4, 5, 6, 7)]
    """
    instances = config.num_distributed_optimizer_instances
    if instances == 1:
        return groups
    parts = _by_instance(config, groups)[0].to_array().reshape(len(groups), instances, -1)
    return groups_of_rows(np.sort(parts.swapaxes(0, 1).reshape(instances, -1), axis=1))


def _by_instance(config: Configuration, groups: RankGroups) -> tuple[RankGroups, ...]:
    instances = config.num_distributed_optimizer_instances
    return groups.levels([groups.group_size // instances, instances])


def hybrid_sizes(_: Configuration, count: int) -> list[int]:
    """Return the sizes of the hybrid groups of `count` ranks.

    >>> hybrid_sizes(Configuration(), 16)
    [2, 4, 8]
    """
    return _powers_of_2(2, count)


def dynamic_sizes(config: Configuration, count: int) -> list[int]:
    """Return the sizes of the dynamic groups of `count` ranks."""
    return _powers_of_2(config.min_dynamic_context_parallel_size, count)


def _powers_of_2(least: int, count: int) -> list[int]:
    if count % 2:
        raise ConfigurationError(
            f"hybrid_context_parallel and dynamic_context_parallel need an even number of dp-cp "
            f"ranks, got {count}"
        )
    return [2**power for power in range(int(math.log2(count))) if 2**power >= least]


# ---- the table ----------------------------------------------------------------------------------


@attrs.frozen(eq=False)
class Row:
    """One of Megatron's groups.

    Attributes:
        grid: The layers that use the group, "dense" or "expert".
        dims: The dims that the group spans.
        key: The key in an NCCL configuration.
        field: The field of a `ProcessGroupCollection`.
        name: The global with the calling rank's group.
        ranks: The global with the ranks of the group.
        gloo: Whether there is also a gloo group. Its global has the suffix `GLOO`.
        parts: For a row of several groups, a function that returns their positions or sizes, given
            the size of a group over `dims`.
        derive: A function that derives the groups from the groups over `dims`, given the position
            or size of the group in a row of several groups. Default: the groups over `dims`.
        gtp: Whether the group exists because of GTP.
        otherwise: The globals of groups that replace this group if it was not created. The first
            group in this list that was created is used.
        option: The argument that enables the group, which is not created by default.
        overlaps: Whether the group exists to overlap its traffic with the traffic of another group.
        part: For a row of several groups, the prefix of the position or size in their names.
    """

    grid: Side
    dims: str
    key: str
    field: str | None
    name: str
    ranks: str | None = None
    gloo: bool = False
    parts: Callable[[Configuration, int], Iterable[Any]] | None = None
    derive: Callable[[Configuration, RankGroups, Any], RankGroups] | None = None
    gtp: bool = False
    otherwise: tuple[str, ...] = ()
    option: str | None = None
    overlaps: bool = False
    part: str | None = None

    def name_in_grid(self, dims: Sequence[str], part: object = None) -> str | None:
        """Return the name of the group over `dims` in a grid, or None if it needs no name."""
        if dims and self.derive is None and not self.overlaps and part is None:
            return None
        return self.numbered(self.field or self.key, part)

    def description(self, name: str, part: object) -> str:
        """Return Megatron's description of the process group in the global `name`."""
        return self.numbered(name.lstrip("_").replace("GROUPS", "GROUP"), part)

    def numbered(self, name: str, part: object) -> str:
        """Return `name`, with the number `part` if the row has several groups."""
        return name if part is None else f"{name}_{self.part}{part}"


_dense = partial(Row, "dense")
_expert = partial(Row, "expert")
DP = "_DATA_PARALLEL_GROUP"
DP_CP = "_DATA_PARALLEL_GROUP_WITH_CP"
DP_CP_AG = f"{DP_CP}_AG"
EXPERT_DP = "_EXPERT_DATA_PARALLEL_GROUP"
INTRA_DP_CP = f"_INTRA_PARTIAL{DP_CP}"
INTRA_EXPERT_DP = f"_INTRA_PARTIAL{EXPERT_DP}"
INTER_INSTANCES = "_INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP"
TP = "_TENSOR_MODEL_PARALLEL_GROUP"
EXPERT_TP = "_EXPERT_TENSOR_PARALLEL_GROUP"
CP = "_CONTEXT_PARALLEL_GROUP"
PP = "_PIPELINE_MODEL_PARALLEL_GROUP"
MP = "_MODEL_PARALLEL_GROUP"
EP = "_EXPERT_MODEL_PARALLEL_GROUP"
TP_CP = "_TENSOR_AND_CONTEXT_PARALLEL_GROUP"
TP_EP = "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP"
GTP_GROUP = "_GTP_WEIGHT_REMAT_GROUP"
EXPERT_GTP_GROUP = "_EXPERT_GTP_WEIGHT_REMAT_GROUP"
EXPERT_MP = "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP"
EXPERT_MP_WITH_GTP = f"{EXPERT_MP}_WITH_EGTP"
HIERARCHY = "_HIERARCHICAL_CONTEXT_PARALLEL_GROUPS"
DYNAMIC = "_DYNAMIC_DP_CP_GROUPS"
HYBRID = "_HYBRID_DP_CP_GROUPS"
ONE_INSTANCE = "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP"
_INSTANCES = "num_distributed_optimizer_instances"


# Columns: dims, NCCL key, field of a collection, global of the group, global of its ranks. The rows
# are in the order of creation.
# fmt: off
TABLE = (
    _dense("dp-cp", "dp_cp", "dp_cp", DP_CP, "_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP", gloo=True),
    _dense("dp-cp", "dp_cp", "dp_cp_ag", DP_CP_AG,
           option="create_all_gather_group", overlaps=True),
    _dense("dp-cp", "intra_dp_cp", "intra_dp_cp", INTRA_DP_CP,
           gloo=True, option=_INSTANCES, derive=one_instance, otherwise=(DP_CP,)),
    _dense("dp-cp", "dp_cp", None, HYBRID,
           parts=hybrid_sizes, derive=hybrid, option="hybrid_context_parallel", part=""),
    _dense("dp-cp", "dp_cp", None, DYNAMIC,
           parts=dynamic_sizes, derive=hybrid, option="dynamic_context_parallel", part=""),
    _dense("dp", "dp", "dp", DP, "_DATA_PARALLEL_GLOBAL_RANKS", gloo=True),
    _dense("gtp_remat", "gtp_remat", "gtp_remat", GTP_GROUP,
           "_GTP_WEIGHT_REMAT_GLOBAL_RANKS", gtp=True, option="gtp_remat_size"),
    _dense("gtp_remat-dp", "gtp_remat_dp", None, DP + WITH_GTP, gtp=True, otherwise=(DP,)),
    _dense("gtp_remat-dp-cp", "gtp_remat_dp_cp", "dp_cp_gtp_remat", DP_CP + WITH_GTP,
           gtp=True, otherwise=(DP_CP,)),
    _dense("gtp_remat-dp-cp", "gtp_remat_dp_cp", None, INTRA_DP_CP + WITH_GTP, gtp=True,
           option=_INSTANCES, otherwise=(INTRA_DP_CP, DP_CP + WITH_GTP)),
    _dense("cp", "cp", "cp", CP, "_CONTEXT_PARALLEL_GLOBAL_RANKS"),
    _dense("cp", "hcp", "hcp", HIERARCHY,
           parts=lambda config, _: range(len(config.hierarchical_context_parallel_sizes or ())),
           derive=hierarchy, option="hierarchical_context_parallel_sizes", part="L"),
    _dense("tp-gtp_remat-pp", "mp", "mp", MP, "_MODEL_PARALLEL_GLOBAL_RANKS"),
    _dense("tp", "tp", "tp", TP, "_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS"),
    _dense("pp", "pp", "pp", PP, "_PIPELINE_GLOBAL_RANKS"),
    _dense("pp", "embd", "embd", "_EMBEDDING_GROUP", "_EMBEDDING_GLOBAL_RANKS",
           derive=embedding),
    _dense("pp", "pos_embd", "pos_embd", "_POSITION_EMBEDDING_GROUP",
           "_POSITION_EMBEDDING_GLOBAL_RANKS", derive=position_embedding),
    _dense("tp-gtp_remat-dp-cp", "tp_dp_cp", "tp_dp_cp", "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP"),
    _dense("tp-gtp_remat-dp", "tp_dp", None, "_TENSOR_AND_DATA_PARALLEL_GROUP"),
    _dense("tp-cp", "tp_cp", "tp_cp", TP_CP),
    _expert("gtp_remat", "expt_gtp_remat", "expt_gtp_remat", EXPERT_GTP_GROUP,
            "_EXPERT_GTP_WEIGHT_REMAT_GLOBAL_RANKS", gtp=True, option="expert_gtp_remat_size"),
    _expert("ep", "ep", "ep", EP, "_EXPERT_MODEL_PARALLEL_RANKS"),
    _expert("tp", "ep_tp", "expt_tp", EXPERT_TP),
    _expert("tp-ep", "tp_ep_mp", "tp_ep", TP_EP),
    _expert("tp-ep-pp", "tp_ep_pp", "tp_ep_pp", EXPERT_MP),
    _expert("tp-ep-gtp_remat-pp", "tp_ep_gtp_remat_pp", "tp_ep_pp_with_egtp_remat",
            EXPERT_MP_WITH_GTP, gtp=True, otherwise=(EXPERT_MP,)),
    _expert("dp", "ep_dp", "expt_dp", EXPERT_DP, gloo=True),
    _expert("dp", "intra_ep_dp", "intra_expt_dp", INTRA_EXPERT_DP,
            gloo=True, option=_INSTANCES, derive=one_instance, otherwise=(EXPERT_DP,)),
    _expert("dp", "inter_ep_dp", "inter_dist_opt", INTER_INSTANCES,
            option=_INSTANCES, derive=across_instances),
    _expert("gtp_remat-dp", "ep_gtp_remat_dp", "expt_dp_gtp_remat", EXPERT_DP + WITH_GTP,
            gtp=True, otherwise=(EXPERT_DP,)),
    _expert("gtp_remat-dp", "ep_gtp_remat_dp", None, INTRA_EXPERT_DP + WITH_GTP, gtp=True,
            option=_INSTANCES, otherwise=(INTRA_EXPERT_DP, EXPERT_DP + WITH_GTP)),
    _expert("tp-gtp_remat-ep-dp-pp", "intra_dist_opt_instance", "intra_dist_opt",
            ONE_INSTANCE, derive=whole_instance),
)
# fmt: on

ROWS = {row.name: row for row in TABLE} | {row.name + GLOO: row for row in TABLE if row.gloo}
"""The row of each global with a group."""

EXPERT_ALL_GATHER = _expert(
    "dp", "ep_dp", "expt_dp_ag", f"{EXPERT_DP}_AG", option="create_all_gather_group", overlaps=True
)
"""The expert group that `create_all_gather_groups` creates. Megatron has no global for it."""

NCCL_KEYS = tuple(dict.fromkeys(row.key for row in TABLE))
"""The keys of an NCCL configuration."""

FIELD_ROWS = {row.field: row for row in (*TABLE, EXPERT_ALL_GATHER) if row.field is not None}
"""The row of each field of a collection."""

FIELDS = {field: row.name for field, row in FIELD_ROWS.items()}
"""The global of each field."""

# ---- Megatron's dims in any layout --------------------------------------------------------------

_REPLICAS = {"dense": "ep", "expert": "cp"}
"""The dim along which these layers are replicated, because it splits only the other layers."""


def own_dims(layout: RankLayout, dims: str, grid: Side) -> tuple[str, ...]:
    """Return the dims of a layout that stand for some of Megatron's dims, in the layout's order.

    Dims that the layout does not have are omitted.

    Args:
        layout: The layout of a grid, or of its view "expert".
        dims: Megatron's dims, as in "tp-ep-pp".
        grid: The layers that the dims belong to. For "expert", tp, dp and gtp_remat may be called
            expt_tp, expt_dp and expt_gtp_remat.

    Example:
        >>> own_dims(RankLayout("expt_tp=2,ep=2,dp=2,pp=2"), "tp-dp", "expert")
        ('expt_tp', 'dp')
        >>> own_dims(RankLayout("tp=2,dp=2"), "dp-cp", "dense")
        ('dp',)
        >>> own_dims(RankLayout("tp=2,cp=2,dp=2"), "dp", "expert")
        ('cp', 'dp')
    """
    wanted = dims.split("-")
    names = layout.dim_names
    found = []
    for name, size in layout.sizes.items():
        if grid == "expert" and f"expt_{name}" in names:
            continue  # experts use the dim with the prefix expt_ instead
        called = name if grid == "dense" else name.removeprefix("expt_")
        if ("dp" if name == _REPLICAS[grid] and size > 1 else called) in wanted:
            found.append(name)
    return tuple(found)


# ---- the groups of a model ----------------------------------------------------------------------


class WantedGroup(NamedTuple):
    """One group of a row, for one model.

    Attributes:
        row: The row.
        part: The position or size of the group in a row with several groups, otherwise None.
        name: The global with the group, or with the list or dict that contains the group.
        request: The arguments of `create_pg`. A shared group does not have Megatron's description.
    """

    row: Row
    part: Any
    name: str
    request: GroupRequest


def rows(
    config: Configuration,
    layouts: Layouts,
    options: Mapping[str, Any],
    *,
    view: str | None = EXPERT,
    table: Iterable[Row] = TABLE,
    by_function: bool = False,
) -> Iterator[WantedGroup]:
    """Yield each group of a model, and the request that creates the group, in Megatron's order.

    Args:
        config: The configuration.
        layouts: The layouts of the dense and the expert layers.
        options: The backend options by NCCL key.
        view: The view of the expert layers, or None if the dense layers have the same layout.
        table: The rows.
        by_function: Whether a function of the program creates the groups. It is also called for the
            group over a GTP dim that Megatron creates even without GTP, since 0.19.

    Example:
        >>> config = Configuration(tensor_model_parallel_size=2)
        >>> wanted = list(rows(config, config.layouts(8), {}))
        >>> wanted[0].name, wanted[0].request.dims
        ('_DATA_PARALLEL_GROUP_WITH_CP', ('cp', 'dp'))
    """
    layout_of = layouts._asdict()
    chosen = {name for name, value in _DEFAULTS.items() if getattr(config, name) != value}
    has_gloo = {side: config.creates_gloo(side) for side in layout_of}
    for row in table:
        layout = layout_of[row.grid]
        is_cut = row.derive is whole_instance and _INSTANCES in chosen
        dims = own_dims(layout, "dp" if is_cut else row.dims, row.grid)
        if row.gtp and not own_dims(
            layout, GTP, row.grid
        ):  # before 0.19, there are no groups of one peer
            is_made = row.dims == GTP or (by_function and row.name == EXPERT_MP_WITH_GTP)
            is_needed = is_made and "gtp_remat" in config.changes
        elif row.option is not None and row.dims != GTP:
            is_needed = row.option in chosen
        else:  # a group of one rank is needed only for a field of a collection
            is_needed = bool(dims) or row.field is not None
        if not is_needed:
            continue
        spanned = dims or layout.dim_names[:1]
        size = layout.size_of(*dims) if dims else 1
        # A group of one rank has no traffic to overlap.
        is_shared = size == 1 or (config.share == "identical" and not row.overlaps)
        common: dict[str, Any] = {
            "dims": spanned if len(spanned) > 1 else spanned[0],
            "view": view if row.grid == "expert" else None,
            "timeout": config.timeout,
            "share": "identical" if is_shared and not by_function else None,
        }
        backend = config.pipeline_model_parallel_comm_backend if row.name == PP else None
        for part in row.parts(config, size) if row.parts else (None,):
            name = row.name_in_grid(dims, part)
            if not dims or row.derive is not None:
                common["derive"] = partial(_derive, row, config, not dims, part)
            wanted = [(row.name, name, backend, options.get(row.key))]
            if row.gloo and has_gloo[row.grid]:
                wanted.append((row.name + GLOO, f"{name}_gloo" if name else "gloo", "gloo", None))
            for variable, called, its_backend, pg_options in wanted:
                request = GroupRequest(
                    **common,
                    name=called,
                    backend=its_backend,
                    pg_options=pg_options,
                    group_desc=None if common["share"] else row.description(variable, part),
                )
                yield WantedGroup(row, part, variable, request)


def values_of(
    held: Mapping[str, Mapping[Any, Any]], table: Iterable[Row] = TABLE
) -> dict[str, Any]:
    """Return the value of each global of the table: a group, a list by level, or a dict by size.

    Args:
        held: The groups that were created for each global, by part. A row of several groups has
            only the groups of the calling rank.
        table: The rows.
    """
    values: dict[str, Any] = {}
    for row in table:
        for suffix in ("", GLOO) if row.gloo else ("",):
            name = row.name + suffix
            groups = held.get(name)
            if groups is None and row.otherwise:
                first = row.otherwise[0] + suffix
                last = row.otherwise[-1] + suffix
                other = first if first in held else last
                if other in values:
                    values[name] = values[other]
            elif groups is not None and row.part is None:
                values[name] = groups[None]
            elif groups is not None:
                values[name] = dict(groups) if row.field is None else [*groups.values()] or None
    return values


def _derive(
    row: Row, config: Configuration, is_alone: bool, part: Any, groups: RankGroups
) -> RankGroups:
    """Derive the groups of a row from the groups over its dims.

    Args:
        row: The row.
        config: The configuration.
        is_alone: Whether the layout has none of the row's dims, so that each rank is a group.
        part: The position or size of the group in a row with several groups, otherwise None.
        groups: The groups over the dims.
    """
    groups = groups.chunks(1) if is_alone else groups
    if row.derive is None:
        return groups
    try:
        return row.derive(config, groups, part)
    except (LayoutError, LookupError) as error:
        given = f"{row.option}={getattr(config, row.option)}" if row.option else row.field
        raise ConfigurationError(f"{given}: {error}") from error
