"""How layouts lie on machines: against plain Python, and against figures that others published."""

import itertools
import math
import random

import pytest

from hypercomm.layout import Traffic
from hypercomm.layout.placing.search import Costs, best_order
from hypercomm.topology import Level, Topology

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
