"""Test that every group has the right ranks if there are GTP peers, in states and in grids.

The expected ranks are computed by arithmetic.

If megatron-core has GTP, test_megatron_state.py also compares groups with megatron-core's groups.
"""

import megatron_comparison as comparison
import numpy as np
import pytest
from hypothesis import given, strategies as st
from megatron_comparison import plain

from hypercomm import megatron_grids
from hypercomm.compat.megatron import ParallelState, parallel_state
from hypercomm.compat.megatron.presets import create_megatron_pgs
from hypercomm.compat.megatron.process_groups_config import ProcessGroupCollection
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


# Every group of a state, and of the collections of the state and of grids with the same sizes,
# matches the arithmetic. In 0.16 to 0.18, there are no groups of one GTP peer.
@pytest.mark.parametrize("release", ["0.16", "0.19"])
@given(sizes_with_gtp())
def test_groups_match_numpy(release, drawn):
    world_size, rank, arguments = drawn
    expected = {name: members(arguments, world_size, rank, name) for name in DIMS}
    short = {name: arguments[long] for name, long in LONG.items() if long in arguments}
    with (
        comparison.following(release),
        fake_world(world_size, rank),
        ParallelState.create(**arguments) as state,
        megatron_grids(**short) as grids,
    ):
        for name, ranks in expected.items():
            if release != "0.16" or "_GTP_WEIGHT" not in name or state.values[name]:
                assert plain(state.read(name)) == ranks, name
        collections = (
            ProcessGroupCollection.from_state(state),
            create_megatron_pgs(grids)["training"],
        )
        for field, name in FIELDS.items():
            if len(expected[name]) > 1:
                for collection in collections:
                    assert plain(vars(collection)[field]) == expected[name]
        with parallel_state.use(state):
            peers, same = (
                expected[name] for name in ("_GTP_WEIGHT_REMAT_GROUP", "_DATA_PARALLEL_GROUP")
            )
            place = peers.index(rank) if arguments["gtp_remat_size"] > 1 else 0
            assert parallel_state.get_gtp_weight_remat_rank() == place
            assert parallel_state.get_data_parallel_rank(with_gtp_remat=False) == same.index(rank)


# With GTP peers for dense layers, there are no gloo groups. With GTP peers for experts only,
# experts have no gloo groups.
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
