"""Programs that replace functions of Megatron's parallel_state: a replaced function acts."""

import ast
import collections
import inspect
import sys
import warnings
from pathlib import Path
from unittest import mock

import cloudpickle
import pytest
import torch.distributed as dist
from group_checks import all_reduce_of
from group_checks import tables as registered
from megatron_comparison import TAKEN, forget, gloo_made_fake, ours, plain, read_globals, theirs

from hypercomm.compat.megatron import ParallelState
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
"""A configuration that reaches the functions of the Megatron that is installed."""


@pytest.fixture(autouse=True)
def no_state_is_left():
    """Empty both states, whatever a test did."""
    yield
    ours.destroy_model_parallel()
    forget(theirs)


# ---- every pair of functions --------------------------------------------------------------------


def pairs_of(module):
    """Pairs of public names, the first of which uses the second, in the source of a module."""
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
"""Arguments with which a function reaches what it uses; default: none."""


class ReplacedError(Exception):
    """Raised by each function that a test puts in the place of another one."""


def raise_replaced(*_, **__):
    raise ReplacedError


def call(module, name, arguments):
    if name == "RankGenerator":
        module.RankGenerator(tp=2, ep=1, dp=2, pp=1, cp=1, order="tp-dp").get_ranks("tp")
    else:
        getattr(module, name)(**arguments)


def acts(module, outer, inner, rank):
    """Whether a replaced function changes the result of one that uses it."""
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
            except Exception:  # noqa: BLE001 - such as for NCCL options without NCCL
                pass
            finally:
                forget(module)
    return False


# A function that Megatron's functions find replaced, ours find replaced too, and an error in it
# leaves our state unchanged. The pairs are read from Megatron's source.
def test_replaced_functions_act():
    assert len(PAIRS) > 45
    effective = [pair for pair in PAIRS if any(acts(theirs, *pair, rank) for rank in (0, 15))]
    assert len(effective) > 40
    lacking = [pair for pair in effective if not any(acts(ours, *pair, rank) for rank in (0, 15))]
    assert lacking == []


# A getter returns what a replaced one returns, not only calls it.
def test_values_of_replaced_getters():
    with fake_world(WORLD_SIZE, 5):
        ours.initialize_model_parallel(**SIZES)
        five = mock.Mock(size=lambda: 5, rank=lambda: 3)
        with mock.patch.object(ours, "get_context_parallel_group", return_value=five):
            assert ours.get_context_parallel_world_size() == 5
            assert ours.get_context_parallel_rank() == 3
        with mock.patch.object(ours, "get_data_parallel_group", return_value=five):
            assert ours.get_data_parallel_world_size() == 5
            ours._MPU_DATA_PARALLEL_WORLD_SIZE = 6  # what was set wins, as in Megatron
            assert ours.get_data_parallel_world_size() == 6
        with mock.patch.object(ours, "get_pipeline_model_parallel_rank", return_value=1):
            assert not ours.is_pipeline_first_stage()
            assert ours.is_pipeline_last_stage()
            assert ours.get_pipeline_model_parallel_next_rank() == 5
        assert ours.get_context_parallel_world_size() == 2


# ---- what frameworks replace --------------------------------------------------------------------


# Primus replaces the functions that choose the ranks with embeddings, before it initialises.
@pytest.mark.parametrize("module", [ours, theirs])
def test_ranks_with_embeddings(module):
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


def created_with(module, rank, arguments):
    """The groups that a replaced `create_group` is asked for; the globals; what is left."""
    calls = collections.Counter()
    with fake_world(WORLD_SIZE, rank):
        before = registered()
        honest = module.create_group

        # As ms-swift does: a positional timeout, and the rest as it is given.
        def create_group(ranks=None, timeout=None, *args, **kwargs):
            calls[tuple(sorted(ranks)), kwargs.get("backend")] += 1
            return honest(ranks, timeout, *args, **{**kwargs, "backend": None})

        with mock.patch.object(module, "create_group", create_group):
            module.initialize_model_parallel(**arguments)
            found = read_globals(module)
            forget(module)
        return calls, found, registered() == before


# ms-swift wraps create_group: it is called for every group of every rank, as Megatron calls it, and
# the state has the groups that it returns.
@pytest.mark.parametrize("rank", [0, 11])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"create_gloo_process_groups": True, "virtual_pipeline_model_parallel_size": None},
        {"hierarchical_context_parallel_sizes": None, "num_distributed_optimizer_instances": 2},
    ],
    ids=["hierarchy", "gloo", "instances"],
)
def test_create_group(rank, changes):
    arguments = {**SIZES, **changes}
    calls, found, is_clean = created_with(ours, rank, arguments)
    expected_calls, expected, _ = created_with(theirs, rank, arguments)
    assert calls == expected_calls
    assert found == expected
    assert is_clean


# MindSpeed wraps get_nccl_options: it is called for the keys that Megatron calls it for, and each
# group gets the options that it returns.
def test_options():
    given = {ours: {}, theirs: {}}
    for module, options in given.items():
        honest = module.create_group

        def create_group(*args, honest=honest, options=options, **kwargs):
            options[kwargs["group_desc"]] = kwargs.pop("pg_options", None)
            return honest(*args, **kwargs)

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


# Options that gloo does not take are left out, with a warning in the log.
def test_options_without_effect(caplog):
    def get_nccl_options(key, _):
        return "options" if key == "tp" else None

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with mock.patch.object(ours, "get_nccl_options", get_nccl_options):
            ours.initialize_model_parallel()
        assert "['tp'] have no effect on 'gloo'" in caplog.text
        ours.destroy_model_parallel()
    finally:
        dist.destroy_process_group()


# A replaced generator decides the ranks of each group.
@pytest.mark.parametrize("module", [ours, theirs])
def test_generator(module):
    honest = module.RankGenerator

    class Moved(honest):
        def get_ranks(self, token):
            return [sorted(rank * 3 % 8 for rank in ranks) for ranks in super().get_ranks(token)]

    with (
        fake_world(8, 6),
        gloo_made_fake(module),
        mock.patch.object(module, "RankGenerator", Moved),
    ):
        module.initialize_model_parallel(2, create_gloo_process_groups=False)
        assert plain(module._TENSOR_MODEL_PARALLEL_GROUP) == (1, 6)
        assert plain(module._DATA_PARALLEL_GROUP) == (0, 2, 4, 6)
        forget(module)


# A replaced function that fails in the middle leaves no group, no global and no listed group.
def test_a_failing_function():
    with fake_world(8, 3):
        before, rest = registered(), read_globals(ours)
        honest, left = ours.create_group, iter(range(9))

        def create_group(*args, **kwargs):
            if next(left, None) is None:
                raise ReplacedError
            return honest(*args, **{**kwargs, "backend": None})

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


# A group that a replaced function took from elsewhere is not the state's to destroy.
def test_groups_of_others_stay():
    with fake_world(4):
        own = dist.new_group([0, 1])
        with mock.patch.object(ours, "create_group", return_value=own):
            ours.initialize_model_parallel(2)
        assert ours.get_tensor_model_parallel_group() is own
        ours.destroy_model_parallel()
        assert own in registered()[0]


def reduce_over_created():
    """Initialise with a wrapped `create_group`, and reduce over some groups."""
    from hypercomm.compat.megatron import parallel_state

    before, honest = registered(), parallel_state.create_group

    def create_group(*args, **kwargs):
        return honest(*args, **kwargs)

    parallel_state.create_group = create_group
    try:
        parallel_state.initialize_model_parallel(2, context_parallel_size=2)
    finally:
        parallel_state.create_group = honest
    bit = 2 ** dist.get_rank()
    sums = [
        all_reduce_of(bit, parallel_state.get_tensor_model_parallel_group()),
        all_reduce_of(bit, parallel_state.get_context_parallel_group()),
        all_reduce_of(bit, parallel_state.get_data_parallel_group_gloo(with_context_parallel=True)),
    ]
    dense, _ = parallel_state.create_all_gather_groups()
    sums.append(all_reduce_of(bit, dense))
    parallel_state.destroy_model_parallel()
    return sums, registered() == before


# The same on real ranks: with gloo twins, and with groups that the grid adds later.
def test_create_group_on_ranks():
    for rank, (sums, is_clean) in enumerate(run_ranks(reduce_over_created, 4)):
        tp, cp = 0b11 << rank // 2 * 2, 0b101 << rank % 2
        assert sums == [tp, cp, cp, cp]
        assert is_clean


# The states of `create` and `use` are hypercomm's own: replaced functions of Megatron's do not act.
def test_states_of_their_own():
    with (
        fake_world(8),
        mock.patch.object(ours, "create_group", raise_replaced),
        ParallelState.create(tensor_model_parallel_size=4) as state,
        ours.use(state),
    ):
        assert ours.get_tensor_model_parallel_world_size() == 4


# ---- names that are lacking ---------------------------------------------------------------------


# The error for a name that does not exist has the nearest one, however it is asked for.
def test_the_nearest_name():
    with pytest.raises(AttributeError, match="nearest name is 'get_tensor_model_parallel_group'"):
        _ = ours.get_tensor_model_paralel_group
    with pytest.raises(AttributeError, match="nearest name is '_TENSOR_MODEL_PARALLEL_GROUP'"):
        _ = ours._TENSOR_MODEL_PARALEL_GROUP
    with pytest.raises(AttributeError, match=r"no attribute 'zzz'$"):
        _ = ours.zzz
    with pytest.raises(AttributeError), mock.patch.object(ours, "get_foo", raise_replaced):
        pass
    assert not hasattr(ours, "__wrapped__")


# Each getter has a type: an int, a process group, ranks, or whether something is the case.
def test_types():
    for name, function in inspect.getmembers(ours, inspect.isfunction):
        if name.startswith(("get_", "is_", "has_")) and name != "get_nccl_options":
            returned = inspect.signature(function, eval_str=False).return_annotation
            assert returned is not inspect.Signature.empty, name
