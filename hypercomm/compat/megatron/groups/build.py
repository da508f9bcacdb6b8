"""Creates, or plans, the groups of the table for one configuration."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypercomm.compat.megatron.groups import nccl
from hypercomm.compat.megatron.groups.configuration import Configuration
from hypercomm.compat.megatron.groups.layouts import Layouts
from hypercomm.compat.megatron.groups.requests import RowRequest, Side, requests_of
from hypercomm.compat.megatron.groups.table import GLOO, TABLE, GroupRow
from hypercomm.compat.megatron.releases import version
from hypercomm.grid import HyperCommGrid
from hypercomm.grid.arguments import GroupArguments
from hypercomm.layout import RankLayout
from hypercomm.process_groups.owner import Group as PlannedGroup
from hypercomm.process_groups.strategies import choose

_SHARP: dict[str | None, str] = {
    "dp": "_DATA_PARALLEL_GROUP_WITH_CP",
    "dp_replica": "_INTER_PARTIAL_EXPERT_DATA_PARALLEL_GROUP",
}
"""The global of the group that uses SHARP, by the user's choice."""


class Build:
    """One creation: walks the table, and holds what came of it until all of it is there.

    Attributes:
        grids: The "dense" and the "expert" grid, by name.
        created: The calling rank's groups, each once, in the order of creation.
    """

    def __init__(self, configuration: Configuration, nccl_config: nccl.NcclConfig) -> None:
        self.grids: dict[str, HyperCommGrid] = {}
        self.created: list[ProcessGroup] = []
        self._configuration = configuration
        self._options = nccl.OptionsByKey(nccl_config)
        self._sharp = _SHARP.get(configuration.sharp_group)
        self._planned: dict[str, dict[int | None, PlannedGroup]] = {}

    def run(self, layouts: Layouts) -> dict[str, Any]:
        """Make the grids and their groups, or leave nothing behind; lazy groups are only planned.

        Returns:
            The values of the globals that hold groups, or the ranks of one.
        """
        try:
            for name, layout in layouts._asdict().items():
                self.grids[name] = self._grid(name, layout)
            for row in TABLE:
                self._plan_row(row)
            if not self._configuration.lazy:
                self._create()
            return {name: value for row in TABLE for name, value in self._values_of(row).items()}
        except BaseException:
            for grid in reversed(self.grids.values()):
                grid.destroy()
            raise

    def _grid(self, name: str, layout: RankLayout) -> HyperCommGrid:
        config = self._configuration
        if config.lazy:
            choose("local", None)  # says why not, where members alone cannot create a group
        return HyperCommGrid.from_layout(
            layout,
            name=f"megatron.{name}",
            share=config.share,
            creation="local" if config.lazy else "auto",
            share_with=self.grids.get("dense"),
        )

    def _plan_row(self, row: GroupRow) -> None:
        """Plan the groups of a row, for each of its globals, or let another's stand in."""
        config, stands_in = self._configuration, row.stands_in(self._configuration)
        lone_peers = version.has("gtp_remat", config.version)
        side = Side(self.grids[row.grid].layout)
        planned: dict[str, dict[int | None, PlannedGroup]] = {
            name: {} for name in row.names(config)
        }
        for request in requests_of(row, side, config, self._options, lone_peers=lone_peers):
            planned[row.name + GLOO * request.twin][request.part] = self._plan(request)
        for name, parts in planned.items():
            other = f"{stands_in}{name.removeprefix(row.name)}"
            self._planned[name] = parts or self._planned.get(other, parts)

    def _plan(self, request: RowRequest) -> PlannedGroup:
        config, row = self._configuration, request.row
        is_sharp = row.name == self._sharp and not request.twin
        shared = config.share == "identical" and not row.overlaps and not is_sharp
        words = (row.description, "GLOO" * request.twin, row.place(request.part))
        more: GroupArguments = {
            "timeout": config.timeout,
            # A shared group serves several rows: no row's description fits it.
            "group_desc": None if shared else "_".join(filter(None, words)),
            "share": "identical" if shared else "never",
        }
        return self.grids[row.grid].plan_pg(**(request.arguments | more))

    def _create(self) -> None:
        for name, parts in self._planned.items():
            for planned in parts.values():
                group = self._create_one(planned, is_sharp=name == self._sharp)
                if group is not None and group not in self.created:
                    self.created.append(group)

    @staticmethod
    def _create_one(planned: PlannedGroup, *, is_sharp: bool) -> ProcessGroup | None:
        if not is_sharp:
            return planned.create()
        with nccl.sharp() as connect:
            group = planned.create()
            connect(group)
        return group

    def _values_of(self, row: GroupRow) -> dict[str, Any]:
        """What the globals of a row hold: of groups those that the calling rank is in."""
        config, values = self._configuration, dict[str, Any]()
        for name in row.names(config):
            own = {part: each for part, each in self._planned[name].items() if each.has_member()}
            created = {part: each if config.lazy else each.create() for part, each in own.items()}
            values[name] = row.gather(created)
            if row.ranks and name == row.name and own:
                values[row.ranks] = list(own[None].groups.of(dist.get_rank()))
        return values
