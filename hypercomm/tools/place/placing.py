"""Place a layout on a machine: find the groups that cross units, and the best order of the dims.

A unit is one host, NVLink domain or switch. All hosts form one level, and all domains another.

The groups over some dims depend only on the sizes and strides of these dims, and the stride of a
dim is the product of the sizes before it. The search therefore computes the cost of far fewer
groups than there are orders.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, cached_property
from operator import attrgetter, mul
from typing import Any, NamedTuple

import attrs
import numpy as np
from numpy.typing import NDArray

from hypercomm.errors import LayoutError
from hypercomm.layout import RankLayout
from hypercomm.layout.layout import read_layout
from hypercomm.layout.parsing import UNSPECIFIED, check_one_unspecified, parse_sizes
from hypercomm.layout.text import aligned, format_range, pluralize, short_repr
from hypercomm.layout.views import Views, views_of
from hypercomm.tools.place import traffic as traffics
from hypercomm.tools.place.reading import On, read_topology
from hypercomm.tools.place.topology import Level, Topology
from hypercomm.tools.place.traffic import Dims, Traffic

COLUMNS = ("dims", "level", "across", "units per group", "bytes across")
"""The titles of `Spread.cells`."""


class Cost(NamedTuple):
    """The cost of an order of dims. Costs are compared by the first number, then by the next.

    Attributes:
        waited: The bytes that steps wait for, multiplied by the weight of each level that they
            cross.
        overlapped: The weighted bytes of the traffic that overlaps with computation.
        minor: The bytes that cross levels of weight 0, such as hosts within an NVLink domain.
    """

    waited: int = 0
    overlapped: int = 0
    minor: int = 0

    def __add__(self, other: Cost) -> Cost:  # type: ignore[override]
        return Cost(*(one + two for one, two in zip(self, other, strict=True)))


@attrs.frozen
class Spread:
    """Shows how the groups over some dims are spread over the units of one level.

    Attributes:
        dims: The dims, in the layout's order.
        level: The name of the level.
        groups: The number of groups.
        size: The number of ranks in each group.
        across: The number of groups with ranks in more than one unit.
        least: The smallest number of units over which a group is spread.
        most: The largest number of units over which a group is spread.
        bytes: The bytes that all groups send from unit to unit in a step, or None if no traffic is
            given.
        first: The first group with ranks in more than one unit, or () if there is no such group.
        view: The view that has the dims, or None for the layout itself.
    """

    dims: Dims
    level: str
    groups: int
    size: int
    across: int
    least: int
    most: int
    bytes: int | None = None
    first: tuple[int, ...] = ()
    view: str | None = None

    @property
    def label(self) -> str:
        """The dims as text, after the name of their view.

        Example:
            >>> Spread(("ep",), "host", 2, 16, 2, 2, 2, view="expert").label
            'expert:ep'
        """
        return ("" if self.view is None else f"{self.view}:") + "+".join(self.dims)

    @property
    def cells(self) -> tuple[str, ...]:
        """The spread as text: dims, level, groups in several units, units per group, bytes sent.

        Example:
            >>> Spread(("dp",), "domain", 16, 16, 12, 1, 2, 5000).cells
            ('dp', 'domain', '12 of 16', '1..2', '5 kB')
        """
        return (
            self.label,
            self.level,
            f"{self.across:,} of {self.groups:,}",
            format_range(self.least, self.most),
            "" if self.bytes is None else traffics.format_bytes(self.bytes),
        )


@attrs.frozen(slots=False, repr=False)
class Placed:
    """A layout on a machine, as `place` returns it. `str()` returns a table.

    Attributes:
        layout: The layout.
        topology: The machine. Rank r of the layout is rank r of the machine.
        traffic: The traffic of the groups, by dims.
        weights: The cost of a byte that crosses a level, by level.
        groups: Further sets of dims whose groups are reported.
        is_assumed: Whether no traffic was given. If so, the traffic is assumed, and no bytes are
            shown.
        views: The views of the layout. Their groups are reported, but the search for a better
            order leaves them out.

    Example:
        >>> from hypercomm import place
        >>> placed = place("tp=4,dp=16,pp=4", "host=4,domain=72", traffic="tp=40G,dp=6G,pp=0.1G")
        >>> [(one.dims, one.across, one.groups) for one in placed.on("domain")]
        [(('tp',), 0, 64), (('dp',), 12, 16), (('pp',), 64, 64)]
        >>> place("dp=4,tp=2", on=2).best.layout.dim_names
        ('tp', 'dp')
    """

    layout: RankLayout
    topology: Topology
    traffic: Mapping[Dims, Traffic]
    weights: Mapping[str, float]
    groups: Sequence[Dims]
    is_assumed: bool
    views: Views

    @cached_property
    def spreads(self) -> tuple[Spread, ...]:
        """The spreads of all reported groups over the units of each level."""
        every: list[tuple[str | None, Dims]] = [(None, dims) for dims in self._single_dims]
        every += [(view, (dim,)) for view, dims in self.dims_of_views.items() for dim in dims]
        every += [(self._view_with(dims), dims) for dims in (*self.traffic, *self.groups)]
        return tuple(
            self._spread(view, dims, level)
            for view, dims in dict.fromkeys(every)
            for level in self.topology.levels
        )

    def _view_with(self, dims: Dims) -> str | None:
        """Return the view to which dims without the name of a view refer."""
        return self.views.view_with(dims)[0]

    @property
    def _single_dims(self) -> list[Dims]:
        """The dims of the layout larger than 1, or the first dim if all have size 1."""
        names = self.layout.dim_names
        return [(dim,) for dim in names if self.layout.size_of(dim) > 1] or [names[:1]]

    @cached_property
    def dims_of_views(self) -> dict[str, list[str]]:
        """For each view, the dims with groups that no other dim has.

        Example:
            >>> from hypercomm import place, read_config
            >>> config = read_config("torchrun --nproc-per-node 8 pretrain_gpt.py "
            ...     "--tensor-model-parallel-size 2 --expert-model-parallel-size 2")
            >>> place(config.views["training"], on=4).dims_of_views
            {'expert': ['ep', 'expt_dp']}
        """
        seen = {self.layout.groups(*dims) for dims in self._single_dims}
        found: dict[str, list[str]] = {}
        for name, view in self.views.items():
            for dim, size in view.layout.sizes.items():
                groups = view.layout.groups(dim)
                if size > 1 and groups not in seen:
                    seen.add(groups)
                    found.setdefault(name, []).append(dim)
        return found

    def _spread(self, view: str | None, dims: Dims, level: Level) -> Spread:
        ranks = self.views.layout_of(view).groups(*dims).to_array()
        units = level.of_rank[ranks]
        counts = units_of_groups(units)
        leaving = ranks[counts > 1]
        has_traffic = not self.is_assumed and view == self._view_with(dims)
        sent = self.traffic.get(dims) if has_traffic else None
        return Spread(
            dims,
            level.name,
            groups=len(ranks),
            size=ranks.shape[1],
            across=len(leaving),
            least=int(np.min(counts)),
            most=int(np.max(counts)),
            bytes=None if sent is None else bytes_across(units, sent),
            first=tuple(leaving[0].tolist()) if len(leaving) else (),
            view=view,
        )

    @cached_property
    def cost(self) -> Cost:
        """The cost of the traffic over the layout's own dims, without the dims of views."""
        pairs = self._own_traffic.items()
        every = (self._cost_of(self.layout.groups(*dims).to_array(), sent) for dims, sent in pairs)
        return sum(every, Cost())

    @property
    def _own_traffic(self) -> dict[Dims, Traffic]:
        """The traffic over dims of the layout."""
        names = {*self.layout.dim_names}
        return {dims: one for dims, one in self.traffic.items() if {*dims} <= names}

    def _cost_of(self, groups: NDArray[np.int64], sent: Traffic) -> Cost:
        weighted = minor = 0
        for level in self.topology.levels:
            count = bytes_across(level.of_rank[groups], sent)
            weighted += round(self.weights[level.name] * count)
            minor += 0 if self.weights[level.name] else count
        return Cost(0, weighted, minor) if sent.overlapped else Cost(weighted, 0, minor)

    @cached_property
    def best(self) -> Placed:
        """The same dims in the best order, or this object if no order costs less."""
        layout = self.layout
        ranks = np.asarray(layout.ranks)
        order, least = best_order(
            layout.sizes, self._own_traffic, lambda groups, sent: self._cost_of(ranks[groups], sent)
        )
        if least >= self.cost:
            return self
        return self._with(layout.renumber([layout.size_of(dim) for dim in order], order))

    @cached_property
    def reordered(self) -> Placed | None:
        """The best order of dims on ranks that are sorted by switch, domain, host and GPU.

        The value is None if the ranks are sorted already, or if sorting them does not reduce the
        cost. Pass the `layout` of the result to a grid, or its `layout.ranks` to `RankLayout` as
        `ranks=`.

        Example:
            >>> from hypercomm import place
            >>> placed = place("tp=2,dp=2", on=["a", "b", "a", "b"])
            >>> placed.reordered.layout.ranks, placed.reordered.find("tp", "host").across
            ((0, 2, 1, 3), 0)
        """
        layout = self.layout
        ranks = self.topology.sort(layout.ranks)
        if np.array_equal(ranks, np.asarray(layout.ranks)):
            return None
        best = self._with(RankLayout(layout.shape, layout.dim_names, ranks=ranks)).best
        return best if best.cost < self.cost else None

    @property
    def proposal(self) -> Placed:
        """The cheaper of `reordered` and `best`, or this object if neither costs less."""
        found = [one for one in (self.reordered, self.best) if one is not None]
        return min(found, key=attrgetter("cost"))

    def _with(self, layout: RankLayout) -> Placed:
        """Return the report for the same dims in another order or on other ranks, without views."""
        names = {*layout.dim_names}
        return attrs.evolve(
            self,
            layout=layout,
            traffic={layout.order_dims(dims): one for dims, one in self._own_traffic.items()},
            groups=[layout.order_dims(dims) for dims in self.groups if {*dims} <= names],
            views=Views(layout),
        )

    def on(self, level: str) -> tuple[Spread, ...]:
        """Return how the groups are spread over one level.

        Raises:
            LayoutError: There is no such level.
        """
        self.topology.level(level)
        return tuple(spread for spread in self.spreads if spread.level == level)

    def find(self, dims: str | Iterable[str], level: str) -> Spread:
        """Return how the groups over some dims are spread over one level.

        Raises:
            LayoutError: There is no such level, or these groups are not in the report. Pass their
                dims to `place` as `groups=`.
        """
        wanted = self.views.order_dims(dims)
        found = [spread for spread in self.on(level) if spread.dims == wanted]
        if not found:
            raise LayoutError(f"{'+'.join(wanted)} is not in the report; add it with groups=")
        return found[0]

    def to_dict(self) -> dict[str, Any]:
        """Return the report as a dict of text, lists and numbers, for JSON."""
        traffic = {"+".join(dims): attrs.asdict(one) for dims, one in self.traffic.items()}
        return {
            "layout": str(self.layout),
            "ranks": self.layout.size,
            "levels": {level.name: level.units for level in self.topology.levels},
            "traffic": None if self.is_assumed else traffic,
            "groups": [attrs.asdict(one) for one in self.spreads],
            "cost": self.cost._asdict(),
            "warnings": self.warnings,
        }

    @property
    def headline(self) -> str:
        """The layout and its machine in one sentence."""
        used = self.topology.select(self.layout.ranks)
        units = ", ".join(pluralize(level.units, level.name) for level in used.levels)
        return f"{self.layout}: {pluralize(self.layout.size, 'rank')} on {units}"

    @property
    def notes(self) -> list[str]:
        """Sentences that explain the table, and assumptions that were made."""
        order = "the first dim varies fastest"
        if self.is_assumed:
            notes = [f"no traffic is given: tp matters most, then cp and ep, pp, and dp; {order}"]
        else:
            hidden = ["+".join(dims) for dims, one in self.traffic.items() if one.overlapped]
            waits = f"no step waits for {', '.join(hidden)}; " if hidden else ""
            notes = [f"bytes across: the sum over all groups in a step; {waits}{order}"]
        if self.topology.note:
            notes.append(self.topology.note)
        dims_left_out = {view: [*dims] for view, dims in self.dims_of_views.items()}
        for dims in [one for one in self.traffic if one not in self._own_traffic]:
            dims_left_out.setdefault(str(self._view_with(dims)), []).extend(dims)
        left_out = [
            f"{view} ({', '.join(dict.fromkeys(dims))})" for view, dims in dims_left_out.items()
        ]
        if self.best is self:
            own = f"the dims {', '.join(self.layout.dim_names)}" if left_out else "the dims"
            notes.append(f"no order of {own} is better on this machine")
        if left_out:
            notes.append(f"the search for a better order leaves out {' and '.join(left_out)}")
        return notes

    @property
    def warnings(self) -> list[str]:
        """A sentence for each set of tp or ep groups that extend over several NVLink domains.

        On a machine without NVLink domains, the sentences count groups that leave their host.
        """
        level = "domain" if "domain" in self.topology.names else "host"
        found = []
        for spread in self.spreads:
            kinds = {traffics.kind_of(dim) for dim in spread.dims}
            # Groups that span dp exchange gradients. They are expected to leave a domain.
            is_tight = kinds & {"tp", "ep"} and "dp" not in kinds
            if spread.level == level and spread.across and is_tight:
                first = ", ".join(map(str, spread.first[:8]))
                if spread.size > 8:
                    first += ", ..."
                largest = int(np.max(self.topology.level(level).sizes))
                why = ""
                if spread.size > largest:
                    why = f"; a {level} has {pluralize(largest, 'GPU')}"
                found.append(
                    f"{spread.across:,} of {spread.groups:,} {spread.label} groups leave "
                    f"their {level}, the first is ({first}){why}"
                )
        return found

    def advice_for(self, other: Placed) -> str:
        """Return a sentence about a cheaper order of dims or ranks: the order and its saving.

        Args:
            other: `best`, `reordered` or `proposal`, if it costs less than this object.

        Example:
            >>> from hypercomm import place
            >>> placed = place("dp=4,tp=2", on=2, traffic="tp=3G,dp=1G")
            >>> placed.advice_for(placed.best)
            'order: tp-dp in place of dp-tp; steps wait for 71 % fewer bytes across units'
            >>> placed = place("tp=2,dp=2", on=["a", "b", "a", "b"])
            >>> placed.advice_for(placed.reordered)
            'ranks: sorted by host, ranks=[0, 2, 1, 3]; groups with more traffic stay inside'
        """
        saving = "groups with more traffic stay inside"
        if not self.is_assumed:
            costs = zip(self.cost, other.cost, _SAVINGS, strict=True)
            before, after, saving = next(one for one in costs if one[0] != one[1])
            share = 100 * (before - after) / before
            saving = saving.format(f"{share:.0f} %" if 1 <= share < 99 else f"{share:.3g} %")
        parts = []
        if other is self.reordered:
            ranks = other.layout.ranks
            more = ", ..." if len(ranks) > _MOST_RANKS else ""
            listed = f"ranks=[{', '.join(map(str, ranks[:_MOST_RANKS]))}{more}]"
            levels = " and ".join(reversed(self.topology.names))
            parts.append(f"ranks: sorted by {levels}, {listed}")
        if other.layout.dim_names != self.layout.dim_names:
            orders = ["-".join(one.layout.dim_names) for one in (other, self)]
            parts.append(f"order: {' in place of '.join(orders)}")
        return "; ".join([*parts, saving])

    @property
    def changes(self) -> list[tuple[str, ...]]:
        """The rows of the table that the advice changes, with cells such as "before -> after"."""
        before = {(frozenset(one.dims), one.level): one.cells for one in self.spreads}
        rows = []
        for spread in self.proposal.spreads:
            cells = spread.cells
            was = before[frozenset(spread.dims), spread.level]
            if was[2:] != cells[2:]:
                pairs = zip(was[2:], cells[2:], strict=True)
                moved = [one if one == two else f"{one} -> {two}" for one, two in pairs]
                rows.append((*cells[:2], *moved)[: len(self.columns)])
        return rows

    @property
    def columns(self) -> tuple[str, ...]:
        """The titles of the columns, without bytes if no traffic was given."""
        return COLUMNS[:4] if self.is_assumed else COLUMNS

    def __str__(self) -> str:
        rows = [self.columns, *(spread.cells[: len(self.columns)] for spread in self.spreads)]
        lines = [self.headline, *aligned(rows), *self.notes]
        lines += [f"warning: {warning}" for warning in self.warnings]
        if self.proposal is not self:
            lines.append(self.advice_for(self.proposal))
            lines += [f"  {line}" for line in aligned(self.changes)]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"<Placed: {self.headline}>"


_MOST_RANKS = 64
"""The most ranks that the advice lists. `reordered` and JSON contain all ranks."""

_SAVINGS = (
    "steps wait for {} fewer bytes across units",
    "{} less crosses units during computation",
    "{} less crosses hosts within domains",
)
"""The sentence about the saving, for each of the three numbers of a `Cost`."""


def place(
    layout: Any,
    on: On,
    *,
    traffic: str | Mapping[str, float | Traffic] | None = None,
    overlapped: str | Iterable[str] = (),
    weights: str | Mapping[str, float] = "",
    groups: str | Iterable[str] = (),
) -> Placed:
    """Return which groups of a layout cross hosts, domains and switches, and the best order.

    Up to 8 dims may be larger than 1. No other order of the dims costs less than the best order.
    Orders are compared by the traffic that steps wait for, then by the traffic that overlaps with
    computation.

    Args:
        layout: A layout, an object with a `layout` such as a grid, the views of a module in
            `LaunchConfig.views`, or sizes, such as "tp=8,pp=16,dp=128". The first dim varies
            fastest. One size may be omitted if the machine names its hosts. The groups of views
            are reported, but the search for the best order leaves them out.
        on: The machine, in any form that `read_topology` accepts.
        traffic: The bytes that each rank sends in a step over each dim, such as "tp=40G,dp=6.5G",
            or a mapping from dims to bytes. Default: assumed traffic, most over tp, then over cp
            and ep, then over pp, and least over dp.
        overlapped: Dims whose traffic overlaps with computation, such as "dp", or a list.
        weights: The cost of a byte that crosses a level, such as "domain=1,leaf=7", or a mapping
            from levels to costs. Default: 1, but 0 for hosts if they are in NVLink domains.
        groups: More groups to report, such as "tp+dp", or a list.

    Returns:
        The report. `print` shows it as a table.

    Raises:
        LayoutError: An argument or the machine cannot be read, a dim or level is unknown, or the
            machine has fewer GPUs than the layout has ranks.
        WorldSizeError: The omitted size does not fit the machine.

    Example:
        >>> from hypercomm import place
        >>> print(place("pp=4,tp=2,cp=2", on="host=4", traffic="tp=9M,pp=1M,cp=3M"))
        pp=4,tp=2,cp=2: 16 ranks on 4 hosts
        dims  level  across  units per group  bytes across
        pp    host   0 of 4                1  0
        tp    host   8 of 8                2  144 MB
        cp    host   8 of 8                2  48 MB
        bytes across: the sum over all groups in a step; the first dim varies fastest
        warning: 8 of 8 tp groups leave their host, the first is (0, 4)
        order: tp-cp-pp in place of pp-tp-cp; steps wait for 94 % fewer bytes across units
          tp  host  8 of 8 -> 0 of 8  2 -> 1  144 MB -> 0
          cp  host  8 of 8 -> 0 of 8  2 -> 1  48 MB -> 0
          pp  host  0 of 4 -> 4 of 4  1 -> 4  0 -> 12 MB
    """
    views = views_of(layout, layout_on(layout, on))
    layout = views.base
    topology = read_topology(on, layout.last_rank + 1)
    if overlapped and traffic is None:
        raise LayoutError("overlapped= (--overlap) needs traffic= (--traffic)")
    sent = traffics.usual_traffic(layout)
    if traffic is not None:
        sent = traffics.read_traffic(traffic, views, overlapped)
    more = traffics.read_dims(groups, views)
    costs = _weights(weights, topology)
    return Placed(layout, topology, sent, costs, more, traffic is None, views)


def layout_on(layout: Any, on: On) -> RankLayout:
    """Return the layout that is given to `place`.

    An unspecified size is inferred from the number of GPUs of the machine.

    Example:
        >>> str(layout_on("tp=2,dp", ["node[1-2]", 4]))
        'tp=2,dp=4'
    """
    if isinstance(layout, Views):
        return layout.base
    sizes = parse_sizes(layout) if isinstance(layout, str) else {}
    gpus = None
    if check_one_unspecified([name for name, size in sizes.items() if size == UNSPECIFIED]):
        gpus = read_topology(on).world_size
    return read_layout(layout, world_size=gpus)


def _weights(given: str | Mapping[str, float], topology: Topology) -> dict[str, float]:
    """Return the cost of a byte that crosses each level, the innermost level first."""
    names = topology.names
    weights: dict[str, float] = dict.fromkeys(names, 1)
    if {"host", "domain"} <= {*names}:
        weights["host"] = 0
    for name, weight in traffics.read_amounts(given, "weights", "domain=1,leaf=7").items():
        if name not in names or not 0 <= weight < 10**9:
            text = f"weights= (--weights) sets {short_repr(name)}={weight}"
            known = " and ".join(names)
            raise LayoutError(
                f"{text}; this machine has {known}, and a weight is a number from 0 to 10**9"
            )
        weights[name] = weight
    return weights


# ---- the cost of groups -------------------------------------------------------------------------


def bytes_across(units: NDArray[np.int64], traffic: Traffic) -> int:
    """Return the bytes that groups send from unit to unit in a step.

    NCCL builds a ring that visits each unit once, so a ring over k units has k links between units.
    In a chain, each pair of neighbours in different units has one such link. In an all-to-all, each
    rank sends the same amount to every other rank.

    Args:
        units: The unit of each rank of each group, of shape (groups, size).
        traffic: The traffic of each rank.

    Example:
        >>> units = np.array([[0, 1, 0, 1]])
        >>> patterns = ("ring", "chain", "all-to-all")
        >>> [bytes_across(units, Traffic(30, pattern)) for pattern in patterns]
        [60, 90, 80]
    """
    groups, size = units.shape
    if size == 1 or not traffic.bytes:
        return 0
    if traffic.pattern == "chain":
        return traffic.bytes * int(np.count_nonzero(np.diff(units, axis=1)))
    if traffic.pattern == "ring":
        counts = units_of_groups(units)
        return traffic.bytes * int(counts[counts > 1].sum())
    group = np.arange(groups)[:, None] * (np.max(units) + 1)
    members = np.unique(group + units, return_counts=True)[1]
    pairs = units.size * size - int((members**2).sum())
    return int(traffic.bytes * pairs // (size - 1))


def units_of_groups(units: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the number of units over which each group is spread, given the unit of each rank.

    Example:
        >>> units_of_groups(np.array([[0, 0, 1], [2, 3, 2]])).tolist()
        [2, 2]
    """
    steps = np.diff(units, axis=1)
    if (steps < 0).any():
        steps = np.diff(np.sort(units, axis=1), axis=1)
    return np.asarray(1 + np.count_nonzero(steps, axis=1))


# ---- the best order -----------------------------------------------------------------------------

Axes = tuple[tuple[int, int], ...]
"""The size and the stride of each dim that groups span."""

CostOf = Callable[[NDArray[np.int64], Traffic], Cost]
"""A function that returns the cost of traffic over groups.

The groups are an array of ranks of shape (groups, size).
"""


def best_order(
    sizes: Mapping[str, int], traffic: Mapping[Dims, Traffic], cost_of: CostOf
) -> tuple[Dims, Cost]:
    """Return the order of dims that costs least. Of orders with equal cost, the first one wins.

    This is a branch-and-bound search. An order is built dim by dim, and dropped when it costs as
    much as the best order so far. The groups over some dims are known once the order contains all
    these dims.

    Args:
        sizes: The size of each dim. The order of this mapping decides between equal costs.
        traffic: The traffic, by dims.
        cost_of: A function that returns the cost of groups.

    Returns:
        The order and its cost. The first dim varies fastest; dims of size 1 are last.
    """
    names = [dim for dim in sizes if sizes[dim] > 1]
    if len(names) > 8:  # 8 dims have 40,320 orders
        raise LayoutError(f"the best order is found for up to 8 dims larger than 1, got {names}")
    sent = [({*dims} & {*names}, one) for dims, one in traffic.items()]
    best: tuple[Cost, Dims] | None = None

    @cache
    def cost_at(axes: Axes, one: Traffic) -> Cost:
        return cost_of(groups_at(math.prod(sizes.values()), axes), one)

    def extend(order: Dims, cost: Cost) -> None:
        """Search all orders that begin with `order`."""
        nonlocal best
        if best is not None and cost >= best[0]:
            return
        if len(order) == len(names):
            best = cost, order
        for dim in names:
            if dim not in order:
                completed = _completed((*order, dim), sizes, sent)
                added = sum((cost_at(axes, one) for axes, one in completed), Cost())
                extend((*order, dim), cost + added)

    extend((), Cost())
    least, order = best or (Cost(), ())
    return (*order, *(dim for dim in sizes if dim not in order)), least


def _completed(
    order: Dims, sizes: Mapping[str, int], sent: Iterable[tuple[set[str], Traffic]]
) -> Iterator[tuple[Axes, Traffic]]:
    """Yield the axes and the traffic of the groups that are known since the last dim of `order`."""
    strides = list(itertools.accumulate((sizes[dim] for dim in order[:-1]), mul, initial=1))
    for dims, one in sent:
        if order[-1] in dims and dims <= {*order}:
            pairs = zip(order, strides, strict=True)
            yield tuple((sizes[dim], stride) for dim, stride in pairs if dim in dims), one


def groups_at(world_size: int, axes: Axes) -> NDArray[np.int64]:
    """Return the groups over dims of given sizes and strides, of shape (groups, size).

    Example:
        >>> groups_at(8, [(2, 2)]).tolist()
        [[0, 2], [1, 3], [4, 6], [5, 7]]
    """
    ranks = np.arange(world_size)
    is_first = np.ones(world_size, dtype=bool)
    offsets = np.zeros(1, dtype=np.int64)
    for size, stride in axes:
        is_first &= ranks // stride % size == 0
        offsets = (np.arange(size)[:, None] * stride + offsets).reshape(-1)
    return ranks[is_first][:, None] + offsets
