"""Place: where a rank is in its group, and who is beside it."""

from __future__ import annotations

import attrs


@attrs.frozen
class Place:
    """A rank's place in its group.

    Attributes:
        ranks: The ranks of the group, in its order.
        rank: The rank's position among them.
    """

    ranks: tuple[int, ...]
    rank: int

    @property
    def size(self) -> int:
        """The number of ranks in the group."""
        return len(self.ranks)

    @property
    def is_first(self) -> bool:
        """Whether no rank of the group comes before."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """Whether no rank of the group comes after."""
        return self.rank == len(self.ranks) - 1

    def next(self, *, periodic: bool = False) -> int | None:
        """Return the rank that comes after, as torch numbers ranks; None after the last one.

        Args:
            periodic: Whether the first rank comes after the last one, as in a ring.
        """
        return self._beside(1, periodic)

    def prev(self, *, periodic: bool = False) -> int | None:
        """Return the rank that comes before; None before the first one, as for `next`."""
        return self._beside(-1, periodic)

    def _beside(self, by: int, periodic: bool) -> int | None:
        at = self.rank + by
        if periodic:
            at %= len(self.ranks)
        return self.ranks[at] if 0 <= at < len(self.ranks) else None
