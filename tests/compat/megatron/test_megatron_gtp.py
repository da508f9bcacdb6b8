"""Test that every group has the right ranks if there are GTP peers, in states and in grids.

The expected ranks are computed by arithmetic.

If megatron-core has GTP, test_megatron_state.py also compares groups with megatron-core's groups.
"""

import megatron_comparison as comparison
import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from megatron_comparison import plain

from hypercomm import errors, megatron_grids
from hypercomm.compat.megatron import ParallelState, parallel_state, version
from hypercomm.compat.megatron.presets import create_megatron_pgs
from hypercomm.compat.megatron.process_groups_config import (
    ProcessGroupCollection,
    resolve_gtp_remat_group,
)
from hypercomm.testing import fake_world

DENSE, EXPERT = ("pp", "dp", "cp", "gtp", "tp"), ("pp", "dp", "gtp", "ep", "tp")
"""Dims, the slowest first. GTP peers are next to tp, and for experts next to ep."""

MODEL = "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL"

GROUPS = [
    ("tp", "_TENSOR_MODEL_PARALLEL_GROUP", DENSE, "tp"),
    ("gtp_remat", "_GTP_WEIGHT_REMAT_GROUP", DENSE, "gtp"),
    (None, "_PIPELINE_MODEL_PARALLEL_GROUP", DENSE, "pp"),
    (None, "_CONTEXT_PARALLEL_GROUP", DENSE, "cp"),
    ("dp", "_DATA_PARALLEL_GROUP", DENSE, "dp"),
    ("dp_cp", "_DATA_PARALLEL_GROUP_WITH_CP", DENSE, "dp cp"),
    (None, "_DATA_PARALLEL_GROUP_WITH_GTP_REMAT", DENSE, "dp gtp"),
    ("dp_cp_gtp_remat", "_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT", DENSE, "dp cp gtp"),
    ("intra_dp_cp", "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP", DENSE, "dp cp"),
    (None, "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_WITH_GTP_REMAT", DENSE, "dp cp gtp"),
    ("mp", "_MODEL_PARALLEL_GROUP", DENSE, "tp gtp pp"),
    (None, "_TENSOR_AND_DATA_PARALLEL_GROUP", DENSE, "tp gtp dp"),
    ("tp_dp_cp", "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP", DENSE, "tp gtp dp cp"),
    (None, "_TENSOR_AND_CONTEXT_PARALLEL_GROUP", DENSE, "tp cp"),
    ("expt_gtp_remat", "_EXPERT_GTP_WEIGHT_REMAT_GROUP", EXPERT, "gtp"),
    ("ep", "_EXPERT_MODEL_PARALLEL_GROUP", EXPERT, "ep"),
    (None, "_EXPERT_TENSOR_PARALLEL_GROUP", EXPERT, "tp"),
    (None, "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP", EXPERT, "tp ep"),
    ("tp_ep_pp", f"{MODEL}_GROUP", EXPERT, "tp ep pp"),
    ("tp_ep_pp_with_egtp_remat", f"{MODEL}_GROUP_WITH_EGTP", EXPERT, "tp ep pp gtp"),
    ("expt_dp", "_EXPERT_DATA_PARALLEL_GROUP", EXPERT, "dp"),
    ("expt_dp_gtp_remat", "_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT", EXPERT, "dp gtp"),
    (None, "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP", EXPERT, "dp"),
    (None, "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_WITH_GTP_REMAT", EXPERT, "dp gtp"),
    ("intra_dist_opt", "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP", EXPERT, "dp gtp ep tp pp"),
]
"""For each group: its field, its global, all dims of its layers, and the dims of the group."""

DIMS = {name: (dims, wanted) for _, name, dims, wanted in GROUPS}
FIELDS = {field: name for field, name, _, _ in GROUPS if field is not None}
PRESET = {DENSE: {"gtp": "gtp_remat"}, EXPERT: {"tp": "expt_tp", "gtp": "expt_gtp_remat"}}
"""Maps dims to the arguments of `megatron_grids` that set their sizes, if the names differ."""

LONG = comparison.LONG | {"gtp_remat": "gtp_remat_size", "expt_gtp_remat": "expert_gtp_remat_size"}

BOTH = {
    "tensor_model_parallel_size": 2,
    "gtp_remat_size": 2,
    "expert_tensor_parallel_size": 1,
    "expert_model_parallel_size": 2,
    "expert_gtp_remat_size": 2,
}


INSTANCES = {"num_distributed_optimizer_instances": 2}


@pytest.fixture(params=["0.16.1", "0.19.2"], name="release")
def in_a_release(request):
    """Follow a release. GTP sizes above 1 have the same effect in each release."""
    with comparison.following(request.param):
        yield request.param


def members(arguments, world_size, rank, name):
    """Return the ranks in the group of one rank, computed by numpy alone."""
    dims, wanted = DIMS[name]
    sizes = {dim: arguments.get(LONG.get(PRESET[dims].get(dim, dim)), 1) for dim in dims}
    sizes["dp"] = world_size // np.prod([sizes[dim] for dim in dims if dim != "dp"])
    ranks = np.arange(world_size).reshape([sizes[dim] for dim in dims])
    place = np.argwhere(ranks == rank)[0]
    index = [slice(None) if dim in wanted.split() else place[i] for i, dim in enumerate(dims)]
    return tuple(sorted(ranks[tuple(index)].ravel().tolist()))


@st.composite
def sizes_with_gtp(draw):
    """Draw sizes with GTP for dense layers, for experts, or for both, and a rank."""
    size = st.sampled_from([1, 2, 3])
    pp, dense, expert = (draw(size) for _ in range(3))
    gtp, egtp = draw(st.sampled_from([(2, 1), (1, 2), (2, 2), (4, 3)]))
    arguments = {
        "pipeline_model_parallel_size": pp,
        "tensor_model_parallel_size": dense,
        "context_parallel_size": draw(size),
        "gtp_remat_size": gtp,
        "expert_tensor_parallel_size": expert,
        "expert_model_parallel_size": draw(size),
        "expert_gtp_remat_size": egtp,
    }
    factors = [value for name, value in arguments.items() if name != "pipeline_model_parallel_size"]
    world_size = pp * int(np.lcm(np.prod(factors[:3]), np.prod(factors[3:])))
    return world_size, draw(st.integers(0, world_size - 1)), arguments


# Every group, size, rank and list of a state matches the arithmetic.
@given(sizes_with_gtp())
def test_state_matches_numpy(drawn):
    world_size, rank, arguments = drawn
    with fake_world(world_size, rank), ParallelState.create(**arguments) as state:
        for name in DIMS:
            if "gtp_remat" in version.changes() or "_GTP_WEIGHT" not in name or state.values[name]:
                assert plain(state.read(name)) == members(arguments, world_size, rank, name), name
        with parallel_state.use(state):
            peers = members(arguments, world_size, rank, "_GTP_WEIGHT_REMAT_GROUP")
            if arguments["gtp_remat_size"] > 1:
                assert parallel_state.get_gtp_weight_remat_world_size() == len(peers)
                assert parallel_state.get_gtp_weight_remat_rank() == peers.index(rank)
                assert parallel_state.get_gtp_weight_remat_global_ranks() == list(peers)
                assert parallel_state.get_all_ranks().split("_")[1] == str(peers.index(rank))
            every = members(arguments, world_size, rank, "_DATA_PARALLEL_GROUP_WITH_GTP_REMAT")
            same = members(arguments, world_size, rank, "_DATA_PARALLEL_GROUP")
            assert parallel_state.get_data_parallel_world_size() == len(every)
            assert parallel_state.get_data_parallel_rank() == every.index(rank)
            assert parallel_state.get_data_parallel_world_size(with_gtp_remat=False) == len(same)
            assert parallel_state.get_data_parallel_rank(with_gtp_remat=False) == same.index(rank)


# The collections of a state and of grids with the same sizes match the arithmetic.
@given(sizes_with_gtp())
def test_collections_match_numpy(drawn):
    world_size, rank, arguments = drawn
    expected = {field: members(arguments, world_size, rank, FIELDS[field]) for field in FIELDS}
    expected = {field: ranks for field, ranks in expected.items() if len(ranks) > 1}
    with fake_world(world_size, rank):
        with ParallelState.create(**arguments) as state:
            found = ProcessGroupCollection.from_state(state)
            assert {name: plain(vars(found)[name]) for name in expected} == expected
        short = {name: arguments[long] for name, long in LONG.items() if long in arguments}
        with megatron_grids(**short) as grids:
            found = create_megatron_pgs(grids)["training"]
            assert {name: plain(vars(found)[name]) for name in expected} == expected


# With GTP peers for dense layers, there are no gloo groups. With GTP peers for experts only,
# experts have no gloo groups.
@pytest.mark.usefixtures("release")
def test_gloo_groups_with_gtp():
    with fake_world(8), ParallelState.create(gtp_remat_size=2) as state:
        assert state.read("_DATA_PARALLEL_GROUP_GLOO") is None
        assert state.read("_EXPERT_DATA_PARALLEL_GROUP_GLOO") is None
        with (
            parallel_state.use(state),
            pytest.raises(AssertionError, match="with GTP"),
        ):
            parallel_state.get_data_parallel_group_gloo()
    with fake_world(8), ParallelState.create(expert_gtp_remat_size=2) as state:
        assert state.read("_DATA_PARALLEL_GROUP_GLOO") is not None
        assert state.read("_EXPERT_DATA_PARALLEL_GROUP_GLOO") is None


# The setup for an optimizer has the GTP groups, whichever release is followed.
def test_setup_for_an_optimizer(release):
    del release
    chunk = type("Chunk", (), {})()
    with fake_world(8, 5):
        parallel_state.initialize_model_parallel(**BOTH)
        try:
            setup = ProcessGroupCollection.setup_process_groups_for_optimizer
            found = setup(None, [chunk], use_gloo_process_groups=True)
            assert ProcessGroupCollection.is_gtp_remat_active(found)
            assert plain(found["gtp_remat_group"]) == (5, 7)
            assert plain(found["expt_gtp_remat_group"]) == (5, 7)
            assert plain(found["expt_tp_pp_with_egtp_remat_group"]) == (4, 5, 6, 7)
            assert found["intra_dp_cp_group_gloo"] is None
            peers = parallel_state.get_gtp_weight_remat_group()
            assert resolve_gtp_remat_group(None, is_expert=False) is peers
            empty = ProcessGroupCollection()
            own = ProcessGroupCollection(expt_gtp_remat=None)
            assert resolve_gtp_remat_group(empty, is_expert=False) is peers
            assert resolve_gtp_remat_group(own, is_expert=True) is None
        finally:
            parallel_state.destroy_model_parallel()
        for group in (None, dist.new_group([5])):  # a group of one rank shares nothing
            assert not ProcessGroupCollection.is_gtp_remat_active({"gtp_remat_group": group})


# Arguments that megatron-core 0.19 rejects raise the same types of errors, and create nothing.
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"gtp_remat_size": 2, **INSTANCES}, AssertionError, "one optimizer instance only"),
        (
            {"expert_model_parallel_size": 4, "expert_gtp_remat_size": 4},
            RuntimeError,
            "dp=-1 needs a multiple of 16 ranks, for example 16; the world has 8",
        ),
    ],
)
@pytest.mark.usefixtures("release")
def test_invalid_gtp_arguments(arguments, error, message):
    with fake_world(8):
        with pytest.raises(error, match=message) as caught:
            parallel_state.initialize_model_parallel(**arguments)
        assert isinstance(caught.value, errors.HyperCommError)
        assert not parallel_state.is_initialized()
        parallel_state.initialize_model_parallel(gtp_remat_size=2)
        parallel_state.destroy_model_parallel()


# RankGenerator enumerates the GTP peers. get_gtp_ranks() must be called with the generator's size.
def test_rank_generator_with_gtp(release):
    generator = parallel_state.RankGenerator(
        tp=2, ep=1, dp=1, pp=1, cp=1, order="tp-gtp_remat", gtp_remat=2
    )
    assert generator.get_gtp_ranks(2) == generator.get_ranks("gtp_remat") == [[0, 2], [1, 3]]
    with pytest.raises(AssertionError, match="must be the generator's gtp_remat=2, got 1"):
        generator.get_gtp_ranks(1)
    alone = parallel_state.RankGenerator(tp=2, ep=1, dp=1, pp=1, cp=1, order="tp", rank_offset=4)
    if release != "0.16.1":
        assert alone.get_gtp_ranks(1) == [[4], [5]]
    assert (alone.order == "tp-pp-dp-ep-cp") == (release == "0.16.1")
