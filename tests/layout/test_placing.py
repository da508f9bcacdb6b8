"""How layouts lie on machines: against plain Python, and against figures that others published."""

import itertools
import json
import math
import random
import time

import numpy as np
import pytest

from hypercomm import RankLayout
from hypercomm.errors import FileKeptError, LayoutError, TopologyError, WorldSizeError
from hypercomm.layout.placing import Card, Traffic, place
from hypercomm.layout.placing.search import Costs, best_order
from hypercomm.topology import Level, Topology, read_topology

pytestmark = pytest.mark.torch_free

LLAMA = {"hidden": 16384, "layers": 126, "parameters": 405 * 10**9, "key_value_hidden": 1024}
"""Llama 3 405B, table 3 of https://arxiv.org/abs/2407.21783: 8 key/value heads of 128."""
PODS = "host=8,leaf=16,spine=3072"
"""Its machine, section 3.3.1: hosts of 8, racks of two hosts, pods of 3,072 GPUs."""


# ---- by hand: nothing below uses hypercomm ------------------------------------------------------


def groups_by_hand(order, sizes, dims):
    """The groups over some dims, by coordinates; the first dim of the order varies fastest.

    Members are by rank: a chain over two dims goes along them in the order of the layout.
    """
    found = {}
    for rank in range(math.prod(sizes.values())):
        rest, coords = rank, {}
        for dim in order:
            rest, coords[dim] = divmod(rest, sizes[dim])
        key = tuple(coords[dim] for dim in order if dim not in dims)
        found.setdefault(key, []).append(rank)
    return list(found.values())


def sent_by_hand(group, unit_of, bytes_, pattern):
    """What one group sends from unit to unit."""
    units = [unit_of[rank] for rank in group]
    if pattern == "chain":
        return sum(bytes_ for one, two in itertools.pairwise(units) if one != two)
    if pattern == "ring":
        return bytes_ * len(set(units)) if len(set(units)) > 1 else 0
    pairs = sum(one != two for one in units for two in units)
    return bytes_ * pairs // (len(group) - 1)


def cost_by_hand(order, sizes, traffic, levels):
    waited = 0
    for dims, (bytes_, pattern) in traffic.items():
        for unit_of in levels:
            for group in groups_by_hand(order, sizes, dims):
                if len(group) > 1:
                    waited += sent_by_hand(group, unit_of, bytes_, pattern)
    return waited


def shapes(ranks):
    """All ways to write a number as a product of factors larger than 1, in every order."""
    yield (ranks,)
    for first in range(2, ranks):
        if ranks % first == 0:
            yield from ((first, *rest) for rest in shapes(ranks // first))


def check_against_hand(sizes, seed):
    """Compare the best order with every order, on a machine and with traffic that are drawn."""
    random.seed(seed)
    ranks = math.prod(sizes.values())
    host = random.choice([2, 3, 4, 8])
    if random.random() < 0.5:  # whole units, as on a real machine
        levels = [[rank // host for rank in range(ranks)], [rank // 12 for rank in range(ranks)]]
    else:  # hosts in any order
        hosts = [rank // host for rank in range(ranks)]
        random.shuffle(hosts)
        levels = [hosts, [unit % 2 for unit in hosts]]
    patterns = ["ring", "chain", "ring", "all-to-all"]
    wanted = [(dim,) for dim in sizes]
    if len(sizes) > 1:
        wanted.append(tuple(sorted(random.sample(sorted(sizes), 2))))
    traffic = {dims: (random.randrange(1, 99), random.choice(patterns)) for dims in wanted}
    machine = Topology([Level.of(f"level{at}", units) for at, units in enumerate(levels)])
    costs = Costs(machine, dict.fromkeys(machine.names, 1))
    # What all send to all is divided by size - 1: without remainders, nothing is rounded.
    scale = math.lcm(*(math.prod(sizes[dim] for dim in dims) - 1 for dims in traffic))
    traffic = {dims: (bytes_ * scale, pattern) for dims, (bytes_, pattern) in traffic.items()}
    sent = {dims: Traffic(bytes_, pattern) for dims, (bytes_, pattern) in traffic.items()}
    order, cost = best_order(sizes, sent, costs)
    every = {
        one: cost_by_hand(one, sizes, traffic, levels) for one in itertools.permutations(sizes)
    }
    assert cost.waited == min(every.values()) == every[order]


def cases(most):
    for ranks in range(2, most + 1):
        for number, shape in enumerate(shapes(ranks)):
            yield dict(zip("abcdef", shape, strict=False)), 1000 * ranks + number


# The order that is found costs as little as the best of all, in plain Python: a sample ...
@pytest.mark.parametrize("part", range(4))
def test_best_order_against_all_orders(part):
    for sizes, seed in list(cases(36))[part * 5 :: 20]:
        check_against_hand(sizes, seed)


# ... and all layouts of up to 64 ranks.
@pytest.mark.slow
@pytest.mark.parametrize("part", range(16))
def test_best_order_against_all_orders_of_all_layouts(part):
    for sizes, seed in list(cases(64))[part::16]:
        check_against_hand(sizes, seed)


def draw_call():
    """A layout, a machine with hosts of several sizes in any order, and traffic."""
    sizes = dict(zip("abc", random.choice(list(shapes(random.randrange(2, 25)))), strict=False))
    ranks = math.prod(sizes.values())
    hosts = {}
    while sum(count for count, _ in hosts.values()) < ranks:
        hosts[f"n{len(hosts)}"] = (random.choice([1, 2, 4, 4, 4]), random.choice("xyz"))
    if random.random() < 0.4:
        hosts["spare"] = (4, "x")
    offset = random.choice([0, 0, sum(count for count, _ in hosts.values()) - ranks])
    layout = RankLayout([*sizes.values()], [*sizes], offset)
    patterns = ["ring", "chain", "all-to-all"]
    traffic = {dim: Traffic(2520 * random.randrange(9), random.choice(patterns)) for dim in sizes}
    return layout, hosts, traffic


def check_report(layout, hosts, traffic, path):
    """Compare a report, and all that it proposes, with plain Python."""
    host_of = [host for host, (count, _) in hosts.items() for _ in range(count)]
    units = {"host": host_of, "leaf": [hosts[host][1] for host in host_of]}
    path.write_text("".join(f"{host} slots={count}\n" for host, (count, _) in hosts.items()))
    found = place(
        layout,
        on=[path, {host: leaf for host, (_, leaf) in hosts.items()}],
        traffic=traffic,
    )
    for placed in [found, *(proposal.placed for proposal in found.proposals)]:
        if not {*placed.layout.dim_names} <= {*layout.dim_names}:
            continue  # a dim in two has traffic of its own
        gpus = placed.gpus or [*range(len(host_of))]
        order, own, waited = placed.layout.dim_names, placed.layout.sizes, 0
        for dim in order:
            groups = groups_by_hand(order, own, [dim])
            for level, unit_of in units.items():
                if own[dim] == 1:
                    continue
                first = placed.layout.rank_offset
                here = [[unit_of[gpus[first + rank]] for rank in group] for group in groups]
                counts = [len(set(group)) for group in here]
                spread = placed.find(dim, level)
                assert (spread.groups, spread.size) == (len(groups), own[dim])
                assert spread.across == sum(count > 1 for count in counts)
                assert (spread.least, spread.most) == (min(counts), max(counts))
                kind = traffic[dim]
                sent = sum(
                    sent_by_hand(range(len(group)), group, kind.bytes, kind.pattern)
                    for group in here
                )
                assert spread.bytes == sent
                waited += sent
        assert placed.cost.waited == waited
    kinds = [one.kind for one in found.proposals]
    better = [one.placed for one in found.proposals if one.kind != "sizes"]
    assert all(placed.cost < found.cost for placed in better)
    assert [placed.cost for placed in better] == sorted(placed.cost for placed in better)
    assert len(kinds) == len({*kinds})


# A report says what plain Python counts, and so does all that it proposes, which costs less.
@pytest.mark.parametrize("seed", range(3))
def test_reports_by_hand(seed, tmp_path):
    random.seed(seed)
    for _ in range(25):
        check_report(*draw_call(), tmp_path / "hosts")


# ---- figures of others --------------------------------------------------------------------------


def across(placed, level):
    """Of each dim: how many groups lie in more than one unit, and how many there are."""
    return {spread.dims[0]: (spread.across, spread.groups) for spread in placed.on(level)}


# TP=4, DP=16, PP=4 on NVL72, 18 hosts of 4 GPUs in a domain: it is dp and pp that cross, not tp;
# with 64 of the 72 GPUs of each domain pp alone does. By arithmetic: tp 4k..4k+3 never crosses as
# 4 divides 72; dp blocks are 64 ranks, of which 0..63 alone lie in a domain; pp spans 256.
def test_nvl72():
    traffic = {"tp": 40e9, "dp": 6e9, "pp": 1e8}
    placed = place("tp=4,dp=16,pp=4", on="host=4,domain=72", traffic=traffic)
    assert across(placed, "domain") == {"tp": (0, 64), "dp": (12, 16), "pp": (64, 64)}
    spare = placed.take("spare")
    assert across(spare, "domain") == {"tp": (0, 64), "dp": (0, 16), "pp": (64, 64)}
    assert spare == placed.best
    assert spare.layout == RankLayout.parse("tp=4,dp=16,pp=4")
    assert spare.gpus == tuple(gpu for gpu in range(288) if gpu % 72 < 64)
    assert {*np.bincount(spare.topology.level("domain").of_rank)} == {64}
    assert spare.text_for("sbatch").splitlines()[-1] == "#SBATCH --segment=16"
    assert spare.text_for("nvlink-domain") == "NVLINK_DOMAIN_SIZE=64\n"
    experts = place("tp=4,ep=16,dp=2,pp=2", on="4,64").text_for("nvlink-domain")
    assert experts.split() == [
        "NVLINK_DOMAIN_SIZE=64",
        "NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN=16",
    ]
    sizes = placed.take("sizes")
    assert str(sizes.layout) == "tp=4,dp=18,pp=4"
    assert across(sizes, "domain") == {"tp": (0, 72), "dp": (0, 16), "pp": (72, 72)}
    with pytest.raises(LayoutError, match="segments are all of one size, but the domains"):
        placed.text_for("sbatch")


# Llama 3 405B on 16,384 GPUs, tables 3 and 4 and section 3.3.2 of https://arxiv.org/abs/2407.21783:
# "the order of parallelism dimensions [TP, CP, PP, DP] is optimized for network communication".
# 16 M tokens in a step make 16 micro batches of one sequence for each rank of dp.
@pytest.mark.parametrize(
    ("sizes", "sequence"),
    [
        ({"tp": 8, "pp": 16, "dp": 128}, 8192),
        ({"tp": 8, "cp": 16, "pp": 16, "dp": 8}, 131072),
    ],
)
def test_llama_3(sizes, sequence):
    card = Card(**LLAMA, sequence=sequence, micro_batches=16)
    for order in [tuple(sizes), tuple(sizes)[::-1], ("dp", "tp", *tuple(sizes)[1:-1])]:
        placed = place({dim: sizes[dim] for dim in order}, on=PODS, model=card)
        assert placed.best.layout.dim_names == tuple(sizes), order
        assert (placed.best is placed) == (order == tuple(sizes))


# The bytes of a card, by hand: Megatron's paper, section 3.2, for 2 micro batches, 4 of 8 layers.
def test_card():
    sizes = {"hidden": 64, "layers": 8, "sequence": 32, "parameters": 8000}
    card = Card(**sizes, micro_batches=2, micro_batch_size=3, dtype="bf16", gradient_dtype="fp32")
    found = card.traffic(RankLayout.parse("tp=4,cp=2,pp=2,dp=5"))
    tokens = 3 * 32 // 2
    assert found[("tp",)].bytes == 2 * 4 * 8 * tokens * 64 * 3 // 4 * 2
    assert found[("pp",)] == Traffic(2 * 2 * tokens * 64 // 4 * 2, "chain")
    assert found[("cp",)].bytes == 2 * 4 * 6 * tokens * 64 // 4 * 1 * 2
    gradients = Traffic(9 * (8000 // 8) // 10 * (2 + 4), "ring", overlapped=True)
    assert found[("cp", "dp")] == gradients
    experts = Card(**sizes, micro_batches=2, experts=16, topk=2, expert_parameters=6000)
    found = experts.traffic(RankLayout.parse("tp=2,ep=4,dp=5"))
    assert found[("ep",)] == Traffic(2 * 8 * 4 * 32 * 64 * 2 // 2 * 3 // 4 * 2, "all-to-all")
    assert found[("ep", "dp")].bytes == 2000 // 2 * 19 // 20 * 6
    assert found[("dp",)].bytes == 6000 // 8 * 4 // 5 * 6


# Dims of a card may have names of their own, as FSDP's two. Gradients are a ring that no step
# waits for, over whichever dims they go.
def test_card_of_other_dims():
    card = Card(**LLAMA, sequence=8192, micro_batches=4)
    usual = card.traffic(RankLayout.parse("tp=2,dp=8"))
    shards = card.traffic(RankLayout.parse("tp=2,dp_shard=4,dp_replicate=2"))
    assert shards[("dp_shard", "dp_replicate")] == usual[("dp",)]
    around = card.traffic(RankLayout.parse("cp=4"))[("cp",)]
    assert [(part.pattern, part.overlapped) for part in around.parts] == [
        ("ring", False),
        ("ring", True),
    ]
    assert around.more[0].bytes == 405 * 10**9 * 3 // 4 * (2 + 4)
    experts = Card(**LLAMA, sequence=8192, micro_batches=4, experts=8, expert_parameters=10**9)
    found = experts.traffic(RankLayout.parse("ep=4"))[("ep",)]
    assert [(part.pattern, part.overlapped) for part in found.parts] == [
        ("all-to-all", False),
        ("ring", True),
    ]
    assert "no step waits for part of ep" in str(place("ep=4", on=2, model=experts))
    # 404 billion parameters over a ring of 4 in 2 hosts, beside what is sent to all.
    assert place("ep=4", on=2, model=experts).cost.beside == 2 * found.more[0].bytes


# ---- what is proposed ---------------------------------------------------------------------------


# Hosts that come from two switches by turns are put beside each other, and dp crosses none.
def test_hosts_in_a_bad_order():
    leaves = {f"n{number}": f"s{switch}" for number, switch in enumerate([0, 1, 1, 0, 1, 0, 0, 1])}
    placed = place("tp=4,dp=4,pp=2", on=leaves, traffic="tp=9G,dp=2G,pp=1M")
    assert placed.find("dp", "leaf").across == 8
    hosts = placed.take("hosts")
    assert hosts.find("dp", "leaf").across == 0
    order = ["n0", "n3", "n5", "n6", "n1", "n2", "n4", "n7"]
    assert hosts.text_for("hostfile") == "".join(f"{host} slots=4\n" for host in order)
    assert hosts.text_for("slurm-hostfile").split() == [host for host in order for _ in range(4)]
    assert hosts.text_for("rankfile").splitlines()[5] == "rank 5=n3 slot=1"
    assert [leaves[host] for host in hosts.topology.level("host").names] == ["s0"] * 4 + ["s1"] * 4


# Of a machine with more hosts than are needed those of one switch are taken.
def test_hosts_left_out():
    leaves = {"a": "s1", "b": "s2", "c": "s2"}
    placed = place("tp=4,dp=2", on=leaves, gpus_per_host=4, traffic="tp=9G,dp=2G")
    assert placed.find("dp", "leaf").across == 4
    assert placed.best.gpus == (*range(4, 12),)
    assert placed.best.find("dp", "leaf").across == 0


# A dim of data parallelism in two: shards inside of a leaf, and what is reduced of them outside.
def test_split():
    placed = place("tp=4,dp=8,pp=4", on="4,16", traffic="tp=40G,dp=8G,pp=8G", weights={"host": 1})
    split = placed.take("split")
    assert split.layout.sizes["dp_inner"] * split.layout.sizes["dp_outer"] == 8
    assert split.cost < placed.best.cost
    # What a ring of 8 sends, 7/8 of it all, is 8G: the parts send (m - 1)/m, and of 1/m.
    inner, outer = split.layout.sizes["dp_inner"], split.layout.sizes["dp_outer"]
    whole = 8e9 * 8 / 7
    assert split.traffic[("dp_inner",)].bytes == round(whole * (inner - 1) / inner)
    assert split.traffic[("dp_outer",)].bytes == round(whole / inner * (outer - 1) / outer)
    assert placed.best.layout.dim_names != split.layout.dim_names


# What two dims send together is split as what one sends; the groups over the parts are new, and are
# compared with none. What no step waits for stays so.
def test_split_of_dims_that_send_together():
    both = Traffic(8e9, more=(Traffic(8e9, overlapped=True),))
    sent = {"tp": 1e9, "cp": 1e9, "dp": 1e9, "cp+dp": both, "pp": 8e9}
    split = place("tp=4,cp=2,dp=4,pp=2", on=8, traffic=sent).take("split")
    parts = split.traffic[("cp", "dp_inner")].parts
    assert [(part.bytes, part.overlapped) for part in parts] == [
        (round(8e9 * 8 / 7 * 3 / 4), False),
        (round(8e9 * 8 / 7 * 3 / 4), True),
    ]
    placed = place("tp=4,cp=2,dp=4,pp=2", on=8, traffic="cp=1G,dp=1G,cp+dp=8G,pp=8G")
    proposal = next(one for one in placed.proposals if one.kind == "split")
    rows = {row[0]: row[2:] for row in proposal.changes}
    assert rows["dp_inner"] == ("0 of 32", "1", "0")
    assert rows["cp+dp_inner"] == ("0 of 16", "1", "0")
    assert rows["pp"] == ("32 of 32 -> 0 of 32", "2 -> 1", "256 GB -> 0")


# With cp of size 1 the groups of dp and of dp+cp are the same, and both send.
def test_dims_of_size_1():
    placed = place("dp=4,cp=1,tp=2", on=2, traffic={"dp": 3, "dp+cp": 5, "tp": 9})
    assert placed.cost.waited == 2 * 2 * (3 + 5) + 4 * 2 * 9
    assert placed.best.cost.waited == 2 * 4 * (3 + 5)
    assert str(placed.best.layout) == "tp=2,dp=4,cp=1"
    costs = Costs(read_topology(2, 8), {"host": 1})
    sent = {("dp",): Traffic(3), ("dp", "cp"): Traffic(5), ("tp",): Traffic(9)}
    _, cost = best_order({"dp": 4, "cp": 1, "tp": 2}, sent, costs)
    assert cost == placed.best.cost


# Where hosts differ in size, GPUs that are left out are counted; no host of a domain is cut.
def test_spare_of_hosts_that_differ(tmp_path):
    file = tmp_path / "hosts"
    file.write_text("a slots=8\nb slots=6\nc slots=6\nd slots=6\n")
    placed = place("tp=6,dp=4", on=file, traffic="tp=9G,dp=1M")
    assert placed.take("spare").gpus == (*range(6), *range(8, 26))
    headline = next(one.headline for one in placed.proposals if one.kind == "spare")
    assert "spare: 6 GPUs of each host, 2 of 26 left out" in headline
    file.write_text("a slots=8\nb slots=8\nc slots=4\nd slots=8\ne slots=8\nf slots=4\n")
    label = "accelerator.topograph.run/domain"
    domains = {host: {label: "x" if host < "d" else "y"} for host in "abcdef"}
    spare = place("tp=4,dp=4,pp=2", on=[file, domains], traffic="tp=9G,dp=9G,pp=1M").take("spare")
    assert spare.gpus == (*range(16), *range(20, 36))
    assert spare.find("dp", "domain").across == 0
    uneven = place("tp=4,dp=9", on=[file, domains], traffic="tp=9G,dp=9G")
    assert "spare" not in [one.kind for one in uneven.proposals]  # 18 would cut a host


# The JSON of a proposal holds the order of hosts and GPUs, however long.
def test_json_of_hosts():
    leaf_of = [0, 1, 1, 0, 1, 0, 0, 1] * 50
    leaves = {f"n{number}": f"s{leaf}" for number, leaf in enumerate(leaf_of)}
    found = place("tp=4,dp=200,pp=2", on=leaves, traffic="tp=9G,dp=2G,pp=1M").to_dict()
    hosts = next(one for one in found["proposals"] if one["kind"] == "hosts")
    assert hosts["hosts"] == sorted(leaves, key=leaves.__getitem__)
    assert hosts["gpus"].startswith("0..3, 12..15, 20..27, ")
    assert hosts["gpus"].endswith(", 1596..1599")
    assert all(one["hosts"] is None for one in found["proposals"] if one["kind"] == "order")


# Of more than 8 dims no order is looked for, and the report says so.
def test_more_than_8_dims():
    placed = place(dict.fromkeys("abcdefghi", 2), on=2)
    assert not placed.is_searched
    says = "nothing better was looked for, as more than 8 dims are larger than 1"
    assert says in str(placed).splitlines()
    assert says not in str(place(dict.fromkeys("abcdefgh", 2), on=2))


# Numbers of numpy are numbers.
def test_numbers_of_numpy():
    sent = {"tp": np.int64(3), "dp": np.float32(2)}
    placed = place("tp=2,dp=2", on=2, traffic=sent, weights={"host": np.int32(2)})
    assert placed.traffic == {("tp",): Traffic(3), ("dp",): Traffic(2)}
    assert json.loads(placed.to_json())["cost"]["waited"] == 2 * 2 * 2 * 2
    assert (
        type(
            Card(
                **LLAMA | {"key_value_hidden": np.int64(8)}, sequence=1, micro_batches=1
            ).key_value_hidden
        )
        is int
    )


# Layouts with gaps, or in an order of their own, keep their ranks.
def test_listed_ranks():
    ranks = [15, 14, 13, 12, 3, 2, 1, 0]
    layout = RankLayout([4, 2], ["dp", "tp"], ranks=ranks)
    placed = place(layout, on=2, traffic="tp=9,dp=1")
    assert placed.find("tp", "host").across == 4
    assert placed.take("order").layout == RankLayout([2, 4], ["tp", "dp"], ranks=ranks)
    assert placed.best.find("tp", "host").across == 0


# An open size follows from hosts that are named; one host alone needs nothing better.
def test_open_size_and_small_worlds():
    assert str(place("tp=2,dp", on={"a": "s", "b": "s"}, gpus_per_host=4).layout) == "tp=2,dp=4"
    assert place("dp=1", on=8).proposals == ()
    assert place("dp=8", on=8).warnings == ()


# tp and ep that leave their domain are warned of, with the count and the first group.
def test_warnings():
    placed = place("dp=8,tp=2,ep=4", on="host=4,domain=8")
    assert placed.warnings == (
        "32 of 32 tp groups leave their domain, the first is (0, 8)",
        "16 of 16 ep groups leave their domain, the first is (0, 16, 32, 48)",
    )
    large = place("tp=16", on="8").warnings
    assert large == (
        "1 of 1 tp groups leave their host, the first is (0, 1, 2, 3, ..., 15); a host has 8 GPUs",
    )


# What goes on beside the computation counts after what steps wait for.
def test_overlapped():
    together = place("tp=2,dp=4,pp=2", on=4, traffic="tp=9G,dp=9G,pp=1G")
    assert together.best.layout.dim_names == ("tp", "dp", "pp")
    beside = place("tp=2,dp=4,pp=2", on=4, traffic="tp=9G,dp=9G,pp=1G", overlapped="dp")
    assert beside.best.layout.dim_names == ("tp", "pp", "dp")
    assert "no step waits for dp" in str(beside)


# The report is JSON; it shows no bytes where nothing told any.
def test_looks():
    placed = place("tp=4,dp=16,pp=4", on="host=4,domain=72")
    found = json.loads(placed.to_json())
    assert found["levels"] == {"host": 72, "domain": 4}
    rows = [(row["dims"], row["level"], row["across"], row["inside"]) for row in found["groups"]]
    assert (["dp"], "domain", 12, 4) in rows
    assert {row["bytes"] for row in found["groups"]} == {None}
    assert "bytes" not in str(placed)
    assert "<table>" in placed._repr_html_()
    assert repr(placed).startswith("<Placed: tp=4,dp=16,pp=4: 256 ranks on 64 hosts, 4 domains")


# Megatron makes two grids of one order: of the dense layers, whose dp holds ep, and of experts,
# whose dp holds cp. An order is written where both are as in the layout, and only there.
def megatron_makes(order, sizes, layout_order):
    every = [*order, *(dim for dim in sizes if dim not in order)]
    dense = sizes | {"dp": sizes["dp"] * sizes["ep"], "ep": 1}
    experts = sizes | {"dp": sizes["dp"] * sizes["cp"], "cp": 1}
    if order[-1] != "pp" and sizes["pp"] > 1 and dense["dp"] != experts["dp"]:
        return False
    wanted = [(dense, "tp", "tp"), (dense, "cp", "cp"), (dense, "pp", "pp"), (experts, "pp", "pp")]
    wanted += [(dense, "dp", "dp ep")]
    if sizes["ep"] > 1:
        wanted += [(experts, "tp", "tp"), (experts, "ep", "ep"), (experts, "dp", "dp cp")]
    return all(
        sorted(groups_by_hand(every, theirs, [dim]))
        == sorted(groups_by_hand(layout_order, sizes, ours.split()))
        for theirs, dim, ours in wanted
    )


@pytest.mark.parametrize("seed", range(3))
def test_order_of_megatron(seed):
    random.seed(seed)
    dims, refused = ["tp", "cp", "ep", "dp", "pp"], 0
    for _ in range(25):
        order, sizes = random.sample(dims, 5), {dim: random.choice([1, 2, 2, 3]) for dim in dims}
        layout = RankLayout([sizes[dim] for dim in order], order)
        try:
            text = place(layout, on=4, proposals=False).text_for("order")
        except LayoutError:
            refused += 1
            for one in random.sample([*itertools.permutations(dims)], 20):
                assert not megatron_makes(one, sizes, order), (layout, one)
        else:
            assert megatron_makes(text.strip().split("-"), sizes, order), (layout, text)
    assert 0 < refused < 25


# A file that exists is kept, unless it is said otherwise.
def test_writing(tmp_path):
    placed, path = place("tp=4,dp=2", on=4), tmp_path / "order"
    placed.write("order", path)
    with pytest.raises(FileKeptError, match="exists, and is kept"):
        placed.write("layout", path)
    assert path.read_text() == "tp-dp\n"
    placed.write("layout", path, force=True)
    assert RankLayout.from_json(path.read_text()) == placed.layout


# Bad calls, and their sentences.
@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        (
            lambda: place("tp=8,dp=5", on={"a": "s", "b": "s"}, gpus_per_host=16),
            WorldSizeError,
            (
                "tp=8,dp=5 needs 40 GPUs, but the machine has 32; dp=4 (32 ranks) or tp=6 (30 "
                "ranks) would fit, and so would all with 8 more GPUs"
            ),
        ),
        (
            lambda: place(RankLayout([2], ["tp"], 3), on={"a": "s"}, gpus_per_host=4),
            WorldSizeError,
            "tp=2 needs 5 GPUs, but the machine has 4; 1 more GPU would do",
        ),
        (
            lambda: place("tp=2", on=8, traffic="tp=" + "9" * 400),
            LayoutError,
            (
                "the traffic of 'tp' must be a number of bytes, 0 or more, and up to 2**60, got "
                f"{'9' * 400}"
            ),
        ),
        (
            lambda: place("tp=2", on=8, traffic={"tp": 10**400}),
            LayoutError,
            (
                "the traffic of 'tp' must be a number of bytes, 0 or more, and up to 2**60, got "
                f"1{'0' * 399}..."
            ),
        ),
        (
            lambda: place("tp=2", on=8, weights={"host": 10**9}),
            LayoutError,
            "the weight of 'host' must be 0 or more, and less than 10**9, got 1000000000",
        ),
        (
            lambda: place("tp=8,dp=-1", on=8),
            TopologyError,
            (
                "a size is open, which follows from the GPUs, but on=8 says how large units are, "
                "but not how many; give the size"
            ),
        ),
        (
            lambda: place("tp=2", on=8, traffic="tp=2", model=Card.read),
            LayoutError,
            "give traffic or model, not both: the traffic follows from the model",
        ),
        (
            lambda: place("tp=2", on=8, traffic="tp=x"),
            LayoutError,
            (
                "'tp=x' in the traffic 'tp=x' cannot be read; write bytes for each dim like "
                "'tp=40G,dp+cp=6.5G'"
            ),
        ),
        (
            lambda: place("tp=2", on=8, traffic={"tp": -1}),
            LayoutError,
            "the traffic of 'tp' must be a number of bytes, 0 or more, got -1",
        ),
        (
            lambda: place("tp=2,dp=2", on=8, traffic="tp=1", overlapped="dp"),
            LayoutError,
            "overlapped names dp, whose traffic is not given; there is tp",
        ),
        (
            lambda: place("tp=2", on=8, weights={"leaf": 1}),
            LayoutError,
            "weights names no level of this machine with 'leaf'; it has ['host']",
        ),
        (
            lambda: place("tp=2", on=8).find("tp", "leaf"),
            TopologyError,
            "unknown level 'leaf'; this topology has ['host']",
        ),
        (
            lambda: place("tp=2,dp=2", on=8).find("tp+dp", "host"),
            LayoutError,
            "tp+dp was not looked at, but tp, dp; ask for it: groups=",
        ),
        (
            lambda: place("tp=2", on=8).take("hosts"),
            LayoutError,
            "nothing of kind 'hosts' is proposed for tp=2; there is none",
        ),
        (
            lambda: place("tp=2", on=8).text_for("ordre"),
            LayoutError,
            (
                "the kind to write must be one of ['order', 'layout', 'rankfile', "
                "'slurm-hostfile', 'hostfile', 'sbatch', 'nvlink-domain'], got 'ordre'; "
                "did you mean 'order'?"
            ),
        ),
        (
            lambda: place("x=2", on=8).text_for("order"),
            LayoutError,
            (
                "Megatron's order knows ['tp', 'cp', 'ep', 'dp', 'pp'], and not 'x' of x=2; write "
                "the layout instead"
            ),
        ),
        (
            lambda: place("tp=2", on=8).text_for("sbatch"),
            LayoutError,
            (
                "segments are of hosts in domains, and this machine has no level 'domain', but "
                "['host']"
            ),
        ),
        (
            lambda: place("tp=2", on=8, model={"hidden": 8}),
            LayoutError,
            "a card needs layers, sequence, micro_batches, parameters, too",
        ),
        (
            lambda: Card(**LLAMA, sequence=0, micro_batches=1),
            LayoutError,
            "sequence of a card must be at least 1, got 0",
        ),
        (
            lambda: Card(**LLAMA, sequence=1, micro_batches=1).traffic(RankLayout.parse("x=2")),
            LayoutError,
            (
                "a card speaks of the dims ['tp', 'cp', 'ep', 'pp', 'dp'], and not of 'x' of x=2; "
                "give the traffic instead"
            ),
        ),
        (
            lambda: Card(**LLAMA, sequence=1, micro_batches=1, experts=8),
            LayoutError,
            (
                "a card with experts gives expert_parameters, too, and without experts neither; "
                "got experts=8, expert_parameters=0"
            ),
        ),
        (
            lambda: Card(
                **LLAMA, sequence=1, micro_batches=1, experts=2, topk=3, expert_parameters=9
            ),
            LayoutError,
            "topk 3 is more than there are experts, 2",
        ),
        (
            lambda: place("ep=3", on=8, model=Card(**LLAMA, sequence=1, micro_batches=1)),
            LayoutError,
            (
                "ep=3 spreads experts over 3 ranks, but the card has 0; give experts, and as many "
                "as 3 divides"
            ),
        ),
        (
            lambda: Card(
                **LLAMA, sequence=1, micro_batches=1, experts=8, expert_parameters=9
            ).traffic(RankLayout.parse("ep=3")),
            LayoutError,
            (
                "ep=3 spreads experts over 3 ranks, but the card has 8; give experts, and as many "
                "as 3 divides"
            ),
        ),
        (
            lambda: place("tp=2,cp=2,ep=2,dp=2", on=8).text_for("order"),
            LayoutError,
            (
                "Megatron would make other ep groups of the order tp-cp-ep-dp of "
                "tp=2,cp=2,ep=2,dp=2, as its dense layers know no ep and its experts no cp; write "
                "the layout instead"
            ),
        ),
        (
            lambda: place("tp=2,pp=2,ep=2,dp=2", on=8).text_for("order"),
            LayoutError,
            (
                "Megatron needs pp last, unlike in the order tp-pp-ep-dp of tp=2,pp=2,ep=2,dp=2, "
                "as its dense layers know no ep and its experts no cp; write the layout instead"
            ),
        ),
        (
            lambda: place(RankLayout([2], ["tp"], 2), on=8).text_for("order"),
            LayoutError,
            (
                "Megatron numbers its ranks 0, 1, ... in the order of dims, and tp=2 has others; "
                "write the layout instead"
            ),
        ),
    ],
)
def test_bad_calls(call, error, says):
    with pytest.raises(error) as caught:
        call()
    assert str(caught.value) == says


# Six dims on 16,384 GPUs take less than two seconds, proposals included; of the processor's, as the
# machine may be busy.
@pytest.mark.slow
@pytest.mark.alone
def test_speed():
    traffic = "tp=40G,cp=3G,ep=10G,dp=6G,pp=0.1G,x=1G"
    start = time.process_time()
    placed = place("tp=4,cp=2,ep=8,dp=8,pp=16,x=2", on="4,72,576", traffic=traffic)
    assert time.process_time() - start < 2
    assert placed.layout.size == 16384
    assert [proposal.kind for proposal in placed.proposals] == ["spare", "order"]
