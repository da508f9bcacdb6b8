"""How a grid looks: as lines of text, and as HTML in a notebook."""

from __future__ import annotations

import html

from hypercomm.errors import HyperCommError
from hypercomm.grid.interface import GridInterface
from hypercomm.layout.notation import format_coords
from hypercomm.process_groups import world


def as_text(headline: str, grid: GridInterface) -> str:
    """Return a headline, where the calling rank is, and the process groups that exist."""
    return "\n".join([headline, *(f"  {line}" for line in _lines(grid))])


def as_html(headline: str, grid: GridInterface) -> str:
    """Return the same as HTML, with the dims in a table."""
    layout = grid.layout
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td><td>{size}</td><td>{stride}</td></tr>"
        for name, size, stride in zip(layout.dim_names, layout.shape, layout.strides, strict=True)
    )
    return (
        f"<p><b>{html.escape(headline)}</b></p>"
        f"<table><thead><tr><th>dim</th><th>size</th><th>stride</th></tr></thead>"
        f"<tbody>{rows}</tbody></table>"
        f"<ul>{''.join(f'<li>{html.escape(line)}</li>' for line in _lines(grid))}</ul>"
    )


def _lines(grid: GridInterface) -> list[str]:
    if grid.is_destroyed:
        return ["destroyed"]
    groups = [
        f"group {key}: {len(planned.groups)} of {planned.groups.group_size} ranks"
        + (f", {planned.resolved.backend}" if planned.resolved.backend else "")
        for key, planned in grid._plans.items()
    ]
    views = [f"view {name}: {view}" for name, view in grid.views.items()]
    return [_whereabouts(grid), *views, *(groups or ["no process groups yet"])]


def _whereabouts(grid: GridInterface) -> str:
    try:
        rank = world.rank()
    except HyperCommError:
        return "this rank is not known: torch.distributed is not initialised"
    if rank not in grid.layout:
        return f"this is rank {rank}, outside the grid"
    return f"this is rank {rank}, at {format_coords(grid.layout.coords(rank))}"
