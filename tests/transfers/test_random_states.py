"""Test transfers of random states, with DTensors, uneven, empty and fused tensors."""

import itertools
import json
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.distributed as dist
from random_states import Case, chunk, without_group
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from hypercomm import transfer_state
from hypercomm.testing import fake_world
from hypercomm.transfers.buckets import segments
from hypercomm.transfers.holdings import (
    WHAT,
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


# This process carries out the plan of all ranks. Each part that arrives equals torch's chunk.
@pytest.mark.parametrize("count", [100, pytest.param(500, marks=pytest.mark.slow)])
def test_plans_match_torch_chunks(count):
    random = np.random.default_rng(1)
    moved = 0
    for number in range(count):
        case = Case(random, WORLD, without_group)
        every = {rank: case.arguments(rank) for rank in range(WORLD)}
        described = ({}, {})
        for rank, (given, _) in every.items():
            world = SimpleNamespace(rank=rank, parts={})
            ends = {end: given[what] for end, what in WHAT.items() if what in given}
            if not ends:
                continue
            own = read_tensors(ends, rank)
            more = given["shards"], given.get("fused", {}), world
            about = describe_tensors(case.mapping, own, *more)
            for end, rows in zip(described, json.loads(json.dumps(about.rows[:2])), strict=True):
                if rows:
                    end[rank] = from_rows(rows)
        plan = match_tensors(*described, case.dtype)
        for one in segments(*plan, case.options["bucket_bytes"]):
            sent = every[one.source][0]["state"][one.source_name]
            sent = sent.to_local() if hasattr(sent, "to_local") else sent
            into = case.local(every[one.target][0], one.name)
            into[one.target_slices] = sent[one.source_slices].to(one.dtype)
            moved += one.nbytes
        for given, due in every.values():
            assert missing(case, given, due) == [], number
    assert moved > 500 * count


# transfer_state() transfers random states as DTensors on real ranks.
@pytest.mark.full
@pytest.mark.parametrize("count", [12, pytest.param(60, marks=pytest.mark.slow)])
@pytest.mark.ranks(WORLD, timeout=240)
def test_transfers_on_real_ranks(count):
    random = np.random.default_rng(3)
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
        for _ in range(2):
            transfer_state(case.mapping, **given)
            assert missing(case, given, due) == [], number


# spans_of() matches distribute_tensor on any mesh and for any length.
@pytest.mark.parametrize("length", [0, 1, 3, 5, 8, 10])
def test_spans_match_distribute_tensor(length):
    whole = torch.arange(length * 2).reshape(length, 2)
    for placements in ([Shard(0), Replicate()], [Replicate(), Shard(0)], [Shard(0), Shard(0)]):
        for rank in range(6):
            with fake_world(6, rank=rank):
                mesh = DeviceMesh("cpu", torch.arange(6).reshape(2, 3))
                local = distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local()
                rows, columns = spans_of((length, 2), (2, 3), mesh.get_coordinate(), placements)
            assert columns == ((0, 2),)
            assert [row for start, stop in rows for row in range(start, stop)] == (
                local[:, 0] // 2
            ).tolist()


# FSDP2 makes strided shards of parameters that tensor parallelism has already split, so the later
# mesh dims split the axis first.
@pytest.mark.parametrize("length", [0, 1, 5, 7, 8, 9, 11, 50257])
@pytest.mark.parametrize("sizes", [(2, 2), (3, 2), (4, 2), (2, 3)])
def test_spans_of_strided_shards(length, sizes):
    whole = torch.arange(length)
    for at in range(sizes[0]):
        for other in range(sizes[1]):
            strided = [_StridedShard(0, split_factor=sizes[1]), Shard(0)]
            (rows,) = spans_of((length,), sizes, (at, other), strided)
            due = chunk(chunk(whole, 0, sizes[1], other), 0, sizes[0], at)
            assert [row for start, stop in rows for row in range(start, stop)] == due.tolist()


# Two mesh dims may split the axis before FSDP2, and a dim of another axis may lie between them.
@pytest.mark.parametrize("length", [7, 10, 50])
def test_spans_of_nested_strided_shards(length):
    placements = [_StridedShard(0, split_factor=4), Shard(0), Shard(1), Shard(0)]
    whole = torch.arange(length)
    for first, second, third in itertools.product(range(3), range(2), range(2)):
        rows, _ = spans_of((length, 4), (3, 2, 2, 2), (first, second, 0, third), placements)
        due = chunk(chunk(chunk(whole, 0, 2, second), 0, 2, third), 0, 3, first)
        assert [row for start, stop in rows for row in range(start, stop)] == due.tolist()


# A strided shard without later shards of its axis consists of a shard of each piece of the axis.
@pytest.mark.parametrize("length", [0, 1, 5, 8, 11])
def test_spans_of_a_strided_shard_alone(length):
    strided = [_StridedShard(0, split_factor=2), Replicate()]
    for at in (0, 1):
        (rows,) = spans_of((length,), (2, 2), (at, 0), strided)
        due = chunk(torch.arange(length), 0, 2, at, pieces=2)
        assert [row for start, stop in rows for row in range(start, stop)] == due.tolist()
