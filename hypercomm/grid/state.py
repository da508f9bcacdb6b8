"""GridState: the process groups of a grid, and the options that its views share."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any, NoReturn, SupportsIndex

import attrs

from hypercomm.errors import LayoutError
from hypercomm.layout.checks import as_ordered
from hypercomm.layout.parsing import Dims
from hypercomm.layout.text import short_repr
from hypercomm.process_groups import torch_internals as torchdist
from hypercomm.process_groups.spec import GridOptions, GroupKey, GroupRequest, Share
from hypercomm.process_groups.table import Entry, GroupTable


@attrs.define(eq=False)
class GridState:
    """The state that a grid and its views share.

    Attributes:
        table: The process groups, with the layout and its views. `reshape` replaces this object.
        options: The options of the grid, which are the defaults of its methods.
        world_size: The number of ranks of the job.
        lender: The state of a grid of the same set, whose groups this grid may use, or None.
        gave_meshes: Whether a DeviceMesh uses groups of the grid.
    """

    table: GroupTable
    options: GridOptions
    world_size: int
    lender: GridState | None = None
    gave_meshes: bool = False

    def __reduce_ex__(self, _: SupportsIndex, /) -> NoReturn:
        raise TypeError(
            f"dims and edges of a grid ({self.table.layout}) cannot be pickled or copied: they "
            f"have live process groups; send grid.layout instead, and build the grid from it there"
        )

    def borrow_from(self, lender: GridState) -> None:
        """Let the groups of another grid also serve the keys of this grid."""
        self.lender = lender
        self.table.lender = lambda: lender.table

    def warn_of_live(self) -> None:
        """Warn if a grid is garbage collected before its groups are destroyed. The groups stay."""
        leaked = ", ".join(map(str, self.table.leaked()))
        if leaked:
            warnings.warn(
                f"a HyperCommGrid ({self.table.layout}) was garbage collected before its process "
                f"groups were destroyed: {leaked}; call its destroy(), or use it in a with block",
                ResourceWarning,
                stacklevel=2,
            )

    def read_requests(
        self,
        requests: Iterable[Dims | Mapping[str, Any] | GroupRequest],
        *,
        view: str | None = None,
        backend: str | None = None,
        timeout: timedelta | None = None,
        share: Share | None = None,
    ) -> list[tuple[GroupTable, GroupRequest]]:
        """Read the requests of `create_pgs`. The other arguments are defaults for the requests."""
        self.table.check_alive()
        defaults = {"view": view, "backend": backend, "timeout": timeout, "share": share}
        if isinstance(requests, (str, Mapping, GroupRequest)):
            given = short_repr(requests)
            listed = short_repr(requests.split(",") if isinstance(requests, str) else [requests])
            raise LayoutError(f"create_pgs takes a list of requests, got {given}; write {listed}")
        read = []
        for given in as_ordered(requests, "the list in create_pgs(['tp', ['dp', 'cp']])"):
            request = GroupRequest.of(given)
            missing: dict[str, Any] = {
                name: value
                for name, value in defaults.items()
                if value is not None and getattr(request, name) is None
            }
            if missing:
                request = attrs.evolve(request, **missing)
            read.append((self.table, request))
        return read

    def live(self, view: str | None) -> dict[GroupKey, Entry]:
        """Return the groups of a view, also over shared dims. If it is None, return all groups."""
        live = self.table.live()
        if view is None:
            return live
        shared = set(self.table.views[view].shared_dims)
        return {
            key: entry
            for key, entry in live.items()
            if key.view == view or (key.view is None and set(key.dims) <= shared)
        }

    def forget_meshes(self) -> None:
        """Make torch forget the meshes of groups that are about to be destroyed."""
        if self.gave_meshes and not self.table.is_destroyed:
            torchdist.forget_meshes()
