"""Look at a layout on a machine: how its groups lie, what they cost, and what to warn of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import attrs
import numpy as np

from hypercomm.layout import RankLayout
from hypercomm.layout.placing.placed import Placed
from hypercomm.layout.placing.search import Cost, Costs, Dims
from hypercomm.layout.placing.spread import Spread, bytes_across, units_of_groups
from hypercomm.layout.placing.traffic import Traffic, kind_of
from hypercomm.layout.text import shown
from hypercomm.topology import Topology

_TIGHT = ("tp", "ep")
"""Dims whose groups are warned of where they leave an NVLink domain."""

_SHOWN = 8


def look(
    layout: RankLayout,
    topology: Topology,
    traffic: Mapping[Dims, Traffic],
    weights: Mapping[str, float],
    *,
    is_assumed: bool,
    groups: Iterable[Dims] = (),
    gpus: tuple[int, ...] = (),
) -> Placed:
    """Look at a layout on a machine, without proposals.

    Args:
        layout: The layout.
        topology: The machine; rank r of the layout is its rank r.
        traffic: What is sent over which dims.
        weights: What a byte costs that crosses each level.
        is_assumed: Whether nothing told the traffic.
        groups: More dims to look at.
        gpus: As of `Placed`.
    """
    each: list[Dims] = [(dim,) for dim in layout.dim_names if layout.size_of(dim) > 1]
    first: list[Dims] = each or [layout.dim_names[:1]]
    wanted = dict.fromkeys([*first, *traffic, *groups])
    costs, cost = Costs(topology, weights), Cost()
    spreads = []
    for dims in wanted:
        ranks = layout.groups(*dims).to_array()
        sent = traffic.get(dims)
        if sent is not None:
            cost += costs.at(ranks, sent)
        for level in topology.levels:
            units = level.of_rank[ranks]
            counts = units_of_groups(units)
            leaving = np.flatnonzero(counts > 1)
            spreads.append(
                Spread(
                    dims,
                    level.name,
                    len(ranks),
                    ranks.shape[1],
                    len(leaving),
                    int(counts.min()),
                    int(counts.max()),
                    None
                    if is_assumed or sent is None
                    else sum(bytes_across(units, part) for part in sent.parts),
                    tuple(ranks[leaving[0]].tolist()) if len(leaving) else (),
                )
            )
    found = Placed(layout, topology, traffic, weights, is_assumed, tuple(spreads), cost, gpus=gpus)
    return attrs.evolve(found, warnings=tuple(_warnings(found)))


def _warnings(placed: Placed) -> Iterable[str]:
    names = placed.topology.names
    level = "domain" if "domain" in names else "host"
    if level not in names:
        return
    largest = int(placed.topology.level(level).sizes.max())
    for spread in placed.on(level):
        dims = "+".join(spread.dims)
        kinds = [kind_of(dim) for dim in spread.dims]
        if not spread.across or not any(kind in _TIGHT for kind in kinds):
            continue
        if len(kinds) > 1 and "dp" in kinds:  # its gradients, which go everywhere
            continue
        first = shown(spread.first)
        if spread.size > _SHOWN:
            first = f"({', '.join(map(str, spread.first[:4]))}, ..., {spread.first[-1]})"
        why = f"; a {level} has {largest} GPUs" if spread.size > largest else ""
        yield (
            f"{spread.across:,} of {spread.groups:,} {dims} groups leave their {level}, "
            f"the first is {first}{why}"
        )
