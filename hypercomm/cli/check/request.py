"""What a check is asked for: layout, views, groups, messages; and what ranks tell of it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import TypedDict

import attrs

from hypercomm.cli.plan.keys import AskedViews, Key
from hypercomm.errors import NotationError
from hypercomm.layout import RankLayout

COLLECTIVES = (
    "all-reduce",
    "all-gather",
    "broadcast",
    "reduce-scatter",
    "all-to-all",
    "send/receive",
)
"""What is tried over every group."""

_UNITS = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30}
_LARGEST = 2**34


@attrs.frozen
class Sweep:
    """Sizes of messages in bytes, and how often each is sent."""

    sizes: tuple[int, ...] = ()
    rounds: int = 5


@attrs.frozen
class Request:
    """What every rank does.

    Attributes:
        layout: The layout of all ranks.
        views: Other factorisations of it.
        keys: The groups to check, in this order.
        backend: Backend of the groups.
        sweep: The messages to time.
    """

    layout: RankLayout
    keys: Sequence[Key]
    backend: str = "gloo"
    views: AskedViews = ()
    sweep: Sweep = Sweep()

    def layout_of(self, key: Key) -> RankLayout:
        """Return the layout that the dims of a key belong to."""
        return next((view for name, view, _ in self.views if name == key.view), self.layout)


class Timing(TypedDict):
    """How long one rank took for a collective of some bytes."""

    collective: str
    bytes: int
    seconds: float


class Figures(TypedDict):
    """What one rank found over its group of some dims, in seconds and bytes/s."""

    host: str
    creation: float
    latency: float
    bandwidth: float
    wrong: Sequence[str]
    lacking: Sequence[str]
    sweep: Sequence[Timing]


Message = tuple[int, Key, str | Figures]
"""What a rank tells of some groups: what it begins with, or what it found in the end."""


def read_sizes(text: str, factor: int) -> tuple[int, ...]:
    """Read sizes of messages: "1K..64M", each `factor` times the one before, or "8,1M".

    Raises:
        NotationError: A size is no number of bytes from 4 to 16G, or the last is not the largest.

    Example:
        >>> read_sizes("1K..64K", 4), read_sizes("8,1M", 4)
        ((1024, 4096, 16384, 65536), (8, 1048576))
    """
    first, dots, last = text.partition("..")
    if not dots:
        return tuple(map(_bytes, text.split(",")))
    size, most = _bytes(first), _bytes(last)
    if most < size:
        raise NotationError(f"{text!r} ends before it begins; write it like '1K..64M'")
    sizes = []
    while size <= most:
        sizes.append(size)
        size *= factor
    return tuple(sizes)


def _bytes(text: str) -> int:
    found = re.fullmatch(r"([0-9]{1,12})([KMG]?)", text.strip().upper())
    size = int(found[1]) * _UNITS[found[2]] if found else 0
    if not 4 <= size <= _LARGEST:
        raise NotationError(
            f"{text.strip()!r} is no size of a message, which has 4 bytes to 16G; write sizes like "
            f"'1K..64M' or '8,1M'"
        )
    return size
