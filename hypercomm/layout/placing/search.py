"""The best order of dims, exactly: every order is looked at, or shown to be no better.

The groups over some dims depend on the strides of these alone, and a dim's stride is the product
of the sizes before it: there are far fewer groups to look at than orders.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from hypercomm.layout.groups import Axis, lattice
from hypercomm.layout.placing.spread import bytes_across
from hypercomm.layout.placing.traffic import Traffic
from hypercomm.topology import Topology

MOST_DIMS = 8
"""The most dims larger than 1 of which all orders are looked at: 40,320."""

Dims = tuple[str, ...]


class Cost(NamedTuple):
    """What an order costs: the less, the better, the first number first.

    Attributes:
        waited: Bytes that steps wait for, times the weights of the levels that they cross.
        beside: The same of those that go on beside the computation.
        minor: Bytes that cross levels of weight 0, as hosts within an NVLink domain.
    """

    waited: int = 0
    beside: int = 0
    minor: int = 0

    def scaled(self, factor: float) -> tuple[float, float, float]:
        """Return the numbers, each times a factor.

        Example:
            >>> Cost(100, 50, 0).scaled(0.5)
            (50.0, 25.0, 0.0)
        """
        return self.waited * factor, self.beside * factor, self.minor * factor

    def __add__(self, other: Cost) -> Cost:  # type: ignore[override]
        return Cost(
            self.waited + other.waited, self.beside + other.beside, self.minor + other.minor
        )


def weights_of(topology: Topology, given: Mapping[str, float]) -> dict[str, float]:
    """Return what a byte costs that crosses each level.

    A level costs 1, and what crosses a spine crosses a leaf, too. A host within an NVLink domain
    costs nothing.

    Example:
        >>> from hypercomm.topology import read_topology
        >>> weights_of(read_topology("4,72,144", 144), {"leaf": 7})
        {'host': 0, 'domain': 1, 'leaf': 7}
    """
    names = topology.names
    nvlink = "domain" in names
    usual = {name: 0 if nvlink and name in {"host", "sub-domain"} else 1 for name in names}
    return {name: given.get(name, usual[name]) for name in names}


class Costs:
    """What groups cost on a machine, by their strides and sizes; each is worked out once.

    Args:
        topology: The machine; ranks 0, 1, ... are numbered by the order that is looked for.
        weights: What a byte costs that crosses each level.
    """

    def __init__(self, topology: Topology, weights: Mapping[str, float]) -> None:
        self.topology = topology
        self.weights = weights
        self._known: dict[tuple[tuple[Axis, ...], Traffic], Cost] = {}

    def of(self, axes: Sequence[Axis], traffic: Traffic) -> Cost:
        """Return what the groups over some axes cost.

        Args:
            axes: The size and the stride of each of their dims.
            traffic: What they send.
        """
        ordered = tuple(
            sorted((axis for axis in axes if axis.size > 1), key=lambda one: one.stride)
        )
        key = ordered, traffic
        if key not in self._known:
            self._known[key] = self.at(groups_at(self.topology.world_size, ordered), traffic)
        return self._known[key]

    def at(self, groups: NDArray[np.int64], traffic: Traffic) -> Cost:
        """Return what groups of these ranks cost, of shape (groups, size)."""
        weighed = minor = 0
        for level in self.topology.levels:
            sent = bytes_across(level.of_rank[groups], traffic)
            weight = self.weights[level.name]
            weighed += round(weight * sent)
            minor += 0 if weight else sent
        own = Cost(0, weighed, minor) if traffic.overlapped else Cost(weighed, 0, minor)
        for one in traffic.more:
            own += self.at(groups, one)
        return own


def groups_at(world_size: int, axes: Sequence[Axis]) -> NDArray[np.int64]:
    """Return the groups over some axes of a dense layout, of shape (groups, size).

    Example:
        >>> groups_at(8, [Axis(2, 2)]).tolist()
        [[0, 2], [1, 3], [4, 6], [5, 7]]
    """
    ranks = np.arange(world_size)
    is_first = np.ones(world_size, dtype=bool)
    for size, stride in axes:
        is_first &= ranks // stride % size == 0
    return ranks[is_first][:, None] + lattice(axes)[None, :]


def best_order(
    sizes: Mapping[str, int], traffic: Mapping[Dims, Traffic], costs: Costs
) -> tuple[Dims, Cost]:
    """Return the order of dims that costs least; of equal ones, that which is most as given.

    Args:
        sizes: The size of each dim, in the order given. At most `MOST_DIMS` are larger than 1.
        traffic: What is sent over which dims.
        costs: What groups cost.

    Returns:
        The order, the first dim varying fastest, and what it costs. Dims of size 1 stay beside the
        dims that they were behind.

    Example:
        >>> from hypercomm.topology import read_topology
        >>> costs = Costs(read_topology(2, 8), {"host": 1})
        >>> best_order({"dp": 4, "tp": 2}, {("tp",): Traffic(9), ("dp",): Traffic(1)}, costs)
        (('tp', 'dp'), Cost(waited=8, beside=0, minor=0))
    """
    names = [dim for dim in sizes if sizes[dim] > 1]
    search = _Search(names, sizes, traffic, costs)
    search.extend((), Cost(), 0)
    order: list[str] = []
    for dim in search.order:
        order.append(dim)
        place = list(sizes).index(dim) + 1
        for short in list(sizes)[place:]:
            if sizes[short] > 1:
                break
            order.append(short)
    lead = [dim for dim in sizes if dim not in order]  # of size 1, before all others
    return (*lead, *order), search.cost


class _Search:
    """Orders are made dim by dim; one that costs no less than the best so far goes no further."""

    def __init__(
        self,
        names: Sequence[str],
        sizes: Mapping[str, int],
        traffic: Mapping[Dims, Traffic],
        costs: Costs,
    ) -> None:
        self.names, self.sizes, self.costs = names, sizes, costs
        self.alone: dict[str, list[Traffic]] = {dim: [] for dim in names}
        self.joint: list[tuple[Dims, Traffic]] = []
        for dims, one in traffic.items():
            large = tuple(dim for dim in dims if sizes[dim] > 1)
            if len(large) == 1 and (one.bytes or one.more):
                self.alone[large[0]].append(one)
            elif large and (one.bytes or one.more):
                self.joint.append((large, one))
        self.known: dict[tuple[str, int], Cost] = {}
        self.place = {dim: number for number, dim in enumerate(names)}
        self.order: Dims = tuple(names)
        self.cost = Cost()
        self.inversions = -1

    def extend(self, chosen: Dims, cost: Cost, inversions: int) -> None:
        """Look at all orders that begin with some dims."""
        if len(chosen) == len(self.names):
            self.order, self.cost, self.inversions = chosen, cost, inversions
            return
        stride = math.prod(self.sizes[dim] for dim in chosen)
        within = {*chosen}
        for dim in self.names:
            if dim in within:
                continue
            more = cost + self._added(chosen, dim, stride)
            turned = inversions + sum(self.place[other] > self.place[dim] for other in chosen)
            if self.inversions < 0 or (more, turned) < (self.cost, self.inversions):
                self.extend((*chosen, dim), more, turned)

    def _added(self, chosen: Dims, dim: str, stride: int) -> Cost:
        """What the groups cost of which `dim` is the last one to be placed."""
        added = self.known.get((dim, stride))
        if added is None:
            axis, added = Axis(self.sizes[dim], stride), Cost()
            for one in self.alone[dim]:
                added += self.costs.of([axis], one)
            self.known[dim, stride] = added
        for dims, one in self.joint:
            if dim in dims and all(other in chosen or other == dim for other in dims):
                axes = [Axis(self.sizes[dim], stride)]
                inner = 1
                for other in chosen:
                    if other in dims:
                        axes.append(Axis(self.sizes[other], inner))
                    inner *= self.sizes[other]
                added += self.costs.of(axes, one)
        return added
