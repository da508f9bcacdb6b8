"""Computes the layouts of Megatron and torchtitan from their sizes, without torch.

`megatron_grids`, `torchtitan_grids` and the reader of launch files use these layouts.

Sources of the rules for sizes: `megatron.core.parallel_state`; `ParallelDims` of torchtitan 0.3.0.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from hypercomm.errors import ConfigurationError, UnknownDimError, WorldSizeError
from hypercomm.layout import RankLayout
from hypercomm.layout.checks import positive
from hypercomm.layout.parsing import UNSPECIFIED, infer_sizes, parse_order
from hypercomm.layout.views import Views

EXPERT = "expert"
"""The name of the view with the dims of the expert layers."""

GTP = "gtp_remat"
"""The dim of generalized tensor parallelism (GTP).

The ranks along this dim are called GTP peers. They share each weight, and gather the weight for
each use.
"""

DIMS = ("tp", "pp", "dp", "ep", "cp", GTP)
"""The dims that an order may name. Megatron appends omitted dims in this order."""


class Layouts(NamedTuple):
    """The layouts of a model's dense layers and of its experts, over the same ranks."""

    dense: RankLayout
    expert: RankLayout


DENSE_SIZES = {
    "tp": "tensor_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    "cp": "context_parallel_size",
    GTP: "gtp_remat_size",
}
EXPERT_SIZES = {
    "tp": "expert_tensor_parallel_size",
    "ep": "expert_model_parallel_size",
    "pp": "pipeline_model_parallel_size",
    GTP: "expert_gtp_remat_size",
}
"""The argument that sets the size of each dim. The size of dp is inferred from the world size."""

SIZES = tuple(dict.fromkeys([*DENSE_SIZES.values(), *EXPERT_SIZES.values()]))

_EXPERT_DIMS = {"tp": "expt_tp", "dp": "expt_dp", GTP: f"expt_{GTP}"}
"""This module's names of expert dims. Megatron gives these dims the names of dense dims."""

NAMES = {argument: dim for dim, argument in DENSE_SIZES.items()} | {
    argument: _EXPERT_DIMS.get(dim, dim) for dim, argument in EXPERT_SIZES.items()
}
"""For each of Megatron's size arguments, the name of the dim in this module."""


# ---- Megatron -----------------------------------------------------------------------------------


def megatron_layouts(
    sizes: Mapping[str, int | None],
    order: str,
    world_size: int,
    anchor: str = "tp",
) -> Views:
    """Return the layout of a model's dense layers, with a view "expert" for the expert layers.

    Args:
        sizes: The sizes of tp, cp, pp, ep, expt_tp, gtp_remat and expt_gtp_remat. A missing size
            is 1, but a missing expt_tp has the size of tp.
        order: The order of the dims. The first dim varies fastest.
        world_size: The number of ranks. The size of dp is inferred from this number.
        anchor: The dim after which gtp_remat is inserted if the order omits gtp_remat.

    Raises:
        LayoutError: A size is not a positive int, or the order cannot be read.
        WorldSizeError: The sizes do not divide the world.
        ConfigurationError, UnknownDimError: The order omits a dim or names an unknown dim, or
            dense and expert layers have different pipelines.

    Example:
        >>> views = megatron_layouts({"tp": 2, "ep": 4}, "tp-cp-ep-dp-pp", 16)
        >>> print(views.base, views["expert"], sep="; ")
        tp=2,cp=1,dp=8,pp=1; expt_tp=2,ep=4,expt_dp=2,pp=1 sharing pp
    """
    given = {
        argument: sizes.get(name, None if name == "expt_tp" else 1)
        for argument, name in NAMES.items()
    }
    layouts = layouts_of(given, order, world_size, names=NAMES, anchor=anchor)
    dense, expert = (dict(layout.sizes) for layout in layouts)
    del dense["ep"], expert["cp"]
    views = Views(RankLayout(dense))
    experts = {_EXPERT_DIMS.get(dim, dim): size for dim, size in expert.items()}
    views.register(EXPERT, experts, shared_dims=["pp"])
    return views


def layouts_of(
    sizes: Mapping[str, int | None],
    order: str,
    world_size: int,
    *,
    names: Mapping[str, str] | None = None,
    rank_offset: int = 0,
    anchor: str = "tp",
) -> Layouts:
    """Check Megatron's sizes, and return the dense and the expert layout.

    Args:
        sizes: Maps each argument in `SIZES` to its value. expert_tensor_parallel_size may be None.
        order: The order of the dims.
        world_size: The number of ranks.
        names: Maps arguments to their names in error messages. Default: the arguments themselves.
        rank_offset: The smallest rank.
        anchor: The dim after which gtp_remat is inserted into the order of the dense layers.

    Raises:
        LayoutError: A size is not a positive int, or the order cannot be read.
        WorldSizeError: The sizes do not divide the world.
        ConfigurationError, UnknownDimError: The order omits a dim or names an unknown dim, or
            dense and expert layers have different pipelines.
    """
    dense = _with_dp(sizes, DENSE_SIZES, names or {}, world_size)
    expert = _with_dp(sizes, EXPERT_SIZES, names or {}, world_size)
    layouts = Layouts(
        order_layout(order, {**dense, "ep": 1}, rank_offset, anchor),
        order_layout(order, {**expert, "cp": 1}, rank_offset, "ep"),
    )
    _check_pipelines(layouts, order)
    return layouts


def _with_dp(
    sizes: Mapping[str, Any], arguments: Mapping[str, str], names: Mapping[str, str], total: int
) -> dict[str, int]:
    """Return the size of each dim. The size of dp is `total` divided by the other sizes.

    Raises:
        WorldSizeError: The other sizes do not divide the world.
    """
    found = {}
    called = {}
    room = ""
    for dim, argument in arguments.items():
        given = sizes[argument]
        name = names.get(argument, argument)
        if given is None and dim == "tp":
            source = DENSE_SIZES["tp"]
            given = sizes[source]
            taken = f"{name}={given} taken from {names.get(source, source)}"
            room = f"the world has {total}; {taken}"
        size = positive(given, name)
        if size > 1 or dim != GTP:
            found[dim] = called[name] = size
    return {**found, "dp": infer_sizes({**called, "dp": UNSPECIFIED}, total, room)["dp"]}


def _check_pipelines(layouts: Layouts, order: str) -> None:
    """Raise unless dense and expert layers have the same pipelines, as Megatron requires.

    If pp is larger than 1 and not last in the order, the data parallel sizes must be equal, too.
    """
    dense, expert = layouts
    is_last = order.lower().endswith("pp") or dense.size_of("pp") == 1
    have_same_dp = is_last or dense.size_of("dp") == expert.size_of("dp")
    if dense.groups("pp") != expert.groups("pp") or not have_same_dp:
        inner = dense.size_of("tp", "cp", GTP, default=1)
        raise ConfigurationError(
            f"with {order=}, the dense layout {dense} and the expert layout {expert} must have the "
            f"same pipelines and the same data parallel size; put pp last in the order, or choose "
            f"expert sizes of tp, ep and {GTP} whose product is {inner}"
        )


def order_layout(
    order: str, sizes: Mapping[str, int], rank_offset: int, anchor: str | None = None
) -> RankLayout:
    """Return a layout with Megatron's sizes, in the given order, which may omit dims of size 1.

    Args:
        order: The dims. The first dim varies fastest.
        sizes: The size of each dim. The dim gtp_remat exists only if it has a size here.
        rank_offset: The smallest rank.
        anchor: The dim after which gtp_remat is inserted if the order omits gtp_remat. Default:
            gtp_remat is not inserted.

    Raises:
        UnknownDimError: The order names a dim that Megatron does not have.
        ConfigurationError: The order omits a dim larger than 1.

    Example:
        >>> str(order_layout("pp-tp", dict(tp=2, pp=4, dp=1, ep=1, cp=1), 0))
        'pp=4,tp=2,dp=1,ep=1,cp=1'
    """
    named = inject_gtp(order, anchor) if GTP in sizes and anchor is not None else order
    names = parse_order(named.lower() if isinstance(named, str) else named)
    for name in names:
        if name not in DIMS:
            raise UnknownDimError(f"unknown dim {name!r} in {order=}; Megatron has the dims {DIMS}")
    for name, size in sizes.items():
        if size > 1 and name not in names:
            where = f"{order=} does not name this dim; add it to the order"
            raise ConfigurationError(f"dim {name!r} has size {size}, but {where}")
    ordered = [name for name in dict.fromkeys((*names, *DIMS)) if name in sizes]
    return RankLayout({name: sizes[name] for name in ordered}, rank_offset=rank_offset)


def inject_gtp(order_str: str, after: str = "tp") -> str:
    """Return an order with `gtp_remat` inserted after the dim `after`.

    If the order omits `after`, `gtp_remat` is inserted after tp. If it omits tp, too, `gtp_remat`
    is inserted as the first dim.

    >>> inject_gtp("tp-cp-ep-dp-pp"), inject_gtp("tp-cp-ep-dp-pp", after="ep"), inject_gtp("dp-pp")
    ('tp-gtp_remat-cp-ep-dp-pp', 'tp-cp-ep-gtp_remat-dp-pp', 'gtp_remat-dp-pp')
    """
    names = order_str.split("-") if isinstance(order_str, str) else []
    if not names or GTP in order_str.lower().split("-"):
        return order_str
    place = next((names.index(dim) + 1 for dim in (after, "tp") if dim in names), 0)
    return "-".join([*names[:place], GTP, *names[place:]])


# ---- torchtitan ---------------------------------------------------------------------------------

TORCHTITAN_VIEWS = {
    "dataloading": ("pp", "batch", "cp", "tp"),
    "loss": ("pp", "loss", "tp"),
    "dense": ("pp", "dp_replicate", "fsdp", "tp"),
    "sparse": ("pp", "dp_replicate", "efsdp", "ep"),
    "spmd": ("pp", "dp", "cp", "tp"),
}
"""The dims of each view. The last dim varies fastest. One size in each view is inferred."""


def torchtitan_layouts(
    *,
    dp_replicate: int = 1,
    dp_shard: int = UNSPECIFIED,
    cp: int = 1,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    world_size: int,
) -> Views:
    """Return the layout of a torchtitan model, with torchtitan's meshes as views.

    Args:
        dp_replicate: Number of replicas of the sharded model.
        dp_shard: Number of ranks that FSDP shards over. Default: the remaining ranks of the world.
        cp: Context parallel size.
        tp: Tensor parallel size.
        pp: Pipeline parallel size.
        ep: Expert parallel size, a divisor of dp_shard * cp * tp.
        world_size: Number of ranks.

    Raises:
        LayoutError: A size is not a positive int.
        WorldSizeError: The sizes do not multiply to the world, or `ep` does not divide
            dp_shard * cp * tp.

    Example:
        >>> print(torchtitan_layouts(tp=2, cp=2, ep=4, world_size=16)["sparse"].layout)
        ep=4,efsdp=4,dp_replicate=1,pp=1
    """
    given = {"tp": tp, "cp": cp, "dp_shard": dp_shard, "dp_replicate": dp_replicate, "pp": pp}
    experts = positive(ep, "ep")
    layout = RankLayout(given, world_size=world_size)
    inner = layout.size_of("tp", "cp", "dp_shard")
    if inner % experts:
        problem = f"ep={experts} must divide dp_shard * cp * tp = {inner} ({layout})"
        if dp_shard == UNSPECIFIED:
            inferred = layout.size_of("dp_shard")
            problem += f"; dp_shard={inferred} is inferred from {world_size} ranks"
        raise WorldSizeError(problem)
    views = Views(layout)
    sizes = layout.sizes | {"ep": experts}
    for name, dims in TORCHTITAN_VIEWS.items():
        order = list(reversed(dims))
        shared = [dim for dim in order if dim in given]
        views.register(name, [sizes.get(dim, UNSPECIFIED) for dim in order], order, shared)
    return views
