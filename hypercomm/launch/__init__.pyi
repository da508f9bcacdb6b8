# The names that `__init__.py` imports on first access.

from hypercomm.launch.joining import (
    Joined as Joined,
    Renewed as Renewed,
    join as join,
    renew_world as renew_world,
)
from hypercomm.launch.run import report as report, run_ranks as run_ranks
from hypercomm.launch.worlds import JoinedWorld as JoinedWorld, join_world as join_world

__all__ = [
    "Joined",
    "JoinedWorld",
    "Renewed",
    "join",
    "join_world",
    "renew_world",
    "report",
    "run_ranks",
]
