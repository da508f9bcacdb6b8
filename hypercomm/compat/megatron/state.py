"""ParallelState: one Megatron configuration, as a grid with the groups of the table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final, Literal

import attrs
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as torch_c10d

from hypercomm.compat.megatron import nccl, version
from hypercomm.compat.megatron.configuration import Configuration
from hypercomm.compat.megatron.layouts import Layouts
from hypercomm.compat.megatron.memory import GlobalMemoryBuffer
from hypercomm.compat.megatron.table import (
    EXPERT,
    EXPERT_ALL_GATHER,
    GLOO,
    ROWS,
    TABLE,
    WITH_GTP,
    WantedGroup,
    rows,
)
from hypercomm.compat.module_state import CurrentState, ModuleState
from hypercomm.errors import NotInitializedError, StateError
from hypercomm.grid import HyperCommGrid

if TYPE_CHECKING:
    from typing_extensions import Self

    from hypercomm.grid.connect import Connections
    from hypercomm.grid.grid import GridView

Kind = Literal["WORLD_SIZE", "RANK"]
SIZE: Final = "WORLD_SIZE"
RANK: Final = "RANK"
"""The two facts about a group, as the suffix of the global that overrides them."""

_OVERRIDES = [
    f"_MPU_{what}_PARALLEL_{fact}"
    for what in ("EXPERT_MODEL", "EXPERT_TENSOR", "TENSOR_MODEL", "PIPELINE_MODEL", "DATA")
    for fact in (SIZE, RANK)
]
"""Sizes and ranks set by callers, which win over those of the groups."""

_LIST = "_global_process_group_list"
_STAGE, _STAGES = (f"_VIRTUAL_PIPELINE_MODEL_PARALLEL_{fact}" for fact in (RANK, SIZE))
_OTHERS = (_STAGE, _STAGES, "_GLOBAL_MEMORY_BUFFER", "_GLOBAL_SYMMETRIC_MEMORY_BUFFER", _LIST)

_ranks = (row.ranks for row in TABLE if row.ranks)
GLOBALS: dict[str, Callable[[], Any]] = {
    **dict.fromkeys((*ROWS, *_ranks, *_OVERRIDES, *_OTHERS), lambda: None),
    "_HYBRID_DP_CP_GROUPS": dict,
}
"""Every global of Megatron's parallel_state, with a function that returns its empty value."""

_SHARP: dict[str | None, str] = {
    "dp": "_DATA_PARALLEL_GROUP_WITH_CP",
    "dp_replica": "_INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP",
}
"""The global of the group that uses SHARP, by `sharp_enabled_group`."""


NEEDS_CP = "partial_data_parallel=True needs with_context_parallel=True"


_KNOWS_JOB = hasattr(getattr(torch_c10d, "_world", None), "_default_pg")
"""Whether torch has the private name by which a getter finds, without a call, that no job is on."""


@attrs.frozen(eq=False)
class Fact:
    """The size of a group, or the calling rank's position in it, as a getter returns it.

    Attributes:
        kind: `SIZE` or `RANK`.
        group: The global that holds the group; "" for a group that does not exist.
        override: Prefix of the global whose value wins; "" for none.
        with_gtp: Whether the group with GTP peers is used, if the state has GTP.
        offline: Whether the value is 0 without torch.distributed, as Megatron has it.
        absent: The value without a group, or the global that has it; default: an error.
    """

    kind: Kind
    group: str
    override: str = ""
    with_gtp: bool = False
    offline: bool = False
    absent: int | str | None = None

    @property
    def words(self) -> str:
        """The start of a sentence about the group."""
        return "size of the" if self.kind == SIZE else "position of the calling rank in the"

    def ask(self, state: ParallelState) -> Any:
        """Return the value, also that of a mock, of no group, and without torch.distributed."""
        given = state.values.get(self.override + self.kind)
        if given is not None:
            return given
        if self.offline and not dist.is_initialized():
            return 0
        if not self.group:
            raise StateError(NEEDS_CP)
        name = state.chosen(self.group) if self.with_gtp else self.group
        group = state.values[name]
        if group is not None:
            return group.size() if self.kind == SIZE else group.rank()
        if self.absent is None:
            raise state.missing(name)
        return state.values[self.absent] if isinstance(self.absent, str) else self.absent


FACTS: dict[str, Fact] = {}
"""The facts that getters return, by the key under which a state holds them."""


class ParallelState(ModuleState):
    """One Megatron configuration: its grid, its groups, and the values of Megatron's globals.

    A new one is empty. `create` returns one that needs no global state. Within a
    `with parallel_state.use(state):` block Megatron's functions act on it.

    Attributes:
        configuration: The arguments that it was created from; None while it is empty.
        grids: The "dense" grid, and its view "expert" of the expert layers; none in an empty state.
        answers_gtp: Whether data parallel getters return groups with GTP peers by default.
        facts: The sizes and ranks of the real groups that it holds, by key, for the getters.

    Example:
        >>> from hypercomm.testing import fake_world
        >>> with fake_world(16), ParallelState.create(tensor_model_parallel_size=2) as state:
        ...     print(state.grids["dense"].layout, state.values["_DATA_PARALLEL_GROUP"].size())
        tp=2,cp=1,ep=1,dp=8,pp=1 8
    """

    def __init__(self) -> None:
        self.facts: dict[str, int | None] = {}
        super().__init__(GLOBALS)

    def reset(self) -> None:
        """Set every global to its empty value."""
        self.configuration: Configuration | None = None
        self.grids: dict[str, GridView] = {}
        self.answers_gtp = version.has("gtp_remat")
        self.strict = False
        super().reset()

    def fill(self, values: Mapping[str, Any]) -> None:
        """Set several globals, and update the facts."""
        super().fill(values)
        if _OTHERS_ONLY.issuperset(values):
            return
        held, suffix = self.values, WITH_GTP if self.answers_gtp else ""
        for key, fact in FACTS.items():
            known = held.get(fact.override + fact.kind)
            group: Any = held.get(fact.group + suffix if fact.with_gtp else fact.group)
            if known is None and issubclass(type(group), ProcessGroup):  # no mock, which may change
                known = group.size() if fact.kind == SIZE else group.rank()
            elif known is None and group is None and fact.absent == 0:
                known = 0
            self.facts[key] = None if fact.offline and not _KNOWS_JOB else known

    @classmethod
    def create(cls, **arguments: Any) -> Self:
        """Return a new state; every rank must call this, in the same order.

        Args:
            arguments: The arguments of `parallel_state.initialize_model_parallel`, by name.

        Raises:
            HyperCommError: As for `initialize_model_parallel`.
        """
        state = cls()
        state.initialize(Configuration(**arguments))
        return state

    def initialize(self, configuration: Configuration) -> None:
        """Create all groups of a configuration; a failure leaves everything unchanged.

        Raises:
            HyperCommError: As for `parallel_state.initialize_model_parallel`.
        """
        if not dist.is_initialized():
            raise StateError(
                "torch.distributed is not initialised; call torch.distributed.init_process_group()"
            )
        layouts = configuration.layouts(dist.get_world_size())
        options = nccl.options_by_key(configuration)
        self._check_empty()
        has_gtp = version.has("gtp_remat", configuration.version)
        wanted = list(rows(configuration, layouts, options, lone_peers=has_gtp))
        with nccl.environment(configuration.pipeline_model_parallel_comm_backend):
            grid = _grid_of(layouts)
            try:
                groups = _create(grid, wanted, configuration)
            except BaseException:
                grid.destroy()
                raise
        self.configuration = configuration
        self.grids = {"dense": grid, "expert": grid.view(EXPERT)}
        self.answers_gtp = configuration.answers_gtp
        self.strict = bool(configuration.strict)
        values: dict[str, Any] = {"_GLOBAL_MEMORY_BUFFER": GlobalMemoryBuffer()}
        if configuration.virtual_pipeline_model_parallel_size is not None:
            values[_STAGES] = configuration.virtual_pipeline_model_parallel_size
            values[_STAGE] = 0
        self.fill(values | _values_of(wanted, groups, configuration))
        self.list_groups(groups)
        current.keep(self)

    def destroy(self) -> None:
        """Destroy the groups that the state created, and empty it; may be called twice."""
        grid = self.grids.get("dense")
        self.reset()
        current.drop(self)
        if isinstance(grid, HyperCommGrid):
            grid.destroy()

    def __str__(self) -> str:
        if not self.grids:
            return "an empty state"
        dense, expert = (grid.layout for grid in self.grids.values())
        return f"{dense}, experts {expert}"

    def connect(self, *, timeout: timedelta | None = None) -> Connections:
        """Connect all groups of the state, and neighbours along "pp"; see `HyperCommGrid.connect`.

        Every rank must call this.

        Raises:
            NotInitializedError: The state is empty.
            PlanMismatchError, GroupCreationTimeout, HyperCommError: As for `HyperCommGrid.connect`.

        Example:
            >>> from hypercomm.testing import fake_world
            >>> with fake_world(8), ParallelState.create(tensor_model_parallel_size=4) as state:
            ...     print(state.connect()[-1].ranks)
            (0, 1, 2, 3, 4, 5, 6, 7)
        """
        if not self.grids:
            raise NotInitializedError(
                "connect() needs groups to connect; call initialize_model_parallel() first"
            )
        return self.grids["dense"].connect(timeout=timeout)

    def all_gather_groups(
        self,
        for_expert_parallelism: bool,
        timeout: timedelta | None,
        nccl_config: Mapping[str, Mapping[str, Any]],
    ) -> tuple[ProcessGroup | None, ProcessGroup | None]:
        """Create second data parallel groups; see `parallel_state.create_all_gather_groups`.

        Raises:
            NotInitializedError: The state is empty.
            GroupOptionsError, ConfigurationError: An option is wrong, or the groups exist and were
                created with other options.
        """
        config = self.configuration
        if config is None:
            raise NotInitializedError(
                "create_all_gather_groups() needs data parallel groups; call "
                "initialize_model_parallel() first"
            )
        grid, layouts = self.grids["dense"], Layouts(*(each.layout for each in self.grids.values()))
        table = [ROWS["_DATA_PARALLEL_GROUP_WITH_CP_AG"]]
        if for_expert_parallelism and layouts.expert.size_of("ep") > 1:
            table.append(EXPERT_ALL_GATHER)
        options = {row.key: nccl.get_nccl_options(row.key, nccl_config) for row in table}
        config = attrs.evolve(config, create_all_gather_group=True)
        groups: list[ProcessGroup | None] = []
        for wanted in rows(config, layouts, options.get, table=table):
            arguments: dict[str, Any] = {
                **wanted.arguments,
                "timeout": config.timeout if timeout is None else timeout,
                "group_desc": wanted.row.description(None, twin=False),
            }
            groups.append(grid.ensure_pg(**arguments))
        self.list_groups(groups)
        return groups[0], groups[1] if len(groups) > 1 else None

    def list_groups(self, groups: Iterable[ProcessGroup | None]) -> None:
        """Register groups whose timeout `update_pg_timeout` is to change."""
        listed = self.values[_LIST]
        if listed is None:
            listed = [None]  # WORLD
            self.write(_LIST, listed)
        for group in groups:
            if group not in listed:
                listed.append(group)

    # ---- what getters read ----------------------------------------------------------------------

    def chosen(self, name: str) -> str:
        """Return the global of a data parallel group that answers by default."""
        return name + WITH_GTP if self.answers_gtp else name

    def require(self, name: str) -> Any:
        """Return the value of a global that is set.

        Raises:
            StateError: It is None.
        """
        value = self.read(name)
        if value is None:
            raise self.missing(name)
        return value

    def missing(self, name: str) -> StateError:
        """Return the error for a global that is None."""
        words = name.strip("_").replace("_", " ").lower()
        if self.configuration is None:
            reason = "call initialize_model_parallel() first"
        elif name.endswith(GLOO) and not self.configuration.create_gloo_process_groups:
            reason = "the state was initialised with create_gloo_process_groups=False"
        elif name.endswith(GLOO) and self.configuration.has_gtp:
            reason = "with GTP there are no gloo groups"
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
                f"destroy_model_parallel() first, or hold a second state with "
                f"ParallelState.create() and parallel_state.use()"
            )


_OTHERS_ONLY = {*_OTHERS, "_HYBRID_DP_CP_GROUPS"}
"""The globals that no fact depends on."""


def _grid_of(layouts: Layouts) -> HyperCommGrid:
    """Return the grid of the dense layers, with a view of the expert layers."""
    grid = HyperCommGrid.from_layout(layouts.dense, name="megatron")
    expert = layouts.expert
    grid.register_view(EXPERT, list(expert.shape), expert.dim_names)
    return grid


def _create(
    grid: HyperCommGrid, wanted: list[WantedGroup], config: Configuration
) -> list[ProcessGroup | None]:
    """Create all groups in one call, except that the one with SHARP is created on its own."""
    sharp = _SHARP.get(config.sharp_group)
    names = [each.name for each in wanted]
    place = names.index(sharp) if sharp is not None else 0
    requests, timeout = [], config.timeout
    for each in wanted:
        more: dict[str, Any] = {"timeout": timeout}
        if each.name == sharp:
            more["share"] = "never"
        if config.share == "never" or each.name == sharp or each.row.overlaps:
            more["group_desc"] = each.row.description(each.part, twin=each.name != each.row.name)
        requests.append(each.arguments | more)
    if sharp is None:
        return grid.create_pgs(requests)
    before = grid.create_pgs(requests[:place])
    with nccl.sharp() as connect:
        (group,) = grid.create_pgs(requests[place : place + 1])
        connect(group)
    return [*before, group, *grid.create_pgs(requests[place + 1 :])]


def _values_of(
    wanted: list[WantedGroup], groups: list[ProcessGroup | None], config: Configuration
) -> dict[str, Any]:
    """Return the values of the globals that hold the calling rank's groups, or their ranks."""
    held: dict[str, dict[int | None, ProcessGroup]] = {}
    values: dict[str, Any] = {}
    rank = dist.get_rank()
    for each, group in zip(wanted, groups, strict=True):
        parts = held.setdefault(each.name, {})
        if group is not None:
            parts[each.part] = group
            if each.row.ranks and each.name == each.row.name:
                values[each.row.ranks] = list(each.groups.of(rank))
    for row in TABLE:
        other = row.otherwise(config) if callable(row.otherwise) else row.otherwise
        for twin in ("", GLOO) if row.gloo else ("",):
            if row.name + twin in held:
                values[row.name + twin] = row.gather(held[row.name + twin])
            elif other is not None:
                values[row.name + twin] = values.get(other + twin)
    return values


current: CurrentState[ParallelState] = CurrentState("parallel_state", ParallelState)
"""The state that the functions of `parallel_state` act on."""
