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
import sys
import warnings
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypercomm.compat.megatron import layouts as _layouts
from hypercomm.compat.megatron import memory, nccl
from hypercomm.compat.megatron import table as _table
from hypercomm.compat.megatron.configuration import (
    Configuration,
    RanksFunction,
    hybrid_sizes,
)
from hypercomm.compat.megatron.getters import (
    data_fact_getter,
    data_group_getter,
    expert_fact_getter,
    first_getter,
    group_getter,
    rank_getter,
    rank_setter,
    size_getter,
    size_setter,
)
from hypercomm.compat.megatron.install import warn_of_their_own
from hypercomm.compat.megatron.state import GLOBALS, NEEDS_CP, RANK, SIZE, ParallelState, current
from hypercomm.compat.megatron.table import GLOO, WITH_GTP
from hypercomm.compat.module_state import name_functions
from hypercomm.errors import GroupMissingError, GroupOptionsError, StateError
from hypercomm.grid.arguments import Share
from hypercomm.layout import RankLayout
from hypercomm.layout.checks import as_ranks
from hypercomm.layout.text import shown
from hypercomm.process_groups import torch_internals as c10d
from hypercomm.process_groups.options import check_given_timeout, live_pg_options

_state = current.get

RankGenerator = _layouts.RankGenerator
generate_masked_orthogonal_rank_groups = _layouts.generate_masked_orthogonal_rank_groups
_inject_gtp_remat_axis = _layouts.inject_gtp
default_embedding_ranks = _table.default_embedding_ranks
default_position_embedding_ranks = _table.default_position_embedding_ranks
get_nccl_options = nccl.get_nccl_options
overwrite_nccl_comm_cfgs = nccl.overwrite_nccl_comm_cfgs
GlobalMemoryBuffer = memory.GlobalMemoryBuffer

# ---- the state --------------------------------------------------------------------------------


def use(state: ParallelState) -> contextlib.AbstractContextManager[ParallelState]:
    """Make the functions and globals of this module act on `state` within a `with` block.

    Each thread and each asyncio task has its own blocks. A backward pass on a GPU runs in a thread
    of autograd, outside the block; with `strict=True` a getter that is called there raises.
    `initialize_model_parallel` and `destroy_model_parallel` always act on the default state.

    Raises:
        StateError: `state` is not a ParallelState.

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
    gtp_remat_size: int = 1,
    expert_gtp_remat_size: int = 1,
    rank_offset: int = 0,
    local_world_size: int | None = None,
    share: Share = "never",
    strict: bool = False,
) -> None:
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
            exist to overlap.
        strict: Raise if a getter is called outside `use(state)` while several states are alive;
            default: a warning, once.

    Raises:
        LayoutError: A size is not a positive int (a ValueError).
        WorldSizeError: The sizes do not divide the world; names sizes that would (a RuntimeError).
        ConfigurationError: Two choices contradict each other (an AssertionError).
        ConfigurationError, FileNotFoundError: The NCCL configuration cannot be used.
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
    arguments = dict(locals())  # exactly the fields of a configuration
    warn_of_their_own()
    current.default.initialize(Configuration(**arguments))


def destroy_model_parallel() -> None:
    """Destroy the groups that the default state created, and set its globals to None.

    Symmetric memory and NCCL's expert parallelism, which use the groups, are destroyed first.
    """
    memory.destroy_users_of_groups()
    current.default.destroy()


def is_initialized() -> bool:
    """Return whether the parallel state is initialised."""
    return _has("_DATA_PARALLEL_GROUP")


def model_parallel_is_initialized() -> bool:
    """Return whether the tensor, pipeline and data parallel groups exist."""
    needed = ("_TENSOR_MODEL_PARALLEL_GROUP", "_PIPELINE_MODEL_PARALLEL_GROUP")
    return _has(*needed, "_DATA_PARALLEL_GROUP")


def sequence_parallel_is_initialized() -> bool:
    """Return whether the groups of dp and cp, DeepSpeed's sequence parallel, exist."""
    return _has("_CONTEXT_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP")


def sequence_data_parallel_is_initialized() -> bool:
    """Return whether the group over data and context parallel exists."""
    return _has("_DATA_PARALLEL_GROUP_WITH_CP")


def _has(*names: str) -> bool:
    values = _state().values
    return all(values[name] is not None for name in names)


def is_unitialized() -> bool:
    """Return whether the parallel state is not initialised (deprecated: use `is_initialized`)."""
    _deprecated("is_unitialized is deprecated, use is_initialized instead")
    return not is_initialized()


def _deprecated(message: str) -> None:
    warnings.warn(message, DeprecationWarning, stacklevel=3)


# ---- groups -----------------------------------------------------------------------------------

get_model_parallel_group = group_getter("_MODEL_PARALLEL_GROUP")
get_tensor_model_parallel_group = group_getter("_TENSOR_MODEL_PARALLEL_GROUP")
get_gtp_weight_remat_group = group_getter("_GTP_WEIGHT_REMAT_GROUP")
get_gtp_weight_remat_global_ranks = group_getter("_GTP_WEIGHT_REMAT_GLOBAL_RANKS")
get_expert_gtp_weight_remat_group = group_getter("_EXPERT_GTP_WEIGHT_REMAT_GROUP")
get_expert_gtp_weight_remat_global_ranks = group_getter("_EXPERT_GTP_WEIGHT_REMAT_GLOBAL_RANKS")
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
get_intra_distributed_optimizer_instance_group = group_getter(
    "_INTRA_DISTRIBUTED_OPTIMIZER_INSTANCE_GROUP"
)
get_inter_distributed_optimizer_instance_group = group_getter(
    "_INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP"
)

# Megatron-DeepSpeed's names: the ranks that share a sequence are those of context parallel. There
# is no initialize_sequence_parallel, by which DeepSpeed knows an mpu without model parallel.
get_sequence_parallel_group = group_getter("_CONTEXT_PARALLEL_GROUP")
get_sequence_data_parallel_group = data_group_getter("_DATA_PARALLEL_GROUP_WITH_CP")
_DP, _DP_CP = "_DATA_PARALLEL_GROUP", "_DATA_PARALLEL_GROUP_WITH_CP"
_INTRA_DP_CP = "_INTRA_PARTIAL_DATA_PARALLEL_GROUP_WITH_CP"
_EDP, _INTRA_EDP = "_EXPERT_DATA_PARALLEL_GROUP", "_INTRA_PARTIAL_EXPERT_DATA_PARALLEL_GROUP"

_TP_DP, _TP_DP_CP = "_TENSOR_AND_DATA_PARALLEL_GROUP", "_TENSOR_AND_DATA_PARALLEL_GROUP_WITH_CP"
_EXPERT_MP = "_EXPERT_TENSOR_MODEL_PIPELINE_PARALLEL_GROUP"


def _held(name: str, check_initialized: bool = True, with_gtp: bool = False) -> Any:
    """Return the value of a global, or of the one with GTP peers if the state has it so."""
    state = current.alone or _state()
    if with_gtp and state.answers_gtp:
        name += WITH_GTP
    held = state.values[name]
    if held is None and check_initialized:
        raise state.missing(name)
    return held


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
    if partial_data_parallel and not with_context_parallel:
        raise StateError(NEEDS_CP)
    if independent_all_gather and with_context_parallel and not partial_data_parallel:
        return _held("_DATA_PARALLEL_GROUP_WITH_CP_AG")
    name = _INTRA_DP_CP if partial_data_parallel else _DP_CP if with_context_parallel else _DP
    return _held(name, with_gtp=with_gtp_remat)


def get_data_parallel_group_gloo(
    with_context_parallel: bool = False, partial_data_parallel: bool = False
) -> ProcessGroup:
    """Return the gloo group of data parallel ranks."""
    if partial_data_parallel and not with_context_parallel:
        raise StateError(NEEDS_CP)
    name = _INTRA_DP_CP if partial_data_parallel else _DP_CP if with_context_parallel else _DP
    return _held(name + GLOO)


def has_separate_all_gather_group() -> bool:
    """Return whether the second dp-cp group for all-gathers exists."""
    return _has("_DATA_PARALLEL_GROUP_WITH_CP_AG")


def get_hybrid_data_context_parallel_groups(
    check_initialized: bool = True, group_size: int | None = None
) -> ProcessGroup:
    """Return the hybrid group of `group_size` ranks; one of all dp-cp ranks is the dp-cp group.

    Raises:
        GroupMissingError: There is no group of that size (a KeyError).
    """
    if group_size == get_data_parallel_world_size(with_context_parallel=True):
        return _held(_DP_CP, check_initialized)
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
        if with_context_parallel:
            return get_tensor_and_context_parallel_group()
        return get_tensor_model_parallel_group()
    return get_tensor_and_data_parallel_group(with_context_parallel=with_context_parallel)


def get_tensor_and_data_parallel_group(
    check_initialized: bool = True, with_context_parallel: bool = False
) -> ProcessGroup:
    """Return the group over tensor and data parallel, and context parallel if asked."""
    return _held(_TP_DP_CP if with_context_parallel else _TP_DP, check_initialized)


def get_expert_tensor_model_pipeline_parallel_group(
    check_initialized: bool = True, with_egtp_remat: bool = False
) -> ProcessGroup:
    """Return the group over the tensors, experts and stages, and GTP peers if asked."""
    return _held(_EXPERT_MP + "_WITH_EGTP" * bool(with_egtp_remat), check_initialized)


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
    name = _INTRA_EDP if partial_expert_data_parallel else _EDP
    return _held(name, check_initialized, with_gtp_remat)


def get_expert_data_parallel_group_gloo(partial_expert_data_parallel: bool = False) -> ProcessGroup:
    """Return the gloo group of expert data parallel ranks."""
    return _held((_INTRA_EDP if partial_expert_data_parallel else _EDP) + GLOO)


def get_data_modulo_expert_parallel_group(
    partial_expert_data_parallel: bool = False,
) -> ProcessGroup:
    """Return the expert data parallel group (deprecated: `get_expert_data_parallel_group`)."""
    _deprecated(
        "get_data_modulo_expert_parallel_group is deprecated, use get_expert_data_parallel_group"
    )
    return get_expert_data_parallel_group(partial_expert_data_parallel=partial_expert_data_parallel)


# ---- sizes and ranks --------------------------------------------------------------------------

_TP, _MPU_TP = "_TENSOR_MODEL_PARALLEL_GROUP", "_MPU_TENSOR_MODEL_PARALLEL_"
_PP, _MPU_PP = "_PIPELINE_MODEL_PARALLEL_GROUP", "_MPU_PIPELINE_MODEL_PARALLEL_"
_EP, _MPU_EP = "_EXPERT_MODEL_PARALLEL_GROUP", "_MPU_EXPERT_MODEL_PARALLEL_"
_ETP, _MPU_ETP = "_EXPERT_TENSOR_PARALLEL_GROUP", "_MPU_EXPERT_TENSOR_PARALLEL_"
_MP, _CP = "_MODEL_PARALLEL_GROUP", "_CONTEXT_PARALLEL_GROUP"
_TP_CP = "_TENSOR_AND_CONTEXT_PARALLEL_GROUP"
_TP_EP = "_EXPERT_TENSOR_AND_MODEL_PARALLEL_GROUP"
_MPU_DP = "_MPU_DATA_PARALLEL_"
_GTP, _EGTP = "_GTP_WEIGHT_REMAT_GROUP", "_EXPERT_GTP_WEIGHT_REMAT_GROUP"

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

get_tensor_model_parallel_world_size = size_getter(_TP, _MPU_TP)
get_tensor_model_parallel_rank = rank_getter(_TP, _MPU_TP)
get_pipeline_model_parallel_world_size = size_getter(_PP, _MPU_PP)
get_pipeline_model_parallel_rank = rank_getter(_PP, _MPU_PP)
get_model_parallel_world_size = size_getter(_MP)  # DeepSpeed asks for these: tp x pp
get_model_parallel_rank = rank_getter(_MP)
get_context_parallel_world_size = size_getter(_CP, offline=True)
get_context_parallel_rank = rank_getter(_CP, offline=True)
get_sequence_parallel_world_size = size_getter(_CP)
get_sequence_parallel_rank = rank_getter(_CP)
get_sequence_data_parallel_world_size = size_getter(_DP_CP, with_gtp=True)
get_sequence_data_parallel_rank = rank_getter(_DP_CP, with_gtp=True)
get_tensor_and_context_parallel_world_size = size_getter(_TP_CP, offline=True)
get_tensor_and_context_parallel_rank = rank_getter(_TP_CP, offline=True)
get_expert_model_parallel_world_size = size_getter(_EP, _MPU_EP, offline=True)
get_expert_model_parallel_rank = rank_getter(_EP, _MPU_EP, offline=True)
get_expert_tensor_and_model_parallel_world_size = size_getter(_TP_EP, offline=True)
get_expert_tensor_and_model_parallel_rank = rank_getter(_TP_EP, offline=True)
get_gtp_weight_remat_world_size = size_getter(_GTP, offline=True, absent=0)
get_gtp_weight_remat_rank = rank_getter(_GTP, offline=True, absent=0)
get_expert_gtp_weight_remat_world_size = size_getter(_EGTP, offline=True, absent=0)
get_expert_gtp_weight_remat_rank = rank_getter(_EGTP, offline=True, absent=0)
# Without an expert group, the values that were set for tensors.
get_expert_tensor_parallel_world_size = size_getter(_ETP, _MPU_ETP, absent=_MPU_TP + SIZE)
get_expert_tensor_parallel_rank = rank_getter(_ETP, _MPU_ETP, absent=_MPU_TP + RANK)


get_data_parallel_world_size = data_fact_getter(SIZE, _DP, _DP_CP, _INTRA_DP_CP, _MPU_DP)
get_data_parallel_rank = data_fact_getter(RANK, _DP, _DP_CP, _INTRA_DP_CP, _MPU_DP)
get_expert_data_parallel_world_size = expert_fact_getter(SIZE, _EDP, _INTRA_EDP)
get_expert_data_parallel_rank = expert_fact_getter(RANK, _EDP, _INTRA_EDP)


def get_all_ranks() -> str:
    """Return the ranks in tp, gtp_remat (from 0.19 on), dp, cp, pp and ep, with underscores."""
    ranks = (
        get_tensor_model_parallel_rank(),
        *([get_gtp_weight_remat_rank()] * _state().answers_gtp),
        get_data_parallel_rank(),
        get_context_parallel_rank(),
        get_pipeline_model_parallel_rank(),
        get_expert_model_parallel_rank(),
    )
    return "_".join(str(rank or 0) for rank in ranks)


# ---- global ranks, and the pipeline -----------------------------------------------------------

get_tensor_model_parallel_src_rank = first_getter("_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS")
get_model_parallel_src_rank = first_getter("_MODEL_PARALLEL_GLOBAL_RANKS")
get_sequence_parallel_src_rank = first_getter("_CONTEXT_PARALLEL_GLOBAL_RANKS")
get_expert_model_parallel_src_rank = first_getter("_EXPERT_MODEL_PARALLEL_RANKS")
get_pipeline_model_parallel_first_rank = first_getter("_PIPELINE_GLOBAL_RANKS")
_dp_src_rank = first_getter("_DATA_PARALLEL_GLOBAL_RANKS")
_dp_cp_src_rank = first_getter("_DATA_PARALLEL_GLOBAL_RANKS_WITH_CP")
_stage, _stages = get_pipeline_model_parallel_rank, get_pipeline_model_parallel_world_size


def _pipeline_ranks() -> Any:
    return _state().require("_PIPELINE_GLOBAL_RANKS")


def get_pipeline_model_parallel_last_rank() -> int:
    """Return the rank of the last stage of the calling rank's pipeline."""
    return _pipeline_ranks()[_stages() - 1]


def get_pipeline_model_parallel_next_rank() -> int:
    """Return the rank of the next stage, the first one after the last."""
    return _pipeline_ranks()[(_stage() + 1) % _stages()]


def get_pipeline_model_parallel_prev_rank() -> int:
    """Return the rank of the previous stage, the last one before the first."""
    return _pipeline_ranks()[(_stage() - 1) % _stages()]


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    """Return the first rank of a data parallel group."""
    return _dp_cp_src_rank() if with_context_parallel else _dp_src_rank()


def get_data_parallel_group_ranks() -> list[int]:
    """Return the ranks of the data parallel group, as DeepSpeed asks for them."""
    return list(_state().require("_DATA_PARALLEL_GLOBAL_RANKS"))


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


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    """Return the virtual stage that was set, if any."""
    return _state().values["_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK"]


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """Return the number of virtual stages of each rank, if the pipeline is virtual."""
    state = current.alone or _state()
    return state.values["_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE"]


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


def get_global_memory_buffer() -> GlobalMemoryBuffer:
    """Return the memory buffer."""
    return _state().require(_MEMORY)


def get_global_symmetric_memory_buffer() -> Any:
    """Return the symmetric memory buffer."""
    return _state().require(_SYMMETRIC)


def _set_global_memory_buffer() -> None:
    _check_absent(_MEMORY)
    _state().write(_MEMORY, GlobalMemoryBuffer())


def _set_global_symmetric_memory_buffer() -> None:
    """Set the buffer of Megatron's own class, which is in `megatron.core.utils` up to 0.16."""
    _check_absent(_SYMMETRIC)
    kind = importlib.import_module("megatron.core.utils").GlobalSymmetricMemoryBuffer
    _state().write(_SYMMETRIC, kind(_SYMMETRIC_MIB, get_tensor_model_parallel_group()))


def _check_absent(name: str) -> None:
    if _state().values[name] is not None:
        raise StateError(f"{name} is already initialized; destroy it first")


def destroy_global_memory_buffer() -> None:
    """Discard the memory buffer."""
    _state().write(_MEMORY, None)


def destroy_global_symmetric_memory_buffer() -> None:
    """Discard the symmetric memory buffer."""
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
        rank: The rank whose groups are returned.
        ranks: The ranks, in the order in which the hierarchy cuts them.
        hierarchical_group_sizes: Group size of each level, innermost first.
        create_gloo_process_groups: Create a gloo group for each.
        pg_options: Options of every level, or a list with those of each.
        timeout: Their timeout.
        group_desc: Part of their descriptions.

    Returns:
        One group for each level, and its gloo group or None; empty where `rank` is not in `ranks`.

    Raises:
        LayoutError: The sizes do not multiply to the ranks, or a rank is not in the world.
        GroupOptionsError: An option is wrong, or `pg_options` has another length than the levels.
    """
    layout = _layout_of(rank, ranks)
    levels = layout.groups("rank").levels(hierarchical_group_sizes)
    options = pg_options if isinstance(pg_options, list) else [pg_options] * len(levels)
    if len(options) != len(levels):
        raise GroupOptionsError(
            f"pg_options must be one for each of {len(levels)} levels, got {shown(pg_options)}"
        )
    options = [live_pg_options(each) for each in options]
    groups, twins = [], []
    for level, every in enumerate(levels):
        name = f"HIERARCHICAL_{group_desc}"
        for members in every:
            group = create_group(members, timeout, None, options[level], False, f"{name}_L{level}")
            twin = None
            if create_gloo_process_groups:
                twin = create_group(members, timeout, "gloo", None, False, f"{name}_GLOO_L{level}")
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
        GroupOptionsError: `pg_options` are wrong.
    """
    ranks = _layout_of(rank, ranks).ranks
    pg_options = live_pg_options(pg_options)
    groups = {}
    for size in hybrid_sizes(len(ranks)):
        for start in range(0, len(ranks), size):
            members, name = ranks[start : start + size], f"HYBRID_DP_CP_GROUP_{size}"
            group = create_group(members, pg_options=pg_options, group_desc=name)
            if rank in members:
                groups[size] = group
    return groups


def _layout_of(rank: int, ranks: Sequence[int]) -> RankLayout:
    """Return a layout of ranks in their order; they are checked before a group is created."""
    world_size = c10d.world_group().size()
    as_ranks([rank], "rank", world_size)
    ranks = as_ranks(ranks, "ranks", world_size)
    return RankLayout([len(ranks)], ["rank"], ranks=ranks)


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
    nccl_config = {} if nccl_comm_cfgs is None else nccl_comm_cfgs
    return _state().all_gather_groups(for_expert_parallelism, timeout, nccl_config)


def update_pg_timeout(timeout: timedelta, pg: ProcessGroup | None = None) -> None:
    """Change the timeout of a group, or of all groups of the state and WORLD, after a barrier.

    Raises:
        StateError: No group is given and there is none.
        GroupOptionsError: The timeout is not a timedelta, or `pg` is not a group of this process.
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


name_functions(globals(), __name__)
current.default.reset()  # which was made before the getters
current.bind(sys.modules[__name__], GLOBALS)
