"""Hypothesis strategies for layouts, their dims, ranks and views, and for grids."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from hypercomm.layout import RankLayout
from hypercomm.layout.checks import as_flag, as_int, as_names
from hypercomm.layout.parsing import divisors
from hypercomm.testing.bounds import (
    InvalidArgument,
    LayoutBounds,
    check_layout,
    names_to_draw,
    required_dims,
    st,
)

if TYPE_CHECKING:
    from hypercomm.grid import HyperCommGrid

DIM_NAMES = ("tp", "cp", "ep", "dp", "pp")
"""The dims that layouts are drawn over by default: Megatron's, in its default order."""

EXPERT_NAMES = ("ep", "expt_tp", "expt_dp", "expt_cp")
"""The dims that views are drawn over by default."""


@st.composite
def layouts(
    draw: st.DrawFn,
    *,
    min_dims: int = 1,
    max_dims: int | None = None,
    min_size: int = 1,
    max_size: int = 4,
    max_ranks: int = 512,
    max_offset: int = 16,
    dim_names: Sequence[str] = DIM_NAMES,
    dims_required: Sequence[str] = (),
    listed: bool = False,
) -> RankLayout:
    """Draw a `RankLayout`; shrinks towards few dims, small sizes and offset 0.

    Args:
        draw: Given by hypothesis.
        min_dims: Least number of dims.
        max_dims: Largest number of dims; default: one for each of `dim_names`.
        min_size: Least size of a dim.
        max_size: Largest size of a dim.
        max_ranks: Largest number of ranks.
        max_offset: Largest `rank_offset`, or number of ranks that a list leaves out.
        dim_names: Names to draw from, in any order.
        dims_required: Those of them that every layout has.
        listed: Whether ranks come in any order, some of them left out.

    Raises:
        InvalidArgument: No layout can satisfy the bounds.
        LayoutError: A bound is no int, or `dim_names` no sequence of names.
        UnknownDimError: A dim that is required is not among `dim_names`.

    Example:
        >>> from hypothesis import find
        >>> str(find(layouts(min_dims=2), lambda layout: layout.size > 2))
        'tp=1,cp=3'
    """
    dim_names = names_to_draw(dim_names, "dim_names")
    required = required_dims(dims_required, dim_names)
    max_dims = len(dim_names) if max_dims is None else max_dims
    bounds = {"min_dims": min_dims, "max_dims": max_dims, "min_size": min_size}
    bounds |= {"max_size": max_size, "max_ranks": max_ranks, "max_offset": max_offset}
    for name, bound in bounds.items():
        as_int(bound, name)
    as_flag(listed, "listed")
    if max_offset < 0:
        raise InvalidArgument(f"max_offset must be 0 or more, got {max_offset}")
    if len(set(dim_names)) != len(dim_names):
        raise InvalidArgument(f"a layout cannot have a dim twice, as in dim_names={dim_names}")
    if not 1 <= min_dims <= max_dims <= len(dim_names):
        raise InvalidArgument(
            f"need 1 <= min_dims={min_dims} <= max_dims={max_dims} <= {len(dim_names)} dim_names"
        )
    if not 1 <= min_size <= max_size or min_size**min_dims > max_ranks:
        raise InvalidArgument(
            f"no layout has min_dims={min_dims} dims of min_size={min_size} to "
            f"max_size={max_size} and at most max_ranks={max_ranks} ranks"
        )
    fitting = next(count for count in range(max_dims, 0, -1) if min_size**count <= max_ranks)
    if len(required) > fitting:
        raise InvalidArgument(
            f"no layout has dims_required={required} and at most {fitting} dims, as max_dims, "
            f"min_size={min_size} and max_ranks={max_ranks} want"
        )
    count = draw(st.integers(max(min_dims, len(required)), fitting))
    drawn = draw(st.permutations(list(dim_names)))
    others = [name for name in drawn if name not in required][: count - len(required)]
    names = [name for name in drawn if name in required or name in others]
    shape: list[int] = []
    for position in range(count):
        reserve = min_size ** (count - position - 1)
        room = max_ranks // (math.prod(shape) * reserve)
        shape.append(draw(st.integers(min_size, min(max_size, room))))
    offset = draw(st.integers(0, max_offset))
    if not listed:
        return RankLayout(shape, names, offset)
    size = math.prod(shape)
    spare = draw(st.integers(0, min(max_offset - offset, size)))
    order = draw(st.permutations(range(size + spare)))
    return RankLayout(shape, names, ranks=[offset + rank for rank in order[:size]])


def dim_subsets(
    layout: RankLayout, *, min_dims: int = 1, max_dims: int | None = None
) -> st.SearchStrategy[tuple[str, ...]]:
    """Draw some of a layout's dims, in any order; shrinks towards the first dim alone.

    Example:
        >>> from hypothesis import find
        >>> find(dim_subsets(RankLayout.parse("tp=2,dp=4")), lambda dims: "dp" in dims)
        ('dp',)
    """
    check_layout(layout)
    return st.lists(
        st.sampled_from(layout.dim_names), min_size=min_dims, max_size=max_dims, unique=True
    ).map(tuple)


def ranks_of(layout: RankLayout) -> st.SearchStrategy[int]:
    """Draw a rank of a layout; shrinks towards the smallest.

    Example:
        >>> from hypothesis import find
        >>> find(ranks_of(RankLayout.parse("dp=8", rank_offset=3)), lambda rank: True)
        3
    """
    check_layout(layout)
    return st.sampled_from(layout.ranks)


def orders(dim_names: Sequence[str] = DIM_NAMES) -> st.SearchStrategy[str]:
    """Draw an order of dims as text; shrinks towards the order given.

    Example:
        >>> from hypothesis import find
        >>> find(orders(), lambda order: True)
        'tp-cp-ep-dp-pp'
    """
    return st.permutations(as_names(dim_names)).map("-".join)


@st.composite
def grids(  # noqa: D417 - most are those of `layouts`
    draw: st.DrawFn,
    *,
    min_dims: int = 1,
    max_dims: int | None = None,
    min_size: int = 1,
    max_size: int = 4,
    max_ranks: int = 16,
    dim_names: Sequence[str] = DIM_NAMES,
    dims_required: Sequence[str] = (),
    views: bool = False,
) -> HyperCommGrid:
    """Draw a `HyperCommGrid` without process groups; shrinks as `layouts` do, and to no view.

    It fills a world of its own: groups can be created in `fake_world(grid.layout.size)`, and
    `given_ranks` builds it anew on as many real ranks. It needs torch.

    Args:
        draw: Given by hypothesis.
        min_dims, max_dims, min_size, max_size, max_ranks, dim_names, dims_required: As for
            `layouts`; ranks are from 0 on.
        views: Whether grids may have the view "expert", as `views_of` draws it.

    Raises:
        InvalidArgument, LayoutError, UnknownDimError: As for `layouts`.

    Example:
        >>> from hypothesis import find
        >>> print(find(grids(dims_required=["dp"]), lambda grid: grid.size > 1).layout)
        dp=2
    """
    from hypercomm.grid import HyperCommGrid

    as_flag(views, "views")
    limits: LayoutBounds = {"min_dims": min_dims, "max_dims": max_dims, "min_size": min_size}
    limits |= {"max_size": max_size, "max_ranks": max_ranks}
    limits |= {"dim_names": dim_names, "dims_required": dims_required}
    layout = draw(layouts(**limits, max_offset=0))
    grid = HyperCommGrid(layout, world_size=layout.size)
    names = [name for name in EXPERT_NAMES if name not in layout.dim_names]
    if views and names and draw(st.booleans()):
        view = draw(views_of(layout, dim_names=names))
        grid.register_view("expert", view.shape, view.dim_names)
    return grid


@st.composite
def views_of(
    draw: st.DrawFn,
    layout: RankLayout,
    *,
    dim_names: Sequence[str] = EXPERT_NAMES,
    shared_dims: Sequence[str] = (),
) -> RankLayout:
    """Draw another factorisation of a layout's ranks; shrinks towards few dims, all ranks in one.

    `grid.register_view(name, view.shape, view.dim_names, shared_dims)` takes it. The dims around
    those that are shared are factored anew, so that shared ones keep their groups.

    Args:
        draw: Given by hypothesis.
        layout: Whose ranks are factored.
        dim_names: Names to draw from, in any order.
        shared_dims: Dims of the layout that the view has, too.

    Raises:
        InvalidArgument: There are fewer names than dims must have one, or a name is shared, too.
        LayoutError: `layout` is none, or names are no sequence of names.
        UnknownDimError: A shared dim is not one of the layout's.

    Example:
        >>> from hypothesis import find
        >>> layout = RankLayout.parse("tp=2,dp=4,pp=2")
        >>> views = views_of(layout, shared_dims=["pp"])
        >>> print(find(views, lambda view: len(view.dim_names) > 2))
        ep=2,expt_tp=4,pp=2
    """
    check_layout(layout)
    names = names_to_draw(dim_names, "dim_names")
    shared = required_dims(shared_dims, layout.dim_names, "shared_dims")
    runs = [1]  # the products of the sizes between dims that are shared
    for dim in layout.dim_names:
        if dim in shared:
            runs.append(1)
        else:
            runs[-1] *= layout.size_of(dim)
    needed = sum(run > 1 for run in runs) or int(not shared)
    if len(set(names)) < len(names) or set(names) & set(shared):
        raise InvalidArgument(f"a view cannot have a dim twice, as in {(*names, *shared)}")
    if len(names) < needed:
        raise InvalidArgument(
            f"dim_names={names} are {len(names)}, and a view of {layout} needs {needed} names "
            f"beside shared_dims={shared}"
        )
    left = list(draw(st.permutations(list(names))))
    spare = len(names) - needed
    shape: list[int] = []
    order: list[str] = []
    kept = [dim for dim in layout.dim_names if dim in shared]
    for run, dim in zip_longest(runs, kept):
        factors = draw(_factors(run, spare)) if run > 1 or not shared else []
        spare -= max(0, len(factors) - 1)
        shape += factors
        order += [left.pop(0) for _ in factors]
        if dim is not None:
            shape.append(layout.size_of(dim))
            order.append(dim)
    return RankLayout(shape, order, ranks=layout.ranks)


@st.composite
def _factors(draw: st.DrawFn, number: int, more: int) -> list[int]:
    """Draw 1 + `more` factors of a number at most, none of them 1 unless it is; towards one."""
    factors: list[int] = []
    for _ in range(draw(st.integers(0, more))):
        fitting = sorted(size for size in divisors(number) if 1 < size < number)
        if not fitting:
            break
        factors.append(draw(st.sampled_from(fitting)))
        number //= factors[-1]
    return [*factors, number]
