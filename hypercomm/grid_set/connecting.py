"""ConnectedGrids: grids whose process groups are connected in one call."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from datetime import timedelta

from hypercomm.connections.connecting import PIPELINES, connect, read_pipelines
from hypercomm.connections.connections import Connections
from hypercomm.connections.items import Plans
from hypercomm.grid_set.joint_creation import steps_of
from hypercomm.grid_set.modules import GridModules
from hypercomm.process_groups.agreement.steps import Steps
from hypercomm.process_groups.owner import only_call


class ConnectedGrids(GridModules):
    """Grids whose process groups are connected in one call."""

    _steps: dict[tuple[int, ...], Steps]
    _label: str

    def connect(
        self,
        *,
        pipelines: str | Iterable[str] = PIPELINES,
        timeout: timedelta | None = None,
        progress: bool | None = None,
    ) -> Connections:
        """Connect all process groups that the grids have, before the first step needs them.

        Every rank of the grids must call this; all of them meet once, and then connect grid after
        grid, as `HyperCommGrid.connect` does: it says what it takes, and what is so after a
        failure. A group that several grids share counts once.

        Raises:
            PlanMismatchError, ConnectTimeout, HyperCommError: As for `HyperCommGrid.connect`.

        Example:
            >>> from hypercomm import GridSet
            >>> from hypercomm.testing import fake_world
            >>> with fake_world(8), GridSet.tile(encoder="tp=2", llm="tp=2,dp=3") as grids:
            ...     _ = grids.create_pgs({"encoder": ["tp"], "llm": ["tp", "dp"]})
            ...     print([(row.title, row.ranks) for row in grids.connect()])
            [('encoder: tp', (0, 1))]
        """
        grids = dict(self.items())
        known = {dim: None for grid in grids.values() for dim in grid._connectable_dims()}
        wanted = read_pipelines(pipelines, known)
        for grid in grids.values():
            grid._connectable()  # refuses one that was destroyed

        def plans() -> Plans:
            every: dict[str, Plans] = {
                name: grid._connectable(f"{name}: ") for name, grid in grids.items()
            }
            return {title: one for each in every.values() for title, one in each.items()}

        steps = steps_of(self._steps, [grid.layout for grid in grids.values()], self._label)
        with contextlib.ExitStack() as stack:
            for grid in grids.values():
                stack.enter_context(only_call(grid._owner))
            return connect(steps, plans, wanted, timeout, progress)
