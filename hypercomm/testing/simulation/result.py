"""The result of a simulation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

import attrs

from hypercomm.errors import DisagreementError
from hypercomm.layout.text import counted
from hypercomm.testing.simulation.judging import CallDisagreement, Disagreement
from hypercomm.testing.simulation.records import Collective, Creation

Result = TypeVar("Result")

_SHOWN = 5
"""Disagreements of a kind that a simulation shows as text."""


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
    creations: Mapping[int, tuple[Creation, ...]]
    collectives: Mapping[int, Sequence[Collective]]
    disagreements: tuple[Disagreement | CallDisagreement, ...]

    def check(self) -> None:
        """Raise unless all simulated ranks agree.

        Raises:
            DisagreementError: They do not agree (an AssertionError); shows the first disagreements.
        """
        if self.disagreements:
            raise DisagreementError("\n".join(self._lines()))

    def _lines(self) -> Iterator[str]:
        groups = [one for one in self.disagreements if isinstance(one, Disagreement)]
        calls = [one for one in self.disagreements if not isinstance(one, Disagreement)]
        kinds = (("process group", "come about", groups), ("collective", "meet", calls))
        for what, verb, found in kinds:
            if found:
                yield f"{counted(len(found), what)} would not {verb}:"
                yield from (f"  {one}" for one in found[:_SHOWN])
            if len(found) > _SHOWN:
                yield f"  and {len(found) - _SHOWN:,} more"

    @property
    def _headline(self) -> str:
        groups = {creation.name for made in self.creations.values() for creation in made}
        each = _range([len(made) for made in self.creations.values()])
        calls = _range([len(called) for called in self.collectives.values()])
        told = (
            f"{len(self.creations):,} of {self.world_size:,} ranks: {len(groups):,} process "
            f"groups, {each} on each rank"
        )
        if calls != "0":
            told += f"; {calls} collectives on each"
        return told

    def to_dict(self) -> dict[str, Any]:
        """Return the groups and disagreements as a dict for JSON, without the return values.

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

    def __repr__(self) -> str:
        agree = f"{len(self.disagreements):,} disagreements" if self.disagreements else "all agree"
        return f"<Simulation of {self._headline}; {agree}>"

    def __str__(self) -> str:
        return "\n".join(
            [self._headline, *(self._lines() if self.disagreements else ["all ranks agree"])]
        )


def _range(counts: Sequence[int]) -> str:
    few, many = (min(counts), max(counts)) if counts else (0, 0)
    return f"{few}" if few == many else f"{few} to {many}"
