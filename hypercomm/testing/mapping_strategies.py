"""Hypothesis strategies for mappings, and for what cuts a tensor."""

from __future__ import annotations

from collections.abc import Sequence

from hypercomm.errors import LayoutError
from hypercomm.layout import RankLayout, RankMapping
from hypercomm.layout.checks import as_flag, as_int, as_strings, as_tuple
from hypercomm.layout.mapping import as_dim
from hypercomm.testing.bounds import (
    InvalidArgument,
    LayoutBounds,
    names_to_draw,
    required_dims,
    st,
)
from hypercomm.testing.strategies import layouts


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
    names = names_to_draw(dim_names, "dim_names")
    batch = () if along is None else (as_dim(along, "along"),)
    bounds: LayoutBounds = {"max_size": max_size, "max_ranks": max_ranks, "dim_names": names}
    bounds["dims_required"] = required_dims(batch, names, "along")
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
