"""Hypothesis strategies for layouts, their dims, ranks and views, for grids and for mappings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument

from hypercomm.layout import RankLayout
from hypercomm.layout.parsing import divisors
from hypercomm.transfers.mapping import RankMapping

if TYPE_CHECKING:
    from hypercomm.grid import HyperCommGrid

DIM_NAMES = ("tp", "cp", "ep", "dp", "pp")
"""The default dims of layouts: Megatron's dims in its default order."""

EXPERT_NAMES = ("ep", "expt_tp", "expt_dp", "expt_cp")
"""The default dims of views."""


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
    """Draw a `RankLayout`. Examples shrink towards few dims, small sizes and offset 0.

    Args:
        draw: Supplied by hypothesis.
        min_dims: The smallest number of dims.
        max_dims: The largest number of dims. Default: the number of `dim_names`.
        min_size: The smallest size of a dim.
        max_size: The largest size of a dim.
        max_ranks: The largest number of ranks.
        max_offset: The largest `rank_offset`. With `listed`, also the largest number of ranks that
            are omitted.
        dim_names: The names to draw from, in any order.
        dims_required: The names of dims that every layout must have.
        listed: Whether the ranks are a list in any order, with some ranks omitted.

    Returns:
        A strategy for layouts.

    Raises:
        InvalidArgument: No layout can satisfy the bounds.
        LayoutError: `dim_names` is not a sequence of names.
        UnknownDimError: A required dim is not among `dim_names`.

    Example:
        >>> from hypothesis import find
        >>> str(find(layouts(min_dims=2), lambda layout: layout.size > 2))
        'tp=1,cp=3'
    """
    named = _named(dim_names)
    known = named.dim_names
    required = named.order_dims(dims_required) if dims_required else ()
    max_dims = len(known) if max_dims is None else max_dims
    bounds = {"min_dims": min_dims, "max_dims": max_dims, "min_size": min_size}
    bounds |= {"max_size": max_size, "max_ranks": max_ranks, "max_offset": max_offset}
    counts = range(max(min_dims, len(required)), max_dims + 1)
    fitting = [count for count in counts if min_size**count <= max_ranks]
    has_names = min_dims >= 1 and max_dims <= len(known)
    if not has_names or not fitting or not 1 <= min_size <= max_size or max_offset < 0:
        text = ", ".join(f"{name}={bound}" for name, bound in bounds.items())
        raise InvalidArgument(
            f"no layout satisfies {text}, dim_names={known} and dims_required={required}"
        )
    count = draw(st.integers(fitting[0], fitting[-1]))
    drawn = draw(st.permutations(list(known)))
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
    """Draw some dims of a layout, in any order. Examples shrink towards the first dim.

    Args:
        layout: The layout.
        min_dims: The smallest number of dims.
        max_dims: The largest number of dims. Default: all.

    Returns:
        A strategy for tuples of dims.

    Raises:
        LayoutError: `layout` is not a layout.

    Example:
        >>> from hypothesis import find
        >>> find(dim_subsets(RankLayout("tp=2,dp=4")), lambda dims: "dp" in dims)
        ('dp',)
    """
    names = RankLayout(layout).dim_names
    return st.lists(st.sampled_from(names), min_size=min_dims, max_size=max_dims, unique=True).map(
        tuple
    )


def ranks_of(layout: RankLayout) -> st.SearchStrategy[int]:
    """Draw a rank of a layout. Examples shrink towards the first rank.

    Args:
        layout: The layout.

    Returns:
        A strategy for ranks.

    Raises:
        LayoutError: `layout` is not a layout.

    Example:
        >>> from hypothesis import find
        >>> find(ranks_of(RankLayout("dp=8", rank_offset=3)), lambda rank: True)
        3
    """
    return st.sampled_from(RankLayout(layout).ranks)


def orders(dim_names: Sequence[str] = DIM_NAMES) -> st.SearchStrategy[str]:
    """Draw an order of dims as text. Examples shrink towards the given order.

    Args:
        dim_names: The dims.

    Returns:
        A strategy for orders such as "tp-dp".

    Raises:
        LayoutError: `dim_names` is not a sequence of names.

    Example:
        >>> from hypothesis import find
        >>> find(orders(), lambda order: True)
        'tp-cp-ep-dp-pp'
    """
    return st.permutations(_named(dim_names).dim_names).map("-".join)


@st.composite
def grids(
    draw: st.DrawFn,
    *,
    min_dims: int = 1,
    max_dims: int | None = None,
    min_size: int = 1,
    max_size: int = 4,
    max_ranks: int = 16,
    dim_names: Sequence[str] = DIM_NAMES,
    dims_required: Sequence[str] = (),
    listed: bool = False,
    views: bool = False,
) -> HyperCommGrid:
    """Draw a `HyperCommGrid` without process groups.

    Examples shrink towards few dims, small sizes and no view.

    The grid fills its world, so groups can be created in `fake_world(grid.layout.size)`.
    `given_ranks` builds the grid again on that number of real ranks. Needs torch.

    Args:
        draw: Supplied by hypothesis.
        min_dims: The smallest number of dims.
        max_dims: The largest number of dims. Default: the number of `dim_names`.
        min_size: The smallest size of a dim.
        max_size: The largest size of a dim.
        max_ranks: The largest number of ranks. Ranks start at 0.
        dim_names: The names to draw from, in any order.
        dims_required: The names of dims that every grid must have.
        listed: Whether the ranks are a list in any order.
        views: Whether grids may have a view "expert", drawn by `views_of`.

    Returns:
        A strategy for grids.

    Raises:
        InvalidArgument: No layout can satisfy the bounds.
        LayoutError: `dim_names` is not a sequence of names.
        UnknownDimError: A required dim is not among `dim_names`.

    Example:
        >>> from hypothesis import find
        >>> print(find(grids(dims_required=["dp"]), lambda grid: grid.size > 1).layout)
        dp=2
    """
    from hypercomm.grid import HyperCommGrid

    layout = draw(
        layouts(
            min_dims=min_dims,
            max_dims=max_dims,
            min_size=min_size,
            max_size=max_size,
            max_ranks=max_ranks,
            max_offset=0,
            dim_names=dim_names,
            dims_required=dims_required,
            listed=listed,
        )
    )
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
    """Draw another factorisation of a layout's ranks. Examples shrink towards few dims.

    Register the view with `grid.register_view(name, view.shape, view.dim_names, shared_dims)`.
    Shared dims keep their groups. The dims between two shared dims are replaced by other dims with
    the same product of sizes.

    Args:
        draw: Supplied by hypothesis.
        layout: The layout whose ranks are factorised.
        dim_names: The names to draw from, in any order.
        shared_dims: The dims of the layout that the view keeps.

    Returns:
        A strategy for layouts.

    Raises:
        InvalidArgument: There are too few names, or a name is also a shared dim.
        LayoutError: `dim_names` is not a sequence of names.
        UnknownDimError: A shared dim is not a dim of the layout.

    Example:
        >>> from hypothesis import find
        >>> layout = RankLayout("tp=2,dp=4,pp=2")
        >>> views = views_of(layout, shared_dims=["pp"])
        >>> print(find(views, lambda view: len(view.dim_names) > 2))
        ep=2,expt_tp=4,pp=2
    """
    shared = layout.order_dims(shared_dims) if shared_dims else ()
    names = _named(dim_names).dim_names
    runs = [1]  # the products of the sizes between shared dims
    for dim in layout.dim_names:
        if dim in shared:
            runs.append(1)
        else:
            runs[-1] *= layout.size_of(dim)
    needed = sum(run > 1 for run in runs) or int(not shared)
    if set(names) & set(shared) or len(names) < needed:
        raise InvalidArgument(
            f"a view of {layout} with shared_dims={shared} needs {needed} or more other "
            f"dim_names, got {names}"
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
    """Factorise a number into at most 1 + `more` factors larger than 1. Factorise 1 into [1]."""
    factors: list[int] = []
    for _ in range(draw(st.integers(0, more))):
        fitting = sorted(size for size in divisors(number) if 1 < size < number)
        if not fitting:
            break
        factors.append(draw(st.sampled_from(fitting)))
        number //= factors[-1]
    return [*factors, number]


@st.composite
def mappings(
    draw: st.DrawFn,
    *,
    dim_names: Sequence[str] = ("tp", "cp", "dp", "pp"),
    along: str | None = "dp",
    max_size: int = 4,
    max_ranks: int = 16,
    beside: bool | None = None,
) -> RankMapping:
    """Draw a `RankMapping`. Examples shrink towards one rank that is mapped to itself.

    Args:
        draw: Supplied by hypothesis.
        dim_names: The dims of both layouts. These dims have the default roles of `RankMapping`:
            "cp" splits the sequence, "pp" is the pipeline, and other dims replicate.
        along: The dim that splits the batch. Both layouts have this dim. If `along` is None, the
            mapping is for a weight with two axes, and `shardings` draws the dims that split these
            axes.
        max_size: The largest size of a dim.
        max_ranks: The largest number of ranks of each layout.
        beside: If True, the target's ranks follow the source's ranks. If False, both layouts
            begin at rank 0. Default: drawn.

    Returns:
        A strategy for mappings.

    Raises:
        InvalidArgument: No layouts can satisfy the bounds.
        LayoutError: `dim_names` is not a sequence of names.
        UnknownDimError: `along` is not among `dim_names`.

    Example:
        >>> from hypothesis import find
        >>> print(find(mappings(beside=True), lambda mapping: mapping.kind == "fan-out"))
        dp=1 at 0 -> dp=2 at 1: fan-out 1 -> 2 along dp
    """
    batch = () if along is None else (along,)
    drawn = layouts(
        max_size=max_size,
        max_ranks=max_ranks,
        max_offset=0,
        dim_names=dim_names,
        dims_required=batch,
    )
    source, target = draw(drawn), draw(drawn)
    for dim in batch:  # one size must divide the other
        own, size = source.size_of(dim), target.size_of(dim)
        if max(own, size) % min(own, size):
            target = RankLayout({**target.sizes, dim: math.gcd(own, size)})
    is_beside = draw(st.booleans()) if beside is None else beside
    target = RankLayout(target.shape, target.dim_names, source.size if is_beside else 0)
    if along is not None:
        return RankMapping(source, target, along)
    cutting = [dim for dim in dim_names if dim in {*source.dim_names, *target.dim_names} - {"pp"}]
    shards = draw(shardings((1, 1), dim_names=cutting)) if cutting else {}
    return RankMapping(source, target, None, shards=shards)


def shardings(
    shape: Sequence[int], *, dim_names: Sequence[str] = ("tp", "cp", "dp")
) -> st.SearchStrategy[dict[str, int]]:
    """Draw the dims that split a tensor, and the axis of each dim, for `RankMapping(shards=)`.

    Each dim splits one axis or none. If several dims split an axis, the outermost dim is drawn
    first. Examples shrink towards an empty dict.

    Args:
        shape: The shape of the tensor. An axis of length 0 is not split.
        dim_names: The dims that may split the tensor.

    Returns:
        A strategy for dicts from dims to axes.

    Example:
        >>> from hypothesis import find
        >>> find(shardings([12, 8]), lambda cut: len(cut) == 2)
        {'tp': 0, 'cp': 0}
    """
    axes = [axis for axis, length in enumerate(shape) if length > 0]
    if not axes or not dim_names:
        return st.just({})
    pair = st.tuples(st.sampled_from(dim_names), st.sampled_from(axes))
    return st.lists(pair, unique_by=lambda cut: cut[0], max_size=len(dim_names)).map(dict)


def _named(dim_names: Sequence[str]) -> RankLayout:
    """Return a layout of one rank with these dims, which checks their names."""
    return RankLayout([1] * len(dim_names), dim_names)


st.register_type_strategy(RankLayout, layouts())
st.register_type_strategy(RankMapping, mappings())
