"""Found: what one source, such as a file, says of the hosts of a machine."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path

import attrs

from hypercomm.errors import TopologyError
from hypercomm.layout.checks import LARGEST_WORLD
from hypercomm.layout.text import some_of

SWITCHES = ("leaf", "spine", "core")
"""The levels of switches, from a host up; beyond them they are numbered: "tier-3"."""

_LARGEST_FILE = 64 * 2**20


@attrs.frozen
class Found:
    """What one source says of hosts.

    Attributes:
        source: How errors name it.
        slots: The GPUs of each host, in the order of its ranks; None where it does not say.
        levels: For each level, which unit each host is in. All hosts are in each.
        every: For a source of block sizes, which has no hosts: the GPUs of each level's units.
    """

    source: str
    slots: Mapping[str, int | None] = attrs.field(factory=dict)
    levels: Mapping[str, Mapping[str, str]] = attrs.field(factory=dict)
    every: Mapping[str, int] = attrs.field(factory=dict)


def tier(number: int) -> str:
    """Return the name of a level of switches, 0 being that which hosts are connected to.

    Example:
        >>> tier(0), tier(1), tier(5)
        ('leaf', 'spine', 'tier-5')
    """
    return SWITCHES[number] if number < len(SWITCHES) else f"tier-{number}"


def text_of(path: str | os.PathLike[str]) -> str:
    """Return what a file holds.

    Raises:
        TopologyError: It cannot be read.
    """
    try:
        is_large = Path(path).is_file() and Path(path).stat().st_size > _LARGEST_FILE
    except (OSError, ValueError):
        is_large = False
    if is_large:
        raise TopologyError(f"{path} has more than {_LARGEST_FILE:,} bytes: it is no topology")
    try:
        return Path(path).read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise TopologyError(f"{path} cannot be read: it is no text in UTF-8") from error
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise TopologyError(f"{path} cannot be read: {reason}") from error


def check_size(gpus: int, what: str) -> int:
    """Return a number of GPUs that a machine may have; `what` begins the error's sentence.

    Raises:
        TopologyError: There are more than the largest world has ranks.

    Example:
        >>> check_size(72, "domain=72")
        72
    """
    if gpus > LARGEST_WORLD:
        raise TopologyError(f"{what}: {gpus:,} GPUs are more than {LARGEST_WORLD:,}, the most read")
    return gpus


def check_complete(
    source: str, what: str, hosts: Iterable[str], held: Mapping[str, object]
) -> None:
    """Refuse a source that does not hold all of some hosts.

    Raises:
        TopologyError: Names the first hosts that are missing.

    Example:
        >>> check_complete("leafs.json", "leaf", ["a"], {"a": "s1"})
    """
    absent = [host for host in hosts if host not in held]
    if absent:
        raise TopologyError(
            f"{source} says no {what} of {some_of(absent, 4)}; add them, or leave these hosts out"
        )
