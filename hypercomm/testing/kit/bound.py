"""What `--ranks-max` lets the examples of `given_ranks` start, in the test that runs."""

from __future__ import annotations

from contextvars import ContextVar

import attrs


@attrs.define
class Bound:
    """The most ranks that an example may have, and what came of it.

    Attributes:
        limit: That many.
        ran: How many examples had no more.
        left_out: The ranks of each example that had.
    """

    limit: int
    ran: int = 0
    left_out: list[int] = attrs.field(factory=list)

    def lets(self, nprocs: int) -> bool:
        """Whether an example of so many ranks may start; counts it.

        Example:
            >>> bound = Bound(4)
            >>> bound.lets(2), bound.lets(5)
            (True, False)
            >>> bound.told()
            '1 of 2 examples were not started: they have more than --ranks-max=4 ranks'
        """
        if nprocs > self.limit:
            self.left_out.append(nprocs)
            return False
        self.ran += 1
        return True

    def told(self) -> str:
        """Say how many examples were left out."""
        count = len(self.left_out)
        return (
            f"{count} of {count + self.ran} examples were not started: they have more than "
            f"--ranks-max={self.limit} ranks"
        )


current: ContextVar[Bound | None] = ContextVar("current", default=None)
"""That of pytest's test that runs; None: nobody gave the option."""
