"""Stand-ins for a process group and for work, where no rank is there to communicate with."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import Any

import torch
from torch.distributed import ProcessGroup, Work

from hypercomm.errors import SimulationError
from hypercomm.testing.simulation.calls import Ledger


class SimulatedGroup:
    """Stands in for a process group of the calling rank: knows all but how to communicate."""

    bound_device_id = None

    def __init__(
        self, name: str, rank: int, size: int, timeout: timedelta, description: str
    ) -> None:
        self.group_name = name
        self.group_desc = description
        self.options = SimpleNamespace(_timeout=timeout)
        self._rank = rank
        self._size = size

    def rank(self) -> int:
        """Return the position of the calling rank among the members."""
        return self._rank

    def size(self) -> int:
        """Return the number of members."""
        return self._size

    def name(self) -> str:
        """Return what kind of backend this is."""
        return "simulated"

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """What DeviceMesh asks for, though this is none."""
        return ProcessGroup

    def _get_backend(self, _device: object) -> SimulatedGroup:
        return self

    def __getattr__(self, name: str) -> Any:
        raise SimulationError(
            f"a simulated process group has no {name!r}: no rank is there to communicate with; "
            f"leave communication out of what is simulated, or start ranks with run_ranks()"
        )

    def __repr__(self) -> str:
        return f"<simulated group {self.group_name}: rank {self._rank} of {self._size}>"


class SimulatedWork(Work):
    """What a collective of a simulated rank returns: it is done."""

    def __init__(
        self, ledger: Ledger, place: int, results: Sequence[torch.Tensor], source: int = 0
    ) -> None:
        super().__init__()
        self._ledger = ledger
        self._stream = ledger.current
        self._place = place
        self._results = list(results)
        self._source = source

    def wait(self, timeout: timedelta | None = None) -> bool:  # noqa: ARG002 - torch's arguments
        """Record that the rank waits here."""
        self._ledger.wait(self._stream, self._place)
        return True

    synchronize = wait  # type: ignore[assignment]

    def is_completed(self) -> bool:
        """Return True."""
        return True

    is_success = is_completed

    def exception(self) -> None:
        """Return None."""

    def result(self) -> list[torch.Tensor]:
        """Return the outputs."""
        return self._results

    def get_future(self) -> Any:
        """Return a future that has the outputs."""
        future: Any = torch.futures.Future()
        future.set_result(self._results)
        return future

    def source_rank(self) -> int:
        """Return who sent, by its position in the group."""
        return self._source

    _source_rank = source_rank
