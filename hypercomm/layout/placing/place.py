"""`place`: how a layout lies on a machine, and what would be better."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import attrs

from hypercomm.errors import LayoutError, TopologyError, WorldSizeError
from hypercomm.layout import RankLayout
from hypercomm.layout.checks import LARGEST_WORLD, as_flag
from hypercomm.layout.parsing import OPEN, Dims, close_sizes, parse_sizes
from hypercomm.layout.placing.cards import Card
from hypercomm.layout.placing.looking import look
from hypercomm.layout.placing.placed import Placed
from hypercomm.layout.placing.proposals import propose
from hypercomm.layout.placing.search import weights_of
from hypercomm.layout.placing.traffic import (
    Given,
    as_items,
    as_number,
    read_traffic,
    usual_traffic,
)
from hypercomm.layout.text import counted, did_you_mean, shown
from hypercomm.topology import Topology
from hypercomm.topology.names import ARGUMENTS, Names
from hypercomm.topology.reading import On, read_machine, read_named


def place(
    sizes: str | RankLayout | Mapping[str, int],
    on: On,
    *,
    traffic: Given | None = None,
    model: Card | Mapping[str, object] | None = None,
    overlapped: str | Iterable[Dims] = (),
    weights: Mapping[str, float] | None = None,
    gpus_per_host: int | None = None,
    groups: str | Iterable[Dims] = (),
    proposals: bool = True,
) -> Placed:
    """Say how the groups of a layout lie on a machine, and in which order they would lie better.

    Exact: the order of dims that is proposed costs least of all orders, of up to 8 dims. What
    steps wait for counts first, then what goes on beside the computation.

    Args:
        sizes: As in "tp=8,pp=16,dp=128", the first dim varying fastest, or a layout. One size may
            be open (-1) where the machine names its hosts.
        on: What says where the ranks are, as for `hypercomm.topology.read_topology`: GPUs for each
            host and domain ("4,72"), a hostfile, SLURM's files, labels, or several of these.
        traffic: The bytes that each rank sends in a step over each dim, "tp=40G,dp=6.5G", or by
            dims.
        model: What is known of the model, in place of the traffic, which follows from it.
        overlapped: Dims of `traffic` that go on beside the computation.
        weights: What a byte costs that crosses a level; default: 1, and 0 for hosts within an
            NVLink domain.
        gpus_per_host: The GPUs of hosts of which `on` does not tell.
        groups: More groups to look at, as in ["tp+dp"].
        proposals: Whether to look for what would be better.

    Returns:
        The report; `print` shows it.

    Raises:
        LayoutError: An argument makes no sense; says what would.
        WorldSizeError: The machine has fewer GPUs than the layout has ranks.
        TopologyError: The machine cannot be read; names file and line.

    Example:
        >>> print(place("pp=4,tp=2,cp=2", on="host=4", traffic="tp=9M,pp=1M,cp=3M"))
        pp=4,tp=2,cp=2: 16 ranks on 4 hosts
        dims  level  across  units of each  bytes across
        pp    host   0 of 4  1              0
        tp    host   8 of 8  2              144 MB
        cp    host   8 of 8  2              48 MB
        bytes across: of all groups in a step; the first dim varies fastest
        warning: 8 of 8 tp groups leave their host, the first is (0, 4)
        order: tp-cp-pp in place of pp-tp-cp; steps wait for 94 % less across units
          tp  host  8 of 8 -> 0 of 8  2 -> 1  144 MB -> 0
          cp  host  8 of 8 -> 0 of 8  2 -> 1  48 MB -> 0
          pp  host  0 of 4 -> 4 of 4  1 -> 4  0 -> 12 MB
    """
    return place_named(
        *(sizes, on, ARGUMENTS),
        traffic=traffic,
        model=model,
        overlapped=overlapped,
        weights=weights,
        gpus_per_host=gpus_per_host,
        groups=groups,
        proposals=proposals,
    )


def place_named(
    sizes: str | RankLayout | Mapping[str, int],
    on: On,
    names: Names,
    *,
    traffic: Given | None = None,
    model: Card | Mapping[str, object] | None = None,
    overlapped: str | Iterable[Dims] = (),
    weights: Mapping[str, float] | None = None,
    gpus_per_host: int | None = None,
    groups: str | Iterable[Dims] = (),
    proposals: bool = True,
) -> Placed:
    """Do what `place` does, where errors call its arguments by other names."""
    proposals = as_flag(proposals, "proposals")
    layout, machine = _read_both(sizes, on, gpus_per_host, names)
    if layout.size > LARGEST_WORLD:
        raise LayoutError(f"{layout} has {layout.size:,} ranks; up to {LARGEST_WORLD:,} are placed")
    topology = machine(layout.last_rank + 1)
    if topology.world_size <= layout.last_rank:
        raise WorldSizeError(_too_few(layout, topology.world_size))
    if traffic is not None and model is not None:
        raise LayoutError(
            f"give {names['traffic']} or {names['model']}, not both: the traffic follows from the "
            f"model"
        )
    if model is not None:
        card = model if isinstance(model, Card) else Card.read(model)
        sent = card.traffic(layout)
    elif traffic is not None:
        sent = read_traffic(traffic, layout, overlapped, names)
    else:
        sent = usual_traffic(layout)
    if traffic is None and overlapped:
        raise LayoutError(
            f"{names['overlapped']} says of traffic what goes on beside it: give "
            f"{names['traffic']}, too"
        )
    placed = look(
        layout,
        topology,
        sent,
        weights_of(topology, _read_weights(weights, topology, names["weights"])),
        is_assumed=traffic is None and model is None,
        groups=[layout.order_dims(dims) for dims in as_items(groups, "groups")],
    )
    return attrs.evolve(placed, proposals=propose(placed, machine)) if proposals else placed


def _read_both(
    sizes: object, on: On, gpus_per_host: int | None, names: Names
) -> tuple[RankLayout, Callable[[int], Topology]]:
    """Read the layout and the machine, either of which may follow from the other."""
    if isinstance(sizes, RankLayout):
        return sizes, read_machine(on, sizes.last_rank + 1, gpus_per_host, names)
    if not isinstance(sizes, (str, Mapping)):
        raise LayoutError(f"sizes must be like 'tp=4,dp=16', or a layout, got {shown(sizes)}")
    named = parse_sizes(sizes) if isinstance(sizes, str) else dict(sizes)
    if OPEN in named.values():
        gpus = _count(on, gpus_per_host, names)
        named = close_sizes(named, gpus, f"the machine has {gpus} GPUs")
    else:
        named = close_sizes(named, None)
    layout = RankLayout([*named.values()], [*named])
    return layout, read_machine(on, layout.size, gpus_per_host, names)


def _count(on: On, gpus_per_host: int | None, names: Names) -> int:
    """The GPUs of a machine that names its hosts."""
    try:
        return read_named(on, None, gpus_per_host, names).world_size
    except TopologyError as error:
        said = str(error).removesuffix(": give world_size")
        raise type(error)(
            f"a size is open, which follows from the GPUs, but {said}; give the size"
        ) from error


def _too_few(layout: RankLayout, gpus: int) -> str:
    """Say that a machine has too few GPUs, and which sizes it would serve."""
    near = []
    is_dense = layout.size == layout.last_rank + 1
    for dim in layout.dim_names if is_dense else ():
        others = layout.size // layout.size_of(dim)
        if 1 <= gpus // others < layout.size_of(dim):
            near.append((gpus // others * others, f"{dim}={gpus // others}"))
    near.sort(key=lambda one: -one[0])
    fits = " or ".join(f"{size} ({counted(ranks, 'rank')})" for ranks, size in near)
    more = counted(layout.last_rank + 1 - gpus, "more GPU")
    return f"{layout} needs {layout.last_rank + 1:,} GPUs, but the machine has {gpus:,}; " + (
        f"{fits} would fit, and so would all with {more}" if near else f"{more} would do"
    )


def _read_weights(weights: object, topology: Topology, what: str) -> Mapping[str, float]:
    if weights is None:
        return {}
    if not isinstance(weights, Mapping):
        raise LayoutError(f"{what} must give numbers by level, got {shown(weights)}")
    found: dict[str, float] = {}
    for name, weight in weights.items():
        if name not in topology.names:
            raise LayoutError(
                f"{what} names no level of this machine with {shown(name)}; it has "
                f"{list(topology.names)}{did_you_mean(name, topology.names)}"
            )
        number = as_number(weight)
        if number is None or not 0 <= number < 10**9:
            raise LayoutError(
                f"the weight of {name!r} must be 0 or more, and less than 10**9, got "
                f"{shown(weight)}"
            )
        found[name] = number
    return found
