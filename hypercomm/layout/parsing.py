"""Functions that read text: sizes as "tp=2,dp=4", orders as "tp-cp-dp" and dims as "tp,dp+cp".

`read_sizes` reads sizes in every form, and `infer_sizes` infers an unspecified size.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from hypercomm.errors import LayoutError, WorldSizeError
from hypercomm.layout.checks import (
    LARGEST_WORLD,
    as_int,
    as_names,
    as_ordered,
    positive,
)
from hypercomm.layout.text import format_sizes, short_repr

UNSPECIFIED = -1
"""The size of a dim that is inferred from the world size."""

VARIABLE = "HYPERCOMM_LAYOUT"
"""The environment variable with the sizes of a job's layout."""

Dims = str | Iterable["Dims"]
"""Dims as a name, as text or as an iterable: "tp", "dp+cp", ["dp", "cp"]."""

_SIZE = re.compile(r"\s*(?:([^\s,=+-]+)\s*=\s*(-1|[0-9]{1,18})|([^\W\d](?:\w*[^\W\d])?))\s*")
"""Matches "tp=2" or "tp", but not "tp8": a name without a size does not end with a digit."""

_KEYWORDS = ("dim_names", "rank_offset", "world_size", "strides")


# ---- text ---------------------------------------------------------------------------------------


def parse_sizes(text: str) -> dict[str, int]:
    """Read "tp=2,cp=3,dp=4" into sizes by dim name, in the same order.

    A size of -1, or a name without a size, is unspecified (`UNSPECIFIED`). A name without a size
    is a word that does not end with a digit.

    Raises:
        LayoutError: A part cannot be read, or a name is wrong or is given twice.

    >>> parse_sizes("tp=2, cp=3, dp")
    {'tp': 2, 'cp': 3, 'dp': -1}
    """
    if not isinstance(text, str):
        raise LayoutError(f"expected a text like 'tp=2,dp=4', got {short_repr(text)}")
    names, sizes = [], []
    for part in text.split(","):
        match = _SIZE.fullmatch(part)
        size = int(match[2] or UNSPECIFIED) if match else 0
        if not match or size == 0:
            where = "" if part == text else f" in {short_repr(text)}"
            raise LayoutError(
                f"{short_repr(part.strip())}{where} cannot be read as a size; write positive "
                f"sizes, or -1, and separate sizes with commas, as in 'tp=2,dp=4'"
            )
        names.append(match[1] or match[3])
        sizes.append(size)
    return dict(zip(as_names(names), sizes, strict=True))


def parse_order(text: str) -> tuple[str, ...]:
    """Read "tp-cp-ep-dp-pp" into dim names, the first one varying fastest.

    Raises:
        LayoutError: A name is empty or is given twice.

    >>> parse_order("tp-cp-dp")
    ('tp', 'cp', 'dp')
    """
    names = _split(text, "-", "tp-cp-dp")
    if len(set(names)) < len(names):
        raise LayoutError(f"order {short_repr(text)} must name each dim once, as in 'tp-cp-dp'")
    return names


def parse_groups(text: str) -> list[tuple[str, ...]]:
    """Read "tp,dp+cp" into one tuple of dims for each set of groups.

    Raises:
        LayoutError: A part is empty or is given twice.

    >>> parse_groups("tp,dp+cp")
    [('tp',), ('dp', 'cp')]
    """
    wanted = [split_dims(part) for part in _split(text, ",", "tp,dp+cp")]
    if len(set(map(frozenset, wanted))) < len(wanted):
        raise LayoutError(f"groups are listed twice in {short_repr(text)}; list them once")
    return wanted


def split_dims(text: str) -> tuple[str, ...]:
    """Read the dims of one set of groups: "dp+cp", or in Megatron's spelling, "dp-cp".

    Raises:
        LayoutError: A name is empty, or the text has commas, which separate several sets.

    >>> split_dims("dp+cp"), split_dims("tp")
    (('dp', 'cp'), ('tp',))
    """
    if "," in text:
        joined = "+".join(map(str.strip, text.split(",")))
        each = ", ".join(repr(part.strip()) for part in text.split(","))
        raise LayoutError(
            f"{short_repr(text)} names several sets of groups; write {joined!r} for one set, or "
            f"{each} for several"
        )
    dims = tuple(map(str.strip, re.split("[+-]", text)))
    if "" in dims:
        raise LayoutError(f"{short_repr(text)} lacks a dim name; write dims like 'dp+cp'")
    return dims


def _split(text: str, separator: str, example: str) -> tuple[str, ...]:
    """Return the names in a text, without the white space around them."""
    if not isinstance(text, str):
        raise LayoutError(f"expected a text like {example!r}, got {short_repr(text)}")
    names = tuple(map(str.strip, text.split(separator)))
    if "" in names:
        raise LayoutError(f"{short_repr(text)} lacks a dim name; write it like {example!r}")
    return names


def as_dims(value: object) -> tuple[Any, ...]:
    """Return dims as a tuple. They may be a name, "dp+cp", "dp-cp", or iterables of these.

    Raises:
        LayoutError: The value is not of this form, or a name is empty.

    Example:
        >>> as_dims("dp+cp"), as_dims(["dp", "cp"]), as_dims((["dp", "cp"],))
        (('dp', 'cp'), ('dp', 'cp'), ('dp', 'cp'))
    """
    if isinstance(value, str):
        return split_dims(value)
    if type(value) is not tuple and (isinstance(value, Mapping) or not isinstance(value, Iterable)):
        raise LayoutError(
            f"dims must be names, as in 'tp' or ['tp', 'dp'], got {short_repr(value)}"
        )
    found: list[Any] = []
    for item in value:
        if isinstance(item, str):
            found += split_dims(item)
        else:
            found += as_dims(item) if isinstance(item, Iterable) else [item]
    return tuple(found)


# ---- sizes --------------------------------------------------------------------------------------


def read_sizes(
    sizes: object, dim_names: Iterable[str] | None = None, dims: Mapping[str, int] | None = None
) -> dict[str, int]:
    """Read sizes in any form, and return them by dim name. Each size may be unspecified.

    Args:
        sizes: "tp=2,dp=4", {"tp": 2, "dp": 4}, or [2, 4] with `dim_names`.
        dim_names: The names of the dims, if `sizes` is a list.
        dims: Sizes by keyword, in place of `sizes` and `dim_names`.

    Raises:
        LayoutError: Sizes are given twice or are missing, or a size or a name is wrong.
        TypeError: A keyword is a misspelt argument, such as `rank_ofset`.

    Example:
        >>> read_sizes("tp=2,dp") == read_sizes([2, -1], ["tp", "dp"]) == {"tp": 2, "dp": -1}
        True
    """
    if dims:
        check_spelling(dims)
        if sizes is not None or dim_names is not None:
            raise LayoutError(
                f"sizes are given twice: {short_repr(sizes)} and, by name, "
                f"{short_repr(dict(dims))}; omit one of them"
            )
        sizes = dims
    if isinstance(sizes, (str, Mapping)):
        if dim_names is not None:
            raise LayoutError(
                f"the sizes {short_repr(sizes)} already name the dims; omit dim_names, which is "
                f"{short_repr(dim_names)}"
            )
        if isinstance(sizes, str):
            return parse_sizes(sizes)
        dim_names = tuple(sizes)
        sizes = tuple(sizes.values())
    if dim_names is None or sizes is None:
        missing = "sizes" if sizes is None else "dim_names"
        example = "give 'tp=2,dp=4', or ([2, 4], ['tp', 'dp'])"
        raise LayoutError(f"{missing} are missing: {example}, got {short_repr(sizes)}")
    names = as_names(dim_names)
    shape = as_ordered(sizes, "shape")
    if len(shape) != len(names):
        given = f"len(shape) {short_repr(list(shape))} != len(dim_names) {short_repr(list(names))}"
        raise LayoutError(f"{given}; give one size for each name")
    if not names:
        raise LayoutError("a layout needs at least one dim, but shape and dim_names are empty")
    return {name: as_size(name, size) for name, size in zip(names, shape, strict=True)}


def check_spelling(keywords: Iterable[str]) -> None:
    """Raise TypeError if the name of a dim is nearly the name of an argument."""
    for name in keywords:
        if near := difflib.get_close_matches(name, _KEYWORDS, 1, 0.8):
            raise TypeError(f"unexpected keyword argument {name!r}; did you mean {near[0]!r}?")


def sizes_of_environment() -> dict[str, int]:
    """Return the sizes in the environment variable HYPERCOMM_LAYOUT.

    Raises:
        LayoutError: The variable is not set, or cannot be read.
    """
    text = os.environ.get(VARIABLE)
    if text is None:
        raise LayoutError(f"sizes are missing: give 'tp=2,dp=-1', or set {VARIABLE}")
    try:
        return parse_sizes(text)
    except LayoutError as error:
        raise LayoutError(f"the environment's {VARIABLE}: {error}") from error


def infer_sizes(
    sizes: Mapping[str, int],
    world_size: int | None,
    room: str = "",
    source: str = ", or give world_size=, the number of ranks",
) -> dict[str, int]:
    """Infer the unspecified size, if there is one, so that the product is `world_size`.

    Args:
        sizes: Sizes by name, as `read_sizes` returns them.
        world_size: The required product of all sizes. If it is None, all sizes must be given.
        room: A clause for the error that explains `world_size`. Default: as in "the world has 8".
        source: A clause for the error about an unknown `world_size` that says how to give it.

    Raises:
        LayoutError: Several sizes are unspecified, or a size is unspecified and `world_size` is
            None.
        WorldSizeError: All sizes are given, and their product is not `world_size`. Or one size is
            unspecified, and the product of the others does not divide `world_size`.

    >>> infer_sizes({"tp": 2, "dp": -1}, 8)
    {'tp': 2, 'dp': 4}
    >>> infer_sizes({"tp": 3, "dp": 1}, 8)
    Traceback (most recent call last):
    hypercomm.errors.WorldSizeError: tp=3,dp=1 needs 3 ranks; the world has 8; tp=8 would fit
    """
    unknown = check_one_unspecified([name for name, size in sizes.items() if size == UNSPECIFIED])
    known = known_size(sizes)
    if world_size is None:
        if unknown is None:
            return dict(sizes)
        raise LayoutError(
            f"the size of dim {short_repr(unknown)} is unspecified; give it, as in "
            f"{short_repr(f'{unknown}=2')}{source}"
        )
    rest, remainder = divmod(positive(world_size, "world_size"), known)
    if remainder or rest == 0 or (rest > 1 and unknown is None):
        needs = f"{known} ranks"
        if unknown is not None:
            near = nearest_multiples(world_size, known)
            needs = f"a multiple of {known} ranks, for example {near}"
        here = room or f"the world has {world_size}"
        raise WorldSizeError(
            f"{format_sizes(sizes)} needs {needs}; {here}{would_fit(sizes, world_size)}"
        )
    return {name: rest if size == UNSPECIFIED else size for name, size in sizes.items()}


def would_fit(sizes: Mapping[str, int], world_size: int) -> str:
    """Return a clause with the sizes that would fit a number of ranks, or an empty text.

    Each size is the one closest to the given size, if the other sizes stay as they are.

    >>> would_fit({"tp": 2, "dp": 4}, 16), would_fit({"tp": 3, "dp": -1}, 8)
    ('; tp=4 or dp=8 would fit', '; tp=2 would fit')
    """
    found = []
    is_open = UNSPECIFIED in sizes.values()
    for name, before in sizes.items():
        rest, remainder = divmod(world_size, known_size(sizes) // abs(before))
        if before in {1, UNSPECIFIED} or remainder or rest == 0 or world_size > LARGEST_WORLD:
            continue
        fitting = divisors(rest) if is_open else [rest]
        found.append(f"{name}={min(fitting, key=lambda size: abs(size - before))}")
    return f"; {' or '.join(found)} would fit" if found else ""


def check_one_unspecified(names: Sequence[str]) -> str | None:
    """Return the dim with an unspecified size, or None if there is none.

    Args:
        names: The dims with an unspecified size.

    Raises:
        LayoutError: There are several such dims.

    >>> check_one_unspecified(["dp"])
    'dp'
    """
    if len(names) > 1:
        example = short_repr(f"{names[0].split()[0]}=2")  # a name may be "tp of a", of a set
        raise LayoutError(
            f"only one size can be inferred, but the sizes of {short_repr(list(names))} are "
            f"unspecified; give all but one, as in {example}"
        )
    return names[0] if names else None


def known_size(sizes: Mapping[str, int]) -> int:
    """Return the product of the sizes that are specified.

    >>> known_size({"tp": 2, "dp": -1, "pp": 3})
    6
    """
    return abs(math.prod(sizes.values()))  # an unspecified size is -1


def as_size(name: str, size: object) -> int:
    """Return the size of one dim as an int. It may be `UNSPECIFIED`."""
    what = f"the size of dim {name!r}"
    number = as_int(size, what)
    return number if number >= 1 or number == UNSPECIFIED else positive(number, what)


def nearest_multiples(number: int, factor: int) -> str:
    """Format the positive multiples of `factor` below and above `number`, for error messages.

    >>> nearest_multiples(10, 4)
    '8 or 12'
    """
    below = number // factor * factor
    return f"{below} or {below + factor}" if below > 0 else f"{factor}"


def divisors(number: int) -> list[int]:
    """Return the divisors of a positive integer in ascending order.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    small = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    large = [number // divisor for divisor in reversed(small)]
    return small + large[small[-1] == large[0] :]
