"""Compare layouts on machines with plain Python and with published values."""

import itertools
import math
import random
import time
from types import SimpleNamespace

import numpy as np
import pytest
from drawn_layouts import groups_of

from hypercomm import RankLayout, place, read_topology
from hypercomm.layout.views import Views
from hypercomm.tools.place import Level, Topology, Traffic

pytestmark = pytest.mark.torch_free

PODS = "host=8,leaf=16,spine=3072"
"""Llama 3, https://arxiv.org/abs/2407.21783, 3.3.1: racks of two hosts, pods of 3,072 GPUs."""


# ---- expected values: nothing in this section uses hypercomm ------------------------------------


def groups_by_hand(order, sizes, dims):
    """List the groups over some dims. The first dim of the order varies fastest."""
    shape = [sizes[dim] for dim in order]
    table = np.arange(math.prod(shape)).reshape(shape, order="F")
    return groups_of(table, [order.index(dim) for dim in dims])


def sent_by_hand(group, unit_of, bytes_, pattern):
    """Return the bytes that one group sends from unit to unit."""
    units = [unit_of[rank] for rank in group]
    if pattern == "chain":
        return sum(bytes_ for one, two in itertools.pairwise(units) if one != two)
    if pattern == "ring":
        return bytes_ * len(set(units)) if len(set(units)) > 1 else 0
    pairs = sum(one != two for one in units for two in units)
    return bytes_ * pairs // (len(group) - 1) if pairs else 0


def cost_by_hand(order, sizes, traffic, levels, weights):
    """Return the weighted bytes that steps wait for, those of other traffic, and the rest."""
    cost = [0, 0, 0]
    for dims, (*sent, overlapped) in traffic.items():
        for unit_of, weight in zip(levels, weights, strict=True):
            count = sum(
                sent_by_hand(group, unit_of, *sent) for group in groups_by_hand(order, sizes, dims)
            )
            cost[overlapped] += weight * count
            cost[2] += 0 if weight else count
    return tuple(cost)


def shapes(ranks):
    """Yield all ordered lists of factors larger than 1 whose product is `ranks`."""
    yield (ranks,)
    for first in range(2, ranks):
        if ranks % first == 0:
            yield from ((first, *rest) for rest in shapes(ranks // first))


def check_against_hand(sizes, seed):
    """Compare the best order with all orders, on a random machine with random traffic.

    The layout may have a dim of size 1, and may list its ranks in any order.
    """
    random.seed(seed)
    if random.random() < 0.3:
        sizes = dict(random.sample([*sizes.items(), ("one", 1)], len(sizes) + 1))
    count = math.prod(sizes.values())
    ranks = list(range(count))
    if random.random() < 0.3:
        random.shuffle(ranks)
    host = random.choice([2, 3, 4, 8])
    hosts = [rank // host for rank in range(count)]
    domains = [rank // 12 for rank in range(count)]
    if random.random() < 0.5:  # the order of hosts is random
        random.shuffle(hosts)
        domains = [unit % 2 for unit in hosts]
    machine = Topology([Level.of("inner", hosts), Level.of("outer", domains)])
    weights = random.choice([[1, 1], [1, 1], [0, 1], [1, 0], [1, 3]])
    wanted = [(dim,) for dim in sizes]
    if len(sizes) > 1:
        wanted.append(tuple(sorted(random.sample(sorted(sizes), 2))))
    # In an all-to-all, bytes are divided by size - 1. With this scale, no result is rounded.
    scale = math.lcm(*(max(1, math.prod(sizes[dim] for dim in dims) - 1) for dims in wanted))
    traffic = {
        dims: (
            random.randrange(1, 99) * scale,
            random.choice(["ring", "chain", "ring", "all-to-all"]),
            random.random() < 0.3,
        )
        for dims in wanted
    }

    def costs(listed):
        """Return the cost of each order of the dims, for a list of ranks."""
        levels = [[unit_of[rank] for rank in listed] for unit_of in (hosts, domains)]
        orders = itertools.permutations(sizes)
        return {one: cost_by_hand(one, sizes, traffic, levels, weights) for one in orders}

    every = costs(ranks)
    found = place(
        RankLayout([*sizes.values()], [*sizes], ranks=ranks),
        machine,
        traffic={"+".join(dims): Traffic(*sent) for dims, sent in traffic.items()},
        weights={"inner": weights[0], "outer": weights[1]},
    )
    assert found.best.cost == min(every.values())
    assert (found.best is found) == (every[tuple(sizes)] == min(every.values()))
    firsts = [[units.index(unit) for unit in units] for units in (domains, hosts)]
    ordered = sorted(ranks, key=lambda rank: [*(first[rank] for first in firsts), rank])
    moved = min(costs(ordered).values())
    is_better = ranks != ordered and moved < every[tuple(sizes)]
    assert (found.reordered is not None) == is_better
    if is_better:
        assert found.reordered.cost == moved
        assert list(found.reordered.layout.ranks) == ordered
    assert found.proposal.cost == min([moved] * is_better + [*every.values()])
    for placed in (found, found.best):
        order = placed.layout.dim_names
        assert list(placed.layout.ranks) == ranks
        assert placed.cost == every[order]
        for dims, (*way, _) in traffic.items():
            groups = groups_by_hand(order, sizes, dims)
            for level, unit_of in zip(machine.names, (hosts, domains), strict=True):
                listed = [unit_of[rank] for rank in ranks]
                counts = [len({listed[at] for at in group}) for group in groups]
                spread = placed.find("+".join(dims), level)
                assert (spread.groups, spread.size) == (len(groups), len(groups[0]))
                assert spread.across == sum(count > 1 for count in counts)
                assert (spread.least, spread.most) == (min(counts), max(counts))
                assert spread.bytes == sum(sent_by_hand(one, listed, *way) for one in groups)


def cases(most):
    for ranks in range(2, most + 1):
        for number, shape in enumerate(shapes(ranks)):
            yield dict(zip("abcdef", shape, strict=False)), 1000 * ranks + number


# The order that is found costs as little as the best of all orders, which plain Python computes.
# The default run tries a sample of the cases, and the slow run tries all cases.
@pytest.mark.parametrize(
    "part", [0, 5, *(pytest.param(at, marks=pytest.mark.slow) for at in range(20))]
)
def test_best_order_is_the_cheapest_of_all(part):
    for sizes, seed in list(cases(36))[part::20]:
        check_against_hand(sizes, seed)


# ---- the order of ranks -------------------------------------------------------------------------


# Ray's actors alternate between hosts. The proposal lists the ranks host by host and in the order
# of their GPUs, so that each tp group is within a host.
def test_alternating_hosts_get_a_list_of_ranks():
    on = [("b", 0), ("a", 1), ("b", 1), ("a", 0), ("b", 3), ("a", 2), ("b", 2), ("a", 3)]
    placed = place("tp=4,dp=2", on=on, traffic="tp=9G,dp=1G")
    assert placed.find("tp", "host").across == 2
    better = placed.reordered
    assert better is placed.proposal
    assert list(better.layout.ranks) == [0, 2, 6, 4, 3, 1, 5, 7]
    assert list(better.layout.groups("tp")) == [(0, 2, 6, 4), (3, 1, 5, 7)]
    assert better.find("tp", "host").across == 0
    # before: 2 rings of 4 ranks in 2 units, 4 * 9 GB; after: 4 pairs in 2 units, 8 * 1 GB
    assert (placed.cost.waited, better.cost.waited) == (36e9, 8e9)
    assert placed.advice_for(better).startswith(
        "ranks: sorted by host, ranks=[0, 2, 6, 4, 3, 1, 5, 7]; steps"
    )
    assert "78 % fewer bytes" in placed.advice_for(better)
    again = place(better.layout, on=on, traffic="tp=9G,dp=1G")
    assert again.proposal is again


# If the ranks of each host are consecutive, no list of ranks is proposed.
@pytest.mark.parametrize("on", [2, ["x", "x", "b", "b", "a", "a", "c", "c"]])
def test_consecutive_hosts_get_no_list_of_ranks(on):
    placed = place("dp=4,tp=2", on=on)
    assert placed.reordered is None
    assert placed.proposal is placed.best
    assert placed.best.layout.dim_names == ("tp", "dp")


# ---- published values ---------------------------------------------------------------------------


def across(placed, level):
    """Map each dim to the number of groups in more than one unit, and the number of all groups."""
    return {spread.dims[0]: (spread.across, spread.groups) for spread in placed.on(level)}


# TP=4, DP=16, PP=4 on NVL72, whose domains have 18 hosts of 4 GPUs. dp and pp groups span several
# domains, and tp groups do not. With 64 GPUs per domain, only pp groups span several domains. This
# follows from arithmetic: a tp group is 4k..4k+3, and 4 divides 72. A dp group spans a block of 64
# ranks. Of the four blocks, only 0..63 is within one domain, so the four dp groups of this block
# are. A pp group spans all 256 ranks.
def test_nvl72_domains():
    traffic = {"tp": 40e9, "dp": 6e9, "pp": 1e8}
    placed = place("tp=4,dp=16,pp=4", on="host=4,domain=72", traffic=traffic)
    assert across(placed, "domain") == {"tp": (0, 64), "dp": (12, 16), "pp": (64, 64)}
    spare = place("tp=4,dp=16,pp=4", on="host=4,domain=64", traffic=traffic)
    assert across(spare, "domain") == {"tp": (0, 64), "dp": (0, 16), "pp": (64, 64)}
    used = read_topology("host=4,domain=72", 288).select(
        [gpu for gpu in range(288) if gpu % 72 < 64]
    )
    assert across(place("tp=4,dp=16,pp=4", on=used), "domain") == across(spare, "domain")


# The order of Llama 3 on 16,384 GPUs is found from any order of the dims. Section 3.3.2 of
# https://arxiv.org/abs/2407.21783: "[TP, CP, PP, DP] is optimized for network communication".
@pytest.mark.parametrize(
    ("sizes", "traffic", "overlapped"),
    [
        ({"tp": 8, "pp": 16, "dp": 128}, "tp=461G,pp=1G,dp=19G", "dp"),
        ({"tp": 8, "cp": 16, "pp": 16, "dp": 8}, "tp=461G,cp=23G,pp=1G,dp=17G", "dp"),
    ],
)
def test_llama_3_order_is_found(sizes, traffic, overlapped):
    for order in [tuple(sizes), tuple(sizes)[::-1], ("dp", "tp", *tuple(sizes)[1:-1])]:
        layout = RankLayout([sizes[dim] for dim in order], order)
        placed = place(layout, on=PODS, traffic=traffic, overlapped=overlapped)
        assert placed.best.layout.dim_names == tuple(sizes), order
        assert (placed.best is placed) == (order == tuple(sizes))
        assert "no step waits for dp" in str(placed)


# An omitted size is inferred from the named hosts. place() accepts text, a layout, or a placement.
def test_accepted_forms_of_a_layout():
    assert str(place("tp=2,dp", on=[{"a": "s", "b": "s"}, 4]).layout) == "tp=2,dp=4"
    placed = place(RankLayout("tp=2,dp=2"), on=2)
    assert place("tp=2,dp=2", on=2).layout == place(placed, on=2).layout == placed.layout
    assert placed.best is placed


# The groups that only a view has are reported, with their traffic. They do not change the best
# order.
def test_groups_of_views():
    views = Views(RankLayout("dp=4,tp=2"))
    views.register("expert", "ep=4,tp=2", shared_dims=["tp"])
    placed = place(views, on=2, traffic="tp=3G,dp=1G,ep=9G", groups="ep+tp")
    assert placed.dims_of_views == {}  # ep has the groups of dp
    views = Views(RankLayout("dp=4,tp=2"))
    views.register("expert", "rest=2,ep=4")
    placed = place(views, on=2, traffic="tp=3G,dp=1G,ep=9G", groups="ep+rest")
    assert placed.dims_of_views == {"expert": ["rest", "ep"]}
    found = placed.find("ep", "host")
    assert (found.view, found.groups, found.across, found.most) == ("expert", 2, 2, 4)
    assert found.bytes == 2 * 4 * 9_000_000_000  # each rank sends all parts to other hosts
    assert placed.find("rest+ep", "host").size == 8
    assert "the search for a better order leaves out expert (rest, ep)" in placed.notes
    alone = place("dp=4,tp=2", on=2, traffic="tp=3G,dp=1G")
    assert placed.best.layout == alone.best.layout
    assert placed.cost == alone.cost
    grid = SimpleNamespace(layout=views.base, views={"expert": views["expert"].layout})
    for other in (grid, placed):
        assert place(other, on=2).dims_of_views == placed.dims_of_views


# If tp or ep groups span several domains, a warning counts these groups and names the first.
def test_groups_across_domains_give_a_warning():
    tp, ep = place("dp=8,tp=2,ep=4", on="host=4,domain=8").warnings
    assert "32 of 32 tp groups leave their domain, the first is (0, 8)" in tp
    assert "16 of 16 ep groups" in ep
    assert "a host has 8 GPUs" in place("tp=16", on="8").warnings[0]
    assert place("ep=4,dp=4", on=4, groups="ep+dp").warnings == place("dp=8", on=8).warnings == []


# Units of traffic are decimal. Bytes within a domain have no weight, unless one is given.
def test_traffic_and_weights_as_text():
    placed = place("tp=2,dp=2,pp=2", on="2,4", traffic="tp=40,dp=6.5k,pp=2e3B")
    assert [one.bytes for one in placed.traffic.values()] == [40, 6500, 2000]
    assert placed.weights == {"host": 0, "domain": 1}
    assert place("tp=2", on="2,leaf=4", weights="leaf=7").weights == {"host": 1, "leaf": 7}


# Finding the best order of six dims on 16,384 GPUs takes about 0.1 s of CPU time.
@pytest.mark.slow
@pytest.mark.alone
def test_speed_of_six_dims():
    traffic = "tp=40G,cp=3G,ep=10G,dp=6G,pp=0.1G,x=1G"
    start = time.process_time()
    placed = place("tp=4,cp=2,ep=8,dp=8,pp=16,x=2", on="4,72,576", traffic=traffic)
    assert placed.best is not placed
    assert str(placed)
    assert time.process_time() - start < 1
    assert placed.layout.size == 16384


# Views may have dims with equal names. Each row has the groups of its own view. The expected
# numbers follow from the groups: with 2 ranks per host, (0, 1) is on one host, and (0, 2) is not.
def test_dims_of_equal_names_in_several_views():
    views = Views(RankLayout("tp=2,dp=4"))
    views.register("a", "ep=2,x=4")
    views.register("b", "y=2,ep=2,z=2")
    views.register("c", "tp=4,r=2")
    placed = place(views, on=2)
    assert "no order of the dims tp, dp is better on this machine" in placed.notes
    found = {one.label: (one.across, one.groups) for one in placed.spreads}
    assert "a:ep" not in found  # the same groups as tp
    assert (found["tp"], found["b:ep"], found["c:tp"]) == ((0, 4), (4, 4), (2, 2))


# The search for an order leaves out traffic over dims of a view, even if the layout has the same
# groups, and the notes tell this.
def test_traffic_over_dims_of_a_view_is_left_out_of_the_search():
    views = Views(RankLayout("dp=4,tp=2"))
    views.register("expert", "edp=4,etp=2")
    placed = place(views, on=2, traffic="etp=40G")
    assert placed.cost.waited == 0
    assert "the search for a better order leaves out expert (etp)" in placed.notes
