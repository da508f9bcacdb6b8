"""GridModules: grids as the modules of one model, such as an encoder and a language model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from hypercomm.errors import GridDestroyedError, HyperCommError, LayoutError, RankOutsideError
from hypercomm.grid import HyperCommGrid
from hypercomm.layout import RankLayout, stages
from hypercomm.layout.checks import as_rank
from hypercomm.layout.mapping import RankMapping
from hypercomm.layout.messages import shown
from hypercomm.layout.notation import format_coords
from hypercomm.layout.stages import Boundary
from hypercomm.layout.tiling import format_ranks
from hypercomm.process_groups import world

if TYPE_CHECKING:
    from hypercomm.compat.megatron.process_groups_config import (
        MultiModuleProcessGroupCollection,
        ProcessGroupCollection,
    )


class GridModules(Mapping[str, HyperCommGrid]):
    """Named grids, and questions about them as modules; none of these creates anything."""

    @property
    def layouts(self) -> Mapping[str, RankLayout]:
        """The layout of each grid, by name; a read-only copy."""
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

    # ---- pipelines and mappings ---------------------------------------------------------------

    def pipeline_depth(self, *names: str, dim: str = "pp") -> int:
        """Return how many stages some modules have, one behind the other.

        Args:
            names: The modules, in the order in which the data passes them; default: all grids.
            dim: The dim that they are pipelined along; a grid that lacks it has one stage.

        Example:
            >>> from hypercomm import GridSet
            >>> GridSet.tile(24, encoder="tp=2,dp=4", llm="tp=4,dp=2,pp=2").pipeline_depth()
            3
        """
        return stages.pipeline_depth(self._chain(names), dim)

    def pipeline_stages(
        self, *names: str, rank: int | None = None, dim: str = "pp"
    ) -> tuple[int, ...]:
        """Return the stages of a chain of modules that a rank works on, counted over all of it.

        Args:
            names: The modules, in the order in which the data passes them; default: all grids.
            rank: Default: the calling one.
            dim: The dim that they are pipelined along; a grid that lacks it has one stage.

        Example:
            >>> from hypercomm import GridSet
            >>> grids = GridSet.tile(24, encoder="tp=2,dp=4", llm="tp=4,dp=2,pp=2")
            >>> [grids.pipeline_stages(rank=rank) for rank in (0, 8, 23)]
            [(0,), (1,), (2,)]
        """
        return stages.pipeline_stages(self._chain(names), world.rank(rank), dim)

    def boundary(self, source: str, target: str, *, dim: str = "pp") -> Boundary:
        """Return where one module hands over to the next: its last stage, and the next's first.

        Example:
            >>> from hypercomm import GridSet
            >>> GridSet.tile(6, encoder="pp=2", llm="tp=2,pp=2").boundary("encoder", "llm")
            Boundary(senders=(1,), receivers=(2, 3))
        """
        return stages.boundary(self[source].layout, self[target].layout, dim)

    def mapping(
        self,
        source: str,
        target: str,
        along: str | None = "dp",
        *,
        batch_axis: int = 0,
        shards: Mapping[str, int] | None = None,
        pipeline: str | None = "pp",
        leaders: bool = False,
    ) -> RankMapping:
        """Return who sends what to whom between two modules; arguments as for `RankMapping`.

        Example:
            >>> from hypercomm import GridSet
            >>> grids = GridSet.tile(6, encoder="tp=2,dp=1", llm="tp=1,dp=4")
            >>> grids.mapping("encoder", "llm").kind
            'fan-out'
        """
        return RankMapping(
            self[source].layout,
            self[target].layout,
            along,
            batch_axis=batch_axis,
            shards=shards,
            pipeline=pipeline,
            leaders=leaders,
        )

    def _chain(self, names: tuple[str, ...]) -> list[RankLayout]:
        layouts = [self[name].layout for name in names or self]
        if len(set(names)) < len(names):
            raise LayoutError(f"a grid comes twice in {shown(names)}; name each once")
        return layouts

    # ---- Megatron's collections ---------------------------------------------------------------

    def to_collections(self) -> dict[str, ProcessGroupCollection]:
        """Return Megatron's collection of each grid that the calling rank is in, by name.

        The groups are those that were created: see `ProcessGroupCollection.from_grid`. A grid
        without the view "expert" lays its experts out as its dense layers.

        Raises:
            GridDestroyedError: One of these grids was destroyed.
            NotInitializedError: Nothing tells the calling rank.

        Example:
            >>> from hypercomm import GridSet
            >>> from hypercomm.testing import fake_world
            >>> with fake_world(8), GridSet.tile(encoder="tp=2,dp", llm="tp=4") as grids:
            ...     _ = grids.create_pgs({"encoder": ["tp"], "llm": ["tp"]})
            ...     collections = grids.to_collections()
            ...     print(list(collections), collections["encoder"].tp.size())
            ['encoder'] 2
        """
        from hypercomm.compat.megatron.grid_groups import EXPERT
        from hypercomm.compat.megatron.process_groups_config import ProcessGroupCollection

        collections = {}
        for name in self.grids_of():
            grid = self[name]
            if grid.is_destroyed:
                raise GridDestroyedError(
                    f"grid {name!r} ({grid.layout}) was destroyed, and has no groups to collect"
                )
            expert = None if EXPERT in grid.views else grid
            collections[name] = ProcessGroupCollection.from_grid(grid, expert)
        return collections

    def to_multi_module(
        self, language_model: str | None = None
    ) -> MultiModuleProcessGroupCollection:
        """Return Megatron's collection of the modules that the calling rank works on.

        Args:
            language_model: The grid of the language model; the collection has none on a rank
                that is not in it.

        Raises:
            UnknownGridError: The set has no such grid.
            RankOutsideError: The calling rank is in none of the grids.
            GridDestroyedError: One of these grids was destroyed.

        Example:
            >>> from hypercomm import GridSet
            >>> from hypercomm.testing import fake_world
            >>> with fake_world(8), GridSet.tile(encoder="tp=2,dp", llm="tp=4") as grids:
            ...     _ = grids.create_pgs({"encoder": ["tp"], "llm": ["tp"]})
            ...     modules = grids.to_multi_module("llm")
            ...     print(list(modules.keys()), modules.has_language_model())
            ['encoder'] False
        """
        from hypercomm.compat.megatron.process_groups_config import (
            MultiModuleProcessGroupCollection,
        )

        if language_model is not None:
            self[language_model]  # refuses one that there is not
        collections = self.to_collections()
        if not collections:
            raise RankOutsideError(f"rank {world.rank()} is in none of the grids {list(self)}")
        own = language_model if language_model in collections else None
        return MultiModuleProcessGroupCollection(collections, own)


def as_table(grids: GridModules) -> Iterator[str]:
    """A line for each grid: name, sizes, ranks, and where the calling rank is in it."""
    try:
        rank = world.rank()
    except HyperCommError:
        rank = -1
    layouts = list(grids.layouts.values())
    columns = [
        list(grids),
        [str(layout) for layout in layouts],
        [f"ranks {format_ranks(sorted(layout.ranks))}" for layout in layouts],
        [
            f"this is rank {rank}, at {format_coords(layout.coords(rank))}"
            if rank in layout
            else ""
            for layout in layouts
        ],
    ]
    padded = [[text.ljust(max(map(len, column))) for text in column] for column in columns]
    for cells in zip(*padded, strict=True):
        yield "  " + "  ".join(cells).rstrip()
