"""GridLooks: how a grid and its views look, as one line, as many, and as HTML in a notebook."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NoReturn, SupportsIndex

from hypercomm.draw import Drawing
from hypercomm.errors import HyperCommError, NotPicklableError
from hypercomm.grid.live import GridLive
from hypercomm.layout.parsing import Dims
from hypercomm.layout.text import as_html, format_coords
from hypercomm.process_groups import world
from hypercomm.topology.reading import On


class GridLooks(GridLive):
    """How a grid, or a view of one, looks: `repr` is one line, `print` shows all that it has."""

    def __repr__(self) -> str:
        state = self._state
        base = state.views.base
        ranks = "ranks" if isinstance(base.ranks, range) else f"{base.size} of the ranks"
        name = "" if self.name is None else f", name={self.name!r}"
        grid = f"HyperCommGrid({base}{name})"
        if self._view is not None:
            return f"view {self._view} ({self.layout}) of {grid}"
        return (
            f"{grid}: {ranks} {base.rank_offset}..{base.last_rank} of a world of {state.world_size}"
        )

    def __str__(self) -> str:
        return "\n".join([repr(self), *(f"  {line}" for line in self._lines())])

    def draw(
        self,
        on: On | None = None,
        dims: Dims | None = None,
        *,
        groups: Iterable[Dims] | str | None = None,
    ) -> Drawing:
        """Return a picture of the grid; arguments and errors as for `RankLayout.draw`.

        Example:
            >>> from hypercomm import HyperCommGrid
            >>> grid = HyperCommGrid("tp=2,dp=4", world_size=8)
            >>> grid.draw(on=8).svg()[:4]
            '<svg'
        """
        from hypercomm.draw.making import drawing_of_grids

        return drawing_of_grids(str(self.layout), {"": self.layout}, on, dims, groups)

    def _repr_html_(self) -> str:
        return as_html(repr(self), (), (), self._lines())

    def _lines(self) -> list[str]:
        if self.is_destroyed:
            return ["destroyed"]
        groups = [
            f"group {key}: {len(planned.groups)} of {planned.groups.group_size} ranks"
            + (f", {planned.options.backend}" if planned.options.backend else "")
            for key, planned in self._plans.items()
        ]
        views = [f"view {name}: {view}" for name, view in self.views.items()]
        return [self._whereabouts(), *views, *(groups or ["no process groups yet"])]

    def _whereabouts(self) -> str:
        try:
            rank = world.rank()
        except HyperCommError:
            return "this rank is not known: torch.distributed is not initialised"
        if rank not in self.layout:
            return f"this is rank {rank}, outside the grid"
        return f"this is rank {rank}, at {format_coords(self.layout.coords(rank))}"

    def __reduce_ex__(self, _: SupportsIndex, /) -> NoReturn:
        raise NotPicklableError(
            f"{self!r} cannot be pickled or copied: it owns live process groups; send its layout, "
            f"grid.layout, which is a value, and build the grid there: "
            f"HyperCommGrid.from_layout(layout)"
        )
