"""Hypothesis strategies for layouts, their dims, ranks and views, for grids and for mappings."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, TypedDict

try:
    from hypothesis import strategies as st
    from hypothesis.errors import InvalidArgument
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "the strategies of hypercomm.testing need hypothesis: pip install 'hypercomm[testing]'",
        name="hypothesis",
    ) from error

from hypercomm.errors import LayoutError, UnknownDimError
from hypercomm.layout import RankLayout, RankMapping
from hypercomm.layout.mapping.dim_roles import as_dim
from hypercomm.layout.reading.checks import as_flag, as_int, as_names, as_strings, as_tuple
from hypercomm.layout.reading.shown import did_you_mean, shown
from hypercomm.layout.reading.sizes import divisors

if TYPE_CHECKING:
    from hypercomm.grid import HyperCommGrid

DIM_NAMES = ("tp", "cp", "ep", "dp", "pp")
"""The dims that layouts are drawn over by default: Megatron's, in its default order."""

EXPERT_NAMES = ("ep", "expt_tp", "expt_dp", "expt_cp")
"""The dims that views are drawn over by default."""


class LayoutBounds(TypedDict, total=False):
    """The bounds of `layouts` that other strategies take, too."""

    min_dims: int
    max_dims: int | None
    min_size: int
    max_size: int
    max_ranks: int
    dim_names: Sequence[str]
    dims_required: Sequence[str]


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
    dim_names = as_strings(dim_names, "dim_names")
    required = _required(dims_required, dim_names)
    max_dims = len(dim_names) if max_dims is None else max_dims
    bounds = {"min_dims": min_dims, "max_dims": max_dims, "min_size": min_size}
    bounds |= {"max_size": max_size, "max_ranks": max_ranks, "max_offset": max_offset}
    for name, bound in bounds.items():
        as_int(bound, name)
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
    _check_layout(layout)
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
    _check_layout(layout)
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
    if views and draw(st.booleans()):
        names = [name for name in EXPERT_NAMES if name not in layout.dim_names]
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
    _check_layout(layout)
    names = as_strings(dim_names, "dim_names")
    shared = _required(shared_dims, layout.dim_names, "shared_dims")
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
def mappings(
    draw: st.DrawFn,
    *,
    dim_names: Sequence[str] = ("tp", "cp", "dp", "pp"),
    along: str | None = "dp",
    max_size: int = 4,
    max_ranks: int = 16,
    beside: bool | None = None,
) -> RankMapping:
    """Draw a `RankMapping`; shrinks towards one rank to the same rank, where it may lie there.

    Args:
        draw: Given by hypothesis.
        dim_names: The dims that both layouts are drawn over; what the mapping does with each is its
            default: "cp" cuts the sequence, "pp" is the pipeline, others replicate.
        along: The dim that splits the batch; both layouts have it. None: a weight, which further
            dims cut as `shardings` draws it, for two axes.
        max_size: Largest size of a dim.
        max_ranks: Largest number of ranks of each layout.
        beside: True puts the target on ranks behind the source's, False on the same from 0 on; None
            draws it.

    Raises:
        InvalidArgument: No layouts can satisfy the bounds.
        LayoutError: A bound is no int, or `dim_names` no sequence of names.
        UnknownDimError: `along` is not among `dim_names`.

    Example:
        >>> from hypothesis import find
        >>> print(find(mappings(beside=True), lambda mapping: mapping.kind == "fan-out"))
        dp=1 at 0 -> dp=2 at 1: fan-out 1 -> 2 along dp
    """
    names = as_strings(dim_names, "dim_names")
    batch = () if along is None else (as_dim(along, "along"),)
    bounds: LayoutBounds = {"max_size": max_size, "max_ranks": max_ranks, "dim_names": names}
    bounds["dims_required"] = _required(batch, names, "along")
    if beside is not None:
        as_flag(beside, "beside")
    source = draw(layouts(**bounds, max_offset=0))
    target = draw(layouts(**bounds, max_offset=0))
    for dim in batch:
        one, other = source.size_of(dim), target.size_of(dim)
        if max(one, other) % min(one, other):  # the largest size below that does divide
            fitting = next(
                size for size in range(other, 0, -1) if not max(one, size) % min(one, size)
            )
            sizes = [fitting if name == dim else target.size_of(name) for name in target.dim_names]
            target = RankLayout(sizes, target.dim_names)
    is_beside = draw(st.booleans()) if beside is None else beside
    target = RankLayout(target.shape, target.dim_names, source.size if is_beside else 0)
    if along is not None:
        return RankMapping(source, target, along)
    cutting = [dim for dim in names if dim in {*source.dim_names, *target.dim_names} - {"pp"}]
    shards = draw(shardings((1, 1), dim_names=cutting)) if cutting else {}
    return RankMapping(source, target, None, shards=shards)


def shardings(
    shape: Sequence[int], *, dim_names: Sequence[str] = ("tp", "cp", "dp")
) -> st.SearchStrategy[dict[str, int]]:
    """Draw which dims cut which axis of a tensor, for `RankMapping(shards=)`; shrinks to no cut.

    Each dim cuts one axis or none; dims that cut the same axis do so in the order drawn, the
    outermost first. It shrinks towards few dims, the first of them and axis 0.

    Args:
        shape: The tensor's; an axis of length 0 is not cut.
        dim_names: The dims that may cut.

    Raises:
        InvalidArgument: A dim is named twice.
        LayoutError: `shape` is no sequence of lengths, or `dim_names` none of names.

    Example:
        >>> from hypothesis import find
        >>> find(shardings([12, 8]), lambda cut: len(cut) == 2)
        {'tp': 0, 'cp': 0}
    """
    lengths = as_tuple(shape, "shape")
    for length in lengths:
        if as_int(length, "a length of shape") < 0:
            raise LayoutError(f"a length of shape must be 0 or more, got {length}")
    names = as_strings(dim_names, "dim_names")
    if len(set(names)) < len(names):
        raise InvalidArgument(f"a dim cannot cut twice, as in dim_names={names}")
    axes = [axis for axis, length in enumerate(lengths) if length > 0]
    if not axes or not names:
        return st.just({})
    pair = st.tuples(st.sampled_from(names), st.sampled_from(axes))
    return st.lists(pair, unique_by=lambda cut: cut[0], max_size=len(names)).map(dict)


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


def _required(
    names: Sequence[str], known: Sequence[str], what: str = "dims_required"
) -> tuple[str, ...]:
    """Check that dims are among those that can be drawn."""
    required = as_strings(names, what)
    for name in required:
        if name not in known:
            raise UnknownDimError(
                f"{what} names {name!r}, which is not among {tuple(known)}"
                f"{did_you_mean(name, known)}"
            )
    return required


def _check_layout(layout: object) -> None:
    if not isinstance(layout, RankLayout):
        raise LayoutError(f"layout must be a RankLayout, got {shown(layout)}")
