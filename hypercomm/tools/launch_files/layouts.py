"""Compute the layouts of frameworks from their sizes, without torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs

from hypercomm.compat.layouts import NAMES, megatron_layouts, torchtitan_layouts
from hypercomm.errors import LayoutError, WorldSizeError
from hypercomm.layout import RankLayout
from hypercomm.layout.parsing import UNSPECIFIED, known_size
from hypercomm.layout.views import Views
from hypercomm.tools.launch_files.tables import layout_rows

ENGINES = "engines"
"""The dim that numbers the replicas of an inference engine."""

CHOICES = ("dp_attention", "expert_parallel", "pp_before_dp", "sequence_parallel", "stage")
"""Keys in the `sizes` of `framework_layouts` whose values are choices, not sizes."""

_ORDERS = {False: "tp-cp-ep-dp-pp", True: "tp-cp-ep-pp-dp"}


@attrs.frozen(kw_only=True)
class Kind:
    """The layouts of a framework. The first dim varies fastest.

    Attributes:
        dims: The dims of the layout.
        rest: The dim whose size is inferred from the number of ranks unless the size is given.
        views: Maps the name of each further factorisation of the ranks to its dims. A size that is
            not given is inferred from the number of ranks. A view exists if a size of it is given.
        defaults: The default sizes that are not 1.
        combined: Maps a size to the two dims whose product it is.
        is_exact: Whether the sizes must multiply to the world size, unless all sizes are 1.
    """

    dims: tuple[str, ...] = attrs.field(converter=tuple)
    rest: str
    views: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict)
    defaults: Mapping[str, int] = attrs.field(factory=dict)
    combined: Mapping[str, tuple[str, str]] = attrs.field(factory=dict)
    is_exact: bool = False


def framework_layouts(kind: str, sizes: Mapping[str, Any], world_size: int | None) -> Views:
    """Return a module's layout, with the other factorisations of the module's ranks as views.

    Args:
        kind: "megatron", "torchtitan" or a layout of a table.
        sizes: The given sizes, by dim. The mapping may also contain choices: "pp_before_dp" for
            Megatron, "dp_attention" for SGLang, "expert_parallel" for vLLM, and "engine", the
            number of GPUs of an inference engine.
        world_size: The number of ranks, or None. Inference engines do not need this number.

    Raises:
        HyperCommError: The sizes do not fit the world.

    Example:
        >>> views = framework_layouts("sglang", {"tp": 16, "dp": 4, "dp_attention": 1}, None)
        >>> print(views.base, views["attention"], sep="; ")
        tp=16,pp=1; attn_tp=4,attn_dp=4,pp=1 sharing pp
    """
    given = dict(sizes)
    rows = layout_rows()
    if kind == "sglang" and "dp_attention" in given:
        kind = "sglang attention"
        given["attn_dp"] = given.pop("dp", 1)
    row = Kind(**rows[kind]) if kind in rows else None
    used = {*CHOICES, *_sizes_of(kind, row)}
    unused = [f"{name}={size}" for name, size in given.items() if size > 1 and name not in used]
    if unused:
        raise LayoutError(f"{kind} layouts do not have {' and '.join(unused)}")
    if row and (world_size is not None or row.rest == ENGINES or _fixes_rank_count(row, given)):
        return _of_kind(row, _completed(kind, row, given), world_size, sizes)
    if world_size is None and kind == "torchtitan" and given.get("dp_shard", UNSPECIFIED) > 0:
        world_size = _factor(kind, row, given)
    if world_size is None:
        factor = _factor(kind, row, given)
        multiple = f", a multiple of {factor}" if factor > 1 else ""
        raise WorldSizeError(
            f"the number of ranks is not given; give it as --world-size (world_size=){multiple}"
        )
    if kind == "torchtitan":
        known = torchtitan_layouts.__kwdefaults__ or {}
        own = {name: size for name, size in given.items() if name in known}
        return torchtitan_layouts(**own, world_size=world_size)
    return megatron_layouts(given, _ORDERS["pp_before_dp" in given], world_size)


def _factor(kind: str, row: Kind | None, given: Mapping[str, int]) -> int:
    """Return the number of which the number of ranks must be a multiple."""
    sizes = {name: max(1, size) for name, size in given.items()}
    layouts: list[tuple[str, ...]] = [("tp", "cp", "pp", "dp_shard", "dp_replicate")]
    if row:
        layouts = [row.dims, *row.views.values()]
    elif kind == "megatron":
        layouts = [("tp", "cp", "pp"), ("expt_tp", "ep", "pp")]
        sizes.setdefault("expt_tp", sizes.get("tp", 1))
    return math.lcm(*(math.prod(sizes.get(dim, 1) for dim in dims) for dims in layouts))


def _sizes_of(kind: str, row: Kind | None) -> set[str]:
    """Return the names of the sizes that are allowed for a kind of module."""
    if row:
        return {"engine", *row.dims, *row.combined}.union(*row.views.values())
    if kind == "megatron":
        return {*NAMES.values()}
    return {*(torchtitan_layouts.__kwdefaults__ or {})}


def _fixes_rank_count(row: Kind, sizes: Mapping[str, int]) -> bool:
    """Return whether the sizes alone determine the number of ranks."""
    own = {dim: sizes.get(dim, 1) for dim in row.dims}
    has_all = any(row.rest in dims and size in sizes for size, dims in row.combined.items())
    return sizes.get(row.rest, -1) > 0 or has_all or (row.is_exact and known_size(own) > 1)


def _completed(kind: str, row: Kind, given: Mapping[str, int]) -> dict[str, int]:
    """Return the given sizes, and the sizes that follow from them.

    The two dims of a combined size: one is inferred from the other. For an inference engine, tp is
    inferred from the number of GPUs; for vLLM, dp is inferred from the expert parallel size.
    """
    sizes = dict(given)
    for name, (first, second) in row.combined.items():
        if sizes.get(name, UNSPECIFIED) > 0:
            parts = {first: UNSPECIFIED, second: sizes.get(second, 1)}
            sizes[first] = RankLayout(parts, world_size=sizes.pop(name)).size_of(first)
    if "engine" in sizes and "tp" not in sizes:
        parts = {"tp": UNSPECIFIED, "pp": sizes.get("pp", 1)}
        sizes["tp"] = RankLayout(parts, world_size=sizes["engine"]).size_of("tp")
    if kind == "vllm" and sizes.get("ep", 1) > 1 and "dp" not in sizes:
        parts = {"tp": sizes.get("tp", 1), "dp": UNSPECIFIED}
        sizes["dp"] = RankLayout(parts, world_size=sizes["ep"]).size_of("dp")
    return sizes


def _of_kind(
    row: Kind, sizes: Mapping[str, int], world_size: int | None, choices: Mapping[str, Any]
) -> Views:
    """Return the layouts of a framework from its row."""
    given = {dim: sizes.get(dim, row.defaults.get(dim, 1)) for dim in row.dims}
    if UNSPECIFIED not in given.values() and not _fixes_rank_count(row, sizes):
        given[row.rest] = UNSPECIFIED
        if world_size is None:
            del given[row.rest]
    views = Views(RankLayout(given, world_size=world_size))
    for name, dims in row.views.items():
        own = [dim for dim in dims if dim not in row.dims]
        is_asked = any(sizes.get(dim, 1) > 1 for dim in own)
        if is_asked or (own == ["ep"] and "expert_parallel" in choices):
            every = {**dict.fromkeys(own, UNSPECIFIED), **sizes, **views.base.sizes}
            there = [dim for dim in dims if dim in given or dim in own]
            shared = [dim for dim in there if dim in given]
            views.register(name, [every[dim] for dim in there], there, shared)
    return views
