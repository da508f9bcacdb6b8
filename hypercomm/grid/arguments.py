"""Types of the arguments of grids and groups, and checks that several calls use."""

from __future__ import annotations

import functools
import inspect
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from functools import cached_property
from numbers import Real
from typing import Literal, ParamSpec, TypeVar

import attrs

from hypercomm.errors import GroupOptionsError, WorldSizeError
from hypercomm.layout import RankLayout
from hypercomm.layout.checks import check_choice, is_utf8
from hypercomm.layout.parsing import check_spelling, infer_sizes, read_sizes
from hypercomm.layout.text import did_you_mean, format_ranks, short_repr
from hypercomm.process_groups.options import (
    GroupOptions,
    as_verified,
    check_known,
    check_lazy_init,
)
from hypercomm.process_groups.spec import Share, StrategyName
from hypercomm.process_groups.strategies import STRATEGIES
from hypercomm.transfers.mapping import HasLayout

P = ParamSpec("P")
T = TypeVar("T")

GivenSizes = str | Mapping[str, int] | Iterable[int]
"""Sizes of dims: as text "tp=2,dp=-1", as a mapping of names to sizes, or as ints."""

Sizes = GivenSizes | RankLayout | HasLayout | None
"""The sizes of a grid's dims, or a layout. None means the sizes in HYPERCOMM_LAYOUT."""

Cover = Literal["any", "exact"]
CREATIONS = ("auto", *STRATEGIES)
SHARES = ("never", "identical")
_FLAGS = ("lazy_init", "verify", "enable_reconfigure")
"""Arguments of a grid whose values are often written as 0 and 1."""


@attrs.frozen(slots=False)
class GridOptions:
    """The checked arguments of a grid that apply to all of its groups.

    Raises:
        GroupOptionsError: An argument is wrong.
    """

    backend: str | None
    name: str | None
    creation: StrategyName
    share: Share
    lazy_init: bool | None
    verify: bool = attrs.field(converter=as_verified)
    enable_reconfigure: bool = False

    def __attrs_post_init__(self) -> None:
        check_choices(self.creation, self.share)
        if self.backend is not None:
            check_known(self.backend)
        check_lazy_init(self.lazy_init)
        if self.lazy_init and self.enable_reconfigure:
            raise GroupOptionsError(
                "lazy_init=True cannot work with enable_reconfigure=True, which connects all "
                "members of a group; omit one of the two arguments"
            )
        if self.name is not None:
            check_name(self.name)

    @cached_property
    def of_groups(self) -> GroupOptions:
        """The default options of the grid's groups."""
        return GroupOptions(
            backend=self.backend,
            lazy_init=self.lazy_init,
            enable_reconfigure=self.enable_reconfigure,
        )


def check_choices(creation: object, share: object) -> None:
    """Raise unless `creation` and `share` have known values. None means the grid's value."""
    if creation not in (None, "auto"):
        check_choice("creation=", creation, CREATIONS)
    if share not in (None, "never"):
        check_choice("share=", share, SHARES)


def check_name(name: object) -> None:
    """Raise unless a name can be part of a key in the store."""
    if not isinstance(name, str) or not name or not is_utf8(name):
        raise GroupOptionsError(
            f"name must be a non-empty string that can be written as UTF-8, got {short_repr(name)}"
        )


def hints_at_keywords(function: Callable[P, T]) -> Callable[P, T]:
    """Make a function suggest a similar name for an unknown keyword, as Python 3.13 does.

    Example:
        >>> @hints_at_keywords
        ... def ensure_pg(*, name=None):
        ...     pass
        >>> ensure_pg(nam="x")
        Traceback (most recent call last):
        TypeError: ensure_pg() got an unexpected keyword argument 'nam'. Did you mean 'name'?
    """
    if sys.version_info >= (3, 13):
        return function
    names = list(inspect.signature(function).parameters)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        unknown = [name for name in kwargs if name not in names]
        if unknown:
            near = get_close_matches(unknown[0], names, 1)
            hint = f". Did you mean {near[0]!r}?" if near else ""
            raise TypeError(
                f"{function.__qualname__}() got an unexpected keyword argument {unknown[0]!r}{hint}"
            )
        return function(*args, **kwargs)

    return call


def takes_one(what: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Make a method that has one positional argument explain this if it is given several.

    Args:
        what: The argument, with an example of the call.

    Example:
        >>> class Grid:
        ...     @takes_one("list, as in create_pgs(['tp', 'dp'])")
        ...     def create_pgs(self, requests):
        ...         pass
        >>> Grid().create_pgs("dp", "tp")
        Traceback (most recent call last):
        TypeError: create_pgs() takes one list, as in create_pgs(['tp', 'dp']), got 'dp', 'tp'
    """

    def decorated(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            if len(args) > 2:  # the first one is `self`
                given = ", ".join(map(short_repr, args[1:]))
                raise TypeError(f"{function.__name__}() takes one {what}, got {given}")
            return function(*args, **kwargs)

        return call

    return decorated


def check_dims(call: str, dims: Mapping[str, object], keywords: Iterable[str]) -> None:
    """Raise for a keyword that is not the size of a dim.

    Raises:
        TypeError: The keyword is a misspelt or unknown argument.

    Example:
        >>> check_dims("HyperCommGrid", {"nam": "a"}, ["name"])
        Traceback (most recent call last):
        TypeError: HyperCommGrid() got an unexpected keyword argument 'nam'; did you mean 'name'?
    """
    check_spelling(dims)
    for name, size in dims.items():
        if name == "mesh_dim_names":
            raise TypeError(
                f"mesh_dim_names is an argument of init_device_mesh; {call}([4, 2], ['tp', 'dp']) "
                f"names the fastest varying dim first, but a DeviceMesh names it last"
            )
        is_number = isinstance(size, Real) or hasattr(size, "__index__")
        hint = did_you_mean(name, keywords)
        if not is_number and not hint:
            hint = f"; if it is a dim, its size must be an int, not {short_repr(size)}"
        is_flag = isinstance(size, bool) or bool(get_close_matches(name, _FLAGS, 1, 0.8))
        if hint and (is_flag or not is_number):
            raise TypeError(f"{call}() got an unexpected keyword argument {name!r}{hint}")


def check_cover(
    layout: RankLayout, world_size: int, cover: Cover | None, *, is_written: bool
) -> None:
    """Raise or warn if a layout leaves out ranks of the world.

    Args:
        layout: The layout of the grid.
        world_size: The number of ranks of the world.
        cover: With "exact", this function raises. With "any", it does nothing. With None, it warns
            if `is_written` is True.
        is_written: Whether the sizes were given as text, by name or by keyword, and the grid begins
            at rank 0.

    Raises:
        WorldSizeError: Ranks are left out, and `cover` is "exact".
    """
    if cover is not None:
        check_choice("cover=", cover, ("any", "exact"))
    if layout.size == world_size or cover == "any" or not (cover or is_written):
        return
    left = format_ranks(sorted({*range(world_size)} - {*layout.ranks}))
    out = f"{layout} leaves out ranks {left} of a world of {world_size}; make a size larger, or -1"
    if cover == "exact":
        raise WorldSizeError(f"cover='exact', but {out}")
    warnings.warn(
        f"the grid {out}, or give cover='any': on the ranks that are left out, create_pg returns "
        f"None, which torch's collectives interpret as WORLD",
        stacklevel=3,
    )


def read_target(
    target: str | Mapping[str, int] | RankLayout,
    layout: RankLayout,
    ranks: tuple[int, ...] | None,
) -> RankLayout:
    """Return the layout after a reshape. It has the ranks of the grid, or `ranks` if given."""
    kept, what = layout, "the grid"
    if ranks is not None:
        kept, what = RankLayout([len(ranks)], ["rank"], ranks=ranks), "ranks="
    if not isinstance(target, RankLayout):
        sizes = infer_sizes(read_sizes(target), kept.size, f"{what} has {kept.size} ranks")
        return kept.renumber(tuple(sizes.values()), tuple(sizes))
    if others := sorted({*target.ranks} ^ {*kept.ranks}):
        raise WorldSizeError(
            f"target {target} and {what} must have the same ranks, but only one of them has ranks "
            f"{format_ranks(others)}; give the sizes as text, and give other ranks as ranks="
        )
    return target
