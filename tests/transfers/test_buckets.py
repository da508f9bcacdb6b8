"""Test with numpy that the plan of a state delivers every element once, in balanced buckets."""

import math
from collections import Counter

import numpy as np
import pytest
import torch
from example_counts import examples
from hypothesis import given, settings, strategies as st
from numpy_oracle import held as indices

from hypercomm import RankLayout, RankMapping
from hypercomm.testing import layouts
from hypercomm.transfers.buckets import segments
from hypercomm.transfers.holdings import Held, name_of
from hypercomm.transfers.matching import match_tensors

some = settings(max_examples=examples(200), deadline=None)


def parts_of(mapping, shape, *, is_source):
    """Map each source or target rank to its part of a tensor with the elements 0, 1, 2, ..."""
    whole = np.arange(math.prod(shape)).reshape(shape)
    owned = indices(mapping, shape, is_source=is_source)
    return {rank: whole[np.ix_(*axes)] for rank, axes in owned.items()}


def planned(parameters, limit):
    """Return the segments of parameters that have the given shapes, dtypes and mappings."""
    ends = []
    for is_source in (True, False):
        described = {}
        for number, (shape, dtype, mapping) in enumerate(parameters):
            for rank, part in parts_of(mapping, shape, is_source=is_source).items():
                cells = mapping.cells_at(rank, part.ndim, is_source=is_source)
                held = Held(str(number), name_of(dtype), part.shape, cells=cells)
                described.setdefault(rank, []).append(held)
        ends.append(described)
    return list(segments(*match_tensors(*ends), limit))


@st.composite
def plans(draw):
    """Draw two layouts at any offsets, and parameters that their dims split, also unevenly."""
    source, target = (
        draw(layouts(max_ranks=12, max_offset=8, dim_names=("tp", "cp", "dp"))) for _ in range(2)
    )
    dims = sorted({*source.dim_names, *target.dim_names})
    parameters = []
    for _ in range(draw(st.integers(1, 3))):
        cuts = draw(st.dictionaries(st.sampled_from(dims), st.sampled_from([0, 1, -1])))
        mapping = RankMapping(source, target, along=None, shards=cuts)
        shape = [draw(st.integers(0, 9)), draw(st.integers(1, 40)), draw(st.integers(1, 7))]
        dtype = draw(st.sampled_from([torch.int8, torch.bfloat16, torch.float64]))
        parameters.append((shape, dtype, mapping))
    return parameters, draw(st.sampled_from([1024, 5000, 1 << 20]))


# Every element that a target rank needs arrives once, from a rank that has the element. An element
# that the target rank already has is copied there. In one bucket, the bytes that a rank sends and
# receives do not exceed the limit.
@some
@given(plans())
def test_every_element_arrives_once(plan):
    parameters, limit = plan
    sent, wanted = (
        [parts_of(mapping, shape, is_source=end) for shape, _, mapping in parameters]
        for end in (True, False)
    )
    arrived = [{rank: np.full(data.shape, -1) for rank, data in every.items()} for every in wanted]
    room = Counter()
    for one in planned(parameters, limit):
        number = int(one.name)
        piece = sent[number][one.source][one.source_slices]
        there = arrived[number][one.target][one.target_slices]
        assert (there == -1).all()
        there[...] = piece
        assert one.nbytes == piece.size * parameters[number][1].itemsize
        assert (one.bucket == -1) == (one.source == one.target)
        if one.bucket >= 0:
            assert one.room >= one.nbytes + 8
            for rank in (one.source, one.target):
                room[rank, one.bucket] += one.room
    assert max(room.values(), default=0) <= limit
    for number, every in enumerate(wanted):
        for rank, data in every.items():
            np.testing.assert_array_equal(arrived[number][rank], data)


MODEL = {"embedding": (4096, 64), "qkv": (192, 64), "proj": (64, 64), "norm": (64,)}
CUTS = {"embedding": {"tp": 0}, "qkv": {"tp": 0}, "proj": {"tp": 1}, "norm": {}}


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ("tp=4,dp=2", "tp=2,dp=2"),
        ("tp=2,dp=4", "tp=8"),
        ("tp=2,dp=3", "tp=4,dp=4"),
        ("dp=5", "tp=2"),
    ],
)
def test_buckets_are_balanced_and_full(source, target):
    here = RankLayout(source)
    there = RankLayout(target, rank_offset=here.size)
    parameters = [
        (shape, torch.bfloat16, RankMapping(here, there, None, shards=CUTS[name]))
        for layer in range(12)
        for name, shape in MODEL.items()
        if layer == 0 or name != "embedding"
    ]
    sent, rooms = Counter(), Counter()
    for one in planned(parameters, 1 << 16):
        sent[one.source] += one.nbytes
        rooms[one.bucket, one.source] += one.room
        rooms[one.bucket, one.target] += one.room
    assert set(sent) == set(here.ranks)
    even = sum(sent.values()) / here.size
    assert all(abs(amount - even) < 0.03 * even for amount in sent.values())
    buckets = max(bucket for bucket, _ in rooms) + 1
    busiest = max(sum(rooms[bucket, rank] for bucket in range(buckets)) for rank in range(12))
    assert buckets <= 1.3 * busiest / (1 << 16) + 1  # buckets are full
