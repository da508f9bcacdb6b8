"""Test transfers of tensors on real gloo processes. Numpy computes the expected parts."""

import contextlib
import itertools
import math
import time
from datetime import timedelta
from threading import Thread
from unittest import mock

import attrs
import numpy as np
import pytest
import torch
import torch.distributed as dist
from numpy_oracle import held, whole_of
from random_states import KINDS, pick
from time_limits import scaled_s

from hypercomm import GridSet, RankLayout, RankMapping, run_ranks, transfer
from hypercomm.errors import (
    CreationError,
    GroupOptionsError,
    LayoutError,
    NotInitializedError,
    PlanMismatchError,
)
from hypercomm.process_groups.world import current
from hypercomm.testing import fake_world
from hypercomm.transfers.exchange import Exchange, read_json

NAMES = (
    "bool uint8 uint16 uint32 uint64 int8 int16 float16 bfloat16 float64 complex64 complex128 "
    "float8_e4m3fn float8_e5m2"
)
DTYPES = [getattr(torch, name) for name in NAMES.split()]


def shards_of(mapping, borders, *, is_source):
    """Map each rank of a stage to the slices of its part. `borders` has those of each axis."""
    shape = whole_of(mapping).shape
    found = {}
    for rank, axes in held(mapping, shape, is_source=is_source).items():
        indices = [int(axis[0]) // len(axis) for axis in axes]
        pairs = zip(borders, indices, strict=True)
        found[rank] = tuple(slice(*ends[at : at + 2].tolist()) for ends, at in pairs)
    return found


def draw_borders(random, mapping, shape, *, is_even):
    """Draw the borders of the shards along each axis of a tensor, at the source and the target."""
    both = []
    for is_source in (True, False):
        axes = next(iter(held(mapping, whole_of(mapping).shape, is_source=is_source).values()))
        counts = [n // len(axis) for n, axis in zip(whole_of(mapping).shape, axes, strict=True)]
        both.append(
            [
                np.linspace(0, length, count + 1, dtype=int)
                if is_even
                else np.array([0, *np.sort(random.integers(0, length + 1, count - 1)), length])
                for length, count in zip(shape, counts, strict=True)
            ]
        )
    return both


def are_equal(one, other):
    """Return whether two tensors of any dtype are equal."""
    texts = [tensor.detach().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return one.shape == other.shape and torch.equal(*texts)


def deliver(random, mapping, groups, *, verify):
    """Transfer a tensor of any dtype. Return whether the part of this rank arrives."""
    rank = dist.get_rank()
    is_even = random.random() < 0.5
    shape = whole_of(mapping, times=2).shape if is_even else random.integers(0, 7, 3)
    dtype = pick(random, torch.int64, pick(random, *DTYPES))
    data = (torch.arange(math.prod(shape) * dtype.itemsize) % 251).to(torch.uint8)
    whole = data.view(dtype).reshape(*shape)
    borders = draw_borders(random, mapping, whole.shape, is_even=is_even)
    mine, due = (
        whole[shards[rank]].clone() if rank in shards else None
        for shards in (
            shards_of(mapping, some, is_source=end)
            for some, end in zip(borders, (True, False), strict=True)
        )
    )
    for target in mapping.target_ranks:  # every rank creates every group, in the same order
        siblings = mapping.broadcast_siblings(target)
        if mapping.leaders and len(siblings) > 1 and siblings not in groups:
            groups[siblings] = dist.new_group(list(siblings))
    is_member = mapping.leaders and due is not None
    group = groups.get(mapping.broadcast_siblings(rank)) if is_member else None
    kind = pick(random, *KINDS)
    buffer = None if due is None else kind(torch.zeros_like(due))
    if mine is None:
        got = transfer(mapping, buffer, group, verify=verify)
        return got is buffer and (due is None or are_equal(got, due))
    out = None if is_even else buffer
    got = transfer(mapping, kind(mine), group, out=out, verify=verify)
    if due is None:
        return got is None
    return are_equal(got, due) and (out is None or got is out)


def random_layout(random):
    """Return a layout of at most all ranks, at an offset or with a list of ranks."""
    world = dist.get_world_size()
    names = [str(name) for name in random.permutation(["tp", "cp", "dp", "pp"])]
    shape = [int(random.choice([1, 2, 2, 3, 4])) for _ in names]
    while math.prod(shape) > world:
        shape[int(random.integers(4))] = 1
    offset = int(random.integers(world - math.prod(shape) + 1))
    if random.random() < 0.4:  # any ranks, in any order
        return RankLayout(shape, names, ranks=random.permutation(world)[: math.prod(shape)])
    return RankLayout(shape, names, offset)


def random_mapping(random):
    """Return a mapping of two layouts that are equal, disjoint or overlapping."""
    while True:
        shards = {"cp": int(random.choice([1, -1]))}
        if random.random() < 0.3:
            shards["tp"] = 1
        along = None if random.random() < 0.2 else "dp"
        ends = random_layout(random), random_layout(random)
        with contextlib.suppress(LayoutError):
            return RankMapping(*ends, along, shards=shards, batch_axis=pick(random, 0, 0, -1))


def check_random_transfers(count):
    random = np.random.default_rng(count)
    groups = {}  # keep the groups, because torch may close a group while a member still connects
    for _ in range(count):
        drawn = random_mapping(random)
        for leaders, verify in itertools.product([False, True], repeat=2):
            mapping = attrs.evolve(drawn, leaders=leaders)
            for each in (mapping, mapping.inverse()):
                assert deliver(random, each, groups, verify=verify), each


# For any layouts, each rank receives the parts that numpy computes, in both directions, with and
# without leaders that broadcast, verified or not. Shards are even, or have any lengths, and tensors
# are of any kind. There is no barrier between two transfers.
@pytest.mark.ranks(4)
def test_parts_match_numpy():
    check_random_transfers(5)


@pytest.mark.full
@pytest.mark.parametrize("count", [20, pytest.param(80, marks=pytest.mark.slow)])
@pytest.mark.ranks(8, timeout=240)
def test_parts_match_numpy_on_more_ranks(count):
    check_random_transfers(count)


# Threads may gather blocks of one size for two purposes in different orders.
@pytest.mark.ranks(2)
def test_threads_gather_for_two_purposes():
    rank = dist.get_rank()
    mapping = RankMapping(lone(0), lone(1))
    found = {}

    def ask(purpose):
        exchange = Exchange(current(), mapping)
        blocks = exchange.gather(purpose, [purpose, rank], 512, torch.device("cpu"))
        found[purpose] = [read_json(blocks[other]) for other in (0, 1)]

    threads = [Thread(target=ask, args=[purpose]) for purpose in ("shapes", "plans")]
    for thread in threads if rank == 0 else threads[::-1]:
        thread.start()
        thread.join(0.5)  # the other thread begins while this one waits
    for thread in threads:
        thread.join()
    for purpose in ("shapes", "plans"):
        assert found[purpose] == [[purpose, 0], [purpose, 1]]


# If the arguments of one rank are rejected, all ranks raise, and nothing is sent. The next transfer
# works. test_wrong_calls.toml has the errors of one rank.
@pytest.mark.ranks(4)
def test_wrong_arguments_fail_all_ranks():
    rank = dist.get_rank()
    apart = RankMapping("dp=2", RankLayout([2], ["tp"], 2))
    led = attrs.evolve(apart, leaders=True)
    right = torch.arange(4.0).reshape(2, 2) if rank < 2 else torch.zeros(4, 2)
    for at, mapping, given, text in (
        (0, apart, [1.0], "tensor must be a torch.Tensor, got [1.0]"),
        (3, apart, None, "tensor must be a torch.Tensor, got None"),
        (2, led, right, "groups= must be the process group"),
    ):
        with pytest.raises(LayoutError if rank >= at else CreationError) as caught:
            transfer(mapping, given if rank >= at else right)
        assert text in str(caught.value)
        if rank < at:
            assert f"nothing was sent: rank {at} failed: LayoutError" in str(caught.value)
    got = transfer(apart, right)
    assert got is None if rank < 2 else got.tolist() == [[0, 1], [2, 3], [0, 1], [2, 3]]


# ---- rows ---------------------------------------------------------------------------------------


# The sources have 3 and 2 rows, and the buffer has 4, 5 or 6 rows. Five rows arrive in a buffer of
# 5 rows. Otherwise all ranks raise before anything is sent. The error names two ranks and both
# sizes. The next transfer works. If all ranks pass `rows=`, no shapes are exchanged.
@pytest.mark.ranks(3)
def test_rows_must_match():
    rank = dist.get_rank()
    mine = torch.full((3 - rank, 2), rank + 1.0)
    with GridSet.tile(encoder="dp=2", llm="dp=1") as grids:

        def move(length, **more):
            given = mine if rank < 2 else torch.full((length, 2), torch.nan)
            try:
                got = grids.transfer("encoder", "llm", given, **more)
            except PlanMismatchError as error:
                assert rank < 2 or given.isnan().all()
                return str(error)
            return rank < 2 or got[:, 0].tolist() == [1, 1, 1, 2, 2]

        for verify in (False, True):
            for rows in (4, 6, 5, 0, 5):
                found = move(rows, verify=verify)
                if rows == 5:
                    assert found is True
                    continue
                for part in ("nothing was sent", "rank 0 has (3, 2)", f"rank 2 has ({rows}, 2)"):
                    assert part in found
            with mock.patch.object(Exchange, "gather"):
                assert move(5, rows=[3, 2], verify=verify) is True
        with mock.patch.object(Exchange, "gather"):
            whole = torch.tensor([1.0, 1, 1, 2, 2]).view(5, 1).expand(5, 2)
            back = grids.transfer("llm", "encoder", mine if rank < 2 else whole, rows=[3, 2])
        assert back is None if rank == 2 else (back == rank + 1).all()


# ---- verify -------------------------------------------------------------------------------------


def lone(rank):
    """Return a layout of one rank."""
    return RankLayout([1], ["dp"], rank)


# With `verify=True`, all ranks raise if their arguments differ or if one rank passes wrong
# arguments. Nothing is sent, and the next transfer works.
@pytest.mark.ranks(3)
def test_verify_finds_differences():
    rank = dist.get_rank()
    two = RankLayout([2], ["dp"], 1)
    mapping, other = RankMapping(lone(0), two), RankMapping(lone(0), two, batch_axis=1)
    led = RankMapping(lone(0), RankLayout([2], ["tp"], 1), leaders=True)
    pair = dist.new_group([1, 2])
    whole = torch.arange(4.0).reshape(2, 2)
    given = whole if rank == 0 else torch.zeros(1, 2)

    def differs(mapping, tensor, *parts, groups=None, error=PlanMismatchError):
        with pytest.raises(error) as caught:
            transfer(mapping, tensor, groups, verify=True)
        assert all(part in str(caught.value) for part in ("nothing was sent", *parts))

    odd = torch.zeros(1, 2, dtype=torch.int32) if rank == 1 else given
    differs(mapping, odd, "(2, 2) of torch.float32", "(1, 2) of torch.int32")
    odd = torch.zeros(1, 3) if rank == 1 else given
    differs(mapping, odd, "(1, 3) on rank 1", "(1, 2) on rank 2")
    square = [whole, torch.zeros(1, 2), torch.zeros(2, 1)][rank]
    differs(other if rank == 2 else mapping, square, "ranks differ")
    led_given = [whole, torch.zeros(2, 2), torch.zeros(2, 3)][rank]
    differs(led, led_given, "(2, 2) on rank 1", "(2, 3) on rank 2", groups=pair)
    if rank == 2:
        with pytest.raises(LayoutError, match=r"tensor must be a torch\.Tensor, got None"):
            transfer(mapping, None, verify=True)
    else:
        differs(mapping, given, "rank 2 (host ", "must be a torch.Tensor", error=CreationError)
    got = transfer(mapping, given, verify=True)
    assert got is None if rank == 0 else got.tolist() == [whole[rank - 1].tolist()]


# Ranks that expect different mappings raise immediately. Ranks that wait for each other in
# different transfers raise within a second. In both cases, all ranks complete the next transfer.
@pytest.mark.full
@pytest.mark.ranks(3)
def test_verify_finds_different_mappings():
    rank = dist.get_rank()
    right, wrong = RankLayout([2], ["tp"]), RankLayout([2], ["tp"], ranks=[1, 0])

    def move(source, target):
        got = transfer(RankMapping(source, target), torch.full((2,), 5.0 + rank), verify=True)
        return None if got is None else got.tolist()

    begin = time.monotonic()
    with pytest.raises(PlanMismatchError) as caught:
        move(wrong if rank == 2 else right, lone(2))
    for part in ("tp=2 at 0 -> dp=1 at 2", "tp=2 on ranks 1, 0 -> dp=1 at 2"):
        assert part in str(caught.value)
    assert move(right, lone(2)) == ([5, 5] if rank == 2 else None)
    circle = [(0, 2), (1, 0), (2, 1)]
    with pytest.raises(PlanMismatchError) as caught:
        move(*map(lone, circle[rank]))
    for source, target in circle:
        assert f"dp=1 at {source} -> dp=1 at {target}: " in str(caught.value)
    assert move(lone(0), RankLayout([2], ["tp"], 1)) == ([5, 5] if rank else None)
    assert move(lone(1), lone(2)) == ([6, 6] if rank == 2 else None)
    assert time.monotonic() - begin < 30  # the timeout of WORLD is half an hour


# ---- one process --------------------------------------------------------------------------------


# By default HYPERCOMM_VERIFY decides whether transfers are verified. Invalid values are rejected.
def test_default_of_verify(monkeypatch):
    mapping = RankMapping("dp=1", "dp=1")
    asked = []
    monkeypatch.setattr(Exchange, "agree", lambda *_, **__: asked.append(1))
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
        with pytest.raises(GroupOptionsError, match="HYPERCOMM_VERIFY"):
            transfer(mapping, torch.zeros(1))


# A single rank sends nothing and returns a new tensor. Without a job, or without a mapping, it
# raises.
def test_transfer_on_one_rank():
    mapping = RankMapping("dp=1", "dp=1")
    tensor = torch.arange(3)
    with pytest.raises(NotInitializedError):
        transfer(mapping, tensor)
    with fake_world(1):
        got = transfer(mapping, tensor)
        with pytest.raises(LayoutError, match="mapping must be a RankMapping, got 'dp=1'"):
            transfer("dp=1", tensor)
    assert got.tolist() == [0, 1, 2]
    assert got.data_ptr() != tensor.data_ptr()


def wait_for_late_ranks():
    """Return how long a transfer without rank 4 takes on this rank, in seconds."""
    rank = dist.get_rank()
    dist.barrier()
    if rank == 4:
        time.sleep(18)
        return 0.0
    time.sleep({1: 3.4, 2: 6.4, 3: 6.4}.get(rank, 0.0))
    begin = time.monotonic()
    with pytest.raises(RuntimeError):
        transfer(RankMapping("dp=8", "tp=8"), torch.ones(1))
    return time.monotonic() - begin


# Without `verify`, every rank raises within the timeout plus two seconds if a rank is missing and
# others are late, although a rank waits for several messages, one after the other.
@pytest.mark.full
def test_late_ranks_and_a_missing_rank():
    waits = run_ranks(wait_for_late_ranks, 8, timeout=90, group_timeout=timedelta(seconds=4))
    assert max(waits) < 4 + scaled_s(2), waits
