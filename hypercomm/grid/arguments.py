"""The arguments of a grid, read and checked once."""

from __future__ import annotations

import operator
import warnings
from collections.abc import Iterable, Mapping
from datetime import timedelta
from typing import Any, Literal, TypedDict, cast

import attrs

from hypercomm.errors import GroupOptionsError, LayoutError, WorldSizeError
from hypercomm.layout import RankLayout, read_layout
from hypercomm.layout.checks import (
    as_ordered,
    as_world_size,
    check_choice,
    is_utf8,
    world_too_small,
)
from hypercomm.layout.mapping import HasLayout
from hypercomm.layout.parsing import Dims, check_spelling, close_sizes, read_sizes
from hypercomm.layout.text import did_you_mean, format_ranks, shown
from hypercomm.process_groups import world
from hypercomm.process_groups.options import as_verified, check_known, check_lazy_init
from hypercomm.process_groups.spec import Derive
from hypercomm.process_groups.strategies import STRATEGIES

GivenSizes = str | Mapping[str, int] | Iterable[int]
"""Sizes of dims: "tp=2,dp=-1", by name, or as ints."""

Sizes = GivenSizes | RankLayout | HasLayout | None
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
    cover: Cover | None
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
    cover: Cover | None = None
    creation: Creation = "auto"
    share: Share = "never"
    world_size: int | None = None
    lazy_init: bool | None = None
    verify: bool = attrs.field(default=None, converter=as_verified)

    def __attrs_post_init__(self) -> None:
        if self.cover is not None:
            check_choice("cover", self.cover, ("any", "exact"))
        check_choice("creation", self.creation, CREATIONS)
        check_choice("share", self.share, SHARES)
        if self.backend is not None:
            check_known(self.backend)
        check_lazy_init(self.lazy_init)
        check_name(self.name)


def check_keywords(call: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Raise TypeError, as Python does, for a keyword that a call with `**keywords` does not have.

    Example:
        >>> check_keywords("ensure_pg", {"nam": "x"}, ["name", "view"])
        Traceback (most recent call last):
        TypeError: ensure_pg() got an unexpected keyword argument 'nam'; did you mean 'name'?
    """
    for name in given:
        if name not in known:
            raise TypeError(
                f"{call}() got an unexpected keyword argument {name!r}{did_you_mean(name, known)}"
            )


def check_world(layout: RankLayout, world_size: int) -> None:
    """Raise unless the layout fits the world.

    Raises:
        WorldSizeError: It does not.
    """
    if layout.last_rank >= world_size:
        raise world_too_small(f"the grid {layout}", layout.last_rank, world_size)


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


def read_grid(
    sizes: Sizes,
    dim_names: Iterable[str] | None,
    rank_offset: int,
    world_size: int | None,
    cover: Cover | None,
    dims: Mapping[str, int],
    keywords: Iterable[str],
) -> tuple[RankLayout, int]:
    """Return the layout that the arguments of a grid describe, and the size of its world.

    An unspecified size fills the world. A grid of text, a mapping or keywords that begins at rank
    0 and leaves ranks of the world out warns, unless `cover` is given.

    Args:
        sizes: As for `HyperCommGrid`, as are the next four.
        dim_names: See there.
        rank_offset: See there.
        world_size: See there.
        cover: See there.
        dims: Sizes by keyword.
        keywords: The names of the other keywords, for corrections.

    Raises:
        TypeError: A keyword is neither a dim's size nor known.
        LayoutError, WorldSizeError: As for `HyperCommGrid`.

    Example:
        >>> layout, world_size = read_grid(None, None, 0, 8, None, {"tp": 2, "dp": -1}, ())
        >>> str(layout), world_size
        ('tp=2,dp=4', 8)
    """
    if dims:
        check_sizes("HyperCommGrid", dims, keywords)
    total = world.world_size() if world_size is None else as_world_size(world_size)
    layout = read_layout(sizes, dim_names, rank_offset, total, **dims)
    is_written = not rank_offset and _is_written(sizes, dim_names)
    if layout.size < total and (cover == "exact" or (cover is None and is_written)):
        left = sorted({*range(total)} - {*layout.ranks})
        out = f"{layout} leaves out ranks {format_ranks(left)} of the world's {total}"
        if cover == "exact":
            raise WorldSizeError(f"cover='exact', but {out}; make a size larger, or -1")
        warnings.warn(
            f"the grid {out}: there create_pg returns None, which torch's collectives take for "
            f"WORLD; make a size larger, or -1, or give cover='any'",
            stacklevel=3,
        )
    return layout, total


def _is_written(sizes: Sizes, dim_names: Iterable[str] | None) -> bool:
    """Whether sizes were given as text, by name or by keyword: not in Megatron's form."""
    return dim_names is None and (sizes is None or isinstance(sizes, (str, Mapping)))


def check_sizes(call: str, dims: Mapping[str, object], keywords: Iterable[str]) -> None:
    """Raise TypeError for a keyword that is not the size of a dim.

    Example:
        >>> check_sizes("GridSet", {"nam": "a"}, ["name"])
        Traceback (most recent call last):
        TypeError: GridSet() got an unexpected keyword argument 'nam'; did you mean 'name'?
    """
    check_spelling(dims)
    for name, size in dims.items():
        if name == "mesh_dim_names":
            raise TypeError(
                f"mesh_dim_names is an argument of init_device_mesh; {call}([4, 2], ['tp', 'dp']) "
                f"names the fastest dim first, where a DeviceMesh names it last"
            )
        try:
            operator.index(size)  # type: ignore[arg-type]
        except TypeError:
            check_keywords(call, [name], keywords)


def read_target(
    target: str | Mapping[str, int] | RankLayout,
    layout: RankLayout,
    ranks: tuple[int, ...] | None,
) -> RankLayout:
    """Return the layout of a reshape: of the ranks of the grid, or of `ranks`."""
    if isinstance(target, (str, Mapping)):
        size, what = (layout.size, "the grid") if ranks is None else (len(ranks), "ranks")
        sizes = close_sizes(read_sizes(target), size, f"{what} has {size} ranks")
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
