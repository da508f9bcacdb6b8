"""What calls of a set of grids take, and how it is checked."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from datetime import timedelta
from typing import Any, TypedDict

import attrs

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
from hypercomm.grid.arguments import Creation, GroupArguments, Share, as_arguments
from hypercomm.layout import RankGroups, RankLayout
from hypercomm.layout.messages import shown
from hypercomm.layout.notation import parse_sizes
from hypercomm.layout.tiling import check_names
from hypercomm.process_groups.keys import GroupKey

Requests = Mapping[str, Iterable[str | Iterable[str] | GroupArguments]]
"""For each grid, by name, what its `create_pgs` takes."""


class GridArguments(TypedDict, total=False):
    """The arguments of a grid that may differ within a set."""

    backend: str | None
    creation: Creation
    share: Share
    lazy_init: bool | None
    verify: bool | None


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


def check_arguments(arguments: Mapping[str, object]) -> None:
    """Refuse sizes that were meant for a grid, but came to be an argument of that name."""
    for name, value in arguments.items():
        if isinstance(value, RankLayout) or _are_sizes(value):
            raise LayoutError(
                f"{name!r} is an argument here, and {shown(value)} looks like the sizes of a grid; "
                f"GridSet({{{name!r}: layout, ...}}) takes grids of such names"
            )


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
            )
        every[name] = {**common, **own}
    return every


def check_requests(
    grids: Mapping[str, HyperCommGrid],
    requests: Requests,
    backend: str | None,
    timeout: timedelta | None,
    share: Share | None,
) -> dict[str, list[GroupArguments]]:
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
    defaults: GroupArguments = {"backend": backend, "timeout": timeout, "share": share}
    wanted: dict[str, list[GroupArguments]] = {}
    for name in filter(requests.__contains__, grids):
        try:
            wanted[name] = [{**defaults, **_kept(each)} for each in as_arguments(requests[name])]
            _check_keys(grids[name], wanted[name])
        except HyperCommError as error:
            raise type(error)(f"requests of grid {name!r}: {error}") from error
    return wanted


def plan_of(
    grids: Mapping[str, HyperCommGrid], wanted: Mapping[str, Iterable[GroupArguments]]
) -> list[str]:
    """Name what is wanted of each grid, as all ranks do alike."""
    return [
        f"{name}: {_key(grids[name], each)}" for name, every in wanted.items() for each in every
    ]


def _check_keys(grid: HyperCommGrid, wanted: Iterable[GroupArguments]) -> None:
    """Refuse what the grid cannot create, and keys that it has, or is asked for twice."""
    owner, seen = grid._owner, set[GroupKey]()
    owner.check_alive()
    for each in wanted:
        request = grid._request(**each)
        key = request.key
        if key in seen:
            raise GroupExistsError(
                f"{key.as_call()} is asked for twice in one call; leave one out, or give it a "
                f"name of its own, name=..."
            )
        seen.add(key)
        if key in owner.planned:
            has = "created" if key in owner.created else "planned"
            raise GroupExistsError(
                f"the process group over {key.as_call()} has already been {has}; leave it out, or "
                f"create another over the same dims under a name of its own, name=..."
            )
        # What derives groups is the caller's, and runs once, when they are planned.
        derive = _same if callable(request.derive) else request.derive
        owner.draft(attrs.evolve(request, derive=derive))


def _key(grid: HyperCommGrid, arguments: GroupArguments) -> GroupKey:
    return grid._key(arguments["dims"], arguments.get("name"), arguments.get("view"))[0]


def _same(groups: RankGroups) -> RankGroups:
    return groups


def _kept(request: Mapping[str, Any]) -> GroupArguments:
    """The request, with dims that can be read twice."""
    dims = request["dims"]
    kept: GroupArguments = {**request, "dims": list(dims) if isinstance(dims, Iterator) else dims}  # type: ignore[typeddict-item]
    return kept
