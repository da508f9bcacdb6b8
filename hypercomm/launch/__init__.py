"""Local ranks for tests and `hypercomm check`, and the jobs that launchers start."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypercomm import _resolver

if TYPE_CHECKING:
    from hypercomm.launch.local_rank import report as report
    from hypercomm.launch.run import run_ranks as run_ranks

__all__ = ["report", "run_ranks"]

__getattr__ = _resolver(
    __name__, {"report": "hypercomm.launch.local_rank", "run_ranks": "hypercomm.launch.run"}
)
