"""Whole states on real gloo processes: every part arrives, whatever fails; both ends hear why."""

import numpy as np
import pytest
import torch
from ranks import state_ranks

from hypercomm import RankLayout, RankMapping, transfer_state
from hypercomm.errors import LayoutError
from hypercomm.launch import run_ranks
from hypercomm.testing import fake_world
from hypercomm.transfers.memory import Overlaps

CASES = [
    ("tp=2,dp=2", "tp=2", 4, 1 << 20),
    ("tp=2,dp=2", "tp=2", 4, 1024),  # segments of a few elements, in many buckets
    ("tp=2,dp=2", "dp=2,tp=2", 0, 4096),  # all ranks are in both
    ("tp=2,dp=2", "tp=4", 2, 4096),  # some are
    ("tp=3", "tp=2,dp=2", 2, 4096),
]


# Each rank gets what torch's chunks say: mixed dtypes, scalars, empty and strided tensors, in
# whatever buckets, packed with checksums and large ones as they lie; names come in any order.
@pytest.mark.parametrize("verify", [True, False])
def test_arrivals(verify):
    ranks = run_ranks(state_ranks.arrivals, 6, args=(CASES, verify), timeout=120)
    for seen in ranks:
        assert all(right for _, right in seen)
    assert ranks[0][0][0] == 1
    assert ranks[0][1][0] > 10


# One bit that changes on the way is found; all ranks hear in which parameter, between which ranks;
# and from the bucket named on, all of it arrives.
def test_a_flipped_bit():
    for heard, buckets, first, left, right in run_ranks(state_ranks.flipped, 4, timeout=120):
        name, words, bucket = heard
        assert name == "StateTransferError"
        assert "parameter '0.qkv.weight' did not arrive as it was sent: of " in words
        assert f"from rank 1 to rank 3, in bucket 2 of {buckets}, the checksum is" in words
        assert bucket == 2
        assert first == buckets
        assert left in {0, 4}  # the empty start took the first two buckets' parameters along
        assert right


# Where communication fails, the error says from which bucket to go on; with that the rest arrives.
def test_going_on():
    for rank, (words, bucket, missing, right) in enumerate(
        run_ranks(state_ranks.resumed, 4, timeout=120)
    ):
        assert words == (
            f"rank {rank} lost bucket 2 of 9: the cable was pulled; all before it have arrived "
            f"here: initialise torch.distributed anew, and go on with start=2, or with the "
            f"smallest number that a rank says"
        )
        assert bucket == 2
        assert (missing > 5) == (rank >= 2)
        assert right


# What does not fit is refused on both ends before anything is sent: the next call works.
def test_refusals():
    ranks = run_ranks(state_ranks.refusals, 3, timeout=120)
    refused = " (host "
    for rank, words in enumerate(ranks):
        for name, one, other in (
            (
                "keys",
                "parameter 1 as 'a.scale': (1,) of torch.float32, cut by {}",
                "parameter 1 as 'b.bias': (4,) of torch.float32, cut by {}",
            ),
            (
                "fewer",
                "parameter 2 as 'b.weight': (4, 2) of torch.float32, cut by {'tp': 0}",
                "parameter 2 as 'c.weight': (2,) of torch.float32, cut by {'tp': 0}",
            ),
            (
                "shapes",
                "parameter 2 as 'b.weight': (4, 2) of torch.float32, cut by {'tp': 0}",
                "parameter 2 as 'b.weight': (4, 4) of torch.float32, cut by {'tp': 0}",
            ),
            (
                "dtypes",
                "parameter 2 as 'b.weight': (4, 2) of torch.float32, cut by {'tp': 0}",
                "parameter 2 as 'b.weight': (4, 2) of torch.float16, cut by {'tp': 0}",
            ),
            (
                "other buckets",
                "buckets of 2097152 bytes from number 0 on, verify=False",
                "buckets of 1048576 bytes from number 0 on, verify=False",
            ),
        ):
            assert words[name].startswith("TransferMismatchError: nothing was sent: ")
            assert one in words[name]
            assert other in words[name]
        for name, on, sentence in (
            ("no target tensors", 1, " receives, and must give into, a dict of tensors by name"),
            ("no tensors", 0, "state holds no tensors; rank 0 sends, and must give some"),
            (
                "a pattern",
                0,
                "the pattern 'lm_head' of shards matches no parameter; there are 2, 'b.bias' first",
            ),
            (
                "a dim",
                0,
                (
                    "shards['*']: shards names dim 'qp', which neither layout has; the source "
                    "has dims ('tp',), the target ('tp',)"
                ),
            ),
            ("an axis", 0, "b.weight']: the mapping cuts tensor axis 2, but the tensor has 2 axes"),
            (
                "not even",
                0,
                (
                    "state['b.weight']: tensor axis 0 has length 3, and must be a multiple "
                    "of 2 to be cut; the nearest lengths that work are 2 and 4"
                ),
            ),
            ("buckets", 0, "bucket_bytes must be at least 1024, got 0"),
            ("a start", 0, "start must be the number of a bucket, in 0 .. 1, got 9"),
        ):
            assert sentence in words[name], name
            assert (refused in words[name]) == (min(rank, 1) != on) or name == "an axis"
        assert words["right"] is None


# On a rank of both ends, buffers may not hold what is still sent; what stays may stay.
def test_a_rank_in_both():
    for rank, words in enumerate(run_ranks(state_ranks.overlapping, 2, timeout=120)):
        shared, keys, shapes, right = words
        assert "into['a'] shares memory with state['a'], which is still being sent" in shared
        assert "state has 'b', which into lacks; a rank in both gives both alike" in keys
        assert (
            "state and into differ in 'b': as a whole it is (3,) of torch.float32 in state, (4,) "
            "of torch.float32 in into"
        ) in shapes
        assert right == ([0, 0, 1, 1], [0, 1, 2]), rank


# Addresses count, not storages: those of a numpy array's views are different ones.
def test_memory_of_several_storages():
    room = np.zeros(8, np.float32)
    state = {"a": torch.from_numpy(room[:4]), "b": torch.from_numpy(room[4:])}
    into = {"a": torch.from_numpy(room[2:6]), "b": torch.zeros(4)}
    assert len({each.untyped_storage().data_ptr() for each in (*state.values(), into["a"])}) == 3
    with fake_world(1):
        with pytest.raises(
            LayoutError, match=r"into\['a'\] shares memory with state\['.'\], which"
        ):
            transfer_state(ALONE, state, into=into, shards={"*": {}})
        same = {"a": torch.from_numpy(room[:4]), "b": torch.from_numpy(room[4:])}
        assert transfer_state(ALONE, state, into=same, shards={"*": {}}) == 0


# Which spans overlap, beside a look at every pair.
def test_overlaps():
    room = torch.zeros(40)
    spans = [(begin, end) for begin in range(0, 40, 3) for end in range(begin, 40, 7)]
    tensors = {f"{begin}..{end}": room[begin:end] for begin, end in spans}
    overlaps = Overlaps(tensors)
    for begin, end in spans:
        wanted = {f"{b}..{e}" for b, e in spans if max(b, begin) < min(e, end)}
        assert set(overlaps.with_(room[begin:end])) == wanted
    assert set(Overlaps({"even": room[::2]}).with_(room[1::2])) == set()


ALONE = RankMapping("tp=1", "tp=1", along=None)
ONE = torch.ones(2)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("tp=1", {"a": ONE}), "mapping must be a RankMapping, got 'tp=1'"),
        (
            (RankMapping("dp=1", "dp=1"), {"a": ONE}),
            (
                "a state has no batch, and every replica of it takes part: make the mapping with "
                "along=None and without leaders; got dp=1 at 0 -> dp=1 at 0: equal 1 -> 1 along dp"
            ),
        ),
        ((ALONE, [ONE]), "state must be a dict of tensors by name, got <class 'list'>"),
        ((ALONE, {1: ONE}), "every name in state must be a string, got 1"),
        ((ALONE, {"a": 3}), "state['a'] must be a torch.Tensor, got 3"),
        (
            (ALONE, {"a": ONE, "b": ONE.to("meta")}),
            "state['b'] must be a dense tensor with data, got torch.strided on meta",
        ),
        (
            (ALONE, {"a": ONE}, {"shards": "tp"}),
            (
                "shards must map patterns of names to dims and axes, as in {'*.qkv.weight': "
                "{'tp': 0}, "
                "'*': {}}, got 'tp'"
            ),
        ),
        (
            (ALONE, {"a": ONE}, {"shards": {3: {}}}),
            "every pattern in shards must be a string, got 3",
        ),
        (
            (ALONE, {"a": ONE}, {"shards": {"*": 0}}),
            "shards['*'] must map dims to axes, as in {'tp': 0}, got 0",
        ),
        (
            (ALONE, {"a": ONE}, {"shards": {"b*": {}, "c": {}}}),
            (
                "no pattern of shards matches parameter 'a': they are ['b*', 'c']; add '*': {} "
                "as the "
                "last for those that no dim cuts"
            ),
        ),
        (
            (ALONE, {"a": ONE}, {"shards": {"*": {}, "a": {"tp": 0}}}),
            (
                "the pattern 'a' of shards comes too late: patterns before it match all that "
                "it does, "
                "'a' first; put it before them"
            ),
        ),
        (
            (ALONE, {"a": ONE}, {"into": {"a": ONE.expand(2), "b": ONE}}),
            "into has 'b', which state lacks; this rank is in both, and gives both alike",
        ),
        (
            (ALONE, {"a": ONE}, {"into": {"a": torch.ones(1).expand(2)}}),
            (
                "into['a'] must have each element at an address of its own, but shape (2,) has "
                "strides "
                "(0,); give a contiguous one"
            ),
        ),
        ((ALONE, {"a": ONE}, {"bucket_bytes": 1.5}), "bucket_bytes must be an int, got 1.5"),
        ((ALONE, {"a": ONE}, {"bucket_bytes": -1}), "bucket_bytes must be at least 1024, got -1"),
        ((ALONE, {"a": ONE}, {"start": "x"}), "start must be an int, got 'x'"),
        (
            (ALONE, {"a": ONE}, {"start": 1}),
            "start must be the number of a bucket, in 0 .. 0, got 1",
        ),
    ],
)
def test_bad_calls(arguments, words):
    mapping, state, more = (*arguments, {})[:3]
    into = {"a": torch.zeros(2)}
    with fake_world(1), pytest.raises(LayoutError) as caught:
        transfer_state(mapping, state, **{"into": into, **more})
    assert str(caught.value) == words
    assert into["a"].tolist() == [0, 0]


# A DTensor is refused with what would do; a rank of neither end does nothing.
def test_dtensor_and_outsiders():
    tensor = ONE.clone()
    tensor.to_local = lambda: tensor
    with fake_world(1), pytest.raises(LayoutError, match=r"state\['a'\] is a DTensor; give its"):
        transfer_state(ALONE, {"a": tensor}, into={"a": torch.zeros(2)})
    away = RankMapping(RankLayout([1], ["tp"], 1), RankLayout([1], ["tp"], 2), along=None)
    with fake_world(3):
        assert transfer_state(away) is None


# What is written to has another version afterwards, which autograd sees.
def test_versions():
    into = {"a": torch.zeros(2, requires_grad=True)}
    with fake_world(1):
        before = into["a"]._version
        transfer_state(ALONE, {"a": ONE}, into=into)
    assert into["a"].tolist() == [1, 1]
    assert into["a"]._version > before
