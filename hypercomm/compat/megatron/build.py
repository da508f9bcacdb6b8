"""Creates, or plans, the groups of the table for one configuration."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import attrs
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypercomm.compat.megatron import nccl
from hypercomm.compat.megatron.configuration import Configuration
from hypercomm.compat.megatron.groups import GLOO, ROWS, TABLE, GroupRow
from hypercomm.compat.megatron.memory import GlobalMemoryBuffer
from hypercomm.grid import HyperCommGrid
from hypercomm.layout import RankGroups, RankLayout
from hypercomm.process_groups.creation import choose

_SHARP_ROWS: dict[str | None, GroupRow] = {
    "dp": ROWS["_DATA_PARALLEL_GROUP_WITH_CP"],
    "dp_replica": ROWS["_INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP"],
}


@attrs.frozen(eq=False, slots=False)
class PlannedGroup:
    """The calling rank's group before it is created; answers `size()` and `rank()` as a group."""

    groups: RankGroups
    own_rank: int
    create: Callable[[], ProcessGroup | None]

    @cached_property
    def group(self) -> ProcessGroup | None:
        """The group, which is created when it is first asked for: two globals may hold the plan."""
        return self.create()

    def size(self) -> int:
        """Return the number of members."""
        return self.groups.group_size

    def rank(self) -> int:
        """Return the position of the calling rank among the members."""
        return self.groups.position_of(self.own_rank)


def create_planned(value: Any) -> Any:
    """Create what is planned, within a list or a dict too."""
    if isinstance(value, PlannedGroup):
        return value.group
    if isinstance(value, list) and any(isinstance(item, PlannedGroup) for item in value):
        return [create_planned(item) for item in value]
    if isinstance(value, dict) and any(isinstance(item, PlannedGroup) for item in value.values()):
        return {key: create_planned(item) for key, item in value.items()}
    return value


class Build:
    """One creation: walks the table, and holds what came of it until all of it is there."""

    def __init__(self, configuration: Configuration, nccl_config: nccl.NcclConfig) -> None:
        self.configuration = configuration
        self.grids: dict[str, HyperCommGrid] = {}
        self._nccl_config = nccl_config
        self._options: dict[str, Any] = {}
        self._rank = dist.get_rank()
        self._created: list[ProcessGroup | None] = [None]  # None stands for WORLD

    def grid(
        self, name: str, layout: RankLayout, share_with: HyperCommGrid | None
    ) -> HyperCommGrid:
        """Make one of the two grids."""
        config = self.configuration
        if config.lazy:
            choose("local", None)  # says why not, where members alone cannot create a group
        self.grids[name] = HyperCommGrid.from_layout(
            layout,
            name=f"megatron.{name}",
            share=config.share,
            creation="local" if config.lazy else "auto",
            share_with=share_with,
        )
        return self.grids[name]

    def destroy(self) -> None:
        """Take everything back."""
        for grid in reversed(self.grids.values()):
            grid.destroy()

    def values(self) -> dict[str, Any]:
        """Create, or plan, all groups, and return the value of each global that they fill."""
        config = self.configuration
        values: dict[str, Any] = {
            "_GLOBAL_MEMORY_BUFFER": GlobalMemoryBuffer(),
            "_global_process_group_list": self._created,
        }
        if config.virtual_pipeline_model_parallel_size is not None:
            size = config.virtual_pipeline_model_parallel_size
            values["_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE"] = size
            values["_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK"] = 0
        for row in TABLE:
            layout = self.grids[row.grid].layout
            derived = row.derive(config, layout, layout.groups(*row.dims.split("-")))
            gloo = row.gloo and config.create_gloo_process_groups
            for twin, suffix in [(False, ""), (True, GLOO)][: 1 + gloo]:
                name = row.name + suffix
                values[name] = self._all_of(row, derived, twin)
                if derived is None and row.otherwise:
                    values[name] = values[row.otherwise + suffix]
            if row.ranks and isinstance(derived, RankGroups) and derived.has_member(self._rank):
                values[row.ranks] = list(derived.of(self._rank))
        return values

    def _all_of(self, row: GroupRow, derived: Any, twin: bool) -> Any:
        """Create one group, or a list or dict of groups; no list for a rank that is in none."""
        if isinstance(derived, list):
            levels = [self._one(row, item, twin, f"L{place}") for place, item in enumerate(derived)]
            return None if None in levels else levels
        if isinstance(derived, dict):
            sizes = {key: self._one(row, item, twin, f"{key}") for key, item in derived.items()}
            return {key: group for key, group in sizes.items() if group is not None}
        return None if derived is None else self._one(row, derived, twin, "")

    def _one(self, row: GroupRow, groups: RankGroups, twin: bool, suffix: str) -> Any:
        """Create the calling rank's group of a row, or plan it."""
        config = self.configuration
        grid = self.grids[row.grid]
        kind = "gloo" if twin else ""
        description = "_".join(filter(None, (row.description, kind.upper(), suffix)))
        own = "" if row.plain else row.field or row.key
        name = "_".join(filter(None, (own, suffix, kind)))
        sharp = not twin and row is _SHARP_ROWS.get(config.sharp_group)
        shared = config.share == "identical" and not row.overlaps and not sharp
        backend = config.pipeline_model_parallel_comm_backend if row.key == "pp" else None

        def create() -> ProcessGroup | None:
            group = grid.create_pg(
                row.dims.split("-"),
                name=name or None,
                backend="gloo" if twin else backend,
                timeout=config.timeout,
                pg_options=None if twin or backend == "ucc" else self._options_of(row.key),
                # A shared group serves several rows: no row's description fits it.
                group_desc=None if shared else description,
                share="identical" if shared else "never",
                derive=(lambda _: groups) if name else None,
            )
            if group is not None and group not in self._created:
                self._created.append(group)
            return group

        if config.lazy:
            member = groups.has_member(self._rank)
            return PlannedGroup(groups, self._rank, create) if member else None
        if sharp:
            with nccl.sharp() as connect:
                group = create()
                connect(group)
            return group
        return create()

    def _options_of(self, key: str) -> Any:
        """One options object for equal options, so that groups that have them can be shared."""
        wanted = repr(self._nccl_config.get(key))
        if wanted not in self._options:
            self._options[wanted] = nccl.get_nccl_options(key, self._nccl_config)
        return self._options[wanted]
