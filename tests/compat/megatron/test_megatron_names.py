"""Test names, signatures and free functions of Megatron's parallel_state, and invalid calls."""

import contextlib
import inspect
from datetime import timedelta
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist
from megatron_comparison import GLOBALS, forget, ours, plain, theirs

from hypercomm import errors
from hypercomm.compat.megatron import ParallelState
from hypercomm.compat.megatron.process_groups_config import ProcessGroupCollection
from hypercomm.testing import fake_world


@pytest.fixture(autouse=True)
def destroy_states():
    """Destroy both states after each test."""
    yield
    ours.destroy_model_parallel()
    forget(theirs)


functions = [
    name
    for name, value in vars(theirs).items()
    if inspect.isfunction(value) and value.__module__ == theirs.__name__
]


# hypercomm has every function of Megatron, with its arguments and defaults. Arguments whose
# position differs between releases are keyword-only, because a position would be ambiguous.
MOVED = {
    "hybrid_context_parallel",
    "create_all_gather_group",
    "gtp_remat_size",
    "expert_gtp_remat_size",
    "rank_offset",
    "local_world_size",
    "with_gtp_remat",
    "partial_data_parallel",
    "partial_expert_data_parallel",
    "independent_all_gather",
}
NEVER_MOVED = {"get_data_parallel_group_gloo", "get_expert_data_parallel_group_gloo"}


@pytest.mark.parametrize("name", functions)
def test_signatures_match_megatron(name):
    def shape(function, at_places):
        return [
            (parameter.name, parameter.default)
            for parameter in inspect.signature(function).parameters.values()
            if name in NEVER_MOVED or (parameter.name in MOVED) != at_places
        ]

    mine = getattr(ours, name)
    megatrons = getattr(theirs, name)
    assert shape(mine, True)[: len(shape(megatrons, True))] == shape(megatrons, True)
    assert dict(shape(megatrons, False)).items() <= dict(shape(mine, False)).items()
    assert mine.__name__ == name
    assert mine.__doc__ or name.startswith("_")


# update_pg_timeout() without a group changes all groups, including groups from create_group, before
# and after initialisation, and all-gather groups.
def test_update_pg_timeout_reaches_all_groups():
    with (
        fake_world(4),
        mock.patch("hypercomm.process_groups.torch_internals.set_timeout") as change,
    ):
        early = ours.create_group([0, 1])
        ours.initialize_model_parallel(2)
        mine = ours.create_group([0, 1])
        twins = ours.create_all_gather_groups()
        ours.update_pg_timeout(timedelta(seconds=3))
        groups = {group for (_, group), _ in change.call_args_list}
        values = [getattr(ours, name) for name in GLOBALS]
        assert groups == {
            None,
            early,
            mine,
            twins[0],
            *(v for v in values if isinstance(v, dist.ProcessGroup)),
        }
        change.reset_mock()
        ours.update_pg_timeout(timedelta(seconds=4), mine)
        change.assert_called_once_with(timedelta(seconds=4), mine)
        ours.destroy_model_parallel()
        with pytest.raises(AssertionError, match="initialize_model_parallel"):
            ours.update_pg_timeout(timedelta(seconds=3))


# The all-gather groups are separate groups with the ranks of dp-cp and of expert dp. A second call
# returns the same groups. They are destroyed with the state.
def test_all_gather_groups():
    with fake_world(16, rank=3):
        with pytest.raises(RuntimeError, match="initialize_model_parallel"):
            ours.create_all_gather_groups()
        ours.initialize_model_parallel(2, context_parallel_size=2, expert_model_parallel_size=4)
        dense, expert = twins = ours.create_all_gather_groups(for_expert_parallelism=True)
        assert plain(dense) == plain(ours._DATA_PARALLEL_GROUP_WITH_CP) == tuple(range(1, 16, 2))
        assert plain(expert) == plain(ours._EXPERT_DATA_PARALLEL_GROUP) == (3, 11)
        assert dense is not ours._DATA_PARALLEL_GROUP_WITH_CP
        assert ours.create_all_gather_groups(for_expert_parallelism=True) == twins
        assert ours.create_all_gather_groups() == (dense, None)
        with pytest.raises(ValueError, match="timeout"):
            ours.create_all_gather_groups(timeout=timedelta(seconds=7))
        held = ProcessGroupCollection.use_mpu_process_groups(["dp_cp_ag", "expt_dp_ag"])
        assert held.dp_cp_ag is dense
        assert held.expt_dp_ag is expert
        ours.destroy_model_parallel()
        assert not {dense, expert} & set(dist.distributed_c10d._world.pg_map)


# The sequence-parallel names are aliases of context parallel. Without other parallelism, the world
# of Megatron-DeepSpeed is an array over (dp, sp).
# DeepSpeed accepts the module as `mpu`.
@pytest.mark.parametrize(("rank", "cp"), [(0, 1), (5, 2), (7, 4)])
def test_sequence_parallel_names(rank, cp):
    assert not hasattr(ours, "initialize_sequence_parallel")
    world = np.arange(8).reshape(-1, cp)
    with fake_world(8, rank):
        assert not ours.sequence_parallel_is_initialized()
        assert not ours.sequence_data_parallel_is_initialized()
        ours.initialize_model_parallel(context_parallel_size=cp)
        assert plain(ours.get_sequence_parallel_group()) == tuple(world[rank // cp])
        assert ours.get_sequence_parallel_world_size() == cp
        assert ours.get_sequence_parallel_rank() == rank % cp
        assert ours.get_sequence_parallel_src_rank() == world[rank // cp, 0]
        assert plain(ours.get_sequence_data_parallel_group()) == tuple(range(8))
        assert ours.get_sequence_data_parallel_world_size() == 8
        assert ours.get_sequence_data_parallel_rank() == rank
        assert ours.get_data_parallel_group_ranks() == list(world[:, rank % cp])
        assert ours.sequence_parallel_is_initialized()
        assert ours.sequence_data_parallel_is_initialized()
        ours.destroy_model_parallel()


BAD = [
    ({"expert_tensor_parallel_size": True}, errors.LayoutError),
    ({"distributed_timeout_minutes": 0}, errors.GroupOptionsError),
    ({"local_world_size": 32}, errors.WorldSizeError),
    ({"share": "all"}, errors.GroupOptionsError),
    ({"min_dynamic_context_parallel_size": 0}, errors.LayoutError),
    ({"high_priority_stream_groups": "dp"}, errors.LayoutError),
    ({"use_sharp": True}, errors.ConfigurationError),
    ({"sharp_enabled_group": "dp"}, errors.ConfigurationError),
    ({"pipeline_model_parallel_comm_backend": "ucc"}, errors.ConfigurationError),
]


# An invalid argument raises with its name or value, and creates nothing. test_errors_match_megatron
# draws the arguments that Megatron rejects, too.
@pytest.mark.parametrize(("arguments", "kind"), BAD, ids=str)
def test_invalid_arguments(arguments, kind):
    with fake_world(16, rank=3):
        groups = set(dist.distributed_c10d._world.pg_map)
        with pytest.raises(kind) as caught:
            ours.initialize_model_parallel(**arguments)
        assert type(caught.value) is kind
        ((name, value),) = arguments.items()
        assert (name if value is True else str(value)) in str(caught.value)
        assert set(dist.distributed_c10d._world.pg_map) == groups
        assert not ours.is_initialized()


# The getter of a group that was not requested raises and names the missing option. This includes
# gloo groups.
def test_getters_of_missing_groups_say_why():
    with (
        fake_world(8),
        ParallelState.create(
            pipeline_model_parallel_size=4, create_gloo_process_groups=False
        ) as state,
        ours.use(state),
    ):
        for getter, reason in [
            (ours.get_data_parallel_group_gloo, "create_gloo_process_groups=False"),
            (ours.get_expert_data_parallel_group_gloo, "create_gloo_process_groups=False"),
            (ours.get_hierarchical_context_parallel_groups, "hierarchical_context_parallel_sizes"),
            (ours.get_inter_distributed_optimizer_instance_group, "optimizer_instances"),
        ]:
            with pytest.raises(AssertionError, match=reason):
                getter()
    with fake_world(8, rank=2), ParallelState.create(pipeline_model_parallel_size=4) as state:
        with ours.use(state), pytest.raises(AssertionError, match="rank 2 is not in any of these"):
            ours.get_embedding_group()
        assert ours.get_embedding_group(check_initialized=False) is None


# As in Megatron's development branch, there is one group for each power of 2 from the smallest
# size.
@pytest.mark.parametrize("least", [1, 2, 4])
@pytest.mark.parametrize("replaced", [False, True])
def test_dynamic_context_parallel(least, replaced):
    ranks = list(range(1, 16, 2))  # tp=2: the data and context parallel ranks of rank 5
    expected = {
        size: tuple(ranks[2 // size * size :][:size]) for size in (1, 2, 4) if size >= least
    }
    real_create_group = ours.create_group
    with fake_world(16, 5):
        patch = mock.patch.object(ours, "create_group", side_effect=real_create_group)
        with patch if replaced else contextlib.nullcontext():
            ours.initialize_model_parallel(
                2,
                dynamic_context_parallel=True,
                min_dynamic_context_parallel_size=least,
                create_gloo_process_groups=False,
            )
        assert {
            size: plain(group) for size, group in ours._DYNAMIC_DP_CP_GROUPS.items()
        } == expected
        for size, members in expected.items():
            group = ours.get_dynamic_data_context_parallel_groups(group_size=size)
            assert plain(group) == members
        whole = ours.get_dynamic_data_context_parallel_groups(group_size=8)
        assert whole is ours._DATA_PARALLEL_GROUP_WITH_CP
        with pytest.raises(KeyError, match="group_size=3 in _DYNAMIC_DP_CP_GROUPS"):
            ours.get_dynamic_data_context_parallel_groups(group_size=3)
        ours.destroy_model_parallel()
        assert ours._DYNAMIC_DP_CP_GROUPS == {}
        ours.initialize_model_parallel(2)
        with pytest.raises(KeyError, match="initialise with dynamic_context_parallel=True"):
            ours.get_dynamic_data_context_parallel_groups(group_size=2)


# Functions that use neither the state nor the grid are those of the installed release. They create
# groups with hypercomm's `create_group`.
def test_functions_of_the_installed_release():
    generator = ours.RankGenerator(tp=2, ep=1, dp=2, pp=2, cp=1, order="tp-dp-pp")
    assert generator.get_ranks("tp-pp") == [[0, 1, 4, 5], [2, 3, 6, 7]]
    with fake_world(6, 2), mock.patch.object(ours, "create_group") as create:
        ours.create_hierarchical_groups(2, range(6), [2, 3])
        assert create.call_count == 5
    with pytest.raises(AttributeError, match="no attribute 'create_groups'"):
        _ = ours.create_groups


# Arguments whose position differs between releases are keywords.
def test_arguments_that_moved_are_keywords():
    for getter in (ours.get_data_parallel_group, ours.get_data_parallel_rank):
        with pytest.raises(TypeError, match="positional"):
            getter(True, True)
