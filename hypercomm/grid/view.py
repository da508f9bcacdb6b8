"""GridView: one view of a grid, with the interface of a grid."""

from __future__ import annotations

from hypercomm.grid.looks import GridLooks
from hypercomm.grid.questions import GridState


class GridView(GridLooks):
    """One view of a grid, with the interface of a grid; made by `HyperCommGrid.view`.

    Its groups belong to the grid, which destroys them.

    Example:
        >>> from hypercomm import HyperCommGrid
        >>> from hypercomm.testing import fake_world
        >>> with fake_world(8, rank=5), HyperCommGrid([2, 4], ["tp", "dp"]) as grid:
        ...     grid.register_view("expert", [4, 2], ["ep", "expt_dp"])
        ...     expert = grid.view("expert")
        ...     print(expert.shape, expert.create_pg("ep").size(), expert.group_ranks("ep"))
        [4, 2] 4 (4, 5, 6, 7)
    """

    def __init__(self, state: GridState, name: str) -> None:
        self._state = state
        self._view = state.views[name].name
