"""Blocks: machines that are given by how many GPUs each unit has: 8, "8,72", "host=8,domain=72"."""

from __future__ import annotations

import re
from itertools import pairwise

from hypercomm.errors import TopologyError
from hypercomm.layout.checks import positive
from hypercomm.layout.text import shown
from hypercomm.topology.found import Found, check_size
from hypercomm.topology.names import ARGUMENTS, Names

_LEVELS = ("host", "domain", "leaf", "spine", "core")
_EXAMPLE = "write GPUs for each host and what is around it, like '8,72' or 'host=8,domain=72'"


def is_blocks(text: str) -> bool:
    """Tell whether a text gives numbers of GPUs.

    Example:
        >>> is_blocks("8,72"), is_blocks("host=4"), is_blocks("node[1-2]"), is_blocks("a=b")
        (True, True, False, True)
    """
    parts = text.split(",")
    return all("=" in part or re.fullmatch(r"\s*-?[0-9]+\s*", part) for part in parts)


def read_blocks(on: int | str, names: Names = ARGUMENTS) -> Found:
    """Read how many GPUs each unit of a level has.

    Args:
        on: The GPUs of each host; or a text with those of each level, innermost first.
        names: What errors call arguments.

    Raises:
        TopologyError: A number is none, a name comes twice, or units do not fit into each other.

    Example:
        >>> dict(read_blocks("8,72").every), dict(read_blocks(4).every)
        ({'host': 8, 'domain': 72}, {'host': 4})
    """
    if not isinstance(on, str):
        size = positive(on, "the number of GPUs of each host")
        source = names.given("on", on)
        return Found(source, every={"host": check_size(size, source)})
    sizes: dict[str, int] = {}
    parts = [part.strip() for part in on.split(",")]
    if len(parts) > len(_LEVELS) and not any("=" in part for part in parts):
        raise TopologyError(
            f"{shown(on)} has more than {len(_LEVELS)} levels; name them: {_EXAMPLE}"
        )
    for position, part in enumerate(parts):
        before, equals, behind = (piece.strip() for piece in part.partition("="))
        name, number = (before, behind) if equals else (_LEVELS[position], before)
        if name in sizes or not name:
            raise TopologyError(f"{shown(part)} in {shown(on)} has no name of its own; {_EXAMPLE}")
        if not re.fullmatch(r"[0-9]{1,9}", number) or not int(number):
            raise TopologyError(
                f"{shown(part)} in {shown(on)} has no number of GPUs, 1 at least; {_EXAMPLE}"
            )
        sizes[name] = check_size(int(number), f"{shown(part)} in {shown(on)}")
    ordered = list(sizes.items())
    for (inner, small), (outer, large) in pairwise(ordered):
        if large % small or large == small:
            near = [size for size in (large // small * small, (large // small + 1) * small) if size]
            near = sorted({size for size in near if size > small} or {2 * small})
            raise TopologyError(
                f"in {shown(on)} a {outer} of {large} GPUs does not hold several whole "
                f"{inner}s of {small}; {' or '.join(map(str, near))} would do"
            )
    return Found(names.given("on", on), every=sizes)
