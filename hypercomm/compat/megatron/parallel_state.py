# mypy: disable-error-code="no-any-return"
"""Megatron's `parallel_state` on grid instances: its functions, and its globals.

The functions act on the current `ParallelState`: the default one, which `initialize_model_parallel`
fills, or that of a `with use(state):` block. The globals, such as `_TENSOR_MODEL_PARALLEL_GROUP`,
can be read and written, and getters follow what was written. DeepSpeed takes this module as `mpu`.

Source: names, signatures and behaviour follow `megatron.core.parallel_state`; the sequence-parallel
names that of Megatron-DeepSpeed, at 4efb479.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import attrs
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypercomm.compat.layouts import Layouts, inject_gtp
from hypercomm.compat.megatron import state as _states
from hypercomm.compat.megatron import table
from hypercomm.compat.megatron.install import MegatronNotReplacedWarning
from hypercomm.compat.megatron.state import NO_PART, RANK, SIZE, STAGE, STAGES, current, words_of
from hypercomm.compat.megatron.table import DP, DP_CP, EXPERT_DP, GLOO
from hypercomm.compat.module_state import name_functions
from hypercomm.errors import GroupMissingError, NotInitializedError, StateError
from hypercomm.layout.checks import check_duration
from hypercomm.layout.text import shown
from hypercomm.process_groups import torch_internals as torchdist

if TYPE_CHECKING:

    def __getattr__(name: str) -> Any:
        """Stand for the functions and globals that the table's rows bring."""


_state = current.get

RankGenerator = table.RankGenerator
generate_masked_orthogonal_rank_groups = table.generate_masked_orthogonal_rank_groups
_inject_gtp_remat_axis = inject_gtp
default_embedding_ranks = table.default_embedding_ranks
default_position_embedding_ranks = table.default_position_embedding_ranks
get_nccl_options = _states.get_nccl_options
overwrite_nccl_comm_cfgs = _states.overwrite_nccl_comm_cfgs
GlobalMemoryBuffer = _states.GlobalMemoryBuffer
ParallelState = _states.ParallelState

# ---- the state --------------------------------------------------------------------------------


def use(state: ParallelState) -> contextlib.AbstractContextManager[ParallelState]:
    """Make the functions and globals of this module act on `state` within a `with` block.

    Each thread and each asyncio task has its own blocks. A backward pass on a GPU runs in a thread
    of autograd, outside the block; a getter that is called there warns while several states are
    alive.
    `initialize_model_parallel` and `destroy_model_parallel` always act on the default state.

    Example:
        >>> from hypercomm.testing import fake_world
        >>> with fake_world(8), ParallelState.create(tensor_model_parallel_size=4) as state:
        ...     with use(state):
        ...         get_tensor_model_parallel_world_size(), get_data_parallel_world_size()
        (4, 2)
    """
    return current.use(state)


def _sign(function: Any, other: Callable[..., Any]) -> None:
    """Give a function the signature of another one, which gets its arguments."""
    function.__signature__ = inspect.signature(other)


def initialize_model_parallel(*args: Any, **kwargs: Any) -> None:  # noqa: D417
    """Create all of Megatron's groups, and fill the default state; every rank must call this.

    A failure leaves globals, groups and environment as they were. A `MegatronNotReplacedWarning`
    is issued if `megatron.core` was imported without `install()`, since its layers then look for
    their groups in its own parallel state.

    Args:
        tensor_model_parallel_size: Ranks that share each dense layer's tensors.
        pipeline_model_parallel_size: Pipeline stages.
        virtual_pipeline_model_parallel_size: Interleaved stages for each rank of a pipeline.
        pipeline_model_parallel_comm_backend: None for that of WORLD, "nccl" or "ucc".
        use_sharp: Enable SHARP for one communicator.
        context_parallel_size: Ranks that share each sequence.
        hierarchical_context_parallel_sizes: Factors of the context parallel size, innermost first.
        expert_model_parallel_size: Ranks that share the experts.
        num_distributed_optimizer_instances: Replicas of the optimizer over the data parallel ranks.
        expert_tensor_parallel_size: Ranks that share an expert's tensors; default: as for tensors.
        nccl_communicator_config_path: A yaml file with NCCL options for each group.
        distributed_timeout_minutes: Timeout of each group, in minutes.
        order: The dims, the first one varying fastest.
        get_embedding_ranks: Takes the ranks of a pipeline, returns those with word embeddings,
            equally many of each pipeline; default: the first and the last.
        get_position_embedding_ranks: As above, for position embeddings; default: the first.
        create_gloo_process_groups: Create each data parallel group for gloo too.
        high_priority_stream_groups: Keys of groups whose streams have a high priority.
        sharp_enabled_group: "dp" or "dp_replica"; default with `use_sharp`: "dp".
        hybrid_context_parallel: Create groups of every power of 2 within data and context parallel.
        create_all_gather_group: Create the dp-cp group twice, for all-gathers that overlap.
        gtp_remat_size: GTP peers: ranks that share each weight of the dense layers, and gather it
            for each use. They process different data.
        expert_gtp_remat_size: The same for the weights of experts.
        rank_offset: The smallest rank of the model.
        local_world_size: The number of ranks of the model; default: that of the job.
        share: "identical" creates one group for each distinct set of ranks, except those that
            exist to overlap; default: groups of one rank only.
        strict: Raise if a getter is called outside `use(state)` while several states are alive;
            default: a warning, once.

    Raises:
        LayoutError: A size is not a positive int (a ValueError).
        WorldSizeError: The sizes do not divide the world; names sizes that would (a RuntimeError).
        ConfigurationError: Two choices contradict each other, or the NCCL configuration cannot be
            used (an AssertionError and a RuntimeError).
        FileNotFoundError: The NCCL configuration is not there.
        StateError: torch.distributed is not initialised, or the state is (an AssertionError).
        CreationError, GroupOptionsError: The groups cannot be created here.

    Example:
        >>> from hypercomm.testing import fake_world
        >>> with fake_world(16, rank=5):
        ...     initialize_model_parallel(2, 4)
        ...     print(get_tensor_model_parallel_rank(), get_pipeline_model_parallel_next_rank())
        ...     destroy_model_parallel()
        1 9
    """
    theirs = sys.modules.get("megatron.core.parallel_state")
    if theirs is not None and theirs is not sys.modules[__name__]:
        warnings.warn(
            "megatron.core.parallel_state is loaded, and is not ours: layers find no groups. Call "
            "hypercomm.compat.megatron.install() before megatron.core is imported",
            MegatronNotReplacedWarning,
            stacklevel=2,
        )
    current.default.initialize(*args, **kwargs)


_sign(initialize_model_parallel, table.Configuration)


def destroy_model_parallel() -> None:
    """Destroy the groups that the default state created, and set its globals to None.

    Symmetric memory and NCCL's expert parallelism, which use the groups, are destroyed first.
    """
    _states.destroy_users_of_groups()
    current.default.destroy()


def is_initialized() -> bool:
    """Return whether the parallel state is initialised."""
    return _has(DP)


def model_parallel_is_initialized() -> bool:
    """Return whether the tensor, pipeline and data parallel groups exist."""
    return _has(table.TP, table.PP, DP)


def sequence_parallel_is_initialized() -> bool:
    """Return whether the groups of dp and cp, DeepSpeed's sequence parallel, exist."""
    return _has(table.CP, DP)


def sequence_data_parallel_is_initialized() -> bool:
    """Return whether the group over data and context parallel exists."""
    return _has(DP_CP)


def _has(*names: str) -> bool:
    values = _state().values
    return all(values[name] is not None for name in names)


def is_unitialized() -> bool:
    """Return whether the parallel state is not initialised (deprecated: use `is_initialized`)."""
    _deprecated("is_unitialized", "is_initialized")
    return not is_initialized()


def _deprecated(name: str, other: str) -> None:
    warnings.warn(f"{name} is deprecated, use {other}", DeprecationWarning, stacklevel=3)


# ---- groups -----------------------------------------------------------------------------------

_PARTS = {DP: NO_PART, DP_CP: table.INTRA_DP_CP, EXPERT_DP: table.INTRA_EXPERT_DP}
"""The part of a data parallel group in one optimizer instance."""

_PEERS = {name: name + table.WITH_GTP for name in (*_PARTS, *_PARTS.values())}
_PEERS[NO_PART] = NO_PART
"""The data parallel group that includes the GTP peers."""

_FACTS = {SIZE: "size of the", RANK: "position of the calling rank in the"}


def _held(name: str, check_initialized: bool = True) -> Any:
    return _state().require(name, check_initialized)


def _getter(name: str, required: bool = True) -> Callable[..., Any]:
    """Return a getter of a global."""
    held: Any = None

    def get(check_initialized: bool = required) -> Any:
        return _state().require(name, check_initialized) if held is None else held

    current.show(get, held=name)
    get.__doc__ = f"Return the {words_of(name)} of the calling rank."
    return get


def _first(name: str) -> Callable[[], int]:
    held: Any = None

    def get() -> int:
        return (_state().require(name) if held is None else held)[0]

    current.show(get, held=name)
    get.__doc__ = f"Return the first of the {words_of(name)}."
    return get


def _fact(name: str, fact: str) -> Callable[[], int]:
    key, held = f"{name}_{fact}", None

    def get() -> int:
        return _state().ask(key) if held is None else held

    current.show(get, held=key)
    get.__doc__ = f"Return the {_FACTS[fact]} {words_of(name)}."
    return get


def _setter(name: str) -> Callable[[int | None], None]:
    def set_world_size(world_size: int | None) -> None:
        _state().write(name, world_size)

    def set_rank(rank: int | None) -> None:
        _state().write(name, rank)

    setter = set_rank if name.endswith(RANK) else set_world_size
    setter.__doc__ = f"Set {name}, which getters prefer to what the group answers."
    return setter


def _functions_of_rows() -> Iterator[tuple[str, Callable[..., Any]]]:
    """Yield each function that differs from others only in its global, and its name.

    The name follows from the global. Other names are those of Megatron-DeepSpeed, to which the
    ranks that share a sequence are those of context parallel. There is no
    initialize_sequence_parallel, by which DeepSpeed knows an mpu without model parallel.
    """
    rows = {row.name.strip("_").lower(): row for row in table.TABLE if row.field is not None}
    rows["inter_distributed_optimizer_instance_group"] = table.ROWS[table.INTER_INSTANCES]
    rows["sequence_parallel_group"] = table.ROWS[table.CP]
    rows["sequence_data_parallel_group"] = table.ROWS[DP_CP]
    for name, row in rows.items():
        stem = f"get_{name.removesuffix('_group')}"
        if not name.endswith("_with_cp"):
            yield f"get_{name}", _getter(row.name)
        if name.endswith(("_parallel_group", "_remat_group")):
            yield f"{stem}_world_size", _fact(row.name, SIZE)
            yield f"{stem}_rank", _fact(row.name, RANK)
            if row.ranks is not None:
                yield f"{stem}_global_ranks", _getter(row.ranks)
                yield f"{stem}_src_rank", _first(row.ranks)
    for override in (*_states.OVERRIDES, STAGES):
        yield f"set{override.removeprefix('_MPU').lower()}", _setter(override)


globals().update(_functions_of_rows())
_stages, _stage = _fact(table.PP, SIZE), _fact(table.PP, RANK)
_stage_ranks = _getter("_PIPELINE_GLOBAL_RANKS")
_tensor_data = _getter("_TENSOR_AND_DATA_PARALLEL_GROUP")
_tensor_data_context = _getter("_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP")
_expert_model, _with_egtp = _getter(table.EXPERT_MP), _getter(f"{table.EXPERT_MP}_WITH_EGTP")
_first_of_dp = _first("_DATA_PARALLEL_GLOBAL_RANKS")
_first_with_cp = _first("_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP")
get_pipeline_model_parallel_first_rank = _first("_PIPELINE_GLOBAL_RANKS")
get_virtual_pipeline_model_parallel_rank = _getter(STAGE, required=False)
get_virtual_pipeline_model_parallel_world_size = _getter(STAGES, required=False)


def get_data_parallel_group(
    with_context_parallel: bool = False,
    *,
    with_gtp_remat: bool = True,
    partial_data_parallel: bool = False,
    independent_all_gather: bool = False,
) -> ProcessGroup:
    """Return the data parallel group that the arguments choose.

    Args:
        with_context_parallel: With the context parallel ranks.
        with_gtp_remat: With the GTP peers, which process different data; False: only the ranks
            that have the same weights.
        partial_data_parallel: Its part in one optimizer instance; needs `with_context_parallel`.
        independent_all_gather: The second group for all-gathers; needs `with_context_parallel`.
    """
    state = current.alone or _state()
    if independent_all_gather and with_context_parallel and not partial_data_parallel:
        return state.require(table.DP_CP_AG)
    name = DP_CP if with_context_parallel else DP
    if partial_data_parallel:
        name = _PARTS[name]
    if with_gtp_remat and state.answers_gtp:
        name = _PEERS[name]
    return state.values.get(name) or state.require(name)


def get_data_parallel_group_gloo(
    with_context_parallel: bool = False, partial_data_parallel: bool = False
) -> ProcessGroup:
    """Return the gloo group of data parallel ranks."""
    name = DP_CP if with_context_parallel else DP
    return _held((_PARTS[name] if partial_data_parallel else name) + GLOO)


def has_separate_all_gather_group() -> bool:
    """Return whether the second dp-cp group for all-gathers exists."""
    return _has(table.DP_CP_AG)


def get_hybrid_data_context_parallel_groups(
    check_initialized: bool = True, group_size: int | None = None
) -> ProcessGroup:
    """Return the hybrid group of `group_size` ranks; one of all dp-cp ranks is the dp-cp group.

    Raises:
        GroupMissingError: There is no group of that size (a KeyError).
    """
    if group_size == get_data_parallel_world_size(with_context_parallel=True):
        return _held(DP_CP, check_initialized)
    groups = _state().values["_HYBRID_DP_CP_GROUPS"]
    if group_size not in groups:
        raise GroupMissingError(
            f"there is no hybrid group of group_size={shown(group_size)}; there are those of "
            f"{list(groups) or 'none: initialise with hybrid_context_parallel=True'}"
        )
    return groups[group_size]


def get_amax_reduction_group(
    with_context_parallel: bool = False, tp_only_amax_red: bool = False
) -> ProcessGroup:
    """Return the group over which FP8 reduces its maxima."""
    if tp_only_amax_red:
        return _held(table.TP_CP if with_context_parallel else table.TP)
    return get_tensor_and_data_parallel_group(with_context_parallel=with_context_parallel)


def get_tensor_and_data_parallel_group(
    check_initialized: bool = True, with_context_parallel: bool = False
) -> ProcessGroup:
    """Return the group over tensor and data parallel, and context parallel if asked."""
    get = _tensor_data_context if with_context_parallel else _tensor_data
    return get(check_initialized)


def get_expert_tensor_model_pipeline_parallel_group(
    check_initialized: bool = True, with_egtp_remat: bool = False
) -> ProcessGroup:
    """Return the group over the tensors, experts and stages, and GTP peers if asked."""
    return (_with_egtp if with_egtp_remat else _expert_model)(check_initialized)


def get_expert_data_parallel_group(
    check_initialized: bool = True,
    *,
    with_gtp_remat: bool = True,
    partial_expert_data_parallel: bool = False,
) -> ProcessGroup:
    """Return the expert data parallel group, or its part in one optimizer instance.

    Args:
        check_initialized: False to get None where there is no group.
        with_gtp_remat: With the GTP peers; False: only the ranks that have the same weights.
        partial_expert_data_parallel: Its part in one optimizer instance.
    """
    state = current.alone or _state()
    name = table.INTRA_EXPERT_DP if partial_expert_data_parallel else EXPERT_DP
    if with_gtp_remat and state.answers_gtp:
        name = _PEERS[name]
    return state.values.get(name) or state.require(name, check_initialized)


def get_expert_data_parallel_group_gloo(partial_expert_data_parallel: bool = False) -> ProcessGroup:
    """Return the gloo group of expert data parallel ranks."""
    return _held((table.INTRA_EXPERT_DP if partial_expert_data_parallel else EXPERT_DP) + GLOO)


def get_data_modulo_expert_parallel_group(
    partial_expert_data_parallel: bool = False,
) -> ProcessGroup:
    """Return the expert data parallel group (deprecated: `get_expert_data_parallel_group`)."""
    _deprecated("get_data_modulo_expert_parallel_group", "get_expert_data_parallel_group")
    return get_expert_data_parallel_group(partial_expert_data_parallel=partial_expert_data_parallel)


# ---- sizes and ranks --------------------------------------------------------------------------


def _data_fact(fact: str) -> Callable[..., int]:
    dp, dp_cp, parts, peers = _keys_of(fact, DP, DP_CP)

    def get(
        with_context_parallel: bool = False,
        *,
        with_gtp_remat: bool = True,
        partial_data_parallel: bool = False,
    ) -> int:
        state = current.alone or _state()
        key = dp_cp if with_context_parallel else dp
        if partial_data_parallel:
            key = parts[key]
        if with_gtp_remat and state.answers_gtp:
            key = peers[key]
        known = state.values[key]
        return state.ask(key) if known is None else known

    get.__doc__ = f"Return the {_FACTS[fact]} group that `get_data_parallel_group` returns."
    return get


def _expert_data_fact(fact: str) -> Callable[..., int]:
    whole, part, _, peers = _keys_of(fact, EXPERT_DP, table.INTRA_EXPERT_DP)

    def get(*, with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False) -> int:
        state = current.alone or _state()
        key = part if partial_expert_data_parallel else whole
        if with_gtp_remat and state.answers_gtp:
            key = peers[key]
        known = state.values[key]
        return state.ask(key) if known is None else known

    get.__doc__ = f"Return the {_FACTS[fact]} group of `get_expert_data_parallel_group`."
    return get


def _keys_of(fact: str, *names: str) -> Any:
    """Return the keys of a fact about two groups, and about their parts and those with peers."""
    tables = ({f"{key}_{fact}": f"{of}_{fact}" for key, of in t.items()} for t in (_PARTS, _PEERS))
    return (*(f"{name}_{fact}" for name in names), *tables)


get_data_parallel_world_size, get_data_parallel_rank = map(_data_fact, _FACTS)
get_expert_data_parallel_world_size, get_expert_data_parallel_rank = map(_expert_data_fact, _FACTS)


def get_all_ranks() -> str:
    """Return the ranks in tp, gtp_remat (from 0.19 on), dp, cp, pp and ep, with underscores."""
    peers = ["gtp_weight_remat"] * _state().answers_gtp
    names = ("tensor_model_parallel", *peers, "data_parallel", "context_parallel")
    names = (*names, "pipeline_model_parallel", "expert_model_parallel")
    return "_".join(str(globals()[f"get_{name}_rank"]() or 0) for name in names)


# ---- global ranks, and the pipeline -----------------------------------------------------------


def get_pipeline_model_parallel_last_rank() -> int:
    """Return the rank of the last stage of the calling rank's pipeline."""
    return _stage_ranks()[_stages() - 1]


def get_pipeline_model_parallel_next_rank() -> int:
    """Return the rank of the next stage, the first one after the last."""
    return _stage_ranks()[(_stage() + 1) % _stages()]


def get_pipeline_model_parallel_prev_rank() -> int:
    """Return the rank of the previous stage, the last one before the first."""
    return _stage_ranks()[(_stage() - 1) % _stages()]


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    """Return the first rank of a data parallel group."""
    return _first_with_cp() if with_context_parallel else _first_of_dp()


def get_data_parallel_group_ranks() -> list[int]:
    """Return the ranks of the data parallel group, as DeepSpeed asks for them."""
    return list(_held("_DATA_PARALLEL_GLOBAL_RANKS"))


def is_pipeline_first_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Return whether this is the first stage, and `vp_stage` too with `ignore_virtual=False`."""
    return (ignore_virtual or _virtual_stage(vp_stage) in {None, 0}) and _stage() == 0


def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Return whether this is the last stage, and `vp_stage` too with `ignore_virtual=False`."""
    if not ignore_virtual:
        stage, size = _virtual_stage(vp_stage), get_virtual_pipeline_model_parallel_world_size()
        if size is not None and stage != size - 1:
            return False
    return _stage() == _stages() - 1


def _virtual_stage(vp_stage: int | None) -> int | None:
    if get_virtual_pipeline_model_parallel_world_size() is None:
        return None
    if vp_stage is None:
        raise StateError(
            "vp_stage must be given with ignore_virtual=False: the pipeline is virtual"
        )
    return vp_stage


def is_rank_in_embedding_group(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Return whether the calling rank, or its stage `vp_stage`, has word embeddings."""
    rank, ranks = dist.get_rank(), _state().values["_EMBEDDING_GLOBAL_RANKS"]
    if ranks is None or ignore_virtual or rank not in ranks:
        return ranks is not None and rank in ranks
    if rank == ranks[0]:
        return is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
    return rank != ranks[-1] or is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)


def is_rank_in_position_embedding_group() -> bool:
    """Return whether the calling rank has position embeddings."""
    rank, ranks = dist.get_rank(), _state().values["_POSITION_EMBEDDING_GLOBAL_RANKS"]
    return ranks is not None and rank in ranks


def set_virtual_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Set the virtual stage (deprecated: pass `vp_stage` instead)."""
    _deprecated("set_virtual_pipeline_model_parallel_rank", "the argument vp_stage")
    _state().write(STAGE, rank)


# ---- memory buffers ---------------------------------------------------------------------------

_MEMORY, _SYMMETRIC = "_GLOBAL_MEMORY_BUFFER", "_GLOBAL_SYMMETRIC_MEMORY_BUFFER"

get_global_memory_buffer = _getter(_MEMORY)
get_global_symmetric_memory_buffer = _getter(_SYMMETRIC)


def _set_global_memory_buffer() -> None:
    _fill_once(_MEMORY, GlobalMemoryBuffer)


def _set_global_symmetric_memory_buffer() -> None:
    """Set the buffer, of 256 MiB; its class is in `megatron.core.utils` up to 0.16."""
    utils: Any = importlib.import_module("megatron.core.utils")
    _fill_once(_SYMMETRIC, lambda: utils.GlobalSymmetricMemoryBuffer(256, _held(table.TP)))


def _fill_once(name: str, make: Callable[[], Any]) -> None:
    if _held(name, check_initialized=False) is not None:
        raise StateError(f"{name} is already initialized; destroy it first")
    _state().write(name, make())


def destroy_global_memory_buffer() -> None:
    """Discard the memory buffer."""
    _state().write(_MEMORY, None)


def destroy_global_symmetric_memory_buffer() -> None:
    """Discard the symmetric memory buffer."""
    _state().write(_SYMMETRIC, None)


# ---- groups outside the state -----------------------------------------------------------------


def create_group(*args: Any, **kwargs: Any) -> Any:
    """Create one group as `torch.distributed.new_group` does, and list it for `update_pg_timeout`.

    Every rank of the world must call this; the caller destroys the group.
    """
    group = dist.new_group(*args, **kwargs)
    own = torchdist.as_member(group)
    if own is not None:
        _state().list_groups([own])
    return group


_sign(create_group, dist.new_group)


def create_all_gather_groups(
    for_expert_parallelism: bool = False,
    timeout: timedelta | None = None,
    nccl_comm_cfgs: Mapping[str, Mapping[str, Any]] | None = None,
) -> tuple[ProcessGroup | None, ProcessGroup | None]:
    """Create the dp-cp group and the expert dp group again, for all-gathers that overlap.

    The state owns the groups, and `update_pg_timeout` applies to them. A collection of the state
    has them as `dp_cp_ag` and `expt_dp_ag`. A second call returns the same groups.

    Returns:
        The two groups; None for the expert one unless it is asked for and experts are parallel.

    Raises:
        NotInitializedError: The parallel state is not initialised (a RuntimeError).
        GroupOptionsError: An option is invalid, or the groups already exist with other options (a
            ValueError).
        ConfigurationError: `nccl_comm_cfgs` is not a configuration.
    """
    state = _state()
    if state.configuration is None:
        raise NotInitializedError(
            "create_all_gather_groups() needs groups; call initialize_model_parallel() first"
        )
    config = attrs.evolve(state.configuration, create_all_gather_group=True)
    layouts = Layouts(*[grid.layout for grid in state.grids.values()])
    rows = [table.ROWS[table.DP_CP_AG]]
    if for_expert_parallelism and layouts.expert.size_of("ep") > 1:
        rows.append(table.EXPERT_ALL_GATHER)
    options = {row.key: get_nccl_options(row.key, nccl_comm_cfgs or {}) for row in rows}
    groups: list[ProcessGroup | None] = []
    for wanted in table.rows(config, layouts, options, table=rows):
        arguments: dict[str, Any] = {
            **wanted.arguments,
            "timeout": config.timeout if timeout is None else timeout,
            "group_desc": wanted.name.lstrip("_"),
        }
        groups.append(state.grids["dense"].ensure_pg(**arguments))
        state.write(wanted.name, groups[-1])
    state.list_groups(groups)
    return groups[0], groups[1] if len(groups) > 1 else None


def update_pg_timeout(timeout: timedelta, pg: ProcessGroup | None = None) -> None:
    """Change the timeout of a group, or of all groups of the state and WORLD, after a barrier.

    Raises:
        StateError: No group is given and there is none.
    """
    check_duration(timeout)
    groups = [pg] if pg is not None else _held("_global_process_group_list")
    dist.barrier(pg)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    for group in groups:
        torchdist.set_timeout(timeout, group)


name_functions(globals(), __name__)
current.bind(sys.modules[__name__], _states.GLOBALS)
