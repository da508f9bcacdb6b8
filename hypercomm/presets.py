"""Presets: the grids of Megatron's models, with experts, and inference beside training."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

from hypercomm.compat.megatron.configuration import (
    Layouts,
    RanksFunction,
    have_same_pipelines,
    order_layout,
)
from hypercomm.compat.megatron.grid_groups import EXPERT
from hypercomm.compat.megatron.requests import megatron_requests
from hypercomm.errors import HyperCommError, LayoutError, UnknownDimError, WorldSizeError
from hypercomm.grid.arguments import Creation, GroupArguments, Share
from hypercomm.grid_set import GridSet
from hypercomm.grid_set.arguments import GridArguments
from hypercomm.layout import RankLayout
from hypercomm.layout.checks import as_offset, as_world_size
from hypercomm.layout.messages import shown
from hypercomm.layout.notation import OPEN
from hypercomm.layout.sizes import as_size, close_sizes
from hypercomm.layout.tiling import Requirement
from hypercomm.process_groups import world

if TYPE_CHECKING:
    from hypercomm.compat.megatron.process_groups_config import ProcessGroupCollection

_DENSE_DIMS = ("tp", "cp", "dp", "pp")
_EXPERT_NAMES = {"tp": "expt_tp", "dp": "expt_dp"}
"""What dims of Megatron's are called in the expert view."""

_SIZES = {"tp": 1, "cp": 1, "pp": 1, "dp": OPEN, "ep": 1, "expt_tp": None}
"""The sizes that a model is given, with their defaults."""


def megatron_grids(
    *,
    tp: int = 1,
    cp: int = 1,
    pp: int = 1,
    dp: int = OPEN,
    ep: int = 1,
    expt_tp: int | None = None,
    order: str = "tp-cp-ep-dp-pp",
    world_size: int | None = None,
    rank_offset: int = 0,
    inference: Mapping[str, int] | None = None,
    beside: bool = False,
    requires: Requirement | None = None,
    name: str | None = None,
    backend: str | None = None,
    creation: Creation = "auto",
    share: Share = "never",
    lazy_init: bool | None = None,
    verify: bool | None = None,
    overrides: Mapping[str, GridArguments] | None = None,
) -> GridSet:
    """Make the grids of one of Megatron's models: "training", and "inference" if it is asked for.

    Each grid has the dims tp, cp, dp and pp, and the view "expert" of the same ranks with the dims
    expt_tp, ep, expt_dp and pp, which both share. No process group is created:
    `create_megatron_pgs` creates all that Megatron's code asks for.

    Args:
        tp: Tensor parallel size.
        cp: Context parallel size.
        pp: Pipeline parallel size.
        dp: Data parallel size; default: what the other sizes leave of the world.
        ep: Expert parallel size.
        expt_tp: Tensor parallel size of the experts; default: `tp`.
        order: The order of the dims, the first varying fastest, for the dense and the expert ones.
        world_size: Number of ranks of the job; default: as for `HyperCommGrid`.
        rank_offset: The smallest rank of the training.
        inference: The sizes of inference, with the same names and defaults.
        beside: False puts inference on the ranks of training, True on those behind them; `dp` must
            then be given.
        requires: How the grids must lie, as for `GridSet`; default: "tiled" without inference, so
            that no rank is left over ("disjoint" behind an offset), else "colocated", or
            "disjoint" with `beside`.
        name: As for `GridSet`; so are those that follow.
        backend: Backend of both grids.
        creation: How groups are created.
        share: "identical" lets groups of the same ranks and options be one, in both grids.
        lazy_init: Whether gloo connects ranks at their first message.
        verify: Whether each creation is compared with those of the other ranks.
        overrides: Arguments of single grids that differ from these.

    Raises:
        LayoutError: A size is not a positive int, or the order cannot be read.
        OrderError: The order leaves out a dim that is larger than 1.
        UnknownDimError: The order or `inference` names a dim that Megatron does not have.
        WorldSizeError: The sizes do not divide the world, or leave ranks of it over; the experts'
            sizes do not divide the grid; or the dense and the expert layers have different
            pipelines.

    Example:
        >>> grids = megatron_grids(tp=2, pp=2, ep=2, inference={"tp": 4}, world_size=16)
        >>> for name, grid in grids.items():
        ...     print(name, grid.layout, "experts", grid.view("expert").layout)
        training tp=2,cp=1,dp=4,pp=2 experts expt_tp=2,ep=2,expt_dp=2,pp=2
        inference tp=4,cp=1,dp=4,pp=1 experts expt_tp=4,ep=1,expt_dp=4,pp=1
    """
    total, offset = as_world_size(world.world_size(world_size)), as_offset(rank_offset)
    if offset >= total:
        raise WorldSizeError(
            f"no ranks of the world of {total} are left behind rank_offset={offset}; make it "
            f"smaller, or start at least {offset + 1} ranks"
        )
    if not isinstance(beside, bool):
        raise LayoutError(f"beside must be True or False, got {shown(beside)}")
    sizes = {"tp": tp, "cp": cp, "pp": pp, "dp": dp, "ep": ep, "expt_tp": expt_tp}
    if beside and as_size("dp", dp) == OPEN:
        raise WorldSizeError(
            "beside=True puts inference on the ranks that training leaves; give dp= of training"
        )
    models = {"training": _model("training", sizes, order, total - offset, offset)}
    if inference is not None:
        training = models["training"].dense
        start = offset + training.size if beside else offset
        room = total - start if beside else training.size
        if room < 1:
            raise WorldSizeError(
                f"beside=True, but training ({training}) leaves none of the world's {total} ranks "
                f"behind it; make a size smaller, or start more ranks"
            )
        models["inference"] = _model("inference", _inference_sizes(inference), order, room, start)
    if requires is None and inference is None:
        requires = "disjoint" if offset else "tiled"
    elif requires is None:
        requires = "disjoint" if beside else "colocated"
    grids = GridSet(
        {label: dense for label, (dense, _) in models.items()},
        requires=requires,
        name=name,
        world_size=total,
        backend=backend,
        creation=creation,
        share=share,
        lazy_init=lazy_init,
        verify=verify,
        overrides=overrides,
    )
    for label, (_, expert) in models.items():
        grids[label].register_view(EXPERT, expert.shape, expert.dim_names, ["pp"])
    return grids


def create_megatron_pgs(
    grids: GridSet,
    *,
    num_distributed_optimizer_instances: int = 1,
    hierarchical_context_parallel_sizes: Sequence[int] | None = None,
    create_all_gather_group: bool = False,
    get_embedding_ranks: RanksFunction | None = None,
    get_position_embedding_ranks: RanksFunction | None = None,
    backend: str | None = None,
    timeout: timedelta | None = None,
    share: Share | None = None,
) -> dict[str, ProcessGroupCollection]:
    """Create every process group that Megatron's code asks for, in each grid, all or none.

    Every rank of the job must call this. After `reshape` of one of the grids the groups are those
    of its new sizes: `grids.to_collections()` collects them anew.

    Args:
        grids: What `megatron_grids` has made, or other grids with such dims: what
            `megatron_requests` says of a grid.
        num_distributed_optimizer_instances: As for `megatron_requests`, for each grid; so are the
            next four. For grids that differ in these, hand what `megatron_requests` lists for
            each to `grids.create_pgs`.
        hierarchical_context_parallel_sizes: Sizes of the levels of cp.
        create_all_gather_group: Whether dp and cp have a second group.
        get_embedding_ranks: Returns the ranks of a pipeline that hold word embeddings.
        get_position_embedding_ranks: Returns those that hold position embeddings.
        backend: As for `GridSet.create_pgs`; so are the other two.
        timeout: For each group apart.
        share: Whether keys may hold one group.

    Returns:
        Megatron's collection of each grid that the calling rank is in, by name.

    Raises:
        LayoutError: A grid has none of Megatron's dims, or cannot be cut like this; names it.
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
    if not isinstance(grids, GridSet):
        raise LayoutError(f"grids must be a GridSet, got {shown(grids)}")
    requests: dict[str, list[GroupArguments]] = {}
    for name, grid in grids.items():
        try:
            requests[name] = megatron_requests(
                grid,
                num_distributed_optimizer_instances=num_distributed_optimizer_instances,
                hierarchical_context_parallel_sizes=hierarchical_context_parallel_sizes,
                create_all_gather_group=create_all_gather_group,
                get_embedding_ranks=get_embedding_ranks,
                get_position_embedding_ranks=get_position_embedding_ranks,
            )
        except HyperCommError as error:
            raise type(error)(f"grid {name!r}: {error}") from error
    grids.create_pgs(requests, backend=backend, timeout=timeout, share=share)
    return grids.to_collections()


def _inference_sizes(given: Mapping[str, int]) -> dict[str, int | None]:
    if not isinstance(given, Mapping):
        raise LayoutError(
            f"inference must map dims to sizes, as in {{'tp': 4, 'pp': 1}}, got {shown(given)}"
        )
    for dim in given:
        if dim not in _SIZES:
            raise UnknownDimError(f"unknown dim {shown(dim)} of inference; it has {list(_SIZES)}")
    return {**_SIZES, **given}


def _model(
    label: str, sizes: Mapping[str, int | None], order: str, room: int, offset: int
) -> Layouts:
    """The layouts of a model's dense and expert layers."""
    given = {
        dim: as_size(dim, size)
        for dim, size in sizes.items()
        if not (dim == "expt_tp" and size is None)
    }
    for dim, size in given.items():
        if size == OPEN and dim != "dp":
            raise LayoutError(f"only dp of {label} may be open (-1), not {dim}; give its size")
    closed = {dim: given[dim] for dim in _DENSE_DIMS}
    if closed["dp"] == OPEN:
        closed = _closed(f"{label}'s dense layers", closed, room)
    dense = order_layout(order, {**closed, "ep": 1}, offset)
    expert = {"tp": given.get("expt_tp", given["tp"]), "ep": given["ep"], "pp": given["pp"]}
    expert = _closed(f"{label}'s expert layers", {**expert, "dp": OPEN}, dense.size)
    of_experts = order_layout(order, {**expert, "cp": 1}, offset)
    if not have_same_pipelines(dense, of_experts):
        raise WorldSizeError(
            f"with order {order!r} the dense layers of {label} ({dense}) and its expert layers "
            f"({of_experts}) have different pipelines; put pp last in the order, or choose expert "
            f"sizes with expt_tp * ep = {given['tp'] * given['cp']}"
        )
    return Layouts(_without(dense, "ep"), _without(of_experts, "cp").rename(**_EXPERT_NAMES))


def _without(layout: RankLayout, dim: str) -> RankLayout:
    """The same numbering without a dim of size 1."""
    names = [name for name in layout.dim_names if name != dim]
    return RankLayout([layout.size_of(name) for name in names], names, layout.rank_offset)


def _closed(what: str, sizes: Mapping[str, int], room: int) -> dict[str, int]:
    try:
        return close_sizes(sizes, room)
    except (WorldSizeError, LayoutError) as error:
        raise WorldSizeError(f"{what} must fit on {room} ranks: {error}") from error
