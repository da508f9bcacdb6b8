"""Megatron's collections of a set of grids, each of which is a module of one model."""

from __future__ import annotations

from hypercomm.compat.megatron.groups.of_a_grid import EXPERT
from hypercomm.compat.megatron.process_groups_config import (
    MultiModuleProcessGroupCollection,
    ProcessGroupCollection,
)
from hypercomm.errors import GridDestroyedError, LayoutError, RankOutsideError
from hypercomm.grid.grid_set import GridSet
from hypercomm.layout.text import shown
from hypercomm.process_groups import world


def collections_of(grids: GridSet) -> dict[str, ProcessGroupCollection]:
    """Return Megatron's collection of each grid of a set that the calling rank is in, by name.

    The groups are those that were created: see `ProcessGroupCollection.from_grid`. A grid
    without the view "expert" lays its experts out as its dense layers.

    Args:
        grids: The set.

    Raises:
        LayoutError: `grids` is no set.
        GridDestroyedError: One of these grids was destroyed.
        NotInitializedError: Nothing tells the calling rank.

    Example:
        >>> from hypercomm.testing import fake_world
        >>> with fake_world(8), GridSet.tile(encoder="tp=2,dp", llm="tp=4") as grids:
        ...     _ = grids.create_pgs({"encoder": ["tp"], "llm": ["tp"]})
        ...     collections = collections_of(grids)
        ...     print(list(collections), collections["encoder"].tp.size())
        ['encoder'] 2
    """
    collections = {}
    for name in as_grid_set(grids).grids_of():
        grid = grids[name]
        if grid.is_destroyed:
            raise GridDestroyedError(
                f"grid {name!r} ({grid.layout}) was destroyed, and has no groups to collect"
            )
        expert = None if EXPERT in grid.views else grid
        collections[name] = ProcessGroupCollection.from_grid(grid, expert)
    return collections


def multi_module_of(
    grids: GridSet, language_model: str | None = None
) -> MultiModuleProcessGroupCollection:
    """Return Megatron's collection of the modules of a set that the calling rank works on.

    Args:
        grids: The set.
        language_model: The grid of the language model; the collection has none on a rank
            that is not in it.

    Raises:
        LayoutError: `grids` is no set.
        UnknownGridError: The set has no such grid.
        RankOutsideError: The calling rank is in none of the grids.
        GridDestroyedError: One of these grids was destroyed.

    Example:
        >>> from hypercomm.testing import fake_world
        >>> with fake_world(8), GridSet.tile(encoder="tp=2,dp", llm="tp=4") as grids:
        ...     _ = grids.create_pgs({"encoder": ["tp"], "llm": ["tp"]})
        ...     modules = multi_module_of(grids, "llm")
        ...     print(list(modules.keys()), modules.has_language_model())
        ['encoder'] False
    """
    if language_model is not None:
        as_grid_set(grids)[language_model]  # refuses one that there is not
    collections = collections_of(grids)
    if not collections:
        raise RankOutsideError(f"rank {world.rank()} is in none of the grids {list(grids)}")
    own = language_model if language_model in collections else None
    return MultiModuleProcessGroupCollection(collections, own)


def as_grid_set(value: object) -> GridSet:
    """Refuse what is no set of grids.

    Raises:
        LayoutError: It is none.
    """
    if not isinstance(value, GridSet):
        raise LayoutError(f"grids must be a GridSet, got {shown(value)}")
    return value
