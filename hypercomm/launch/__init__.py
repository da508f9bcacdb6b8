"""Join the job that a launcher started, run functions on local ranks, and renew WORLD."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypercomm.lazy import attributes

if TYPE_CHECKING:
    from hypercomm.launch.joining import (
        Joined as Joined,
        Renewed as Renewed,
        join as join,
        renew_world as renew_world,
    )
    from hypercomm.launch.run import report as report, run_ranks as run_ranks
    from hypercomm.launch.worlds import JoinedWorld as JoinedWorld, join_world as join_world

_HOMES = {
    "hypercomm.launch.joining": ("Joined", "Renewed", "join", "renew_world"),
    "hypercomm.launch.run": ("report", "run_ranks"),
    "hypercomm.launch.worlds": ("JoinedWorld", "join_world"),
}

__all__ = [name for names in _HOMES.values() for name in names]

__getattr__ = attributes(__name__, {name: at for at, names in _HOMES.items() for name in names})
