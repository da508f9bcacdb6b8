"""Making scenes: what `draw()` of a layout, a set, a difference or a mapping is given, checked."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from hypercomm.draw.drawing import Drawing
from hypercomm.draw.parts.groups_lit import long_dims
from hypercomm.draw.scenes import Change, ChangeScene, Dims, GridScene, MatrixScene
from hypercomm.errors import DrawingError, LayoutError, UnknownDimError
from hypercomm.layout import RankLayout
from hypercomm.layout.checks import LARGEST_WORLD, as_tuple
from hypercomm.layout.parsing import Dims as AnyDims
from hypercomm.layout.parsing import as_dims, parse_groups
from hypercomm.layout.text import did_you_mean, shown
from hypercomm.topology import Topology, read_topology
from hypercomm.topology.reading import On

MOST_PANELS = 6
"""The most dims of which each has a picture, where none are asked for."""

FEW_RANKS = 64
"""Up to so many ranks, each dim has a picture, where none are asked for."""

Panels = tuple[Dims, ...]


def drawing_of_grids(
    title: str,
    grids: Mapping[str, RankLayout],
    on: On | None,
    dims: AnyDims | None,
    groups: Iterable[AnyDims] | str | None = None,
    edges: Iterable[tuple[str, str]] | str | None = None,
) -> Drawing:
    """Draw one grid, or several.

    Args:
        title: What is shown.
        grids: Each with its name.
        on: Where the ranks are, as for `read_topology`; None: nobody knows.
        dims: The dims whose groups are lit; default: the first one larger than 1.
        groups: Several such, each for a picture of its own: a sequence, or text as in "tp,dp+cp".
        edges: Pairs of names, of which the first sends to the second; "chain": each to the next.

    Raises:
        LayoutError: There are too many ranks, a dim is in no grid, or both `dims` and `groups`
            are given.
        NotationError: `groups` as text cannot be read.
        DrawingError: `edges` names no grids of these.
        TopologyError: `on` cannot be read, or holds fewer ranks.
    """
    if dims is not None and groups is not None:
        raise LayoutError("dims lights groups in one picture, groups in several; give one of them")
    topology = topology_for(grids.values(), on)
    wanted = None if dims is None else known(dims, grids.values())
    panels: Panels = () if wanted is None else (wanted,)
    if groups is not None:
        asked = parse_groups(groups) if isinstance(groups, str) else as_tuple(groups, "groups")
        panels = tuple(known(each, grids.values()) for each in asked)
        if not panels:
            raise LayoutError("groups is empty; name at least one, as in ['tp', 'dp+cp']")
    elif wanted is None and max(grid.size for grid in grids.values()) <= FEW_RANKS:
        every = dict.fromkeys(dim for grid in grids.values() for dim in long_dims(grid))
        panels = tuple((dim,) for dim in every)[:MOST_PANELS] if len(grids) == 1 else ()
    first = long_dims(next(iter(grids.values())))[:1]
    lit = wanted or (panels[0] if panels else first)
    pairs = _pairs(edges, tuple(grids))
    return Drawing(GridScene(title, tuple(grids.items()), topology, lit, panels, pairs))


class Difference(Protocol):
    """What `difference` returns, as far as it is drawn."""

    @property
    def before(self) -> RankLayout:
        """The layout before."""

    @property
    def after(self) -> RankLayout:
        """The layout after."""

    @property
    def changes(self) -> Sequence[Any]:
        """What becomes of the groups over every combination of dims."""

    @property
    def summary(self) -> str:
        """The difference in one sentence."""


def drawing_of_change(found: Difference, on: On | None, dims: AnyDims | None) -> Drawing:
    """Draw a change; arguments and errors as for `drawing_of_grids`."""
    both = (found.before, found.after)
    changes = tuple(
        Change(one.before, one.after, one.result, one.cells[2], one.kept) for one in found.changes
    )
    title, _, summary = found.summary.partition(": ")
    lit = () if dims is None else known(dims, both)
    scene = ChangeScene(title, *both, changes, topology_for(both, on), lit, summary)
    return Drawing(scene)


class Ends(Protocol):
    """What a `RankMapping` is, as far as it is drawn."""

    @property
    def source(self) -> RankLayout:
        """Where the tensor is."""

    @property
    def target(self) -> RankLayout:
        """Where it is wanted."""

    @property
    def source_ranks(self) -> tuple[int, ...]:
        """The ranks that the tensor leaves."""

    @property
    def target_ranks(self) -> tuple[int, ...]:
        """The ranks that the tensor enters."""


def drawing_of_mapping(
    mapping: Ends, cells: NDArray[np.int64], unit: str, whole: int, on: On | None
) -> Drawing:
    """Draw a mapping.

    Args:
        mapping: The mapping.
        cells: Source, target and amount of each message.
        unit: What amounts count.
        whole: The amount of the whole tensor.
        on: As for `drawing_of_grids`.
    """
    ends = mapping.source_ranks, mapping.target_ranks
    topology = topology_for((mapping.source, mapping.target), on)
    return Drawing(MatrixScene(str(mapping), *ends, cells, unit, whole, topology))


def topology_for(numberings: Iterable[RankLayout], on: On | None) -> Topology | None:
    """Read where the ranks of some grids are.

    Raises:
        LayoutError: There are too many ranks to draw.
        TopologyError: It cannot be read, or holds fewer ranks.
    """
    every = tuple(numberings)
    for numbering in every:
        if numbering.size > LARGEST_WORLD:
            raise LayoutError(
                f"{numbering} has {numbering.size:,} ranks; up to {LARGEST_WORLD:,} are drawn"
            )
    if on is None:
        return None
    last = max(numbering.last_rank for numbering in every)
    if last >= LARGEST_WORLD:
        raise LayoutError(
            f"on= tells of ranks up to {LARGEST_WORLD - 1:,}, and the grid has rank {last:,}; "
            f"leave on= out"
        )
    if isinstance(on, Topology) and on.world_size > last:
        return on  # of a larger world
    return read_topology(on, last + 1)


def known(dims: AnyDims, numberings: Iterable[RankLayout]) -> Dims:
    """Return dims in the order of the first grid that has them all, else as they are given.

    Raises:
        UnknownDimError: One is in no grid.
        LayoutError: There are none, or one comes twice.
    """
    every = tuple(numberings)
    names = tuple(dict.fromkeys(dim for numbering in every for dim in numbering.dim_names))
    wanted = as_dims(dims)
    if not wanted:
        raise LayoutError(f"dims is empty; name at least one of {names}")
    for position, dim in enumerate(wanted):
        if not isinstance(dim, str) or dim not in names:
            raise UnknownDimError(
                f"unknown dim {shown(dim)}; the dims are {names}{did_you_mean(dim, names)}"
            )
        if dim in wanted[:position]:
            raise LayoutError(f"dim {dim!r} comes twice in dims {wanted}")
    for numbering in every:
        if set(wanted) <= set(numbering.dim_names):
            return numbering.order_dims(wanted)
    return tuple(wanted)


def _pairs(
    edges: Iterable[tuple[str, str]] | str | None, names: tuple[str, ...]
) -> tuple[tuple[str, str], ...]:
    if edges is None:
        return ()
    if isinstance(edges, str):
        if edges != "chain":
            raise DrawingError(f"edges must be pairs of names, or 'chain', got {shown(edges)}")
        return tuple(pairwise(names))
    pairs = []
    for edge in as_tuple(edges, "edges"):
        pair = edge if isinstance(edge, tuple | list) else ()
        if len(pair) != 2 or any(not isinstance(name, str) or name not in names for name in pair):
            raise DrawingError(f"edges must be pairs of the names {list(names)}, got {shown(edge)}")
        pairs.append((pair[0], pair[1]))
    return tuple(dict.fromkeys(pairs))
