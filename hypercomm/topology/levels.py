"""Levels: which unit of a machine, such as a host or a domain, holds each rank."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from hypercomm.errors import RankOutsideError, TopologyError
from hypercomm.layout.checks import as_ordered, as_rank, as_ranks, as_strings
from hypercomm.layout.text import aligned, did_you_mean, shown


def _as_units(value: object) -> NDArray[np.int64]:
    try:
        array = np.asarray(value)
    except (ValueError, TypeError, OverflowError) as error:
        raise TopologyError(
            f"of_rank must hold an int for each rank, got {shown(value)}"
        ) from error
    if array.ndim != 1 or not array.size or array.dtype.kind not in "iu":
        raise TopologyError(f"of_rank must hold an int for each rank, got {shown(value)}")
    units = array.astype(np.int64)  # a copy, which nobody else writes to
    units.flags.writeable = False
    return units


def _as_names(value: Iterable[str]) -> tuple[str, ...]:
    return as_strings(tuple(value) if isinstance(value, str) else value, "names")


@attrs.frozen(eq=False)
class Level:
    """One level of a machine: which of its units holds each rank.

    Args:
        name: What its units are: "host", "domain" (of NVLink), "leaf", "spine", or what the file
            calls them.
        of_rank: The number of the unit that holds each rank, of shape (world size,); units are
            numbered by their first rank.
        names: A name for each unit, in that order.

    Raises:
        TopologyError: The units are not numbered so, or have another number of names.

    Example:
        >>> level = Level("host", [0, 0, 1, 1], ["a", "b"])
        >>> level.units, level.sizes.tolist(), level.name_of(3)
        (2, [2, 2], 'b')
    """

    name: str
    of_rank: NDArray[np.int64] = attrs.field(converter=_as_units)
    names: tuple[str, ...] = attrs.field(converter=_as_names)

    def __attrs_post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise TopologyError(f"the name of a level must be a text, got {shown(self.name)}")
        units, first = np.unique(self.of_rank, return_index=True)
        if (units != np.arange(units.size)).any() or (np.diff(first) < 0).any():
            raise TopologyError(
                f"the units of level {self.name!r} must be numbered 0, 1, ... by their first rank, "
                f"got {shown(self.of_rank.tolist())}; Level.of({self.name!r}, ...) does so"
            )
        if len(self.names) != units.size:
            raise TopologyError(
                f"level {self.name!r} has {units.size} units and {len(self.names)} names; give one "
                f"for each"
            )

    @classmethod
    def of(cls, name: str, units: Sequence[Hashable]) -> Level:
        """Make a level of the name of each rank's unit.

        Args:
            name: What the units are.
            units: For each rank, what its unit is called.

        Example:
            >>> level = Level.of("host", ["b", "b", "a", "b"])
            >>> level.of_rank.tolist(), level.names
            ([0, 0, 1, 0], ('b', 'a'))
        """
        every = as_ordered(tuple(units) if isinstance(units, str) else units, "units")
        try:
            numbers = {unit: number for number, unit in enumerate(dict.fromkeys(every))}
        except TypeError as error:
            raise TopologyError(f"units must be names or numbers, got {shown(every)}") from error
        of_rank = np.fromiter((numbers[unit] for unit in every), np.int64, len(every))
        return cls(name, of_rank, tuple(map(str, numbers)))

    @property
    def units(self) -> int:
        """The number of units."""
        return len(self.names)

    @property
    def sizes(self) -> NDArray[np.int64]:
        """The number of ranks in each unit."""
        return np.bincount(self.of_rank, minlength=self.units)

    def name_of(self, rank: int) -> str:
        """Return the name of the unit that holds a rank.

        Raises:
            RankOutsideError: There is no such rank.
        """
        if not 0 <= as_rank(rank) < self.of_rank.size:
            raise RankOutsideError(f"rank {rank} is not one of {self.of_rank.size}")
        return self.names[int(self.of_rank[rank])]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Level):
            return NotImplemented
        return (self.name, self.names) == (other.name, other.names) and np.array_equal(
            self.of_rank, other.of_rank
        )

    def __hash__(self) -> int:
        return hash((self.name, self.names, self.of_rank.tobytes()))

    def __repr__(self) -> str:
        return f"<Level {self.name!r}: {self.units} units, {self.of_rank.size} ranks>"


def _as_levels(value: Iterable[Level]) -> tuple[Level, ...]:
    return as_ordered(value, "levels")


@attrs.frozen(repr=False)
class Topology:
    """The levels of a machine, innermost first; `str()` is a table.

    Args:
        levels: As in host, domain, leaf, spine; some may be missing.

    Raises:
        TopologyError: There is none, two have one name, or they differ in their number of ranks.

    Example:
        >>> from hypercomm.topology import read_topology
        >>> topology = read_topology("host=4,domain=8", 16)
        >>> topology.world_size, topology.level("domain").of_rank.tolist()[6:10]
        (16, [0, 0, 1, 1])
        >>> print(topology)
        level   units  ranks of each
        host    4      4
        domain  2      8
        16 ranks
    """

    levels: tuple[Level, ...] = attrs.field(converter=_as_levels)

    def __attrs_post_init__(self) -> None:
        if not self.levels or not all(isinstance(level, Level) for level in self.levels):
            raise TopologyError(f"a topology needs one Level at least, got {shown(self.levels)}")
        names = [level.name for level in self.levels]
        if len(set(names)) < len(names):
            raise TopologyError(f"two levels of a topology have one name: {names}")
        sizes = {level.name: level.of_rank.size for level in self.levels}
        if len({*sizes.values()}) > 1:
            raise TopologyError(f"the levels have different numbers of ranks: {sizes}")

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return int(self.levels[0].of_rank.size)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the levels, innermost first."""
        return tuple(level.name for level in self.levels)

    def level(self, name: str) -> Level:
        """Return the level of a name.

        Raises:
            TopologyError: There is none; says which there are.

        Example:
            >>> from hypercomm.topology import read_topology
            >>> read_topology(4, 8).level("host")
            <Level 'host': 2 units, 8 ranks>
        """
        for level in self.levels:
            if isinstance(name, str) and level.name == name:
                return level
        raise TopologyError(
            f"unknown level {shown(name)}; this topology has {list(self.names)}"
            f"{did_you_mean(name, self.names)}"
        )

    def select(self, ranks: Iterable[int]) -> Topology:
        """Return the topology of some ranks, numbered anew in the order given.

        Args:
            ranks: Each once.

        Raises:
            LayoutError: One is outside, or comes twice.

        Example:
            >>> from hypercomm.topology import read_topology
            >>> read_topology(2, 6).select([4, 5, 0]).level("host").names
            ('host2', 'host0')
        """
        wanted = np.array(as_ranks(ranks, "ranks", self.world_size))
        levels = []
        for level in self.levels:
            units, first, inverse = np.unique(
                level.of_rank[wanted], return_index=True, return_inverse=True
            )
            order = np.argsort(first)
            places = np.empty_like(order)
            places[order] = np.arange(order.size)
            names = [level.names[unit] for unit in units[order].tolist()]
            levels.append(Level(level.name, places[inverse.reshape(-1)], names))
        return Topology(levels)

    def to_dict(self) -> dict[str, Any]:
        """Return the topology as a dict of lists and numbers, which JSON can hold.

        Example:
            >>> from hypercomm.topology import read_topology
            >>> read_topology(1, 2).to_dict()["levels"]
            [{'name': 'host', 'of_rank': [0, 1], 'names': ['host0', 'host1']}]
        """
        return {
            "world_size": self.world_size,
            "levels": [
                {
                    "name": level.name,
                    "of_rank": level.of_rank.tolist(),
                    "names": list(level.names),
                }
                for level in self.levels
            ],
        }

    def __str__(self) -> str:
        rows = [("level", "units", "ranks of each")]
        for level in self.levels:
            sizes = dict.fromkeys((int(level.sizes.min()), int(level.sizes.max())))
            cells = "..".join(f"{size:,}" for size in sizes)
            rows.append((level.name, f"{level.units:,}", cells))
        return "\n".join([*aligned(rows), f"{self.world_size:,} ranks"])

    def __repr__(self) -> str:
        levels = ", ".join(f"{level.units} x {level.name}" for level in self.levels)
        return f"<Topology of {self.world_size} ranks: {levels}>"
