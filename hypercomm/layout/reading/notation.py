"""The text forms: sizes ("tp=2,cp=2,dp=4"), orders ("tp-cp-ep-dp-pp"), groups ("tp,dp+cp")."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import numpy as np

from hypercomm.errors import NotationError
from hypercomm.layout.reading.shown import shown

OPEN = -1
"""The size of a dim that is to be inferred from the world size."""

_MOST_RANGES = 8
"""Ranges of ranks that a message names."""

SEPARATORS = ",=+-"
"""Characters that the text forms use, and that a dim name therefore cannot hold."""


def format_sizes(dim_names: Sequence[str], shape: Sequence[int]) -> str:
    """Write sizes as text, first dim (fastest varying) first.

    >>> format_sizes(["tp", "dp"], [2, 4])
    'tp=2,dp=4'
    """
    return ",".join(f"{name}={size}" for name, size in zip(dim_names, shape, strict=True))


def format_coords(coords: Mapping[str, int]) -> str:
    """Write coordinates as text.

    >>> format_coords({"tp": 1, "dp": 0})
    'tp=1, dp=0'
    """
    return ", ".join(f"{dim}={index}" for dim, index in coords.items())


def format_ranks(ranks: Sequence[int]) -> str:
    """Write ascending ranks shortly.

    >>> format_ranks([4, 5, 6, 7, 9, 12, 13])
    '4..7, 9, 12..13'
    """
    array = np.asarray(ranks, dtype=np.int64)
    parts = np.split(array, np.flatnonzero(np.diff(array) != 1) + 1)
    ends = [(int(part[0]), int(part[-1])) for part in parts[:_MOST_RANGES] if part.size]
    texts = [f"{first}..{last}" if last > first else f"{first}" for first, last in ends]
    return ", ".join([*texts, "..."] if len(parts) > _MOST_RANGES else texts)


def parse_sizes(text: str) -> dict[str, int]:
    """Read "tp=2,cp=3,dp=4" into sizes by dim name, in the order given.

    A size of -1, or a name alone, is left open (`OPEN`).

    Raises:
        NotationError: A part is empty, has no name, has a size that is no positive integer, or
            names a dim that came before; the message holds the part.

    >>> parse_sizes("tp=2, cp=3, dp")
    {'tp': 2, 'cp': 3, 'dp': -1}
    """
    sizes: dict[str, int] = {}
    for part in _parts(text, "tp=2,dp=4"):
        name, equals, size_text = (piece.strip() for piece in part.partition("="))
        _check_name(name, part, "tp=2,dp=4")
        if not equals:
            _check_not_joined(part)
        if name in sizes:
            raise NotationError(f"dim {name!r} is given twice in {text!r}")
        size = OPEN if not equals else _integer(size_text)
        if size is None or (size < 1 and size != OPEN):
            raise NotationError(
                f"the size in {part!r} must be a positive integer, or -1 to infer it; "
                f"write it like 'tp=2,dp=4'"
            )
        sizes[name] = size
    return sizes


def parse_order(text: str) -> tuple[str, ...]:
    """Read "tp-cp-ep-dp-pp" into dim names, first one fastest varying.

    Raises:
        NotationError: A name is empty or comes twice.

    >>> parse_order("tp-cp-dp")
    ('tp', 'cp', 'dp')
    """
    names = tuple(_parts(text, "tp-cp-dp", "-"))
    for position, name in enumerate(names):
        if name in names[:position]:
            raise NotationError(f"dim {name!r} comes twice in order {text!r}")
    return names


def parse_groups(text: str) -> list[tuple[str, ...]]:
    """Read "tp,dp+cp" into one tuple of dims for each set of groups asked for.

    Raises:
        NotationError: A part is empty or comes twice; the message holds the part.

    >>> parse_groups("tp,dp+cp")
    [('tp',), ('dp', 'cp')]
    """
    wanted: list[tuple[str, ...]] = []
    for part in _parts(text, "tp,dp+cp"):
        dims = split_dims(part)
        for dim in dims:
            _check_name(dim, part, "tp,dp+cp")
        if any(set(dims) == set(earlier) for earlier in wanted):
            raise NotationError(f"groups {part!r} come twice in {text!r}")
        wanted.append(dims)
    return wanted


def split_dims(text: str) -> tuple[str, ...]:
    """Read the dims of one set of groups: "dp+cp", or as Megatron writes it, "dp-cp".

    Raises:
        NotationError: A name is empty, or commas separate them, which would be several sets.

    >>> split_dims("dp+cp"), split_dims("tp")
    (('dp', 'cp'), ('tp',))
    """
    dims = tuple(dim.strip() for dim in re.split("[+-]", text))
    if "" in dims:
        raise NotationError(f"{text!r} lacks a dim name; write dims like 'dp+cp'")
    if "," in text:
        joined = "+".join(part.strip() for part in text.split(","))
        raise NotationError(f"{text!r} would be several sets of groups; one is written {joined!r}")
    return dims


def _parts(text: str, example: str, separator: str = ",") -> list[str]:
    """Split a text, refusing empty parts."""
    if not isinstance(text, str):
        raise NotationError(f"expected a text like {example!r}, got {shown(text)}")
    if not text.strip():
        raise NotationError(f"the text is empty; write it like {example!r}")
    parts = [part.strip() for part in text.split(separator)]
    if "" in parts:
        raise NotationError(
            f"part {parts.index('') + 1} of {text!r} is empty; write it like {example!r}"
        )
    return parts


def _check_name(name: str, part: str, example: str) -> None:
    if not name:
        raise NotationError(f"{part!r} has no dim name; write it like {example!r}")
    if any(character in SEPARATORS or character.isspace() for character in name):
        raise NotationError(f"{name!r} is not a dim name; write it like {example!r}")


def _check_not_joined(part: str) -> None:
    """Refuse what is no dim that is left open, but sizes that are written in another way."""
    if ":" in part:
        raise NotationError(
            f"{part!r} has ':' between a dim and its size, and no '='; write it like 'tp=2,dp=4'"
        )
    joined = re.findall(r"([A-Za-z_]+)([0-9]+)", part)
    if len(joined) > 1 and "".join(map("".join, joined)) == part:
        meant = ",".join(map("=".join, joined))
        raise NotationError(f"{part!r} has no '='; did you mean {meant!r}?")


def _integer(text: str) -> int | None:
    return int(text) if re.fullmatch(r"-?[0-9]{1,18}", text) else None
