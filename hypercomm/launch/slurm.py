"""What SLURM says of a step: where its rank 0 runs, and how many ranks each host has.

Source: srun(1), "OUTPUT ENVIRONMENT VARIABLES", https://slurm.schedmd.com/srun.html.
"""

from __future__ import annotations

from collections.abc import Mapping

from hypercomm.launch.variables import number, port_of
from hypercomm.topology.node_lists import first_of, tasks_of

NAMES = (
    *("SLURM_STEP_ID", "SLURM_JOB_ID", "SLURM_JOBID", "SLURM_NODEID", "SLURM_DISTRIBUTION"),
    *("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"),
    *("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
)
"""The variables that are read here."""

_LAST_STEP = 2**32 - 16
"""SLURM's steps from here on are not the user's: interactive, batch, extern, pending."""


def is_step(held: Mapping[str, str]) -> bool:
    """Tell whether srun has started this process, and not salloc or sbatch.

    Example:
        >>> is_step({"SLURM_STEP_ID": "0"}), is_step({"SLURM_STEP_ID": "4294967291"}), is_step({})
        (True, False, False)
    """
    step = held.get("SLURM_STEP_ID", "")
    return step.isdecimal() and int(step) < _LAST_STEP


def port_of_step(job: int, step: int) -> int:
    """Return a port for a step of a SLURM job, the same on all its ranks.

    Steps of one job get different ones, as they may have the same hosts.

    >>> port_of_step(4711, 0), port_of_step(4711, 1)
    (24711, 22630)
    """
    return port_of(job + 7919 * step)


def tasks_on(node: int, tasks: str) -> int | None:
    """Return how many ranks a host of a step has; None where the text does not tell.

    Args:
        node: The number of the host in the step.
        tasks: As SLURM_STEP_TASKS_PER_NODE writes them.

    Example:
        >>> tasks_on(0, "4(x2),3"), tasks_on(1, "4(x2),3"), tasks_on(2, "4(x2),3")
        (4, 4, 3)
    """
    for count, hosts in tasks_of(tasks) or ():
        node -= hosts
        if node < 0:
            return count or None
    return None


def local_size(held: Mapping[str, str]) -> int | None:
    """Return the number of ranks of the step on this host; None where nothing tells.

    Raises:
        LaunchError: SLURM_NODEID holds no number.
    """
    names = ("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    tasks = next((held[name] for name in names if name in held), None)
    if tasks is None or "SLURM_NODEID" not in held:
        return None
    return tasks_on(number("SLURM_NODEID", held), tasks)


def address(held: Mapping[str, str]) -> str | None:
    """Return the host of rank 0; None where nothing tells."""
    if held.get("SLURM_DISTRIBUTION", "").startswith("arbitrary"):  # rank 0 may be on any
        return None
    lists = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    hosts = next((held[name] for name in lists if name in held), None)
    return None if hosts is None else first_of(hosts) or None


def port(held: Mapping[str, str]) -> int | None:
    """Return the port of this step, the same on all its ranks; None where nothing tells.

    Raises:
        LaunchError: A variable holds no number.
    """
    job = next((name for name in ("SLURM_JOB_ID", "SLURM_JOBID") if name in held), None)
    if job is None:
        return None
    return port_of_step(number(job, held), number("SLURM_STEP_ID", held))
