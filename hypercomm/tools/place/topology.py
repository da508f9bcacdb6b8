"""A machine as levels: the host, NVLink domain and switches of each rank."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from hypercomm.errors import LayoutError
from hypercomm.layout.checks import as_ranks
from hypercomm.layout.text import aligned, did_you_mean, format_range, pluralize, short_repr


def _as_names(value: Iterable[str]) -> tuple[str, ...]:
    return tuple(value)


@attrs.frozen(repr=False)
class Level:
    """One level of a machine, such as its hosts. Each rank is in one unit of the level.

    Args:
        name: The name of the level: "host", "domain" (NVLink), "leaf", "spine", or another name.
        of_rank: The index of each rank's unit, of shape (world size,). Units are numbered
            in the order of their first rank.
        names: The name of each unit, in the order of the indices. Default: host0, host1, ...

    Raises:
        LayoutError: A unit has no name.

    Example:
        >>> level = Level("host", [0, 0, 1, 1], ["a", "b"])
        >>> level.units, level.sizes.tolist(), level.name_of(3)
        (2, [2, 2], 'b')
        >>> Level("host", [0, 0, 1, 1]).names
        ('host0', 'host1')
    """

    name: str
    of_rank: NDArray[np.int64] = attrs.field(converter=np.asarray, eq=np.ndarray.tobytes)
    _names: tuple[str, ...] = attrs.field(default=(), converter=_as_names)
    units: int = attrs.field(init=False, eq=False)
    """The number of units."""

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "units", int(np.max(self.of_rank)) + 1)
        if len(self._names) not in {0, self.units}:
            raise LayoutError(f"level {self.name!r} needs a name for each of its units")

    @classmethod
    def of(cls, name: str, units: Sequence[Hashable]) -> Level:
        """Return a level, given the name of each rank's unit.

        Args:
            name: The name of the level.
            units: For each rank, the name or number of its unit.

        Example:
            >>> level = Level.of("host", ["b", "b", "a", "b"])
            >>> level.of_rank.tolist(), level.names
            ([0, 0, 1, 0], ('b', 'a'))
        """
        numbers = {unit: number for number, unit in enumerate(dict.fromkeys(units))}
        return cls(name, np.array([numbers[unit] for unit in units]), tuple(map(str, numbers)))

    @property
    def names(self) -> tuple[str, ...]:
        """The name of each unit, in the order of the indices."""
        return self._names or tuple(f"{self.name}{unit}" for unit in range(self.units))

    @property
    def sizes(self) -> NDArray[np.int64]:
        """The number of ranks in each unit."""
        return np.bincount(self.of_rank, minlength=self.units)

    def name_of(self, rank: int) -> str:
        """Return the name of the unit that a rank is in."""
        unit = int(self.of_rank[rank])
        return self._names[unit] if self._names else f"{self.name}{unit}"

    def __repr__(self) -> str:
        ranks = pluralize(self.of_rank.size, "rank")
        return f"<Level {self.name!r}: {pluralize(self.units, 'unit')}, {ranks}>"


@attrs.frozen
class Topology:
    """The levels of a machine, innermost first. `str()` returns a table.

    Args:
        levels: The levels, such as host, domain, leaf and spine. All levels cover the same ranks.
        gpus: The index of each rank's GPU on its host. Default: unknown.
        note: A sentence about an assumption that was made. Default: no assumption.

    Raises:
        LayoutError: There are no levels, two levels share a name, or the levels cover different
            numbers of ranks.

    Example:
        >>> from hypercomm.tools.place import read_topology
        >>> topology = read_topology("host=4,domain=8", 16)
        >>> topology.world_size, topology.level("domain").of_rank.tolist()[6:10]
        (16, [0, 0, 1, 1])
        >>> print(topology)
        level   units  ranks of each
        host        4  4
        domain      2  8
        16 ranks
    """

    levels: Sequence[Level]
    gpus: tuple[int, ...] | None = attrs.field(default=None, kw_only=True)
    note: str = attrs.field(default="", kw_only=True, eq=False)

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "levels", tuple(self.levels))
        sizes = {level.name: level.of_rank.size for level in self.levels}
        if self.gpus is not None:
            sizes["gpus"] = len(self.gpus)
        names = len(self.levels) + (self.gpus is not None)
        if not self.levels or len(sizes) < names or len({*sizes.values()}) > 1:
            raise LayoutError(
                f"levels= must have distinct names and equally many ranks, got {sizes}"
            )

    @property
    def world_size(self) -> int:
        """The number of ranks."""
        return int(self.levels[0].of_rank.size)

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the levels, innermost first."""
        return tuple(level.name for level in self.levels)

    def level(self, name: str) -> Level:
        """Return the level with the given name.

        Raises:
            LayoutError: There is no such level; the message lists the levels.

        Example:
            >>> from hypercomm.tools.place import read_topology
            >>> read_topology(4, 8).level("host")
            <Level 'host': 2 units, 8 ranks>
        """
        for level in self.levels:
            if level.name == name:
                return level
        raise LayoutError(
            f"unknown level {short_repr(name)}; the levels are {list(self.names)}"
            f"{did_you_mean(name, self.names)}"
        )

    def select(self, ranks: Iterable[int]) -> Topology:
        """Return the topology of some ranks, renumbered 0, 1, ... in the order given.

        Args:
            ranks: Distinct ranks of this topology.

        Raises:
            LayoutError: A rank is outside the topology or listed twice.

        Example:
            >>> from hypercomm.tools.place import read_topology
            >>> read_topology(2, 6).select([4, 5, 0]).level("host").names
            ('host2', 'host0')
        """
        wanted = np.array(as_ranks(ranks, "ranks", self.world_size))
        levels = []
        for level in self.levels:
            units = level.of_rank[wanted].tolist()
            every = level.names
            names = [every[unit] for unit in dict.fromkeys(units)]
            levels.append(Level(level.name, Level.of(level.name, units).of_rank, names))
        gpus = None if self.gpus is None else tuple([self.gpus[rank] for rank in wanted.tolist()])
        return Topology(levels, gpus=gpus, note=self.note)

    def sort(self, ranks: Sequence[int]) -> NDArray[np.int64]:
        """Return ranks sorted by level, the outermost first, then by GPU and rank.

        The units of a level are in the order of their first rank.

        Example:
            >>> host = Level.of("host", ["a", "b", "a", "b"])
            >>> Topology([host]).sort(range(4)).tolist()
            [0, 2, 1, 3]
            >>> Topology([host], gpus=(1, 0, 0, 1)).sort(range(4)).tolist()
            [2, 0, 1, 3]
        """
        ordered = np.sort(np.asarray(ranks))
        keys = [] if self.gpus is None else [np.asarray(self.gpus)[ordered]]
        keys += [level.of_rank[ordered] for level in self.levels]
        return np.asarray(ordered[np.lexsort(keys)])

    def __str__(self) -> str:
        rows = [("level", "units", "ranks of each")]
        for level in self.levels:
            sizes = format_range(int(np.min(level.sizes)), int(np.max(level.sizes)))
            rows.append((level.name, f"{level.units:,}", sizes))
        return "\n".join([*aligned(rows), pluralize(self.world_size, "rank")])
