"""Proposals: another order of dims, of hosts, a dim in two, GPUs left out, other sizes."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice

import attrs
import numpy as np
from numpy.typing import NDArray

from hypercomm.layout import RankLayout
from hypercomm.layout.parsing import divisors
from hypercomm.layout.placing.looking import look
from hypercomm.layout.placing.placed import Placed, Proposal
from hypercomm.layout.placing.search import MOST_DIMS, Cost, Costs, Dims, best_order
from hypercomm.layout.placing.spread import units_of_groups
from hypercomm.layout.placing.traffic import Traffic, kind_of
from hypercomm.topology import Topology

Machine = Callable[[int], Topology]
"""All GPUs that there are: of a machine that is given by blocks, at least so many."""

_MOST_SPLITS = 8
_MOST_RANKS = 2**17
"""The most ranks for which a dim is split: each split is a search of its own."""
_MOST_SPARES = 6
_MOST_TRIES = 24
_WORTH = 0.9
"""A split that costs more than this share of the best order is not worth the trouble."""


@attrs.frozen
class _Now:
    """What is to become better.

    Attributes:
        placed: How it lies now.
        machine: All GPUs that there are.
        topology: Those of the layout's ranks, in its order.
        sizes: The size of each dim.
    """

    placed: Placed
    machine: Machine
    topology: Topology
    sizes: Mapping[str, int]

    def found(
        self, kind: str, words: str, order: Dims, topology: Topology, gpus: tuple[int, ...] = ()
    ) -> Proposal:
        """Propose an order of dims on some GPUs."""
        now = self.placed
        ranks = now.layout.ranks if topology is now.topology else range(now.layout.size)
        layout = _numbered(self.sizes, order, ranks)
        return Proposal(kind, words, self.seen(layout, topology, now.traffic, gpus), now)

    def seen(
        self,
        layout: RankLayout,
        topology: Topology,
        traffic: Mapping[Dims, Traffic],
        gpus: tuple[int, ...] = (),
    ) -> Placed:
        """Look at another layout as at the one now."""
        sent = {layout.order_dims(dims): one for dims, one in traffic.items()}
        names = {dim for dims in sent for dim in dims} | {*layout.dim_names}
        more = [spread.dims for spread in self.placed.spreads if {*spread.dims} <= names]
        return look(
            layout,
            topology,
            sent,
            self.placed.weights,
            is_assumed=self.placed.is_assumed,
            groups=[layout.order_dims(dims) for dims in more if {*dims} <= {*layout.dim_names}],
            gpus=gpus,
        )


def _numbered(sizes: Mapping[str, int], order: Dims, ranks: Sequence[int]) -> RankLayout:
    """Number ranks in an order of dims; ranks without gaps need no list."""
    shape = [sizes[dim] for dim in order]
    if isinstance(ranks, range):
        return RankLayout(shape, order, ranks.start)
    return RankLayout(shape, order, ranks=ranks)


def propose(placed: Placed, machine: Machine) -> tuple[Proposal, ...]:
    """Return what would cost less than a layout as it is, the best first.

    Args:
        placed: The layout as it is.
        machine: All GPUs that there are.

    Example:
        >>> from hypercomm.layout.placing import place
        >>> placed = place("dp=4,tp=2", on=2)
        >>> [proposal.headline for proposal in propose(placed, lambda ranks: placed.topology)]
        ['order: tp-dp in place of dp-tp; groups that matter more lie inside']
    """
    layout = placed.layout
    now = _Now(placed, machine, placed.topology.select(layout.ranks), layout.sizes)
    if not placed.is_searched or layout.size < 2:
        return ()
    costs = Costs(now.topology, placed.weights)
    order, least = best_order(now.sizes, placed.traffic, costs)
    made: list[Proposal] = []
    if least < placed.cost:
        words = f"{'-'.join(order)} in place of {'-'.join(layout.dim_names)}"
        made.append(now.found("order", words, order, placed.topology))
    floor = min(least, placed.cost)
    for more in (_hosts(now), _spare(now)):
        best = min(more, key=lambda one: one.placed.cost, default=None)
        if best is not None and best.placed.cost < floor:
            if best.kind == "spare" and best.placed.cost.scaled(1) > floor.scaled(_WORTH):
                continue
            made.append(best)
    split = min(_splits(now, costs), key=lambda one: one.cost, default=None)
    if split is not None and split.cost.scaled(1) < floor.scaled(_WORTH):
        made.append(split.proposal(now))
    made.sort(key=lambda one: one.placed.cost)
    return (*made, *_sizes(now))


# ---- hosts in another order ---------------------------------------------------------------------


def _sorted_gpus(machine: Topology, ranks: int) -> list[NDArray[np.int64]]:
    """Orders of the machine's GPUs with units whole: as they come, and large ones first."""
    levels = machine.levels
    keys = [level.of_rank for level in levels]
    found = [np.lexsort(keys)]
    if ranks < machine.world_size:
        full = [-level.sizes[level.of_rank] for level in levels]
        both = [key for pair in zip(keys, full, strict=True) for key in pair]
        found.append(np.lexsort(both))
    return found


def _hosts(now: _Now) -> Iterator[Proposal]:
    size = now.placed.layout.size
    machine = now.machine(size)
    if machine.world_size < size:
        return
    mine = np.asarray(now.placed.layout.ranks)
    for gpus in _sorted_gpus(machine, size):
        chosen = gpus[:size]
        if np.array_equal(chosen, mine):
            continue
        topology = machine.select(chosen.tolist())
        order, _ = best_order(now.sizes, now.placed.traffic, Costs(topology, now.placed.weights))
        same = {*chosen.tolist()} == {*mine.tolist()}
        hosts = topology.level("host") if "host" in topology.names else topology.levels[0]
        shown = " ".join(hosts.names[:3]) + (" ..." if hosts.units > 3 else "")
        what = "" if same else ", others left out"
        words = f"hosts in the order {shown}{what}, {'-'.join(order)}"
        yield now.found("hosts", words, order, topology, tuple(chosen.tolist()))


# ---- GPUs left out ------------------------------------------------------------------------------


def _spare(now: _Now) -> Iterator[Proposal]:
    """Use only so many GPUs of each unit of a level as make the groups fit."""
    size = now.placed.layout.size
    for level in now.placed.topology.levels:
        largest = int(level.sizes.max())
        step = _host_size(now.placed.topology) if level.name != "host" else 1
        fitting = [used for used in divisors(size) if 3 * largest <= 4 * used < 4 * largest]
        if size <= largest:
            continue
        for used in [one for one in reversed(fitting) if one % step == 0][:_MOST_SPARES]:
            found = _using(now, level.name, used, largest)
            if found is not None:
                yield found


def _host_size(topology: Topology) -> int:
    """The GPUs of each host, where all have as many; the last one may have fewer. Else 1."""
    if "host" not in topology.names:
        return 1
    sizes = topology.level("host").sizes
    return int(sizes[0]) if (sizes[:-1] == sizes[0]).all() else 1


def _using(now: _Now, name: str, used: int, largest: int) -> Proposal | None:
    size = now.placed.layout.size
    units = size // used
    machine = now.machine(units * largest)
    gpus = _sorted_gpus(machine, size)[0]
    of_gpu = machine.level(name).of_rank[gpus]
    host_of = machine.level("host" if "host" in machine.names else name).of_rank
    chosen: list[NDArray[np.int64]] = []
    sizes: list[int] = []
    for unit in range(machine.level(name).units):
        within = gpus[of_gpu == unit]
        if len(within) < used or len(chosen) == units:
            continue
        if (
            name != "host"
            and used < len(within)
            and host_of[within[used - 1]] == host_of[within[used]]
        ):
            continue  # hosts are taken whole
        chosen.append(within[:used])
        sizes.append(len(within))
    if len(chosen) < units:
        return None
    there, ranks = sum(sizes), np.concatenate(chosen)
    topology = machine.select(ranks.tolist())
    order, _ = best_order(now.sizes, now.placed.traffic, Costs(topology, now.placed.weights))
    words = (
        f"{used} of the {largest} GPUs of each {name}, {there - size:,} of {there:,} left out, "
        f"{'-'.join(order)}"
        if {*sizes} == {largest}
        else f"{used} GPUs of each {name}, {there - size:,} of {there:,} left out, "
        f"{'-'.join(order)}"
    )
    return now.found("spare", words, order, topology, tuple(ranks.tolist()))


# ---- a dim in two -------------------------------------------------------------------------------


@attrs.frozen
class _Split:
    """A dim in two: the sizes then, their best order and its cost."""

    words: str
    sizes: Mapping[str, int]
    traffic: Mapping[Dims, Traffic]
    order: Dims
    cost: Cost

    def proposal(self, now: _Now) -> Proposal:
        layout = _numbered(self.sizes, self.order, now.placed.layout.ranks)
        placed = now.seen(layout, now.placed.topology, self.traffic)
        return Proposal("split", f"{self.words}, {'-'.join(self.order)}", placed, now.placed)


def _splits(now: _Now, costs: Costs) -> Iterator[_Split]:
    """Cut a dim of data parallelism in two: shards inside, what is reduced of them outside."""
    traffic = now.placed.traffic
    too_many = now.placed.layout.size > _MOST_RANKS
    if (
        too_many
        or now.placed.is_assumed
        or sum(size > 1 for size in now.sizes.values()) >= MOST_DIMS
    ):
        return
    for dim, size in now.sizes.items():
        mine = [dims for dims in traffic if dim in dims]
        if kind_of(dim) != "dp" or any(
            part.pattern != "ring" for dims in mine for part in traffic[dims].parts
        ):
            continue
        for inner in islice((one for one in divisors(size)[1:-1]), _MOST_SPLITS):
            names = (f"{dim}_inner", f"{dim}_outer")
            if {*names} & {*now.sizes}:
                continue
            sizes: dict[str, int] = {}
            for other, count in now.sizes.items():
                here = {names[0]: inner, names[1]: size // inner}
                sizes.update(here if other == dim else {other: count})
            sent = _split_traffic(traffic, dim, names, sizes)
            words = f"{dim}={size} in two, {names[0]}={inner} and {names[1]}={size // inner}"
            yield _Split(words, sizes, sent, *best_order(sizes, sent, costs))


def _split_traffic(
    traffic: Mapping[Dims, Traffic], dim: str, names: tuple[str, str], sizes: Mapping[str, int]
) -> dict[Dims, Traffic]:
    """The traffic of a dim in two: shards go round inside, and of each shard the sum outside.

    A ring over n ranks sends (n - 1)/n of what there is, whatever that is: so over the m ranks
    inside (m - 1)/m, and outside, over b ranks, (b - 1)/b of the m-th part.
    """
    found: dict[Dims, Traffic] = {}
    for dims, one in traffic.items():
        if dim not in dims:
            found[dims] = one
            continue
        inside = tuple(names[0] if other == dim else other for other in dims)
        within, beyond = math.prod(sizes[other] for other in inside), sizes[names[1]]
        every = within * beyond
        for part in one.parts:
            whole = part.bytes * every / (every - 1)
            for over, count in (
                (inside, whole * (within - 1) / within),
                ((names[1],), whole / within * (beyond - 1) / beyond),
            ):
                new = attrs.evolve(part, bytes=round(count))
                known = found.get(over)
                found[over] = attrs.evolve(known, more=(*known.more, new)) if known else new
    return found


# ---- other sizes --------------------------------------------------------------------------------


def _sizes(now: _Now) -> Iterator[Proposal]:
    """Other sizes of data parallelism with which no groups of a dim lie partly inside."""
    weights = now.placed.weights
    if not any(one.is_partly and weights[one.level] for one in now.placed.spreads):
        return
    for dim, size in now.sizes.items():
        if kind_of(dim) != "dp":
            continue
        around = range(max(1, size - size // 4), size + size // 4 + 1)
        near = sorted(around, key=lambda count: (abs(count - size), -count))
        for count in near[1:_MOST_TRIES]:
            sizes = {**now.sizes, dim: count}
            ranks = math.prod(sizes.values())
            machine = now.machine(ranks)
            if machine.world_size >= ranks and _fits(sizes, machine):
                layout = RankLayout([*sizes.values()], [*sizes])
                placed = now.seen(layout, machine, now.placed.traffic)
                words = f"{dim}={count} in place of {size}, {ranks:,} ranks"
                yield Proposal("sizes", words, placed, now.placed)
                return


def _fits(sizes: Mapping[str, int], machine: Topology) -> bool:
    """Whether of each dim and level either all groups lie in one unit, or none."""
    layout = RankLayout([*sizes.values()], [*sizes])
    for dim in layout.dim_names:
        groups = layout.groups(dim).to_array()
        for level in machine.levels:
            counts = units_of_groups(level.of_rank[groups])
            if 0 < np.count_nonzero(counts > 1) < counts.size:
                return False
    return True
