"""The arguments of a grid, read and checked once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from typing import Any, Literal, TypedDict, cast

import attrs

from hypercomm.errors import GroupOptionsError, LayoutError, WorldSizeError
from hypercomm.layout import RankLayout
from hypercomm.layout.checks import (
    as_offset,
    as_ordered,
    as_world_size,
    check_choice,
    is_utf8,
    positive,
    world_too_small,
)
from hypercomm.layout.parsing import (
    OPEN,
    VARIABLE,
    Dims,
    as_factors,
    close_sizes,
    parse_sizes,
    read_sizes,
    sizes_of_environment,
)
from hypercomm.layout.text import did_you_mean, format_ranks, shown
from hypercomm.process_groups import world
from hypercomm.process_groups.options import as_verified, check_known, check_lazy_init
from hypercomm.process_groups.spec import Derive
from hypercomm.process_groups.strategies import STRATEGIES

GivenSizes = str | Mapping[str, int] | Iterable[int]
"""Sizes of dims: "tp=2,dp=-1", by name, or as ints."""

Sizes = GivenSizes | RankLayout | None
"""The sizes of a grid's dims, or a layout; None stands for those of the environment."""

Creation = Literal["auto", "enumerate", "local", "split"]
Share = Literal["never", "identical"]
Cover = Literal["any", "exact"]
CREATIONS = ("auto", *STRATEGIES)
SHARES = ("never", "identical")


class SharedKeywords(TypedDict, total=False):
    """The keyword arguments of `create_pgs`, which hold for all of its groups."""

    backend: str | None
    timeout: timedelta | None
    share: Share | None


class GroupKeywords(SharedKeywords, total=False):
    """The keyword arguments of `create_pg`, which documents them."""

    name: str | None
    view: str | None
    pg_options: Any
    group_desc: str | None
    derive: Derive | None
    creation: Creation | None
    lazy_init: bool | None


class GroupArguments(GroupKeywords, total=False):
    """The arguments of one `create_pg`, for `create_pgs`; `dims` is required."""

    dims: Dims


class GridArguments(TypedDict, total=False):
    """The arguments of a grid that may differ between the grids of a set."""

    backend: str | None
    creation: Creation
    share: Share
    lazy_init: bool | None
    verify: bool | None


class GridKeywords(GridArguments, total=False):
    """The keyword arguments of `HyperCommGrid`, which documents them, except `share_with`."""

    name: str | None
    cover: Cover
    world_size: int | None


@attrs.frozen(kw_only=True)
class GridOptions:
    """The arguments of a grid in addition to its layout, checked.

    Raises:
        GroupOptionsError: An argument is wrong.
        LayoutError: The world size is wrong.
    """

    backend: str | None = None
    name: str | None = None
    cover: Cover = "any"
    creation: Creation = "auto"
    share: Share = "never"
    world_size: int | None = None
    lazy_init: bool | None = None
    verify: bool = attrs.field(default=None, converter=as_verified)

    def __attrs_post_init__(self) -> None:
        check_choice("cover", self.cover, ("any", "exact"))
        check_choice("creation", self.creation, CREATIONS)
        check_choice("share", self.share, SHARES)
        if self.backend is not None:
            check_known(self.backend)
        check_lazy_init(self.lazy_init)
        check_name(self.name)
        if self.world_size is not None:
            positive(self.world_size, "world_size")


def check_keywords(call: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError, as Python does, for a keyword that a call with `**keywords` does not have.

    Example:
        >>> check_keywords("plan_pg", {"nam": "x"}, ["name", "view"])
        Traceback (most recent call last):
        TypeError: plan_pg() got an unexpected keyword argument 'nam'; did you mean 'name'?
    """
    for name in given:
        if name not in known:
            raise TypeError(
                f"{call}() got an unexpected keyword argument {name!r}{did_you_mean(name, known)}"
            )


def check_world(layout: RankLayout, world_size: int, cover: str) -> None:
    """Raise unless the layout fits the world, and covers it where it must.

    Raises:
        WorldSizeError: It does not.
    """
    grid = f"the grid {as_factors(layout.sizes)} = {layout.size} ranks"
    if layout.last_rank >= world_size:
        what = f"Grid shape {list(layout.shape)} is over sized: {grid}"
        at = f"at rank_offset {layout.rank_offset}"
        raise world_too_small(f"{what} {at}", layout.last_rank, world_size)
    if cover == "exact" and layout.size != world_size:
        raise WorldSizeError(
            f"cover='exact', but {grid} leaves {world_size - layout.size} of "
            f"the world's {world_size} ranks out; change a size so that the sizes multiply to "
            f"{world_size}"
        )


def check_name(name: str | None) -> None:
    """Raise unless the name can be part of a key of the store."""
    if name is not None and (not isinstance(name, str) or not name or not is_utf8(name)):
        raise GroupOptionsError(f"name must be a non-empty string of text, got {shown(name)}")


def read_requests(
    requests: Iterable[Dims | GroupArguments], defaults: SharedKeywords
) -> list[tuple[Dims, GroupKeywords]]:
    """Return the dims and the keywords of `create_pg` for each request of `create_pgs`."""
    read: list[tuple[Dims, GroupKeywords]] = []
    for request in as_ordered(requests, "the list in create_pgs(['tp', ['dp', 'cp']])"):
        given = dict(request) if isinstance(request, Mapping) else {"dims": request}
        if "dims" not in given:
            raise GroupOptionsError(f"the request {shown(given)} of create_pgs() needs 'dims'")
        dims = given.pop("dims")
        check_keywords("create_pg", given, GroupKeywords.__annotations__)
        read.append((dims, cast("GroupKeywords", {**defaults, **given})))
    return read


# ---- layouts ------------------------------------------------------------------------------------


def read_layout(
    sizes: Sizes, dim_names: Iterable[str] | None, rank_offset: int, world_size: int | None
) -> RankLayout:
    """Return the layout that the arguments of a grid describe; an unspecified size fills the
    world.

    Raises:
        LayoutError: As for `RankLayout`; or names are given twice, or not at all.
        NotationError, WorldSizeError: As for `RankLayout.parse`.

    Example:
        >>> [str(read_layout(sizes, None, 0, 8)) for sizes in ("tp=2,dp=-1", {"tp": 2, "dp": 4})]
        ['tp=2,dp=4', 'tp=2,dp=4']
        >>> read_layout([2, -1], ["tp", "dp"], 4, 8).ranks
        range(4, 8)
    """
    sizes = sizes_of_environment() if sizes is None else sizes
    if sizes is None:
        raise LayoutError(
            f"a grid needs its sizes, as in HyperCommGrid('tp=2,dp=-1'), or the environment's "
            f"{VARIABLE}"
        )
    if isinstance(sizes, RankLayout):
        if dim_names is not None or rank_offset:
            raise LayoutError(
                f"a RankLayout has its own dim_names and rank_offset; give {sizes!r} alone"
            )
        return sizes

    def left() -> tuple[int, str]:
        given = None if world_size is None else as_world_size(world_size)
        ranks = world.world_size(given) - as_offset(rank_offset)
        room = f"{max(0, ranks)} ranks are left from rank {rank_offset} on" if rank_offset else ""
        return max(1, ranks), room

    return RankLayout(*_closed(sizes, dim_names, left), rank_offset)


def read_factors(
    sizes: GivenSizes, dim_names: Iterable[str] | None, size: int
) -> tuple[list[int], tuple[str, ...]]:
    """Return shape and dim names of a view of `size` ranks; one size may be unspecified.

    Example:
        >>> read_factors("ep=4,expt_dp=-1", None, 16)
        ([4, 4], ('ep', 'expt_dp'))
    """
    return _closed(sizes, dim_names, lambda: (size, f"the grid has {size} ranks"))


def _closed(
    sizes: GivenSizes, dim_names: Iterable[str] | None, left: Callable[[], tuple[int, str]]
) -> tuple[list[int], tuple[str, ...]]:
    """Return shape and names; `left` is called for an unspecified size only."""
    given = read_sizes(sizes, dim_names)
    if OPEN in given.values():
        given = close_sizes(given, *left())
    return list(given.values()), tuple(given)


def read_target(
    target: str | RankLayout, layout: RankLayout, ranks: tuple[int, ...] | None
) -> RankLayout:
    """Return the layout of a reshape: of the ranks of the grid, or of `ranks`."""
    if isinstance(target, str):
        size, what = (layout.size, "the grid") if ranks is None else (len(ranks), "ranks")
        sizes = close_sizes(parse_sizes(target), size, f"{what} has {size} ranks")
        if ranks is None:
            return layout.renumber(tuple(sizes.values()), tuple(sizes))
        return RankLayout(sizes, ranks=ranks)
    if not isinstance(target, RankLayout):
        raise LayoutError(
            f"target must be a text like 'tp=4,dp=2' or a RankLayout, got {shown(target)}"
        )
    kept, what = (layout.ranks, "the grid") if ranks is None else (ranks, "ranks=")
    if others := sorted({*target.ranks} ^ {*kept}):
        raise WorldSizeError(
            f"target {target} and {what} must have the same ranks, but only one of them has ranks "
            f"{format_ranks(others)}; give the sizes as text, and ranks= for other ranks"
        )
    return target
