"""Variables of an environment: numbers in them, and ports that are worked out of their values."""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping

from hypercomm.errors import LaunchError
from hypercomm.layout.text import shown

_FIRST_PORT, _PORTS = 20_000, 10_000
"""Where ports that are worked out lie: below those that Linux gives out by itself."""


def number(name: str, held: Mapping[str, str], smallest: int = 0, largest: int = 2**31) -> int:
    """Read the number that a variable holds.

    Raises:
        LaunchError: It holds none from `smallest` to `largest`.

    Example:
        >>> number("RANK", {"RANK": "3"})
        3
    """
    text = held[name]
    if not re.fullmatch(r"[0-9]{1,10}", text) or not smallest <= int(text) <= largest:
        span = f"at least {smallest}" if largest == 2**31 else f"{smallest} to {largest}"
        raise LaunchError(
            f"the environment's {name} must be an integer of {span}, got {shown(text)}"
        )
    return int(text)


def port_of(number: int) -> int:
    """Return a port for a number that all ranks of a job know.

    >>> port_of(4711), port_of(14711)
    (24711, 24711)
    """
    return _FIRST_PORT + number % _PORTS


def port_of_name(name: str) -> int:
    """Return a port for a name that all ranks of a job know.

    >>> port_of_name("prterun-node7-4711@1")
    22065
    """
    return port_of(zlib.crc32(name.encode()))


def are_missing(names: list[str]) -> str:
    """Say that variables are missing.

    >>> are_missing(["RANK"]), are_missing(["RANK", "WORLD_SIZE"])
    ('RANK is missing', 'RANK and WORLD_SIZE are missing')
    """
    return f"{' and '.join(names)} {'are' if len(names) > 1 else 'is'} missing"
