"""Test transfers of random states, with DTensors, uneven, empty and fused tensors."""

import json
import math
from collections import Counter
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from random_states import Case, chunk, pick, without_group
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from hypercomm import RankLayout, RankMapping, transfer_state
from hypercomm.transfers.buckets import segments
from hypercomm.transfers.holdings import (
    WHAT,
    Held,
    describe_tensors,
    from_rows,
    read_tensors,
    spans_of,
)
from hypercomm.transfers.matching import match_tensors

WORLD = 6


def missing(case, given, due):
    """Return the names of the parameters that have not arrived."""
    return [
        name for name, tensor in due.items() if not torch.equal(case.local(given, name), tensor)
    ]


def local_part(given, name):
    """Return the part of a parameter that a rank sends, or None."""
    tensor = given.get("state", {}).get(name)
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def planned(case, every):
    """Return the segments of a case, from the arguments of all ranks."""
    described = {True: {}, False: {}}
    for rank, (given, _) in every.items():
        ends = {is_sent: given[what] for is_sent, what in WHAT.items() if what in given}
        if ends:
            more = given["shards"], given.get("fused", {}), SimpleNamespace(rank=rank, parts={})
            about = describe_tensors(case.mapping, read_tensors(ends, rank), *more)
            rows = json.loads(json.dumps(about.rows))
            for is_sent in ends:
                described[is_sent][rank] = from_rows(rows[0 if is_sent else 1])
    plan = match_tensors(described[True], described[False], case.dtype)
    return segments(*plan, case.options["bucket_bytes"])


# This process carries out the plan of all ranks. Each part that arrives equals torch's chunk, and
# every element arrives once. In one bucket, the bytes that a rank sends and receives do not exceed
# the limit. A rank that has a replica of the full parameter copies its part.
@pytest.mark.parametrize("count", [100, pytest.param(500, marks=pytest.mark.slow)])
def test_plans_match_torch_chunks(count):
    random = np.random.default_rng(1)
    for number in range(count):
        case = Case(random, WORLD, without_group, kinds=(torch.clone,))
        every = {rank: case.arguments(rank) for rank in range(WORLD)}
        arrived, rooms = Counter(), Counter()
        for one in planned(case, every):
            sent = local_part(every[one.source][0], one.source_name)
            piece = case.local(every[one.target][0], one.name)[one.target_slices]
            piece.copy_(sent[one.source_slices].to(one.dtype))
            assert one.nbytes == piece.numel() * one.dtype.itemsize
            assert (one.bucket == -1) == (one.source == one.target)
            arrived[one.target, one.name] += piece.numel()
            if one.bucket >= 0:
                assert one.room >= one.nbytes + 8
                own = local_part(every[one.target][0], one.source_name)
                assert own is None or own.shape != case.wholes[one.source_name].shape
                for rank in (one.source, one.target):
                    rooms[rank, one.bucket] += one.room
        assert max(rooms.values(), default=0) <= case.options["bucket_bytes"]
        for rank, (given, due) in every.items():
            assert missing(case, given, due) == [], number
            for name, tensor in due.items():
                assert arrived[rank, name] == tensor.numel(), number


# transfer_state() transfers random states on real ranks, as tensors of any kind and as DTensors.
@pytest.mark.parametrize(
    "count",
    [
        6,
        pytest.param(18, marks=pytest.mark.full),
        pytest.param(60, marks=pytest.mark.slow),
    ],
)
@pytest.mark.ranks(WORLD, timeout=240)
def test_transfers_on_real_ranks(count):
    random = np.random.default_rng(count)
    meshes = {}

    def distribute(part, whole, end, name, _):
        key = tuple(map(tuple, end.mesh().tolist()))
        if key not in meshes:
            meshes[key] = DeviceMesh("cpu", end.mesh(), _init_backend=False)
        given = {"shape": whole.shape, "stride": whole.stride(), "run_check": False}
        return DTensor.from_local(part, meshes[key], end.placements[name], **given)

    for number in range(count):
        case = Case(random, WORLD, distribute)
        given, due = case.arguments(dist.get_rank())
        plain = [case.local(given, name) for name in due if name not in case.target.placements]
        versions = [None if one.is_inference() else one._version for one in plain]
        for _ in range(2):
            transfer_state(case.mapping, **given)
            assert missing(case, given, due) == [], number
        for one, version in zip(plain, versions, strict=True):
            assert version is None or one._version > version


# FSDP2 makes strided shards of parameters that tensor parallelism has already split, so the later
# mesh dims split the axis first. One or two mesh dims may do so, and a dim of another axis may lie
# between them. A strided shard without later shards has a part of each of several pieces.
def test_spans_of_strided_shards_match_chunks():
    random = np.random.default_rng(2)
    for _ in range(300):
        length = pick(random, int(random.integers(60)), int(random.integers(9)), 50257)
        sizes = [int(random.integers(1, 5)) for _ in range(4)]
        at = [int(random.integers(size)) for size in sizes]
        later = pick(random, [], [1], [3], [1, 3])
        factor = math.prod(sizes[dim] for dim in later) if later else pick(random, 2, 3)
        placements = [_StridedShard(0, split_factor=factor), Replicate(), Shard(1), Replicate()]
        due = torch.arange(length)
        for dim in later:
            placements[dim] = Shard(0)
            due = chunk(due, 0, sizes[dim], at[dim])
        due = chunk(due, 0, sizes[0], at[0], pieces=1 if later else factor)
        rows, _ = spans_of((length, 4), sizes, at, placements)
        assert [row for start, stop in rows for row in range(start, stop)] == due.tolist()


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
    described = ({}, {})
    for layer in range(12):
        for name, shape in MODEL.items():
            if layer and name == "embedding":
                continue
            mapping = RankMapping.weights(here, there, CUTS[name])
            for layout, end in ((here, described[0]), (there, described[1])):
                is_source = layout is here
                for rank in layout.ranks:
                    part = mapping.shape_at(rank, shape, is_source=is_source)
                    cells = mapping.cells_at(rank, len(shape), is_source=is_source)
                    held = Held(f"{layer}.{name}", "bfloat16", part, cells=cells)
                    end.setdefault(rank, []).append(held)
    sent, rooms = Counter(), Counter()
    for one in segments(*match_tensors(*described), 1 << 16):
        sent[one.source] += one.nbytes
        rooms[one.bucket, one.source] += one.room
        rooms[one.bucket, one.target] += one.room
    assert set(sent) == set(here.ranks)
    even = sum(sent.values()) / here.size
    assert all(abs(amount - even) < 0.03 * even for amount in sent.values())
    buckets = max(bucket for bucket, _ in rooms) + 1
    busiest = max(sum(rooms[bucket, rank] for bucket in range(buckets)) for rank in range(12))
    assert buckets <= 1.3 * busiest / (1 << 16) + 1  # buckets are full
