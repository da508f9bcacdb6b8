"""What calls of a set of grids take, and how it is checked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, cast

from hypercomm.errors import (
    GridDestroyedError,
    GroupExistsError,
    GroupOptionsError,
    HyperCommError,
    LayoutError,
    NotationError,
    UnknownGridError,
    WorldSizeError,
)
from hypercomm.grid import HyperCommGrid
from hypercomm.grid.arguments import (
    GridArguments,
    GroupArguments,
    GroupKeywords,
    as_arguments,
)
from hypercomm.layout import RankGroups, RankLayout
from hypercomm.layout.parsing import Dims, parse_sizes
from hypercomm.layout.placement import check_names
from hypercomm.layout.text import did_you_mean, shown
from hypercomm.process_groups.job import current_or_none
from hypercomm.process_groups.spec import check_once

Requests = Mapping[str, Iterable[Dims | GroupArguments]]
"""For each grid, by name, what its `create_pgs` takes."""


Wanted = Sequence[tuple[Dims, GroupKeywords]]
"""The dims and keywords of each group that is wanted of a grid."""


class SetArguments(GridArguments, total=False):
    """The arguments of a set that all ways to make one have."""

    name: str | None
    overrides: Mapping[str, GridArguments] | None


def layouts_of(
    grids: Mapping[str, RankLayout | HyperCommGrid], world_size: int
) -> dict[str, RankLayout]:
    """Return the layouts of what a set is given, each grid once, alive, and of this world."""
    layouts: dict[str, RankLayout] = {}
    seen: dict[int, str] = {}
    for name, given in check_names(grids).items():
        if not isinstance(given, (RankLayout, HyperCommGrid)):
            raise LayoutError(
                f"grid {name!r} needs a RankLayout or a HyperCommGrid, got {shown(given)}"
            )
        if isinstance(given, HyperCommGrid) and seen.setdefault(id(given), name) != name:
            raise LayoutError(f"{seen[id(given)]!r} and {name!r} are one HyperCommGrid")
        if isinstance(given, HyperCommGrid):
            _check_grid(name, given, world_size)
        layouts[name] = given if isinstance(given, RankLayout) else given.layout
    return layouts


def _check_grid(name: str, grid: HyperCommGrid, world_size: int) -> None:
    if grid.is_destroyed:
        raise GridDestroyedError(
            f"grid {name!r} ({grid.layout}) was destroyed; build a new one, or give its layout"
        )
    if grid._state.world_size != world_size:
        raise WorldSizeError(
            f"grid {name!r} ({grid.layout}) was made for a world of {grid._state.world_size} "
            f"ranks, but that of this set has {world_size}; give both the same world_size"
        )


def set_arguments(given: Mapping[str, Any]) -> SetArguments:
    """Read a set's arguments off all of a call; none may be sizes, meant for a grid of its name."""
    for name in (*SetArguments.__annotations__, "rank_offset", "requires"):
        value = given.get(name)
        if isinstance(value, RankLayout) or _are_sizes(value):
            raise LayoutError(
                f"{name!r} is an argument here, and {shown(value)} looks like the sizes of a grid; "
                f"GridSet({{{name!r}: layout, ...}}) takes grids of such names"
            )
    return cast("SetArguments", {name: given[name] for name in SetArguments.__annotations__})


def _are_sizes(value: object) -> bool:
    if not isinstance(value, str) or "=" not in value:
        return False
    try:
        parse_sizes(value)
    except NotationError:
        return False
    return True


def arguments_of(
    grids: Mapping[str, RankLayout | HyperCommGrid],
    common: GridArguments,
    overrides: Mapping[str, GridArguments] | None,
) -> dict[str, GridArguments]:
    """Return the arguments of each grid: those of all, but for what differs."""
    every = dict.fromkeys(grids, common)
    if overrides is not None and not isinstance(overrides, Mapping):
        raise GroupOptionsError(
            f"overrides must map names of grids to arguments, got {shown(overrides)}"
        )
    for name, own in (overrides or {}).items():
        if name not in every:
            raise UnknownGridError(
                f"overrides names grid {shown(name)}, but this set has {shown(list(every))}"
                f"{did_you_mean(name, every)}"
            )
        if isinstance(grids[name], HyperCommGrid):
            raise GroupOptionsError(
                f"overrides names grid {name!r}, which exists and keeps its own arguments; leave "
                f"it out"
            )
        unknown = [key for key in own if key not in common] if isinstance(own, Mapping) else [own]
        if unknown:
            raise GroupOptionsError(
                f"overrides of grid {name!r} has {shown(unknown[0])}; it may have {list(common)}"
                f"{did_you_mean(unknown[0], common)}"
            )
        every[name] = {**common, **own}
    return every


def check_requests(
    grids: Mapping[str, HyperCommGrid],
    requests: Requests,
    defaults: GroupKeywords,
) -> dict[str, Wanted]:
    """List what is wanted of each grid, in their order; refuses now what would fail there later.

    Nothing is planned or created, and nobody is asked.
    """
    if not isinstance(requests, Mapping):
        raise LayoutError(
            f"requests must map names of grids to lists of dims, as in "
            f"{{{next(iter(grids))!r}: ['tp', ['dp', 'cp']]}}, got {shown(requests)}"
        )
    for name in requests:
        grids[name]  # refuses one that there is not
    wanted: dict[str, Wanted] = {}
    for name in filter(requests.__contains__, grids):
        try:
            wanted[name] = [
                (list(dims) if isinstance(dims, Iterator) else dims, keywords)
                for dims, keywords in as_arguments(requests[name], **defaults)
            ]
            _check_keys(grids[name], wanted[name])
        except HyperCommError as error:
            raise type(error)(f"requests of grid {name!r}: {error}") from error
    return wanted


def _check_keys(grid: HyperCommGrid, wanted: Wanted) -> None:
    """Refuse what the grid cannot create, and keys that it has, or is asked for twice."""
    owner = grid._owner
    owner.check_alive()
    specs = []
    for dims, given in wanted:
        # What derives groups is the caller's, and is called once, when they are created.
        derive = _same if callable(given.get("derive")) else given.get("derive")
        specs.append(grid._spec(dims, {**given, "derive": derive}))
    check_once(specs)
    for spec in specs:
        if spec.key in owner.planned:
            raise GroupExistsError(spec.key.says_exists(is_created=spec.key in owner.created))
        owner.draft(spec, current_or_none())


def _same(groups: RankGroups) -> RankGroups:
    return groups
