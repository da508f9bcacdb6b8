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
from time_limits import scaled_s
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hypercomm import GridSet, RankLayout, RankMapping, run_ranks, transfer
from hypercomm.errors import (
    CreationError,
    GroupOptionsError,
    LayoutError,
    NotInitializedError,
    PlanMismatchError,
    WorldSizeError,
)
from hypercomm.process_groups.world import current
from hypercomm.testing import fake_world
from hypercomm.transfers.exchange import Exchange, read_json

WORLD = 8


def deliver(mapping, groups, *, verify):
    """Transfer a tensor of distinct elements. Return whether the parts match numpy's."""
    rank = dist.get_rank()
    whole = whole_of(mapping, times=2)
    mine, due = (
        torch.from_numpy(whole[np.ix_(*axes[rank])]) if rank in axes else None
        for axes in (held(mapping, whole.shape, is_source=end) for end in (True, False))
    )
    for target in mapping.target_ranks:  # every rank creates every group, in the same order
        siblings = mapping.broadcast_siblings(target)
        if mapping.leaders and len(siblings) > 1 and siblings not in groups:
            groups[siblings] = dist.new_group(list(siblings))
    is_member = mapping.leaders and due is not None
    group = groups.get(mapping.broadcast_siblings(rank)) if is_member else None
    given = mine
    if mine is None and due is not None:
        given = torch.full_like(due, -1)
    got = transfer(mapping, given, group, verify=verify)
    if due is None:
        return got is None
    return torch.equal(got, due) and (mine is not None or got is given)


def random_layout(random):
    """Return a layout of at most eight ranks, at an offset or with a list of ranks."""
    names = [str(name) for name in random.permutation(["tp", "cp", "dp", "pp"])]
    shape = [int(random.choice([1, 2, 2, 3, 4])) for _ in names]
    while math.prod(shape) > WORLD:
        shape[int(random.integers(4))] = 1
    offset = int(random.integers(WORLD - math.prod(shape) + 1))
    if random.random() < 0.4:  # any ranks, in any order
        return RankLayout(shape, names, ranks=random.permutation(WORLD)[: math.prod(shape)])
    return RankLayout(shape, names, offset)


def random_mapping(random):
    """Return a mapping of two layouts that are equal, disjoint or overlapping."""
    while True:
        shards = {"cp": int(random.choice([1, -1]))}
        if random.random() < 0.3:
            shards["tp"] = 1
        along = None if random.random() < 0.2 else "dp"
        with contextlib.suppress(LayoutError):
            return RankMapping(random_layout(random), random_layout(random), along, shards=shards)


# For any layouts, each rank receives the parts that numpy computes, in both directions, with and
# without leaders that broadcast, verified or not. There is no barrier between two transfers.
@pytest.mark.full
@pytest.mark.parametrize("count", [20, pytest.param(80, marks=pytest.mark.slow)])
@pytest.mark.ranks(WORLD, timeout=240)
def test_parts_match_numpy(count):
    random = np.random.default_rng(7)
    groups = {}  # keep the groups, because torch may close a group while a member still connects
    for _ in range(count):
        drawn = random_mapping(random)
        for leaders, verify in itertools.product([False, True], repeat=2):
            mapping = attrs.evolve(drawn, leaders=leaders)
            for each in (mapping, mapping.inverse()):
                assert deliver(each, groups, verify=verify), each


# Tensors of any dtype and strides arrive, even empty ones. On a rank in neither layout, the call
# returns None.
@pytest.mark.ranks(5)
def test_dtypes_strides_and_empty_tensors():
    rank = dist.get_rank()
    mapping = RankMapping("dp=2", RankLayout([2], ["tp"], 2), batch_axis=-1, pipeline=None)

    def move(whole, buffer=None):
        given = torch.zeros_like(whole) if buffer is None else buffer
        got = transfer(mapping, whole.chunk(2, -1)[rank] if rank < 2 else given)
        if 2 <= rank <= 3:
            assert torch.equal(got, whole)
            assert got is given
        else:
            assert got is None

    whole = torch.arange(24, dtype=torch.float64).reshape(3, 2, 4)
    for dtype in (torch.float64, torch.bool, torch.int8, torch.bfloat16, torch.complex64):
        move((whole % 7 - 3).to(dtype))
    move(whole, torch.zeros(4, 2, 3, dtype=torch.float64).permute(2, 1, 0))
    move(whole, torch.zeros(3, 2, 9, dtype=torch.float64)[..., 2:6])
    move(torch.zeros(3, 0, 4))
    move(torch.zeros(3, 2, 0))
    move(torch.arange(6))
    move(whole.clone().requires_grad_(), whole * 0)
    move(whole, torch.zeros_like(whole).requires_grad_())
    move(torch.ones(3, 1, 1).expand(3, 2, 4))
    if rank == 4:
        assert transfer(mapping, 3, "x", out=[]) is None


DTYPES = sorted({one for one in vars(torch).values() if isinstance(one, torch.dtype)}, key=str)


# Leaders broadcast tensors of every dtype of torch whose elements are whole bytes.
@pytest.mark.ranks(3)
def test_leaders_broadcast_every_dtype():
    rank = dist.get_rank()
    pair = dist.new_group([1, 2])
    mapping = RankMapping(lone(0), RankLayout([2], ["tp"], 1), leaders=True)
    moved = []
    for dtype in DTYPES:
        whole = torch.arange(32, dtype=torch.uint8)
        try:
            whole, buffer = whole.view(dtype), torch.zeros_like(whole).view(dtype)
        except RuntimeError:
            continue  # torch has no view as bits or as quantized elements
        got = transfer(mapping, whole if rank == 0 else buffer, pair)
        assert rank == 0 or torch.equal(got.view(torch.uint8), torch.arange(32)), dtype
        moved.append(dtype)
    assert {torch.uint16, torch.uint32, torch.uint64, torch.int16, torch.complex64} < {*moved}
    assert {torch.float8_e4m3fn, torch.float8_e5m2, torch.bool} < {*moved}


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
# works.
@pytest.mark.ranks(4)
def test_wrong_arguments_fail_all_ranks():
    rank = dist.get_rank()
    apart = RankMapping("dp=2", RankLayout([2], ["tp"], 2))
    led = attrs.evolve(apart, leaders=True)
    both = RankMapping("dp=4", "tp=2,dp=2")
    right = torch.arange(4.0).reshape(2, 2) if rank < 2 else torch.zeros(4, 2)
    mine = torch.full((2, 2), float(rank))
    shared = torch.zeros(6, 2)

    def rejected(message, at, mapping, tensor, *more, error=LayoutError, good=right, **options):
        """Pass the wrong arguments on rank `at` and later ranks, and `good` on earlier ranks."""
        given = (tensor, *more) if rank >= at else (good,)
        with pytest.raises(error if rank >= at else CreationError) as caught:
            transfer(mapping, *given, **(options if rank >= at else {}))
        assert message in str(caught.value)
        if rank < at:
            assert f"nothing was sent: rank {at} failed: LayoutError" in str(caught.value)

    for at in (0, 2):
        rejected("tensor must be a torch.Tensor, got [1.0]", at, apart, [1.0])
        rejected("tensor must be a torch.Tensor, got None", at, apart, None)
        rejected("tensor axis 0", at, apart, torch.tensor(1.0))
        rejected("on meta", at, apart, torch.zeros(2, 2, device="meta"))
        rejected("torch.sparse_coo", at, apart, torch.zeros(2, 2).to_sparse())
        conjugated = torch.zeros(2, 2, dtype=torch.complex64).conj()
        rejected("resolve_conj().resolve_neg()", at, apart, conjugated)
        sharded = DTensor.from_local(right, DeviceMesh("cpu", [0, 1, 2, 3], _init_backend=False))
        rejected("pass its to_local()", at, apart, sharded)
        rejected("out= is only for ranks in both stages", at, apart, right, out=torch.zeros(2, 2))
    rejected("strides (0,)", 2, apart, torch.zeros(1).expand(2))
    rejected("strides (1, 1)", 2, apart, torch.zeros(5).as_strided((4, 2), (1, 1)))
    rejected("(2, 3), got None", 2, led, right)
    rejected("(2, 3), got -100", 2, led, right, dist.GroupMember.NON_GROUP_MEMBER)
    rejected("(2, 3), got (0, 1, 2, 3)", 2, led, right, dist.group.WORLD)
    rejected("out= must have 2 axes", 1, both, mine, good=mine, out=torch.zeros(4))
    whole = torch.zeros(4, 2, dtype=torch.int64)
    rejected("torch.float32", 1, both, mine, good=mine, out=whole)
    rejected("out= must not share", 3, both, shared[:2], good=mine, out=shared[1:5])
    large = RankMapping("dp=2", RankLayout([8], ["dp"]))
    rejected("needs 8 ranks", 0, large, mine, error=WorldSizeError)
    rejected("got 3", 0, apart, right, verify=3, error=GroupOptionsError)

    got = transfer(apart, right)
    if rank < 2:
        assert got is None
    else:
        assert got.tolist() == [[0, 1], [2, 3], [0, 1], [2, 3]]
    shared[:2] = rank
    got = transfer(both, shared[:2], out=shared[2:])
    first = float(rank // 2 * 2)
    second = first + 1
    assert got.tolist() == [[first, first], [first, first], [second, second], [second, second]]


# ---- rows ---------------------------------------------------------------------------------------


# The sources have 3 and 2 rows, and the buffer has 4, 5 or 6 rows. Five rows arrive in a buffer of
# 5 rows. Otherwise all ranks raise before anything is sent. The error names two ranks and both
# sizes. The next transfer works.
@pytest.mark.parametrize("verify", [False, True])
@pytest.mark.ranks(3)
def test_rows_must_match(verify):
    rank = dist.get_rank()
    with GridSet.tile(encoder="dp=2", llm="dp=1") as grids:
        mine = torch.full((3 - rank, 2), rank + 1.0)
        for rows in (4, 6, 5, 0, 5):
            given = mine if rank < 2 else torch.full((rows, 2), torch.nan)
            if rows == 5:
                got = grids.transfer("encoder", "llm", given, verify=verify)
                assert got is None if rank < 2 else got[:, 0].tolist() == [1, 1, 1, 2, 2]
                continue
            with pytest.raises(PlanMismatchError) as caught:
                grids.transfer("encoder", "llm", given, verify=verify)
            for part in ("nothing was sent", "rank 0 has (3, 2)", f"rank 2 has ({rows}, 2)"):
                assert part in str(caught.value)
            assert rank < 2 or given.isnan().all()


# If all ranks pass `rows=`, no shapes are exchanged. A rank raises if the number of rows of its
# tensor differs from `rows=`.
@pytest.mark.ranks(3)
def test_rows_are_given():
    rank = dist.get_rank()
    with GridSet.tile(encoder="dp=2", llm="dp=1") as grids, mock.patch.object(Exchange, "gather"):
        given = torch.full((3 - rank, 2), rank + 1.0) if rank < 2 else torch.zeros(5, 2)
        for verify in (False, True):
            got = grids.transfer("encoder", "llm", given, rows=[3, 2], verify=verify)
            assert got is None if rank < 2 else got[:, 0].tolist() == [1, 1, 1, 2, 2]
        back = grids.transfer("llm", "encoder", given, rows=[3, 2])
        assert back is None if rank == 2 else back[:, 0].tolist() == ([1, 1, 1], [2, 2])[rank]
        for rows, message in (
            ([4, 1], f"rank {rank} must {'send' if rank < 2 else 'receive into'} a tensor"),
            ([3, 2, 0], "rows= must contain 2 lengths"),
            ([3, -2], "every length in rows= must be at least 0, got -2"),
            ([2**62, 2**62], f"rank {rank} must "),
            (3, "rows= must be"),
        ):
            if rows == [4, 1] and rank == 2:
                continue  # the buffer of rank 2 has 4 + 1 rows
            with pytest.raises(LayoutError) as caught:
                grids.transfer("encoder", "llm", given, rows=rows)
            assert message in str(caught.value)


# Shards may have any lengths, on any axes that are split. The parts match numpy. A rank in both
# stages receives a part with the shape of its receive buffer.
@pytest.mark.full
@pytest.mark.ranks(6, timeout=120)
def test_any_lengths_of_shards():
    rank = dist.get_rank()
    random = np.random.default_rng(11)
    for _ in range(60):
        sizes = [int(random.choice([1, 2, 3, 6])) for _ in range(2)]
        source, target = (
            RankLayout({"dp": n, "cp": 6 // n}) for n in (sizes[0], sizes[int(random.integers(2))])
        )
        if max(source.size_of("dp"), target.size_of("dp")) % min(
            source.size_of("dp"), target.size_of("dp")
        ):
            continue
        mapping = RankMapping(source, target)
        lengths = [random.integers(0, 4, size=source.size_of(dim)) for dim in ("dp", "cp")]
        ends = [np.cumsum([0, *some]) for some in lengths]
        whole = torch.arange(ends[0][-1] * ends[1][-1]).reshape(ends[0][-1], ends[1][-1])
        at = source.coords(rank)
        rows, columns = (ends[n][at[dim] : at[dim] + 2] for n, dim in enumerate(("dp", "cp")))
        mine = whole[rows[0] : rows[1], columns[0] : columns[1]]
        there = [
            np.sort(random.integers(0, total[-1] + 1, target.size_of(dim) - 1))
            for total, dim in zip(ends, ("dp", "cp"), strict=True)
        ]
        there = [np.array([0, *inner, total[-1]]) for inner, total in zip(there, ends, strict=True)]
        to = target.coords(rank)
        rows, columns = (there[n][to[dim] : to[dim] + 2] for n, dim in enumerate(("dp", "cp")))
        due = whole[rows[0] : rows[1], columns[0] : columns[1]]
        got = transfer(mapping, mine, out=torch.full_like(due, -1))
        assert torch.equal(got, due), mapping


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
