"""GridModules: grids as the modules of one model, such as an encoder and a language model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Literal, TypedDict

from torch import Tensor
from torch.distributed import ProcessGroup

from hypercomm.draw import Drawing
from hypercomm.draw.making import drawing_of_grids
from hypercomm.errors import HyperCommError
from hypercomm.grid import HyperCommGrid
from hypercomm.layout import RankLayout, RankMapping
from hypercomm.layout.checks import as_rank
from hypercomm.layout.parsing import Dims
from hypercomm.layout.text import aligned, format_coords, format_ranks
from hypercomm.process_groups import world
from hypercomm.topology.reading import On
from hypercomm.transfers.transfer import transfer

if TYPE_CHECKING:
    from typing_extensions import Unpack


class DimRoles(TypedDict, total=False):
    """What else a `RankMapping` takes besides its layouts and `along`."""

    batch_axis: int
    shards: Mapping[str, int] | None
    pipeline: str | None
    leaders: bool
    backward: bool


class GridModules(Mapping[str, HyperCommGrid]):
    """Named grids, and questions about them as modules; none of these creates anything."""

    @property
    def layouts(self) -> Mapping[str, RankLayout]:
        """The layout of each grid, by name; a read-only copy.

        It is what `hypercomm.layout.pipelines` takes as a chain of modules.

        Example:
            >>> from hypercomm import GridSet
            >>> from hypercomm.layout.pipelines import pipeline_depth
            >>> pipeline_depth(GridSet.tile(24, encoder="tp=2,dp=4", llm="tp=4,dp=2,pp=2").layouts)
            3
        """
        return MappingProxyType({name: grid.layout for name, grid in self.items()})

    def grids_of(self, rank: int | None = None) -> tuple[str, ...]:
        """Return the names of the grids that a rank, by default the calling one, is in.

        Raises:
            RankOutsideError: `rank` is no int.
            NotInitializedError: Nothing tells the calling rank.

        Example:
            >>> from hypercomm import GridSet
            >>> GridSet.tile(8, encoder="tp=2,dp=2", llm="tp=4").grids_of(3)
            ('encoder',)
        """
        rank = as_rank(world.rank(rank))
        return tuple(name for name, grid in self.items() if rank in grid.layout)

    def draw(
        self,
        on: On | None = None,
        dims: Dims | None = None,
        *,
        groups: Iterable[Dims] | str | None = None,
        edges: Iterable[tuple[str, str]] | Literal["chain"] | None = None,
    ) -> Drawing:
        """Return a picture of all grids; `on`, `dims` and `groups` as for `RankLayout.draw`.

        Args:
            on: Where the ranks are.
            dims: The dims whose groups are lit, of those grids that have them.
            groups: Several such, as in "tp,dp+cp", each for a picture of its own.
            edges: Pairs of grids, of which the first sends to the second, as modules of a pipeline
                do; "chain": each to the next.

        Raises:
            UnknownDimError, LayoutError, TopologyError: As for `RankLayout.draw`.
            DrawingError: `edges` are no pairs of names of grids.

        Example:
            >>> from hypercomm import GridSet
            >>> grids = GridSet.tile(6, encoder="tp=2,dp=1", llm="tp=1,dp=4")
            >>> grids.draw(edges="chain").svg()[:4]
            '<svg'
        """
        return drawing_of_grids(repr(self), self.layouts, on, dims, groups, edges)

    # ---- what moves between them --------------------------------------------------------------

    def mapping(
        self,
        source: str,
        target: str,
        along: str | None = "dp",
        **roles: Unpack[DimRoles],
    ) -> RankMapping:
        """Return who sends what to whom between two modules; arguments as for `RankMapping`.

        Example:
            >>> from hypercomm import GridSet
            >>> grids = GridSet.tile(6, encoder="tp=2,dp=1", llm="tp=1,dp=4")
            >>> grids.mapping("encoder", "llm").kind
            'fan-out'
        """
        return RankMapping(self[source].layout, self[target].layout, along, **roles)

    def transfer(
        self,
        source: str,
        target: str,
        tensor: Tensor | None,
        groups: ProcessGroup | None = None,
        *,
        out: Tensor | None = None,
        verify: bool | None = None,
        along: str | None = "dp",
        **roles: Unpack[DimRoles],
    ) -> Tensor | None:
        """Move a tensor from one module to another; every rank of both stages calls it.

        Args:
            source: The grid where the tensor is.
            target: The grid where it is wanted.
            tensor: This and the arguments behind it are those of `hypercomm.transfer`.
            groups: See there.
            out: See there.
            verify: See there.
            along: As for `mapping`.
            roles: What `mapping` takes besides: `batch_axis`, `shards`, ...

        Returns:
            What was received on a rank of the target, else None.

        Raises:
            UnknownGridError: The set has no such grid.
            HyperCommError: See `mapping` and `hypercomm.transfer`.

        Example:
            >>> import torch
            >>> from hypercomm import GridSet
            >>> from hypercomm.testing import fake_world
            >>> with fake_world(4), GridSet.colocated(train="tp=2,dp=2", infer="dp=4") as grids:
            ...     grids.transfer("train", "infer", torch.tensor([1, 2])).tolist()
            [1]
        """
        mapping = self.mapping(source, target, along, **roles)
        return transfer(mapping, tensor, groups, out=out, verify=verify)


def as_rows(grids: GridModules) -> list[tuple[str, str, str, str]]:
    """Return of each grid its name, sizes, ranks, and where the calling rank is in it."""
    try:
        rank = world.rank()
    except HyperCommError:
        rank = -1
    rows = []
    for name, layout in grids.layouts.items():
        at = format_coords(layout.coords(rank)) if rank in layout else ""
        here = f"this is rank {rank}, at {at}" if at else ""
        rows.append((name, str(layout), f"ranks {format_ranks(sorted(layout.ranks))}", here))
    return rows


def as_table(grids: GridModules) -> list[str]:
    """Return a line for each grid."""
    return [f"  {line}" for line in aligned(as_rows(grids))]
