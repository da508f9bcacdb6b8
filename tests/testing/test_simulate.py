"""Every rank of a large job, one after the other, with no process group of torch."""

import contextlib
import copy
import graphlib
import itertools
import os
import re
from datetime import timedelta

import fresh_programs
import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed import get_rank as bound_early
from torch.distributed.device_mesh import init_device_mesh

from hypercomm import HyperCommGrid
from hypercomm.compat.ezpz import tp as ezpz
from hypercomm.compat.megatron import parallel_state as mpu
from hypercomm.errors import (
    GroupOptionsError,
    LayoutError,
    RankFailedError,
    SimulationError,
    StateError,
)
from hypercomm.testing import fake_world, registered_groups, simulate
from hypercomm.testing.simulation.judging import judge
from hypercomm.testing.simulation.records import Creation


def five_groups():
    grid = HyperCommGrid([8, 2, 4, 2], ["tp", "cp", "dp", "pp"])
    return [tuple(dist.get_process_group_ranks(group)) for group in grid.create_pgs(FIVE)]


FIVE = ["tp", "cp", "dp", "pp", ["dp", "cp"]]


def made(simulation):
    """What each rank creates, as pairs of backend and ranks."""
    return {
        rank: [(creation.backend, creation.ranks) for creation in creations]
        for rank, creations in simulation.creations.items()
    }


# Every rank creates its own groups and no others, as numpy counts them, and they agree.
def test_a_grid():
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
    assert got.disagreements == ()
    got.check()
    # 16 tp groups, 64 cp, 32 dp, 64 pp, 16 dp+cp
    assert str(got) == "128 of 128 ranks: 192 process groups, 5 on each rank\nall ranks agree"


# torch.distributed answers as on each rank, wherever its functions were taken from, and nothing of
# it is left: not in this process's world, nor in the environment.
@pytest.mark.parametrize("outer", [contextlib.nullcontext, lambda: fake_world(8, rank=3)])
def test_what_torch_answers(monkeypatch, outer):
    monkeypatch.setenv("RANK", "77")
    monkeypatch.delenv("WORLD_SIZE", raising=False)

    def program():
        assert dist.is_initialized()
        dist.init_process_group("nccl")  # as a program under torchrun does
        dist.barrier()
        assert dist.get_backend() == "nccl"
        assert dist.get_process_group_ranks(dist.group.WORLD) == list(range(6))
        group = dist.new_group([4, 1, 2], backend="gloo", group_desc="mine")
        inside = dist.get_rank() in (1, 2, 4)
        assert inside == (group is not dist.GroupMember.NON_GROUP_MEMBER)
        if inside:
            assert dist.get_backend(group) == "gloo"
            assert dist.get_process_group_ranks(group) == [1, 2, 4]
            assert dist.get_global_rank(group, dist.get_rank(group)) == dist.get_rank()
            assert dist.get_world_size(group) == group.size() == 3
        dist.destroy_process_group()
        assert not dist.is_initialized()
        return bound_early() if dist.is_initialized() else int(os.environ["RANK"])

    with outer():
        live, before = dist.is_initialized(), registered_groups()
        helper = dist.distributed_c10d._new_process_group_helper
        got = simulate(program, 6)
        assert dist.is_initialized() == live
        assert registered_groups() == before
        assert dist.distributed_c10d._new_process_group_helper is helper
        assert not live or dist.get_rank() == 3
    assert got.returned == {rank: rank for rank in range(6)}
    assert made(got) == {
        rank: [("gloo", (1, 2, 4))] if rank in (1, 2, 4) else [] for rank in range(6)
    }
    assert got.creations[1][0].description == "mine"
    assert os.environ["RANK"] == "77"
    assert "WORLD_SIZE" not in os.environ


# No object of torch's class for process groups is made, and no store.
def test_no_process_group_of_torch(monkeypatch):
    def refuse(*_args, **_options):
        raise ZeroDivisionError

    for module in (dist, dist.distributed_c10d, torch._C._distributed_c10d):
        for name in ("ProcessGroup", "PrefixStore", "TCPStore", "ProcessGroupGloo"):
            if hasattr(module, name):
                monkeypatch.setattr(module, name, type(name, (), {"__init__": refuse}))
    assert len(simulate(five_groups, 128, ranks=[0, 127]).returned) == 2


# Megatron's own code and ours create the same groups on every rank; the globals begin empty.
@pytest.mark.parametrize(
    "sizes",
    [
        {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
        {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 4},
    ],
    ids=str,
)
def test_megatron_beside_ours(sizes):
    from oracle import parallel_state as megatron

    def theirs():
        blank = copy.deepcopy(
            {name: value for name, value in vars(megatron).items() if name.isupper()}
        )
        try:
            megatron.initialize_model_parallel(**sizes)
            return megatron.get_data_parallel_rank()
        finally:
            # its own teardown forgets some of its globals
            vars(megatron).update({**blank, "_global_process_group_list": None})

    def ours():
        with pytest.raises(StateError):
            mpu.get_tensor_model_parallel_group()
        mpu.initialize_model_parallel(**sizes)
        return mpu.get_data_parallel_rank()

    expected, got = simulate(theirs, 16), simulate(ours, 16)
    assert got.returned == expected.returned
    assert got.disagreements == expected.disagreements == ()
    for rank in range(16):
        assert set(made(got)[rank]) == set(made(expected)[rank])
    assert not mpu.model_parallel_is_initialized()


# ezpz's globals begin empty too, and a state of this process is there again afterwards.
def test_states_of_this_process():
    def program():
        assert not ezpz.tensor_parallel_is_initialized()
        ezpz.initialize_tensor_parallel(4)
        return ezpz.get_tensor_parallel_ranks()

    with fake_world(4):
        ezpz.initialize_tensor_parallel(2)
        got = simulate(program, 8)
        assert ezpz.get_tensor_parallel_ranks() == [0, 1]
        ezpz.destroy_tensor_parallel()
    assert got.returned == {
        rank: list(range(rank - rank % 4, rank - rank % 4 + 4)) for rank in range(8)
    }


# Also where the function is the first to import them: nothing of the last rank stays.
@pytest.mark.long
def test_imports_within_the_function():
    program = """
from hypercomm.testing import simulate
def program():
    from hypercomm.compat.megatron import parallel_state
    parallel_state.initialize_model_parallel(2)
    return parallel_state.get_tensor_model_parallel_rank()
print(simulate(program, 4).returned)
from hypercomm.compat.megatron import parallel_state
print(parallel_state.model_parallel_is_initialized())
"""
    quiet = "import warnings; warnings.filterwarnings('error', '', UserWarning, 'hypercomm')"
    done = fresh_programs.run(quiet + program)
    assert done.stdout == "{0: 0, 1: 1, 2: 0, 3: 1}\nFalse\n", done.stderr


# Nor does a scope of this process reach into a simulated rank.
def test_within_a_scope():
    def program():
        assert not mpu.model_parallel_is_initialized()
        mpu.initialize_model_parallel(2)
        with mpu.use(mpu.ParallelState()):
            assert not mpu.model_parallel_is_initialized()
        return mpu.get_tensor_model_parallel_rank()

    state = mpu.ParallelState()
    with mpu.use(state):
        assert simulate(program, 4).returned == {0: 0, 1: 1, 2: 0, 3: 1}
        state.write("_MPU_TENSOR_MODEL_PARALLEL_RANK", 5)
        assert mpu.get_tensor_model_parallel_rank() == 5


# Meshes are made of stand-ins, and a grid's own is one too.
def test_meshes():
    def theirs():
        mesh = init_device_mesh("cpu", (2, 4), mesh_dim_names=("dp", "tp"))
        return mesh["tp"].get_group().size(), mesh.get_local_rank("dp")

    def ours():
        with HyperCommGrid([4, 2], ["tp", "dp"]) as grid:
            grid.create_pgs(["tp", "dp"])
            mesh = grid.device_mesh("dp", "tp")
            return mesh["tp"].get_group().size(), mesh.get_local_rank("dp")

    for program in (theirs, ours):
        got = simulate(program, 8, backend="gloo")
        assert got.returned == {rank: (4, rank // 4) for rank in range(8)}
        for rank in range(8):
            first = rank // 4 * 4
            own = {tuple(range(first, first + 4)), (rank % 4, rank % 4 + 4)}
            assert {ranks for _, ranks in made(got)[rank]} == own
        got.check()


# A job that ends and begins again counts its groups anew, as torch does, with the backend it says.
def test_a_second_job():
    def program():
        if dist.get_rank() < 2:
            dist.new_group([0, 1])
        dist.destroy_process_group()
        dist.init_process_group("gloo")
        dist.new_group([0, 1, 2, 3])
        return dist.get_backend()

    got = simulate(program, 4)
    got.check()
    assert set(got.returned.values()) == {"gloo"}
    assert made(got)[2] == [("gloo", (0, 1, 2, 3))]


# torch's own members-only creation salts names with the number of groups that a rank has: ranks
# with different memberships would wait for ever (pytorch issue 173608). Found on a laptop.
def test_uneven_memberships_in_torch():
    def theirs():
        if dist.get_rank() in (0, 3):
            dist.new_group([0, 3], use_local_synchronization=True)
        dist.new_group([0, 1, 2, 3], use_local_synchronization=True)

    def ours():
        HyperCommGrid([4], ["pp"]).create_pg(
            "pp",
            name="ends",
            derive=lambda groups: groups.pick(lambda ranks: (ranks[0], ranks[-1])),
        )
        HyperCommGrid([4], ["dp"]).create_pg("dp")

    wrong = simulate(theirs, 4)
    assert {one.waiting for one in wrong.disagreements} == {(0, 3), (1, 2)}
    assert all(set(one.absent.values()) == {"never creates it"} for one in wrong.disagreements)
    with pytest.raises(SimulationError, match="2 disagreements"):
        wrong.check()
    simulate(ours, 4).check()


# A rank that leaves one out, swaps two, or asks for other options is named.
@pytest.mark.parametrize(
    ("program", "words"),
    [
        (
            lambda grid, odd: [grid.create_pg(d) for d in (["dp"] if odd else ["tp", "dp"])],
            "tp of ranks (4, 5): rank 4 waits for rank 5, which never creates it",
        ),
        (
            lambda grid, odd: [
                grid.create_pg(d) for d in [["tp", "dp"], "tp"][:: 1 if odd else -1]
            ],
            "tp of ranks (4, 5): rank 4 waits for rank 5, which waits in tp+dp",
        ),
        (
            lambda grid, odd: grid.create_pg("tp", backend="gloo" if odd else None),
            "rank 4 creates tp of ranks (4, 5) with nccl and a timeout of 0:10:00; rank 5 creates",
        ),
        (
            lambda grid, odd: grid.create_pg("tp", timeout=timedelta(minutes=1 + odd)),
            "0:01:00; rank 5 creates tp of ranks (4, 5) with nccl and a timeout of 0:02:00",
        ),
    ],
    ids=["skips", "swaps", "backend", "timeout"],
)
def test_one_rank_differs(program, words):
    def run():
        program(HyperCommGrid([2, 4], ["tp", "dp"]), dist.get_rank() == 5)

    got = simulate(run, 8)
    assert sum(words in str(disagreement) for disagreement in got.disagreements) == 1
    assert words in str(got)
    # ranks 6 and 7 have nothing to do with it
    assert simulate(run, 8, ranks=[6, 7]).disagreements == ()


# Where many wait, a text shows a few.
def test_many_disagreements():
    def run():
        grid = HyperCommGrid([2, 64], ["tp", "dp"])
        if dist.get_rank() % 2:
            grid.create_pg("tp")

    lines = str(simulate(run, 128)).splitlines()
    assert lines[1] == "64 disagreements:"
    assert lines[2] == "  tp of ranks (0, 1): rank 1 waits for rank 0, which never creates it"
    assert lines[-1] == "  and 59 more"
    assert len(lines) == 8


def creation(name, ranks):
    return Creation(name, tuple(ranks), "gloo", timedelta(minutes=1), name)


# Ranks that create all their groups, each in its own order, come to an end exactly if the orders
# have no cycle.
@given(st.data())
def test_orders_that_work(data):
    world = range(data.draw(st.integers(2, 5)))
    pairs = [ranks for size in (2, 3) for ranks in itertools.combinations(world, size)]
    groups = data.draw(st.lists(st.sampled_from(pairs), min_size=1, max_size=5))
    orders = {}
    for rank in world:
        own = [number for number, ranks in enumerate(groups) if rank in ranks]
        orders[rank] = data.draw(st.permutations(own))
    programs = {
        rank: [creation(str(number), groups[number]) for number in order]
        for rank, order in orders.items()
    }
    graph = graphlib.TopologicalSorter()
    for order in orders.values():
        for one, following in itertools.pairwise(order):
            graph.add(following, one)
    try:
        graph.prepare()
        works = True
    except graphlib.CycleError:
        works = False
    found = judge(programs)
    assert works == (found == ())
    for one in found:
        assert one.absent
        assert not set(one.waiting) & set(one.absent)
        assert set(one.waiting) | set(one.absent) == set(one.group.ranks)


# A sample of the ranks of a world of any size.
def test_a_sample():
    def run():
        grid = HyperCommGrid([8, 131_072], ["tp", "dp"])
        return grid.create_pg("tp").size(), grid.create_pg("dp").size()

    got = simulate(run, 1_048_576, ranks=[9, 1_048_575, 8, 9])
    assert got.returned == dict.fromkeys([8, 9, 1_048_575], (8, 131_072))
    assert got.disagreements == ()
    assert str(got).startswith("3 of 1,048,576 ranks: 5 process groups, 2 on each rank")


# The options of a cluster's backends are accepted on a machine without them.
def test_backends_that_are_elsewhere():
    def run():
        return HyperCommGrid([2], ["dp"], backend="nccl").create_pg("dp").size()

    assert simulate(run, 2, backend="cpu:gloo,cuda:nccl").returned == {0: 2, 1: 2}


# What cannot be simulated is an error that says so, and leaves torch as it was.
@pytest.mark.parametrize(
    ("function", "options", "error", "words"),
    [
        (lambda: dist.group.WORLD.abort(1), {}, RankFailedError, "no rank is there to comm"),
        (lambda: 1 / (dist.get_rank() - 1), {}, RankFailedError, "rank 1 failed: Traceback"),
        (lambda: simulate(int, 2), {}, RankFailedError, "was called by a function that it runs"),
        (int, {"world_size": 0}, LayoutError, "world_size"),
        (int, {"ranks": [0, 4]}, LayoutError, "ranks must be in range(4), got 4"),
        (int, {"ranks": [-1]}, LayoutError, "ranks must be in range(4), got -1"),
        (int, {"ranks": ["a"]}, LayoutError, "'a'"),
        (int, {"backend": "smoke"}, GroupOptionsError, "unknown backend 'smoke'; this torch knows"),
    ],
)
def test_what_cannot_be_simulated(function, options, error, words):
    helper, world = dist.distributed_c10d._new_process_group_helper, dist.distributed_c10d._world
    with pytest.raises(error, match=re.escape(words)):
        simulate(function, **{"world_size": 4, **options})
    assert dist.distributed_c10d._new_process_group_helper is helper
    assert dist.distributed_c10d._world is world
    assert not dist.is_initialized()


# A stand-in says what it is, and has none of what is no collective.
@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_a_stand_in(backend):
    def run():
        group = HyperCommGrid([2, 2], ["tp", "dp"]).create_pg("dp")
        with pytest.raises(AttributeError, match="has no 'merge_remote_group'"):
            group.merge_remote_group([torch.ones(1)])
        assert not hasattr(group, "get_group_store")
        assert group.name() == "simulated"
        return repr(group)

    got = simulate(run, 4, backend=backend).returned[3]
    assert got.startswith("<simulated group hypercomm/")
    assert got.endswith("/dp/1: rank 1 of 2>")


AFRESH = """
import logging
logging.basicConfig(format="logged: %(message)s")
from hypercomm import HyperCommGrid
from hypercomm.process_groups.torch_internals.capabilities import FLAGS
from hypercomm.testing import fake_world, simulate

def program():
    HyperCommGrid([2, 4], ["tp", "dp"]).create_pgs(["tp", "dp"])

simulate(program, 8).check()
with fake_world(8), HyperCommGrid([2, 4], ["tp", "dp"]) as grid:
    grid.create_pg("tp")
    print([name for name, is_there in FLAGS.items() if not is_there])
"""


# What torch has is not judged by a simulated job, which lacks most of it, for all that follows.
def test_a_simulation_comes_first():
    done = fresh_programs.run(AFRESH)
    assert "logged: " not in done.stderr
    assert (done.returncode, done.stdout) == (0, "[]\n"), done.stderr
