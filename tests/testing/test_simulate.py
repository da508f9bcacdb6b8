"""Test that simulate() records the groups of all ranks, and reports calls that disagree."""

import contextlib
import copy
import os
import re

import numpy as np
import pytest
import torch.distributed as dist
from group_checks import patched_attributes
from torch.distributed import get_rank as bound_early
from torch.distributed.device_mesh import init_device_mesh

from hypercomm import HyperCommGrid
from hypercomm.compat.ezpz import tp as ezpz
from hypercomm.compat.megatron import parallel_state as mpu
from hypercomm.errors import (
    GroupOptionsError,
    RankFailedError,
)
from hypercomm.testing import fake_world, registered_groups, simulate


def five_groups():
    grid = HyperCommGrid([8, 2, 4, 2], ["tp", "cp", "dp", "pp"])
    groups = grid.create_pgs(["tp", "cp", "dp", "pp", ["dp", "cp"]])
    return [tuple(dist.get_process_group_ranks(group)) for group in groups]


def made(simulation):
    """Map each rank to the groups that it creates, as pairs of backend and ranks."""
    return {
        rank: [(creation.backend, creation.ranks) for creation in creations]
        for rank, creations in simulation.creations.items()
    }


# Every rank creates only the groups that contain it. The groups match numpy's, and all ranks agree.
def test_groups_match_numpy():
    got = simulate(five_groups, 128)
    table = np.arange(128).reshape(8, 2, 4, 2, order="F")
    for rank in range(128):
        tp, cp, dp, pp = np.argwhere(table == rank)[0]
        own = [
            table[:, cp, dp, pp],
            table[tp, :, dp, pp],
            table[tp, cp, :, pp],
            table[tp, cp, dp, :],
            table[tp, :, :, pp].ravel(),
        ]
        expected = [tuple(sorted(map(int, members))) for members in own]
        assert got.returned[rank] == expected
        assert made(got)[rank] == [("nccl", ranks) for ranks in expected]
    got.check()
    # 16 tp groups, 64 cp, 32 dp, 64 pp, 16 dp+cp
    assert str(got) == "128 of 128 ranks: 192 process groups, 5 on each rank\nall ranks agree"


# Within a simulation, functions of torch.distributed return the values of the simulated rank, even
# if they were imported before the simulation. Afterwards, WORLD and the environment of this process
# are unchanged.
@pytest.mark.parametrize("outer", [contextlib.nullcontext, lambda: fake_world(8, rank=3)])
def test_torch_calls_in_a_simulation(monkeypatch, outer):
    monkeypatch.setenv("RANK", "77")
    monkeypatch.delenv("WORLD_SIZE", raising=False)

    def program():
        dist.init_process_group("nccl")  # as a program under torchrun does
        assert dist.get_backend() == "nccl"
        assert dist.get_process_group_ranks(dist.group.WORLD) == list(range(6))
        group = dist.new_group([4, 1, 2], backend="gloo", group_desc="mine")
        if dist.get_rank() in (1, 2, 4):
            assert dist.get_backend(group) == "gloo"
            assert dist.get_process_group_ranks(group) == [1, 2, 4]
            assert dist.get_global_rank(group, dist.get_rank(group)) == dist.get_rank()
            assert dist.get_world_size(group) == group.size() == 3
        else:
            assert group is dist.GroupMember.NON_GROUP_MEMBER
        assert bound_early() == int(os.environ["RANK"])
        dist.destroy_process_group()
        assert not dist.is_initialized()
        return int(os.environ["RANK"])

    with outer():
        live = dist.is_initialized()
        before = (registered_groups(), patched_attributes())
        got = simulate(program, 6)
        assert dist.is_initialized() == live
        assert (registered_groups(), patched_attributes()) == before
        assert not live or dist.get_rank() == 3
    assert got.returned == {rank: rank for rank in range(6)}
    assert made(got) == {
        rank: [("gloo", (1, 2, 4))] if rank in (1, 2, 4) else [] for rank in range(6)
    }
    assert got.creations[1][0].description == "mine"
    assert os.environ["RANK"] == "77"
    assert "WORLD_SIZE" not in os.environ


# Megatron's code runs unchanged. (tests/compat compares Megatron with hypercomm.)
def test_megatron_in_a_simulation():
    from megatron_oracle import parallel_state as megatron

    def program():
        blank = {name: value for name, value in vars(megatron).items() if name.isupper()}
        blank = copy.deepcopy(blank)
        try:
            megatron.initialize_model_parallel(2, expert_model_parallel_size=4)
            return megatron.get_data_parallel_rank()
        finally:  # Megatron's teardown leaves some of its globals
            vars(megatron).update({**blank, "_global_process_group_list": None})

    got = simulate(program, 16)
    got.check()
    assert got.returned == {rank: rank // 2 for rank in range(16)}


# Global states are empty at the start of each rank, and restored in this process afterwards.
def test_global_states_are_restored():
    def program():
        assert not ezpz.tensor_parallel_is_initialized()
        assert not mpu.model_parallel_is_initialized()
        ezpz.initialize_tensor_parallel(4)
        mpu.initialize_model_parallel(2)
        return ezpz.get_tensor_parallel_ranks(), mpu.get_tensor_model_parallel_rank()

    state = mpu.ParallelState()
    with fake_world(4), mpu.use(state):
        ezpz.initialize_tensor_parallel(2)
        got = simulate(program, 8)
        assert ezpz.get_tensor_parallel_ranks() == [0, 1]
        state.write("_MPU_TENSOR_MODEL_PARALLEL_RANK", 5)
        assert mpu.get_tensor_model_parallel_rank() == 5
        ezpz.destroy_tensor_parallel()
    for rank in range(8):
        assert got.returned[rank] == ([*range(rank // 4 * 4, rank // 4 * 4 + 4)], rank % 2)


# DeviceMeshes of torch and of a grid consist of simulated groups.
def test_meshes_in_a_simulation():
    def theirs():
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        return mesh["tp"].get_group().size(), mesh.get_local_rank("dp")

    def ours():
        with HyperCommGrid([4, 2], ["tp", "dp"]) as grid:
            mesh = grid.device_mesh("dp", "tp")
            return mesh["tp"].get_group().size(), mesh.get_local_rank("dp")

    for program in (theirs, ours):
        got = simulate(program, 8, backend="gloo")
        got.check()
        assert got.returned == {rank: (4, rank // 4) for rank in range(8)}
        for rank in range(8):
            first = rank // 4 * 4
            own = {tuple(range(first, first + 4)), (rank % 4, rank % 4 + 4)}
            assert {ranks for _, ranks in made(got)[rank]} == own


# If a program destroys WORLD and initialises it again, a second job begins, in which groups are
# counted anew.
def test_second_job_in_a_simulation():
    def program():
        if dist.get_rank() < 2:
            dist.new_group([0, 1])
        dist.barrier()
        dist.destroy_process_group()
        dist.init_process_group("gloo")
        dist.new_group([0, 1, 2, 3])
        dist.barrier()
        return dist.get_backend(), HyperCommGrid([4], ["dp"]).explain("dp").backend

    got = simulate(program, 4)
    got.check()
    assert set(got.returned.values()) == {("gloo", "gloo")}
    assert made(got)[2] == [("gloo", (0, 1, 2, 3))]
    assert [one.group.called for one in got.collectives[2]] == ["WORLD", "WORLD (job 2)"]


# The text of a group creation shows only the first four ranks and the last one.
def test_text_of_a_creation():
    made = simulate(lambda: dist.new_group(range(5), group_desc="five") and None, 5).creations[0]
    assert [*map(str, made)] == ["five of ranks (0, 1, 2, 3, ..., 4)"]


# A sample of ranks can be simulated, in a world of any size, with backends that this machine lacks.
def test_sample_of_ranks():
    def run():
        grid = HyperCommGrid([8, 131_072], ["tp", "dp"], backend="nccl")
        return grid.create_pg("tp").size(), grid.create_pg("dp").size()

    options = {"ranks": [9, 1_048_575, 8, 9], "backend": "cpu:gloo,cuda:nccl"}
    got = simulate(run, 1_048_576, **options)
    assert got.returned == dict.fromkeys([8, 9, 1_048_575], (8, 131_072))
    assert got.disagreements == ()
    assert str(got).startswith("3 of 1,048,576 ranks: 5 process groups, 2 on each rank")


# A program that cannot be simulated raises, and torch is restored.
@pytest.mark.parametrize(
    ("function", "options", "error", "message"),
    [
        (lambda: dist.group.WORLD.abort(1), {}, RankFailedError, "has no 'abort'"),
        (
            lambda: 1 / (dist.get_rank() - 1),
            {},
            RankFailedError,
            "rank 1 failed: ZeroDivisionError",
        ),
        (int, {"backend": "smoke"}, GroupOptionsError, "'smoke'"),
    ],
)
def test_invalid_simulations(function, options, error, message):
    before = patched_attributes()
    with pytest.raises(error, match=re.escape(message)):
        simulate(function, **{"world_size": 4, **options})
    assert patched_attributes() == before
    assert not dist.is_initialized()
