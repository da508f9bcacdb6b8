"""Join the job that a launcher started, run functions on local ranks, and renew WORLD."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypercomm import _resolver

if TYPE_CHECKING:
    from hypercomm.launch.joining import Joined as Joined
    from hypercomm.launch.joining import Renewed as Renewed
    from hypercomm.launch.joining import join as join
    from hypercomm.launch.joining import renew_world as renew_world
    from hypercomm.launch.run import report as report
    from hypercomm.launch.run import run_ranks as run_ranks

__all__ = ["Joined", "Renewed", "join", "renew_world", "report", "run_ranks"]

__getattr__ = _resolver(
    __name__,
    dict.fromkeys(("Joined", "Renewed", "join", "renew_world"), "hypercomm.launch.joining")
    | dict.fromkeys(("report", "run_ranks"), "hypercomm.launch.run"),
)
