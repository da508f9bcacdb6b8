"""What the strategies of hypercomm.testing may be asked for: each rule in one place."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypedDict

try:
    from hypothesis import strategies as st
    from hypothesis.errors import InvalidArgument
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "the strategies of hypercomm.testing need hypothesis: pip install 'hypercomm[testing]'",
        name="hypothesis",
    ) from error

from hypercomm.errors import LayoutError, UnknownDimError
from hypercomm.layout import RankLayout
from hypercomm.layout.checks import as_strings
from hypercomm.layout.text import did_you_mean, shown

__all__ = [
    "InvalidArgument",
    "LayoutBounds",
    "check_layout",
    "names_to_draw",
    "required_dims",
    "st",
]


class LayoutBounds(TypedDict, total=False):
    """The bounds of `layouts` that other strategies take, too."""

    min_dims: int
    max_dims: int | None
    min_size: int
    max_size: int
    max_ranks: int
    dim_names: Sequence[str]
    dims_required: Sequence[str]


def names_to_draw(value: object, what: str) -> tuple[str, ...]:
    """Read names, which are read anew for each example: no iterator, which has them once.

    Raises:
        LayoutError: It is no sequence of strings; `what` begins its sentence.

    Example:
        >>> names_to_draw(["tp", "dp"], "dim_names")
        ('tp', 'dp')
    """
    if isinstance(value, Iterator):
        raise LayoutError(
            f"{what} must be a sequence, which is read for each example, got {shown(value)}"
        )
    return as_strings(value, what)


def required_dims(
    names: object, known: Sequence[str], what: str = "dims_required"
) -> tuple[str, ...]:
    """Check that dims are among those that can be drawn, each named once.

    Raises:
        LayoutError: `names` is no sequence of strings; `what` begins its sentence.
        UnknownDimError: One is not among those known.
        InvalidArgument: One is named twice.
    """
    required = names_to_draw(names, what)
    for name in required:
        if name not in known:
            raise UnknownDimError(
                f"{what} names {name!r}, which is not among {tuple(known)}"
                f"{did_you_mean(name, known)}"
            )
    if len(set(required)) < len(required):
        raise InvalidArgument(f"a layout cannot have a dim twice, as in {what}={required}")
    return required


def check_layout(layout: object) -> None:
    """Refuse what is no layout.

    Raises:
        LayoutError: Shows it.
    """
    if not isinstance(layout, RankLayout):
        raise LayoutError(f"layout must be a RankLayout, got {shown(layout)}")
