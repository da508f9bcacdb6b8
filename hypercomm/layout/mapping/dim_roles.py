"""What each dim does when a tensor moves between layouts: it splits the batch, cuts an axis, ..."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from hypercomm.errors import LayoutError, UnknownDimError
from hypercomm.layout.rank_layout import RankLayout
from hypercomm.layout.reading.checks import as_int, as_ordered
from hypercomm.layout.reading.shown import shown
from hypercomm.layout.reading.sizes import divisors

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


ZIGZAG = "zigzag"

Axis = int | tuple[str, int]
"""A tensor axis that is cut in contiguous blocks, or ("zigzag", axis)."""

Shards = tuple[tuple[str, Axis], ...]
"""Which dim cuts which axis."""


def as_shards(value: object, sequence: int) -> Shards:
    """Read which dim cuts which tensor axis, from a mapping or from pairs.

    Args:
        value: What is read; "zigzag" alone is of the axis of the sequence.
        sequence: That axis.

    Raises:
        LayoutError: It is neither, a dim is no string, or an axis no int.

    Example:
        >>> as_shards({"cp": "zigzag", "tp": -1}, sequence=1)
        (('cp', ('zigzag', 1)), ('tp', -1))
    """
    pairs = as_ordered(tuple(value.items()) if isinstance(value, Mapping) else value, "shards")
    shards: list[tuple[str, Axis]] = []
    for pair in pairs:
        if not isinstance(pair, tuple) or len(pair) != 2:
            raise LayoutError(
                f"shards must map dims to tensor axes, as in {{'cp': 1}}, got {shown(value)}"
            )
        dim = as_dim(pair[0], "every dim in shards")
        shards.append((dim, _as_axis(pair[1], sequence, f"the axis of dim {dim!r} in shards")))
    return tuple(shards)


def _as_axis(value: object, sequence: int, what: str) -> Axis:
    if isinstance(value, str):
        if value != ZIGZAG:
            raise LayoutError(
                f"{what} must be an int, {ZIGZAG!r} or ({ZIGZAG!r}, axis), got {shown(value)}"
            )
        return ZIGZAG, sequence
    if isinstance(value, (tuple, list)) and len(value) == 2 and value[0] == ZIGZAG:
        return ZIGZAG, as_int(value[1], what)
    return as_int(value, what)


def zigzag_dims(shards: Shards) -> tuple[str, ...]:
    """Return the dims that cut in zigzag.

    Example:
        >>> zigzag_dims((("cp", ("zigzag", 1)), ("tp", -1)))
        ('cp',)
    """
    return tuple(dim for dim, axis in shards if isinstance(axis, tuple))


def dims_of_axes(along: str | None, batch_axis: int, shards: Shards) -> dict[int, tuple[str, ...]]:
    """Tell which dims cut each tensor axis, outermost first; the batch's axis first.

    Example:
        >>> dims_of_axes("dp", 0, (("cp", 1), ("tp", 0)))
        {0: ('dp', 'tp'), 1: ('cp',)}
    """
    axes: dict[int, tuple[str, ...]] = {}
    batch = [] if along is None else [(along, batch_axis)]
    plain = [(dim, axis[1] if isinstance(axis, tuple) else axis) for dim, axis in shards]
    for dim, axis in (*batch, *plain):
        axes[axis] = (*axes.get(axis, ()), dim)
    return axes


def roles_of(named: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return the role of each dim, from pairs of role and dim; refuses a dim that has two."""
    roles: dict[str, str] = {}
    for role, dim in named:
        if dim in roles:
            raise LayoutError(
                f"dim {shown(dim)} is named by {roles[dim]} and by {role}; a dim has one role"
            )
        roles[dim] = role
    return roles


def check_roles(
    source: RankLayout,
    target: RankLayout,
    along: str | None,
    batch_axis: int,
    shards: Shards,
    pipeline: str | None,
) -> None:
    """Check that each dim has one role, and that no typing mistake makes a dim of size 1.

    Raises:
        LayoutError: A dim is named twice, or neither size along the batch is a multiple of the
            other.
        UnknownDimError: Neither layout has a dim, and no default names it; or neither has `along`,
            while a dim without a role would replicate what was perhaps to be split.

    Example:
        >>> layout = RankLayout.parse("tp=2,dp=2")
        >>> check_roles(layout, layout, "dp", 0, (("tp", -1),), "pp")
    """
    for dim in zigzag_dims(shards):
        if along is not None and dict(shards)[dim] == (ZIGZAG, batch_axis):
            raise LayoutError(
                f"dim {dim!r} in shards cuts axis {batch_axis} in zigzag, which is the batch's; "
                f"give the axis of the sequence, as in {{{dim!r}: ({ZIGZAG!r}, 1)}}"
            )
    named = [("along", along), *(("shards", dim) for dim, _ in shards), ("pipeline", pipeline)]
    known = {*source.dim_names, *target.dim_names, *_MAY_LACK}
    roles = roles_of((role, dim) for role, dim in named if dim is not None)
    for dim, role in roles.items():
        if dim not in known:
            raise UnknownDimError(
                f"{role} names dim {dim!r}, which neither layout has; the source has dims "
                f"{source.dim_names}, the target {target.dim_names}"
            )
    idle = replicating(source, target, roles)
    if along is not None and along not in {*source.dim_names, *target.dim_names} and idle:
        raise UnknownDimError(
            f"along names dim {along!r}, which neither layout has, so that dims {idle} would "
            f"replicate the whole tensor; give along={idle[0]!r} if that one splits the batch, "
            f"along=None if nothing does, or shards={{{idle[0]!r}: axis}} if it cuts another axis"
        )
    before, after = (
        1 if along is None else each.size_of(along, default=1) for each in (source, target)
    )
    if before % after and after % before:
        raise LayoutError(
            f"the batch is cut along {along} into {before} shards on the source and {after} on "
            f"the target, and neither number divides the other; what would do: "
            f"{_fitting(after, before)} on the source, or {_fitting(before, after)} on the target"
        )


def replicating(
    source: RankLayout, target: RankLayout, roles: Collection[str | None]
) -> tuple[str, ...]:
    """Return the dims larger than 1, of either layout, that have none of the roles.

    Example:
        >>> replicating(RankLayout.parse("tp=2,cp=1,dp=2"), RankLayout.parse("ep=3"), {"dp"})
        ('tp', 'ep')
    """
    dims = dict.fromkeys((*source.dim_names, *target.dim_names))
    sizes = {
        dim: max(source.size_of(dim, default=1), target.size_of(dim, default=1)) for dim in dims
    }
    return tuple(dim for dim, size in sizes.items() if size > 1 and dim not in roles)


def _fitting(other: int, near: int) -> str:
    """Name the numbers around `near` that divide `other` or are multiples of it."""
    fitting = [*divisors(other), near // other * other, (near // other + 1) * other]
    below = [max((size for size in fitting if 0 < size < near), default=None)]
    above = [min(size for size in fitting if size > near)]
    return " or ".join(str(size) for size in below + above if size is not None)
