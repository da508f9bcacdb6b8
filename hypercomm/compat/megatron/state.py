"""Defines `ParallelState`: one Megatron configuration, its grid, and the groups in `table`.

To create the groups, this module also sets NCCL options, and the environment variables of SHARP
and UCC.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from functools import partial
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import attrs
import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypercomm.compat.layouts import EXPERT
from hypercomm.compat.megatron import table, version
from hypercomm.compat.module_state import CurrentState, ModuleState
from hypercomm.errors import ConfigurationError, StateError
from hypercomm.grid import HyperCommGrid
from hypercomm.grid.view import GridView
from hypercomm.layout.checks import as_ordered, check_choice
from hypercomm.layout.text import short_repr
from hypercomm.process_groups import torch_internals as torchdist
from hypercomm.process_groups.spec import GroupRequest

logger = logging.getLogger(__name__)

SIZE: Final = "WORLD_SIZE"
RANK: Final = "RANK"
"""The two facts about a group: its size, and the calling rank's position in the group.

Each name is also the suffix of the global that overrides the fact.
"""

_LIST = "_global_process_group_list"
STAGE, STAGES = (f"_VIRTUAL_PIPELINE_MODEL_PARALLEL_{fact}" for fact in (RANK, SIZE))
OVERRIDES = [
    f"_MPU_{what}_PARALLEL_{fact}"
    for what in ("EXPERT_MODEL", "EXPERT_TENSOR", "TENSOR_MODEL", "PIPELINE_MODEL", "DATA")
    for fact in (SIZE, RANK)
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

NO_PART = "_INTRA_PARTIAL_DATA_PARALLEL_GROUP"
"""The global of the part of the dp group in one optimizer instance. This group never exists."""

_SHARP = {"dp": table.DP_CP, "dp_replica": table.INTER_INSTANCES}
"""For each value of `sharp_enabled_group`, the global of the group that uses SHARP."""

_NEED_A_JOB = (table.TP, table.PP, table.MP, table.EXPERT_TP)
"""Groups whose size and rank getters raise if torch.distributed is not initialised.

The getters of other groups return 0.
"""


_GROUPS = {
    name: f"_MPU{name.removeprefix('_INTRA_PARTIAL').partition('_GROUP')[0]}"
    for name in (*table.ROWS, table.EXPERT_ALL_GATHER.name, NO_PART)
}
"""Maps the global of each group to the prefix of the globals that override its size and rank."""


def words_of(name: str) -> str:
    """Return the name of a global as words, for documentation and errors."""
    return name.strip("_").replace("_", " ").lower()


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
    """Destroy Megatron's objects that use process groups, and log errors."""
    for module, path in _USERS:
        try:
            attrgetter(path)(sys.modules.get(module))()
        except Exception:  # usually, the module is not imported, or lacks the function
            logger.debug("%s of %s failed", path, module, exc_info=True)


# ---- NCCL, SHARP and UCC -----------------------------------------------------------------------

NcclConfig = dict[str, dict[str, Any]]
CreateFunction = Callable[
    [table.Configuration, list[Mapping[str, int]], list[table.WantedGroup], list[GroupRequest]],
    "list[ProcessGroup | None]",
]
"""A function that creates groups and returns the calling rank's groups.

Its second argument contains the sizes of the dense and of the expert layout.
"""

_COLLNET = "NCCL_COLLNET_ENABLE"
_PRIORITY = "is_high_priority_stream"
_UCC_ENVIRONMENT = {
    "NSYS_UCP_COMM_PARAMS": "1",
    "UCC_CL_BASIC_TLS": "^sharp,nccl",
    "UCX_NET_DEVICES": "all",
    "UCX_RNDV_THRESH": "0",
}
_UCC_DEFAULTS = {
    "TORCH_UCC_BLOCKING_WAIT": "none",
    "UCC_EC_CUDA_STREAM_TASK_MODE": "driver",
    "UCX_TLS": "ib,cuda_copy",
}


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


@attrs.frozen
class Functions:
    """The functions that a state calls to create groups. A program may replace them.

    Attributes:
        get_nccl_options: Returns the options of a group.
        overwrite_nccl_comm_cfgs: Sets one option in a configuration.
        create: Creates groups. Default: the grid of the state creates them.
    """

    get_nccl_options: Callable[..., Any] = get_nccl_options
    overwrite_nccl_comm_cfgs: Callable[..., None] = overwrite_nccl_comm_cfgs
    create: CreateFunction | None = None


def options_by_key(
    config: table.Configuration, functions: Functions | None = None
) -> dict[str, Any]:
    """Return the backend options that the file and the stream priorities set, by NCCL key.

    Keys with equal options share one options object, so that these keys can also share groups. If
    the backend of WORLD supports no options, the result is empty, and a warning is logged. If a
    program has replaced `get_nccl_options`, the replacement is called for every key.

    Raises:
        OSError, YAMLError: The file cannot be read.
        ConfigurationError: The file has an unknown group key or NCCL option, or pyyaml is missing.
            The extra `nccl-config` installs pyyaml.
        NotInitializedError: There are options, but torch.distributed is not initialised, so the
            backend is unknown.
    """
    functions = functions or Functions()
    path = config.nccl_communicator_config_path
    preferred = config.high_priority_stream_groups
    content: NcclConfig = {} if path is None else _read(path)
    for key in as_ordered(preferred, "high_priority_stream_groups") if preferred else ():
        functions.overwrite_nccl_comm_cfgs(content, key, (_PRIORITY, True))
    for key in content:
        check_choice("a group of the NCCL configuration", key, table.NCCL_KEYS, ConfigurationError)
    options: dict[str, Any] = dict(content)
    if functions.get_nccl_options is not get_nccl_options:
        given = {key: functions.get_nccl_options(key, content) for key in table.NCCL_KEYS}
        options = {key: own for key, own in given.items() if own is not None}
    if not options:
        return {}
    backend = torchdist.default_backend()
    if not any(map(torchdist.takes_options, torchdist.single_backends(backend))):
        logger.warning("NCCL options of groups %s have no effect on %r", [*options], backend)
        return {}
    if functions.get_nccl_options is not get_nccl_options:
        return options
    made = {repr(own): get_nccl_options(key, content) for key, own in content.items()}
    return {key: made[repr(own)] for key, own in content.items()}


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


def _set_environment(pipeline_backend: str | None) -> None:
    """Set the environment variables of the backends.

    Raises:
        ConfigurationError: CUDA_DEVICE_MAX_CONNECTIONS is 1, which does not work with UCC.
    """
    ucc = pipeline_backend == "ucc"
    if ucc and os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1":
        raise ConfigurationError(
            "pipeline_model_parallel_comm_backend='ucc' needs CUDA_DEVICE_MAX_CONNECTIONS above 1"
        )
    os.environ.pop(_COLLNET, None)
    if ucc:
        os.environ.update({**_UCC_DEFAULTS, **os.environ, **_UCC_ENVIRONMENT})


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
        facts: Two dicts, with the keys `SIZE` and `RANK`. They map the global of each group to the
            cached size of the group, and to the calling rank's cached position in the group. If a
            group is not a ProcessGroup, as in tests with mocks, only values that a caller has set
            are cached.

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

    def fill(self, values: Mapping[str, Any]) -> None:
        """Set several globals, and update the cached sizes and positions."""
        super().fill(values)
        self.facts: dict[str, dict[str, int]] = {SIZE: {}, RANK: {}}
        for name, override in _GROUPS.items():
            group: Any = self.values.get(name)
            for fact, known in self.facts.items():
                given = self.values.get(f"{override}_{fact}")
                # The methods of a mock may return another value in each call.
                if given is None and issubclass(type(group), ProcessGroup):
                    given = group.size() if fact == SIZE else group.rank()
                if given is not None:
                    known[name] = given

    def find(self, name: str, fact: str, get_group: Callable[[], ProcessGroup | None]) -> Any:
        """Return the size of a group, or the calling rank's position in it, by Megatron's rules.

        Args:
            name: The global with the group.
            fact: `SIZE` or `RANK`.
            get_group: A function that returns the group.
        """
        given = self.values.get(f"{_GROUPS[name]}_{fact}")
        if given is not None:
            return given
        if name not in _NEED_A_JOB and not dist.is_initialized():
            return 0
        if name == table.EXPERT_TP and self.values.get(name) is None:
            return self.values[f"{_GROUPS[table.TP]}_{fact}"]
        group = get_group()
        if group is None:  # only for a group of GTP peers, if there are no peers
            return 0
        return group.size() if fact == SIZE else group.rank()

    def initialize(self, *args: Any, **kwargs: Any) -> None:
        """Create all groups of a configuration. If the call fails, nothing is changed.

        See `parallel_state.initialize_model_parallel` for the arguments and errors.
        """
        self.begin(table.Configuration.of_call("ParallelState.create", args, kwargs), Functions())

    def begin(self, configuration: table.Configuration, functions: Functions) -> None:
        """Create all groups of a configuration with the given functions. See `initialize`."""
        names = (*table.ROWS, "_GLOBAL_MEMORY_BUFFER")
        layouts = self.check_new(names, "destroy_model_parallel", configuration.layouts)
        options = options_by_key(configuration, functions)
        by_functions = functions.create is not None
        wanted = list(table.rows(configuration, layouts, options, by_functions=by_functions))
        with contextlib.ExitStack() as undo:
            undo.callback(os.environ.update, dict(os.environ))
            undo.callback(os.environ.clear)  # runs before the update
            _set_environment(configuration.pipeline_model_parallel_comm_backend)
            grid = undo.enter_context(HyperCommGrid(layouts.dense, name="megatron"))
            grid.register_view(EXPERT, layouts.expert.shape, layouts.expert.dim_names)
            if functions.create is None:
                groups = _create(lambda _, asked: grid.create_pgs(asked), wanted, configuration)
            else:
                undo.callback(self._restore_list, copy(self.values[_LIST]))
                listed = self.values[_LIST] or []
                with current.use(self):
                    sizes = [layout.sizes for layout in layouts]
                    create = partial(functions.create, configuration, sizes)
                    groups = _create(create, wanted, configuration)
                self._own = [group for group in self.values[_LIST] or [] if group not in listed]
            undo.pop_all()
        self.configuration = configuration
        self.grid = grid
        self.strict = configuration.strict
        self.grids = {"dense": grid, "expert": grid.view(EXPERT)}
        self.answers_gtp = configuration.has_gtp or "gtp_remat" in configuration.changes
        values: dict[str, Any] = {"_GLOBAL_MEMORY_BUFFER": GlobalMemoryBuffer()}
        if configuration.virtual_pipeline_model_parallel_size is not None:
            values[STAGES] = configuration.virtual_pipeline_model_parallel_size
            values[STAGE] = 0
        self.fill(values | _values_of(wanted, groups))
        self.list_groups(groups)
        current.keep(self)

    def _restore_list(self, listed: list[ProcessGroup | None] | None) -> None:
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

    # ---- values for getters ---------------------------------------------------------------------

    def require(self, name: str, check_initialized: bool = True) -> Any:
        """Return the value of a global.

        Raises:
            StateError: The value is None, and `check_initialized` is True.
        """
        value = self.values.get(name)
        if value is None and check_initialized:
            raise self.missing(name)
        return value

    def missing(self, name: str) -> StateError:
        """Return the error for a global that is None."""
        row = table.ROWS.get(name)
        if name.removesuffix(table.GLOO) == NO_PART:
            reason = "partial_data_parallel=True needs with_context_parallel=True"
        elif self.configuration is None:
            reason = "call initialize_model_parallel() first"
        elif row is None:
            reason = "nothing has set it"
        elif name.endswith(table.GLOO) and not self.configuration.creates_gloo(row.grid):
            reason = "the state was initialised with create_gloo_process_groups=False, or with GTP"
        elif row.option is not None and not row.otherwise:
            reason = f"the state was initialised without {row.option}"
        else:
            reason = f"rank {dist.get_rank()} is not in any of these groups"
        return StateError(f"{words_of(name)} is not initialized: {reason}")


def _create(
    create: Callable[[list[table.WantedGroup], list[GroupRequest]], list[ProcessGroup | None]],
    wanted: list[table.WantedGroup],
    config: table.Configuration,
) -> list[ProcessGroup | None]:
    """Create all groups in one call. If a group uses SHARP, create it in a separate call.

    NCCL uses SHARP for the first communicator only, and it creates a group's communicator at the
    first collective of the group.
    """
    sharp = _SHARP[config.sharp_enabled_group or "dp"] if config.use_sharp else None
    requests: list[GroupRequest] = []
    for each in wanted:
        changes: dict[str, Any] = {"timeout": config.timeout}
        if each.request.share is None or each.name == sharp:
            changes["group_desc"] = each.description
        requests.append(attrs.evolve(each.request, **changes))
    if sharp is None:
        return create(wanted, requests)
    place = [each.name for each in wanted].index(sharp)
    after = place + 1
    before = create(wanted[:place], requests[:place])
    os.environ[_COLLNET] = "1"
    requests[place] = attrs.evolve(requests[place], share="never")
    (group,) = create(wanted[place:after], requests[place:after])
    if group is not None:
        device = [torch.cuda.current_device()] if torch.cuda.is_available() else None
        dist.barrier(group=group, device_ids=device)
        if device is not None:
            torch.cuda.synchronize()
    del os.environ[_COLLNET]
    return [*before, group, *create(wanted[after:], requests[after:])]


def _values_of(
    wanted: list[table.WantedGroup], groups: list[ProcessGroup | None]
) -> dict[str, Any]:
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
