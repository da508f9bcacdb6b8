"""Environments without a rank in which a process is to be one of several: what was forgotten."""

from __future__ import annotations

from collections.abc import Mapping

from hypercomm.errors import LaunchError
from hypercomm.launch.variables import number


def check_not_launched(held: Mapping[str, str]) -> None:
    """Refuse what no launcher has started, though it is to be one of several ranks.

    Args:
        held: The variables that are set, none of which tells of a job.

    Raises:
        LaunchError: Says which variable tells so, and what to start the program with.
    """
    tasks = number("SLURM_NTASKS", held) if "SLURM_NTASKS" in held else 1
    nodes = number("SLURM_JOB_NUM_NODES", held) if "SLURM_JOB_NUM_NODES" in held else 1
    if tasks > 1 or nodes > 1:
        name, count = ("SLURM_NTASKS", tasks) if tasks > 1 else ("SLURM_JOB_NUM_NODES", nodes)
        raise LaunchError(
            f"{name}={count}, and SLURM_STEP_ID names no step: this is inside an allocation, not "
            f"in a step of it; start with srun, or unset {name} to stay on this host"
        )
    if held.get("PET_NNODES", "1") != "1":
        raise LaunchError(
            f"PET_NNODES={held['PET_NNODES']}, and there is no RANK: this is a pod of a PyTorchJob "
            f"that has not started torchrun; start with torchrun, which reads PET_*"
        )
    witness = next((name for name in ("PMIX_RANK", "MASTER_ADDR") if name in held), None)
    if witness is not None:
        raise LaunchError(
            f"RANK and WORLD_SIZE are missing, and {witness}={held[witness]} says that a launcher "
            f"has started this process; set them, or unset {witness}"
        )


_CROWDS = {
    "RAY_RAYLET_PID": (
        "this is a worker of Ray, which tells no rank: give rank=, size=, address= and port=, or "
        "use Ray Train, which sets RANK and WORLD_SIZE"
    ),
    "JOB_COMPLETION_INDEX": (
        "this is a pod of an indexed Job of Kubernetes: start torchrun in it with --node-rank"
    ),
    "PET_NPROC_PER_NODE": (
        "this is a pod of a PyTorchJob that has not started torchrun; start with torchrun, which "
        "reads PET_*"
    ),
}
"""What is set where there are others like this process, and what to do then."""


def check_alone(held: Mapping[str, str]) -> None:
    """Refuse a world of one where there are surely others.

    Args:
        held: The variables that are set, none of which tells of a job.

    Raises:
        LaunchError: Says which variable tells so, and what to do.

    Example:
        >>> check_alone({"JOB_COMPLETION_INDEX": "3"})  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        hypercomm.errors.LaunchError: JOB_COMPLETION_INDEX=3, and there is no rank: this is a ...
    """
    for name, advice in _CROWDS.items():
        if name in held and not (name == "PET_NPROC_PER_NODE" and held[name] == "1"):
            raise LaunchError(
                f"{name}={held[name]}, and there is no rank: {advice}; for a world of this process "
                f"alone give rank=0, size=1"
            )


def check_pods(held: Mapping[str, str], said: str) -> None:
    """Refuse ranks that count pods, where each pod is to have several.

    Raises:
        LaunchError: Says how many.
    """
    processes = held.get("PET_NPROC_PER_NODE", "1")
    if processes != "1":
        raise LaunchError(
            f"{said} count pods of a PyTorchJob, and PET_NPROC_PER_NODE={processes} ranks are to "
            f"run in each; start torchrun in each pod, which reads PET_*"
        )


NAMES = ("SLURM_NTASKS", "SLURM_JOB_NUM_NODES", "PET_NNODES", *_CROWDS)
"""The variables that tell of a trap."""
