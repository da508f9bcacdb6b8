"""Connecting the groups of a parallel state: those of both its grids, which hold all ranks."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from datetime import timedelta

from hypercomm.connections.connecting import CALL, PIPELINES, connect
from hypercomm.connections.connections import Connections
from hypercomm.connections.items import Plans
from hypercomm.connections.progress import Show
from hypercomm.grid import HyperCommGrid
from hypercomm.process_groups.agreement.steps import refusing
from hypercomm.process_groups.options import check_timeout
from hypercomm.process_groups.owner import only_call


def connect_grids(
    grids: Mapping[str, HyperCommGrid],
    timeout: timedelta | None,
    progress: bool | None,
    *,
    creates: bool,
) -> Connections:
    """Connect the groups of grids that hold the same ranks, which meet as those of the first.

    Args:
        grids: By name.
        timeout: For all of it.
        progress: Whether a bar is shown.
        creates: Whether what is only planned is created first, in the order of planning.
    """
    check_timeout(timeout)
    Show.read(progress)
    first = next(iter(grids.values()))
    if creates:
        with refusing(first._owner.steps, CALL):  # the others may wait in there already
            for grid in grids.values():
                for planned in list(grid._owner.planned.values()):
                    planned.create()

    def plans() -> Plans:
        every = {name: grid._connectable(f"{name}: ") for name, grid in grids.items()}
        return {title: one for each in every.values() for title, one in each.items()}

    with contextlib.ExitStack() as stack:
        for grid in grids.values():
            stack.enter_context(only_call(grid._owner))
        return connect(first._owner.steps, plans, PIPELINES, timeout, progress)
