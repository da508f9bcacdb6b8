"""The layouts of Megatron's and torchtitan's models, from sizes alone: nothing here imports torch.

`megatron_grids` and `torchtitan_grids` make grids of these, and launch files are read with them.
Source: `megatron.core.parallel_state`, and `torchtitan.distributed.parallel_dims` of torchtitan
0.3.0, `ParallelDims.build_mesh`: which sizes multiply to which.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from hypercomm.errors import ConfigurationError, UnknownDimError, WorldSizeError
from hypercomm.layout import RankLayout
from hypercomm.layout.checks import positive
from hypercomm.layout.parsing import OPEN, close_sizes, parse_order
from hypercomm.layout.views import Views

EXPERT = "expert"
"""The view of a grid over the dims of the expert layers."""

GTP = "gtp_remat"
"""The dim of generalized tensor parallelism: peers share each weight and gather it to use it."""

DIMS = ("tp", "pp", "dp", "ep", "cp", GTP)
"""The dims that an order may name, in the order in which Megatron appends those that it omits."""


class Layouts(NamedTuple):
    """The two factorisations of one span of ranks."""

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
"""The argument with the size of each dim, except dp, which gets the remaining ranks."""

SIZES = tuple(dict.fromkeys([*DENSE_SIZES.values(), *EXPERT_SIZES.values()]))

_EXPERT_DIMS = {"tp": "expt_tp", "dp": "expt_dp", GTP: f"expt_{GTP}"}
"""The names here of the dims that both the dense and the expert layers have."""

NAMES = {argument: dim for dim, argument in DENSE_SIZES.items()} | {
    argument: _EXPERT_DIMS.get(dim, dim) for dim, argument in EXPERT_SIZES.items()
}
"""The names here of Megatron's sizes."""


# ---- Megatron -----------------------------------------------------------------------------------


def megatron_layouts(
    sizes: Mapping[str, int | None], order: str, world_size: int, anchor: str = "tp"
) -> Views:
    """Return the layout of a model's dense layers, with the view "expert" of its experts.

    Args:
        sizes: Some of tp, cp, pp, ep, expt_tp, gtp_remat and expt_gtp_remat, as for
            `megatron_grids`; default: 1, and for expt_tp that of tp.
        order: The order of the dims, the first varying fastest.
        world_size: The number of ranks; dp gets those that remain.
        anchor: The dim after which gtp_remat is inserted if the order does not name it.

    Raises:
        LayoutError, ConfigurationError, UnknownDimError, WorldSizeError: As for `megatron_grids`.

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
        sizes: Each of `SIZES`; expert_tensor_parallel_size may be None.
        order: The order of the dims.
        world_size: The number of ranks.
        names: The names of sizes in error messages, if they are not those of the arguments.
        rank_offset: The smallest rank.
        anchor: The dim after which gtp_remat is inserted in the dense layers.

    Raises:
        LayoutError: A size is not a positive int, or the order cannot be read.
        WorldSizeError: The sizes do not divide the world; names sizes that would.
        ConfigurationError, UnknownDimError: The order omits a dim, or names an unknown one, or
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
    """Return the sizes by dim, which must divide the world; dp gets the remaining ranks."""
    found, called = {}, {}
    for dim, argument in arguments.items():
        given, name = sizes[argument], names.get(argument, argument)
        if given is None and dim == "tp":
            given = sizes["tensor_model_parallel_size"]
        size = positive(given, name)
        if size > 1 or dim != GTP:
            found[dim] = called[name] = size
    return {**found, "dp": close_sizes({**called, "dp": OPEN}, total)["dp"]}


def _check_pipelines(layouts: Layouts, order: str) -> None:
    """Raise unless dense and expert layers have the same pipelines, as Megatron requires.

    If pp is not last in the order, their data parallel sizes must be equal too.
    """
    dense, expert = layouts
    is_last = order.lower().endswith("pp") or dense.size_of("pp") == 1
    have_same_dp = is_last or dense.size_of("dp") == expert.size_of("dp")
    if dense.groups("pp") != expert.groups("pp") or not have_same_dp:
        inner = dense.size_of("tp", "cp", GTP, default=1)
        raise ConfigurationError(
            f"with order {order!r}, {dense} and the experts' {expert} must have the same "
            f"pipelines and data parallel size; put pp last in the order, or choose sizes of "
            f"tp, ep and {GTP} for the experts that multiply to {inner}"
        )


def order_layout(
    order: str, sizes: Mapping[str, int], rank_offset: int, anchor: str | None = None
) -> RankLayout:
    """Return the layout of sizes in an order of Megatron's dims, which may omit those of size 1.

    Args:
        order: The dims, the first one varying fastest.
        sizes: Their sizes; the dim gtp_remat exists only if it has a size here.
        rank_offset: The smallest rank.
        anchor: The dim after which gtp_remat is inserted if the order does not name it; default:
            the order must name it.

    Raises:
        UnknownDimError: The order names another dim.
        ConfigurationError: It omits a dim larger than 1.

    Example:
        >>> str(order_layout("pp-tp", dict(tp=2, pp=4, dp=1, ep=1, cp=1), 0))
        'pp=4,tp=2,dp=1,ep=1,cp=1'
    """
    named = inject_gtp(order, anchor) if GTP in sizes and anchor is not None else order
    names = parse_order(named.lower() if isinstance(named, str) else named)
    for name in names:
        if name not in DIMS:
            raise UnknownDimError(f"unknown dim {name!r} in order {order!r}; Megatron has {DIMS}")
    for name, size in sizes.items():
        if size > 1 and name not in names:
            where = f"order {order!r} does not name it; add it to the order"
            raise ConfigurationError(f"dim {name!r} has size {size}, but {where}")
    ordered = [name for name in dict.fromkeys((*names, *DIMS)) if name in sizes]
    return RankLayout({name: sizes[name] for name in ordered}, rank_offset=rank_offset)


def inject_gtp(order_str: str, after: str = "tp") -> str:
    """Return an order with `gtp_remat` inserted after a dim, else after tp, else first.

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
"""The views of the grid, the last dim varying fastest; one dim of each takes the open size."""


def torchtitan_layouts(
    *,
    dp_replicate: int = 1,
    dp_shard: int = OPEN,
    cp: int = 1,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    world_size: int,
) -> Views:
    """Return the layout of one of torchtitan's models, whose views are its meshes.

    Args:
        dp_replicate: As for `torchtitan_grids`; so are the other sizes.
        dp_shard: Default: the remaining ranks of the world.
        cp: Context parallel size.
        tp: Tensor parallel size.
        pp: Pipeline parallel size.
        ep: Expert parallel size, a divisor of dp_shard * cp * tp.
        world_size: Number of ranks.

    Raises:
        LayoutError: A size is not a positive int.
        WorldSizeError: The sizes do not multiply to the world, or `ep` does not divide.

    Example:
        >>> print(torchtitan_layouts(tp=2, cp=2, ep=4, world_size=16)["sparse"].layout)
        ep=4,efsdp=4,dp_replicate=1,pp=1
    """
    given = {"tp": tp, "cp": cp, "dp_shard": dp_shard, "dp_replicate": dp_replicate, "pp": pp}
    layout = RankLayout(given, world_size=world_size)
    if (inner := layout.size_of("tp", "cp", "dp_shard")) % positive(ep, "ep"):
        raise WorldSizeError(f"ep={ep} must divide dp_shard * cp * tp = {inner} ({layout})")
    views, sizes = Views(layout), layout.sizes | {"ep": ep}
    for name, dims in TORCHTITAN_VIEWS.items():
        order = list(reversed(dims))
        shared = [dim for dim in order if dim in given]
        views.register(name, [sizes.get(dim, OPEN) for dim in order], order, shared)
    return views
