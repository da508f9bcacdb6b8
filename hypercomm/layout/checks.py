"""What a size, a name, an offset and a rank may be: each rule in one place."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Set as AbstractSet
from typing import Any

import numpy as np

from hypercomm.errors import LayoutError, RankOutsideError
from hypercomm.layout.notation import SEPARATORS


def as_int(value: object, what: str) -> int:
    """Return an int or numpy integer as an int; `what` begins the error's sentence."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise LayoutError(f"{what} must be an int, got {value!r}")
    return int(value)


def positive(value: object, what: str) -> int:
    """Return an integer of at least 1 as an int."""
    number = as_int(value, what)
    if number < 1:
        raise LayoutError(f"{what} must be at least 1, got {number}")
    return number


def as_tuple(value: object, what: str) -> tuple[Any, ...]:
    """Read an iterable of names or sizes; a lone string or a mapping is a mistake."""
    lone = isinstance(value, (str, bytes, Mapping)) or getattr(value, "shape", None) == ()
    if isinstance(value, Iterable) and not lone:  # numpy's scalars look iterable
        return tuple(value)
    raise LayoutError(f"{what} must be a sequence, got {value!r}")


def as_ordered(value: object, what: str) -> tuple[Any, ...]:
    """Read an iterable whose order means something."""
    if isinstance(value, AbstractSet):
        raise LayoutError(f"{what} must be a sequence, and a set has no order: {value!r}")
    return as_tuple(value, what)


def as_sizes(value: Iterable[int]) -> tuple[int, ...]:
    """Read the sizes of a shape."""
    sizes = as_ordered(value, "shape")
    return tuple(positive(size, f"every size in shape {sizes}") for size in sizes)


def as_strides(value: Iterable[int]) -> tuple[int, ...]:
    """Read strides."""
    strides = as_ordered(value, "strides")
    return tuple(positive(stride, f"every stride in {strides}") for stride in strides)


def as_names(value: Iterable[str]) -> tuple[str, ...]:
    """Read dim names."""
    names = as_ordered(value, "dim_names")
    for position, name in enumerate(names):
        if not isinstance(name, str) or not name:
            raise LayoutError(f"every dim name must be a non-empty string, got {name!r} in {names}")
        if any(char in SEPARATORS or char.isspace() for char in name):
            raise LayoutError(
                f"dim name {name!r} must hold no white space and none of "
                f"{SEPARATORS!r}, which the text forms use"
            )
        if name in names[:position]:
            raise LayoutError(f"dim name {name!r} comes twice in {names}")
    return names


def as_offset(value: int) -> int:
    """Read a rank offset."""
    offset = as_int(value, "rank_offset")
    if offset < 0:
        raise LayoutError(f"rank_offset must be non-negative, got {offset}")
    return offset


def as_rank(rank: object) -> int:
    """Return `rank` as an int; numpy integers are ints, bools and floats are not ranks."""
    if type(rank) is int:
        return rank
    if isinstance(rank, np.integer):
        return int(rank)
    raise RankOutsideError(f"a rank is an int, got {rank!r}")
