"""The process groups that Megatron's code asks for, as requests to a grid."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import TypedDict, cast

import attrs

from hypercomm.compat.megatron.groups import nccl
from hypercomm.compat.megatron.groups.configuration import Configuration, RanksFunction
from hypercomm.compat.megatron.groups.derive import Derived
from hypercomm.compat.megatron.groups.layouts import DIMS, GTP
from hypercomm.compat.megatron.groups.of_a_grid import EXPERT, gtp_size, own_dims
from hypercomm.compat.megatron.groups.table import EXPERT_ALL_GATHER, TABLE, GroupRow
from hypercomm.errors import GroupOptionsError, LayoutError
from hypercomm.grid import HyperCommGrid
from hypercomm.grid.arguments import GroupArguments
from hypercomm.layout import RankGroups, RankLayout
from hypercomm.layout.checks import as_flag
from hypercomm.layout.text import shown
from hypercomm.process_groups.spec import GroupKey


class MegatronChoices(TypedDict, total=False):
    """The keyword arguments of `megatron_requests`, which says what they mean."""

    num_distributed_optimizer_instances: int
    hierarchical_context_parallel_sizes: Sequence[int] | None
    create_all_gather_group: bool
    hybrid_context_parallel: bool
    create_gloo_process_groups: bool
    get_embedding_ranks: RanksFunction | None
    get_position_embedding_ranks: RanksFunction | None
    nccl_communicator_config_path: str | None
    high_priority_stream_groups: Sequence[str] | None


def megatron_requests(
    grid: HyperCommGrid,
    *,
    num_distributed_optimizer_instances: int = 1,
    hierarchical_context_parallel_sizes: Sequence[int] | None = None,
    create_all_gather_group: bool = False,
    hybrid_context_parallel: bool = False,
    create_gloo_process_groups: bool = False,
    get_embedding_ranks: RanksFunction | None = None,
    get_position_embedding_ranks: RanksFunction | None = None,
    nccl_communicator_config_path: str | None = None,
    high_priority_stream_groups: Sequence[str] | None = None,
) -> list[GroupArguments]:
    """List the process groups that Megatron's code asks for, as `create_pgs` takes them.

    A dim that the grid lacks has size 1. Megatron's code takes None for WORLD, so a field all of
    whose dims are lacking, such as `cp`, gets groups of one rank, which are one process group.
    Groups that are derived from those over dims are so again after `grid.reshape(...)`, as long
    as the dims keep their names. SHARP is left out: it is for the first communicator of a job.

    Args:
        grid: A grid with some of the dims tp, gtp_remat, cp, dp and pp; its view "expert", if it
            has one, has some of tp, ep, gtp_remat, dp and pp, perhaps as expt_tp, expt_gtp_remat
            and expt_dp. Without that view the experts are laid out as the dense layers.
        num_distributed_optimizer_instances: Into how many parts dp is cut.
        hierarchical_context_parallel_sizes: Sizes of the levels of cp, innermost first.
        create_all_gather_group: Whether dp and cp have a second group, for all-gathers, and so has
            the dp of experts that are parallel.
        hybrid_context_parallel: Whether there are groups of 2, 4, 8, ... ranks of dp and cp.
        create_gloo_process_groups: Whether the data parallel groups have gloo twins, under the
            name "gloo", or with _gloo behind it; with GTP there are none.
        get_embedding_ranks: Returns the ranks of a pipeline that hold word embeddings; default:
            its first and last.
        get_position_embedding_ranks: The same for position embeddings; default: its first.
        nccl_communicator_config_path: A yaml file with NCCL options for each group.
        high_priority_stream_groups: Keys of groups whose streams have a high priority.

    Returns:
        A request for each row of Megatron's groups, in Megatron's order.

    Raises:
        LayoutError: `grid` is no grid, has none of Megatron's dims, or cannot be cut like this.
        GroupOptionsError: A choice is none, or a function is no function.
        ConfigurationError: There are several optimizer instances with GTP, or hybrid groups do
            not come out even.
        NotInitializedError: There are NCCL options, and no job tells whether they have an effect.
        NcclConfigError, FileNotFoundError: The NCCL configuration cannot be used.

    Example:
        >>> grid = HyperCommGrid([2, 4, 2], ["tp", "dp", "pp"], world_size=16)
        >>> wanted = megatron_requests(grid)
        >>> [request.get("name") or "-".join(request["dims"]) for request in wanted]
        ['dp', 'cp', 'tp-pp', 'tp', 'pp', 'embd', 'pos_embd', 'tp-dp', 'ep', 'intra_dist_opt']
    """
    choices = {name: value for name, value in locals().items() if name != "grid"}
    if not isinstance(grid, HyperCommGrid):
        raise LayoutError(f"grid must be a HyperCommGrid, got {shown(grid)}")
    for name in (
        "create_all_gather_group",
        "hybrid_context_parallel",
        "create_gloo_process_groups",
    ):
        as_flag(choices[name], name, GroupOptionsError)
    configuration = Configuration(
        **choices,
        gtp_remat_size=gtp_size(grid.layout, "dense"),
        expert_gtp_remat_size=gtp_size(grid.views.get(EXPERT, grid.layout), "expert"),
    )
    configuration.check_gtp()
    replicas = own_dims(grid.layout, "dp-cp", "dense")
    configuration.check_hybrid(math.prod(grid.layout.size_of(dim) for dim in replicas))
    options = nccl.OptionsByKey(
        nccl.load(nccl_communicator_config_path, high_priority_stream_groups)
    )
    sides = {"dense": _side(grid, None)}
    sides["expert"] = _side(grid, EXPERT) if EXPERT in grid.views else sides["dense"]
    has_experts = sides["expert"].layout.size_of("ep", default=1) > 1
    requests: dict[GroupKey, GroupArguments] = {}
    for row in (*TABLE, EXPERT_ALL_GATHER) if has_experts else TABLE:
        for request in requests_of(row, sides[row.grid], configuration, options):
            arguments = request.arguments
            key, _ = grid._key(arguments["dims"], arguments.get("name"), arguments.get("view"))
            requests.setdefault(key, arguments)
    return list(requests.values())


@attrs.frozen
class Side:
    """The dense or the expert layers of a model: their layout, and the view that it is, if any."""

    layout: RankLayout
    view: str | None = None


def _side(grid: HyperCommGrid, view: str | None) -> Side:
    side = Side(grid.layout if view is None else grid.views[view], view)
    if not own_dims(side.layout, "-".join(DIMS), "expert" if view else "dense"):
        what = f"view {view!r} ({side.layout}) of the grid" if view else f"the grid ({side.layout})"
        raise LayoutError(
            f"{what} has none of Megatron's dims tp, cp, ep, dp and pp; rename() its dims"
        )
    return side


@attrs.frozen
class RowRequest:
    """One group of a row, asked for.

    Attributes:
        row: The row.
        part: Which of several groups, by place or size; None for a row that makes one.
        twin: Whether it is the gloo twin.
        arguments: Those of `create_pg`.
    """

    row: GroupRow
    part: int | None
    twin: bool
    arguments: GroupArguments


def requests_of(
    row: GroupRow,
    side: Side,
    configuration: Configuration,
    options: nccl.OptionsByKey,
    *,
    lone_peers: bool = False,
) -> Iterator[RowRequest]:
    """Ask for the groups of one row: most rows have one, some several, options may have none.

    Args:
        row: The row.
        side: The layers that it is of.
        configuration: What the user chose.
        options: The options of each group.
        lone_peers: Whether each rank is a group of GTP peers where there are none.
    """
    has_peers = bool(own_dims(side.layout, GTP, row.grid))
    if row.gtp and not has_peers and not (lone_peers and row.dims == GTP):
        return
    dims = own_dims(side.layout, row.dims_for(configuration), row.grid)
    if not dims and row.field is None and row.part is None:
        return  # nobody looks for a group of one rank here
    spanned = dims or side.layout.dim_names[:1]
    gloo = row.gloo and configuration.creates_gloo(row.grid)
    backend = configuration.pipeline_model_parallel_comm_backend if row.key == "pp" else None
    for part, derive in _derivations(row, configuration, side.layout.groups(*spanned), not dims):
        for twin in (False, True)[: 1 + gloo]:
            arguments = {
                "dims": spanned,
                "name": row.filed_as(dims, part, twin=twin),
                "view": side.view,
                "derive": derive,
                "share": None if dims else "identical",
                "backend": "gloo" if twin else backend,
                "pg_options": None if twin or backend == "ucc" else options.of(row.key),
            }
            given = {name: value for name, value in arguments.items() if value is not None}
            yield RowRequest(row, part, twin, cast("GroupArguments", given))


def _derivations(
    row: GroupRow, configuration: Configuration, groups: RankGroups, is_alone: bool
) -> Iterator[tuple[int | None, _Derive | None]]:
    """What makes each group of a row of those over its dims, with its part; None for plain ones."""
    if row.derive is None and not is_alone:
        yield None, None
        return
    derive = _Derive(row, configuration, is_alone)
    made = derive.every(groups)
    if isinstance(made, RankGroups):
        yield None, derive
    elif made is not None:
        parts = made if isinstance(made, dict) else range(len(made))
        yield from ((part, attrs.evolve(derive, part=part)) for part in parts)


@attrs.frozen
class _Derive:
    """Makes the groups of a row of those over its dims, whatever sizes these have.

    Attributes:
        row: The row.
        configuration: What the row's function looks at.
        is_alone: Whether the grid has none of the row's dims, so that each rank is alone.
        part: Which of several groups, by place or size; None for a row that makes one.
    """

    row: GroupRow
    configuration: Configuration
    is_alone: bool
    part: int | None = None

    def __call__(self, groups: RankGroups) -> RankGroups:
        made = self.every(groups)
        if self.part is not None and isinstance(made, (list, dict)):
            try:
                return made[self.part]
            except LookupError:
                raise LayoutError(
                    f"{self.row.option} makes no groups {self.row.part}{self.part} of "
                    f"{groups.group_size} ranks; keep these sizes, or destroy_pg() the group first"
                ) from None
        return made if isinstance(made, RankGroups) else groups

    def every(self, groups: RankGroups) -> Derived:
        """Make all groups of the row."""
        groups = groups.chunks(1) if self.is_alone else groups
        if self.row.derive is None:
            return groups
        try:
            return self.row.derive(self.configuration, groups)
        except LayoutError as error:
            raise LayoutError(f"{self.row.option or self.row.field}: {error}") from error
