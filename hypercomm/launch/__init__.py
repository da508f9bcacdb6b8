"""Local ranks for tests and `hypercomm check`, and the jobs that launchers start."""

from hypercomm.launch.local_rank import report as report
from hypercomm.launch.run import run_ranks as run_ranks

__all__ = ["report", "run_ranks"]
