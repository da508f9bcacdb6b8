"""What Megatron's dims and groups are in a grid that somebody has made."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

from torch.distributed import ProcessGroup

from hypercomm.compat.megatron.groups.layouts import GTP
from hypercomm.compat.megatron.groups.table import EXPERT_ALL_GATHER, ROWS, TABLE, GroupRow
from hypercomm.compat.megatron.releases import version
from hypercomm.grid import HyperCommGrid
from hypercomm.grid.grid import GridView
from hypercomm.layout import RankLayout
from hypercomm.process_groups.spec import GroupKey

TWIN, HYBRID = "_gloo", "hybrid_dp_cp"
"""Attributes of a collection for what Megatron has no field for: the end of one, and one."""

EXPERT = "expert"
"""The view over the dims of the expert layers."""

_NAMES: dict[str, dict[str, tuple[str, ...]]] = {
    "dense": {},
    "expert": {name: (f"expt_{name}", name) for name in ("tp", "dp", "gtp_remat")},
}
"""What Megatron's dims may be called, where not as Megatron does; the first found counts."""

_REPLICAS = {"dense": "ep", "expert": "cp"}
"""The dim along which the other layers are divided, and these are copied, as along dp."""


def own_dims(layout: RankLayout, dims: str, grid: Literal["dense", "expert"]) -> tuple[str, ...]:
    """Return the dims of a layout that dims of Megatron's are, in the layout's order.

    A dim that the layout lacks altogether has size 1, adds no ranks, and is left out.

    Args:
        layout: That of a grid, or of its view "expert".
        dims: Megatron's dims, as in "tp-ep-pp".
        grid: Which of Megatron's grids they are of: in "expert", tp, dp and gtp_remat may be
            called expt_tp and so on.

    Example:
        >>> own_dims(RankLayout.parse("expt_tp=2,ep=2,dp=2,pp=2"), "tp-dp", "expert")
        ('expt_tp', 'dp')
        >>> own_dims(RankLayout.parse("tp=2,dp=2"), "dp-cp", "dense")
        ('dp',)
        >>> own_dims(RankLayout.parse("tp=2,cp=2,dp=2"), "dp", "expert")
        ('cp', 'dp')
    """
    wanted = dims.split("-")
    names = [_NAMES[grid].get(dim, (dim,)) for dim in wanted]
    found = [next((name for name in each if name in layout.dim_names), None) for each in names]
    if "dp" in wanted and layout.size_of(_REPLICAS[grid], default=1) > 1:
        found.append(_REPLICAS[grid])
    own = {name for name in found if name is not None}
    return layout.order_dims(own) if own else ()


def gtp_size(layout: RankLayout, grid: Literal["dense", "expert"]) -> int:
    """Return the number of GTP peers in a layout, which is that of a grid or of its experts.

    Example:
        >>> gtp_size(RankLayout.parse("tp=2,gtp_remat=4"), "dense")
        4
    """
    return math.prod(layout.size_of(dim) for dim in own_dims(layout, GTP, grid))


def fields_of(grid: GridView, expert: GridView | None) -> dict[str, object]:
    """Return what grids hold of all of Megatron's groups, by attribute of a collection.

    Args:
        grid: That of the dense layers.
        expert: That of the experts, or a view; None without one.
    """
    peers = gtp_size(grid.layout, "dense")
    if expert is not None:
        peers *= gtp_size(expert.layout, "expert")
    knows_gtp = version.has("gtp_remat") or peers > 1
    held: dict[str, object] = {}
    for row in (*TABLE, EXPERT_ALL_GATHER):
        if knows_gtp or not row.gtp:
            _fill(held, row, grid if row.grid == "dense" else expert)
    return held


def _fill(held: dict[str, object], row: GroupRow, source: GridView | None) -> None:
    """Add to a collection's attributes what a grid has of a row, or what stands in for it."""
    own = {} if source is None else attributes_of(source, row)
    held.update(own)
    if row.field is None or row.field in own:
        return
    if row.gtp and source is not None and gtp_size(source.layout, row.grid) > 1:
        return  # nothing stands in for what was not created
    if row.gtp:
        held[row.field] = None  # there are no peers, and nobody is to look elsewhere
    whole = ROWS[row.otherwise].field if isinstance(row.otherwise, str) else None
    for suffix in ("", TWIN) if whole else ():
        if f"{whole}{suffix}" in held:
            held[row.field + suffix] = held[f"{whole}{suffix}"]


def attributes_of(grid: GridView, row: GroupRow) -> dict[str, object]:
    """Return what a grid has created of one of Megatron's rows, by attribute of a collection.

    Plain groups are those over the row's dims, and the name of the field counts only where the grid
    has none of them; derived groups are filed under the name of the field. A group that the calling
    rank is not in is None.
    """
    if row.part is not None:
        parts = _parts_of(grid, row)
        return {row.field or HYBRID: row.gather(parts)} if parts else {}
    if row.field is None:
        return {}
    dims = own_dims(grid.layout, row.dims, row.grid)
    found: dict[str, object] = {}
    for suffix, twin in (("", False), (TWIN, True)):
        name = row.filed_as(dims, twin=twin)
        for key, group in _own_groups(grid):
            if key.name == name and (key.dims == dims or not (row.derive is None and dims)):
                found[row.field + suffix] = group
    return found


def _parts_of(grid: GridView, row: GroupRow) -> dict[int, ProcessGroup]:
    """What a grid holds of a row that makes several groups, by place or size."""
    start = f"{row.field or row.key}_{row.part}"
    named = [((key.name or ""), pg) for key, pg in _own_groups(grid)]
    parts = [(name.removeprefix(start), pg) for name, pg in named if name.startswith(start)]
    return {int(part): pg for part, pg in parts if part.isdecimal() and pg is not None}


def _own_groups(grid: GridView) -> Iterator[tuple[GroupKey, ProcessGroup | None]]:
    is_grid = isinstance(grid, HyperCommGrid)  # which has the groups of its views too
    return ((key, pg) for key, pg in grid.pgs.items() if not (is_grid and key.view))
