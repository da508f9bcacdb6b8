"""Test names, signatures and free functions of Megatron's parallel_state, and invalid calls."""

import contextlib
import inspect
from datetime import timedelta
from unittest import mock

import numpy as np
import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from megatron_comparison import GLOBALS, LONG, forget, ours, plain, read_globals, theirs

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
    assert mine.__name__ in {name, "inject_gtp"}
    assert mine.__doc__ or name.startswith("_")


@st.composite
def generators(draw):
    """Draw the arguments of a RankGenerator, sometimes invalid ones."""
    sizes = {name: draw(st.sampled_from([1, 1, 2, 3])) for name in ("tp", "ep", "dp", "pp", "cp")}
    order = "-".join(draw(st.lists(st.sampled_from(list(sizes)), unique=True, min_size=2)))
    return {**sizes, "order": order, "rank_offset": draw(st.integers(0, 9))}


# A RankGenerator has the same attributes, masks and ranks as Megatron's, or raises the same error
# type.
@given(generators(), st.lists(st.sampled_from(["tp", "ep", "dp", "pp", "cp"]), min_size=1))
def test_rank_generator_matches_megatron(arguments, dims):
    token = "-".join(dims)
    try:
        expected = theirs.RankGenerator(**arguments)
    except (RuntimeError, AssertionError) as error:
        with pytest.raises(type(error)):
            ours.RankGenerator(**arguments)
        return
    found = ours.RankGenerator(**arguments)
    for name in ("tp", "ep", "dp", "pp", "cp", "rank_offset", "world_size", "order"):
        assert getattr(found, name) == getattr(expected, name)
    assert found.name_to_size == expected.name_to_size
    assert found.ordered_size == expected.ordered_size
    assert found.get_mask(found.order, token) == expected.get_mask(expected.order, token)
    assert found.get_ranks(token) == expected.get_ranks(token)


# Enumeration by masks matches Megatron's, even for a part of the ranks and for an empty mask.
@given(st.data())
def test_masked_groups_match_megatron(data):
    sizes = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=4))
    mask = data.draw(st.lists(st.booleans(), min_size=len(sizes), max_size=len(sizes)))
    world_size = data.draw(st.integers(1, 64))
    try:
        expected = theirs.generate_masked_orthogonal_rank_groups(world_size, sizes, mask)
    except AssertionError:
        with pytest.raises(AssertionError):
            ours.generate_masked_orthogonal_rank_groups(world_size, sizes, mask)
    else:
        found = ours.generate_masked_orthogonal_rank_groups(world_size, sizes, mask)
        assert found == expected


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
    ({"tp": 0}, errors.LayoutError),
    ({"pp": -1}, errors.LayoutError),
    ({"cp": 1.5}, errors.LayoutError),
    ({"ep": "2"}, errors.LayoutError),
    ({"expt_tp": True}, errors.LayoutError),
    ({"num_distributed_optimizer_instances": 0}, errors.LayoutError),
    ({"tp": 2, "pp": 3}, errors.WorldSizeError),
    ({"ep": 8, "expt_tp": 4}, errors.WorldSizeError),
    ({"order": "tp-pp-dp", "tp": 2, "expt_tp": 1, "pp": 2}, errors.ConfigurationError),
    ({"virtual_pipeline_model_parallel_size": 2}, errors.ConfigurationError),
    ({"hierarchical_context_parallel_sizes": [2, 3], "cp": 4}, errors.ConfigurationError),
    ({"pipeline_model_parallel_comm_backend": "gloo"}, errors.ConfigurationError),
    ({"order": "tp-xx"}, errors.UnknownDimError),
    ({"order": "dp-pp", "tp": 2}, errors.ConfigurationError),
    ({"num_distributed_optimizer_instances": 3}, errors.ConfigurationError),
    ({"distributed_timeout_minutes": 0}, errors.GroupOptionsError),
    ({"local_world_size": 32}, errors.WorldSizeError),
    ({"share": "all"}, errors.GroupOptionsError),
    ({"min_dynamic_context_parallel_size": 0}, errors.LayoutError),
    (
        {"dynamic_context_parallel": True, "hybrid_context_parallel": True},
        errors.ConfigurationError,
    ),
    ({"high_priority_stream_groups": "dp"}, errors.LayoutError),
]


# An invalid argument raises with its value and creates nothing, neither globals nor groups. A valid
# call works afterwards.
@pytest.mark.parametrize(("arguments", "kind"), BAD, ids=str)
def test_invalid_arguments(arguments, kind):
    with fake_world(16, rank=3):
        rest = read_globals(ours)
        groups = set(dist.distributed_c10d._world.pg_map)
        with pytest.raises(kind) as caught:
            ours.initialize_model_parallel(
                **{LONG.get(key, key): arguments[key] for key in arguments}
            )
        assert type(caught.value) is kind
        name, value = next(iter(arguments.items()))
        assert (LONG.get(name, name) if value is True else str(value)) in str(caught.value)
        assert read_globals(ours) == rest
        assert set(dist.distributed_c10d._world.pg_map) == groups
        ours.initialize_model_parallel()
        assert ours.is_initialized()
        ours.destroy_model_parallel()


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


# The functions that create groups by size can be called directly. Every rank is in one group of
# each size.
def test_groups_by_size():
    for rank in range(6):
        with fake_world(6, rank):
            own = ours.create_dynamic_dp_cp_groups(rank, range(6), None)
            assert {size: plain(group) for size, group in own.items()} == {
                1: (rank,),
                2: tuple(range(rank // 2 * 2, rank // 2 * 2 + 2)),
            }
            hybrid = ours.create_hybrid_dp_cp_groups(rank, range(6), None)
            assert {size: plain(group) for size, group in hybrid.items()} == {2: plain(own[2])}
            levels, gloo = ours.create_hierarchical_groups(rank, range(6), [2, 3])
            assert [plain(group) for group in levels] == [
                plain(own[2]),
                tuple(range(rank % 2, 6, 2)),
            ]
            assert gloo == [None, None]
            assert ours.create_hierarchical_groups(rank, [4, 5], [2]) == ([], []) or rank > 3


# Arguments whose position differs between releases are keywords.
def test_arguments_that_moved_are_keywords():
    for getter in (ours.get_data_parallel_group, ours.get_data_parallel_rank):
        with pytest.raises(TypeError, match="positional"):
            getter(True, True)
