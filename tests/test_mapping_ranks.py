"""Transfers on real gloo processes: any layouts, two models and a bridge, odd tensors, errors."""

import math

import mapping_ranks
import numpy as np
import pytest
import torch

from hypercomm import RankLayout, RankMapping
from hypercomm.errors import LayoutError, NotInitializedError
from hypercomm.launch import run_ranks
from hypercomm.testing import fake_world

WORLD = 8


def random_side(random):
    """Sizes, names and ranks of a layout of at most eight ranks, at any offset."""
    names = [str(name) for name in random.permutation(["tp", "cp", "dp", "pp"])]
    shape = [int(random.choice([1, 2, 2, 3, 4])) for _ in names]
    while math.prod(shape) > WORLD:
        shape[int(random.integers(4))] = 1
    offset = int(random.integers(WORLD - math.prod(shape) + 1))
    return tuple(shape), tuple(names), tuple(range(offset, offset + math.prod(shape)))


def random_case(random):
    """A pair of layouts that can be mapped, colocated, beside each other or overlapping."""
    while True:
        shards = {"cp": int(random.choice([1, -1]))} | ({"tp": 1} if random.random() < 0.3 else {})
        case = mapping_ranks.Case(
            random_side(random), random_side(random), "dp", 0, shards, "pp", (1, 2, 1)
        )
        try:
            case.mapping()
        except LayoutError:
            continue
        return case


# Whatever the layouts, each rank gets what numpy's splits say, there and back, with and without
# leaders that broadcast; in a row, with nothing between one transfer and the next.
def test_any_layouts():
    random = np.random.default_rng(7)
    cases = [random_case(random) for _ in range(40)]
    seen = run_ranks(mapping_ranks.deliveries, WORLD, args=(cases, [False, True]), timeout=180)
    assert seen == [[(True, True)] * 80] * WORLD


APART = [
    (("tp=2,dp=2", 0), ("tp=1,dp=4", 4)),
    (("tp=2,dp=2", 0), ("tp=4,dp=1", 4)),
    (("tp=2,dp=2", 0), ("tp=2,dp=2", 4)),
    (("tp=2,dp=2", 0), ("dp=2,tp=2", 4)),
    (("tp=2,dp=2", 0), ("tp=2,dp=1,pp=2", 4)),
    (("tp=2,dp=2", 0), ("tp=2,cp=2,dp=1", 4)),
    (("tp=1,dp=4", 0), ("cp=2,tp=2,dp=1", 4)),
    (("tp=1,dp=2,pp=2", 4), ("tp=2,cp=1,dp=1,pp=2", 0)),
    (("tp=1,cp=2,dp=2", 0), ("tp=1,cp=4,dp=1", 4)),
]
COLOCATED = [
    (("tp=2,dp=4", 0), ("tp=4,dp=2", 0)),
    (("tp=4,dp=2", 0), ("tp=1,cp=2,dp=4", 0)),
    (("tp=2,dp=2,pp=2", 0), ("dp=2,cp=2,tp=2", 0)),
    (("tp=1,dp=8", 0), ("tp=8,dp=1", 0)),
    (("tp=2,dp=2", 0), ("tp=2,dp=2,pp=2", 0)),
]


# An encoder and a language model, each with its own tp, cp, dp and pp, learn over the bridge what
# they learn unsplit in one process: activations forward, gradients back, every weight's gradient.
@pytest.mark.parametrize("pairs", [APART, COLOCATED], ids=["apart", "colocated"])
def test_a_bridge_between_two_models(pairs):
    ranks = run_ranks(mapping_ranks.bridges, WORLD, args=(pairs,), timeout=180)
    for position in range(2 * len(pairs)):
        stages = [RankLayout.parse(text).size_of("pp", 1) for text, _ in pairs[position // 2]]
        expected_loss, expected = mapping_ranks.unsplit(*stages)
        seen = [rank[position] for rank in ranks]
        loss = sum(loss for loss, _ in seen if loss is not None)
        assert loss == pytest.approx(expected_loss, rel=1e-12)
        shards = {}
        for _, found in seen:
            for key, gradients in found.items():
                for one, other in zip(gradients, shards.setdefault(key, gradients), strict=True):
                    torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)
        for (name, stage), matrices in expected.items():
            parts = [shards[key] for key in sorted(shards) if key[:2] == (name, stage)]
            for which, axis in ((0, 1), (1, 0)):
                whole = torch.cat([part[which] for part in parts], axis)
                torch.testing.assert_close(whole, matrices[which], rtol=1e-12, atol=1e-12)


# Tensors of any type and any strides arrive, empty ones too; a rank of neither layout does nothing.
def test_odd_tensors():
    for rank, seen in enumerate(run_ranks(mapping_ranks.odd_tensors, 5)):
        assert [name for name, arrived in seen.items() if not arrived] == []
        assert len(seen) == (16 if rank == 4 else 15)


# Wrong arguments are refused on every rank before anything is sent: the next transfer works.
def test_refusals():
    ranks = run_ranks(mapping_ranks.refusals, 4)
    for rank, (words, apart, both) in enumerate(ranks):
        source = rank < 2
        expected = {
            "no tensor": "LayoutError: tensor must be a torch.Tensor, got [1.0]",
            "nothing": "LayoutError: tensor must be a torch.Tensor, got None",
            "no axis": "LayoutError: the mapping cuts tensor axis 0, but the tensor has 0 axes",
            "meta": (
                "LayoutError: tensor must be a dense tensor with data, got torch.strided on meta"
            ),
            "sparse": (
                "LayoutError: tensor must be a dense tensor with data, got torch.sparse_coo on cpu"
            ),
            "out": (
                f"LayoutError: out is for ranks of both stages; rank {rank} is on one, and gives "
                f"its tensor as tensor"
            ),
            "leaders": "LayoutError: leaders must be True, False or None, got 3",
            "groups": "LayoutError: groups must be a process group or None, got 3",
            "a group in vain": (
                "LayoutError: groups is given, but leaders=False: then nobody broadcasts"
            ),
            "wrong group": (
                f"LayoutError: groups must hold the ranks {(0, 1) if source else (2, 3)}, which "
                f"want the same as this rank (its broadcast_siblings), but it holds (0, 1, 2, 3)"
            ),
            "out's shape": (
                "LayoutError: out must have shape (4, 2), torch.float32 and device cpu, as follows "
                "from tensor; it has (2, 2), torch.float32 and cpu"
            ),
            "out's type": (
                "LayoutError: out must have shape (4, 2), torch.float32 and device cpu, as follows "
                "from tensor; it has (4, 2), torch.int64 and cpu"
            ),
            "out's memory": (
                "LayoutError: out must not share memory with tensor, which is still being sent"
            ),
            "too large": (
                "WorldSizeError: the mapping dp=2 at 0 -> dp=8 at 0: fan-out 2 -> 8 along dp needs "
                "ranks up to 7, but the job has 4 ranks"
            ),
        }
        if not source:
            expected["length"] = (
                "LayoutError: tensor axis 0 has length 3, and must be a multiple of 2, as 1 shards "
                "become 2; the nearest lengths that work are 2 and 4"
            )
            expected["expanded"] = (
                "LayoutError: tensor must not be expanded: several of its elements are one in "
                "memory"
            )
            expected["no groups"] = (
                "LayoutError: leaders=True needs groups, the process group of (2, 3), which want "
                "the same as this rank"
            )
        assert words == expected
        assert apart is None if source else apart.tolist() == [[0, 1], [2, 3]] * 2
        shard = rank // 2 * 2
        assert both.tolist() == [[shard, shard]] * 2 + [[shard + 1, shard + 1]] * 2


# Where torch.distributed is not initialised, the error says so.
def test_without_a_job():
    mapping = RankMapping(RankLayout.parse("dp=1"), RankLayout.parse("dp=1"))
    with pytest.raises(NotInitializedError, match=r"needs torch\.distributed"):
        mapping.transfer(torch.zeros(1))


# Within one rank nothing is sent, and what arrives is a tensor of its own.
def test_to_itself():
    mapping = RankMapping(RankLayout.parse("dp=1"), RankLayout.parse("dp=1"))
    tensor = torch.arange(3)
    with fake_world(1):
        got = mapping.transfer(tensor)
    assert got.tolist() == [0, 1, 2]
    assert got.data_ptr() != tensor.data_ptr()
