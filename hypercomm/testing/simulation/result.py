"""The result of a simulation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import attrs

from hypercomm.errors import DisagreementError
from hypercomm.layout.text import counted
from hypercomm.testing.simulation.judging import Disagreement
from hypercomm.testing.simulation.records import Collective, Creation

Result = TypeVar("Result")

_SHOWN = 5
"""Disagreements that a simulation shows as text."""


@attrs.frozen(repr=False)
class Simulation(Generic[Result]):
    """The result of a simulated job; str() summarises it.

    Attributes:
        world_size: The number of ranks of the job.
        returned: The return values of the function, by simulated rank.
        creations: The process groups that each rank would create as a member, in its order.
        collectives: The collectives, sends and receives that each rank called, in its order.
        disagreements: The creations, collectives, sends and receives that differ or never end,
            with the ranks that wait and those that are missing.
    """

    world_size: int
    returned: Mapping[int, Result]
    creations: Mapping[int, Sequence[Creation]]
    collectives: Mapping[int, Sequence[Collective]]
    disagreements: tuple[Disagreement, ...]

    def check(self) -> None:
        """Raise unless all simulated ranks agree.

        Raises:
            DisagreementError: They do not agree (an AssertionError); shows the first disagreements.
        """
        if self.disagreements:
            raise DisagreementError("\n".join(self._lines()))

    def to_dict(self) -> dict[str, Any]:
        """Return the groups and disagreements as a dict for JSON, without the return values.

        Returns:
            A dict with the keys "world_size", "ranks", "groups" and "disagreements".

        Example:
            >>> from hypercomm.testing import simulate
            >>> simulate(int, 2).to_dict()
            {'world_size': 2, 'ranks': [0, 1], 'groups': [], 'disagreements': []}
        """
        groups = {made.name: made for every in self.creations.values() for made in every}
        return {
            "world_size": self.world_size,
            "ranks": list(self.creations),
            "groups": [
                {
                    "name": made.name,
                    "ranks": list(made.ranks),
                    "backend": made.backend,
                    "timeout_s": made.timeout.total_seconds(),
                    "description": made.called,
                }
                for made in groups.values()
            ],
            "disagreements": [str(disagreement) for disagreement in self.disagreements],
        }

    def _lines(self) -> Iterator[str]:
        yield f"{counted(len(self.disagreements), 'disagreement')}:"
        yield from (f"  {one}" for one in self.disagreements[:_SHOWN])
        if len(self.disagreements) > _SHOWN:
            yield f"  and {len(self.disagreements) - _SHOWN:,} more"

    @property
    def _headline(self) -> str:
        groups = {creation.name for made in self.creations.values() for creation in made}
        calls = _range(self.collectives)
        return (
            f"{len(self.creations):,} of {self.world_size:,} ranks: {len(groups):,} process "
            f"groups, {_range(self.creations)} on each rank"
        ) + (f"; {calls} collectives on each" if calls != "0" else "")

    def __repr__(self) -> str:
        agree = f"{len(self.disagreements):,} disagreements" if self.disagreements else "all agree"
        return f"<Simulation of {self._headline}; {agree}>"

    def __str__(self) -> str:
        return "\n".join(
            [self._headline, *(self._lines() if self.disagreements else ["all ranks agree"])]
        )


def _range(every: Mapping[int, Sequence[object]]) -> str:
    counts = [len(each) for each in every.values()] or [0]
    few, many = min(counts), max(counts)
    return f"{few}" if few == many else f"{few} to {many}"
