"""The process groups that Megatron's code asks for, as requests to a grid."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs
import numpy as np

from hypercomm.compat.megatron.configuration import Configuration, RanksFunction
from hypercomm.compat.megatron.grid_groups import EXPERT, own_dims
from hypercomm.compat.megatron.groups import TABLE, Derived, GroupRow
from hypercomm.errors import GroupOptionsError, LayoutError
from hypercomm.grid import HyperCommGrid
from hypercomm.grid.arguments import GroupArguments
from hypercomm.layout import RankGroups, RankLayout
from hypercomm.layout.checks import positive
from hypercomm.layout.messages import shown
from hypercomm.layout.sizes import divisors
from hypercomm.process_groups.keys import GroupKey

_INSTANCES = "num_distributed_optimizer_instances"
_CUT_BY_INSTANCES = ("intra_dp_cp", "intra_expt_dp", "inter_dist_opt", "intra_dist_opt")
_WHOLE_INSTANCE = "intra_dist_opt"
_ANY_LAYOUT = RankLayout([1], ["rank"])


def megatron_requests(
    grid: HyperCommGrid,
    *,
    num_distributed_optimizer_instances: int = 1,
    hierarchical_context_parallel_sizes: Sequence[int] | None = None,
    create_all_gather_group: bool = False,
    get_embedding_ranks: RanksFunction | None = None,
    get_position_embedding_ranks: RanksFunction | None = None,
) -> list[GroupArguments]:
    """List the process groups that Megatron's code asks for, as `create_pgs` takes them.

    A dim that the grid lacks has size 1. Megatron's code takes None for WORLD, so a field all of
    whose dims are lacking, such as `cp`, gets groups of one rank, which are one process group.
    Groups that are derived from those over dims are so again after `grid.reshape(...)`, as long
    as the dims keep their names. Left out are gloo twins, hybrid context parallel groups, options
    of NCCL and SHARP: no collection has a field for those.

    Args:
        grid: A grid with some of the dims tp, cp, dp and pp; its view "expert", if it has one, has
            some of tp (or expt_tp), ep, dp (or expt_dp) and pp. Without that view the experts are
            laid out as the dense layers.
        num_distributed_optimizer_instances: Into how many parts dp is cut.
        hierarchical_context_parallel_sizes: Sizes of the levels of cp, innermost first.
        create_all_gather_group: Whether dp and cp have a second group, for all-gathers.
        get_embedding_ranks: Returns the ranks of a pipeline that hold word embeddings; default:
            its first and last.
        get_position_embedding_ranks: The same for position embeddings; default: its first.

    Returns:
        A request for each row of Megatron's groups, in Megatron's order.

    Raises:
        LayoutError: `grid` is no grid, has none of Megatron's dims, or cannot be cut like this.
        GroupOptionsError: A choice is none, or a function is no function.

    Example:
        >>> grid = HyperCommGrid([2, 4, 2], ["tp", "dp", "pp"], world_size=16)
        >>> wanted = megatron_requests(grid)
        >>> [request.get("name") or "-".join(request["dims"]) for request in wanted]
        ['dp', 'cp', 'tp-pp', 'tp', 'pp', 'embd', 'pos_embd', 'tp-dp', 'ep', 'intra_dist_opt']
    """
    if not isinstance(grid, HyperCommGrid):
        raise LayoutError(f"grid must be a HyperCommGrid, got {shown(grid)}")
    if not isinstance(create_all_gather_group, bool):
        raise GroupOptionsError(
            f"create_all_gather_group must be True or False, got {shown(create_all_gather_group)}"
        )
    functions = {
        "get_embedding_ranks": get_embedding_ranks,
        "get_position_embedding_ranks": get_position_embedding_ranks,
    }
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise GroupOptionsError(
                f"{name} must be a function of the ranks of a pipeline, got {shown(function)}"
            )
    configuration = Configuration(
        num_distributed_optimizer_instances=positive(
            num_distributed_optimizer_instances, _INSTANCES
        ),
        hierarchical_context_parallel_sizes=hierarchical_context_parallel_sizes,
        create_all_gather_group=create_all_gather_group,
        get_embedding_ranks=get_embedding_ranks,
        get_position_embedding_ranks=get_position_embedding_ranks,
    )
    requests: list[GroupArguments] = []
    plain: set[GroupKey] = set()
    for row in TABLE:
        for request in _requests_of(row, grid, configuration):
            key = grid._key(request["dims"], request.get("name"), request.get("view"))[0]
            if key not in plain:
                requests.append(request)
            plain.add(key)
    return requests


def _requests_of(
    row: GroupRow, grid: HyperCommGrid, configuration: Configuration
) -> Iterator[GroupArguments]:
    """The requests for one row: most have one, hierarchies have some, options may have none."""
    view = EXPERT if row.grid == "expert" and EXPERT in grid.views else None
    layout = grid.layout if view is None else grid.views[view]
    every = own_dims(layout, "tp-cp-ep-dp-pp", row.grid)
    if not every:
        what = f"view {view!r} ({layout}) of the grid" if view else f"the grid ({layout})"
        raise LayoutError(
            f"{what} has none of Megatron's dims tp, cp, ep, dp and pp; rename() its dims"
        )
    dims = own_dims(layout, row.dims, row.grid)
    if row.field == _WHOLE_INSTANCE and configuration.num_distributed_optimizer_instances > 1:
        dims = own_dims(layout, "dp", row.grid)
    if row.field is None and not (row.plain and dims):
        return
    request: GroupArguments = {"dims": dims or every[:1], "view": view}
    if row.plain and dims:
        yield request
        return
    derive = _Derive(row, configuration, is_alone=not dims)
    made = derive.every(layout.groups(*request["dims"]))
    named: GroupArguments = {**request, "name": row.field, "derive": derive}
    if not dims:
        named["share"] = "identical"
    if isinstance(made, list):
        for level in range(len(made)):
            own = attrs.evolve(derive, level=level)
            yield {**named, "name": f"{row.field}_L{level}", "derive": own}
    elif made is not None:
        yield named


@attrs.frozen
class _Derive:
    """Makes the groups of a row of those over its dims, whatever sizes these have.

    Attributes:
        row: The row.
        configuration: What the row's function looks at.
        is_alone: Whether the grid has none of the row's dims, so that each rank is alone.
        level: Which of several groups; None for a row that makes one.
    """

    row: GroupRow
    configuration: Configuration
    is_alone: bool
    level: int = 0

    def __call__(self, groups: RankGroups) -> RankGroups:
        made = self.every(groups)
        if isinstance(made, list):
            return made[self.level]
        return made if isinstance(made, RankGroups) else groups

    def every(self, groups: RankGroups) -> Derived:
        """Make all groups of the row."""
        groups = groups.chunks(1) if self.is_alone else groups
        instances = self.configuration.num_distributed_optimizer_instances
        if self.row.field in _CUT_BY_INSTANCES and instances > 1:
            if groups.group_size % instances:
                raise LayoutError(
                    f"{_INSTANCES}={instances} does not divide the {groups.group_size} ranks of "
                    f"{self.row.field}'s data parallel groups; use one of "
                    f"{divisors(groups.group_size)}"
                )
            if self.row.field == _WHOLE_INSTANCE:
                return _whole_instances(groups, instances)
        if self.row.field == _WHOLE_INSTANCE:
            return groups
        try:  # the layout matters for whole instances only
            return self.row.derive(self.configuration, _ANY_LAYOUT, groups)
        except LayoutError as error:
            raise LayoutError(f"{self.row.option or self.row.field}: {error}") from error


def _whole_instances(groups: RankGroups, instances: int) -> RankGroups:
    """Cut data parallel groups into parts, and put the first parts of all together, and so on."""
    parts = groups.to_array().reshape(len(groups), instances, -1)
    ranks = np.sort(parts.swapaxes(0, 1).reshape(instances, -1), axis=1)
    shape = [ranks.shape[1], instances]
    return RankLayout(shape, ["rank", "instance"], ranks=ranks.reshape(-1).tolist()).groups("rank")
