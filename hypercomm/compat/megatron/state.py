"""Defines `ParallelState`: one Megatron configuration, its grid, and the groups in `table`.

This module also reads the NCCL options of the groups.
"""

from __future__ import annotations

import contextlib
import logging
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from datetime import timedelta
from operator import attrgetter
from pathlib import Path
from typing import Any

import attrs
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypercomm.compat.layouts import EXPERT, Layouts
from hypercomm.compat.megatron import table, version
from hypercomm.compat.module_state import CurrentState, ModuleState
from hypercomm.errors import ConfigurationError, NotInitializedError, StateError
from hypercomm.grid import HyperCommGrid
from hypercomm.grid.view import GridView
from hypercomm.layout.checks import as_ordered, check_choice, check_duration
from hypercomm.layout.text import short_repr
from hypercomm.process_groups import torch_internals as torchdist

logger = logging.getLogger(__name__)

_LIST = "_global_process_group_list"
STAGE = "_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK"
STAGES = "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE"
OVERRIDES = [
    f"_MPU_{kind}_PARALLEL_{what}"
    for kind in ("EXPERT_MODEL", "EXPERT_TENSOR", "TENSOR_MODEL", "PIPELINE_MODEL", "DATA")
    for what in ("WORLD_SIZE", "RANK")
]
"""Globals that callers can set to a size or rank, which overrides the value of the group."""

_RANKS = [row.ranks for row in table.TABLE if row.ranks]
_OTHERS = (STAGE, STAGES, "_GLOBAL_MEMORY_BUFFER", "_GLOBAL_SYMMETRIC_MEMORY_BUFFER", _LIST)
GLOBALS: dict[str, Callable[[], Any]] = {
    **dict.fromkeys((*table.ROWS, *_RANKS, *OVERRIDES, *_OTHERS), lambda: None),
    table.HYBRID: dict,
    table.DYNAMIC: dict,
}
"""Every global of Megatron's parallel_state, with a function that returns its empty value."""


class GlobalMemoryBuffer:
    """Keeps one buffer for each name and dtype. A buffer grows if a larger tensor is requested.

    Example:
        >>> buffer = GlobalMemoryBuffer()
        >>> first = buffer.get_tensor((2, 3), torch.float32, "activations")
        >>> again = buffer.get_tensor((4,), torch.float32, "activations")
        >>> first.shape, first.data_ptr() == again.data_ptr()
        (torch.Size([2, 3]), True)
    """

    def __init__(self) -> None:
        self.buffer: dict[tuple[str, torch.dtype], torch.Tensor] = {}

    def get_tensor(
        self,
        tensor_shape: Sequence[int],
        dtype: torch.dtype,
        name: str,
        mem_alloc_context: Callable[[], contextlib.AbstractContextManager[Any]] | None = None,
    ) -> torch.Tensor:
        """Return a tensor with undefined values on the current device.

        Args:
            tensor_shape: The shape of the tensor.
            dtype: The dtype of the tensor.
            name: The name of the buffer. Tensors with the same name and dtype share memory.
            mem_alloc_context: A function that returns the context in which memory is allocated.
        """
        length = math.prod(tensor_shape)
        held = self.buffer.get((name, dtype))
        if held is None or held.numel() < length:
            device = torch.cuda.current_device() if torch.cuda.is_available() else "cpu"
            with (mem_alloc_context or contextlib.nullcontext)():
                held = torch.empty(length, dtype=dtype, device=device)
            self.buffer[name, dtype] = held
        return held[:length].view(*tensor_shape)


_USERS = (
    ("megatron.core.transformer.moe.fused_a2a", "nccl_ep_finalize"),
    ("megatron.core.inference.symmetric_memory", "SymmetricMemoryManager.destroy"),
)
"""Modules of Megatron whose objects use process groups, and functions that destroy the objects."""


def destroy_users_of_groups() -> None:
    """Destroy Megatron's objects that use process groups. Errors are ignored."""
    for module, path in _USERS:
        with contextlib.suppress(Exception):  # usually, the module is not imported
            attrgetter(path)(sys.modules.get(module))()


# ---- NCCL --------------------------------------------------------------------------------------

NcclConfig = dict[str, dict[str, Any]]
Groups = list[ProcessGroup | None]

_PRIORITY = "is_high_priority_stream"


def get_nccl_options(pg_name: str, nccl_comm_cfgs: Mapping[str, Mapping[str, Any]]) -> Any:
    """Return the `ProcessGroupNCCL.Options` of a group, or None if no options are configured.

    Raises:
        ConfigurationError: NCCL rejects an option, or this torch was built without NCCL.
    """
    own = nccl_comm_cfgs.get(pg_name)
    if own is None:
        return None
    try:
        given = dict(own)
        options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=given.pop(_PRIORITY, False))
        for name, value in given.items():
            setattr(options.config, name, value)
    except (AttributeError, TypeError, ValueError) as error:
        raise ConfigurationError(
            f"NCCL rejects the options {own} of group {pg_name!r}: {error}"
        ) from error
    return options


def overwrite_nccl_comm_cfgs(
    nccl_comm_cfgs: NcclConfig, pg_name: str, key_value_pair: tuple[str, Any]
) -> None:
    """Set one option of one group in an NCCL configuration.

    Example:
        >>> config = {}
        >>> overwrite_nccl_comm_cfgs(config, "dp", ("max_ctas", 8))
        >>> config
        {'dp': {'max_ctas': 8}}
    """
    key, value = key_value_pair
    nccl_comm_cfgs.setdefault(pg_name, {})[key] = value


def options_by_key(
    config: table.Configuration,
    get_options: Callable[..., Any] = get_nccl_options,
    overwrite: Callable[..., None] = overwrite_nccl_comm_cfgs,
) -> dict[str, Any]:
    """Return the backend options that the file and the stream priorities set, by NCCL key.

    If the backend of WORLD supports no options, the result is empty, and a warning is logged.

    Args:
        config: The configuration.
        get_options: Returns the options of a key, or None.
        overwrite: Sets one option of one key.

    Raises:
        OSError, YAMLError: The file cannot be read.
        ConfigurationError: The file has an unknown group key or NCCL option, or pyyaml is missing.
            The extra `nccl-config` installs pyyaml.
        NotInitializedError: There are options, but torch.distributed is not initialised, so the
            backend is unknown.
    """
    path = config.nccl_communicator_config_path
    preferred = config.high_priority_stream_groups
    content: NcclConfig = {} if path is None else _read(path)
    for key in as_ordered(preferred, "high_priority_stream_groups") if preferred else ():
        overwrite(content, key, (_PRIORITY, True))
    for key in content:
        check_choice("a group of the NCCL configuration", key, table.NCCL_KEYS, ConfigurationError)
    if not content and get_options is get_nccl_options:
        return {}
    backend = torchdist.default_backend()
    if not any(map(torchdist.takes_options, torchdist.single_backends(backend))):
        logger.warning("NCCL options of groups have no effect on %r", backend)
        return {}
    options = {key: get_options(key, content) for key in table.NCCL_KEYS}
    return {key: own for key, own in options.items() if own is not None}


def _read(path: str) -> NcclConfig:
    try:
        import yaml
    except ImportError as error:
        raise ConfigurationError(
            f"{path} needs pyyaml; pip install 'hypercomm[nccl-config]'"
        ) from error
    with Path(path).open("rb") as file:  # yaml's errors name the file
        content = yaml.safe_load(file)
    if not isinstance(content, dict):
        raise ConfigurationError(f"{path} must map groups to options, got {short_repr(content)}")
    return content


# ---- the state ----------------------------------------------------------------------------------


class ParallelState(ModuleState):
    """One Megatron configuration: its grid, its groups, and the values of Megatron's globals.

    A new state is empty. `create` returns an initialised state without changing the default state.
    Within a `with parallel_state.use(state):` block, Megatron's functions act on `state`.

    Attributes:
        configuration: The arguments of `create`, or None in an empty state.
        grids: The "dense" grid, and its view "expert" of the expert layers. Empty in an empty
            state.
        answers_gtp: Whether data parallel getters return groups with GTP peers by default.
        values: The value of each global.

    Example:
        >>> from hypercomm.testing import fake_world
        >>> with fake_world(16), ParallelState.create(tensor_model_parallel_size=2) as state:
        ...     print(state.grids["dense"].layout, state.values["_DATA_PARALLEL_GROUP"].size())
        tp=2,cp=1,ep=1,dp=8,pp=1 8
    """

    empty = GLOBALS

    def reset(self) -> None:
        """Set every global to its empty value."""
        self.configuration: table.Configuration | None = None
        self.grids: dict[str, GridView] = {}
        self.answers_gtp = "gtp_remat" in version.changes()
        self._own: list[ProcessGroup] = []
        super().reset()

    def initialize(self, *args: Any, **kwargs: Any) -> None:
        """Create all groups of a configuration. If the call fails, nothing is changed.

        See `parallel_state.initialize_model_parallel` for the arguments and errors.
        """
        self.begin(table.Configuration(*args, **kwargs))

    def begin(
        self,
        config: table.Configuration,
        read_options: Callable[[table.Configuration], dict[str, Any]] = options_by_key,
        create_group: Callable[..., Any] | None = None,
    ) -> None:
        """Create all groups of a configuration, like `initialize`.

        Args:
            config: The configuration.
            read_options: A function that returns the backend options by NCCL key.
            create_group: A function that creates each group of the job. Default: the grid creates
                only the groups of the calling rank.
        """
        names = (*table.ROWS, "_GLOBAL_MEMORY_BUFFER")
        layouts = self.check_new(names, "destroy_model_parallel", config.layouts)
        options = read_options(config)
        wanted = list(table.rows(config, layouts, options, by_function=bool(create_group)))
        listed = copy(self.values[_LIST])
        with contextlib.ExitStack() as undo:
            grid = undo.enter_context(HyperCommGrid(layouts.dense, name="megatron"))
            grid.register_view(EXPERT, layouts.expert.shape, layouts.expert.dim_names)
            undo.callback(self._restore_list, listed)
            with current.use(self):
                groups = _create(grid, wanted, create_group)
            undo.pop_all()
        self._own = [group for group in self.values[_LIST] or [] if group not in (listed or [None])]
        self.configuration = config
        self.grid = grid
        self.strict = config.strict
        self.grids = {"dense": grid, "expert": grid.view(EXPERT)}
        self.answers_gtp = config.has_gtp or "gtp_remat" in config.changes
        self.values["_GLOBAL_MEMORY_BUFFER"] = GlobalMemoryBuffer()
        if config.virtual_pipeline_model_parallel_size is not None:
            self.values |= {STAGES: config.virtual_pipeline_model_parallel_size, STAGE: 0}
        self.values |= _values_of(wanted, groups)
        self.list_groups(groups)
        current.keep(self)

    def add_all_gather_groups(
        self,
        rows: Iterable[table.Row],
        options: Mapping[str, Any],
        timeout: timedelta | None,
        create_group: Callable[..., Any] | None,
    ) -> Groups:
        """Create groups for all-gathers, or return the existing ones.

        Args:
            rows: The rows of the groups.
            options: The backend options by NCCL key.
            timeout: The timeout of the groups. Default: the timeout of the other groups.
            create_group: See `begin`.
        """
        if self.grid is None or self.configuration is None:
            raise NotInitializedError(
                "create_all_gather_groups() needs groups; call initialize_model_parallel() first"
            )
        if timeout is not None:
            check_duration(timeout)
        grid = self.grid
        minutes = (timeout or self.configuration.timeout).total_seconds() / 60
        config = attrs.evolve(
            self.configuration, create_all_gather_group=True, distributed_timeout_minutes=minutes
        )
        layouts = Layouts(*(view.layout for view in self.grids.values()))
        by_function = bool(create_group)
        wanted = list(table.rows(config, layouts, options, table=rows, by_function=by_function))
        if create_group is not None:
            listed = len(self.values[_LIST])
            groups = _create(grid, wanted, create_group)
            self._own += self.values[_LIST][listed:]
        else:
            requests = [attrs.asdict(each.request, recurse=False) for each in wanted]
            groups = [grid.ensure_pg(**request) for request in requests]
        self.values |= {each.name: group for each, group in zip(wanted, groups, strict=True)}
        self.list_groups(groups)
        return groups

    def _restore_list(self, listed: Groups | None) -> None:
        """Restore an earlier list of groups, and destroy the later groups in reverse order."""
        created = self.values[_LIST] or []
        self.values[_LIST] = listed
        torchdist.destroy(group for group in reversed(created) if group not in (listed or [None]))
        torchdist.forget_non_members()

    def destroy(self) -> None:
        """Destroy the state's groups, and empty the state. A second call has no effect."""
        created = self._own
        super().destroy()
        torchdist.destroy(reversed(created))
        torchdist.forget_non_members()

    def list_groups(self, groups: Iterable[ProcessGroup | None]) -> None:
        """Register groups for `update_pg_timeout`."""
        listed = self.values[_LIST]
        if listed is None:
            listed = self.values[_LIST] = [None]  # None stands for WORLD
        for group in groups:
            if group not in listed:
                listed.append(group)

    def missing(self, name: str) -> StateError:
        """Return the error for a global that is None."""
        row = table.ROWS.get(name)
        if self.configuration is None:
            reason = "call initialize_model_parallel() first"
        elif row is None:
            reason = "nothing has set it"
        elif name.endswith(table.GLOO) and not self.configuration.creates_gloo(row.grid):
            reason = "the state was initialised with create_gloo_process_groups=False, or with GTP"
        elif row.option is not None and not row.otherwise:
            reason = f"the state was initialised without {row.option}"
        else:
            reason = f"rank {dist.get_rank()} is not in any of these groups"
        words = name.strip("_").replace("_", " ").lower()
        return StateError(f"{words} is not initialized: {reason}")


def _create(
    grid: HyperCommGrid,
    wanted: list[table.WantedGroup],
    create_group: Callable[..., Any] | None,
) -> Groups:
    """Create groups with a grid, or with a function that every rank calls for every group."""
    requests = [each.request for each in wanted]
    if create_group is None:
        return grid.create_pgs(requests)
    groups: Groups = []
    for request in requests:
        layout = grid.layout if request.view is None else grid.views[request.view]
        of_dims = layout.groups(request.dims)
        own = None
        for ranks in request.derive(of_dims) if callable(request.derive) else of_dims:
            group = create_group(
                [*ranks],
                backend=request.backend,
                pg_options=request.pg_options,
                timeout=request.timeout,
                group_desc=request.group_desc,
            )
            if dist.get_rank() in ranks:
                own = group
        groups.append(own)
    return groups


def _values_of(wanted: list[table.WantedGroup], groups: Groups) -> dict[str, Any]:
    """Return the values of the globals with the calling rank's groups or with the groups' ranks."""
    held: dict[str, dict[Any, ProcessGroup | None]] = {}
    values: dict[str, Any] = {}
    for each, group in zip(wanted, groups, strict=True):
        parts = held.setdefault(each.name, {})
        if group is not None or each.part is None:
            parts[each.part] = group
        if group is not None and each.row.ranks and each.name == each.row.name:
            values[each.row.ranks] = dist.get_process_group_ranks(group)
    return values | table.values_of(held)


current: CurrentState[ParallelState] = CurrentState("parallel_state", ParallelState)
"""The state that the functions of `parallel_state` act on."""
