"""Megatron's `parallel_state` on grid instances: its functions, and its globals.

The functions act on the current `ParallelState`: the default one, which `initialize_model_parallel`
fills, or that of a `with use(state):` block. The globals, such as `_TENSOR_MODEL_PARALLEL_GROUP`,
can be read and written, and getters follow what was written. DeepSpeed takes this module as `mpu`.

Source: names, signatures and behaviour follow `megatron.core.parallel_state`.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import warnings
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypercomm.compat.megatron import groups, memory, nccl, rank_generator
from hypercomm.compat.megatron.configuration import Configuration, RanksFunction, hybrid_sizes
from hypercomm.compat.megatron.getters import (
    RANK,
    SIZE,
    answered,
    data_parallel_getter,
    expert_data_parallel_getter,
    fact_getter,
    group_getter,
    known,
    listed_getter,
    name_functions,
    partial_without_cp,
    rank_setter,
    size_setter,
)
from hypercomm.compat.megatron.state import GLOBALS, ParallelState, current
from hypercomm.compat.module_state import UNKNOWN
from hypercomm.errors import GroupMissingError, GroupOptionsError, StateError
from hypercomm.grid.arguments import Share
from hypercomm.layout import RankLayout
from hypercomm.layout.checks import as_ranks
from hypercomm.layout.messages import shown
from hypercomm.process_groups import c10d
from hypercomm.process_groups.options import (
    check_description,
    check_given_timeout,
    check_timeout,
    live_pg_options,
)

logger = logging.getLogger(__name__)
_state = current.get

RankGenerator = rank_generator.RankGenerator
generate_masked_orthogonal_rank_groups = rank_generator.generate_masked_orthogonal_rank_groups
default_embedding_ranks = groups.default_embedding_ranks
default_position_embedding_ranks = groups.default_position_embedding_ranks
get_nccl_options = nccl.get_nccl_options
overwrite_nccl_comm_cfgs = nccl.overwrite_nccl_comm_cfgs
GlobalMemoryBuffer = memory.GlobalMemoryBuffer
GlobalSymmetricMemoryBuffer = memory.GlobalSymmetricMemoryBuffer

# ---- the state --------------------------------------------------------------------------------


def use(state: ParallelState) -> contextlib.AbstractContextManager[ParallelState]:
    """Let the functions and globals of this module act on `state` within a `with` block.

    The block is context-local: two threads, or two asyncio tasks, can each use their own state. A
    backward pass that is started in the block uses it too, in whichever thread autograd runs it
    (torch 2.6 cannot hand it on). `initialize_model_parallel` and `destroy_model_parallel`
    are for the default state, also in a block: `state.destroy()` ends this one.

    Raises:
        StateError: `state` is no ParallelState.

    Example:
        >>> from hypercomm.testing import fake_world
        >>> with fake_world(8), ParallelState.create(tensor_model_parallel_size=4) as state:
        ...     with use(state):
        ...         get_tensor_model_parallel_world_size(), get_data_parallel_world_size()
        (4, 2)
    """
    return current.use(state)


def initialize_model_parallel(
    tensor_model_parallel_size: int = 1,
    pipeline_model_parallel_size: int = 1,
    virtual_pipeline_model_parallel_size: int | None = None,
    pipeline_model_parallel_comm_backend: str | None = None,
    use_sharp: bool = False,
    context_parallel_size: int = 1,
    hierarchical_context_parallel_sizes: Sequence[int] | None = None,
    expert_model_parallel_size: int = 1,
    num_distributed_optimizer_instances: int = 1,
    expert_tensor_parallel_size: int | None = None,
    nccl_communicator_config_path: str | None = None,
    distributed_timeout_minutes: float = 30,
    order: str = "tp-cp-ep-dp-pp",
    get_embedding_ranks: RanksFunction | None = None,
    get_position_embedding_ranks: RanksFunction | None = None,
    create_gloo_process_groups: bool = True,
    high_priority_stream_groups: Sequence[str] | None = None,
    sharp_enabled_group: str | None = None,
    *,
    hybrid_context_parallel: bool = False,
    create_all_gather_group: bool = False,
    rank_offset: int = 0,
    local_world_size: int | None = None,
    share: Share = "never",
    lazy: bool = False,
) -> None:
    """Create all of Megatron's groups, and fill the default state; every rank must call this.

    A failure leaves nothing behind: no global set, no group registered, the environment as before.

    Args:
        tensor_model_parallel_size: Ranks that share each dense layer's tensors.
        pipeline_model_parallel_size: Pipeline stages.
        virtual_pipeline_model_parallel_size: Interleaved stages for each rank of a pipeline.
        pipeline_model_parallel_comm_backend: None for that of WORLD, "nccl" or "ucc".
        use_sharp: Let one communicator use SHARP.
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
        create_gloo_process_groups: Create gloo twins of the data parallel groups.
        high_priority_stream_groups: Keys of groups whose streams have a high priority.
        sharp_enabled_group: "dp" or "dp_replica"; default with `use_sharp`: "dp".
        hybrid_context_parallel: Create groups of every power of 2 within data and context parallel.
        create_all_gather_group: Create a twin of the dp-cp group for all-gathers that overlap.
        rank_offset: The smallest rank of the model.
        local_world_size: The number of ranks of the model; default: that of the job.
        share: "identical" creates one group for each distinct set of ranks, but for those that
            exist to overlap.
        lazy: Create each group at its first use, which is then collective among its members.

    Raises:
        LayoutError: A size is not a positive int (a ValueError).
        WorldSizeError: The sizes do not divide the world; names those that would (a RuntimeError).
        ConfigurationError: Two choices contradict each other (an AssertionError).
        NcclConfigError, FileNotFoundError: The NCCL configuration cannot be used.
        StateError: torch.distributed is not initialised, or the state is (an AssertionError).
        CreationError, GroupOptionsError: The groups cannot be created here.

    Example:
        >>> from hypercomm.testing import fake_world
        >>> with fake_world(16, rank=5):
        ...     initialize_model_parallel(2, 4)
        ...     print(get_all_ranks(), get_pipeline_model_parallel_next_rank())
        ...     destroy_model_parallel()
        1_0_0_1_0 9
    """
    arguments = dict(locals())  # exactly the fields of a configuration
    current.default.initialize(Configuration(**arguments))


def destroy_model_parallel() -> None:
    """Destroy the groups that the default state created, and set all of its globals back."""
    current.default.destroy()


@answered
def is_initialized(state: ParallelState) -> bool:
    """Tell whether the parallel state is initialised."""
    return state.values["_DATA_PARALLEL_GROUP"] is not None


@answered
def model_parallel_is_initialized(state: ParallelState) -> bool:
    """Tell whether the tensor, pipeline and data parallel groups exist."""
    needed = ("_TENSOR_MODEL_PARALLEL_GROUP", "_PIPELINE_MODEL_PARALLEL_GROUP")
    return all(state.values[name] is not None for name in (*needed, "_DATA_PARALLEL_GROUP"))


def is_unitialized() -> bool:
    """Tell whether the parallel state is not initialised (deprecated: use `is_initialized`)."""
    _deprecated("is_unitialized is deprecated, use is_initialized instead")
    return not is_initialized()


def _deprecated(message: str) -> None:
    warnings.warn(message, DeprecationWarning, stacklevel=3)


# ---- groups -----------------------------------------------------------------------------------

get_model_parallel_group = group_getter("_MODEL_PARALLEL_GROUP")
get_tensor_model_parallel_group = group_getter("_TENSOR_MODEL_PARALLEL_GROUP")
get_pipeline_model_parallel_group = group_getter("_PIPELINE_MODEL_PARALLEL_GROUP")
get_context_parallel_group = group_getter("_CONTEXT_PARALLEL_GROUP")
get_context_parallel_global_ranks = group_getter("_CONTEXT_PARALLEL_GLOBAL_RANKS")
get_hierarchical_context_parallel_groups = group_getter("_HIERARCHICAL_CONTEXT_PARALLEL_GROUPS")
get_embedding_group = group_getter("_EMBEDDING_GROUP")
get_position_embedding_group = group_getter("_POSITION_EMBEDDING_GROUP")
get_tensor_and_context_parallel_group = group_getter("_TENSOR_AND_CONTEXT_PARALLEL_GROUP")
get_expert_model_parallel_group = group_getter("_EXPERT_MODEL_PARALLEL_GROUP")
get_expert_tensor_parallel_group = group_getter("_EXPERT_TENSOR_PARALLEL_GROUP")
get_expert_tensor_and_model_parallel_group = group_getter("_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP")
get_expert_tensor_model_pipeline_parallel_group = group_getter(
    "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP"
)
get_intra_distributed_optimizer_instance_group = group_getter(
    "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP"
)
get_inter_distributed_optimizer_instance_group = group_getter(
    "_INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP"
)

_dp_group = group_getter("_DATA_PARALLEL_GROUP")
_dp_cp_group = group_getter("_DATA_PARALLEL_GROUP_WITH_CP")
_dp_cp_ag_group = group_getter("_DATA_PARALLEL_GROUP_WITH_CP_AG")
_intra_dp_cp_group = group_getter("_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP")
_dp_gloo = group_getter("_DATA_PARALLEL_GROUP_GLOO")
_dp_cp_gloo = group_getter("_DATA_PARALLEL_GROUP_WITH_CP_GLOO")
_intra_dp_cp_gloo = group_getter("_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP_GLOO")
_tp_dp_group = group_getter("_TENSOR_AND_DATA_PARALLEL_GROUP")
_tp_dp_cp_group = group_getter("_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP")
_expt_dp_group = group_getter("_EXPERT_DATA_PARALLEL_GROUP")
_intra_expt_dp_group = group_getter("_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP")
_expt_dp_gloo = group_getter("_EXPERT_DATA_PARALLEL_GROUP_GLOO")
_intra_expt_dp_gloo = group_getter("_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP_GLOO")


def get_data_parallel_group(
    with_context_parallel: bool = False,
    partial_data_parallel: bool = False,
    independent_all_gather: bool = False,
) -> ProcessGroup:
    """Return the data parallel group: with context parallel, of one optimizer instance, or twin."""
    if with_context_parallel:
        if partial_data_parallel:
            return _intra_dp_cp_group()
        return _dp_cp_ag_group() if independent_all_gather else _dp_cp_group()
    if partial_data_parallel:
        raise partial_without_cp()
    return _dp_group()


def get_data_parallel_group_gloo(
    with_context_parallel: bool = False, partial_data_parallel: bool = False
) -> ProcessGroup:
    """Return the gloo twin of a data parallel group."""
    if with_context_parallel:
        return _intra_dp_cp_gloo() if partial_data_parallel else _dp_cp_gloo()
    if partial_data_parallel:
        raise partial_without_cp()
    return _dp_gloo()


@answered
def has_separate_all_gather_group(state: ParallelState) -> bool:
    """Tell whether the twin of the dp-cp group for all-gathers exists."""
    return state.values["_DATA_PARALLEL_GROUP_WITH_CP_AG"] is not None


def get_hybrid_data_context_parallel_groups(
    check_initialized: bool = True, group_size: int | None = None
) -> ProcessGroup:
    """Return the hybrid group of `group_size` ranks; one of all dp-cp ranks is the dp-cp group.

    Raises:
        GroupMissingError: There is no group of that size (a KeyError).
    """
    is_int = isinstance(group_size, (int, np.integer))
    if is_int and get_data_parallel_world_size(with_context_parallel=True) == group_size:
        return _dp_cp_group(check_initialized)
    groups = _state().read("_HYBRID_DP_CP_GROUPS")
    if not is_int or group_size not in groups:
        raise GroupMissingError(
            f"there is no hybrid group of group_size={shown(group_size)}; there are those of "
            f"{list(groups) or 'none: initialise with hybrid_context_parallel=True'}"
        )
    return groups[group_size]  # type: ignore[no-any-return]


def get_amax_reduction_group(
    with_context_parallel: bool = False, tp_only_amax_red: bool = False
) -> ProcessGroup:
    """Return the group over which FP8 reduces its maxima."""
    if tp_only_amax_red:
        if with_context_parallel:
            return get_tensor_and_context_parallel_group()
        return get_tensor_model_parallel_group()
    return _tp_dp_cp_group() if with_context_parallel else _tp_dp_group()


def get_tensor_and_data_parallel_group(
    check_initialized: bool = True, with_context_parallel: bool = False
) -> ProcessGroup:
    """Return the group over tensor and data parallel, and context parallel if asked."""
    return (_tp_dp_cp_group if with_context_parallel else _tp_dp_group)(check_initialized)


def get_expert_data_parallel_group(
    check_initialized: bool = True, partial_expert_data_parallel: bool = False
) -> ProcessGroup:
    """Return the expert data parallel group, or its part in one optimizer instance."""
    if partial_expert_data_parallel:
        return _intra_expt_dp_group(check_initialized)
    return _expt_dp_group(check_initialized)


def get_expert_data_parallel_group_gloo(partial_expert_data_parallel: bool = False) -> ProcessGroup:
    """Return the gloo twin of an expert data parallel group."""
    return _intra_expt_dp_gloo() if partial_expert_data_parallel else _expt_dp_gloo()


def get_data_modulo_expert_parallel_group(
    partial_expert_data_parallel: bool = False,
) -> ProcessGroup:
    """Return the expert data parallel group (deprecated: `get_expert_data_parallel_group`)."""
    _deprecated(
        "get_data_modulo_expert_parallel_group is deprecated, use get_expert_data_parallel_group"
    )
    return get_expert_data_parallel_group(True, partial_expert_data_parallel)


# ---- sizes and ranks --------------------------------------------------------------------------

_TP, _MPU_TP = "_TENSOR_MODEL_PARALLEL_GROUP", "_MPU_TENSOR_MODEL_PARALLEL_"
_PP, _MPU_PP = "_PIPELINE_MODEL_PARALLEL_GROUP", "_MPU_PIPELINE_MODEL_PARALLEL_"
_EP, _MPU_EP = "_EXPERT_MODEL_PARALLEL_GROUP", "_MPU_EXPERT_MODEL_PARALLEL_"
_ETP, _MPU_ETP = "_EXPERT_TENSOR_PARALLEL_GROUP", "_MPU_EXPERT_TENSOR_PARALLEL_"
_MP, _CP = "_MODEL_PARALLEL_GROUP", "_CONTEXT_PARALLEL_GROUP"
_TP_CP = "_TENSOR_AND_CONTEXT_PARALLEL_GROUP"
_TP_EP = "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP"
_EDP, _INTRA_EDP = "_EXPERT_DATA_PARALLEL_GROUP", "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP"
_MPU_DP = "_MPU_DATA_PARALLEL_"
_DATA_PARALLEL = (
    "_DATA_PARALLEL_GROUP",
    "_DATA_PARALLEL_GROUP_WITH_CP",
    "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP",
    _MPU_DP,
)

set_tensor_model_parallel_world_size = size_setter(_MPU_TP + SIZE)
set_tensor_model_parallel_rank = rank_setter(_MPU_TP + RANK)
set_pipeline_model_parallel_world_size = size_setter(_MPU_PP + SIZE)
set_pipeline_model_parallel_rank = rank_setter(_MPU_PP + RANK)
set_data_parallel_rank = rank_setter(_MPU_DP + RANK)
set_expert_model_parallel_world_size = size_setter(_MPU_EP + SIZE)
set_expert_model_parallel_rank = rank_setter(_MPU_EP + RANK)
set_expert_tensor_parallel_world_size = size_setter(_MPU_ETP + SIZE)
set_expert_tensor_parallel_rank = rank_setter(_MPU_ETP + RANK)
set_virtual_pipeline_model_parallel_world_size = size_setter(
    "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE"
)

get_tensor_model_parallel_world_size = fact_getter(SIZE, _TP, _MPU_TP)
get_tensor_model_parallel_rank = fact_getter(RANK, _TP, _MPU_TP)
get_pipeline_model_parallel_world_size = fact_getter(SIZE, _PP, _MPU_PP)
get_pipeline_model_parallel_rank = fact_getter(RANK, _PP, _MPU_PP)
get_model_parallel_world_size = fact_getter(SIZE, _MP)  # DeepSpeed asks for these: tp x pp
get_model_parallel_rank = fact_getter(RANK, _MP)
get_context_parallel_world_size = fact_getter(SIZE, _CP, offline=True)
get_context_parallel_rank = fact_getter(RANK, _CP, offline=True)
get_tensor_and_context_parallel_world_size = fact_getter(SIZE, _TP_CP, offline=True)
get_tensor_and_context_parallel_rank = fact_getter(RANK, _TP_CP, offline=True)
get_expert_model_parallel_world_size = fact_getter(SIZE, _EP, _MPU_EP, offline=True)
get_expert_model_parallel_rank = fact_getter(RANK, _EP, _MPU_EP, offline=True)
get_expert_tensor_and_model_parallel_world_size = fact_getter(SIZE, _TP_EP, offline=True)
get_expert_tensor_and_model_parallel_rank = fact_getter(RANK, _TP_EP, offline=True)
get_data_parallel_world_size = data_parallel_getter(SIZE, *_DATA_PARALLEL)
get_data_parallel_rank = data_parallel_getter(RANK, *_DATA_PARALLEL)
get_expert_data_parallel_world_size = expert_data_parallel_getter(SIZE, _EDP, _INTRA_EDP)
get_expert_data_parallel_rank = expert_data_parallel_getter(RANK, _EDP, _INTRA_EDP)


@answered
def get_expert_tensor_parallel_world_size(state: ParallelState) -> int | None:
    """Return the size of the expert tensor group; without one, the tensor size set on the fly."""
    if state.values[_ETP] is None and state.values[_MPU_ETP + SIZE] is None:
        return state.values[_MPU_TP + SIZE]  # type: ignore[no-any-return]
    return state.size_in(_ETP, _MPU_ETP + SIZE)


@answered
def get_expert_tensor_parallel_rank(state: ParallelState) -> int | None:
    """Return the position in the expert tensor group; without one, the rank set on the fly."""
    if state.values[_ETP] is None and state.values[_MPU_ETP + RANK] is None:
        return state.values[_MPU_TP + RANK]  # type: ignore[no-any-return]
    return state.rank_in(_ETP, _MPU_ETP + RANK)


@answered
def get_all_ranks(_: ParallelState) -> str:
    """Return the ranks in tp, dp, cp, pp and ep, joined by underscores."""
    ranks = (
        get_tensor_model_parallel_rank(),
        get_data_parallel_rank(),
        get_context_parallel_rank(),
        get_pipeline_model_parallel_rank(),
        get_expert_model_parallel_rank(),
    )
    return "_".join(str(rank or 0) for rank in ranks)


# ---- global ranks, and the pipeline -----------------------------------------------------------

_PIPELINE_RANKS = "_PIPELINE_GLOBAL_RANKS"


def _stage(state: ParallelState) -> int:
    return state.rank_in(_PP, _MPU_PP + RANK)


def _stages(state: ParallelState) -> int:
    return state.size_in(_PP, _MPU_PP + SIZE)


get_tensor_model_parallel_src_rank = listed_getter("first", "_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS")
get_model_parallel_src_rank = listed_getter("first", "_MODEL_PARALLEL_GLOBAL_RANKS")
get_expert_model_parallel_src_rank = listed_getter("first", "_EXPERT_MODEL_PARALLEL_RANKS")
get_pipeline_model_parallel_first_rank = listed_getter("first", _PIPELINE_RANKS)
get_pipeline_model_parallel_last_rank = listed_getter(
    "last", _PIPELINE_RANKS, lambda state: _stages(state) - 1
)
get_pipeline_model_parallel_next_rank = listed_getter(
    "next", _PIPELINE_RANKS, lambda state: (_stage(state) + 1) % _stages(state)
)
get_pipeline_model_parallel_prev_rank = listed_getter(
    "previous", _PIPELINE_RANKS, lambda state: (_stage(state) - 1) % _stages(state)
)
_dp_src_rank = listed_getter("first", "_DATA_PARALLEL_GLOBAL_RANKS")
_dp_cp_src_rank = listed_getter("first", "_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP")


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    """Return the first rank of a data parallel group."""
    return _dp_cp_src_rank() if with_context_parallel else _dp_src_rank()


def get_data_parallel_group_ranks() -> list[int]:
    """Return the ranks of the data parallel group, as DeepSpeed asks for them."""
    return list(_state().require("_DATA_PARALLEL_GLOBAL_RANKS"))


@answered
def _is_first(state: ParallelState) -> bool:
    return _stage(state) == 0


@answered
def _is_last(state: ParallelState) -> bool:
    return _stage(state) == _stages(state) - 1


def is_pipeline_first_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Tell whether this is the first stage; with `ignore_virtual=False`, whether `vp_stage` is."""
    return (ignore_virtual or _virtual_stage(vp_stage) in {None, 0}) and _is_first()


def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Tell whether this is the last stage; with `ignore_virtual=False`, whether `vp_stage` is."""
    if ignore_virtual:
        return _is_last()
    stage, size = _virtual_stage(vp_stage), get_virtual_pipeline_model_parallel_world_size()
    return (size is None or stage == size - 1) and _is_last()


def _virtual_stage(vp_stage: int | None) -> int | None:
    if get_virtual_pipeline_model_parallel_world_size() is None:
        return None
    if vp_stage is None:
        raise StateError(
            "vp_stage must be given with ignore_virtual=False: the pipeline is virtual"
        )
    return vp_stage


def is_rank_in_embedding_group(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Tell whether the calling rank, or its stage `vp_stage`, has word embeddings."""
    state = current.alone or _state()
    rank, ranks = state.answers[_own_rank], state.values["_EMBEDDING_GLOBAL_RANKS"]
    rank = state.answer(_own_rank) if rank is UNKNOWN else rank
    if ranks is None or ignore_virtual or rank not in ranks:
        return ranks is not None and rank in ranks
    if rank == ranks[0]:
        return is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
    return rank != ranks[-1] or is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)


def is_rank_in_position_embedding_group() -> bool:
    """Tell whether the calling rank has position embeddings."""
    state = current.alone or _state()
    rank, ranks = state.answers[_own_rank], state.values["_POSITION_EMBEDDING_GLOBAL_RANKS"]
    rank = state.answer(_own_rank) if rank is UNKNOWN else rank
    return ranks is not None and rank in ranks


@known
def _own_rank(_: ParallelState) -> int:
    return dist.get_rank()


@answered
def get_virtual_pipeline_model_parallel_rank(state: ParallelState) -> int | None:
    """Return the virtual stage that was set, if any."""
    return state.values["_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK"]  # type: ignore[no-any-return]


@answered
def get_virtual_pipeline_model_parallel_world_size(state: ParallelState) -> int | None:
    """Return the number of virtual stages of each rank, if the pipeline is virtual."""
    return state.values["_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE"]  # type: ignore[no-any-return]


def set_virtual_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Set the virtual stage (deprecated: pass `vp_stage` instead)."""
    _deprecated(
        "set_virtual_pipeline_model_parallel_rank is deprecated, pass vp_stage to "
        "is_pipeline_first_stage, is_pipeline_last_stage and the others"
    )
    _state().write("_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK", rank)


# ---- memory buffers ---------------------------------------------------------------------------

_MEMORY, _SYMMETRIC = "_GLOBAL_MEMORY_BUFFER", "_GLOBAL_SYMMETRIC_MEMORY_BUFFER"
_SYMMETRIC_MIB = 256


@answered
def get_global_memory_buffer(state: ParallelState) -> memory.GlobalMemoryBuffer:
    """Return the memory buffer."""
    return state.require(_MEMORY)  # type: ignore[no-any-return]


@answered
def get_global_symmetric_memory_buffer(
    state: ParallelState,
) -> memory.GlobalSymmetricMemoryBuffer:
    """Return the symmetric memory buffer."""
    return state.require(_SYMMETRIC)  # type: ignore[no-any-return]


def _set_buffer(name: str, buffer: Any) -> None:
    if _state().values[name] is not None:
        raise StateError(f"{name} is already initialized; destroy it first")
    _state().write(name, buffer)


def _set_global_memory_buffer() -> None:
    _set_buffer(_MEMORY, GlobalMemoryBuffer())


def _set_global_symmetric_memory_buffer() -> None:
    group = get_tensor_model_parallel_group()
    _set_buffer(_SYMMETRIC, GlobalSymmetricMemoryBuffer(_SYMMETRIC_MIB, group))


def destroy_global_memory_buffer() -> None:
    """Forget the memory buffer."""
    _state().write(_MEMORY, None)


def destroy_global_symmetric_memory_buffer() -> None:
    """Forget the symmetric memory buffer."""
    _state().write(_SYMMETRIC, None)


# ---- groups outside the state -----------------------------------------------------------------


def create_group(
    ranks: Sequence[int] | None = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
) -> Any:
    """Create one group as `torch.distributed.new_group` does, and list it for `update_pg_timeout`.

    Every rank of the world must call this; the caller destroys the group.
    """
    group = dist.new_group(
        None if ranks is None else list(ranks),
        timeout=timeout,
        backend=backend,
        pg_options=pg_options,
        use_local_synchronization=use_local_synchronization,
        group_desc=group_desc,
    )
    own = c10d.as_member(group)
    if own is not None:
        _state().list_groups([own])
    return group


def create_hierarchical_groups(
    rank: int,
    ranks: Sequence[int],
    hierarchical_group_sizes: Sequence[int],
    create_gloo_process_groups: bool = False,
    pg_options: Any = None,
    timeout: timedelta | None = None,
    group_desc: str | None = None,
) -> tuple[list[ProcessGroup], list[ProcessGroup | None]]:
    """Create the groups of a hierarchy over `ranks`, and return those that `rank` is in.

    Args:
        rank: Whose groups to return.
        ranks: The ranks, in the order in which the hierarchy cuts them.
        hierarchical_group_sizes: Group size of each level, innermost first.
        create_gloo_process_groups: Create a gloo twin of each.
        pg_options: Options of every level, or a list with those of each.
        timeout: Their timeout.
        group_desc: Part of their descriptions.

    Returns:
        One group for each level, and its gloo twin or None; empty where `rank` is not in `ranks`.

    Raises:
        LayoutError: The sizes do not multiply to the ranks, or a rank is not of the world.
        GroupOptionsError: An option is none, or `pg_options` are not as many as the levels.
    """
    ranks = _ranks_of_world(rank, ranks)
    levels = RankLayout([len(ranks)], ["rank"]).groups("rank").levels(hierarchical_group_sizes)
    options = pg_options if isinstance(pg_options, list) else [pg_options] * len(levels)
    if len(options) != len(levels):
        raise GroupOptionsError(
            f"pg_options must be one for each of {len(levels)} levels, got {shown(pg_options)}"
        )
    check_timeout(timeout)
    check_description(f"{group_desc}")
    options = [live_pg_options(each) for each in options]
    groups, twins = [], []
    for level, places in enumerate(levels):
        for members in ([ranks[place] for place in group] for group in places):
            name = f"HIERARCHICAL_{group_desc}"
            group = create_group(
                members, timeout, None, options[level], group_desc=f"{name}_L{level}"
            )
            twin = None
            if create_gloo_process_groups:
                twin = create_group(members, timeout, "gloo", group_desc=f"{name}_GLOO_L{level}")
            if rank in members:
                groups.append(group)
                twins.append(twin)
    return groups, twins


def create_hybrid_dp_cp_groups(
    rank: int, ranks: Sequence[int], pg_options: Any
) -> dict[int, ProcessGroup]:
    """Create groups of 2, 4, 8, ... consecutive `ranks`, and return those of `rank` by size.

    Raises:
        LayoutError: A rank is not of the world, or comes twice.
        GroupOptionsError: `pg_options` are none.
    """
    ranks = _ranks_of_world(rank, ranks)
    pg_options = live_pg_options(pg_options)
    groups = {}
    for size in hybrid_sizes(len(ranks)):
        for members in (ranks[start : start + size] for start in range(0, len(ranks), size)):
            name = f"HYBRID_DP_CP_GROUP_{size}"
            group = create_group(members, pg_options=pg_options, group_desc=name)
            if rank in members:
                groups[size] = group
    return groups


def _ranks_of_world(rank: int, ranks: Sequence[int]) -> tuple[int, ...]:
    """Check ranks before the first group of them is created."""
    world_size = c10d.world_group().size()
    as_ranks([rank], "rank", world_size)
    return as_ranks(ranks, "ranks", world_size)


def create_all_gather_groups(
    for_expert_parallelism: bool = False,
    timeout: timedelta | None = None,
    nccl_comm_cfgs: Mapping[str, Mapping[str, Any]] | None = None,
) -> tuple[ProcessGroup | None, ProcessGroup | None]:
    """Create twins of the dp-cp group and the expert dp group, for all-gathers that overlap.

    The state owns them; `update_pg_timeout` reaches them, and a collection of the state has them
    as `dp_cp_ag` and `expt_dp_ag`. A second call returns the same groups.

    Returns:
        The two groups; None for the expert one unless it is asked for and experts are parallel.

    Raises:
        NotInitializedError: The parallel state is not initialised (a RuntimeError).
        GroupOptionsError: An option is none, or they exist and were created with other options (a
            ValueError).
        NcclConfigError: `nccl_comm_cfgs` are no configuration.
    """
    nccl_config = {} if nccl_comm_cfgs is None else nccl_comm_cfgs
    return _state().all_gather_groups(for_expert_parallelism, timeout, nccl_config)


def update_pg_timeout(timeout: timedelta, pg: ProcessGroup | None = None) -> None:
    """Change the timeout of a group, or of all groups of the state and WORLD, after a barrier.

    Raises:
        StateError: No group is given and there is none.
        GroupOptionsError: The timeout is no timedelta, or `pg` no group of this process.
    """
    check_given_timeout(timeout)
    if pg is not None and not (isinstance(pg, ProcessGroup) and c10d.is_registered(pg)):
        raise GroupOptionsError(f"pg must be a process group that exists, got {shown(pg)}")
    groups = [pg] if pg is not None else _state().require("_global_process_group_list")
    dist.barrier(pg)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    for group in groups:
        c10d.set_timeout(timeout, group)


name_functions(__name__, globals())
current.bind(sys.modules[__name__], GLOBALS)
