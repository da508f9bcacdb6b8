"""Creates, or plans, the groups of the table for one configuration."""

from __future__ import annotations

import logging
from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypercomm.compat.megatron import nccl
from hypercomm.compat.megatron.configuration import Configuration
from hypercomm.compat.megatron.groups import GLOO, ROWS, TABLE, GroupRow
from hypercomm.compat.megatron.memory import GlobalMemoryBuffer
from hypercomm.grid import HyperCommGrid
from hypercomm.layout import RankGroups, RankLayout
from hypercomm.process_groups import c10d
from hypercomm.process_groups.creation import together
from hypercomm.process_groups.planned import PlannedGroup
from hypercomm.process_groups.strategies import choose

logger = logging.getLogger(__name__)

_SHARP_ROWS: dict[str | None, GroupRow] = {
    "dp": ROWS["_DATA_PARALLEL_GROUP_WITH_CP"],
    "dp_replica": ROWS["_INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP"],
}


def create_planned(value: Any, created: list[ProcessGroup]) -> Any:
    """Create what is planned, within a list or a dict too, and add it to those `created`."""
    if isinstance(value, list):
        return [create_planned(item, created) for item in value]
    if isinstance(value, dict):
        return {key: create_planned(item, created) for key, item in value.items()}
    if not isinstance(value, PlannedGroup):
        return value
    group = value.create()
    if group is not None and group not in created:
        created.append(group)
    return group


class Build:
    """One creation: walks the table, and holds what came of it until all of it is there."""

    def __init__(self, configuration: Configuration, nccl_config: nccl.NcclConfig) -> None:
        self.configuration = configuration
        self.grids: dict[str, HyperCommGrid] = {}
        self._nccl_config = nccl_config
        self.created: list[ProcessGroup] = []
        self._options: dict[str, Any] = {}
        self._rank = dist.get_rank()
        self._planned: list[PlannedGroup] = []
        self._sharp: PlannedGroup | None = None

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
        """Plan all groups, create them unless they are lazy, and return the globals' values."""
        config = self.configuration
        values: dict[str, Any] = {"_GLOBAL_MEMORY_BUFFER": GlobalMemoryBuffer()}
        if config.virtual_pipeline_model_parallel_size is not None:
            size = config.virtual_pipeline_model_parallel_size
            values["_VIRTUAL_PIPELINE_MODEL_PARALLEL_WORLD_SIZE"] = size
            values["_VIRTUAL_PIPELINE_MODEL_PARALLEL_RANK"] = 0
        groups: dict[str, Any] = {}
        for row in TABLE:
            layout = self.grids[row.grid].layout
            derived = row.derive(config, layout, layout.groups(*row.dims.split("-")))
            gloo = row.gloo and bool(config.create_gloo_process_groups)
            for twin, suffix in [(False, ""), (True, GLOO)][: 1 + gloo]:
                name = row.name + suffix
                groups[name] = self._plan_all(row, derived, twin)
                if derived is None and row.otherwise:
                    groups[name] = groups[row.otherwise + suffix]
            if row.ranks and isinstance(derived, RankGroups) and derived.has_member(self._rank):
                values[row.ranks] = list(derived.of(self._rank))
        if not config.lazy:
            with together():
                for planned in self._planned:
                    self._create(planned)
            groups = {name: create_planned(value, self.created) for name, value in groups.items()}
        return {**values, **{name: self._own(value) for name, value in groups.items()}}

    def _create(self, planned: PlannedGroup) -> None:
        if planned is not self._sharp:
            create_planned(planned, self.created)
            return
        with nccl.sharp() as connect:
            connect(create_planned(planned, self.created))

    def _plan_all(self, row: GroupRow, derived: Any, twin: bool) -> Any:
        """Plan one group, or a list or dict of groups."""
        if isinstance(derived, list):
            return [self._plan(row, item, twin, f"L{place}") for place, item in enumerate(derived)]
        if isinstance(derived, dict):
            return {key: self._plan(row, item, twin, f"{key}") for key, item in derived.items()}
        return None if derived is None else self._plan(row, derived, twin, "")

    def _plan(self, row: GroupRow, groups: RankGroups, twin: bool, suffix: str) -> PlannedGroup:
        config = self.configuration
        kind = "gloo" if twin else ""
        own = "" if row.plain else row.field or row.key
        name = "_".join(filter(None, (own, suffix, kind)))
        sharp = not twin and row is _SHARP_ROWS.get(config.sharp_group)
        shared = config.share == "identical" and not row.overlaps and not sharp
        backend = config.pipeline_model_parallel_comm_backend if row.key == "pp" else None
        description = "_".join(filter(None, (row.description, kind.upper(), suffix)))
        planned = self.grids[row.grid].plan_pg(
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
        if sharp:
            self._sharp = planned
        self._planned.append(planned)
        return planned

    def _own(self, value: Any) -> Any:
        """What the calling rank holds of a row: nothing where it is in none of the groups."""
        if isinstance(value, dict):
            return {key: own for key, item in value.items() if (own := self._own(item)) is not None}
        if isinstance(value, list):
            return None if None in [self._own(item) for item in value] else value
        if isinstance(value, PlannedGroup) and not value.has_member():
            return None
        return value

    def _options_of(self, key: str) -> Any:
        """One options object for equal options, so that groups that have them can be shared."""
        wanted = repr(self._nccl_config.get(key))
        if wanted not in self._options:
            options = nccl.get_nccl_options(key, self._nccl_config)
            backend = c10d.default_backend()
            if options is not None and not any(
                map(c10d.takes_options, c10d.single_backends(backend))
            ):
                logger.warning("NCCL options of group %r have no effect on %r", key, backend)
                options = None
            self._options[wanted] = options
        return self._options[wanted]
