"""RankGroups: the disjoint groups of ranks that some dims make, and groups derived from groups.

A question about one rank or one group is arithmetic on a handful of axes; nothing on its path
grows with the number of groups. Enumeration of everything is vectorised.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import attrs
import numpy as np
from numpy.typing import NDArray

from hypercomm.errors import LayoutError, RankOutsideError
from hypercomm.layout.reading.checks import as_few, as_int, as_tuple, positive
from hypercomm.layout.reading.shown import shown
from hypercomm.layout.reading.sizes import divisors
from hypercomm.layout.reading.tables import MOST_ROWS, as_frame, as_html

_SHOWN = 5
"""Members of a group that its repr shows."""


class RankGroups(ABC, Sequence[tuple[int, ...]]):
    """Disjoint groups of ranks, all of one size, each a tuple.

    Members are ascending, unless the layout lists its ranks in another order (`is_sorted` tells);
    then they are in the layout's. It is a sequence of tuples: `len(groups)`, `groups[i]`, `for
    group in groups`. Groups are ordered like the ranks: the first dim that tells groups apart
    varies fastest.

    Example:
        >>> from hypercomm import RankLayout
        >>> dp = RankLayout.parse("tp=2,dp=3").groups("dp")
        >>> len(dp), dp.group_size, list(dp)
        (2, 3, [(0, 2, 4), (1, 3, 5)])
        >>> dp.of(3), dp.index_of(3), dp.position_of(3)
        ((1, 3, 5), 1, 1)
    """

    __slots__ = ()

    @property
    @abstractmethod
    def group_size(self) -> int:
        """The number of members of every group."""

    @abstractmethod
    def locate(self, rank: int) -> tuple[int, int]:
        """Return (index of the group, position within it) of `rank`.

        Raises:
            RankOutsideError: `rank` is a member of no group.
        """

    @abstractmethod
    def members(self, index: int, positions: range) -> tuple[int, ...]:
        """Return the ranks at `positions` of group `index`; neither is checked."""

    @abstractmethod
    def to_array(self) -> NDArray[np.int64]:
        """Enumerate all groups as an array of shape (number of groups, group size)."""

    @property
    def is_sorted(self) -> bool:
        """Whether the members of every group ascend; at once, unless the layout lists its ranks.

        Example:
            >>> from hypercomm import RankLayout
            >>> listed = RankLayout([2, 2], ["tp", "dp"], ranks=[3, 1, 7, 5])
            >>> listed.groups("tp").is_sorted, listed.groups("dp").is_sorted
            (False, True)
        """
        return bool((np.diff(self.to_array(), axis=1) > 0).all())

    def of(self, rank: int) -> tuple[int, ...]:
        """Return the group that `rank` is a member of, in O(dims + size of the answer).

        Raises:
            RankOutsideError: `rank` is a member of no group.
        """
        return self.members(self.locate(rank)[0], range(self.group_size))

    def index_of(self, rank: int) -> int:
        """Return the index of the group that `rank` is a member of."""
        return self.locate(rank)[0]

    def position_of(self, rank: int) -> int:
        """Return the position of `rank` within its group: its group rank."""
        return self.locate(rank)[1]

    def has_member(self, rank: int) -> bool:
        """Tell whether `rank` is a member of any of the groups."""
        try:
            self.locate(rank)
        except RankOutsideError:
            return False
        return True

    def chunks(self, size: int) -> RankGroups:
        """Cut every group into consecutive groups of `size` members.

        Raises:
            LayoutError: `size` does not divide the group size.

        Example:
            >>> from hypercomm import RankLayout
            >>> list(RankLayout.parse("dp=6").groups("dp").chunks(3))
            [(0, 1, 2), (3, 4, 5)]
        """
        size = positive(size, "the chunk size")
        if self.group_size % size:
            raise LayoutError(
                f"chunk size {size} does not divide the group size {self.group_size}; "
                f"use one of {divisors(self.group_size)}"
            )
        return SlicedGroups(self, size, 1)

    def levels(self, sizes: Sequence[int]) -> tuple[RankGroups, ...]:
        """Factorise every group into hierarchical sub-groups, one `RankGroups` for each level.

        Level 0 takes `sizes[0]` consecutive members, level 1 takes `sizes[1]` members that are
        `sizes[0]` apart, and so on. This is what Megatron's `create_hierarchical_groups` makes
        for hierarchical context parallelism.

        Args:
            sizes: Group size of each level, innermost first; their product is the group size.

        Raises:
            LayoutError: The product of `sizes` is not the group size.

        Example:
            >>> from hypercomm import RankLayout
            >>> inner, outer = RankLayout.parse("cp=4").groups("cp").levels([2, 2])
            >>> list(inner), list(outer)
            ([(0, 1), (2, 3)], [(0, 2), (1, 3)])
        """
        sizes = [positive(size, "every level size") for size in as_few(sizes, "level sizes")]
        if math.prod(sizes) != self.group_size:
            factors = " * ".join(map(str, sizes)) or "1"
            raise LayoutError(
                f"level sizes {factors} = {math.prod(sizes)}, but each group has "
                f"{self.group_size} members"
            )
        return tuple(
            SlicedGroups(self, size, math.prod(sizes[:level])) for level, size in enumerate(sizes)
        )

    def pick(self, function: Callable[[tuple[int, ...]], Sequence[int]]) -> RankGroups:
        """Keep of every group the ranks that `function` names, each once, in the group's order.

        `function` sees one group at a time, and must keep equally many ranks of each. Megatron's
        embedding groups are the first and last stage of every pipeline.

        Raises:
            LayoutError: When a group is looked at, if `function` names no rank, a rank that is
                not in the group, or another number of ranks than for the first group.

        Example:
            >>> from hypercomm import RankLayout
            >>> pp = RankLayout.parse("tp=2,pp=3").groups("pp")
            >>> list(pp.pick(lambda group: (group[0], group[-1])))
            [(0, 4), (1, 5)]
        """
        if not callable(function):
            raise LayoutError(f"pick() takes a function of a group, got {shown(function)}")
        return PickedGroups(self, function)

    def __getitem__(self, index: int) -> tuple[int, ...]:  # type: ignore[override]
        index = as_int(index, "the index of a group")
        position = index + len(self) if index < 0 else index
        if not 0 <= position < len(self):
            raise IndexError(f"group {index} is out of range; there are {len(self)} groups")
        return self.members(position, range(self.group_size))

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return map(tuple, self.to_array().tolist())

    # ---- how it looks -----------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Return the groups as a dict of lists and numbers, which JSON can hold.

        Example:
            >>> from hypercomm import RankLayout
            >>> RankLayout.parse("tp=2,dp=2").groups("dp").to_dict()
            {'group_size': 2, 'groups': [[0, 2], [1, 3]]}
        """
        return {"group_size": self.group_size, "groups": self.to_array().tolist()}

    def to_lists(self) -> list[list[int]]:
        """Return all groups as lists, as what creates a group for each list takes them.

        vLLM's and SGLang's `init_model_parallel_group(group_ranks, local_rank, backend)` is one
        such: every rank gives the same lists, and is in one of them.

        Example:
            >>> from hypercomm import RankLayout
            >>> RankLayout.parse("tp=2,pp=2,dp=2").groups("pp").to_lists()
            [[0, 2], [1, 3], [4, 6], [5, 7]]
        """
        lists: list[list[int]] = self.to_array().tolist()
        return lists

    def to_pandas(self) -> Any:
        """Return a pandas DataFrame with a row for each group, and a column for each position.

        Raises:
            MissingPackageError: pandas is not installed; says how to install it.
        """
        return as_frame(dict(enumerate(self.to_array().T)), "group", range(len(self)))

    def _repr_html_(self) -> str:
        rows = [(index, self._shorten(index)) for index in range(min(len(self), MOST_ROWS))]
        headline = f"{len(self)} groups of {self.group_size} ranks"
        return as_html(headline, ("group", "ranks"), rows, more=len(self) - len(rows))

    def __repr__(self) -> str:
        first = ", ".join(self._shorten(index) for index in range(min(len(self), 2)))
        more = ", ..." if len(self) > 2 else ""
        return f"<{len(self)} groups of {self.group_size}: {first}{more}>"

    def _shorten(self, index: int) -> str:
        """Write a group, leaving out the middle of a long one."""
        size = self.group_size
        if size <= _SHOWN:
            return str(self[index])
        first = self.members(index, range(_SHOWN - 1))
        (last,) = self.members(index, range(size - 1, size))
        return f"({', '.join(map(str, first))}, ..., {last})"


@attrs.frozen(repr=False)
class SlicedGroups(RankGroups):
    """Every `step`-th member of each parent group, `size` of them: chunks and hierarchy levels."""

    parent: RankGroups
    size: int
    step: int

    @property
    def group_size(self) -> int:
        return self.size

    @property
    def is_sorted(self) -> bool:
        """Whether the members of every group ascend: where the parent's do, and perhaps beyond."""
        return self.parent.is_sorted or super().is_sorted

    @property
    def _per_parent(self) -> int:
        return self.parent.group_size // self.size

    def __len__(self) -> int:
        return len(self.parent) * self._per_parent

    def locate(self, rank: int) -> tuple[int, int]:
        parent_index, parent_position = self.parent.locate(rank)
        block, within = divmod(parent_position, self.size * self.step)
        position, phase = divmod(within, self.step)
        return parent_index * self._per_parent + block * self.step + phase, position

    def members(self, index: int, positions: range) -> tuple[int, ...]:
        parent_index, within = divmod(index, self._per_parent)
        block, phase = divmod(within, self.step)
        start = block * self.size * self.step + phase
        return self.parent.members(
            parent_index,
            range(
                start + positions.start * self.step,
                start + positions.stop * self.step,
                positions.step * self.step,
            ),
        )

    def to_array(self) -> NDArray[np.int64]:
        blocks = self.parent.to_array().reshape(-1, self.size, self.step)
        return np.ascontiguousarray(blocks.swapaxes(1, 2)).reshape(-1, self.size)


@attrs.frozen(repr=False)
class PickedGroups(RankGroups):
    """The ranks of each parent group that a function names."""

    parent: RankGroups
    function: Callable[[tuple[int, ...]], Sequence[int]]

    @property
    def group_size(self) -> int:
        return len(self._pick(0))

    @property
    def is_sorted(self) -> bool:
        """Whether the members of every group ascend: where the parent's do, and perhaps beyond."""
        return self.parent.is_sorted or super().is_sorted

    def __len__(self) -> int:
        return len(self.parent)

    def locate(self, rank: int) -> tuple[int, int]:
        index = self.parent.index_of(rank)
        picked = self._pick(index)
        if rank not in picked:
            raise RankOutsideError(
                f"rank {shown(rank)} is not picked from its group; of that group, {picked} are"
            )
        return index, picked.index(rank)

    def members(self, index: int, positions: range) -> tuple[int, ...]:
        return self._pick(index)[positions.start : positions.stop : positions.step]

    def to_array(self) -> NDArray[np.int64]:
        everyone = range(self.group_size)
        flat = chain.from_iterable(self.members(index, everyone) for index in range(len(self)))
        return np.fromiter(flat, dtype=np.int64).reshape(len(self), -1)

    def _pick(self, index: int) -> tuple[int, ...]:
        group = self.parent[index]
        chosen = as_tuple(self.function(group), "what pick() keeps")
        named = {as_int(rank, "what pick() keeps") for rank in chosen}
        picked = tuple(rank for rank in group if rank in named)
        if not picked or len(picked) < len(named):
            raise LayoutError(
                f"pick() must name at least one rank, all from group {index} {group}; "
                f"the function returned {tuple(sorted(named))}"
            )
        if index and len(picked) != self.group_size:
            raise LayoutError(
                f"pick() must keep equally many ranks of every group, but it keeps "
                f"{self.group_size} of group 0 and {len(picked)} of group {index}"
            )
        return picked
