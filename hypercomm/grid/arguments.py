"""Types of the arguments of grids and groups, and checks that several calls use."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from numbers import Real
from typing import Literal, ParamSpec, TypeVar

from hypercomm.errors import WorldSizeError
from hypercomm.layout import RankLayout
from hypercomm.layout.checks import check_choice
from hypercomm.layout.parsing import check_spelling, infer_sizes, read_sizes
from hypercomm.layout.text import did_you_mean, format_ranks, short_repr
from hypercomm.transfers.mapping import HasLayout

P = ParamSpec("P")
T = TypeVar("T")

GivenSizes = str | Mapping[str, int] | Iterable[int]
"""Sizes of dims: as text "tp=2,dp=-1", as a mapping of names to sizes, or as ints."""

Sizes = GivenSizes | RankLayout | HasLayout | None
"""The sizes of a grid's dims, or a layout. None means the sizes in HYPERCOMM_LAYOUT."""

Cover = Literal["any", "exact"]
_FLAGS = ("lazy_init", "verify", "enable_reconfigure")
"""Arguments of a grid whose values are often written as 0 and 1."""

_USUAL_NAMES = {
    "share_with": "; make both grids in GridSet(..., share='identical')",
    "dims": "; give 'tp=2,dp=4', or ([2, 4], ['tp', 'dp'])",
    "mesh_dim_names": "; HyperCommGrid([2, 4], ['tp', 'dp']), with the fastest varying dim first, "
    "has the dims of init_device_mesh(device, (4, 2), mesh_dim_names=('dp', 'tp'))",
}
"""Maps arguments of MPI and DeviceMesh to what a grid has in their place."""


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
        is_number = isinstance(size, Real) or hasattr(size, "__index__")
        hint = _USUAL_NAMES.get(name) or did_you_mean(name, keywords)
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
