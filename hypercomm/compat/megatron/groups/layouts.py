"""How Megatron lays the dense and the expert dims of a model out over its ranks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from hypercomm.errors import UnknownDimError
from hypercomm.layout import RankLayout
from hypercomm.layout.parsing import parse_order

GTP = "gtp_remat"
"""The dim of generalized tensor parallelism: peers share weights, and gather them to use them."""

DIMS = ("tp", "pp", "dp", "ep", "cp", GTP)
"""The dims that an order may name, in the order in which Megatron adds those that it does not."""


class Layouts(NamedTuple):
    """The two factorisations of one span of ranks."""

    dense: RankLayout
    expert: RankLayout


def model_layouts(
    order: str, dense: Mapping[str, int], expert: Mapping[str, int], rank_offset: int
) -> Layouts:
    """Lay the sizes of a model's dense and expert layers out in an order of Megatron's dims.

    Args:
        order: The dims, the first one varying fastest.
        dense: Sizes of tp, cp, dp and pp, and of gtp_remat where there are peers.
        expert: Sizes of tp, ep, dp and pp, and of gtp_remat.
        rank_offset: The smallest rank.

    Raises:
        UnknownDimError, OrderError: As for `order_layout`.

    Example:
        >>> dense, expert = dict(tp=2, cp=1, dp=4, pp=1), dict(tp=2, ep=4, dp=1, pp=1)
        >>> [str(layout) for layout in model_layouts("tp-cp-ep-dp-pp", dense, expert, 0)]
        ['tp=2,cp=1,ep=1,dp=4,pp=1', 'tp=2,cp=1,ep=4,dp=1,pp=1']
    """
    return Layouts(
        order_layout(order, {**dense, "ep": 1}, rank_offset, "tp"),
        order_layout(order, {**expert, "cp": 1}, rank_offset, "ep"),
    )


def other_pipelines(layouts: Layouts, order: str, names: Mapping[str, str]) -> str | None:
    """Say how the pipelines of dense and expert layers differ; None where they are the same.

    Megatron demands it. Where pp is not last in the order that was given, the order of stages and
    replicas must be the same too.

    Args:
        layouts: The two layouts.
        order: The order as given.
        names: What the caller calls the experts' tp, ep and gtp_remat, if it has that.

    Example:
        >>> dense, expert = dict(tp=2, cp=1, pp=2, dp=2), dict(tp=4, ep=1, pp=2, dp=1)
        >>> other_pipelines(model_layouts("tp-cp-dp-pp", dense, expert, 0), "tp-cp-dp-pp", {})
        >>> layouts = model_layouts("tp-pp-dp", dense, expert, 0)
        >>> other_pipelines(layouts, "tp-pp-dp", {"tp": "etp", "ep": "ep"}).rpartition("; ")[2]
        'put pp last in the order, or choose expert sizes with etp * ep = 2'
    """
    dense, expert = layouts
    is_last = order.lower().endswith("pp") or dense.size_of("pp") == 1
    have_same_dp = is_last or dense.size_of("dp") == expert.size_of("dp")
    if dense.groups("pp") == expert.groups("pp") and have_same_dp:
        return None
    factors = " * ".join(names[dim] for dim in names if dim not in {"pp", "dp"})
    return (
        f"with order {order!r} the dense layers ({dense}) and the expert layers ({expert})"
        f" must have the same pipelines and data parallel size, but their pipelines are "
        f"{dense.groups('pp')!r} and {expert.groups('pp')!r}; put pp last in the order, or "
        f"choose expert sizes with {factors} = "
        f"{dense.size_of('tp') * dense.size_of('cp') * dense.size_of(GTP, default=1)}"
    )


def order_layout(
    order: str, sizes: Mapping[str, int], rank_offset: int, anchor: str | None = None
) -> RankLayout:
    """Lay sizes out in an order of Megatron's dims, which may leave out those of size 1.

    Args:
        order: The dims, the first one varying fastest.
        sizes: Their sizes; without that of gtp_remat there is no such dim.
        rank_offset: The smallest rank.
        anchor: The dim behind which gtp_remat is, where the order does not say; default: it must.

    Raises:
        UnknownDimError: The order names another dim.
        OrderError: It leaves out a larger one.

    Example:
        >>> str(order_layout("pp-tp", dict(tp=2, pp=4, dp=1, ep=1, cp=1), 0))
        'pp=4,tp=2,dp=1,ep=1,cp=1'
    """
    given = order
    order = order.lower() if isinstance(order, str) else order
    names = parse_order(order)
    for name in names:
        if name not in DIMS:
            raise UnknownDimError(f"unknown dim {name!r} in order {order!r}; Megatron has {DIMS}")
    if GTP not in sizes and GTP in names:
        order = "-".join(name for name in names if name != GTP) or "tp"
    elif GTP in sizes and anchor is not None:
        order = inject_gtp(given, anchor).lower()
    ordered = {name: sizes[name] for name in DIMS if name in sizes}
    return RankLayout.from_order(order, rank_offset=rank_offset, **ordered)


def inject_gtp(order_str: str, after: str = "tp") -> str:
    """Name `gtp_remat` in an order that does not: behind a dim, behind tp, or first.

    >>> inject_gtp("tp-cp-ep-dp-pp"), inject_gtp("tp-cp-ep-dp-pp", after="ep"), inject_gtp("dp-pp")
    ('tp-gtp_remat-cp-ep-dp-pp', 'tp-cp-ep-gtp_remat-dp-pp', 'gtp_remat-dp-pp')
    """
    names = order_str.split("-") if isinstance(order_str, str) else []
    if not names or GTP in order_str.lower().split("-"):
        return order_str
    place = next((names.index(dim) + 1 for dim in (after, "tp") if dim in names), 0)
    return "-".join([*names[:place], GTP, *names[place:]])
