"""PipelineEdges: a process group for each pair of neighbouring stages and each direction.

The groups of one direction have three keys in the grid: the even edges (stage 0 to 1, 2 to 3, ...),
the odd edges (1 to 2, 3 to 4, ...), and the edge from the last stage to the first. The edges of one
key have no rank in common.
"""

from __future__ import annotations

from functools import partial

import attrs
from torch.distributed import ProcessGroup

from hypercomm.errors import GroupMissingError
from hypercomm.grid.arguments import GroupArguments
from hypercomm.grid.dims import GridDims
from hypercomm.layout.groups import ArrayGroups, RankGroups


@attrs.frozen(repr=False)
class PipelineEdges:
    """The edges of a pipeline at the calling rank's stage, each a process group of two ranks.

    `HyperCommGrid.edges` returns one. The groups have keys such as "pp (edge forward even)". They
    are always created with creation "local" and never shared, so a transfer waits neither for one
    in the other direction nor for one to another stage.

    The first use of an edge creates it and the edge of the other direction, and waits for the
    neighbour to use one of them. With `wrap`, a rank creates even edges first, then odd ones, then
    the edge from the last stage to the first; otherwise ranks could wait for each other in a ring.
    So the first use may wait for both neighbours, and these for theirs: call `create` first. In a
    grid with `verify`, the first use calls `create`. An object stays correct after the grid was
    reshaped. Both ranks of an edge must send and receive in one order.

    Attributes:
        wrap: Whether the first stage follows the last one.

    Raises:
        RankOutsideError: From each property, on a rank outside of the grid.
        HyperCommError: From each property, as for `HyperCommGrid.create_pg`.

    Example:
        >>> from hypercomm import HyperCommGrid
        >>> from hypercomm.testing import fake_world
        >>> with fake_world(8, rank=0), HyperCommGrid("tp=2,pp=4") as grid:
        ...     edges = grid.edges("pp")
        ...     print(edges.to_next.size(), grid.find(edges.to_next), edges.from_previous)
        2 pp (edge forward even) None
    """

    _at: GridDims
    wrap: bool

    @property
    def to_next(self) -> ProcessGroup | None:
        """The group that sends forward to the next stage; None at the end of the pipeline."""
        return self._group("forward", 0)

    @property
    def from_previous(self) -> ProcessGroup | None:
        """The group that receives from the previous stage; None at the start of the pipeline."""
        return self._group("forward", -1)

    @property
    def to_previous(self) -> ProcessGroup | None:
        """The group that sends back to the previous stage; None at the start of the pipeline."""
        return self._group("backward", -1)

    @property
    def from_next(self) -> ProcessGroup | None:
        """The group that receives from the next stage; None at the end of the pipeline."""
        return self._group("backward", 0)

    def create(self) -> None:
        """Create all edges that do not exist, each by its two ranks.

        Every rank of the grid must call this. Call it before `connect`, `verify` or `reshape`,
        which compare the groups of all ranks, unless each rank has used all of its edges. May raise
        the errors of `create_pg`.
        """
        self._create(self._kinds())

    def _group(self, direction: str, offset: int) -> ProcessGroup | None:
        """Return the group of the edge that begins at a stage `offset` from the calling rank's."""
        kind = self._kind(offset)
        if kind is None:
            return None
        view = self._at._view
        dims, name = "+".join(self._at.dims), f"edge {direction} {kind}"
        if view._owner.is_verified:  # all ranks make the same creations, whichever edge they use
            self.create()
        try:
            return view.get_pg(dims, name=name)
        except GroupMissingError:
            kinds = self._kinds()
            needed = kinds[: kinds.index(kind) + 1] if self.wrap else [kind]
            own = {self._kind(offset) for offset in (0, -1)}
            self._create([one for one in kinds if one in needed or one not in own])
        return view.get_pg(dims, name=name)

    def _create(self, kinds: list[str]) -> None:
        """Create the calling rank's edges of some kinds; register kinds that it is not in."""
        for kind in kinds:
            for request in self._requests(kind):
                self._at._view.ensure_pg(**request)

    def _kind(self, offset: int) -> str | None:
        """Return the kind of the edge that begins `offset` from here; None if there is none."""
        stage, size = self._at.rank + offset, self._at.size
        if 0 <= stage < size - 1:
            return "odd" if stage % 2 else "even"
        return "wrap" if self.wrap and size > 1 else None

    def _kinds(self) -> list[str]:
        """Return the kinds of edges of the pipeline, in the order of their creation."""
        size = self._at.size
        found = {"even": size > 1, "odd": size > 2, "wrap": self.wrap and size > 1}
        return [kind for kind, exists in found.items() if exists]

    def _requests(self, kind: str) -> list[GroupArguments]:
        """Return the arguments of `create_pg` for the edges of a kind, in both directions."""
        return [
            {
                "dims": self._at.dims,
                "name": f"edge {direction} {kind}",
                "derive": partial(_pairs, kind),
                "creation": "local",
                "share": "never",
            }
            for direction in ("forward", "backward")
        ]

    def __repr__(self) -> str:
        return f"edges of {self._at!r}{' with wrap' if self.wrap else ''}"


def _pairs(kind: str, groups: RankGroups) -> RankGroups:
    """Return the edges of a kind in pipelines, which a reshape may have made too short for it.

    >>> from hypercomm import RankLayout
    >>> pp = RankLayout.parse("pp=5").groups("pp")
    >>> [list(_pairs(kind, pp)) for kind in ("even", "odd", "wrap")]
    [[(0, 1), (2, 3)], [(1, 2), (3, 4)], [(0, 4)]]
    """
    array, size = groups.to_array(), groups.group_size
    first = int(kind == "odd")
    stages = [*range(first, first + (size - first) // 2 * 2)]
    if kind == "wrap":
        stages = [0, size - 1] if size > 1 else []
    return ArrayGroups(array[:, stages].reshape(-1, 2))
