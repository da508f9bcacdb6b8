"""Processes that no launcher has started."""

import os
import subprocess
import sys
from pathlib import Path

LAUNCHED = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_", "SLURM_", "OMPI_", "PMI", "PET_")


def rank_free():
    """The environment without what launchers leave in it."""
    return {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHED)}


def run_python(*words, folder=None, seconds=120, **variables):
    """Run Python with these words in a folder, with some variables more, and keep its output."""
    return subprocess.run(
        [sys.executable, *map(str, words)],
        cwd=folder,
        env=rank_free() | variables,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def state_of(pid):
    """The state of a process as `ps` shows it: T if it is stopped, Z or X if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "X"
    return stat.rpartition(")")[2].split()[0]


def is_alive(pid):
    return state_of(pid) not in "ZX"
