"""The variables of a SLURM step: the host of its rank 0, and the number of ranks on each host.

Source: srun(1), "OUTPUT ENVIRONMENT VARIABLES", https://slurm.schedmd.com/srun.html.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from hypercomm.launch.variables import number, port_of

NAMES = (
    *("SLURM_STEP_ID", "SLURM_JOB_ID", "SLURM_JOBID", "SLURM_NODEID", "SLURM_DISTRIBUTION"),
    *("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST"),
    *("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE"),
)
"""The variables that this module reads."""

_LAST_STEP = 2**32 - 16
"""Step ids from here on are SLURM's own: interactive, batch, extern, pending."""


def is_step(held: Mapping[str, str]) -> bool:
    """Return whether srun started this process, and not salloc or sbatch.

    Raises:
        LaunchError: SLURM_STEP_ID is a number that no step has.

    Example:
        >>> is_step({"SLURM_STEP_ID": "0"}), is_step({"SLURM_STEP_ID": "4294967291"}), is_step({})
        (True, False, False)
    """
    step = held.get("SLURM_STEP_ID", "")
    return step.isdecimal() and number("SLURM_STEP_ID", held, largest=2**32 - 1) < _LAST_STEP


def port_of_step(job: int, step: int) -> int:
    """Return a port for a step of a SLURM job, the same on all its ranks.

    Steps of one job get different ones, as they may have the same hosts.

    >>> port_of_step(4711, 0), port_of_step(4711, 1)
    (24711, 22630)
    """
    return port_of(job + 7919 * step)


def tasks_on(node: int, tasks: str) -> int | None:
    """Return the number of ranks on a host of a step; None if the text cannot be read.

    Args:
        node: The number of the host in the step.
        tasks: The value of SLURM_STEP_TASKS_PER_NODE.

    Example:
        >>> tasks_on(0, "4(x2),3"), tasks_on(1, "4(x2),3"), tasks_on(2, "4(x2),3")
        (4, 4, 3)
    """
    for part in tasks.split(","):
        found = re.fullmatch(r"([0-9]{1,9})(?:\(x([0-9]{1,9})\))?", part.strip())
        if found is None:
            return None
        node -= int(found[2] or 1)
        if node < 0:
            return int(found[1]) or None
    return None


def first_host(nodes: str) -> str:
    """Return the first host of a node list; "" if there is none.

    Example:
        >>> first_host("gpu[03-04,9],login"), first_host("a[1-2]b[5,7]"), first_host("")
        ('gpu03', 'a1b5', '')
    """
    found = re.match(r"(?:[^\[\],\s]|\[[^\[\]]*\])+", nodes.strip())
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", found.group() if found else "")


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
    return None if hosts is None else first_host(hosts) or None


def port(held: Mapping[str, str]) -> int | None:
    """Return the port of this step, the same on all its ranks; None where nothing tells.

    Raises:
        LaunchError: A variable holds no number.
    """
    job = next((name for name in ("SLURM_JOB_ID", "SLURM_JOBID") if name in held), None)
    if job is None:
        return None
    return port_of_step(number(job, held), number("SLURM_STEP_ID", held))
