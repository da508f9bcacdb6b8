"""ParallelState: one Megatron configuration, as two grids and the groups of the table."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, ClassVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypercomm.compat.megatron import nccl
from hypercomm.compat.megatron.build import Build, create_planned
from hypercomm.compat.megatron.configuration import Configuration
from hypercomm.compat.megatron.groups import GLOO, ROWS, TABLE, GroupRow
from hypercomm.compat.module_state import CurrentState, ModuleState
from hypercomm.errors import NotInitializedError, StateError
from hypercomm.grid import HyperCommGrid
from hypercomm.process_groups.options import check_timeout

if TYPE_CHECKING:
    from typing_extensions import Self

    from hypercomm.compat.megatron.process_groups_config import ProcessGroupCollection

_CHANGED_ON_THE_FLY = (
    "_MPU_EXPERT_MODEL_PARALLEL_WORLD_SIZE",
    "_MPU_EXPERT_MODEL_PARALLEL_RANK",
    "_MPU_EXPERT_TENSOR_PARALLEL_WORLD_SIZE",
    "_MPU_EXPERT_TENSOR_PARALLEL_RANK",
    "_MPU_TENSOR_MODEL_PARALLEL_WORLD_SIZE",
    "_MPU_TENSOR_MODEL_PARALLEL_RANK",
    "_MPU_PIPELINE_MODEL_PARALLEL_WORLD_SIZE",
    "_MPU_PIPELINE_MODEL_PARALLEL_RANK",
    "_MPU_DATA_PARALLEL_WORLD_SIZE",
    "_MPU_DATA_PARALLEL_RANK",
)
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


class ParallelState(ModuleState):
    """One Megatron configuration: its two grids, its groups, and the values of Megatron's globals.

    A new one is empty. It needs no global state: `create` makes one that stands for itself, and
    `parallel_state.use(state)` lets Megatron's functions act on it within a `with` block.

    Attributes:
        configuration: What it was created from; None while it is empty.
        grids: The "dense" and the "expert" grid, by name; empty while it is.

    Example:
        >>> from hypercomm.testing import fake_world
        >>> with fake_world(16), ParallelState.create(tensor_model_parallel_size=2) as state:
        ...     print(state.grids["dense"].layout, state.collection().tp.size())
        tp=2,cp=1,ep=1,dp=8,pp=1 2
    """

    questions: ClassVar[dict[Callable[[Any], Any], Any]] = {}

    def __init__(self) -> None:
        super().__init__(GLOBALS)
        self.configuration: Configuration | None = None
        self.grids: dict[str, HyperCommGrid] = {}

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
            try:
                dense = build.grid("dense", layouts.dense, None)
                build.grid("expert", layouts.expert, dense)
                values = build.values()
            except BaseException:
                build.destroy()
                raise
        self.configuration, self.grids = configuration, build.grids
        self.fill(values)
        self.list_groups(build.created)

    def destroy(self) -> None:
        """Destroy the groups that the state created, and empty it; may be called twice."""
        grids = list(self.grids.values())
        self.configuration, self.grids = None, {}
        self.reset()
        with contextlib.ExitStack() as stack:
            for grid in grids:
                stack.callback(grid.destroy)  # the last one first

    def collection(self, required_pgs: list[str] | None = None) -> ProcessGroupCollection:
        """Return the state's groups as a `ProcessGroupCollection`.

        Args:
            required_pgs: The fields to set; default: all.

        Raises:
            ValueError: There is no such field.
        """
        from hypercomm.compat.megatron.process_groups_config import ProcessGroupCollection

        return ProcessGroupCollection.from_state(self, required_pgs)

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
        rows = [ROWS["_DATA_PARALLEL_GROUP_WITH_CP"], ROWS["_EXPERT_DATA_PARALLEL_GROUP"]]
        options = [nccl.get_nccl_options(row.key, nccl_config) for row in rows]

        def twin(row: GroupRow, pg_options: Any) -> ProcessGroup | None:
            return self.grids[row.grid].ensure_pg(
                row.dims.split("-"),
                name=f"{row.field}_ag",
                timeout=timeout or default,
                pg_options=pg_options,
                group_desc=f"{row.description}_AG",
                share="never",
            )

        experts = for_expert_parallelism and self.grids["expert"].layout.size_of("ep") > 1
        dense = twin(rows[0], options[0])
        expert = twin(rows[1], options[1]) if experts else None
        self.list_groups(group for group in (dense, expert) if group is not None)
        return dense, expert

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
        if self.configuration is not None and self.configuration.lazy and name in ROWS:
            new: list[ProcessGroup] = []
            created = create_planned(value, new)
            if created != value:
                self.write(name, created)
                self.list_groups(new)
            return created
        return value

    def require(self, name: str) -> Any:
        """Return the value of a global that is set.

        Raises:
            StateError: It is None; says what to do.
        """
        value = self.read(name)
        if value is None:
            raise self.missing(name)
        return value

    def size_in(self, name: str, override: str | None = None) -> int:
        """Return the size of a group, or what was set on the fly."""
        return self._fact(name, override, lambda group: group.size())

    def rank_in(self, name: str, override: str | None = None) -> int:
        """Return the calling rank's position in a group, or what was set on the fly."""
        return self._fact(name, override, lambda group: group.rank())

    def _fact(self, name: str, override: str | None, fact: Callable[[Any], int]) -> int:
        if override is not None and self.values[override] is not None:
            return self.values[override]  # type: ignore[no-any-return]
        if self.values[name] is None:
            raise self.missing(name)
        return fact(self.values[name])

    def missing(self, name: str) -> StateError:
        """Make the error for a global that is None."""
        words = name.strip("_").replace("_", " ").lower()
        if self.configuration is None:
            reason = "call initialize_model_parallel() first"
        elif name.endswith(GLOO) and not self.configuration.create_gloo_process_groups:
            reason = "the state was initialised with create_gloo_process_groups=False"
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


current: CurrentState[ParallelState] = CurrentState("parallel_state", ParallelState)
"""The state that the functions of `parallel_state` act on."""
