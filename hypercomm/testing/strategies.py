"""Hypothesis strategies for layouts, their dims and their ranks."""

from __future__ import annotations

import math
from collections.abc import Sequence

try:
    from hypothesis import strategies as st
    from hypothesis.errors import InvalidArgument
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "the strategies of hypercomm.testing need hypothesis: pip install 'hypercomm[testing]'",
        name="hypothesis",
    ) from error

from hypercomm.errors import LayoutError
from hypercomm.layout import RankLayout
from hypercomm.layout.reading.checks import as_int, as_names, as_strings
from hypercomm.layout.reading.shown import shown

DIM_NAMES = ("tp", "cp", "ep", "dp", "pp")
"""The dims that layouts are drawn over by default: Megatron's, in its default order."""


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
        listed: Whether ranks come in any order, some of them left out.

    Raises:
        InvalidArgument: No layout can satisfy the bounds.
        LayoutError: A bound is no int, or `dim_names` no sequence of names.

    Example:
        >>> from hypothesis import find
        >>> str(find(layouts(min_dims=2), lambda layout: layout.size > 2))
        'tp=1,cp=3'
    """
    dim_names = as_strings(dim_names, "dim_names")
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
    count = draw(st.integers(min_dims, fitting))
    names = draw(st.permutations(list(dim_names)))[:count]
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


def _check_layout(layout: object) -> None:
    if not isinstance(layout, RankLayout):
        raise LayoutError(f"layout must be a RankLayout, got {shown(layout)}")
