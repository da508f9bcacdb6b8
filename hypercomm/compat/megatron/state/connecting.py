"""Connecting the groups of a parallel state: those of both its grids, which hold all ranks."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from hypercomm.grid import HyperCommGrid
from hypercomm.grid.connect import Connections, connect
from hypercomm.process_groups.agreement.calls import refusing
from hypercomm.process_groups.job import current
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
    scope = next(iter(grids.values()))._owner.grid_scope(current())
    if creates:
        with refusing(scope):  # the others may wait in there already
            for grid in grids.values():
                for group in list(grid._owner.groups.values()):
                    group.create()
    return connect(grids, scope, timeout=timeout)
