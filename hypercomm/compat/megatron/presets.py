"""The grids of Megatron's models, with experts and inference, and their collections."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta

from hypercomm.compat.layouts import DIMS, EXPERT, GTP, NAMES, Layouts, megatron_layouts
from hypercomm.compat.megatron import table, version
from hypercomm.compat.megatron.process_groups_config import ProcessGroupCollection
from hypercomm.compat.megatron.state import options_by_key
from hypercomm.errors import GridDestroyedError, LayoutError, UnknownDimError
from hypercomm.grid import HyperCommGrid
from hypercomm.grid.arguments import hints_at_keywords
from hypercomm.grid.grid_set import GridSet
from hypercomm.layout.checks import as_world_size
from hypercomm.layout.parsing import short_names
from hypercomm.layout.text import did_you_mean, short_repr
from hypercomm.process_groups.spec import GroupKey, GroupRequest, Share, StrategyName
from hypercomm.process_groups.world import size_of_world


@hints_at_keywords
def megatron_grids(
    *,
    tp: int | None = None,
    cp: int | None = None,
    pp: int | None = None,
    ep: int | None = None,
    expt_tp: int | None = None,
    gtp_remat: int | None = None,
    expt_gtp_remat: int | None = None,
    tensor_model_parallel_size: int | None = None,
    context_parallel_size: int | None = None,
    pipeline_model_parallel_size: int | None = None,
    expert_model_parallel_size: int | None = None,
    expert_tensor_parallel_size: int | None = None,
    gtp_remat_size: int | None = None,
    expert_gtp_remat_size: int | None = None,
    order: str = "tp-cp-ep-dp-pp",
    world_size: int | None = None,
    inference: Mapping[str, int] | None = None,
    name: str | None = None,
    backend: str | None = None,
    creation: StrategyName = "auto",
    share: Share = "never",
    lazy_init: bool | None = None,
    verify: bool | None = None,
    enable_reconfigure: bool = False,
) -> GridSet:
    """Make the grids of one of Megatron's models: "training", and "inference" if it is asked for.

    Each grid has the dims tp, cp, dp and pp, and the view "expert" of the same ranks with the dims
    expt_tp, ep, expt_dp and pp, which both share; dp gets the remaining ranks of the world. No
    process group is created: `create_megatron_pgs` creates all that Megatron's code asks for.

    Args:
        tp: Tensor parallel size; default: 1, as for the other sizes.
        cp: Context parallel size.
        pp: Pipeline parallel size.
        ep: Expert parallel size.
        expt_tp: Tensor parallel size of the experts; default: `tp`.
        gtp_remat: GTP peers, ranks that share each weight and gather it to use it; where there are
            any, they are a dim of the grid, after tp unless the order names them.
        expt_gtp_remat: The same for the weights of experts, in the view, after ep.
        tensor_model_parallel_size: Megatron's name of `tp`.
        context_parallel_size: Megatron's name of `cp`.
        pipeline_model_parallel_size: Megatron's name of `pp`.
        expert_model_parallel_size: Megatron's name of `ep`.
        expert_tensor_parallel_size: Megatron's name of `expt_tp`.
        gtp_remat_size: Megatron's name of `gtp_remat`.
        expert_gtp_remat_size: Megatron's name of `expt_gtp_remat`.
        order: The order of the dims, the first varying fastest, for the dense and the expert ones.
        world_size: Number of ranks of the job; default: as for `HyperCommGrid`.
        inference: The sizes of inference on the ranks of training, with the same names and
            defaults.
        name: Distinguishes this set from others; see `GridSet`.
        backend: As for `HyperCommGrid`, as are the next five.
        creation: How groups are created.
        share: Whether keys may hold one group.
        lazy_init: When the members of a group connect.
        verify: Whether ranks compare their creations.
        enable_reconfigure: Whether groups stay when a reshape changes their members.

    Raises:
        LayoutError: A size is not a positive int, or the order cannot be read.
        ConfigurationError: The order leaves out a dim that is larger than 1, or the dense and the
            expert layers have different pipelines.
        UnknownDimError: The order or `inference` names a dim that Megatron does not have.
        WorldSizeError: The sizes of the dense layers, or those of the experts, do not divide the
            world.
        TypeError: A size is given by both of its names.

    Example:
        >>> grids = megatron_grids(tp=2, pp=2, ep=2, inference={"tp": 4}, world_size=16)
        >>> for name, grid in grids.items():
        ...     print(name, grid.layout, "experts", grid.view("expert").layout)
        training tp=2,cp=1,dp=4,pp=2 experts expt_tp=2,ep=2,expt_dp=2,pp=2
        inference tp=4,cp=1,dp=4,pp=1 experts expt_tp=4,ep=1,expt_dp=4,pp=1
    """
    sizes = {name: value for name, value in locals().items() if name in {*NAMES, *NAMES.values()}}
    total = as_world_size(size_of_world(world_size))
    models = {"training": sizes}
    if inference is not None:
        for dim in inference:
            if dim not in {*NAMES, *NAMES.values()}:
                raise UnknownDimError(
                    f"inference has no dim {short_repr(dim)}, but {list(NAMES.values())}"
                    f"{did_you_mean(dim, (*NAMES.values(), *NAMES))}"
                )
        models["inference"] = dict(inference)
    anchor = "cp" if "cp_before_gtp_remat" in version.changes() else "tp"
    layouts = {}
    for label, given in models.items():
        short, names = short_names("megatron_grids", given, NAMES)
        layouts[label] = megatron_layouts(short, order, total, anchor, names)
    grids = GridSet(
        {label: views.base for label, views in layouts.items()},
        requires="tiled" if inference is None else "colocated",
        world_size=total,
        name=name,
        backend=backend,
        creation=creation,
        share=share,
        lazy_init=lazy_init,
        verify=verify,
        enable_reconfigure=enable_reconfigure,
    )
    for label, views in layouts.items():
        expert = views[EXPERT]
        grids[label].register_view(EXPERT, expert.layout.sizes, shared_dims=expert.shared_dims)
    return grids


# ---- all groups of a grid -----------------------------------------------------------------------


@hints_at_keywords
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
    """List the process groups that Megatron's code asks for, as `create_pgs` takes them.

    A dim that the grid lacks has size 1. Megatron's code takes None for WORLD, so a field all of
    whose dims are lacking, such as `cp`, gets groups of one rank, which are one process group.
    Derived groups, such as the embedding groups, are derived again by `grid.reshape(...)` if the
    dims keep their names. SHARP is not requested: only the first communicator of a job has it.

    Args:
        grid: A grid with some of the dims tp, gtp_remat, cp, dp and pp; its view "expert", if it
            has one, has some of tp, ep, gtp_remat, dp and pp, perhaps as expt_tp, expt_gtp_remat
            and expt_dp. Without that view the experts are laid out as the dense layers.
        num_distributed_optimizer_instances: The number of parts that dp is cut into.
        hierarchical_context_parallel_sizes: Sizes of the levels of cp, innermost first.
        create_all_gather_group: Whether dp and cp have a second group, for all-gathers; with
            expert parallelism the dp of experts has one, too.
        get_embedding_ranks: Returns the ranks of a pipeline that hold word embeddings; default:
            its first and last.
        get_position_embedding_ranks: The same for position embeddings; default: its first.
        nccl_communicator_config_path: A yaml file with NCCL options for each group.
        high_priority_stream_groups: Keys of groups whose streams have a high priority.

    Returns:
        A request for each row of Megatron's groups, in Megatron's order.

    Raises:
        LayoutError: `grid` has none of Megatron's dims.
        ConfigurationError: `grid` cannot be cut like this, there are several optimizer instances
            with GTP, or the NCCL configuration cannot be used.
        FileNotFoundError: The NCCL configuration is not there.
        NotInitializedError: There are NCCL options, but no job.

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
                f"rename() its dims"
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
        request = wanted.request
        here = grid if request.view is None else grid.view(request.view)
        requests.setdefault(here.key_of(request.dims, name=request.name), request)
    return list(requests.values())


@hints_at_keywords
def create_megatron_pgs(
    grids: GridSet,
    *,
    backend: str | None = None,
    timeout: timedelta | None = None,
    share: Share | None = None,
    num_distributed_optimizer_instances: int = 1,
    hierarchical_context_parallel_sizes: Sequence[int] | None = None,
    create_all_gather_group: bool = False,
    get_embedding_ranks: table.RanksFunction | None = None,
    get_position_embedding_ranks: table.RanksFunction | None = None,
    nccl_communicator_config_path: str | None = None,
    high_priority_stream_groups: Sequence[str] | None = None,
) -> dict[str, ProcessGroupCollection]:
    """Create every process group that Megatron's code asks for, in each grid, all or none.

    Every rank of the job must call this. After `reshape` of one of the grids the groups are those
    of its new sizes: `collections_of(grids)` collects them anew.

    Args:
        grids: The result of `megatron_grids`, or other grids with dims as for `megatron_requests`.
        backend: As for `GridSet.create_pgs`; so are the other two.
        timeout: Of each group, and for the whole call.
        share: Whether keys may hold one group.
        num_distributed_optimizer_instances: As for `megatron_requests`, as are the next six. For
            grids that differ in these, give the requests of each to `grids.create_pgs`.
        hierarchical_context_parallel_sizes: Sizes of the levels of cp.
        create_all_gather_group: Whether dp and cp have a second group.
        get_embedding_ranks: Returns the ranks that hold word embeddings.
        get_position_embedding_ranks: Returns the ranks that hold position embeddings.
        nccl_communicator_config_path: A yaml file with NCCL options.
        high_priority_stream_groups: Keys of groups whose streams have a high priority.

    Returns:
        Megatron's collection of each grid that the calling rank is in, by name.

    Raises:
        LayoutError: A grid has none of Megatron's dims.
        HyperCommError: As for `megatron_requests` and `GridSet.create_pgs`.

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
    requests = {
        name: megatron_requests(
            grid,
            num_distributed_optimizer_instances=num_distributed_optimizer_instances,
            hierarchical_context_parallel_sizes=hierarchical_context_parallel_sizes,
            create_all_gather_group=create_all_gather_group,
            get_embedding_ranks=get_embedding_ranks,
            get_position_embedding_ranks=get_position_embedding_ranks,
            nccl_communicator_config_path=nccl_communicator_config_path,
            high_priority_stream_groups=high_priority_stream_groups,
        )
        for name, grid in grids.items()
    }
    grids.create_pgs(requests, backend=backend, timeout=timeout, share=share)
    return collections_of(grids)


# ---- collections --------------------------------------------------------------------------------


def collections_of(grids: GridSet) -> dict[str, ProcessGroupCollection]:
    """Return Megatron's collection for each grid of a set, by name, if it has the calling rank.

    Each collection holds the groups that were created: see
    `ProcessGroupCollection.from_grid`. A grid without the view "expert" uses its own layout
    for its experts.

    Args:
        grids: The set.

    Raises:
        GridDestroyedError: One of these grids was destroyed.
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
                f"grid {name!r} ({grid.layout}) was destroyed, and has no groups to collect"
            )
        expert = None if EXPERT in grid.views else grid
        collections[name] = ProcessGroupCollection.from_grid(grid, expert)
    return collections
