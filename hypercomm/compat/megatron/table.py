"""The table of Megatron's process groups, and `rows`, which lists the groups of one model from it.

Creating, listing, collecting and finding groups all read this table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, Literal, TypeVar, cast

import attrs
import numpy as np

from hypercomm.compat.megatron.configuration import Configuration, RanksFunction, hybrid_sizes
from hypercomm.compat.megatron.layouts import GTP, Layouts
from hypercomm.errors import LayoutError
from hypercomm.grid.arguments import GroupArguments
from hypercomm.layout import RankGroups, RankLayout
from hypercomm.layout.checks import as_ordered
from hypercomm.layout.groups import Axis, StridedGroups
from hypercomm.layout.parsing import divisors

EXPERT = "expert"
"""The view of a grid over the dims of the expert layers."""

GLOO = "_GLOO"
"""Suffix of the global that holds the gloo group of a data parallel group."""

WITH_GTP = "_WITH_GTP_REMAT"
"""Suffix of the global that holds a data parallel group including all GTP peers."""

Side = Literal["dense", "expert"]
_SIDES: tuple[Side, Side] = ("dense", "expert")
Derived = RankGroups | list[RankGroups] | dict[int, RankGroups] | None
Value = TypeVar("Value")

# ---- groups derived from those over some dims ---------------------------------------------------


def no_groups(_: Configuration, __: RankGroups) -> Derived:
    """Return no groups: another row's are used."""
    return None


def all_gather(config: Configuration, groups: RankGroups) -> Derived:
    """Return the same groups again."""
    return groups if config.create_all_gather_group else None


def hierarchy(config: Configuration, groups: RankGroups) -> Derived:
    """Return the levels of hierarchical context parallelism, innermost first."""
    sizes = config.hierarchical_context_parallel_sizes
    return list(groups.levels(sizes)) if sizes else None


def hybrid(config: Configuration, groups: RankGroups) -> Derived:
    """Return groups of 2, 4, 8, ... neighbours."""
    wanted = hybrid_sizes(groups.group_size) if config.hybrid_context_parallel else []
    return {size: groups.chunks(size) for size in wanted}


def embedding(config: Configuration, groups: RankGroups) -> Derived:
    """Return the ranks of each pipeline that hold word embeddings."""
    return _picked(groups, config.get_embedding_ranks, default_embedding_ranks)


def position_embedding(config: Configuration, groups: RankGroups) -> Derived:
    """Return the ranks of each pipeline that hold position embeddings."""
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
        picked.to_array()  # an error of one pipeline must be raised on all ranks
    return picked


def one_instance(config: Configuration, groups: RankGroups) -> Derived:
    """Return the part of each group within one optimizer instance."""
    part = _part(config, groups)
    return groups.chunks(part) if part < groups.group_size else None


def across_instances(config: Configuration, groups: RankGroups) -> Derived:
    """Return groups of the ranks with equal positions in all optimizer instances."""
    instances = config.num_distributed_optimizer_instances
    return groups.levels([_part(config, groups), instances])[1] if instances > 1 else None


def whole_instance(config: Configuration, groups: RankGroups) -> RankGroups:
    """Return groups of all ranks of each optimizer instance.

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


# ---- the table ----------------------------------------------------------------------------------


@attrs.frozen(eq=False)
class Row:
    """One of Megatron's groups.

    Attributes:
        grid: The layers that it belongs to.
        dims: The dims that the group spans.
        key: The key in an NCCL configuration.
        field: The field of a `ProcessGroupCollection`.
        name: The global that holds the calling rank's group.
        ranks: The global that holds the ranks of the group.
        gloo: Whether there is a gloo group too; its global has the suffix `GLOO`.
        derive: Derives the groups, one or several, from those over `dims`; None: uses these.
        gtp: Whether the group exists because of GTP.
        otherwise: The global whose group is used if there is none, or a function that returns it.
        option: The argument that enables these groups, for error messages.
        overlaps: Whether the group exists so that its traffic overlaps that of another.
        part: Prefix of the position or size of one group, for a row of several groups.
    """

    grid: Side
    dims: str
    key: str
    field: str | None
    name: str
    ranks: str | None = None
    gloo: bool = False
    derive: Callable[[Configuration, RankGroups], Derived] | None = None
    gtp: bool = False
    otherwise: str | Callable[[Configuration], str] | None = None
    option: str | None = None
    overlaps: bool = False
    part: str | None = None

    def filed_as(
        self, dims: tuple[str, ...], part: int | None = None, *, twin: bool = False
    ) -> str | None:
        """Return the name of the group over `dims` in a grid; None for a group without a name."""
        own = "" if self.derive is None and dims else self.field or self.key
        if part is not None:
            own += f"_{self.part}{part}"
        if twin:
            own += "_gloo"
        return own.lstrip("_") or None

    def description(self, part: int | None, *, twin: bool) -> str:
        """Return the description of a group in the logs of torch."""
        name = self.name.lstrip("_").removesuffix("S") + GLOO * twin
        return name if part is None else f"{name}_{self.part}{part}"

    def gather(self, parts: Mapping[Any, Value]) -> Value | dict[Any, Value] | list[Value] | None:
        """Return the value of the global: a group, a list of levels, or a dict by size."""
        if self.part is None:
            return parts.get(None)
        return dict(parts) if self.field is None else list(parts.values()) or None


def _part_with_gtp(config: Configuration) -> str:
    return _DP_CP + WITH_GTP if config.gtp_remat_size > 1 else _INTRA_DP_CP


def _expert_part_with_gtp(config: Configuration) -> str:
    return _EXPERT_DP + WITH_GTP if config.expert_gtp_remat_size > 1 else _INTRA_EXPERT_DP


_dense, _expert = partial(Row, "dense"), partial(Row, "expert")
_DP, _EXPERT_DP = "_DATA_PARALLEL_GROUP", "_EXPERT_DATA_PARALLEL_GROUP"
_DP_CP = f"{_DP}_WITH_CP"
_INTRA_DP_CP, _INTRA_EXPERT_DP = f"_INTRA_PARTIAL{_DP_CP}", f"_INTRA_PARTIAL{_EXPERT_DP}"
_EXPERT_MP = "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP"
_INSTANCES = "num_distributed_optimizer_instances"

# Columns: dims, NCCL key, field of a collection, global of the group, global of its ranks. The rows
# are in the order of creation. dp-cp is first, because the first communicator can use SHARP.
# fmt: off
TABLE = (
    _dense("dp-cp", "dp_cp", "dp_cp", _DP_CP, "_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP", gloo=True),
    _dense("dp-cp", "dp_cp", "dp_cp_ag", "_DATA_PARALLEL_GROUP_WITH_CP_AG",
           derive=all_gather, option="create_all_gather_group", overlaps=True),
    _dense("dp-cp", "intra_dp_cp", "intra_dp_cp", _INTRA_DP_CP,
           gloo=True, derive=one_instance, otherwise=_DP_CP),
    _dense("dp-cp", "dp_cp", None, "_HYBRID_DP_CP_GROUPS",
           derive=hybrid, option="hybrid_context_parallel", part=""),
    _dense("dp", "dp", "dp", _DP, "_DATA_PARALLEL_GLOBAL_RANKS", gloo=True),
    _dense("gtp_remat", "gtp_remat", "gtp_remat", "_GTP_WEIGHT_REMAT_GROUP",
           "_GTP_WEIGHT_REMAT_GLOBAL_RANKS", gtp=True, option="gtp_remat_size"),
    _dense("gtp_remat-dp", "gtp_remat_dp", None, _DP + WITH_GTP, gtp=True, otherwise=_DP),
    _dense("gtp_remat-dp-cp", "gtp_remat_dp_cp", "dp_cp_gtp_remat", _DP_CP + WITH_GTP,
           gtp=True, otherwise=_DP_CP),
    _dense("gtp_remat-dp-cp", "gtp_remat_dp_cp", None, _INTRA_DP_CP + WITH_GTP,
           derive=no_groups, otherwise=_part_with_gtp),
    _dense("cp", "cp", "cp", "_CONTEXT_PARALLEL_GROUP", "_CONTEXT_PARALLEL_GLOBAL_RANKS"),
    _dense("cp", "hcp", "hcp", "_HIERARCHICAL_CONTEXT_PARALLEL_GROUPS",
           derive=hierarchy, option="hierarchical_context_parallel_sizes", part="L"),
    _dense("tp-gtp_remat-pp", "mp", "mp", "_MODEL_PARALLEL_GROUP", "_MODEL_PARALLEL_GLOBAL_RANKS"),
    _dense("tp", "tp", "tp", "_TENSOR_MODEL_PARALLEL_GROUP", "_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS"),
    _dense("pp", "pp", "pp", "_PIPELINE_MODEL_PARALLEL_GROUP", "_PIPELINE_GLOBAL_RANKS"),
    _dense("pp", "embd", "embd", "_EMBEDDING_GROUP", "_EMBEDDING_GLOBAL_RANKS",
           derive=embedding),
    _dense("pp", "pos_embd", "pos_embd", "_POSITION_EMBEDDING_GROUP",
           "_POSITION_EMBEDDING_GLOBAL_RANKS", derive=position_embedding),
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
            gloo=True, derive=one_instance, otherwise=_EXPERT_DP),
    _expert("dp", "inter_ep_dp", "inter_dist_opt", "_INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP",
            derive=across_instances, option=_INSTANCES),
    _expert("gtp_remat-dp", "ep_gtp_remat_dp", "expt_dp_gtp_remat", _EXPERT_DP + WITH_GTP,
            gtp=True, otherwise=_EXPERT_DP),
    _expert("gtp_remat-dp", "ep_gtp_remat_dp", None, _INTRA_EXPERT_DP + WITH_GTP,
            derive=no_groups, otherwise=_expert_part_with_gtp),
    _expert("tp-gtp_remat-ep-dp-pp", "intra_dist_opt_instance", "intra_dist_opt",
            "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP", derive=whole_instance),
)
# fmt: on

EXPERT_ALL_GATHER = _expert(
    *("dp", "ep_dp", "expt_dp_ag", "_EXPERT_DATA_PARALLEL_GROUP_AG"),
    derive=all_gather,
    option="create_all_gather_group",
    overlaps=True,
)
"""The expert group of `create_all_gather_groups`, which no global holds."""

NCCL_KEYS = tuple(dict.fromkeys(row.key for row in TABLE))
"""The keys that an NCCL configuration may have."""

FIELDS = {row.field: row.name for row in TABLE if row.field is not None}
"""The global of each field of a collection, except `expt_dp_ag`."""

ROWS = {row.name: row for row in TABLE} | {row.name + GLOO: row for row in TABLE if row.gloo}
"""The row of each global that holds a group."""

# ---- Megatron's dims in any layout --------------------------------------------------------------

_REPLICAS = {"dense": "ep", "expert": "cp"}
"""The dim that only the other layers are divided along, so that these are replicated along it."""


def own_dims(layout: RankLayout, dims: str, grid: Side) -> tuple[str, ...]:
    """Return the dims of a layout that correspond to some of Megatron's, in the layout's order.

    A dim that the layout lacks has size 1 and is left out.

    Args:
        layout: That of a grid, or of its view "expert".
        dims: Megatron's dims, as in "tp-ep-pp".
        grid: The layers of Megatron's dims. In "expert", tp, dp and gtp_remat may be called
            expt_tp, expt_dp and expt_gtp_remat.

    Example:
        >>> own_dims(RankLayout.parse("expt_tp=2,ep=2,dp=2,pp=2"), "tp-dp", "expert")
        ('expt_tp', 'dp')
        >>> own_dims(RankLayout.parse("tp=2,dp=2"), "dp-cp", "dense")
        ('dp',)
        >>> own_dims(RankLayout.parse("tp=2,cp=2,dp=2"), "dp", "expert")
        ('cp', 'dp')
    """
    wanted, names, own = dims.split("-"), layout.dim_names, []
    replicas = _REPLICAS[grid] if "dp" in wanted else None
    for name, size in zip(names, layout.shape, strict=True):
        called = name
        if grid == "expert":
            if f"expt_{name}" in names:
                continue  # that one is the dim of the experts
            called = name.removeprefix("expt_")
        if called in wanted or (name == replicas and size > 1):
            own.append(name)
    return tuple(own)


def gtp_size(layout: RankLayout, grid: Side) -> int:
    """Return the number of GTP peers in a layout.

    Example:
        >>> gtp_size(RankLayout.parse("tp=2,gtp_remat=4"), "dense")
        4
    """
    return math.prod(layout.size_of(dim) for dim in own_dims(layout, GTP, grid))


# ---- the one exit -------------------------------------------------------------------------------


@attrs.frozen(eq=False)
class WantedGroup:
    """One group of a row, for one model.

    Attributes:
        row: The row.
        part: The position or size of one of several groups; None for a row of one group.
        name: The global that holds the group, or the list or dict that it is in.
        groups: The ranks of all groups.
        arguments: The arguments of `create_pg`.
    """

    row: Row
    part: int | None
    name: str
    groups: RankGroups
    arguments: GroupArguments


def rows(
    config: Configuration,
    layouts: Layouts,
    options: Callable[[str], Any],
    *,
    view: str | None = EXPERT,
    table: Iterable[Row] = TABLE,
    lone_peers: bool = True,
) -> Iterator[WantedGroup]:
    """Yield each group of a model with the arguments that create it, in Megatron's order.

    Args:
        config: The user's choices.
        layouts: The layouts of the dense and the expert layers.
        options: Returns the backend options of an NCCL key.
        view: The view of the expert layers; None: they are laid out as the dense ones.
        table: The rows.
        lone_peers: Whether each rank is a GTP group if there are no peers.

    Example:
        >>> config = Configuration(tensor_model_parallel_size=2)
        >>> wanted = rows(config, config.layouts(8), lambda key: None)
        >>> print(*next(wanted).groups)
        (0, 2, 4, 6) (1, 3, 5, 7)
    """
    has_peers = {grid: bool(own_dims(getattr(layouts, grid), GTP, grid)) for grid in _SIDES}
    has_gloo = {grid: config.creates_gloo(grid) for grid in _SIDES}
    known: dict[tuple[Side, tuple[str, ...]], RankGroups] = {}
    for row in table:
        grid, layout = row.grid, getattr(layouts, row.grid)
        cuts_dp = row.derive is whole_instance and config.num_distributed_optimizer_instances > 1
        dims = own_dims(layout, "dp" if cuts_dp else row.dims, grid)
        if row.gtp and not has_peers[grid] and not (lone_peers and row.dims == GTP):
            continue
        if not dims and row.field is None and row.part is None:
            continue  # no caller needs a group of one rank here
        spanned = dims or layout.dim_names[:1]
        if (grid, spanned) not in known:
            known[grid, spanned] = layout.groups(*spanned)
        shared = config.share == "identical" and not row.overlaps
        backend = config.pipeline_model_parallel_comm_backend if row.key == "pp" else None
        for part, derive, groups in _derivations(row, config, known[grid, spanned], not dims):
            for twin in (False, True) if row.gloo and has_gloo[grid] else (False,):
                arguments = {
                    "dims": spanned,
                    "name": row.filed_as(dims, part, twin=twin),
                    "view": view if grid == "expert" else None,
                    "derive": derive,
                    "share": "identical" if shared or not dims else None,
                    "backend": "gloo" if twin else backend,
                    "pg_options": None if twin or backend == "ucc" else options(row.key),
                }
                given = {name: value for name, value in arguments.items() if value is not None}
                name = row.name + GLOO * twin
                yield WantedGroup(row, part, name, groups, cast("GroupArguments", given))


def _derivations(
    row: Row, config: Configuration, groups: RankGroups, is_alone: bool
) -> list[tuple[int | None, _Derive | None, RankGroups]]:
    """Return the function that derives each group of a row, with its part and its ranks."""
    if row.derive is None and not is_alone:
        return [(None, None, groups)]
    derive = _Derive(row, config, is_alone)
    made = derive.every(groups)
    if made is None or isinstance(made, RankGroups):
        return [] if made is None else [(None, derive, made)]
    parts = made.items() if isinstance(made, dict) else enumerate(made)
    return [(part, attrs.evolve(derive, part=part), each) for part, each in parts]


@attrs.frozen
class _Derive:
    """Derives the groups of a row from those over its dims, for any sizes of these.

    Attributes:
        row: The row.
        config: The configuration that the row's function reads.
        is_alone: Whether the layout has none of the row's dims, so that each rank is alone.
        part: The position or size of one of several groups; None for a row of one group.
    """

    row: Row
    config: Configuration
    is_alone: bool
    part: int | None = None

    def __call__(self, groups: RankGroups) -> RankGroups:
        made = self.every(groups)
        if self.part is not None and isinstance(made, (list, dict)):
            try:
                return made[self.part]
            except LookupError:
                raise LayoutError(
                    f"with {groups.group_size} ranks in each group, {self.row.option} makes no "
                    f"groups {self.row.part}{self.part}; keep the sizes, or destroy the group"
                ) from None
        return made if isinstance(made, RankGroups) else groups

    def every(self, groups: RankGroups) -> Derived:
        """Return all groups of the row."""
        groups = groups.chunks(1) if self.is_alone else groups
        if self.row.derive is None:
            return groups
        try:
            return self.row.derive(self.config, groups)
        except LayoutError as error:
            raise LayoutError(f"{self.row.option or self.row.field}: {error}") from error
