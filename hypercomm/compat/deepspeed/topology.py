"""DeepSpeed's ProcessTopology for a layout, so that both number the ranks alike."""

from __future__ import annotations

import importlib
import math
from typing import Any

from hypercomm.compat.deepspeed.roles import Dims, read_roles
from hypercomm.errors import LayoutError, MissingPackageError
from hypercomm.grid.grid import GridView
from hypercomm.layout import RankLayout
from hypercomm.layout.text import shown

_AXES = {"pp": "pipe", "dp": "data", "tp": "model"}
"""What DeepSpeed calls the parts; it asks for the first two, be their size 1."""


def topology_axes(
    layout: RankLayout | GridView, *, pp: Dims = "pp", dp: Dims = "dp", tp: Dims = "tp"
) -> dict[str, int]:
    """Return the axes that DeepSpeed numbers the ranks of a layout by, the LAST one fastest.

    Args:
        layout: A layout, or a grid, of ranks from 0 on without gaps.
        pp: The dim, or the neighbouring dims, that DeepSpeed's "pipe" is. A dim that the layout
            lacks has size 1.
        dp: The same of "data".
        tp: The same of "model"; a layout that has none gives no such axis.

    Returns:
        The size of each axis, in DeepSpeed's order, which is the layout's reversed.

    Raises:
        LayoutError: The ranks do not begin at 0, have gaps or an order of their own; the dims of an
            axis are no neighbours; or as for `Mpu`.

    Example:
        Rank = tp * 1 + dp * 2 + pp * 8, so DeepSpeed's slowest axis is the pipeline.

        >>> topology_axes(RankLayout.parse("tp=2,dp=4,pp=3"))
        {'pipe': 3, 'data': 4, 'model': 2}
        >>> topology_axes(RankLayout.parse("pp=2,cp=2,dp=4"), dp=["dp", "cp"])
        {'data': 8, 'pipe': 2}
        >>> topology_axes(RankLayout.parse("dp=4"))
        {'pipe': 1, 'data': 4}
    """
    layout = layout.layout if isinstance(layout, GridView) else layout
    if not isinstance(layout, RankLayout):
        raise LayoutError(f"layout must be a RankLayout or a grid, got {shown(layout)}")
    if layout.ranks != range(layout.size):
        raise LayoutError(
            f"DeepSpeed numbers ranks 0..{layout.size - 1} without gaps, in the order of the "
            f"coordinates, but this layout has others: {layout!r}; give it a layout of the whole "
            f"world"
        )
    roles = read_roles(layout, {"pp": pp, "dp": dp, "tp": tp})
    axes = {_AXES[part]: dims for part, dims in roles.items() if dims or part != "tp"}
    steps = [dim for dim in layout.dim_names if layout.size_of(dim) > 1]
    speed = {}
    for axis, dims in axes.items():
        larger = [dim for dim in dims if dim in steps]
        places = [steps.index(dim) for dim in larger]
        if places and places[-1] - places[0] >= len(places):
            raise LayoutError(
                f"dims {dims} cannot be DeepSpeed's axis {axis!r}: they are not neighbours in "
                f"{layout}; take a layout in which they are"
            )
        first = (larger or list(dims))[:1]
        speed[axis] = layout.dim_names.index(first[0]) if first else len(layout.dim_names)
    slowest_first = sorted(axes, key=lambda axis: -speed[axis])
    return {axis: math.prod(map(layout.size_of, axes[axis])) for axis in slowest_first}


def process_topology(
    layout: RankLayout | GridView, *, pp: Dims = "pp", dp: Dims = "dp", tp: Dims = "tp"
) -> Any:
    """Make DeepSpeed's ProcessTopology of a layout, for `PipelineModule(topology=)`.

    DeepSpeed creates the pipeline's process groups itself, from the ranks that this names: beside a
    grid of the same layout there are then two groups over the same ranks.

    Args:
        layout: A layout, or a grid, of the whole world.
        pp: The dim, or the neighbouring dims, that DeepSpeed's "pipe" is.
        dp: The same of "data".
        tp: The same of "model".

    Returns:
        A `deepspeed.runtime.pipe.topology.ProcessTopology`.

    Raises:
        LayoutError: As for `topology_axes`.
        MissingPackageError: DeepSpeed cannot be imported (an ImportError).

    Example:
        >>> layout = RankLayout.parse("tp=2,dp=4,pp=3")
        >>> topology = process_topology(layout)  # doctest: +SKIP
        >>> topology.get_coord(21), layout.coords(21)  # doctest: +SKIP
        (ProcessCoord(pipe=2, data=2, model=1), {'tp': 1, 'dp': 2, 'pp': 2})

    Source: DeepSpeed 0.19.8, `deepspeed/runtime/pipe/topology.py`.
    """
    axes = topology_axes(layout, pp=pp, dp=dp, tp=tp)
    try:
        module = importlib.import_module("deepspeed.runtime.pipe.topology")
    except ImportError as error:
        raise MissingPackageError(
            f"process_topology() needs DeepSpeed, which cannot be imported ({error}): "
            f"pip install deepspeed"
        ) from error
    return module.ProcessTopology(axes=list(axes), dims=list(axes.values()))
