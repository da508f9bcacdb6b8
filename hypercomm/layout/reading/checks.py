"""What a size, a name, an offset and a rank may be: each rule in one place."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence, Sized
from collections.abc import Set as AbstractSet
from datetime import timedelta
from itertools import islice
from typing import Any

import numpy as np

from hypercomm.errors import (
    GroupOptionsError,
    HyperCommError,
    LayoutError,
    RankOutsideError,
    WorldSizeError,
)
from hypercomm.layout.reading.notation import SEPARATORS, split_dims
from hypercomm.layout.reading.shown import did_you_mean, shown

LARGEST_WORLD = 2**24
"""The most ranks that a world has; what makes one would take minutes, and more memory, for more."""

LARGEST_RANK = 2**31 - 1
"""torch numbers ranks with a C int."""

_MOST_DIMS = 64
"""The most dims that a layout has: as many as an array of numpy."""

_MOST_ITEMS = LARGEST_WORLD
"""The most items that are read from what is no list; it may have no end."""

_LARGEST_INT = 2**63 - 1


def as_int(value: object, what: str) -> int:
    """Return an int or numpy integer as an int; `what` begins the error's sentence."""
    if type(value) is int and -_LARGEST_INT <= value <= _LARGEST_INT:
        return value
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise LayoutError(f"{what} must be an int, got {shown(value)}")
    if not -_LARGEST_INT <= value <= _LARGEST_INT:
        raise LayoutError(f"{what} must be an int of 64 bits, got {shown(value)}")
    return int(value)


def positive(value: object, what: str) -> int:
    """Return an integer of at least 1 as an int."""
    number = as_int(value, what)
    if number < 1:
        raise LayoutError(f"{what} must be at least 1, got {number}")
    return number


def as_flag(value: object, what: str, error: type[HyperCommError] = LayoutError) -> bool:
    """Read True or False; `what` begins the error's sentence.

    Raises:
        HyperCommError: It is neither; the error is one of the class given.

    Example:
        >>> as_flag(True, "leaders")
        True
    """
    if not isinstance(value, (bool, np.bool_)):
        raise error(f"{what} must be True or False, got {shown(value)}")
    return bool(value)


def check_choice(
    what: str,
    value: object,
    choices: Sequence[str],
    error: type[HyperCommError] = GroupOptionsError,
) -> None:
    """Refuse what is none of some words; `what` begins the error's sentence.

    Raises:
        HyperCommError: With the words; the error is one of the class given.

    Example:
        >>> check_choice("cover", "any", ("any", "exact"))
    """
    if not isinstance(value, str) or value not in choices:
        raise error(
            f"{what} must be one of {list(choices)}, got {shown(value)}"
            f"{did_you_mean(value, choices)}"
        )


def check_duration(what: str, value: object, error: type[HyperCommError]) -> None:
    """Refuse what is no length of time larger than 0; `what` begins the error's sentence.

    Raises:
        HyperCommError: Says what is one; the error is one of the class given.

    Example:
        >>> check_duration("timeout", timedelta(seconds=1), GroupOptionsError)
    """
    if not isinstance(value, timedelta):
        raise error(
            f"{what} must be a datetime.timedelta, got {shown(value)}; write timedelta(seconds=...)"
        )
    if value <= timedelta(0):
        raise error(f"{what} must be longer than 0, got {value}")


def world_too_small(what: str, last_rank: int, world_size: int) -> WorldSizeError:
    """Return the error that something needs ranks which the world does not have.

    Example:
        >>> print(world_too_small("the grid", 9, 8))  # doctest: +ELLIPSIS
        the grid needs ranks up to 9, but the world has 8 (ranks 0..7); make a size smaller, or ...
    """
    return WorldSizeError(
        f"{what} needs ranks up to {last_rank}, but the world has {world_size} "
        f"(ranks 0..{world_size - 1}); make a size smaller, or start at least {last_rank + 1} ranks"
    )


def as_world_size(value: object, what: str = "world_size") -> int:
    """Read the number of ranks of a world that is about to be made."""
    size = positive(value, what)
    if size > LARGEST_WORLD:
        raise LayoutError(f"{what} must be at most {LARGEST_WORLD}, got {size}")
    return size


def as_tuple(value: object, what: str) -> tuple[Any, ...]:
    """Read an iterable of names or sizes; a lone string or a mapping is a mistake."""
    if type(value) in {list, tuple, set, frozenset}:
        return tuple(value)  # type: ignore[arg-type]
    lone = isinstance(value, (str, bytes, Mapping)) or getattr(value, "shape", None) == ()
    if lone or not isinstance(value, Iterable):  # numpy's scalars look iterable
        raise LayoutError(f"{what} must be a sequence, got {shown(value)}")
    if _is_long(value):
        raise LayoutError(f"{what} may have at most {_MOST_ITEMS} items, got {shown(value)}")
    items = tuple(islice(value, _MOST_ITEMS + 1))
    if len(items) > _MOST_ITEMS:
        raise LayoutError(f"{what} may have at most {_MOST_ITEMS} items, got more")
    return items


def _is_long(value: Iterable[object]) -> bool:
    try:
        return isinstance(value, Sized) and len(value) > _MOST_ITEMS
    except OverflowError:  # what range(2**70) says
        return True


def as_ordered(value: object, what: str) -> tuple[Any, ...]:
    """Read an iterable whose order means something."""
    if isinstance(value, AbstractSet):
        raise LayoutError(f"{what} must be a sequence, and a set has no order: {shown(value)}")
    return as_tuple(value, what)


def as_strings(value: object, what: str) -> tuple[str, ...]:
    """Read an iterable of strings whose order means something."""
    strings = as_ordered(value, what)
    for string in strings:
        if not isinstance(string, str):
            raise LayoutError(f"{what} must hold strings, got {shown(string)} in {shown(strings)}")
    return strings


def as_ranks(value: object, what: str, world_size: int) -> tuple[int, ...]:
    """Read ranks of a world, at least one and each once, whose order means something."""
    ranks = tuple(as_int(rank, f"every rank in {what}") for rank in as_ordered(value, what))
    outside = [rank for rank in ranks if not 0 <= rank < world_size]
    if outside:
        raise LayoutError(f"{what} must be in range({world_size}), got {outside[0]}")
    if not ranks or len(set(ranks)) < len(ranks):
        raise LayoutError(f"{what} must hold one rank at least, and each once, got {shown(ranks)}")
    return ranks


def as_rank_list(value: object) -> tuple[int, ...]:
    """Read the ranks of a layout, each once, in the order of its numbering.

    >>> as_rank_list(range(4, 0, -2))
    (4, 2)
    """
    ranks = tuple(as_int(rank, "every rank in ranks") for rank in as_ordered(value, "ranks"))
    for rank in ranks:
        if not 0 <= rank <= LARGEST_RANK:
            raise LayoutError(
                f"every rank in ranks must be in range({LARGEST_RANK + 1}), as torch numbers them, "
                f"got {rank}"
            )
    if len(set(ranks)) < len(ranks):
        twice = next(rank for rank, times in Counter(ranks).items() if times > 1)
        raise LayoutError(f"rank {twice} comes twice in ranks {shown(ranks)}")
    return ranks


def as_few(value: object, what: str) -> tuple[Any, ...]:
    """Read what has one item for each dim of a layout."""
    items = as_ordered(value, what)
    if len(items) > _MOST_DIMS:
        raise LayoutError(f"{what} may have at most {_MOST_DIMS} items, got {len(items)}")
    return items


def as_sizes(value: Iterable[int]) -> tuple[int, ...]:
    """Read the sizes of a shape."""
    sizes = as_few(value, "shape")
    return tuple(positive(size, f"every size in shape {shown(sizes)}") for size in sizes)


def as_strides(value: Iterable[int]) -> tuple[int, ...]:
    """Read strides."""
    strides = as_few(value, "strides")
    return tuple(positive(stride, f"every stride in {shown(strides)}") for stride in strides)


def as_names(value: Iterable[str], what: str = "dim name") -> tuple[str, ...]:
    """Read names, of dims if nothing else is said."""
    names = as_few(value, f"{what.replace(' ', '_')}s")
    for position, name in enumerate(names):
        if not isinstance(name, str) or not name:
            raise LayoutError(
                f"every {what} must be a non-empty string, got {shown(name)} in {shown(names)}"
            )
        if any(char in SEPARATORS or char.isspace() for char in name):
            raise LayoutError(
                f"{what} {name!r} must hold no white space and none of "
                f"{SEPARATORS!r}, which the text forms use"
            )
        if not is_utf8(name):
            raise LayoutError(f"{what} {name!r} cannot be written as UTF-8")
        if name in names[:position]:
            raise LayoutError(
                f"duplicate {what.replace(' ', '_')}s: {name!r} comes twice in {names}"
            )
    return names


def as_dims(value: object) -> tuple[Any, ...]:
    """Read dims in whichever way they are spelled: a name, "dp+cp", "dp-cp", or iterables of these.

    Raises:
        LayoutError: It is none of them, or there are none.

    Example:
        >>> as_dims("dp+cp"), as_dims(["dp", "cp"]), as_dims((["dp", "cp"],))
        (('dp', 'cp'), ('dp', 'cp'), ('dp', 'cp'))
    """
    if isinstance(value, str):
        return split_dims(value)
    found: list[Any] = []
    for item in as_tuple(value, "dims"):
        if isinstance(item, str):
            found.extend(split_dims(item))
        elif isinstance(item, (list, tuple, set, frozenset)):
            found.extend(as_dims(item))
        else:
            found.append(item)  # refused where names are looked up
    return tuple(found)


def is_utf8(text: str) -> bool:
    r"""Tell whether a string can be written as UTF-8, as torch writes names; half a pair cannot.

    >>> is_utf8("é"), is_utf8("\ud800")
    (True, False)
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


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
    raise RankOutsideError(f"a rank is an int, got {shown(rank)}")
