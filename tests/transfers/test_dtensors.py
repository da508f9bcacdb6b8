"""Test transfers of DTensors on any mesh. torch's full_tensor() returns the expected tensors."""

import math

import numpy as np
import pytest
import torch
import torch.distributed as dist
from random_states import chunk, pick
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from hypercomm import HyperCommGrid, RankLayout, RankMapping, transfer_state
from hypercomm.errors import CreationError, LayoutError

SHAPES = [(4,), (2, 2), (2, 1, 2)]
"""The shapes of meshes over the four ranks of the test."""

KINDS = ("distribute_tensor", "positions in groups", "coordinates")
"""The ways in which a program makes its DTensors."""


class Meshes:
    """Makes each mesh once, because torch makes process groups for every mesh."""

    def __init__(self, random, count):
        self.orders = [tuple(map(int, random.permutation(4))) for _ in range(count)]
        self._made = {}

    def draw(self, random):
        """Return a mesh of one to three dims, whose ranks ascend or are permuted."""
        shape = pick(random, *SHAPES)
        ranks = pick(random, *self.orders) if random.random() < 0.6 else (0, 1, 2, 3)
        if (shape, ranks) not in self._made:
            self._made[shape, ranks] = DeviceMesh("cpu", torch.tensor(ranks).reshape(shape))
        return self._made[shape, ranks]


def local_part(whole, mesh, placements, at):
    """Return torch's chunk of a full tensor for the rank at index `at` along each dim of a mesh."""
    for dim, placement in enumerate(placements):
        if not placement.is_replicate():
            whole = chunk(whole, placement.dim, mesh.shape[dim], at[dim])
    return whole.clone()


def draw_tensor(random, whole, meshes):
    """Return a DTensor on any mesh, made in one of the ways that programs use."""
    mesh = meshes.draw(random)
    choices = [Replicate(), *(Shard(axis) for axis in range(whole.ndim))]
    placements = [pick(random, *choices) for _ in range(mesh.ndim)]
    kind = pick(random, *KINDS)
    if kind == "distribute_tensor":
        return distribute_tensor(whole, mesh, placements)
    at = mesh.get_coordinate()
    if kind == "positions in groups":
        at = [mesh.get_group(dim).rank() for dim in range(mesh.ndim)]
    local = local_part(whole, mesh, placements, at)
    given = {"shape": whole.shape, "stride": whole.stride(), "run_check": False}
    return DTensor.from_local(local, mesh, placements, **given)


def check_random_programs(count, seed):
    """Transfer random DTensors. Return how many programs were rejected.

    In each program, the received tensor equals full_tensor() of the sent one, or a mesh is permuted
    and all ranks raise an error that names its ranks.
    """
    random = np.random.default_rng(seed)
    meshes = Meshes(random, count=max(2, count // 100))
    mapping = RankMapping("x=4", "x=4", along=None)
    rejected = 0
    for number in range(count):
        shape = [int(random.integers(1, 10)) for _ in range(int(random.integers(1, 3)))]
        whole = torch.arange(1.0, 1 + math.prod(shape)).reshape(shape)
        sent = draw_tensor(random, whole, meshes)
        into = draw_tensor(random, torch.zeros(shape), meshes)
        is_plain = random.random() < 0.3
        received = torch.zeros(shape) if is_plain else into
        error = None
        try:
            transfer_state(mapping, {"w": sent}, into={"w": received}, shards={"*": {}})
        except (LayoutError, CreationError) as caught:
            error = caught
        errors = torch.tensor(int(error is not None))
        dist.all_reduce(errors)
        assert errors.item() in (0, 4), number  # all ranks raise, or none
        if error is not None:
            assert "on a mesh of ranks " in str(error), (number, str(error))
            used = [sent] if is_plain else [sent, into]
            orders = [one.device_mesh.mesh.flatten().tolist() for one in used]
            assert any(order != sorted(order) for order in orders), number
            rejected += 1
            continue
        found = received if is_plain else received.full_tensor()
        assert torch.equal(found, sent.full_tensor()), (number, sent, into)
    return rejected


# DTensors on permuted meshes of one to three dims, with uneven shards and replicas. Nothing arrives
# that differs from full_tensor(). On a permuted mesh, torch itself loses parts of uneven shards.
@pytest.mark.parametrize("count", [20, pytest.param(400, marks=pytest.mark.slow)])
@pytest.mark.ranks(4, timeout=600)
def test_dtensors_on_any_mesh_match_full_tensor(count):
    assert 0.2 * count < check_random_programs(count, seed=5) < 0.8 * count


# torch sorts the ranks of the groups that it makes for a mesh, so full_tensor() is not what the
# coordinates say. The groups of a grid's mesh keep the order. torch regards these meshes as equal,
# but the second transfer does not use the plan of the first.
@pytest.mark.ranks(2)
def test_equal_meshes_with_different_groups():
    whole = torch.arange(4.0)
    mapping = RankMapping("x=2", "x=2", along=None)
    into = {"w": torch.zeros(4)}
    with HyperCommGrid(RankLayout([2], ["tp"], ranks=[1, 0])) as grid:
        in_order = grid.device_mesh("tp")
        sorted_by_torch = DeviceMesh("cpu", torch.tensor([1, 0]), mesh_dim_names=("tp",))
        for mesh in (in_order, sorted_by_torch):
            at = mesh.get_coordinate()[0]
            given = {"shape": (4,), "stride": (1,), "run_check": False}
            state = {"w": DTensor.from_local(whole.chunk(2)[at], mesh, [Shard(0)], **given)}
            into["w"].zero_()
            if mesh is in_order:
                transfer_state(mapping, state, into=into, shards={"*": {}})
                assert torch.equal(state["w"].full_tensor(), whole)
                assert torch.equal(into["w"], whole)
                continue
            with pytest.raises(LayoutError, match=r"a mesh of ranks 1, 0 .* torch has sorted"):
                transfer_state(mapping, state, into=into, shards={"*": {}})
            assert not torch.equal(state["w"].full_tensor(), whole)
            assert not into["w"].any()
