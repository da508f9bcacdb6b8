"""Transfers on real gloo processes: any layouts, two models and a bridge, odd tensors, errors."""

import math
from datetime import timedelta

import numpy as np
import pytest
import torch
from busy import late_s
from ranks import mapping_ranks

from hypercomm import RankLayout, RankMapping, transfer
from hypercomm.errors import GroupOptionsError, LayoutError, NotInitializedError
from hypercomm.launch import run_ranks
from hypercomm.layout.messages import Sharding
from hypercomm.testing import fake_world
from hypercomm.transfers import transfer as module

WORLD = 8


def random_side(random):
    """Sizes, names and ranks of a layout of at most eight ranks, at any offset."""
    names = [str(name) for name in random.permutation(["tp", "cp", "dp", "pp"])]
    shape = [int(random.choice([1, 2, 2, 3, 4])) for _ in names]
    while math.prod(shape) > WORLD:
        shape[int(random.integers(4))] = 1
    offset = int(random.integers(WORLD - math.prod(shape) + 1))
    ranks = range(offset, offset + math.prod(shape))
    if random.random() < 0.4:  # any ranks, in any order
        ranks = (int(rank) for rank in random.permutation(WORLD)[: math.prod(shape)])
    return tuple(shape), tuple(names), tuple(ranks)


def random_case(random):
    """A pair of layouts that can be mapped, colocated, beside each other or overlapping."""
    while True:
        shards = {"cp": int(random.choice([1, -1]))} | ({"tp": 1} if random.random() < 0.3 else {})
        along = None if random.random() < 0.2 else "dp"
        case = mapping_ranks.Case(
            random_side(random), random_side(random), along, 0, shards, "pp", (1, 2, 1)
        )
        try:
            case.mapping()
        except LayoutError:
            continue
        return case


# Whatever the layouts, each rank gets what numpy's splits say, there and back, with and without
# leaders that broadcast, verified or not; in a row, with nothing between one and the next.
@pytest.mark.parametrize("count", [20, pytest.param(80, marks=pytest.mark.slow)])
def test_any_layouts(count):
    random = np.random.default_rng(7)
    cases = [random_case(random) for _ in range(count)]
    modes = [(False, False), (True, False), (False, True), (True, True)]
    seen = run_ranks(mapping_ranks.deliveries, WORLD, args=(cases, modes), timeout=240)
    assert seen == [[(True, True)] * 4 * count] * WORLD


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
@pytest.mark.long
@pytest.mark.parametrize("pairs", [APART, COLOCATED], ids=["apart", "colocated"])
def test_a_bridge_between_two_models(pairs):
    ranks = run_ranks(mapping_ranks.bridges, WORLD, args=(pairs,), timeout=180)
    for position in range(2 * len(pairs)):
        stages = [
            RankLayout.parse(text).size_of("pp", default=1) for text, _ in pairs[position // 2]
        ]
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
            "verify": "GroupOptionsError: verify must be True, False or None, got 3",
            "quantized": "LayoutError: tensor must be a plain tensor, got a quantized one",
            "groups": "LayoutError: groups must be a process group or None, got 3",
            "a group in vain": (
                "LayoutError: groups is given, but the mapping is not of leaders: nobody would "
                "broadcast in it; make the mapping with leaders=True, or leave groups out"
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
                "LayoutError: out must share no element with tensor, which is still being sent"
            ),
            "out's rows": (
                "LayoutError: out must share no element with tensor, which is still being sent"
            ),
            "too large": (
                "WorldSizeError: the mapping dp=2 at 0 -> dp=8 at 0: fan-out 2 -> 8 along dp needs "
                "8 ranks; the world has 4"
            ),
        }
        if not source:
            expected["length"] = (
                "LayoutError: tensor axis 0 has length 3, and must be a multiple of 2 to be "
                "cut; the nearest lengths that work are 2 and 4"
            )
            expected["expanded"] = (
                "LayoutError: tensor must have each element at an address of its own, but shape "
                "(2,) has strides (0,); give a contiguous one"
            )
            expected["unfolded"] = (
                "LayoutError: tensor must have each element at an address of its own, but shape "
                "(2, 2) has strides (1, 1); give a contiguous one"
            )
            expected["computed"] = (
                "LayoutError: tensor was computed from what requires a gradient, and may not be "
                "overwritten; give another buffer, as torch.empty_like(...) makes"
            )
            expected["no groups"] = expected["no member"] = (
                "LayoutError: a mapping of leaders needs groups, the process group of (2, 3), "
                "which want the same as this rank"
            )
            expected["wrong group"] = (
                "LayoutError: groups must hold the ranks (2, 3), which want the same as this rank "
                "(its broadcast_siblings), but it holds (0, 1, 2, 3)"
            )
        assert words == expected
        assert apart is None if source else apart.tolist() == [[0, 1], [2, 3]] * 2
        shard = rank // 2 * 2
        assert both.tolist() == [[shard, shard]] * 2 + [[shard + 1, shard + 1]] * 2


# Groups are ignored where nobody broadcasts, and what torch gives to those outside a group is none.
def test_groups_that_do_not_matter():
    seen = run_ranks(mapping_ranks.groups_that_do_not_matter, 3)
    assert seen == [[None] * 3, [[7, 8], [3], [5]], [[7, 8], None, None]]


# Columns that lie between others share no element with them.
def test_interleaved_memory():
    for rank, whole in enumerate(run_ranks(mapping_ranks.interleaved_memory, 2)):
        assert whole == [[rank] * 4 + [1 - rank] * 4] * 3


# A tensor that autograd needs unchanged and that is received into is noticed.
def test_overwritten_tensors_are_noticed():
    nothing, words = run_ranks(mapping_ranks.overwritten, 2)
    assert nothing is None
    assert "modified by an inplace operation" in words


# With verify all ranks hear that they differ, or that one refuses, and in what. Nothing was sent:
# the next transfer is right.
def test_mismatches():
    ranks = run_ranks(mapping_ranks.mismatches, 3, timeout=60)
    dtype, shape, tensor, mapping, broadcast, right = zip(*ranks, strict=True)
    one = " by dp=1 at 0 -> dp=2 at 1: fan-out 1 -> 2 along dp"
    led = " by dp=1 at 0 -> tp=2 at 1: equal 1 -> 1 along dp, leaders only; tp replicates"
    for found, *meant in (
        (dtype, f"(2, 2) of torch.float32{one}", f"(2, 2) of torch.int32{one}"),
        (shape, f"(2, 2) of torch.float32{one}", f"(2, 3) of torch.float32{one}"),
        (mapping, "along='dp', batch_axis=0, ", "along='dp', batch_axis=1, "),
        (broadcast, f"(2, 2) of torch.float32{led}", f"(2, 3) of torch.float32{led}"),
    ):
        for heard in found:
            assert heard.startswith("TransferMismatchError: nothing was sent: ")
            assert all(words in heard.partition("ranks differ")[2] for words in meant), heard
    refusal = "tensor must be a torch.Tensor, got None"
    assert tensor[2] == f"LayoutError: {refusal}"
    for heard in tensor[:2]:
        assert heard.startswith("TransferMismatchError: nothing was sent: ")
        assert "rank 2 (host " in heard
        assert heard.endswith(f"LayoutError: {refusal}")
    assert right == (None, [[0, 1]], [[2, 3]])


# Whoever means the other end of a transfer is another rank hears so at once, or where the ranks
# are in transfers among others, within a second; and all of them get through the next one.
def test_ends_that_differ():
    ranks = run_ranks(mapping_ranks.ends_that_differ, 3, timeout=120)
    for rank, calls in enumerate(ranks):
        (words, took_s), replicas, (circle, circle_s), *pairs = calls
        assert words.startswith("TransferMismatchError: nothing was sent: ")
        assert "tp=2 at 0 -> dp=1 at 2" in words
        assert "tp=2 on ranks 1, 0 -> dp=1 at 2" in words
        assert circle.startswith("TransferMismatchError: nothing was sent: ")
        assert "ranks wait for each other in different calls" in circle
        for source, target in ((0, 2), (1, 0), (2, 1)):
            assert f"dp=1 at {source} -> dp=1 at {target}: " in circle
        assert max(took_s, circle_s) < 10
        assert replicas[0] == ([5.0, 5.0] if rank == 2 else None)
        assert [found for found, _ in pairs] == {
            0: [None, None],
            1: [[10.0, 10.0], None],
            2: [[10.0, 10.0], [11.0, 11.0]],
        }[rank]


# A rank that does not come is named at the timeout, with the transfer that it was in last; when it
# comes, it meets those that try again.
def test_a_rank_that_does_not_come():
    ranks = run_ranks(
        mapping_ranks.one_does_not_come, 3, timeout=120, group_timeout=timedelta(seconds=4)
    )
    waits_s = []
    for rank, ((words, took_s), again) in enumerate(ranks):
        if rank < 2:
            assert words.startswith("TransferMismatchError: nothing was sent: ")
            assert "rank 2 did not join" in words
            assert f"rank {rank} waited " in words
            waits_s.append(took_s)
        assert again == [rank - 1.0] * 2 if rank else again is None
    # Who waited first gives up for both, also for one that came a little later.
    assert 4 <= max(waits_s) < 4 + late_s(2)


# By default the environment says whether transfers are verified; other words of it are refused.
def test_verify_by_the_environment(monkeypatch):
    mapping = RankMapping(RankLayout.parse("dp=1"), RankLayout.parse("dp=1"))
    asked = []
    monkeypatch.setattr(module, "consent", lambda *_: asked.append(1))
    with fake_world(1):
        for text, verify, times in (
            ("1", None, 1),
            ("0", None, 0),
            ("1", False, 0),
            ("0", True, 1),
        ):
            monkeypatch.setenv("HYPERCOMM_VERIFY", text)
            asked.clear()
            transfer(mapping, torch.zeros(1), verify=verify)
            assert len(asked) == times
        monkeypatch.setenv("HYPERCOMM_VERIFY", "yes")
        with pytest.raises(GroupOptionsError, match="HYPERCOMM_VERIFY must be 0 or 1, got 'yes'"):
            transfer(mapping, torch.zeros(1))


# What a mapping asks of a rank is worked out once, however often tensors of one shape move.
def test_plans_are_kept(monkeypatch):
    mapping = RankMapping(RankLayout.parse("dp=2,ep=3"), RankLayout.parse("dp=2,ep=3"))
    with fake_world(6):
        transfer(mapping, torch.zeros(3, 2))

        def refuse(*_, **__):
            raise AssertionError("worked out again")

        for name in ("sends", "receives", "shards_of", "rank_at"):
            owner = RankMapping if name in {"sends", "receives"} else Sharding
            monkeypatch.setattr(owner, name, refuse)
        again = RankMapping(RankLayout.parse("dp=2,ep=3"), RankLayout.parse("dp=2,ep=3"))
        assert transfer(again, torch.ones(3, 2)).tolist() == [[1, 1]] * 3
        with pytest.raises(AssertionError, match="again"):
            transfer(again, torch.ones(4, 2))


# What is no mapping is refused first.
def test_without_a_mapping():
    with pytest.raises(LayoutError, match="mapping must be a RankMapping, got 'dp=1'"):
        transfer("dp=1", torch.zeros(1))


# Where torch.distributed is not initialised, the error says so.
def test_without_a_job():
    mapping = RankMapping(RankLayout.parse("dp=1"), RankLayout.parse("dp=1"))
    with pytest.raises(NotInitializedError, match=r"torch\.distributed is not initialised"):
        transfer(mapping, torch.zeros(1))


# Within one rank nothing is sent, and what arrives is a tensor of its own.
def test_to_itself():
    mapping = RankMapping(RankLayout.parse("dp=1"), RankLayout.parse("dp=1"))
    tensor = torch.arange(3)
    with fake_world(1):
        got = transfer(mapping, tensor)
    assert got.tolist() == [0, 1, 2]
    assert got.data_ptr() != tensor.data_ptr()


# A sequence in causal order arrives in causal order over other ranks, and in contiguous blocks.
def test_causal_order():
    assert run_ranks(mapping_ranks.causal, 4) == [[True] * 4] * 4
