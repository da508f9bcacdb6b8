"""Functions that check arguments.

Each function raises an error that names the argument if its value is wrong. The functions `as_...`
return the value in canonical form.
"""

from __future__ import annotations

import math
import operator
import re
from collections import Counter
from collections.abc import Mapping, Sequence, Set as AbstractSet
from datetime import timedelta
from numbers import Real
from typing import Any

import numpy as np

from hypercomm.errors import (
    GroupOptionsError,
    HyperCommError,
    LayoutError,
    RankOutsideError,
    WorldSizeError,
)
from hypercomm.layout.text import did_you_mean, short_repr

LARGEST_WORLD = 2**24
"""The largest world size, and the most ranks that are enumerated for a check or a comparison."""

LARGEST_RANK = 2**31 - 1
"""The largest rank, because torch numbers ranks with a C int."""

_SEPARATORS = ",=+-"
"""Characters that have a meaning in the text forms. A dim name cannot contain them."""

LONGEST_NAME = 255
"""The most characters of a name, because names are parts of keys in the job's store."""


# ---- numbers, choices ---------------------------------------------------------------------------


def as_int(
    value: object,
    what: str,
    least: int | None = None,
    most: int | None = None,
    error: type[HyperCommError] = LayoutError,
) -> int:
    """Return an int, a numpy integer or an int tensor of one element as an int.

    Args:
        value: The value.
        what: The name of the value, which begins the error message.
        least: The smallest allowed value.
        most: The largest allowed value.
        error: The class of the error.
    """
    try:
        number = operator.index(value)  # type: ignore[arg-type]
        is_int = not isinstance(value, bool)
    except TypeError:
        is_int = False
    if not is_int:
        raise error(f"{what} must be an int, got {short_repr(value)}")
    if least is not None and number < least:
        raise error(f"{what} must be at least {least}, got {short_repr(number)}")
    if most is not None and number > most:
        raise error(f"{what} must be at most {most}, got {short_repr(number)}")
    return number


def positive(value: object, what: str) -> int:
    """Return an integer of at least 1 as an int."""
    return as_int(value, what, 1)


def as_rank(rank: object) -> int:
    """Return a rank as an int. numpy integers and int tensors are accepted, bools are rejected."""
    return rank if type(rank) is int else as_int(rank, "a rank", error=RankOutsideError)


def as_world_size(value: object, what: str = "world_size") -> int:
    """Return the size of a world as an int."""
    return as_int(value, what, 1, LARGEST_WORLD)


def check_choice(
    what: str,
    value: object,
    choices: Sequence[str],
    error: type[HyperCommError] = GroupOptionsError,
) -> None:
    """Raise unless a value is one of the given strings.

    Raises:
        HyperCommError: The value is none of the strings. The error is of the class `error`.

    Example:
        >>> check_choice("cover", "any", ("any", "exact"))
    """
    if not isinstance(value, str) or value not in choices:
        hint = did_you_mean(value, choices)
        raise error(f"{what} must be one of {list(choices)}, got {short_repr(value)}{hint}")


def check_duration(timeout: object, what: str = "timeout") -> None:
    """Raise unless a timeout is a positive `timedelta`. `what` is the name of the argument.

    Raises:
        GroupOptionsError: The timeout is not a `timedelta`, or is not positive.

    Example:
        >>> check_duration(timedelta(seconds=1))
    """
    if not isinstance(timeout, timedelta):
        hint = "write timedelta(seconds=...)"
        raise GroupOptionsError(
            f"{what} must be a datetime.timedelta, got {short_repr(timeout)}; {hint}"
        )
    if timeout <= timedelta(0):
        raise GroupOptionsError(f"{what} must be longer than 0, got {timeout}")


def is_positive(value: object, most: float = math.inf) -> bool:
    """Return whether a value is a number larger than 0 and at most `most`.

    >>> is_positive(1.5), is_positive(timedelta(seconds=1)), is_positive(math.nan)
    (True, False, False)
    """
    return isinstance(value, Real) and bool(0 < value <= most)  # type: ignore[operator]


def world_too_small(what: str, last_rank: int, world_size: int, hint: str = "") -> WorldSizeError:
    """Return the error for a layout with ranks outside its world.

    Example:
        >>> print(world_too_small("tp=4,dp=4", 15, 8))
        tp=4,dp=4 needs 16 ranks; the world has 8
    """
    here = f"the world has {world_size}"
    return WorldSizeError(f"{what} needs {last_rank + 1} ranks; {here}{hint}")


def is_utf8(text: str) -> bool:
    r"""Return whether a string can be encoded as UTF-8. torch encodes all names in this way.

    >>> is_utf8("é"), is_utf8("\ud800")
    (True, False)
    """
    return text.encode(errors="ignore").decode() == text


# ---- several items ------------------------------------------------------------------------------


def as_tuple(value: object, what: str) -> tuple[Any, ...]:
    """Return an iterable of names or sizes as a tuple, but reject a string or a mapping."""
    if not isinstance(value, (str, bytes, Mapping)):
        try:
            return tuple(value)  # type: ignore[arg-type]
        except TypeError:
            pass
    raise LayoutError(f"{what} must be a sequence, got {short_repr(value)}")


def as_ordered(value: object, what: str) -> tuple[Any, ...]:
    """Return an iterable as a tuple, but reject a set, which has no order."""
    if isinstance(value, AbstractSet):
        raise LayoutError(f"{what} must be a sequence, but a set has no order: {short_repr(value)}")
    return as_tuple(value, what)


def as_strings(value: object, what: str) -> tuple[str, ...]:
    """Return an ordered iterable of strings as a tuple."""
    strings = as_ordered(value, what)
    for string in strings:
        if not isinstance(string, str):
            raise LayoutError(
                f"{what} must contain strings, got {short_repr(string)} in {short_repr(strings)}"
            )
    return strings


def as_ranks(value: object, what: str, world_size: int = LARGEST_RANK + 1) -> tuple[int, ...]:
    """Return one or more distinct ranks of a world as a tuple, in the order given."""
    if isinstance(value, np.ndarray) and value.ndim == 1:
        value = value.tolist()
    every = f"every rank in {what}"
    given = as_ordered(value, what)
    ranks = tuple([rank if type(rank) is int else as_int(rank, every) for rank in given])
    if not ranks:
        raise LayoutError(f"{what} must have at least one rank, but it is empty")
    if min(ranks) >= 0 and max(ranks) < world_size and len({*ranks}) == len(ranks):
        return ranks
    for rank, count in Counter(ranks).items():
        if not 0 <= rank < world_size:
            allowed = f"range({world_size})" if world_size <= LARGEST_RANK else "0 to 2**31 - 1"
            raise LayoutError(f"every rank in {what} must be in {allowed}, got {short_repr(rank)}")
        if count > 1:
            raise LayoutError(f"rank {rank} is listed twice in {what}: {short_repr(ranks)}")
    return ranks


def as_sizes(value: object, what: str = "shape") -> tuple[int, ...]:
    """Return the sizes of a shape, each at least 1."""
    sizes = as_ordered(value, what)
    return tuple([positive(size, f"every size in {what} {short_repr(sizes)}") for size in sizes])


def as_names(value: object, what: str = "dim name") -> tuple[str, ...]:
    """Return names as a tuple. They must be distinct, without the characters `_SEPARATORS`."""
    plural = f"{what.replace(' ', '_')}s"
    if isinstance(value, str):
        given = re.findall(r"[^\s,+-]+", value)
        raise LayoutError(f"{plural} must be a sequence, got {short_repr(value)}; write {given}")
    names = as_ordered(value, plural)
    for name in names:
        if not isinstance(name, str) or not name:
            wrong = f"every {what} must be a non-empty string, got {short_repr(name)}"
        elif not name.isprintable() or {*name} & {*_SEPARATORS, " "}:
            allowed = f"must be printable, without white space and without any of {_SEPARATORS!r}"
            wrong = f"every {what} {allowed}, got {short_repr(name)}"
        elif len(name) > LONGEST_NAME:
            wrong = f"every {what} must have at most {LONGEST_NAME} characters, got {len(name)}"
        elif names.count(name) > 1:
            wrong = f"duplicate {plural} (name each dim once): {name!r} is listed twice"
        else:
            continue
        raise LayoutError(f"{wrong} in {short_repr(names)}")
    return names
