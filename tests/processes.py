"""Starts processes without the environment variables of launchers."""

import os
import subprocess
import sys
from pathlib import Path

LAUNCHER_VARIABLES = (
    "RANK",
    "LOCAL_RANK",
    "WORLD_SIZE",
    "MASTER_",
    "SLURM_",
    "OMPI_",
    "PMI",
    "PET_",
)


def launcher_free():
    """Return the environment without the variables of launchers."""
    return {
        name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_VARIABLES)
    }


def run_python(
    *arguments, folder=None, seconds=120, **variables
) -> subprocess.CompletedProcess[str]:
    """Run Python in a folder with extra environment variables, and capture its output."""
    return subprocess.run(
        [sys.executable, *map(str, arguments)],
        cwd=folder,
        env=launcher_free() | variables,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )


def state_of(pid):
    """Return the state of a process as `ps` shows it: T if stopped, Z or X if it has ended."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return "X"
    return stat.rpartition(")")[2].split()[0]


def is_alive(pid):
    return state_of(pid) not in "ZX"
