"""Connecting the groups of a parallel state: those of both its grids, which hold all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from hypercomm.grid import HyperCommGrid
from hypercomm.grid.connect import CALL, Connections, connect
from hypercomm.process_groups.agreement.steps import refusing
from hypercomm.process_groups.options import check_timeout


def connect_grids(
    grids: Mapping[str, HyperCommGrid], timeout: timedelta | None, *, creates: bool
) -> Connections:
    """Connect the groups of grids that hold the same ranks, which agree as those of the first.

    Args:
        grids: By name.
        timeout: For the whole call.
        creates: Whether planned groups are created first, in the order of planning.
    """
    check_timeout(timeout)
    steps = next(iter(grids.values()))._owner.steps
    if creates:
        with refusing(steps, CALL):  # the others may wait in there already
            for grid in grids.values():
                for planned in list(grid._owner.planned.values()):
                    planned.create()
    return connect(grids, steps, timeout=timeout)
