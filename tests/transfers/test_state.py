"""Test faults, checks and threads in transfers of states. Random states check what arrives."""

import contextlib
import re
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from group_checks import restart_world
from time_limits import scaled_s

from hypercomm import RankLayout, RankMapping, transfer_state
from hypercomm.errors import CreationError, LayoutError, PlanMismatchError, StateTransferError
from hypercomm.testing import fake_world
from hypercomm.transfers import mover, state as module
from hypercomm.transfers.exchange import Exchange

HALVES = RankMapping.weights("tp=2", RankLayout([2], ["tp"], 2), {"tp": 0})
"""The mapping of parameters from ranks 0 and 1 to ranks 2 and 3. Each rank has a half."""


def small_move(count=6):
    """Return a function that transfers a state, and a function that lists what has not arrived."""
    rank = dist.get_rank()
    wholes = {f"{number}.weight": torch.arange(400.0) + number for number in range(count)}
    parts = {name: whole.chunk(2)[rank % 2] for name, whole in wholes.items()}
    into = {name: torch.zeros(200) for name in parts}

    def move(**more):
        ends = {"state": parts} if rank < 2 else {"into": into}
        return transfer_state(HALVES, **ends, bucket_bytes=2048, **more)

    def missing():
        return [name for name in parts if rank > 1 and not torch.equal(into[name], parts[name])]

    return move, missing


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
# the ranks. A transfer that continues from the bucket in the error completes. If communication
# fails, the error names the bucket from which to continue.
@pytest.mark.ranks(4, timeout=120)
def test_transfer_continues_from_a_bucket():
    move, missing = small_move()

    def flip(sends):
        if dist.get_rank() == 1:
            sends[0][1][5] ^= 4

    def fail(_sends):
        raise RuntimeError("the cable was pulled")

    with at_post(3, flip), pytest.raises(StateTransferError) as caught:
        move(verify=True)
    assert caught.value.bucket == 2
    for part in (".weight' was damaged", "rank 1 and rank 3", "in bucket 2 of "):
        assert part in str(caught.value)
    buckets = move(start=2, verify=True)
    assert missing() == []
    assert move(start=buckets, verify=True) == buckets

    move, missing = small_move(7)
    with at_post(4, fail), pytest.raises(StateTransferError) as caught:
        move()
    for part in (f"rank {dist.get_rank()} lost bucket 2 of ", "the cable was pulled"):
        assert part in str(caught.value)
    assert caught.value.bucket == 2
    is_target = dist.get_rank() > 1
    assert is_target == bool(missing())
    dist.barrier()  # from here on, continue as a restarted job would
    restart_world()
    move(start=2)
    assert missing() == []
    move, missing = small_move(7)
    move(start=2)
    assert not is_target or 0 < len(missing()) < 7  # the first two buckets are missing


# If the arguments of a rank are wrong, or ranks differ, all ranks raise within seconds, before
# anything is sent. The next transfer works. test_wrong_calls.toml has the errors of one rank.
@pytest.mark.ranks(4, timeout=120)
def test_misfits_fail_all_ranks():
    rank = dist.get_rank()
    rows = torch.arange(30.0).reshape(10, 3)

    def move(**wrong):
        into = {"w": torch.full((5, 3), -1.0)}
        given = {"state": {"w": rows.chunk(2)[rank]}} if rank < 2 else {"into": into}
        transfer_state(HALVES, **{**given, **wrong})
        return into["w"]

    odd = torch.full((5, 4), -1.0)
    for text, at, wrong in (
        ("into['w'] has shape (5, 3) on rank 2 and (5, 4) on rank 3", 3, {"into": {"w": odd}}),
        ("float32 of shape (5, 3) (unsharded) on rank 1", 1, {"shards": {"*": {}}}),
        (
            "shard 1 of 2 along axis 0 of state['w'] is on no rank; ranks 0",
            1,
            {"state": {"v": odd}},
        ),
        ("bucket 9", 3, {"start": 9}),
        ("buckets of 2097152 bytes", 2, {"bucket_bytes": 1 << 21}),
        ("dtype=torch.float16", 1, {"dtype": torch.float16}),
        ("'head' of shards= on rank 0 mat", 0, {"shards": {"*": {"tp": 0}, "head": {}}}),
        ("into['w'] must be a torch.Tensor, got 3", 3, {"into": {"w": 3}}),
        ("start must be at least 0, got -1", 0, {"start": -1}),
    ):
        begin = time.monotonic()
        is_local = " must be " in text
        error = PlanMismatchError
        if is_local:
            error = LayoutError if rank == at else CreationError
        with pytest.raises(error, match=re.escape(text)) as caught:
            move(**(wrong if rank == at else {}))
        assert (is_local and rank == at) or "nothing was sent" in str(caught.value)
        assert time.monotonic() - begin < scaled_s(5)
        assert (odd == -1).all()
    assert torch.equal(move(), rows.chunk(2)[rank % 2]) or rank < 2


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


# With `verify`, source ranks compare the checksums of parameters that they have in common. Experts
# with local numbers have equal names on both ranks, although they are different parameters.
@pytest.mark.ranks(3)
def test_verify_compares_replicas():
    rank = dist.get_rank()
    mapping = RankMapping.weights(RankLayout("ep=2"), RankLayout([1], ["tp"], 2))
    words = torch.arange(40.0)
    router = words if rank == 0 else words.flip(0).clone()  # the same numbers in another order
    same = {"experts.0": torch.ones(2), "router": words, "none": torch.zeros(0, 3)}
    for wrong, parts in (
        ({}, ()),
        ({"experts.0": torch.full((2,), float(rank))}, ("'experts.0'", "ranks 0 ", "ranks 1;")),
        ({"router": router}, ("'router' in state=",)),
        ({}, ()),
    ):
        into = {name: torch.zeros_like(one) for name, one in same.items()}
        given = {"into": into} if rank == 2 else {"state": {**same, **wrong}}
        if not wrong:
            transfer_state(mapping, **given, verify=True)
            assert rank < 2 or all(torch.equal(into[name], one) for name, one in same.items())
            continue
        with pytest.raises(PlanMismatchError) as caught:
            transfer_state(mapping, **given, verify=True)
        assert all(part in str(caught.value) for part in ("nothing was sent", *parts))
        assert not any(one.any() for one in into.values())


# A second transfer with the same names, shapes and mapping makes no plan, and needs only one
# agreement. If one rank has lost its plan, or passes other shapes, all ranks plan again.
@pytest.mark.ranks(3)
def test_plan_is_cached():
    rank = dist.get_rank()
    mapping = RankMapping.weights("tp=2", RankLayout([1], ["dp"], 2))

    def move(rows, number):
        """Transfer `rows` rows. The first rank has four rows, and the second has the rest."""
        whole = torch.arange(float(rows)) + number
        into = {"w": torch.zeros(rows)}
        given = {"into": into} if rank == 2 else {"state": {"w": [whole[:4], whole[4:]][rank]}}
        with (
            mock.patch.object(module, "plan_of", wraps=module.plan_of) as plan,
            mock.patch.object(
                Exchange, "agree", autospec=True, side_effect=Exchange.agree
            ) as agree,
        ):
            transfer_state(mapping, **given, shards={"w": {"tp": 0}})
        assert rank < 2 or torch.equal(into["w"], whole)
        return plan.call_count, agree.call_count

    assert move(8, 0) == (1, 2)
    assert move(8, 1) == (0, 1)
    if rank == 1:
        module._plans.clear()
    assert move(8, 2) == (1, 2)
    assert move(7, 3) == (1, 2)  # the first rank passes the same shapes as before
    assert move(7, 4) == (0, 1)
    assert move(8, 5) == (1, 2)


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


# ---- one process --------------------------------------------------------------------------------

ALONE = RankMapping("tp=1", "tp=1", along=None)


# Buffers whose elements share memory are rejected, because the result would depend on the order.
# Views whose elements interleave, and parts of one tensor, are accepted. A parameter that does not
# move may be its own buffer, also if it has two names.
@pytest.mark.parametrize(
    ("message", "make"),
    [
        ("into['a'] shares memory with into['b']", lambda one: {"a": one[:3], "b": one[2:5]}),
        ("into['a'] shares memory with into['b']", lambda one: {"a": one[:6:2], "b": one[4:7]}),
        ("into['a'] shares memory with into['b']", lambda one: {"a": one[::2], "b": one[8:]}),
        ("into['a'] shares memory with state['b']", lambda one: {"a": one[:4], "state": one[3:]}),
        ("into['b'] shares memory with state['b']", lambda one: {"b": one[:4], "state": one[1:5]}),
        ("into['a'] is expanded", lambda one: {"a": one.as_strided((2, 2), (1, 1)), "b": one[6:]}),
        ("", lambda one: {"a": one[:6:2], "b": one[1:6:2]}),
        ("", lambda one: {"a": one[:3], "b": one[3:6]}),
        ("", lambda one: {"a": one.as_strided((2, 2), (3, 2)), "b": one[1:2]}),
        ("", lambda one: {"a": one[:3], "b": one[3:6], "state": one[3:6]}),
        ("", lambda one: {"b": one[:3], "c": one[:3], "state": one[:3]}),
    ],
)
def test_overlapping_buffers(message, make):
    into = make(torch.zeros(9))
    shared = into.pop("state", None)
    state = {name: torch.rand_like(one) for name, one in into.items()}
    if shared is not None:
        state |= {name: shared for name in ("b", "c") if name in into}
        state.setdefault("b", shared)
        into.setdefault("b", torch.zeros(shared.shape))
    with fake_world(1):
        if message:
            with pytest.raises(LayoutError) as caught:
                transfer_state(ALONE, state, into=into)
            assert message in str(caught.value)
        else:
            transfer_state(ALONE, state, into=into)
            assert all(torch.equal(into[name], state[name]) for name in state)


# The error about lost communication recommends rejoin() in a joined world. The error also names the
# lost message, its size, and the parameters that may be partly written.
def test_error_of_a_lost_message():
    parts = {"trainer": 1, "engine": 1}
    for world, advice in (
        ({}, "initialise torch.distributed again"),
        ({"parts": parts}, "rejoin()"),
    ):
        with (
            fake_world(2, rank=1, **world) as joined,
            mock.patch.object(mover, "post", side_effect=RuntimeError("no link")),
            pytest.raises(StateTransferError) as caught,
        ):
            transfer_state(to_the_next_rank(), into={"w": torch.zeros(3)}, world=joined)
        sender = "trainer rank 0 of 1" if world else "rank 0"
        partly = "perhaps partly written: 'w'"
        for text in (advice, f"12 bytes of 'w' from {sender}", partly, "no link"):
            assert text in str(caught.value)


def to_the_next_rank(dim="x"):
    """Return a mapping of a state from rank 0 to rank 1."""
    return RankMapping(RankLayout([1], [dim]), RankLayout([1], ["y"], 1), along=None)


# While a thread transfers a state, another thread cannot transfer one between the same ranks. It
# can transfer one between other ranks, although the first ranks are the same.
def test_two_threads_transfer_states():
    state = {"w": torch.ones(2)}
    other = RankMapping(RankLayout([1], ["x"]), RankLayout([2], ["y"], 1), along=None)
    made = []

    class Reading(dict):
        def __getitem__(self, name):
            with pytest.raises(CreationError, match="another thread of this rank"):
                transfer_state(to_the_next_rank("z"), state)
            made.append(transfer_state(other, state))
            return super().__getitem__(name)

    with fake_world(3):
        transfer_state(to_the_next_rank(), Reading(state))
        assert made
        transfer_state(to_the_next_rank(), state)  # a later transfer is not affected
        assert transfer_state(RankMapping.weights(*[RankLayout([1], ["x"], 1)] * 2)) is None


# In a fake world no data arrives, so there is nothing to verify.
def test_verify_in_a_fake_world():
    mapping = RankMapping.weights(RankLayout("tp=2"), RankLayout("tp=2", rank_offset=2))
    memory = [torch.full((4096,), 7.0) for _ in range(20)]
    del memory  # what the buffers of the transfer may contain
    with fake_world(4, rank=2):
        for _ in range(20):
            received = {"w": torch.zeros(8, 8)}
            transfer_state(mapping, None, into=received, shards={"w": {"tp": 0}}, verify=True)
