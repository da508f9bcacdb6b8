"""What Megatron's dims and groups are in a grid that somebody has made."""

from __future__ import annotations

from typing import Literal

from torch.distributed import ProcessGroup

from hypercomm.compat.megatron.groups import TABLE, GroupRow
from hypercomm.grid import HyperCommGrid
from hypercomm.grid.interface import GridInterface
from hypercomm.layout import RankLayout

EXPERT = "expert"
"""The view over the dims of the expert layers."""

_NAMES: dict[str, dict[str, tuple[str, ...]]] = {
    "dense": {},
    "expert": {"tp": ("expt_tp", "tp"), "dp": ("expt_dp", "dp")},
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
        grid: Which of Megatron's grids they are of: in "expert", tp and dp may be called expt_tp
            and expt_dp.

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


def held_by(grid: GridInterface, row: GroupRow) -> ProcessGroup | None:
    """Return the group of a grid that is one of Megatron's; None if it was not created.

    That of plain groups is the one over their dims, and the name of the field counts only where
    the grid has none of them; that of derived groups is filed under the name of the field.
    """
    is_grid = isinstance(grid, HyperCommGrid)  # which has the groups of its views too
    groups = {key: pg for key, pg in grid.pgs.items() if not (is_grid and key.view)}
    dims = own_dims(grid.layout, row.dims, row.grid)
    for key, group in groups.items():
        if row.plain and dims:
            is_it = (key.dims, key.name) == (dims, None)
        else:
            is_it = key.name == row.field
        if is_it:
            return group
    return None


def levels_of(grid: GridInterface) -> list[ProcessGroup]:
    """Return the groups of hierarchical context parallelism that a grid holds, by their names."""
    named = [(key.name or "", pg) for key, pg in grid.pgs.items()]
    return [pg for name, pg in named if name.startswith("hcp_L") and pg is not None]


ROW_OF = {row.name: row for row in TABLE}
"""The row of each global."""
