"""What each dim does when a tensor moves between layouts: it splits the batch, cuts an axis, ..."""

from __future__ import annotations

from collections.abc import Mapping

from hypercomm.errors import LayoutError, UnknownDimError
from hypercomm.layout.checks import as_int, as_ordered
from hypercomm.layout.messages import shown
from hypercomm.layout.parts import Cut
from hypercomm.layout.rank_layout import RankLayout
from hypercomm.layout.sizes import divisors

_MAY_LACK = ("dp", "cp", "pp")
"""The dims that are named by default, whether or not a layout has them."""


def as_dim(value: object, what: str) -> str:
    """Read the name of a dim; `what` begins the error's sentence.

    Raises:
        LayoutError: It is no string, or empty.

    Example:
        >>> as_dim("dp", "along")
        'dp'
    """
    if not isinstance(value, str) or not value:
        raise LayoutError(f"{what} must be the name of a dim, got {shown(value)}")
    return str(value)


def as_shards(value: object) -> tuple[tuple[str, int], ...]:
    """Read which dim cuts which tensor axis, from a mapping or from pairs.

    Raises:
        LayoutError: It is neither, a dim is no string, or an axis no int.

    Example:
        >>> as_shards({"cp": 1, "tp": -1})
        (('cp', 1), ('tp', -1))
    """
    pairs = as_ordered(tuple(value.items()) if isinstance(value, Mapping) else value, "shards")
    shards: list[tuple[str, int]] = []
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise LayoutError(
                f"shards must map dims to tensor axes, as in {{'cp': 1}}, got {shown(value)}"
            )
        dim = as_dim(pair[0], "every dim in shards")
        shards.append((dim, as_int(pair[1], f"the axis of dim {dim!r} in shards")))
    return tuple(shards)


def check_roles(
    source: RankLayout,
    target: RankLayout,
    along: str,
    shards: tuple[tuple[str, int], ...],
    pipeline: str | None,
) -> None:
    """Check that each dim has one role, and that no typing mistake makes a dim of size 1.

    Raises:
        LayoutError: A dim is named twice.
        UnknownDimError: Neither layout has a dim, and no default names it.

    Example:
        >>> layout = RankLayout.parse("tp=2,dp=2")
        >>> check_roles(layout, layout, "dp", (("tp", -1),), "pp")
    """
    roles = {"along": [along], "shards": [dim for dim, _ in shards]}
    roles["pipeline"] = [] if pipeline is None else [pipeline]
    known = {*source.dim_names, *target.dim_names, *_MAY_LACK}
    seen: dict[str, str] = {}
    for role, dims in roles.items():
        for dim in dims:
            if dim in seen:
                raise LayoutError(
                    f"dim {dim!r} is named by {seen[dim]} and by {role}; a dim has one role"
                )
            if dim not in known:
                raise UnknownDimError(
                    f"{role} names dim {dim!r}, which neither layout has; the source has dims "
                    f"{source.dim_names}, the target {target.dim_names}"
                )
            seen[dim] = role


def check_batch(batch: Cut, dims: tuple[str, ...]) -> None:
    """Check that one of the batch's numbers of shards is a multiple of the other.

    Args:
        batch: How the batch is cut.
        dims: By which dims.

    Raises:
        LayoutError: Neither is; the nearest numbers that would do are told.

    Example:
        >>> check_batch(Cut(axis=0, source=4, target=2), ("dp",))
    """
    if batch.source % batch.target and batch.target % batch.source:
        raise LayoutError(
            f"the batch is cut along {'*'.join(dims)} into {batch.source} shards on the source "
            f"and {batch.target} on the target, and neither number divides the other; what would "
            f"do: {_fitting(batch.target, batch.source)} on the source, or "
            f"{_fitting(batch.source, batch.target)} on the target"
        )


def _fitting(other: int, near: int) -> str:
    """Name the numbers around `near` that divide `other` or are multiples of it."""
    fitting = [*divisors(other), near // other * other, (near // other + 1) * other]
    below = [max((size for size in fitting if 0 < size < near), default=None)]
    above = [min(size for size in fitting if size > near)]
    return " or ".join(str(size) for size in below + above if size is not None)
