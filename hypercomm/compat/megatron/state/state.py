"""ParallelState: one Megatron configuration, as two grids and the groups of the table."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypercomm.compat.megatron.groups import nccl
from hypercomm.compat.megatron.groups.build import Build
from hypercomm.compat.megatron.groups.configuration import Configuration
from hypercomm.compat.megatron.groups.table import EXPERT_ALL_GATHER, GLOO, ROWS, TABLE
from hypercomm.compat.megatron.releases import version
from hypercomm.compat.megatron.state.connecting import connect_grids
from hypercomm.compat.megatron.state.memory import GlobalMemoryBuffer
from hypercomm.compat.module_state import CurrentState, ModuleState
from hypercomm.errors import NotInitializedError, StateError
from hypercomm.grid import HyperCommGrid
from hypercomm.grid.connect import Connections
from hypercomm.process_groups.options import check_timeout
from hypercomm.process_groups.owner import Group as PlannedGroup

if TYPE_CHECKING:
    from typing_extensions import Self

Answer = TypeVar("Answer")

SIZE, RANK = "WORLD_SIZE", "RANK"
"""What can be asked of a group, by the end of the global that overrides it."""

_CHANGED_ON_THE_FLY = [
    f"_MPU_{what}_PARALLEL_{fact}"
    for what in ("EXPERT_MODEL", "EXPERT_TENSOR", "TENSOR_MODEL", "PIPELINE_MODEL", "DATA")
    for fact in (SIZE, RANK)
]
"""Sizes and ranks that callers set; they win over those of the groups, and outlive a creation."""

_LIST = "_global_process_group_list"

_OTHERS = (
    "_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK",
    "_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE",
    "_GLOBAL_MEMORY_BUFFER",
    "_GLOBAL_SYMMETRIC_MEMORY_BUFFER",
    _LIST,
)


def _nothing() -> None:
    return None


GLOBALS: dict[str, Callable[[], Any]] = {
    **dict.fromkeys((*ROWS, *(row.ranks for row in TABLE if row.ranks)), _nothing),
    **dict.fromkeys((*_CHANGED_ON_THE_FLY, *_OTHERS), _nothing),
    "_HYBRID_DP_CP_GROUPS": dict,
}
"""Every global of Megatron's parallel_state, with what makes its value at rest."""

UNKNOWN = object()
"""Stands for an answer that is not kept."""


def _keeps(state: ParallelState) -> bool:
    """Tell whether a state keeps answers; its own answer stands among them."""
    return bool(state.answers[_keeps])


QUESTIONS: dict[Callable[[ParallelState], Any], Any] = {_keeps: False}
"""Whose answers states keep, each with `UNKNOWN`; as it is, the answers of one that keeps none."""

_STEADY = {type(None), int, ProcessGroup, PlannedGroup, list, dict}
"""Types of values on which kept answers may depend; the size of a mock may change."""


class ParallelState(ModuleState):
    """One Megatron configuration: its two grids, its groups, and the values of Megatron's globals.

    A new one is empty. It needs no global state: `create` makes one that stands for itself, and
    `parallel_state.use(state)` lets Megatron's functions act on it within a `with` block.

    Attributes:
        configuration: What it was created from; None while it is empty.
        grids: The "dense" and the "expert" grid, by name; empty while it is.
        is_lazy: Whether groups are created when they are first read.
        answers: What `answer` keeps until the next write, by question, else `UNKNOWN`. Its keys do
            not change, so that what `torch.compile` made of one getter outlives another's call.

    Example:
        >>> from hypercomm.testing import fake_world
        >>> with fake_world(16), ParallelState.create(tensor_model_parallel_size=2) as state:
        ...     print(state.grids["dense"].layout, state.values["_DATA_PARALLEL_GROUP"].size())
        tp=2,cp=1,ep=1,dp=8,pp=1 8
    """

    def __init__(self) -> None:
        super().__init__(GLOBALS)

    def reset(self) -> None:
        """Put every global to its value at rest."""
        self.configuration: Configuration | None = None
        self.grids: dict[str, HyperCommGrid] = {}
        self.is_lazy = False
        self._answers_gtp: bool | None = None
        self._own_rank: int | None = None
        self._mocks: set[str] = set()
        super().reset()

    def fill(self, values: Mapping[str, Any]) -> None:
        """Set several globals, and forget all answers."""
        super().fill(values)
        for name, value in values.items():
            if type(value) in _STEADY:
                self._mocks.discard(name)
            elif name in ROWS:
                self._mocks.add(name)
        keeps = self.configuration is not None and not self._mocks
        self.answers = {**QUESTIONS, _keeps: True} if keeps else QUESTIONS

    @classmethod
    def create(cls, **arguments: Any) -> Self:
        """Make a state of its own; every rank must call this, in the same order.

        Args:
            arguments: Those of `parallel_state.initialize_model_parallel`, by name.

        Raises:
            HyperCommError: As for `initialize_model_parallel`.
        """
        state = cls()
        state.initialize(Configuration(**arguments))
        return state

    def initialize(self, configuration: Configuration) -> None:
        """Create all groups of a configuration; a failure leaves everything as it was.

        Raises:
            HyperCommError: As for `parallel_state.initialize_model_parallel`.
        """
        if not dist.is_initialized():
            raise StateError(
                "torch.distributed is not initialised; call torch.distributed.init_process_group()"
            )
        layouts = configuration.layouts(dist.get_world_size())
        nccl_config = nccl.load(
            configuration.nccl_communicator_config_path, configuration.high_priority_stream_groups
        )
        self._check_empty()
        with nccl.environment(configuration.pipeline_model_parallel_comm_backend):
            build = Build(configuration, nccl_config)
            values = build.run(layouts)
        self.configuration, self.grids = configuration, build.grids
        self._answers_gtp = configuration.answers_gtp
        self.is_lazy, self._own_rank = bool(configuration.lazy), dist.get_rank()
        self.fill(_beside_groups(configuration) | values)
        self.list_groups(build.created)

    def destroy(self) -> None:
        """Destroy the groups that the state created, and empty it; may be called twice."""
        grids = list(self.grids.values())
        self.reset()
        with contextlib.ExitStack() as stack:
            for grid in grids:
                stack.callback(grid.destroy)  # the last one first

    def connect(self, *, timeout: timedelta | None = None) -> Connections:
        """Connect all groups of the state, and neighbours along "pp"; see `HyperCommGrid.connect`.

        Every rank must call this. Groups of a lazy state are created first.

        Raises:
            NotInitializedError: The state is empty.
            PlanMismatchError, ConnectTimeout, HyperCommError: As for `HyperCommGrid.connect`.

        Example:
            >>> from hypercomm.testing import fake_world
            >>> with fake_world(8), ParallelState.create(tensor_model_parallel_size=4) as state:
            ...     print(state.connect()[-1].ranks)
            (0, 1, 2, 3, 4, 5, 6, 7)
        """
        if self.configuration is None:
            raise NotInitializedError(
                "connect() needs groups to connect; call initialize_model_parallel() first"
            )
        return connect_grids(self.grids, timeout, creates=self.is_lazy)

    def all_gather_groups(
        self,
        for_expert_parallelism: bool,
        timeout: timedelta | None,
        nccl_config: Mapping[str, Mapping[str, Any]],
    ) -> tuple[ProcessGroup | None, ProcessGroup | None]:
        """Create twins of data parallel groups; `parallel_state.create_all_gather_groups` is it.

        Raises:
            NotInitializedError: The state is empty.
            GroupOptionsError, NcclConfigError: An option is none, or the twins exist and were
                created with other options.
        """
        if self.configuration is None:
            raise NotInitializedError(
                "create_all_gather_groups() needs groups to make twins of; call "
                "initialize_model_parallel() first"
            )

        check_timeout(timeout)
        default = self.configuration.timeout
        rows = (ROWS["_DATA_PARALLEL_GROUP_WITH_CP_AG"], EXPERT_ALL_GATHER)
        options = [nccl.get_nccl_options(row.key, nccl_config) for row in rows]
        has_experts = self.grids["expert"].layout.size_of("ep") > 1
        wanted = rows if for_expert_parallelism and has_experts else rows[:1]
        twins = [
            self.grids[row.grid].ensure_pg(
                row.dims.split("-"),
                name=row.field,
                timeout=timeout or default,
                pg_options=pg_options,
                group_desc=row.description,
                share="never",
            )
            for row, pg_options in zip(wanted, options, strict=False)
        ]
        self.list_groups(group for group in twins if group is not None)
        return twins[0], twins[1] if len(twins) > 1 else None

    def list_groups(self, groups: Iterable[ProcessGroup]) -> None:
        """Add groups to the list of those whose timeout `update_pg_timeout` changes."""
        listed = self.values[_LIST]
        if listed is None:
            listed = [None]  # WORLD
            self.write(_LIST, listed)
        listed += [group for group in groups if group not in listed]

    # ---- what getters ask -----------------------------------------------------------------

    def read(self, name: str) -> Any:
        """Return the value of a global; a group that is only planned is created now."""
        value = super().read(name)
        if self.is_lazy and name in ROWS:
            new: list[ProcessGroup] = []
            created = _create_planned(value, new)
            if created != value:
                self.write(name, created)
                self.list_groups(new)
            return created
        return value

    def answer(self, question: Callable[[ParallelState], Answer]) -> Answer:
        """Compute an answer, and keep it where only a write can change it."""
        answers = self.answers  # a write meanwhile begins new ones
        answer = question(self)
        if answers[_keeps]:
            answers[question] = answer
        return answer

    @property
    def answers_gtp(self) -> bool:
        """Whether data parallel getters answer groups with GTP peers where nothing is said."""
        return version.has("gtp_remat") if self._answers_gtp is None else self._answers_gtp

    def require(self, name: str) -> Any:
        """Return the value of a global that is set.

        Raises:
            StateError: It is None; says what to do.
        """
        value = self.read(name)
        if value is None:
            raise self.missing(name)
        return value

    def own_rank(self) -> int:
        """Return the rank of the calling process."""
        return dist.get_rank() if self._own_rank is None else self._own_rank

    def missing(self, name: str) -> StateError:
        """Make the error for a global that is None."""
        words = name.strip("_").replace("_", " ").lower()
        if self.configuration is None:
            reason = "call initialize_model_parallel() first"
        elif name.endswith(GLOO) and not self.configuration.create_gloo_process_groups:
            reason = "the state was initialised with create_gloo_process_groups=False"
        elif name.endswith(GLOO) and self.configuration.has_gtp:
            reason = "with GTP there are no gloo twins"
        elif name not in ROWS:
            reason = "nothing has set it"
        elif ROWS[name].option is not None:
            reason = f"the state was initialised without {ROWS[name].option}"
        else:
            reason = f"rank {dist.get_rank()} is in none of these groups"
        return StateError(f"{words} is not initialized: {reason}")

    def _check_empty(self) -> None:
        taken = [name for name in (*ROWS, "_GLOBAL_MEMORY_BUFFER") if self.values[name]]
        if taken:
            raise StateError(
                f"the parallel state is already initialized: {taken[0]} is set; call "
                f"destroy_model_parallel() first, or hold a second state of its own with "
                f"ParallelState.create() and parallel_state.use()"
            )


def _create_planned(value: Any, created: list[ProcessGroup]) -> Any:
    """Create what is planned, within a list or a dict too, and add it to those `created`."""
    if isinstance(value, list):
        return [_create_planned(item, created) for item in value]
    if isinstance(value, dict):
        return {key: _create_planned(item, created) for key, item in value.items()}
    if not isinstance(value, PlannedGroup):
        return value
    group = value.create()
    if group is not None and group not in created:
        created.append(group)
    return group


def _beside_groups(configuration: Configuration) -> dict[str, Any]:
    """What a configuration sets beside groups and their ranks, by global."""
    values: dict[str, Any] = {"_GLOBAL_MEMORY_BUFFER": GlobalMemoryBuffer()}
    stages = configuration.virtual_pipeline_model_parallel_size
    if stages is not None:
        values["_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE"] = stages
        values["_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK"] = 0
    return values


current: CurrentState[ParallelState] = CurrentState("parallel_state", ParallelState)
"""The state that the functions of `parallel_state` act on."""
