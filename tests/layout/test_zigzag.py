"""Causal context parallelism's order, chunks i and 2n-1-i of 2n on rank i, against numpy's."""

import math
from collections import Counter, defaultdict

import numpy as np
import pytest
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from hypercomm import RankLayout, RankMapping
from hypercomm.errors import LayoutError
from hypercomm.testing import layouts

DIMS = ("tp", "cp", "sp", "dp")
some = settings(max_examples=examples(300), deadline=None)


@st.composite
def cases(draw):
    """Draw two layouts and cuts of which some are in zigzag, on one axis or on two."""
    source, target = (
        draw(layouts(max_ranks=24, max_offset=9, max_size=3, dim_names=DIMS)) for _ in range(2)
    )
    dims = sorted({*source.dim_names, *target.dim_names} - {"dp"})
    chosen = draw(st.lists(st.sampled_from(dims), unique=True)) if dims else []
    cuts = {dim: draw(st.sampled_from([1, 2, ("zigzag", 1), ("zigzag", 2)])) for dim in chosen}
    sizes = {side.size_of("dp", default=1) for side in (source, target)}
    along = "dp" if max(sizes) % min(sizes) == 0 else None
    if along and not {"dp"} & {*source.dim_names, *target.dim_names}:
        along = None
    return RankMapping(
        source, target, along, shards=cuts, leaders=draw(st.booleans()) and along is None
    )


def order(length, dims, layout, coords):
    """The indices of an axis that a rank has, in its order; `dims` are outermost first."""
    indices = np.arange(length)
    for dim, is_zigzag in dims:
        size, at = layout.size_of(dim, default=1), coords.get(dim, 0)
        if is_zigzag:
            chunks = np.split(indices, 2 * size)
            indices = np.concatenate([chunks[at], chunks[2 * size - 1 - at]])
        else:
            indices = np.split(indices, size)[at]
    return indices


def shape_and_parts(mapping):
    """A shape that both ends can cut, and what each rank of both has of a whole tensor."""
    dims = defaultdict(list, {0: [(mapping.along, False)] if mapping.along else []})
    for dim, axis in mapping.shards:
        is_zigzag = isinstance(axis, tuple)
        dims[axis[1] if is_zigzag else axis].append((dim, is_zigzag))
    sides = mapping.source, mapping.target
    shape = [
        math.lcm(
            *(
                math.prod((1 + z) * side.size_of(dim, default=1) for dim, z in dims[axis])
                for side in sides
            )
        )
        for axis in range(3)
    ]
    whole = np.arange(math.prod(shape)).reshape(shape)
    parts = [
        {
            rank: whole[
                np.ix_(*(order(shape[a], dims[a], side, side.coords(rank)) for a in range(3)))
            ]
            for rank in side.ranks
        }
        for side in sides
    ]
    return whole, *parts


def check(mapping, whole, held, wanted):
    arrived = {rank: np.full(data.shape, -1) for rank, data in wanted.items()}
    sent = [message for rank in held for message in mapping.sends(rank)]
    for message in sent:
        piece = held[message.source][message.source_slices(held[message.source].shape)]
        there = arrived[message.target][message.target_slices(wanted[message.target].shape)]
        np.testing.assert_array_equal(whole[message.global_slices(whole.shape)], piece)
        assert (there == -1).all()
        there[...] = piece
    for rank, data in wanted.items():
        if not mapping.leaders or mapping.broadcast_siblings(rank)[0] == rank:
            np.testing.assert_array_equal(arrived[rank], data)
    received = [message for rank in wanted for message in mapping.receives(rank)]
    assert Counter(received) == Counter(sent)
    rows = [
        (int(row["source"]), int(row["target"]), row["start"].tolist(), row["stop"].tolist())
        for row in mapping.table()
    ]
    assert rows == sorted(rows)
    assert rows == sorted(
        (
            message.source,
            message.target,
            [part.start for part in message.parts],
            [part.stop for part in message.parts],
        )
        for message in sent
    )
    for rank, data in held.items():
        assert set(mapping.targets_of(rank)) == {m.target for m in mapping.sends(rank)}
        assert mapping.received_shape(data.shape) == next(iter(wanted.values())).shape


# Every element that a target rank wants arrives exactly once, where it has its place in that rank's
# order; there and back. What is sent, what is received and the table are one set of messages.
@some
@given(cases())
def test_every_element_arrives_once(mapping):
    whole, held, wanted = shape_and_parts(mapping)
    check(mapping, whole, held, wanted)
    check(mapping.inverse(), whole, wanted, held)
    assert mapping.inverse().inverse() == mapping


# Between a pair of ranks, messages stand in the same order on both.
@some
@given(cases())
def test_pairs_have_one_order(mapping):
    for rank in mapping.source_ranks:
        for target in mapping.targets_of(rank):
            assert [one for one in mapping.sends(rank) if one.target == target] == [
                one for one in mapping.receives(target) if one.source == rank
            ]


def test_by_hand():
    here, there = RankLayout.parse("cp=2"), RankLayout([2], ["sp"], 2)
    mapping = RankMapping(here, there, None, shards={"cp": "zigzag", "sp": 1})
    assert [(one.target, one.source_slices([3, 4])[1]) for one in mapping.sends(0)] == [
        (2, slice(0, 2)),
        (3, slice(2, 4)),
    ]
    assert [(one.source, one.target_slices([3, 4])[1]) for one in mapping.receives(3)] == [
        (0, slice(2, 4)),
        (1, slice(0, 2)),
    ]
    assert str(mapping) == "cp=2 at 0 -> sp=2 at 2: 2 -> 2 on axis 1 in zigzag"
    assert mapping.shards == (("cp", ("zigzag", 1)), ("sp", 1))
    assert RankMapping("cp=2", "cp=1", shards={"cp": "zigzag"}, batch_axis=1).cuts[0].axis == 0
    assert RankMapping("cp=1", "cp=1", None, shards={"cp": "zigzag"}).cuts == ()


@pytest.mark.parametrize(
    ("shards", "words"),
    [
        ({"cp": "zagzig"}, "'cp' in shards .*'zagzig'"),
        ({"cp": ("zigzag", "x")}, "'cp' in shards .*'x'"),
        ({"cp": ("zigzag", 0)}, "'cp' in shards .*axis 0 .*'zigzag', 1"),
    ],
)
def test_bad_shards(shards, words):
    with pytest.raises(LayoutError, match=words):
        RankMapping("cp=2,dp=2", "cp=2", shards=shards)


def test_a_length_that_cannot_be_cut():
    with pytest.raises(LayoutError, match=r"length 3, .*multiple of 2.* 2 and 4"):
        RankMapping("cp=2", "cp=1", None, shards={"cp": "zigzag"}).received_shape([1, 3])
