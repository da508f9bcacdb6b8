"""Makes Megatron's grids for training and inference, and collections of their groups."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import attrs

from hypercomm.compat.layouts import DIMS, EXPERT, GTP, Layouts, megatron_layouts
from hypercomm.compat.megatron import table, version
from hypercomm.compat.megatron.process_groups_config import ProcessGroupCollection
from hypercomm.compat.megatron.state import options_by_key
from hypercomm.errors import GridDestroyedError, LayoutError, UnknownDimError
from hypercomm.grid import HyperCommGrid
from hypercomm.grid.grid_set import GridSet
from hypercomm.layout.checks import as_world_size, check_choice
from hypercomm.process_groups.spec import GroupKey, GroupRequest, Share
from hypercomm.process_groups.world import size_of_world


def megatron_grids(
    *,
    tp: int = 1,
    cp: int = 1,
    pp: int = 1,
    ep: int = 1,
    expt_tp: int | None = None,
    gtp_remat: int = 1,
    expt_gtp_remat: int = 1,
    order: str = "tp-cp-ep-dp-pp",
    world_size: int | None = None,
    inference: Mapping[str, int | None] | None = None,
    **options: Any,
) -> GridSet:
    """Make the grids of a Megatron model: "training", and "inference" if `inference` is given.

    Each grid has the dims tp, cp, dp and pp. Its view "expert" numbers the same ranks along the
    dims expt_tp, ep, expt_dp and pp. The grid and the view share pp. The sizes of dp and expt_dp
    are inferred from the world size. This function creates no process groups. `create_megatron_pgs`
    creates all groups that Megatron's code needs.

    Args:
        tp: Tensor parallel size.
        cp: Context parallel size.
        pp: Pipeline parallel size.
        ep: Expert parallel size.
        expt_tp: Tensor parallel size of the experts. Default: `tp`.
        gtp_remat: Number of peers of generalized tensor parallelism (GTP). GTP peers share each
            weight, and gather the weight for each use. If this number is larger than 1, gtp_remat
            is a dim of the grid. Unless the order names gtp_remat, it is inserted after tp, or
            after cp from megatron-core 0.20 on.
        expt_gtp_remat: Number of GTP peers that share the weights of experts. If this number is
            larger than 1, expt_gtp_remat is a dim of the view. Unless the order names gtp_remat,
            it is inserted after ep.
        order: The order of the dense and of the expert dims. The first dim varies fastest.
        world_size: Number of ranks of the job. Default: see `HyperCommGrid`.
        inference: The sizes for inference on the same ranks, by the names of the arguments above.
        options: The name of the set and the options of its groups, such as `backend=` and `share=`.
            See `GridSet`.

    Raises:
        LayoutError: A size is not a positive int, or the order cannot be read.
        ConfigurationError: The order omits a dim larger than 1, or the dense and the expert layers
            have different pipelines.
        UnknownDimError: The order or `inference` names a dim that Megatron does not have.
        WorldSizeError: The sizes of the dense layers, or the sizes of the experts, do not divide
            the world.

    Example:
        >>> grids = megatron_grids(tp=2, pp=2, ep=2, inference={"tp": 4}, world_size=16)
        >>> for name, grid in grids.items():
        ...     print(name, grid.layout, "experts", grid.view("expert").layout)
        training tp=2,cp=1,dp=4,pp=2 experts expt_tp=2,ep=2,expt_dp=2,pp=2
        inference tp=4,cp=1,dp=4,pp=1 experts expt_tp=4,ep=1,expt_dp=4,pp=1
    """
    total = as_world_size(size_of_world(world_size))
    models: dict[str, Mapping[str, int | None]] = {
        "training": {
            "tp": tp,
            "cp": cp,
            "pp": pp,
            "ep": ep,
            "expt_tp": expt_tp,
            "gtp_remat": gtp_remat,
            "expt_gtp_remat": expt_gtp_remat,
        }
    }
    if inference is not None:
        for dim in inference:
            check_choice("a dim of inference=", dim, [*models["training"]], UnknownDimError)
        models["inference"] = inference
    anchor = "cp" if "cp_before_gtp_remat" in version.changes() else "tp"
    layouts = {
        label: megatron_layouts(sizes, order, total, anchor) for label, sizes in models.items()
    }
    grids = GridSet(
        {label: views.base for label, views in layouts.items()},
        requires="tiled" if inference is None else "colocated",
        world_size=total,
        **options,
    )
    for label, views in layouts.items():
        expert = views[EXPERT]
        grids[label].register_view(EXPERT, expert.layout.sizes, shared_dims=expert.shared_dims)
    return grids


# ---- all groups of a grid -----------------------------------------------------------------------


def megatron_requests(
    grid: HyperCommGrid,
    *,
    num_distributed_optimizer_instances: int = 1,
    hierarchical_context_parallel_sizes: Sequence[int] | None = None,
    create_all_gather_group: bool = False,
    get_embedding_ranks: table.RanksFunction | None = None,
    get_position_embedding_ranks: table.RanksFunction | None = None,
    nccl_communicator_config_path: str | None = None,
    high_priority_stream_groups: Sequence[str] | None = None,
) -> list[GroupRequest]:
    """Return the requests with which `create_pgs` creates the groups that Megatron's code needs.

    Dims that the grid does not have count as dims of size 1. A field of the collection, such as
    `cp`, may span only dims that the grid does not have. Groups of one rank are requested for such
    fields, because Megatron's code would treat None as WORLD. On each rank, all these fields share
    one group. `grid.reshape(...)` derives groups such as the embedding groups again if the dims
    keep their names.

    Args:
        grid: A grid with some of the dims tp, gtp_remat, cp, dp and pp. Its view "expert" has some
            of the dims tp, ep, gtp_remat, dp and pp. The dims tp, gtp_remat and dp may also be
            called expt_tp, expt_gtp_remat and expt_dp. If there is no such view, experts have the
            layout of the dense layers.
        num_distributed_optimizer_instances: The number of optimizer instances over dp.
        hierarchical_context_parallel_sizes: The group size of each level of cp, innermost first.
        create_all_gather_group: Whether to create a second dp-cp group, for all-gathers. With
            expert parallelism, a second expert dp group is also created.
        get_embedding_ranks: A function that is called with the ranks of a pipeline, and returns the
            ranks with word embeddings. Default: the first and the last rank.
        get_position_embedding_ranks: A function that is called with the ranks of a pipeline, and
            returns the ranks with position embeddings. Default: the first rank.
        nccl_communicator_config_path: A yaml file with NCCL options for each group.
        high_priority_stream_groups: Keys of groups whose streams have a high priority.

    Returns:
        The requests, in the order in which Megatron creates the groups.

    Raises:
        LayoutError: `grid` has none of Megatron's dims.
        ConfigurationError: The arguments do not fit the dims of `grid`, several optimizer instances
            are combined with GTP, or the NCCL configuration cannot be used.
        FileNotFoundError: The file of the NCCL configuration does not exist.
        NotInitializedError: There are NCCL options, but torch.distributed is not initialised.

    Example:
        >>> grid = HyperCommGrid([2, 4, 2], ["tp", "dp", "pp"], world_size=16)
        >>> wanted = megatron_requests(grid)
        >>> [request.dims for request in wanted if request.name is None][:5]
        ['dp', ('tp', 'pp'), 'tp', 'pp', ('tp', 'dp')]
    """
    view = EXPERT if EXPERT in grid.views else None
    layouts = Layouts(grid.layout, grid.views.get(EXPERT, grid.layout))
    sides: tuple[table.Side, table.Side] = ("dense", "expert" if view else "dense")
    for layout, side in zip(layouts, sides, strict=True):
        if not table.own_dims(layout, "-".join(DIMS), side):
            raise LayoutError(
                f"the {side} layout {layout} has none of Megatron's dims tp, cp, ep, dp and pp; "
                f"rename the dims with rename()"
            )
    configuration = table.Configuration(
        num_distributed_optimizer_instances=num_distributed_optimizer_instances,
        hierarchical_context_parallel_sizes=hierarchical_context_parallel_sizes,
        create_all_gather_group=create_all_gather_group,
        get_embedding_ranks=get_embedding_ranks,
        get_position_embedding_ranks=get_position_embedding_ranks,
        nccl_communicator_config_path=nccl_communicator_config_path,
        high_priority_stream_groups=high_priority_stream_groups,
        create_gloo_process_groups=False,
        gtp_remat_size=layouts.dense.size_of(GTP, default=1),
        expert_gtp_remat_size=layouts.expert.size_of(
            *table.own_dims(layouts.expert, GTP, "expert"), default=1
        ),
    )
    options = options_by_key(configuration)
    has_experts = layouts.expert.size_of("ep", default=1) > 1
    asked = (*table.TABLE, table.EXPERT_ALL_GATHER) if has_experts else table.TABLE
    requests: dict[GroupKey, GroupRequest] = {}
    for wanted in table.rows(configuration, layouts, options, view=view, table=asked):
        request = attrs.evolve(wanted.request, timeout=None, group_desc=None)
        here = grid if request.view is None else grid.view(request.view)
        requests.setdefault(here.key_of(request.dims, name=request.name), request)
    return list(requests.values())


def create_megatron_pgs(
    grids: GridSet,
    *,
    backend: str | None = None,
    timeout: timedelta | None = None,
    share: Share | None = None,
    **options: Any,
) -> dict[str, ProcessGroupCollection]:
    """Create all process groups that Megatron's code needs in each grid, or none of them.

    Every rank of the job must call this. If a grid is reshaped later, call `collections_of(grids)`
    to collect the new groups.

    Args:
        grids: The result of `megatron_grids`, or grids whose dims `megatron_requests` accepts.
        backend: The backend of the groups. See `GridSet.create_pgs`.
        timeout: The timeout of each group, and of this call.
        share: Whether several keys may use one group.
        options: The keyword arguments of `megatron_requests`. If grids need different values, pass
            the requests of each grid to `grids.create_pgs`.

    Returns:
        The `ProcessGroupCollection` of each grid that contains the calling rank, by name.

    Raises:
        LayoutError: A grid has none of Megatron's dims.
        HyperCommError: See `megatron_requests` and `GridSet.create_pgs`.

    Example:
        >>> from hypercomm.testing import fake_world
        >>> with fake_world(16), megatron_grids(tp=2, pp=2, ep=2, inference={"tp": 4}) as grids:
        ...     collections = create_megatron_pgs(grids)
        ...     training, inference = collections["training"], collections["inference"]
        ...     print(training.tp.size(), training.embd.size(), training.ep.size())
        ...     print(inference.tp.size(), inference.embd.size(), inference.ep.size())
        2 2 2
        4 1 1
    """
    requests = {name: megatron_requests(grid, **options) for name, grid in grids.items()}
    grids.create_pgs(requests, backend=backend, timeout=timeout, share=share)
    return collections_of(grids)


# ---- collections --------------------------------------------------------------------------------


def collections_of(grids: GridSet) -> dict[str, ProcessGroupCollection]:
    """Return the `ProcessGroupCollection` of each grid that contains the calling rank, by name.

    Each collection contains the groups that were created. See `ProcessGroupCollection.from_grid`.
    If a grid has no view "expert", the experts have the layout of the grid.

    Args:
        grids: The grids, such as the result of `megatron_grids`.

    Raises:
        GridDestroyedError: A grid that contains the calling rank was destroyed.
        NotInitializedError: The calling rank is unknown.

    Example:
        >>> from hypercomm.testing import fake_world
        >>> with fake_world(8), GridSet.tile(encoder="tp=2,dp", llm="tp=4") as grids:
        ...     _ = grids.create_pgs({"encoder": ["tp"], "llm": ["tp"]})
        ...     collections = collections_of(grids)
        ...     print(list(collections), collections["encoder"].tp.size())
        ['encoder'] 2
    """
    collections = {}
    for name in grids.grids_of():
        grid = grids[name]
        if grid.is_destroyed:
            raise GridDestroyedError(
                f"grid {name!r} ({grid.layout}) was destroyed, so it has no groups to collect"
            )
        expert = None if EXPERT in grid.views else grid
        collections[name] = ProcessGroupCollection.from_grid(grid, expert)
    return collections
