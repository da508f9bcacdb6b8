"""Test the mapping of ranks from one layout to another against numpy."""

import pickle
from collections import Counter, defaultdict
from types import SimpleNamespace

import attrs
import numpy as np
import pytest
from drawn_layouts import layouts_with_tables
from example_counts import examples
from hypothesis import HealthCheck, assume, given, settings, strategies as st
from numpy_oracle import cuts_of, held, whole_of

from hypercomm import RankLayout, RankMapping
from hypercomm.errors import LayoutError, RankOutsideError

DIMS = ("tp", "cp", "dp", "pp")
many = settings(
    max_examples=examples(2000),
    suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow],
)


@st.composite
def cases(draw):
    """Draw a mapping with dims in any order. Several dims may split one axis."""
    sides = [draw(layouts_with_tables(max_ranks=32, max_size=3, dim_names=DIMS)) for _ in range(2)]
    source, target = (layout for layout, _ in sides)
    along = draw(st.sampled_from(["dp", "dp", "dp", "tp", None]))
    pipeline = draw(st.sampled_from(["pp", "pp", None]))
    known = {*source.dim_names, *target.dim_names}
    free = sorted(known - {along, pipeline})
    chosen = draw(st.lists(st.sampled_from(free), unique=True)) if free else []
    shards = {dim: draw(st.sampled_from([0, 1, -1])) for dim in chosen}
    if along is not None:
        before, after = (side.size_of(along, default=1) for side in (source, target))
        assume(max(before, after) % min(before, after) == 0)
        assume(along in known)
    leaders = draw(st.sampled_from([False, False, True]))
    options = {"shards": shards, "pipeline": pipeline, "leaders": leaders}
    return RankMapping(source, target, along, **options)


def both_ends(mapping):
    """Return numpy's parts of the full tensor for the source ranks and for the target ranks."""
    shape = whole_of(mapping).shape
    return [held(mapping, shape, is_source=is_source) for is_source in (True, False)]


def same(owned, rank):
    """Return the ranks that have the same part as a rank."""
    mine = [axis.tolist() for axis in owned[rank]]
    return [other for other in owned if [axis.tolist() for axis in owned[other]] == mine]


def check_delivery(mapping, shape):
    """Carry out all messages with numpy. Each element must arrive exactly once."""
    whole = np.arange(np.prod(shape)).reshape(shape)
    local, expected = (
        {rank: whole[np.ix_(*axes)] for rank, axes in held(mapping, shape, is_source=end).items()}
        for end in (True, False)
    )
    assert mapping.source_ranks == tuple(local)
    assert mapping.target_ranks == tuple(expected)
    arrived = {rank: np.full(data.shape, -1) for rank, data in expected.items()}
    sent = [message for rank in local for message in mapping.sends(rank)]
    received = [message for rank in expected for message in mapping.receives(rank)]
    assert Counter(sent) == Counter(received)
    for message in sent:
        piece = local[message.source][message.source_slices(local[message.source].shape)]
        there = arrived[message.target][message.target_slices(expected[message.target].shape)]
        assert (there == -1).all()
        there[...] = piece
        np.testing.assert_array_equal(whole[message.global_slices(shape)], piece)
    for rank, data in expected.items():
        assert mapping.shape_at(rank, shape, is_source=False) == data.shape
        is_idle = mapping.leaders and mapping.broadcast_siblings(rank)[0] != rank
        np.testing.assert_array_equal(arrived[rank], np.full_like(data, -1) if is_idle else data)
    for rank, data in local.items():
        assert mapping.shape_at(rank, shape, is_source=True) == data.shape


def served(mapping):
    """Compare every pair of ranks, and return the pairs (source, target) that have a message.

    A rank that already has its part serves itself. If n ranks need a part that R ranks have, rank k
    of the n ranks receives the part from rank k * R // n of the R ranks.
    """
    owned, wanted = both_ends(mapping)
    leaders = mapping.leaders
    pairs = set()
    order = sorted(range(3), key=[*cuts_of(mapping), *range(3)].index)
    for rank, cell in owned.items():
        holders = same(owned, rank)[:1] if leaders else same(owned, rank)
        if rank != holders[0]:
            continue
        touching = [
            other
            for other, axes in wanted.items()
            if all(
                {*here.tolist()} & {*there.tolist()} for here, there in zip(cell, axes, strict=True)
            )
            and (not leaders or same(wanted, other)[0] == other)
        ]
        touching.sort(key=lambda other: [wanted[other][axis][0] for axis in order])
        for k, other in enumerate(touching):
            sender = other if other in holders else holders[k * len(holders) // len(touching)]
            pairs.add((sender, other))
    return pairs


# ---- laws ---------------------------------------------------------------------------------------


# Every element that a target rank needs arrives exactly once, in both directions. With of_shape(),
# the tensor may have any shape, and the last shards may be shorter or empty.
@many
@given(cases(), st.tuples(st.integers(0, 12), st.integers(0, 12), st.integers(0, 12)))
def test_every_element_arrives_once(mapping, shape):
    for each in (mapping, mapping.inverse()):
        check_delivery(each, whole_of(each).shape)
        exact = each.of_shape(shape)
        check_delivery(exact, shape)
        assert exact.inverse() == each.inverse().of_shape(shape)
        assert each.shape_at(each.source_ranks[-1], shape, is_source=True) == exact.shape_at(
            each.source_ranks[-1], shape, is_source=True
        )


# sends(), receives() and table() return the same messages, and the table is sorted. A rank that
# already has its part receives it from itself. The ranks that have a part serve the other ranks
# evenly. The expected messages are computed by comparing every pair of ranks.
@many
@given(cases())
def test_messages_match_all_pairs(mapping):
    sent = {rank: mapping.sends(rank) for rank in mapping.source.ranks}
    received = {rank: mapping.receives(rank) for rank in mapping.target.ranks}
    every = [message for messages in sent.values() for message in messages]
    assert Counter(every) == Counter(message for some in received.values() for message in some)
    rows = [(row[0], row[1], *map(list, row.tolist()[2:])) for row in mapping.table()]
    assert rows == sorted(
        (m.source, m.target, [p.start for p in m.parts], [p.stop for p in m.parts]) for m in every
    )
    assert {(row[0], row[1]) for row in rows} == served(mapping)
    wanted = both_ends(mapping)[1]
    for rank in wanted:
        assert mapping.broadcast_siblings(rank) == tuple(same(wanted, rank))
    for rank, messages in sent.items():
        assert mapping.targets_of(rank) == tuple(sorted({one.target for one in messages}))
    for rank, messages in received.items():
        assert mapping.sources_of(rank) == tuple(sorted({one.source for one in messages}))


# A mapping is compared, hashed and pickled by value.
@settings(many, max_examples=examples(300))
@given(cases())
def test_mapping_is_a_value(mapping):
    assert mapping.inverse().inverse() == mapping
    for one in (mapping, mapping.inverse()):
        for again in (pickle.loads(pickle.dumps(one)), attrs.evolve(one, shards=one.shards)):
            assert again == one
            assert hash(again) == hash(one)
            assert again.leaders == one.leaders
            assert again.source_ranks == one.source_ranks
            np.testing.assert_array_equal(again.table(), one.table())
    if mapping.source_ranks != mapping.inverse().source_ranks:
        assert mapping != mapping.inverse()


# ---- examples -----------------------------------------------------------------------------------


# A rank outside the stage sends and receives nothing. A rank in neither layout raises.
def test_ranks_outside_the_stage():
    mapping = RankMapping("tp=2,pp=2", RankLayout([2, 2], ["tp", "pp"], 4), None)
    assert mapping.sends(0) == mapping.targets_of(1) == ()
    assert mapping.receives(6) == mapping.broadcast_siblings(7) == ()
    for query, rank in [(mapping.sends, 4), (mapping.receives, 3), (mapping.sources_of, 3)]:
        with pytest.raises(RankOutsideError, match=f"rank {rank} .*tp=2,pp=2"):
            query(rank)


# By default, cp splits the sequence, which is the axis other than the batch axis.
def test_cp_cuts_the_sequence_by_default():
    cp, dp = RankLayout("cp=2"), RankLayout("dp=2")
    assert RankMapping(cp, dp).shards == (("cp", 1),)
    assert RankMapping(cp, dp, batch_axis=1).shards == (("cp", 0),)
    assert RankMapping(cp, dp, shards={}).shards == ()
    assert RankMapping(dp, dp).shards == ()
    assert RankMapping(cp, dp, "cp").shards == ()
    assert RankMapping(cp, dp, None).shards == ()


# A dim of size 1 in both layouts splits no axis, so layouts with cp=1 accept any tensor.
def test_dims_of_size_1_cut_nothing():
    mapping = RankMapping("tp=2,cp=1,dp=2", RankLayout("tp=2,cp=1,dp=2", rank_offset=4))
    assert mapping.shape_at(4, [8], is_source=False) == (4,)
    whole = RankMapping("tp=2,dp=1", "tp=2,dp=1", batch_axis=5)
    assert whole.cuts == ()
    assert whole.shape_at(0, [], is_source=False) == ()
    assert whole.table()["start"].shape == (2, 0)


# A mapping with exact lengths accepts only tensors of these lengths. `sizes` must match the shards.
def test_mapping_of_exact_lengths():
    mapping = RankMapping.weights("fsdp=4", "tp=2", {"fsdp": 0, "tp": 0}).of_shape([10, 2])
    message = mapping.receives(1)[0]
    assert message.source_slices([3, 2])[0] == slice(2, 3)
    for wrong in ([6, 2], [0, 2]):
        with pytest.raises(LayoutError, match=rf"length {wrong[0]}, but the mapping requires 3"):
            message.source_slices(wrong)
    with pytest.raises(LayoutError, match="sizes= must contain"):
        attrs.evolve(mapping, sizes=[((5, 5), (5, 5))])
    with pytest.raises(RankOutsideError):
        mapping.shape_at(2, [10, 2], is_source=False)


# The text shows the sizes, the first ranks, the change of each axis, and the dims that replicate.
def test_text_of_a_mapping():
    mapping = RankMapping("tp=2,dp=4", RankLayout("tp=4,dp=2", rank_offset=8))
    for part in ("tp=2,dp=4 at 0", "tp=4,dp=2 at 8", "fan-in 4 -> 2 along dp", "tp replicates"):
        assert part in f"{mapping!r}"
    assert "backward" in str(mapping.inverse())
    assert "leaders only" in str(attrs.evolve(mapping, leaders=True))
    cp = RankMapping("dp=2", "cp=2,dp=2")
    assert "1 -> 2 on axis 1" in str(cp)
    assert [mapping.kind, mapping.inverse().kind, cp.kind] == ["fan-in", "fan-out", "equal"]


# ---- Megatron's bridge as the oracle ------------------------------------------------------------


# With leaders, the messages match Megatron's bridge, for every pair of dp sizes.
@pytest.mark.parametrize("before", [1, 2, 3, 4, 6])
@pytest.mark.parametrize("after", [1, 2, 3, 4, 6])
def test_leaders_match_megatron(before, after):
    from megatron_oracle import bridge_communicator

    source = RankLayout([2, 1, before, 2], DIMS)
    target = RankLayout([3, 1, after, 3], DIMS, source.size)
    bridge = object.__new__(bridge_communicator.BridgeCommunicator)
    bridge.comm_map = defaultdict(lambda: SimpleNamespace(send_to_ranks=[], recv_from_ranks=[]))
    bridge.src_grid, bridge.dest_grid = source, target
    senders = [source.rank(tp=0, cp=0, dp=dp, pp=1) for dp in range(before)]
    receivers = [target.rank(tp=0, cp=0, dp=dp, pp=0) for dp in range(after)]
    if before % after and after % before:
        with pytest.raises(ValueError, match="must be evenly divisible"):
            bridge.build_comm_map(senders, receivers)
        with pytest.raises(ValueError, match="multiple of the other"):
            RankMapping(source, target)
        return
    bridge.build_comm_map(senders, receivers)
    mapping = RankMapping(source, target, leaders=True)
    for rank in source.ranks:
        assert list(mapping.targets_of(rank)) == list(bridge.comm_map[rank].send_to_ranks)
    for rank in target.ranks:
        assert list(mapping.sources_of(rank)) == list(bridge.comm_map[rank].recv_from_ranks)
