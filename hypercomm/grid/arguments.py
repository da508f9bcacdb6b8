"""What calls of a grid take, and how it is checked."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, TypedDict

import attrs

from hypercomm.errors import GroupOptionsError, LayoutError, WorldSizeError
from hypercomm.layout import RankLayout
from hypercomm.layout.checks import (
    as_names,
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
    as_size,
    close_sizes,
    parse_sizes,
    sizes_of_environment,
)
from hypercomm.layout.text import did_you_mean, format_ranks, shown
from hypercomm.process_groups import world
from hypercomm.process_groups.creation.strategies import STRATEGIES
from hypercomm.process_groups.options import as_verified, check_known, check_lazy_init
from hypercomm.process_groups.spec import Derive

if TYPE_CHECKING:
    from typing_extensions import Unpack  # typing has it from Python 3.11 on

GivenSizes = str | Mapping[str, int] | Iterable[int]
"""Sizes of dims: "tp=2,dp=-1", by name, or as ints."""

Sizes = GivenSizes | RankLayout | None
"""The sizes of a grid's dims, or a layout; None for those of the environment."""

Creation = Literal["auto", "enumerate", "local", "split"]
Share = Literal["never", "identical"]
Cover = Literal["any", "exact"]
CREATIONS = ("auto", *STRATEGIES)
SHARES = ("never", "identical")


class GroupKeywords(TypedDict, total=False):
    """The keyword arguments of `create_pg`, which says what they mean."""

    name: str | None
    view: str | None
    backend: str | None
    timeout: timedelta | None
    pg_options: Any
    group_desc: str | None
    share: Share | None
    derive: Derive | None
    creation: Creation | None
    lazy_init: bool | None


class SharedKeywords(TypedDict, total=False):
    """The keyword arguments of `create_pgs`, for all of its groups."""

    backend: str | None
    timeout: timedelta | None
    share: Share | None


class GroupArguments(GroupKeywords, total=False):
    """The arguments of one `create_pg`, for `create_pgs`; `dims` must be there."""

    dims: Dims


class GridArguments(TypedDict, total=False):
    """The arguments of a grid that may differ within a set."""

    backend: str | None
    creation: Creation
    share: Share
    lazy_init: bool | None
    verify: bool | None


class GridKeywords(GridArguments, total=False):
    """The keyword arguments of `HyperCommGrid`, but for `share_with`; it says what they mean."""

    name: str | None
    cover: Cover
    world_size: int | None


@attrs.frozen(kw_only=True)
class GridOptions:
    """The arguments of a grid beside its layout, checked.

    Raises:
        GroupOptionsError: One of them is wrong.
        LayoutError: The world size is.
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
        check_lazy_init(self.lazy_init, self.backend)
        check_name(self.name)
        if self.world_size is not None:
            positive(self.world_size, "world_size")


def check_keywords(call: str, given: Iterable[str], known: Iterable[str]) -> None:
    """Refuse, as Python does, a keyword that a call does not have.

    Raises:
        TypeError: Names it, and those that there are.
    """
    unknown = [name for name in given if name not in known]
    if unknown:
        raise TypeError(
            f"{call}() got an unexpected keyword argument {unknown[0]!r}; it has {list(known)}"
            f"{did_you_mean(unknown[0], known)}"
        )


def check_world(layout: RankLayout, world_size: int, cover: str) -> None:
    """Refuse a layout that reaches beyond the world, or must cover it and does not."""
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
    """Refuse a name that no key of the store can hold."""
    if name is not None and (not isinstance(name, str) or not name or not is_utf8(name)):
        raise GroupOptionsError(f"name must be a non-empty string of text, got {shown(name)}")


def as_arguments(
    requests: Iterable[Dims | GroupArguments], **defaults: Unpack[GroupKeywords]
) -> Iterator[tuple[Dims, GroupKeywords]]:
    """Read the dims and keywords of `create_pg` that each request of `create_pgs` stands for."""
    for request in as_ordered(requests, "the list in create_pgs(['tp', ['dp', 'cp']])"):
        if not isinstance(request, Mapping):
            yield request, defaults
            continue
        known = ["dims", *GroupKeywords.__annotations__]
        unknown = [name for name in request if name not in known]
        if unknown or "dims" not in request:
            wrong = f"has no argument {unknown[0]!r}" if unknown else "needs 'dims'"
            raise GroupOptionsError(
                f"create_pgs() was given {dict(request)!r}, but create_pg() {wrong}; it takes "
                f"{known}{did_you_mean(unknown[0], known) if unknown else ''}"
            )
        keywords = {**defaults, **request}
        yield keywords.pop("dims"), keywords  # type: ignore[misc]


def as_layout(
    sizes: Sizes, dim_names: Iterable[str] | None, rank_offset: int, world_size: int | None
) -> RankLayout:
    """Read the sizes of a grid in whichever form they are; an open one fills the world.

    Raises:
        LayoutError: As for `RankLayout`; or names are given twice, or not at all.
        NotationError, WorldSizeError: As for `RankLayout.parse`.

    Example:
        >>> [str(as_layout(sizes, None, 0, 8)) for sizes in ("tp=2,dp=-1", {"tp": 2, "dp": 4})]
        ['tp=2,dp=4', 'tp=2,dp=4']
        >>> as_layout([2, -1], ["tp", "dp"], 4, 8).ranks
        range(4, 8)
    """
    if sizes is None:
        sizes = sizes_of_environment()
    if sizes is None:
        raise LayoutError(
            f"a grid needs its sizes, as in HyperCommGrid('tp=2,dp=-1'), or the environment's "
            f"{VARIABLE}"
        )
    if isinstance(sizes, RankLayout):
        if dim_names is not None or rank_offset:
            raise LayoutError(
                f"a RankLayout has its dim_names and rank_offset: give neither beside {sizes!r}"
            )
        return sizes

    def left() -> tuple[int, str]:
        given = None if world_size is None else as_world_size(world_size)
        ranks = world.world_size(given) - as_offset(rank_offset)
        room = f"{max(0, ranks)} ranks are left from rank {rank_offset} on" if rank_offset else ""
        return max(1, ranks), room

    return RankLayout(*_closed(sizes, dim_names, left), rank_offset)


def as_factors_of(
    sizes: GivenSizes, dim_names: Iterable[str] | None, size: int
) -> tuple[list[int], tuple[str, ...]]:
    """Read the sizes of a view of so many ranks, in whichever form they are; one may be open.

    Example:
        >>> as_factors_of("ep=4,expt_dp=-1", None, 16)
        ([4, 4], ('ep', 'expt_dp'))
    """
    return _closed(sizes, dim_names, lambda: (size, f"the grid has {size} ranks"))


def _closed(
    sizes: GivenSizes, dim_names: Iterable[str] | None, left: Callable[[], tuple[int, str]]
) -> tuple[list[int], tuple[str, ...]]:
    """Read sizes and names; an open size takes what is left, which is asked for only then."""
    shape, names = _sizes_and_names(sizes, dim_names)
    if OPEN in shape and len(shape) == len(names):
        closed = close_sizes(dict(zip(names, shape, strict=True)), *left())
        shape = list(closed.values())
    return shape, names


def _sizes_and_names(
    sizes: GivenSizes, dim_names: Iterable[str] | None
) -> tuple[list[int], tuple[str, ...]]:
    if isinstance(sizes, (str, Mapping)):
        if dim_names is not None:
            raise LayoutError(
                f"dim_names may not be given beside {shown(sizes)}, which names the dims"
            )
        given = parse_sizes(sizes) if isinstance(sizes, str) else dict(sizes)
        names = as_names(tuple(given))
        return [as_size(name, size) for name, size in given.items()], names
    if dim_names is None:
        raise LayoutError(
            f"dim_names are missing: give ([2, 4], ['tp', 'dp']), or in one, 'tp=2,dp=4'; got "
            f"{shown(sizes)} alone"
        )
    return list(as_ordered(sizes, "shape")), as_names(dim_names)


def as_target(
    target: str | RankLayout, layout: RankLayout, ranks: tuple[int, ...] | None = None
) -> RankLayout:
    """Read what a grid is reshaped to: a layout of its ranks, or of those given, or its sizes."""
    if isinstance(target, str):
        if ranks is not None:
            room = f"ranks has {len(ranks)} ranks"
            closed = close_sizes(parse_sizes(target), len(ranks), room)
            return RankLayout(tuple(closed.values()), tuple(closed), ranks=ranks)
        sized = RankLayout.parse(target, world_size=layout.size)
        return layout.renumber(sized.shape, sized.dim_names)
    if not isinstance(target, RankLayout):
        raise LayoutError(
            f"target must be a text like 'tp=4,dp=2' or a RankLayout, got {shown(target)}"
        )
    others = sorted({*target.ranks} ^ {*(layout.ranks if ranks is None else ranks)})
    if others and ranks is not None:
        raise WorldSizeError(
            f"target and ranks must name the same ranks, but ranks {format_ranks(others)} are in "
            f"one of them only: {target} has ranks {format_ranks(sorted(target.ranks))}, and ranks "
            f"is {shown(ranks)}; give the sizes as text, as in {str(target)!r}"
        )
    if others:
        raise WorldSizeError(
            f"a grid keeps its ranks when it is reshaped, but ranks {format_ranks(others)} are not "
            f"in both: {target} has {target.size} ranks from {target.rank_offset} to "
            f"{target.last_rank}, {layout} has {layout.size} from {layout.rank_offset} to "
            f"{layout.last_rank}; give ranks= for others"
        )
    return target


def as_texts(value: Mapping[str, str] | None, what: str) -> Mapping[str, str]:
    """Read texts by name; None stands for none."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise LayoutError(f"{what} must map names to texts, got {shown(value)}")
    return value
