"""Spread: over how many units of a level groups lie, and what they send from one to another."""

from __future__ import annotations

from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from hypercomm.layout.placing.traffic import Traffic, in_bytes


@attrs.frozen
class Spread:
    """How the groups over some dims lie on one level.

    Attributes:
        dims: The dims, in the layout's order.
        level: The level.
        groups: The number of groups.
        size: The number of ranks of each.
        across: The number of groups that lie in more than one unit.
        least: The units that a group lies in, at least.
        most: The units that a group lies in, at most.
        bytes: What goes from unit to unit in a step, in all groups; None where nothing tells.
        first: The first group that lies in more than one unit; none: ().
    """

    dims: tuple[str, ...]
    level: str
    groups: int
    size: int
    across: int
    least: int
    most: int
    bytes: int | None = None
    first: tuple[int, ...] = ()

    @property
    def inside(self) -> int:
        """The number of groups that lie in one unit each."""
        return self.groups - self.across

    @property
    def is_partly(self) -> bool:
        """Whether some of the groups lie in one unit, and some do not."""
        return 0 < self.across < self.groups

    @property
    def cells(self) -> tuple[str, ...]:
        """The spread as text: dims, level, groups across, units of a group, bytes across.

        Example:
            >>> Spread(("dp",), "domain", 16, 16, 12, 1, 2, 5000).cells
            ('dp', 'domain', '12 of 16', '1..2', '5 kB')
        """
        units = "..".join(f"{count:,}" for count in dict.fromkeys((self.least, self.most)))
        sent = "" if self.bytes is None else in_bytes(self.bytes)
        return (
            "+".join(self.dims),
            self.level,
            f"{self.across:,} of {self.groups:,}",
            units,
            sent,
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the spread as a dict, which JSON can hold.

        Example:
            >>> Spread(("dp",), "host", 2, 4, 2, 2, 2).to_dict()["inside"]
            0
        """
        return attrs.asdict(self) | {"dims": list(self.dims), "inside": self.inside}


def units_of_groups(units: NDArray[np.int64]) -> NDArray[np.int64]:
    """Count the units that each group lies in.

    Args:
        units: The unit of each member, of shape (groups, size).

    Example:
        >>> units_of_groups(np.array([[0, 0, 1], [2, 1, 2], [3, 3, 3]])).tolist()
        [2, 2, 1]
    """
    steps = np.diff(_together(units), axis=1)
    return np.asarray(1 + np.count_nonzero(steps, axis=1), dtype=np.int64)


def bytes_across(units: NDArray[np.int64], traffic: Traffic) -> int:
    """Return the bytes that groups send from unit to unit in a step.

    A ring is one that visits each unit once, as NCCL makes it: a group in k units has k edges
    between them. A chain has as many as neighbours in it are in different units; and with all to
    all, each rank sends equally much to each of the others.

    Args:
        units: The unit of each member, of shape (groups, size), in the groups' order.
        traffic: What each rank sends.

    Example:
        >>> units = np.array([[0, 1, 0, 1]])
        >>> patterns = ("ring", "chain", "all-to-all")
        >>> [bytes_across(units, Traffic(30, pattern)) for pattern in patterns]
        [60, 90, 80]
    """
    size = units.shape[1]
    if size == 1 or not traffic.bytes:
        return 0
    if traffic.pattern == "chain":
        return traffic.bytes * int(np.count_nonzero(np.diff(units, axis=1)))
    if traffic.pattern == "ring":
        counts = units_of_groups(units)
        return traffic.bytes * int(counts[counts > 1].sum())
    ordered = _together(units)
    starts = np.ones(ordered.shape, dtype=bool)
    starts[:, 1:] = np.diff(ordered, axis=1) != 0
    (begins,) = np.nonzero(starts.reshape(-1))
    lengths = np.diff(begins, append=ordered.size)
    pairs = ordered.size * size - int((lengths * lengths).sum())
    return int(traffic.bytes * pairs // (size - 1))


def _together(units: NDArray[np.int64]) -> NDArray[np.int64]:
    """The units of each group, equal ones beside each other."""
    ascends = units.shape[1] < 2 or bool((units[:, 1:] >= units[:, :-1]).all())
    return units if ascends else np.sort(units, axis=1)
