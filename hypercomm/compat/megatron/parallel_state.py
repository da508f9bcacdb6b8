# mypy: disable-error-code="no-any-return"
"""Implements the functions and the globals of Megatron's `parallel_state` with grids.

The functions act on the current `ParallelState`: the state of a `with use(state):` block, or the
default state, which `initialize_model_parallel` fills. The globals, such as `_DATA_PARALLEL_GROUP`,
can be read and written, and getters return written values. DeepSpeed accepts this module as `mpu`.

If a program replaces a getter of this module, other functions call the replacement, as in Megatron.
The same holds for `create_group`, `get_nccl_options`, `overwrite_nccl_comm_cfgs`, and for the
functions that choose the ranks with embeddings.

Source: names, signatures and behaviour follow `megatron.core.parallel_state`; the sequence-parallel
names follow Megatron-DeepSpeed, at 4efb479.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypercomm.compat.megatron import state as _states, table, version
from hypercomm.compat.megatron.install import MegatronNotReplacedWarning
from hypercomm.compat.megatron.state import current
from hypercomm.compat.megatron.table import CP, DP, DP_CP, EP, EXPERT_DP, EXPERT_TP, GLOO, PP, TP
from hypercomm.errors import GroupMissingError, StateError
from hypercomm.layout.checks import check_duration
from hypercomm.layout.text import short_repr
from hypercomm.process_groups import torch_internals as torchdist

default_embedding_ranks = table.default_embedding_ranks
default_position_embedding_ranks = table.default_position_embedding_ranks
get_nccl_options = _states.get_nccl_options
overwrite_nccl_comm_cfgs = _states.overwrite_nccl_comm_cfgs
GlobalMemoryBuffer = _states.GlobalMemoryBuffer
ParallelState = _states.ParallelState

# ---- the state --------------------------------------------------------------------------------


def use(state: ParallelState) -> contextlib.AbstractContextManager[ParallelState]:
    """Make the functions and globals of this module act on `state` within a `with` block.

    A block affects only the thread or asyncio task that entered the block. A backward pass on a GPU
    runs in a thread of autograd, so the pass is outside the block. If several states are alive, a
    getter that is called in the thread of autograd warns. `initialize_model_parallel` and
    `destroy_model_parallel` always act on the default state.

    Example:
        >>> from hypercomm.testing import fake_world
        >>> with fake_world(8), ParallelState.create(tensor_model_parallel_size=4) as state:
        ...     with use(state):
        ...         get_tensor_model_parallel_world_size(), get_data_parallel_world_size()
        (4, 2)
    """
    return current.use(state)


def initialize_model_parallel(*args: Any, **kwargs: Any) -> None:  # noqa: D417
    """Create all of Megatron's groups, and fill the default state. Every rank must call this.

    If the call fails, globals, groups and environment are unchanged. A
    `MegatronNotReplacedWarning` is issued if `megatron.core` was imported without `install()`,
    because Megatron's layers then look for groups in Megatron's own parallel state.

    Args:
        tensor_model_parallel_size: Number of ranks that share each dense layer's tensors.
        pipeline_model_parallel_size: Number of pipeline stages.
        virtual_pipeline_model_parallel_size: Number of interleaved stages on each rank of a
            pipeline.
        pipeline_model_parallel_comm_backend: "nccl". Default: WORLD's backend.
        use_sharp: Must be False. NCCL_COLLNET_ENABLE=1 lets NCCL use SHARP for all groups.
        context_parallel_size: Number of ranks that share each sequence.
        hierarchical_context_parallel_sizes: Factors of the context parallel size, innermost first.
        expert_model_parallel_size: Number of ranks that share the experts.
        num_distributed_optimizer_instances: Number of replicas of the optimizer over the data
            parallel ranks.
        expert_tensor_parallel_size: Number of ranks that share an expert's tensors. Default:
            `tensor_model_parallel_size`.
        nccl_communicator_config_path: A yaml file with NCCL options for each group.
        distributed_timeout_minutes: Timeout of each group, in minutes.
        order: The order of the dims. The first dim varies fastest.
        get_embedding_ranks: A function that is called with the ranks of a pipeline, and returns the
            ranks with word embeddings. The function must return the same number of ranks for every
            pipeline. Default: the first and the last rank.
        get_position_embedding_ranks: A function that is called with the ranks of a pipeline, and
            returns the ranks with position embeddings. Default: the first rank.
        create_gloo_process_groups: Also create a gloo group for each data parallel group.
        high_priority_stream_groups: Keys of groups whose streams have a high priority.
        sharp_enabled_group: Must be None.
        hybrid_context_parallel: Create groups of 2, 4, 8, ... ranks within each dp-cp group.
        dynamic_context_parallel: Create groups of each power of 2 from
            `min_dynamic_context_parallel_size` on, within each dp-cp group. Megatron's development
            branch has this option in place of `hybrid_context_parallel`.
        min_dynamic_context_parallel_size: The size of the smallest groups with
            `dynamic_context_parallel`.
        create_all_gather_group: Create a second dp-cp group, so that all-gathers can overlap with
            the traffic of the first group.
        gtp_remat_size: Number of peers of generalized tensor parallelism (GTP). GTP peers share
            each weight of the dense layers, gather the weight for each use, and process different
            data.
        expert_gtp_remat_size: Number of GTP peers that share the weights of experts.
        rank_offset: The smallest rank of the model.
        local_world_size: The number of ranks of the model. Default: the world size.
        share: "identical" creates one group for each distinct set of ranks, except for groups that
            exist to overlap traffic. Default: only groups of one rank are shared.
        strict: Raise if a getter is called outside `use(state)` while several states are alive.
            Default: warn once.

    Raises:
        TypeError: There is no such argument.
        LayoutError: A size is not a positive int (a ValueError).
        WorldSizeError: The sizes do not divide the world (a RuntimeError). The error names sizes
            that divide the world.
        ConfigurationError: Two choices contradict each other, or the NCCL configuration cannot be
            used (an AssertionError and a RuntimeError).
        FileNotFoundError: The file of the NCCL configuration does not exist.
        StateError: torch.distributed is not initialised, or the state is already initialised (an
            AssertionError).
        CreationError, GroupOptionsError: The groups cannot be created.

    Example:
        >>> from hypercomm.testing import fake_world
        >>> with fake_world(16, rank=5):
        ...     initialize_model_parallel(2, 4)
        ...     print(get_tensor_model_parallel_rank(), get_pipeline_model_parallel_next_rank())
        ...     destroy_model_parallel()
        1 9
    """
    config = table.Configuration(*args, **kwargs)
    theirs = sys.modules.get("megatron.core.parallel_state")
    if theirs is not None and theirs is not sys.modules[__name__]:
        warnings.warn(
            "megatron.core.parallel_state is loaded and was not replaced, so Megatron's layers do "
            "not find these groups; call hypercomm.compat.megatron.install() before megatron.core "
            "is imported",
            MegatronNotReplacedWarning,
            stacklevel=2,
        )
    words = config.get_embedding_ranks or default_embedding_ranks
    positions = config.get_position_embedding_ranks or default_position_embedding_ranks
    current.default.begin(
        attrs.evolve(config, get_embedding_ranks=words, get_position_embedding_ranks=positions),
        lambda config: _states.options_by_key(config, get_nccl_options, overwrite_nccl_comm_cfgs),
        _replaced_create_group(),
    )


initialize_model_parallel.__signature__ = inspect.signature(  # type: ignore[attr-defined]
    table.Configuration
)


def destroy_model_parallel() -> None:
    """Destroy the groups that the default state created, and empty the state's globals.

    Objects that use the groups, such as symmetric memory, are destroyed first.
    """
    _states.destroy_users_of_groups()
    current.default.destroy()


def is_initialized() -> bool:
    """Return whether the parallel state is initialised."""
    return _has(DP)


def model_parallel_is_initialized() -> bool:
    """Return whether the tensor, pipeline and data parallel groups exist."""
    return _has(TP, PP, DP)


def sequence_parallel_is_initialized() -> bool:
    """Return whether the groups over dp and over cp exist. DeepSpeed calls cp sequence parallel."""
    return _has(CP, DP)


def sequence_data_parallel_is_initialized() -> bool:
    """Return whether the group over data and context parallel exists."""
    return _has(DP_CP)


def _has(*names: str) -> bool:
    return all(current.values[name] is not None for name in names)


def is_unitialized() -> bool:
    """Return whether the parallel state is not initialised (deprecated: use `is_initialized`)."""
    _deprecated("is_unitialized", "is_initialized")
    return not is_initialized()


def _deprecated(name: str, other: str) -> None:
    warnings.warn(f"{name} is deprecated, use {other}", DeprecationWarning, stacklevel=3)


def _held(name: str, check_initialized: bool = True) -> Any:
    """Return the value of a global in the current state."""
    return current.values[name] or _missing(name, check_initialized)


def _missing(name: str, check_initialized: bool) -> Any:
    """Return None for a global without a value, or raise."""
    if check_initialized:
        raise current.get().missing(name)
    return None


# ---- getters of groups --------------------------------------------------------------------------


def get_model_parallel_group(check_initialized: bool = True) -> ProcessGroup:
    """Return the group over tensor and pipeline parallel."""
    return current.values[table.MP] or _missing(table.MP, check_initialized)


def get_tensor_model_parallel_group(check_initialized: bool = True) -> ProcessGroup:
    """Return the tensor parallel group."""
    return current.values[TP] or _missing(TP, check_initialized)


def get_pipeline_model_parallel_group(check_initialized: bool = True) -> ProcessGroup:
    """Return the group of the calling rank's pipeline."""
    return current.values[PP] or _missing(PP, check_initialized)


def get_context_parallel_group(check_initialized: bool = True) -> ProcessGroup:
    """Return the context parallel group."""
    return current.values[CP] or _missing(CP, check_initialized)


def get_embedding_group(check_initialized: bool = True) -> ProcessGroup:
    """Return the group of the pipeline's ranks that have word embeddings."""
    return _held("_EMBEDDING_GROUP", check_initialized)


def get_position_embedding_group(check_initialized: bool = True) -> ProcessGroup:
    """Return the group of the pipeline's ranks that have position embeddings."""
    return _held("_POSITION_EMBEDDING_GROUP", check_initialized)


def get_tensor_and_context_parallel_group(check_initialized: bool = True) -> ProcessGroup:
    """Return the group over tensor and context parallel."""
    return current.values[table.TP_CP] or _missing(table.TP_CP, check_initialized)


def get_gtp_weight_remat_group(check_initialized: bool = True) -> ProcessGroup:
    """Return the group of GTP peers that share the weights of dense layers."""
    return _held(table.GTP_GROUP, check_initialized)


def get_expert_gtp_weight_remat_group(check_initialized: bool = True) -> ProcessGroup:
    """Return the group of GTP peers that share the weights of experts."""
    return _held(table.EXPERT_GTP_GROUP, check_initialized)


def get_expert_model_parallel_group(check_initialized: bool = True) -> ProcessGroup:
    """Return the expert parallel group."""
    return current.values[EP] or _missing(EP, check_initialized)


def get_expert_tensor_parallel_group(check_initialized: bool = True) -> ProcessGroup:
    """Return the tensor parallel group of experts."""
    return current.values[EXPERT_TP] or _missing(EXPERT_TP, check_initialized)


def get_expert_tensor_and_model_parallel_group(check_initialized: bool = True) -> ProcessGroup:
    """Return the group over tensor and expert parallel of experts."""
    return current.values[table.TP_EP] or _missing(table.TP_EP, check_initialized)


def get_intra_distributed_optimizer_instance_group(check_initialized: bool = True) -> ProcessGroup:
    """Return the group of all ranks of one optimizer instance."""
    return _held(table.ONE_INSTANCE, check_initialized)


def get_inter_distributed_optimizer_instance_group(check_initialized: bool = True) -> ProcessGroup:
    """Return the group of ranks at the same position in several optimizer instances."""
    return _held(table.INTER_INSTANCES, check_initialized)


def get_hierarchical_context_parallel_groups(check_initialized: bool = True) -> list[ProcessGroup]:
    """Return the context parallel group of each level, innermost first."""
    return _held(table.HIERARCHY, check_initialized)


def get_context_parallel_global_ranks(check_initialized: bool = True) -> list[int]:
    """Return the ranks of the context parallel group."""
    return _held("_CONTEXT_PARALLEL_GLOBAL_RANKS", check_initialized)


def get_gtp_weight_remat_global_ranks(check_initialized: bool = True) -> list[int]:
    """Return the ranks of the group of GTP peers."""
    return _held("_GTP_WEIGHT_REMAT_GLOBAL_RANKS", check_initialized)


def get_expert_gtp_weight_remat_global_ranks(check_initialized: bool = True) -> list[int]:
    """Return the ranks of the experts' group of GTP peers."""
    return _held("_EXPERT_GTP_WEIGHT_REMAT_GLOBAL_RANKS", check_initialized)


# Megatron-DeepSpeed calls context parallel sequence parallel. There is no function
# initialize_sequence_parallel, because DeepSpeed assumes no model parallel if an mpu has it.
def get_sequence_parallel_group(check_initialized: bool = True) -> ProcessGroup:
    """Return the context parallel group, for DeepSpeed."""
    return current.values[CP] or _missing(CP, check_initialized)


def get_sequence_data_parallel_group(check_initialized: bool = True) -> ProcessGroup:
    """Return the group over data and context parallel, for DeepSpeed."""
    return current.values[DP_CP] or _missing(DP_CP, check_initialized)


def get_data_parallel_group(
    with_context_parallel: bool = False,
    *,
    with_gtp_remat: bool = True,
    partial_data_parallel: bool = False,
    independent_all_gather: bool = False,
) -> ProcessGroup:
    """Return the data parallel group that the arguments choose.

    Args:
        with_context_parallel: Whether to include the context parallel ranks.
        with_gtp_remat: Whether to include the GTP peers, which process different data. Otherwise,
            the group has only the ranks with the same weights.
        partial_data_parallel: Whether to return the part of the group in one optimizer instance.
            Needs `with_context_parallel`.
        independent_all_gather: Whether to return the second group for all-gathers. Needs
            `with_context_parallel`.
    """
    if independent_all_gather and with_context_parallel and not partial_data_parallel:
        return _held(table.DP_CP_AG)
    name = _data_name(with_context_parallel, partial_data_parallel)
    return _held(name + table.WITH_GTP if with_gtp_remat and current.get().answers_gtp else name)


def _data_name(with_context_parallel: bool, is_partial: bool) -> str:
    """Return the global of a data parallel group."""
    if not is_partial:
        return DP_CP if with_context_parallel else DP
    if not with_context_parallel:
        raise StateError("partial_data_parallel=True needs with_context_parallel=True")
    return table.INTRA_DP_CP


def get_data_parallel_group_gloo(
    with_context_parallel: bool = False, partial_data_parallel: bool = False
) -> ProcessGroup:
    """Return the gloo group of data parallel ranks."""
    return _held(_data_name(with_context_parallel, partial_data_parallel) + GLOO)


def has_separate_all_gather_group() -> bool:
    """Return whether the second dp-cp group for all-gathers exists."""
    return _has(table.DP_CP_AG)


def get_hybrid_data_context_parallel_groups(
    check_initialized: bool = True, group_size: int | None = None
) -> ProcessGroup:
    """Return the hybrid group of `group_size` ranks. The largest hybrid group is the dp-cp group.

    Raises:
        GroupMissingError: There is no group of that size (a KeyError).
    """
    return _of_size(table.HYBRID, check_initialized, group_size)


def get_dynamic_data_context_parallel_groups(
    check_initialized: bool = True, group_size: int | None = None
) -> ProcessGroup:
    """Return the dynamic group of `group_size` ranks. The largest dynamic group is the dp-cp group.

    Raises:
        GroupMissingError: There is no group of that size (a KeyError).
    """
    return _of_size(table.DYNAMIC, check_initialized, group_size)


def _of_size(name: str, check_initialized: bool, group_size: int | None) -> ProcessGroup:
    if group_size == get_data_parallel_world_size(with_context_parallel=True):
        return current.values[DP_CP] or _missing(DP_CP, check_initialized)
    groups = current.values[name]
    if group_size not in groups:
        option = table.ROWS[name].option
        raise GroupMissingError(
            f"there is no group of group_size={short_repr(group_size)} in {name}; "
            f"{f'the sizes are {list(groups)}' if groups else f'initialise with {option}=True'}"
        )
    return groups[group_size]


def get_amax_reduction_group(
    with_context_parallel: bool = False, tp_only_amax_red: bool = False
) -> ProcessGroup:
    """Return the group over which FP8 reduces maxima of absolute values."""
    if tp_only_amax_red:
        return _held(table.TP_CP if with_context_parallel else TP)
    return get_tensor_and_data_parallel_group(with_context_parallel=with_context_parallel)


def get_tensor_and_data_parallel_group(
    check_initialized: bool = True, with_context_parallel: bool = False
) -> ProcessGroup:
    """Return the group over tensor and data parallel, optionally with context parallel."""
    name = "_TENSOR_AND_DATA_PARALLEL_GROUP"
    return _held(f"{name}_WITH_CP" if with_context_parallel else name, check_initialized)


def get_expert_tensor_model_pipeline_parallel_group(
    check_initialized: bool = True, with_egtp_remat: bool = False
) -> ProcessGroup:
    """Return the group over expert tp, ep and pp, optionally with the GTP peers."""
    name = table.EXPERT_MP_WITH_GTP if with_egtp_remat else table.EXPERT_MP
    return _held(name, check_initialized)


def get_expert_data_parallel_group(
    check_initialized: bool = True,
    *,
    with_gtp_remat: bool = True,
    partial_expert_data_parallel: bool = False,
) -> ProcessGroup:
    """Return the expert data parallel group, or its part in one optimizer instance.

    Args:
        check_initialized: Whether to raise if there is no group. Otherwise, None is returned.
        with_gtp_remat: Whether to include the GTP peers. Otherwise, the group has only the ranks
            with the same weights.
        partial_expert_data_parallel: Whether to return the part in one optimizer instance.
    """
    name = table.INTRA_EXPERT_DP if partial_expert_data_parallel else EXPERT_DP
    name += table.WITH_GTP if with_gtp_remat and current.get().answers_gtp else ""
    return _held(name, check_initialized)


def get_expert_data_parallel_group_gloo(partial_expert_data_parallel: bool = False) -> ProcessGroup:
    """Return the gloo group of expert data parallel ranks."""
    return _held((table.INTRA_EXPERT_DP if partial_expert_data_parallel else EXPERT_DP) + GLOO)


def get_data_modulo_expert_parallel_group(
    partial_expert_data_parallel: bool = False,
) -> ProcessGroup:
    """Return the expert data parallel group (deprecated: `get_expert_data_parallel_group`)."""
    _deprecated("get_data_modulo_expert_parallel_group", "get_expert_data_parallel_group")
    return get_expert_data_parallel_group(partial_expert_data_parallel=partial_expert_data_parallel)


# ---- getters of sizes and ranks ---------------------------------------------------------------
# If torch.distributed is not initialised, some of these functions return 0 and others raise, as in
# Megatron.


def get_model_parallel_world_size() -> int:
    """Return the size of the model parallel group."""
    return get_model_parallel_group().size()


def get_model_parallel_rank() -> int:
    """Return the calling rank's position in the model parallel group."""
    return get_model_parallel_group().rank()


def get_tensor_model_parallel_world_size() -> int:
    """Return the size of the tensor parallel group."""
    given = current.values["_MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE"]
    return get_tensor_model_parallel_group().size() if given is None else given


def get_tensor_model_parallel_rank() -> int:
    """Return the calling rank's position in the tensor parallel group."""
    given = current.values["_MPU_TENSOR_MODEL_PARALLEL_RANK"]
    return get_tensor_model_parallel_group().rank() if given is None else given


def get_pipeline_model_parallel_world_size() -> int:
    """Return the size of the pipeline parallel group."""
    given = current.values["_MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE"]
    return get_pipeline_model_parallel_group().size() if given is None else given


def get_pipeline_model_parallel_rank() -> int:
    """Return the calling rank's position in the pipeline parallel group."""
    given = current.values["_MPU_PIPELINE_MODEL_PARALLEL_RANK"]
    return get_pipeline_model_parallel_group().rank() if given is None else given


def get_context_parallel_world_size() -> int:
    """Return the size of the context parallel group."""
    return get_context_parallel_group().size() if dist.is_initialized() else 0


def get_context_parallel_rank() -> int:
    """Return the calling rank's position in the context parallel group."""
    return get_context_parallel_group().rank() if dist.is_initialized() else 0


def get_tensor_and_context_parallel_world_size() -> int:
    """Return the size of the tensor and context parallel group."""
    return get_tensor_and_context_parallel_group().size() if dist.is_initialized() else 0


def get_tensor_and_context_parallel_rank() -> int:
    """Return the calling rank's position in the tensor and context parallel group."""
    return get_tensor_and_context_parallel_group().rank() if dist.is_initialized() else 0


def get_gtp_weight_remat_world_size() -> int:
    """Return the size of the GTP group."""
    group = get_gtp_weight_remat_group(check_initialized=False)
    return 0 if group is None else group.size()


def get_gtp_weight_remat_rank() -> int:
    """Return the calling rank's position in the GTP group."""
    group = get_gtp_weight_remat_group(check_initialized=False)
    return 0 if group is None else group.rank()


def get_expert_gtp_weight_remat_world_size() -> int:
    """Return the size of the experts' GTP group."""
    group = get_expert_gtp_weight_remat_group(check_initialized=False)
    return 0 if group is None else group.size()


def get_expert_gtp_weight_remat_rank() -> int:
    """Return the calling rank's position in the experts' GTP group."""
    group = get_expert_gtp_weight_remat_group(check_initialized=False)
    return 0 if group is None else group.rank()


def get_expert_model_parallel_world_size() -> int:
    """Return the size of the expert parallel group."""
    given = current.values["_MPU_EXPERT_MODEL_PARALLEL_WORLD_SIZE"]
    if given is None and dist.is_initialized():
        return get_expert_model_parallel_group().size()
    return given or 0


def get_expert_model_parallel_rank() -> int:
    """Return the calling rank's position in the expert parallel group."""
    given = current.values["_MPU_EXPERT_MODEL_PARALLEL_RANK"]
    if given is None and dist.is_initialized():
        return get_expert_model_parallel_group().rank()
    return given or 0


def get_expert_tensor_parallel_world_size() -> int:
    """Return the size of the experts' tensor parallel group."""
    given = current.values["_MPU_EXPERT_TENSOR_PARALLEL_WORLD_SIZE"]
    if given is None and current.values[EXPERT_TP] is None:
        return current.values["_MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE"]
    return get_expert_tensor_parallel_group().size() if given is None else given


def get_expert_tensor_parallel_rank() -> int:
    """Return the calling rank's position in the experts' tensor parallel group."""
    given = current.values["_MPU_EXPERT_TENSOR_PARALLEL_RANK"]
    if given is None and current.values[EXPERT_TP] is None:
        return current.values["_MPU_TENSOR_MODEL_PARALLEL_RANK"]
    return get_expert_tensor_parallel_group().rank() if given is None else given


def get_expert_tensor_and_model_parallel_world_size() -> int:
    """Return the size of the experts' tensor and expert parallel group."""
    return get_expert_tensor_and_model_parallel_group().size() if dist.is_initialized() else 0


def get_expert_tensor_and_model_parallel_rank() -> int:
    """Return the calling rank's position in the experts' tensor and expert parallel group."""
    return get_expert_tensor_and_model_parallel_group().rank() if dist.is_initialized() else 0


def get_sequence_parallel_world_size() -> int:
    """Return the size of the context parallel group."""
    return get_sequence_parallel_group().size() if dist.is_initialized() else 0


def get_sequence_parallel_rank() -> int:
    """Return the calling rank's position in the context parallel group."""
    return get_sequence_parallel_group().rank() if dist.is_initialized() else 0


def get_data_parallel_world_size(
    with_context_parallel: bool = False,
    *,
    with_gtp_remat: bool = True,
    partial_data_parallel: bool = False,
) -> int:
    """Return the size of the group that `get_data_parallel_group` returns."""
    given = current.values["_MPU_DATA_PARALLEL_WORLD_SIZE"]
    if given is not None or not dist.is_initialized():
        return given or 0
    return _data_group(with_context_parallel, with_gtp_remat, partial_data_parallel).size()


def get_data_parallel_rank(
    with_context_parallel: bool = False,
    *,
    with_gtp_remat: bool = True,
    partial_data_parallel: bool = False,
) -> int:
    """Return the calling rank's position in the group that `get_data_parallel_group` returns."""
    given = current.values["_MPU_DATA_PARALLEL_RANK"]
    if given is not None or not dist.is_initialized():
        return given or 0
    return _data_group(with_context_parallel, with_gtp_remat, partial_data_parallel).rank()


def get_expert_data_parallel_world_size(
    *, with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
) -> int:
    """Return the size of the group that `get_expert_data_parallel_group` returns."""
    if not dist.is_initialized():
        return 0
    return _expert_data_group(with_gtp_remat, partial_expert_data_parallel).size()


def get_expert_data_parallel_rank(
    *, with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
) -> int:
    """Return the position of the calling rank in the group that the getter of the group returns."""
    if not dist.is_initialized():
        return 0
    return _expert_data_group(with_gtp_remat, partial_expert_data_parallel).rank()


def _data_group(with_cp: bool, with_gtp_remat: bool, is_partial: bool) -> ProcessGroup:
    get = get_data_parallel_group
    if with_gtp_remat:  # a replaced getter may lack this argument
        return get(with_context_parallel=with_cp, partial_data_parallel=is_partial)
    return get(with_cp, with_gtp_remat=False, partial_data_parallel=is_partial)


def _expert_data_group(with_gtp_remat: bool, is_partial: bool) -> ProcessGroup:
    if with_gtp_remat:
        return get_expert_data_parallel_group(partial_expert_data_parallel=is_partial)
    return get_expert_data_parallel_group(
        with_gtp_remat=False, partial_expert_data_parallel=is_partial
    )


def get_sequence_data_parallel_world_size() -> int:
    """Return the size of the group over data and context parallel."""
    return get_data_parallel_world_size(with_context_parallel=True)


def get_sequence_data_parallel_rank() -> int:
    """Return the calling rank's position in the group over data and context parallel."""
    return get_data_parallel_rank(with_context_parallel=True)


def get_all_ranks() -> str:
    """Return the calling rank's positions in several groups, joined by underscores.

    The groups are tp, gtp_remat (from megatron-core 0.19 on), dp, cp, pp and ep.
    """
    peers = [get_gtp_weight_remat_rank() or 0] if current.get().answers_gtp else []
    ranks = [
        get_tensor_model_parallel_rank(),
        *peers,
        get_data_parallel_rank(),
        get_context_parallel_rank(),
        get_pipeline_model_parallel_rank(),
        get_expert_model_parallel_rank(),
    ]
    return "_".join(str(rank or 0) for rank in ranks)


# ---- sizes and ranks that are set ---------------------------------------------------------------
# Getters return a value that was set instead of the value of the group, until it is set to None.


def set_tensor_model_parallel_world_size(world_size: int | None) -> None:
    """Set the value that `get_tensor_model_parallel_world_size` returns."""
    current.get().write("_MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE", world_size)


def set_tensor_model_parallel_rank(rank: int | None) -> None:
    """Set the value that `get_tensor_model_parallel_rank` returns."""
    current.get().write("_MPU_TENSOR_MODEL_PARALLEL_RANK", rank)


def set_pipeline_model_parallel_world_size(world_size: int | None) -> None:
    """Set the value that `get_pipeline_model_parallel_world_size` returns."""
    current.get().write("_MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE", world_size)


def set_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Set the value that `get_pipeline_model_parallel_rank` returns."""
    current.get().write("_MPU_PIPELINE_MODEL_PARALLEL_RANK", rank)


def set_expert_model_parallel_world_size(world_size: int | None) -> None:
    """Set the value that `get_expert_model_parallel_world_size` returns."""
    current.get().write("_MPU_EXPERT_MODEL_PARALLEL_WORLD_SIZE", world_size)


def set_expert_model_parallel_rank(rank: int | None) -> None:
    """Set the value that `get_expert_model_parallel_rank` returns."""
    current.get().write("_MPU_EXPERT_MODEL_PARALLEL_RANK", rank)


def set_expert_tensor_parallel_world_size(world_size: int | None) -> None:
    """Set the value that `get_expert_tensor_parallel_world_size` returns."""
    current.get().write("_MPU_EXPERT_TENSOR_PARALLEL_WORLD_SIZE", world_size)


def set_expert_tensor_parallel_rank(rank: int | None) -> None:
    """Set the value that `get_expert_tensor_parallel_rank` returns."""
    current.get().write("_MPU_EXPERT_TENSOR_PARALLEL_RANK", rank)


def set_data_parallel_rank(rank: int | None) -> None:
    """Set the value that `get_data_parallel_rank` returns."""
    current.get().write("_MPU_DATA_PARALLEL_RANK", rank)


def set_virtual_pipeline_model_parallel_world_size(world_size: int | None) -> None:
    """Set the number of virtual stages of each rank."""
    current.get().write(_states.STAGES, world_size)


def set_virtual_pipeline_model_parallel_rank(rank: int | None) -> None:
    """Set the virtual stage (deprecated: pass `vp_stage` instead)."""
    _deprecated("set_virtual_pipeline_model_parallel_rank", "the argument vp_stage")
    current.get().write(_states.STAGE, rank)


# ---- global ranks, and the pipeline -----------------------------------------------------------


def get_tensor_model_parallel_src_rank() -> int:
    """Return the first rank of the calling rank's tensor parallel group."""
    return _held("_TENSOR_MODEL_PARALLEL_GLOBAL_RANKS")[0]


def get_model_parallel_src_rank() -> int:
    """Return the first rank of the calling rank's model parallel group."""
    return _held("_MODEL_PARALLEL_GLOBAL_RANKS")[0]


def get_expert_model_parallel_src_rank() -> int:
    """Return the first rank of the calling rank's expert parallel group."""
    return _held("_EXPERT_MODEL_PARALLEL_RANKS")[0]


def get_sequence_parallel_src_rank() -> int:
    """Return the first rank of the calling rank's context parallel group."""
    return _held("_CONTEXT_PARALLEL_GLOBAL_RANKS")[0]


def get_pipeline_model_parallel_first_rank() -> int:
    """Return the first rank of the calling rank's pipeline."""
    return _held("_PIPELINE_GLOBAL_RANKS")[0]


def get_pipeline_model_parallel_last_rank() -> int:
    """Return the rank of the last stage of the calling rank's pipeline."""
    return _held("_PIPELINE_GLOBAL_RANKS")[get_pipeline_model_parallel_world_size() - 1]


def get_pipeline_model_parallel_next_rank() -> int:
    """Return the rank of the next stage. The first stage follows the last."""
    return _stage_at(1)


def get_pipeline_model_parallel_prev_rank() -> int:
    """Return the rank of the previous stage. The last stage precedes the first."""
    return _stage_at(-1)


def _stage_at(distance: int) -> int:
    stages = _held("_PIPELINE_GLOBAL_RANKS")
    stage = get_pipeline_model_parallel_rank() + distance
    return stages[stage % get_pipeline_model_parallel_world_size()]


def get_data_parallel_src_rank(with_context_parallel: bool = False) -> int:
    """Return the first rank of the calling rank's data parallel group."""
    ranks = "_DATA_PARALLEL_GLOBAL_RANKS"
    return _held(f"{ranks}_WITH_CP" if with_context_parallel else ranks)[0]


def get_data_parallel_group_ranks() -> list[int]:
    """Return the ranks of the data parallel group, for DeepSpeed."""
    return list(_held("_DATA_PARALLEL_GLOBAL_RANKS"))


def is_pipeline_first_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Return whether this is the first stage. With `ignore_virtual=False`, check `vp_stage` too."""
    if not ignore_virtual and _virtual_stage(vp_stage) not in {None, 0}:
        return False
    return get_pipeline_model_parallel_rank() == 0


def is_pipeline_last_stage(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Return whether this is the last stage. With `ignore_virtual=False`, check `vp_stage` too."""
    if not ignore_virtual:
        stage = _virtual_stage(vp_stage)
        size = get_virtual_pipeline_model_parallel_world_size()
        if size is not None and stage != size - 1:
            return False
    return get_pipeline_model_parallel_rank() == get_pipeline_model_parallel_world_size() - 1


def _virtual_stage(vp_stage: int | None) -> int | None:
    if get_virtual_pipeline_model_parallel_world_size() is None:
        return None
    if vp_stage is None:
        raise StateError(
            "with ignore_virtual=False, vp_stage must be given, because the pipeline is virtual"
        )
    return vp_stage


def is_rank_in_embedding_group(ignore_virtual: bool = True, vp_stage: int | None = None) -> bool:
    """Return whether the calling rank, or its stage `vp_stage`, has word embeddings."""
    rank = dist.get_rank()
    ranks = current.values["_EMBEDDING_GLOBAL_RANKS"]
    if ranks is None or ignore_virtual or rank not in ranks:
        return ranks is not None and rank in ranks
    if rank == ranks[0]:
        return is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
    return rank != ranks[-1] or is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)


def is_rank_in_position_embedding_group() -> bool:
    """Return whether the calling rank has position embeddings."""
    rank = dist.get_rank()
    ranks = current.values["_POSITION_EMBEDDING_GLOBAL_RANKS"]
    return ranks is not None and rank in ranks


def get_virtual_pipeline_model_parallel_rank() -> int | None:
    """Return the virtual stage, or None if the pipeline is not virtual."""
    return current.values[_states.STAGE]


def get_virtual_pipeline_model_parallel_world_size() -> int | None:
    """Return the number of virtual stages of a rank, or None if the pipeline is not virtual."""
    return current.values[_states.STAGES]


# ---- memory buffers ---------------------------------------------------------------------------

_MEMORY = "_GLOBAL_MEMORY_BUFFER"
_SYMMETRIC = "_GLOBAL_SYMMETRIC_MEMORY_BUFFER"


def get_global_memory_buffer() -> GlobalMemoryBuffer:
    """Return the memory buffer."""
    return _held(_MEMORY)


def get_global_symmetric_memory_buffer() -> Any:
    """Return the symmetric memory buffer."""
    return _held(_SYMMETRIC)


def _set_global_memory_buffer() -> None:
    _fill_once(_MEMORY, GlobalMemoryBuffer)


def _set_global_symmetric_memory_buffer() -> None:
    """Create the symmetric buffer of 256 MiB.

    Up to megatron-core 0.16, the class of the buffer is in `megatron.core.utils`.
    """
    utils: Any = importlib.import_module("megatron.core.utils")
    _fill_once(
        _SYMMETRIC,
        lambda: utils.GlobalSymmetricMemoryBuffer(256, get_tensor_model_parallel_group()),
    )


def _fill_once(name: str, make: Callable[[], Any]) -> None:
    if current.values[name] is not None:
        raise StateError(f"{name} is already initialized; destroy it first")
    current.get().write(name, make())


def destroy_global_memory_buffer() -> None:
    """Discard the memory buffer."""
    current.get().write(_MEMORY, None)


def destroy_global_symmetric_memory_buffer() -> None:
    """Discard the symmetric memory buffer."""
    current.get().write(_SYMMETRIC, None)


# ---- groups outside the state -----------------------------------------------------------------


def create_group(
    ranks: Sequence[int] | None = None,
    timeout: timedelta | None = None,
    backend: str | None = None,
    pg_options: Any = None,
    use_local_synchronization: bool = False,
    group_desc: str | None = None,
) -> ProcessGroup:
    """Create a group with `torch.distributed.new_group`, and register it for `update_pg_timeout`.

    Every rank of the world must call this. The caller must destroy the group, except within
    `initialize_model_parallel`, where the state destroys it.
    """
    group: Any = dist.new_group(
        ranks=ranks,
        timeout=timeout,
        backend=backend,
        pg_options=pg_options,
        use_local_synchronization=use_local_synchronization,
        group_desc=group_desc,
    )
    if ranks is None or dist.get_rank() in ranks:
        current.get().list_groups([group])
    return group


_THEIRS = (
    "RankGenerator",
    "_inject_gtp_remat_axis",
    "create_dynamic_dp_cp_groups",
    "create_hierarchical_groups",
    "create_hybrid_dp_cp_groups",
    "generate_masked_orthogonal_rank_groups",
)
"""Functions of the installed release that use neither the state nor its grid."""


def __getattr__(name: str) -> Any:
    """Return a function of the installed release. It creates groups with this `create_group`."""
    if name not in _THEIRS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    theirs = version.original("parallel_state")
    theirs.create_group = create_group
    return getattr(theirs, name)


def create_all_gather_groups(
    for_expert_parallelism: bool = False,
    timeout: timedelta | None = None,
    nccl_comm_cfgs: Mapping[str, Mapping[str, Any]] | None = None,
) -> tuple[ProcessGroup | None, ProcessGroup | None]:
    """Create a second dp-cp group and a second expert dp group, for overlapping all-gathers.

    The state owns the groups, and `update_pg_timeout` applies to them. In a collection of the
    state's groups, they are the fields `dp_cp_ag` and `expt_dp_ag`. A second call returns the same
    groups.

    Returns:
        The two groups. The expert group is None if `for_expert_parallelism` is False or the expert
        parallel size is 1.

    Raises:
        NotInitializedError: The parallel state is not initialised (a RuntimeError).
        GroupOptionsError: An option is invalid, or the groups already exist with other options (a
            ValueError).
        ConfigurationError: `nccl_comm_cfgs` contains an option that NCCL rejects.
    """
    asked = [table.ROWS[table.DP_CP_AG]]
    if for_expert_parallelism and is_initialized() and get_expert_model_parallel_world_size() > 1:
        asked.append(table.EXPERT_ALL_GATHER)
    options = {row.key: get_nccl_options(row.key, nccl_comm_cfgs or {}) for row in asked}
    groups = current.get().add_all_gather_groups(asked, options, timeout, _replaced_create_group())
    return groups[0], groups[1] if len(groups) > 1 else None


def update_pg_timeout(timeout: timedelta, pg: ProcessGroup | None = None) -> None:
    """Change the timeout of a group, or of all groups of the state and WORLD, after a barrier.

    Raises:
        StateError: `pg` is not given, and no group was registered.
    """
    check_duration(timeout)
    groups = [pg] if pg is not None else _held("_global_process_group_list")
    dist.barrier(pg)
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    for group in groups:
        torchdist.set_timeout(timeout, group)


# ---- functions that a program has replaced ------------------------------------------------------


def _replaced_create_group() -> Callable[..., Any] | None:
    """Return `create_group` if a program has replaced it or torch's `new_group`, otherwise None.

    Raises:
        StateError: A program has replaced a function that Megatron asks for the ranks of groups.
    """
    for name in _THEIRS:  # `__getattr__` returns them, and the module has only replacements
        if name in globals() and not version.is_original(globals()[name]):
            raise StateError(
                f"{name} of {__name__} was replaced, but the grid computes the ranks of groups; "
                f"replace create_group or torch.distributed.new_group instead"
            )
    module = getattr(dist.new_group, "__globals__", {}).get("__name__", "")
    is_own = create_group is _own_create_group and module.startswith("torch.")
    return None if is_own else create_group


_own_create_group = create_group

current.bind(sys.modules[__name__], _states.GLOBALS)
