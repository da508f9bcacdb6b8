"""Which dims of a layout play which of the parts that DeepSpeed knows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from hypercomm.errors import LayoutError
from hypercomm.layout import RankLayout
from hypercomm.layout.checks import as_tuple
from hypercomm.layout.mapping import roles_of
from hypercomm.layout.text import shown

Dims = str | Iterable[str] | None
"""What plays a part: a dim, several, or none."""


def read_roles(layout: RankLayout, given: Mapping[str, Dims]) -> dict[str, tuple[str, ...]]:
    """Read which dims play which part; those that the layout lacks have size 1, and are left out.

    Args:
        layout: Whose dims they are.
        given: The dims of each part, by the name of the argument.

    Returns:
        For each part its dims, in the order of the layout; perhaps none.

    Raises:
        LayoutError: An argument names no dims, a dim plays two parts, or one that is larger than 1
            plays none.

    Example:
        >>> layout = RankLayout.parse("tp=2,cp=2,dp=4")
        >>> read_roles(layout, {"tp": "tp", "pp": "pp", "dp": ["dp", "cp"]})
        {'tp': ('tp',), 'pp': (), 'dp': ('cp', 'dp')}
    """
    named = {part: _names(part, dims) for part, dims in given.items()}
    part_of = roles_of((f"{part}=", name) for part, names in named.items() for name in names)
    for name, size in layout.sizes.items():
        if size > 1 and name not in part_of:
            parts = ", ".join(f"{part}={shown(dims)}" for part, dims in given.items())
            raise LayoutError(
                f"dim {name!r} of size {size} plays no part in {parts}, so DeepSpeed would not "
                f"keep its ranks alike; name it in one, as in dp=('dp', {name!r})"
            )
    return {
        part: tuple(name for name in layout.dim_names if name in names)
        for part, names in named.items()
    }


def _names(part: str, dims: object) -> tuple[str, ...]:
    """The names that an argument holds, each once."""
    if dims is None:
        return ()
    try:
        names = (dims,) if isinstance(dims, str) else as_tuple(dims, part)
    except LayoutError:
        names = (None,)
    if not all(isinstance(name, str) for name in names):
        raise LayoutError(
            f"{part} must be a dim, several or None, as in {part}='dp' or {part}=('dp', 'cp'), "
            f"got {shown(dims)}"
        )
    return tuple(dict.fromkeys(names))
