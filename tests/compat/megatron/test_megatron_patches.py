"""Test that replacements of functions of Megatron's parallel_state take effect."""

import ast
import collections
import contextlib
import functools
import sys
import warnings
from pathlib import Path
from unittest import mock

import cloudpickle
import pytest
import torch.distributed as dist
from group_checks import all_reduce_of, tables as registered
from megatron_comparison import (
    TAKEN,
    forget,
    gloo_made_fake,
    ours,
    plain,
    read_globals,
    state_of,
    theirs,
)

from hypercomm.compat.megatron import ParallelState
from hypercomm.errors import StateError
from hypercomm.launch import run_ranks
from hypercomm.testing import fake_world

# This module imports megatron.core, which ranks must not do before install().
cloudpickle.register_pickle_by_value(sys.modules[__name__])

WORLD_SIZE = 16
SIZES = {
    "tensor_model_parallel_size": 2,
    "pipeline_model_parallel_size": 2,
    "virtual_pipeline_model_parallel_size": 2,
    "context_parallel_size": 2,
    "hierarchical_context_parallel_sizes": [2, 1],
    "hybrid_context_parallel": True,
    "expert_model_parallel_size": 2,
    "create_gloo_process_groups": False,
    "dynamic_context_parallel": True,
}
SIZES = {name: value for name, value in SIZES.items() if name in TAKEN}
"""A configuration that uses the functions of the installed Megatron."""


@pytest.fixture(autouse=True)
def destroy_states():
    """Destroy both states after each test."""
    yield
    ours.destroy_model_parallel()
    forget(theirs)


# ---- every pair of functions --------------------------------------------------------------------


def pairs_of(module):
    """List the pairs (outer, inner) of public names in a module whose `outer` uses `inner`."""
    body = ast.parse(Path(module.__file__).read_text(encoding="utf-8")).body
    nodes = {node.name: node for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
    public = {name: node for name, node in nodes.items() if not name.startswith("_")}
    return [
        (outer, inner)
        for outer, node in public.items()
        for inner in sorted({each.id for each in ast.walk(node) if isinstance(each, ast.Name)})
        if inner in public and inner != outer
    ]


PAIRS = pairs_of(theirs)

RANKS = {
    "RankGenerator",
    "create_dynamic_dp_cp_groups",
    "create_hierarchical_groups",
    "create_hybrid_dp_cp_groups",
    "generate_masked_orthogonal_rank_groups",
}
"""Functions with which Megatron finds ranks. hypercomm rejects a replacement of them."""

COMPARED = [
    (outer, inner)
    for outer, inner in PAIRS
    if outer != "RankGenerator"
    and (
        not outer.startswith(("initialize", "create_all_gather"))
        or not (inner in RANKS or (outer != "initialize_model_parallel" and "world_size" in inner))
    )
]

FLAGS = [{"ignore_virtual": False, "vp_stage": stage} for stage in range(2)]
CALLS = {
    "create_hierarchical_groups": [{"rank": 0, "ranks": [0, 1], "hierarchical_group_sizes": [2]}],
    "create_hybrid_dp_cp_groups": [{"rank": 0, "ranks": [0, 1, 2, 3], "pg_options": None}],
    "create_dynamic_dp_cp_groups": [{"rank": 0, "ranks": [0, 1, 2, 3], "pg_options": None}],
    "create_all_gather_groups": [{"for_expert_parallelism": True}],
    "get_hybrid_data_context_parallel_groups": [{"group_size": 4}],
    "get_dynamic_data_context_parallel_groups": [{"group_size": 4}],
    "is_pipeline_first_stage": FLAGS,
    "is_pipeline_last_stage": FLAGS,
    "is_rank_in_embedding_group": FLAGS,
    "initialize_model_parallel": [SIZES, {**SIZES, "high_priority_stream_groups": ["dp"]}],
}
"""Arguments with which a function calls the functions that it uses. Default: no arguments."""


class ReplacedError(Exception):
    """Raised by the replacement of a function."""


def raise_replaced(*_, **__):
    raise ReplacedError


def call(module, name, arguments):
    getattr(module, name)(**arguments)


def takes_effect(module, outer, inner, rank):
    """Return whether replacing `inner` changes the result of `outer`."""
    for arguments in CALLS.get(outer, [{}]):
        is_creation = outer == "initialize_model_parallel"
        with fake_world(WORLD_SIZE, rank), gloo_made_fake(module), warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)
            if not is_creation:
                module.initialize_model_parallel(**SIZES)
            before = read_globals(module)
            try:
                with mock.patch.object(module, inner, raise_replaced):
                    call(module, outer, arguments)
            except ReplacedError:
                assert module is theirs or read_globals(ours) == before
                return True
            except Exception:  # noqa: BLE001 - for example NCCL options without NCCL
                pass
            finally:
                forget(module)
    return False


# A replacement that takes effect in Megatron takes effect in hypercomm, too. If the replacement
# raises, hypercomm's state does not change. The pairs are read from Megatron's source.
def test_replacements_take_effect_as_in_megatron():
    assert len(PAIRS) > 45
    ranks = (0, 15)
    effective = [p for p in COMPARED if any(takes_effect(theirs, *p, rank) for rank in ranks)]
    assert len(effective) > 38
    lacking = [p for p in effective if not any(takes_effect(ours, *p, rank) for rank in ranks)]
    assert lacking == []


# A getter uses the return value of a replaced getter.
def test_getters_use_values_of_replaced_getters():
    with fake_world(WORLD_SIZE, 5):
        ours.initialize_model_parallel(**SIZES)
        five = mock.Mock(size=lambda: 5, rank=lambda: 3)
        with mock.patch.object(ours, "get_context_parallel_group", return_value=five):
            assert ours.get_context_parallel_world_size() == 5
            assert ours.get_context_parallel_rank() == 3
        with mock.patch.object(ours, "get_data_parallel_group", return_value=five):
            assert ours.get_data_parallel_world_size() == 5
            ours._MPU_DATA_PARALLEL_WORLD_SIZE = 6  # an override wins, as in Megatron
            assert ours.get_data_parallel_world_size() == 6
        assert ours.get_context_parallel_world_size() == 2


# ---- replacements in real frameworks ------------------------------------------------------------


# Primus replaces the functions that choose the ranks with embeddings, before initialisation.
@pytest.mark.parametrize("module", [ours, theirs])
def test_replaced_embedding_ranks(module):
    with (
        fake_world(8),
        gloo_made_fake(module),
        mock.patch.object(module, "default_embedding_ranks", lambda ranks: [ranks[0]]),
        mock.patch.object(module, "default_position_embedding_ranks", lambda ranks: ranks[:2]),
    ):
        module.initialize_model_parallel(2, 4)
        assert plain(module._EMBEDDING_GROUP) == (0,)
        assert module._EMBEDDING_GLOBAL_RANKS == [0]
        assert module._POSITION_EMBEDDING_GLOBAL_RANKS == [0, 2]
        forget(module)


def created_with_new_group(module, rank, arguments):
    """Initialise with a replaced `torch.distributed.new_group`.

    Return the calls and the globals.
    """
    calls = collections.Counter()
    real_new_group = dist.new_group

    @functools.wraps(real_new_group)
    def new_group(*args, **kwargs):
        assert not args
        calls[tuple(sorted(kwargs["ranks"])), kwargs["backend"]] += 1
        return real_new_group(**{**kwargs, "backend": None})

    with fake_world(WORLD_SIZE, rank), mock.patch.object(dist, "new_group", new_group):
        module.initialize_model_parallel(**arguments)
        found = read_globals(module)
        forget(module)
    return calls, found


# If torch.distributed.new_group was replaced, the replacement is called for every group of the
# job, with the same ranks as in Megatron, and the state has the groups that it returns.
@pytest.mark.parametrize("rank", [0, 11])
@pytest.mark.parametrize("arguments", [{"tensor_model_parallel_size": 2}, SIZES], ids=["tp", "all"])
def test_replaced_new_group(rank, arguments):
    found, expected = (created_with_new_group(each, rank, arguments) for each in (ours, theirs))
    assert sum(expected[0].values()) > WORLD_SIZE
    assert found == expected


def freeable_group():
    """Return a class of groups that can be freed. Ranks make it, because it cannot be pickled."""
    every = []

    class FreeableGroup(dist.ProcessGroup):
        """Stands for a group that can be destroyed and created again, as in slime and miles."""

        def __init__(self, create, arguments):
            self.create, self.arguments = create, arguments
            self.group = create(**arguments)
            super().__init__(dist.get_rank(self.group), dist.get_world_size(self.group))
            every.append(self)

        def rank(self):
            return self.group.rank()

        def size(self):
            return self.group.size()

        @staticmethod
        def free_all():
            for each in every:
                dist.destroy_process_group(each.group)
                each.group = None

        @staticmethod
        def create_all():
            for each in every:
                each.group = each.create(**each.arguments)

    return FreeableGroup


def unwrapping(function):
    """Make a function of torch accept the groups of a `FreeableGroup`."""

    def call(*args, **kwargs):
        args = [getattr(arg, "group", arg) for arg in args]
        return function(*args, **{name: getattr(arg, "group", arg) for name, arg in kwargs.items()})

    return call


def free_all_groups(arguments):
    """Free all groups of a state, create them again, and sum over each."""
    from hypercomm.compat.megatron import parallel_state

    real_new_group = dist.new_group
    groups = freeable_group()
    with contextlib.ExitStack() as stack:
        for name in ("get_process_group_ranks", "all_reduce", "get_rank", "get_world_size"):
            stack.enter_context(mock.patch.object(dist, name, unwrapping(getattr(dist, name))))
        replaced = mock.patch.object(
            dist, "new_group", lambda **given: groups(real_new_group, given)
        )
        stack.enter_context(replaced)
        parallel_state.initialize_model_parallel(**arguments)
        held = {
            name: value
            for name, value in parallel_state.current.default.values.items()
            if isinstance(value, dist.ProcessGroup)
        }
        groups.free_all()
        left = registered()[0] - {dist.group.WORLD}
        groups.create_all()
        sums = {name: all_reduce_of(2 ** dist.get_rank(), group) for name, group in held.items()}
        world_size = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
        parallel_state.destroy_model_parallel()
    return len(left), sums, world_size


# slime and miles wrap new_group to free all groups while an engine generates text. The groups are
# created again later, and have the same ranks as Megatron's groups.
def test_all_groups_can_be_freed():
    arguments = {"tensor_model_parallel_size": 2, "context_parallel_size": 2}
    for rank, (left, sums, size) in enumerate(run_ranks(free_all_groups, 4, args=[arguments])):
        assert left == 0
        assert size == 2
        expected = {
            name: sum(2**member for member in ranks)
            for name, ranks in state_of(theirs, 4, rank, arguments).items()
            if name.startswith("_") and isinstance(ranks, tuple)
        }
        assert len(expected) > 15
        assert sums.items() >= expected.items()


# MindSpeed wraps get_nccl_options. The wrapper is called with the same keys as in Megatron, and
# each group gets the options that the wrapper returns.
def test_replaced_get_nccl_options():
    given = {ours: {}, theirs: {}}
    for module, options in given.items():
        real_create_group = module.create_group

        def create_group(*args, real=real_create_group, options=options, **kwargs):
            options[kwargs["group_desc"]] = kwargs.pop("pg_options", None)
            return real(*args, **kwargs)

        with (
            fake_world(WORLD_SIZE),
            mock.patch.object(module, "create_group", create_group),
            mock.patch.object(module, "get_nccl_options", lambda key, _: f"options of {key}"),
        ):
            module.initialize_model_parallel(**SIZES)
            forget(module)
    assert len(given[theirs]) > 15
    same = {name: value for name, value in given[ours].items() if given[theirs].get(name) == value}
    assert same.keys() == given[theirs].keys()


# NCCL options for a gloo group are ignored, with a warning in the log.
def test_nccl_options_are_ignored_on_gloo(caplog):
    def get_nccl_options(key, _):
        return "options" if key == "tp" else None

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with mock.patch.object(ours, "get_nccl_options", get_nccl_options):
            ours.initialize_model_parallel()
        assert "have no effect on 'gloo'" in caplog.text
        ours.destroy_model_parallel()
    finally:
        dist.destroy_process_group()


# Replacements of functions that compute ranks would have no effect, so they are an error.
@pytest.mark.parametrize("name", [name for name in sorted(RANKS) if hasattr(theirs, name)])
def test_replaced_rank_functions_are_rejected(name, monkeypatch):
    with fake_world(8):
        monkeypatch.setattr(ours, name, raise_replaced)
        with pytest.raises(StateError, match=f"{name} .* was replaced.*new_group instead"):
            ours.initialize_model_parallel(2)
        assert not ours.is_initialized()
        monkeypatch.undo()
        ours.initialize_model_parallel(2)
        assert ours.RankGenerator.__module__.startswith("megatron.core")


# If a replacement of a function fails half-way, no group is left, and no global is set.
def test_failing_replacement_leaves_nothing():
    with fake_world(8, 3):
        before = registered()
        rest = read_globals(ours)
        real_create_group = ours.create_group
        left = iter(range(9))

        def create_group(*args, **kwargs):
            if next(left, None) is None:
                raise ReplacedError
            return real_create_group(*args, **{**kwargs, "backend": None})

        with (
            mock.patch.object(ours, "create_group", create_group),
            pytest.raises(ReplacedError),
        ):
            ours.initialize_model_parallel(2)
        assert registered() == before
        assert read_globals(ours) == rest
        assert ours._global_process_group_list is None
        ours.initialize_model_parallel(2)
        assert ours.get_tensor_model_parallel_world_size() == 2


# If a replaced function returns a group of the user, the state does not destroy this group.
def test_groups_of_the_user_are_not_destroyed():
    with fake_world(4):
        own = dist.new_group([0, 1])
        with mock.patch.object(ours, "create_group", return_value=own):
            ours.initialize_model_parallel(2)
        assert ours.get_tensor_model_parallel_group() is own
        ours.destroy_model_parallel()
        assert own in registered()[0]


# States from ParallelState.create do not use Megatron's functions, so replacements have no effect.
def test_separate_states_ignore_replacements():
    with (
        fake_world(8),
        mock.patch.object(ours, "create_group", raise_replaced),
        ParallelState.create(tensor_model_parallel_size=4) as state,
        ours.use(state),
    ):
        assert ours.get_tensor_model_parallel_world_size() == 4
