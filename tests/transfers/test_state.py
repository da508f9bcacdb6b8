"""Test transfers of states on real gloo processes."""

import contextlib
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from group_checks import restart_world
from time_limits import scaled_s

from hypercomm import RankLayout, RankMapping, transfer, transfer_state
from hypercomm.errors import CreationError, LayoutError, PlanMismatchError, StateTransferError
from hypercomm.testing import fake_world
from hypercomm.transfers import mover

SHARDS = {"*.qkv.weight": {"tp": 0}, "*.proj.weight": {"tp": 1}, "embedding": {"tp": 0}, "*": {}}


def whole_state(layers=3, hidden=24):
    """Return parameters that are equal on every rank. They include a scalar and an empty tensor."""
    generator = torch.Generator().manual_seed(3)

    def random(*shape, dtype=torch.float32):
        return torch.randn(shape, generator=generator).to(dtype)

    state = {"embedding": random(48, hidden), "steps": torch.tensor(7), "none": torch.zeros(0, 3)}
    for layer in range(layers):
        state[f"{layer}.qkv.weight"] = random(3 * hidden, hidden, dtype=torch.bfloat16)
        state[f"{layer}.proj.weight"] = random(hidden, 2 * hidden)
        state[f"{layer}.norm"] = random(hidden)
        state[f"{layer}.mask"] = random(5) > 0
    return state


def parts(whole, layout, rank):
    """Return torch's chunks of the full tensors for a rank, or None outside the layout."""
    if rank not in layout:
        return None
    size = layout.size_of("tp", default=1)
    at = layout.coords(rank).get("tp", 0)
    found = {}
    for name, tensor in whole.items():
        is_cut = name.endswith(("qkv.weight", "proj.weight", "embedding"))
        axis = 1 if name.endswith("proj.weight") else 0
        found[name] = (tensor.chunk(size, axis)[at] if is_cut else tensor).clone()
    return found


def small_move():
    """Return a function that transfers a state, the buffers, and a function that checks them."""
    rank = dist.get_rank()
    whole = whole_state()
    source, target = RankLayout("tp=2"), RankLayout([2], ["tp"], 2)
    mine = parts(whole, source, rank)
    wanted = parts(whole, target, rank) or {}
    into = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}

    def move(**more):
        mapping = RankMapping(source, target, along=None)
        return transfer_state(
            mapping, mine, into=into or None, shards=SHARDS, bucket_bytes=2048, **more
        )

    def missing():
        return [name for name in wanted if not torch.equal(into[name], wanted[name])]

    return move, into, missing


@contextlib.contextmanager
def at_post(number, act):
    """Call `act` with the sends of the bucket `number`, before the bucket is posted."""
    post = mover.post
    calls = []

    def acting(receives, sends, *more):
        calls.append(1)
        if len(calls) == number:
            act(sends)
        return post(receives, sends, *more)

    with mock.patch.object(mover, "post", acting):
        yield


# A bit that flips on the way is detected. All ranks raise, and the error names the parameter and
# the ranks. A transfer that continues from the bucket in the error completes.
@pytest.mark.ranks(4, timeout=120)
def test_flipped_bit_is_detected():
    move, into, missing = small_move()

    def flip(sends):
        if dist.get_rank() == 1:
            sends[0][1][5] ^= 4

    with at_post(3, flip), pytest.raises(StateTransferError) as caught:
        move(verify=True)
    assert caught.value.bucket == 2
    for part in (".weight' was damaged", "rank 1 and rank 3", "in bucket 2 of "):
        assert part in str(caught.value)
    for tensor in into.values():
        tensor.zero_()
    buckets = move(start=2, verify=True)
    assert not into or 0 < len(missing()) < len(into)  # the first two buckets are missing
    move(start=0, verify=True)
    assert missing() == []
    assert move(start=buckets, verify=True) == buckets


# If communication fails, the error names the bucket from which to continue. A transfer that
# continues there completes.
@pytest.mark.ranks(4, timeout=120)
def test_transfer_continues_from_a_bucket():
    move, into, missing = small_move()

    def fail(_sends):
        raise RuntimeError("the cable was pulled")

    with at_post(4, fail), pytest.raises(StateTransferError) as caught:
        move()
    for part in (f"rank {dist.get_rank()} lost bucket 2 of ", "the cable was pulled"):
        assert part in str(caught.value)
    assert caught.value.bucket == 2
    assert not into or len(missing()) > 5
    dist.barrier()  # from here on, continue as a restarted job would
    restart_world()
    move(start=caught.value.bucket)
    assert missing() == []


GOOD = {"b.weight": torch.ones(4, 2), "b.bias": torch.ones(4)}
CUT = {"b.weight": torch.ones(2, 2), "b.bias": torch.ones(4)}


# If one rank passes wrong arguments, or source and target disagree, all ranks raise before anything
# is sent. The next call works.
@pytest.mark.full
@pytest.mark.ranks(3, timeout=120)
def test_wrong_arguments_fail_all_ranks():
    rank = dist.get_rank()
    mapping = RankMapping("tp=1", RankLayout([2], ["tp"], 1), along=None)

    def move(state=GOOD, into=CUT, **more):
        """Transfer. A tuple in `more` has a value for the source and a value for the targets."""
        more = {"shards": {"*.weight": {"tp": 0}, "*": {}}, **more}
        at_end = {k: v[min(rank, 1)] if isinstance(v, tuple) else v for k, v in more.items()}
        ends = {"state": state} if rank == 0 else {"into": into}
        return transfer_state(mapping, **ends, **at_end)

    for parts_of_message, more in (
        (("'a.scale'", "'b.bias'"), {"into": {**CUT, "a.scale": torch.ones(1)}}),
        (
            ("'b.weight'", "'c.weight'"),
            {"into": {"b.bias": GOOD["b.bias"], "c.weight": torch.ones(1)}},
        ),
        (
            ("(4, 2) in state", "(4, 4) in into", "rank 0", "rank 1"),
            {"into": {**CUT, "b.weight": torch.ones(2, 4)}},
        ),
        (("float32", "float16"), {"into": {**CUT, "b.weight": torch.ones(2, 2).half()}}),
        (("(3, 2) in state", "(4, 2) in into"), {"state": {**GOOD, "b.weight": torch.ones(3, 2)}}),
        (("bucket 9", "bucket 0"), {"start": (9, 0)}),
        (("2097152", "1048576"), {"bucket_bytes": (1 << 21, 1 << 20)}),
        (("'lm_head' of shards= on rank 0",), {"shards": ({"*": {}, "lm_head": {}}, {"*": {}})}),
        (("fused= on rank 1 matches no",), {"fused": (None, {"*.qkv": ["*.q", "*.k"]})}),
    ):
        with pytest.raises(PlanMismatchError) as caught:
            move(**more)
        assert "nothing was sent" in str(caught.value)
        assert all(part in str(caught.value) for part in parts_of_message)
    for message, at_fault, more in (
        ("rank 0 must pass state=", 0, {"state": {}}),
        ("Linear(in_features=1, out", 0, {"state": torch.nn.Linear(1, 1)}),
        ("pass module.state_dict()", 0, {"state": torch.nn.Linear(1, 1)}),
        ("['b.weight']: the mapping splits", 0, {"state": {**GOOD, "b.weight": torch.ones(())}}),
        ("bucket_bytes must be at least 1024, got 0", 0, {"bucket_bytes": (0, 1 << 20)}),
        ("start must be at least 0, got -1", 0, {"start": (-1, 0)}),
        ("dtype must be a floating-point dtype", 0, {"dtype": (torch.int8, None)}),
    ):
        with pytest.raises(LayoutError if min(rank, 1) == at_fault else CreationError) as caught:
            move(**more)
        assert message in str(caught.value)
    with pytest.raises(LayoutError, match="start must be at most 1, got 9"):
        move(start=9)
    assert move() == 1


# On a rank in both layouts, buffers must not share memory with tensors that are sent. A parameter
# that does not move may be passed as its own buffer.
@pytest.mark.full
@pytest.mark.ranks(2, timeout=120)
def test_rank_in_both_layouts():
    rank = dist.get_rank()
    room = torch.empty(6)
    mine = {"a": torch.full((2,), float(rank)), "b": torch.arange(3.0)}
    room[:2] = mine["a"]
    mapping = RankMapping("tp=2", "tp=1,dp=2", along=None)
    shards = {"a": {"tp": 0}, "b": {}}
    near = {"a": room[1:5], "b": torch.zeros(3)}
    for message, state, into in (
        ("into['a'] shares memory with state['a'], which is sent", {**mine, "a": room[:2]}, near),
        ("into['a'] shares memory with state['a'], which is sent", {**mine, "a": room[3:5]}, near),
        ("rank 0 has 'b' in state=, which no rank has in into=", mine, {"a": torch.zeros(4)}),
        (
            "is (3,) in state= and (4,) in into=: rank 0 sends a part of shape (3,) (unsharded)",
            mine,
            {"a": torch.zeros(4), "b": torch.zeros(4)},
        ),
    ):
        with pytest.raises(LayoutError if into is near else PlanMismatchError) as caught:
            transfer_state(mapping, state, into=into, shards=shards)
        assert message in str(caught.value)
    into = {"a": torch.zeros(4), "b": mine["b"]}
    transfer_state(mapping, mine, into=into, shards=shards)
    assert into["a"].tolist() == [0, 0, 1, 1]
    assert into["b"].tolist() == [0, 1, 2]


# ---- one process --------------------------------------------------------------------------------

ALONE = RankMapping("tp=1", "tp=1", along=None)
ONE = torch.ones(2)


# Buffers whose elements share memory are rejected, because the result would depend on the order.
# Views whose elements interleave, and parts of one tensor, are accepted.
@pytest.mark.parametrize(
    ("message", "make"),
    [
        ("into['a'] shares memory with into['b']", lambda one: {"a": one[:3], "b": one[2:5]}),
        ("into['a'] shares memory with into['b']", lambda one: {"a": one[:6:2], "b": one[4:7]}),
        ("into['a'] is expanded", lambda one: {"a": one.as_strided((2, 2), (1, 1)), "b": one[6:]}),
        ("", lambda one: {"a": one[:6:2], "b": one[1:6:2]}),
        ("", lambda one: {"a": one[:3], "b": one[3:6]}),
        ("", lambda one: {"a": one.as_strided((2, 2), (3, 2)), "b": one[1:2]}),
    ],
)
def test_overlapping_buffers(message, make):
    into = make(torch.zeros(9))
    state = {name: torch.rand_like(one) for name, one in into.items()}
    with fake_world(1):
        if message:
            with pytest.raises(LayoutError) as caught:
                transfer_state(ALONE, state, into=into)
            assert message in str(caught.value)
        else:
            transfer_state(ALONE, state, into=into)
            assert all(torch.equal(into[name], state[name]) for name in state)


# A tensor of one element can have any stride. It can also be a part of a column.
@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.ranks(3)
def test_tensor_of_one_element(verify):
    rank = dist.get_rank()
    mapping = RankMapping("tp=1", RankLayout([2], ["tp"], 1), along=None)
    shards = {"column": {"tp": 0}, "*": {}}
    whole = {
        "one": torch.tensor([7.0, 8.0])[::2],
        "column": torch.arange(6.0).reshape(2, 3)[:, 1:2],
    }
    into = {"one": torch.zeros(2)[::2], "column": torch.zeros(1, 3)[:, 1:2]}
    state = whole if rank == 0 else None
    transfer_state(mapping, state, into=into, shards=shards, verify=verify)
    if rank:
        assert into["one"].item() == 7.0
        assert into["column"].item() == [1.0, 4.0][rank - 1]


# If Ctrl-C interrupts a rank before it has proposed anything, the other ranks raise within seconds.
@pytest.mark.ranks(3, timeout=60)
def test_early_interrupt_fails_all_ranks():
    rank = dist.get_rank()
    begin = time.monotonic()
    mapping = RankMapping("tp=1", RankLayout([2], ["tp"], 1), along=None)

    class Interrupting(dict):
        def __getitem__(self, name):
            raise KeyboardInterrupt

    into = Interrupting(w=torch.zeros(2)) if rank == 2 else {"w": torch.zeros(2)}
    state = {"w": torch.ones(2)} if rank == 0 else None
    with pytest.raises(KeyboardInterrupt if rank == 2 else CreationError) as caught:
        transfer_state(mapping, state, into=into)
    assert rank == 2 or "rank 2" in str(caught.value)
    assert time.monotonic() - begin < scaled_s(5)
    into = {"w": torch.zeros(2)}
    transfer_state(mapping, state, into=into)
    assert rank == 0 or into["w"].tolist() == [1, 1]


# The error about lost communication recommends rejoin() in a joined world. The error also names the
# lost message, its size, and the parameters that may be partly written.
def test_error_of_a_lost_message():
    parts = {"trainer": 1, "engine": 1}
    for world, advice in (
        ({}, "initialise torch.distributed again"),
        ({"parts": parts}, "rejoin()"),
    ):
        with fake_world(2, rank=1, **world) as joined:
            mapping = RankMapping("tp=1", RankLayout([1], ["tp"], 1), along=None)
            with (
                mock.patch.object(mover, "post", side_effect=RuntimeError("no link")),
                pytest.raises(StateTransferError) as caught,
            ):
                transfer_state(mapping, into={"w": torch.zeros(3)}, world=joined)
        sender = "trainer rank 0 of 1" if world else "rank 0"
        partly = "perhaps partly written: 'w'"
        for text in (advice, f"12 bytes of 'w' from {sender}", partly, "no link"):
            assert text in str(caught.value)


def to_the_next_rank(dim="x", **options):
    """Return a mapping of a state from rank 0 to rank 1."""
    layout = RankLayout([1], ["y"], 1)
    return RankMapping(RankLayout([1], [dim]), layout, along=None, **options)


# A receive that was started before the transfer gets its own message, and not a part of the state.
@pytest.mark.ranks(2)
def test_pending_receive_gets_its_own_message():
    into = {"w": torch.zeros(4)}
    activation = torch.zeros(4)
    if dist.get_rank() == 0:
        transfer_state(to_the_next_rank(), {"w": torch.full((4,), 7.0)})
        dist.send(torch.ones(4), dst=1)
    else:
        work = dist.irecv(activation, src=0)
        transfer_state(to_the_next_rank(), into=into)
        work.wait()
        assert (into["w"].tolist(), activation.tolist()) == ([7.0] * 4, [1.0] * 4)


# While a thread transfers a state, another thread cannot transfer one between the same ranks.
def test_two_threads_transfer_states():
    mapping = to_the_next_rank()
    errors = []

    class Reading(dict):
        def __getitem__(self, name):
            with pytest.raises(CreationError, match="another thread of this rank") as caught:
                transfer_state(to_the_next_rank("z"), {"w": torch.ones(2)})
            errors.append(caught.value)
            return super().__getitem__(name)

    with fake_world(2):
        transfer_state(mapping, Reading(w=torch.ones(2)))
        assert errors
        transfer_state(mapping, {"w": torch.ones(2)})  # a later transfer is not affected


# Threads may transfer states between different ranks, although the first ranks are the same.
def test_two_threads_with_different_ranks():
    source = RankLayout("tp=8")
    one, other = (RankMapping.weights(source, RankLayout([8], ["tp"], at)) for at in (8, 16))
    made = []

    class Reading(dict):
        def __getitem__(self, name):
            made.append(transfer_state(other, {"w": torch.ones(2)}, shards={"*": {}}))
            return super().__getitem__(name)

    with fake_world(24):
        transfer_state(one, Reading(w=torch.ones(2)), shards={"*": {}})
    assert made


# Tensors that were created in inference mode can be received into.
@pytest.mark.ranks(4)
def test_receivers_in_inference_mode():
    whole = torch.arange(16.0).view(4, 4)
    rank = dist.get_rank()
    apart = RankMapping("x=3", RankLayout([1], ["y"], 3), along=None, shards={"x": 1})
    shared = RankMapping("x=4", "y=2", along=None, shards={"x": 0, "y": 0})
    pieces = whole.tensor_split([2, 3], 1)
    with torch.inference_mode():
        full = {"w": torch.zeros(4, 4)}
        half = {"w": torch.zeros(2, 4)}
    state = None if rank == 3 else {"w": pieces[rank].contiguous()}
    transfer_state(apart, state, into=full if rank == 3 else None)
    assert rank != 3 or torch.equal(full["w"], whole)
    transfer_state(shared, {"w": whole.chunk(4)[rank]}, into=half if rank < 2 else None)
    assert rank >= 2 or torch.equal(half["w"], whole.chunk(2)[rank])
    with torch.inference_mode():
        row = torch.zeros(2, 4)
    transfer(RankMapping("dp=4", "dp=2"), whole.chunk(4)[rank], out=row if rank < 2 else None)
    assert rank >= 2 or torch.equal(row, whole.chunk(2)[rank])


# On a rank in neither layout, the call returns None.
def test_rank_in_neither_layout():
    away = RankMapping(RankLayout([1], ["tp"], 1), RankLayout([1], ["tp"], 2), along=None)
    with fake_world(3):
        assert transfer_state(away) is None
