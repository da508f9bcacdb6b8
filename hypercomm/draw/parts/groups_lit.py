"""GroupsLit: the groups over some dims of one grid, and how far each reaches."""

from __future__ import annotations

import math

import attrs
import numpy as np
from numpy.typing import NDArray

from hypercomm.draw.scenes import Dims, distinct, group_of_each, ranks_of
from hypercomm.layout import RankLayout
from hypercomm.layout.text import counted, plural
from hypercomm.topology import Level, Topology


@attrs.frozen(eq=False)
class GroupsLit:
    """The groups over some dims.

    Args:
        numbering: The grid.
        dims: Some of its dims, in its order.
    """

    numbering: RankLayout
    dims: Dims

    @property
    def name(self) -> str:
        """The dims in one word, as in "dp+cp"."""
        return "+".join(self.dims)

    @property
    def size(self) -> int:
        """The number of members of each group."""
        return math.prod(self.numbering.sizes[dim] for dim in self.dims)

    @property
    def count(self) -> int:
        """The number of groups."""
        return self.numbering.size // self.size

    def of_each(self) -> NDArray[np.int64]:
        """Return the number of the group of each position."""
        return group_of_each(self.numbering, self.dims)

    def members(self) -> NDArray[np.int64]:
        """Return the ranks of each group, of shape (groups, members), as `to_array` does.

        >>> GroupsLit(RankLayout([2, 2], ["tp", "dp"]), ("dp",)).members().tolist()
        [[0, 2], [1, 3]]
        """
        order = np.argsort(self.of_each(), kind="stable")
        return ranks_of(self.numbering)[order].reshape(self.count, self.size)

    def reach(self, level: Level) -> tuple[int, int]:
        """Return the smallest and the largest number of a level's units that a group reaches.

        >>> import numpy
        >>> lit = GroupsLit(RankLayout([2, 2], ["tp", "dp"]), ("dp",))
        >>> lit.reach(Level("host", numpy.array([0, 0, 1, 1]), ("a", "b")))
        (2, 2)
        """
        units = level.of_rank[ranks_of(self.numbering)]
        pairs = distinct(self.of_each() * len(level.names) + units)
        counts = np.bincount(pairs // len(level.names))
        return int(counts.min()), int(counts.max())

    def words(self, topology: Topology | None = None) -> str:
        """Say how many groups there are, and how far each reaches.

        >>> GroupsLit(RankLayout([2, 3], ["tp", "dp"]), ("dp",)).words()
        '2 groups of 3'
        """
        text = f"{counted(self.count, 'group')} of {self.size:,}"
        for level in topology.levels if topology else ():
            least, most = self.reach(level)
            if least == most == 1:
                return f"{text}, {'each ' * (self.count > 1)}inside one {level.name}"
            told = f"{least:,}" if least == most else f"{least:,} to {most:,}"
            text += f", {'each ' * (self.count > 1)}on {told} {plural(level.name)}"
        return text


def dims_in(numbering: RankLayout, dims: Dims) -> Dims:
    """Return those of some dims that a grid has, in its order; all of its dims' first if none.

    >>> dims_in(RankLayout([2, 3], ["tp", "dp"]), ("dp", "pp")), dims_in(RankLayout([2], ["a"]), ())
    (('dp',), ('a',))
    """
    found = tuple(dim for dim in numbering.dim_names if dim in dims)
    return found or long_dims(numbering)[:1]


def long_dims(numbering: RankLayout) -> Dims:
    """Return the dims larger than 1; the first one where there is none.

    >>> long_dims(RankLayout([1, 2], ["tp", "dp"])), long_dims(RankLayout([1, 1], ["tp", "dp"]))
    (('dp',), ('tp',))
    """
    long = tuple(dim for dim, size in numbering.sizes.items() if size > 1)
    return long or numbering.dim_names[:1]
