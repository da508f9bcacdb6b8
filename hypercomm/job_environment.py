"""Reads rank, size and address of a job from the environment variables of launchers.

`hypercomm.join` and `hypercomm check` find their job with `find_job`. `find_number` is for a
process that has not joined its job yet.

Sources: the environment of processes that torchrun (torch 2.13), mpirun (Open MPI 4.1) and mpiexec
(MPICH 4.0) start; https://slurm.schedmd.com/srun.html, "OUTPUT ENVIRONMENT VARIABLES".
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from typing import Any

import attrs

from hypercomm.errors import LaunchError
from hypercomm.layout.text import short_repr

_FIRST_PORT = 20_000
_PORTS = 10_000
"""The number of ports to derive from. All are below the range from which Linux assigns ports."""

_LAST_STEP = 2**32 - 16
"""The first step id that SLURM reserves, for interactive, batch, extern and pending steps."""


@attrs.frozen
class Launcher:
    """Environment variables set by one launcher.

    Attributes:
        name: The name of the launcher in messages.
        rank: The variable with the rank.
        size: The variables that may contain the number of ranks. The first that is set is used.
        local_rank: The variable with the index of the rank on its host.
        local_size: The variable with the number of ranks on the host. "" if there is none.
        mark: A variable that only this launcher sets. "" if no other launcher sets the variables
            above.
    """

    name: str
    rank: str
    size: tuple[str, ...]
    local_rank: str
    local_size: str = ""
    mark: str = ""


_ENVIRONMENT = Launcher(
    "the environment",
    rank="RANK",
    size=("WORLD_SIZE",),
    local_rank="LOCAL_RANK",
    local_size="LOCAL_WORLD_SIZE",
)

LAUNCHERS = (
    attrs.evolve(_ENVIRONMENT, name="torchrun", mark="TORCHELASTIC_RUN_ID"),
    _ENVIRONMENT,
    Launcher(
        "Open MPI",
        rank="OMPI_COMM_WORLD_RANK",
        size=("OMPI_COMM_WORLD_SIZE",),
        local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
        local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
    ),
    # Other launchers that use PMI also set these variables, such as Intel MPI and srun --mpi=pmi2.
    Launcher(
        "MPICH",
        rank="PMI_RANK",
        size=("PMI_SIZE",),
        local_rank="MPI_LOCALRANKID",
        local_size="MPI_LOCALNRANKS",
    ),
    # srun is last: on several hosts, mpirun starts its daemons with srun, so the variables of srun
    # may describe the daemons.
    Launcher(
        "srun",
        rank="SLURM_PROCID",
        size=("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"),
        local_rank="SLURM_LOCALID",
        mark="SLURM_STEP_ID",
    ),
)
"""The launchers in order of precedence. The first launcher whose rank and size are set is used."""

_OTHERS = {
    "MASTER_ADDR",
    "MASTER_PORT",
    "PMIX_NAMESPACE",
    "SLURM_JOB_ID",
    "SLURM_JOB_NUM_NODES",
    "SLURM_STEP_NODELIST",
    "SLURM_JOB_NODELIST",
    "SLURM_DISTRIBUTION",
}
VARIABLES = frozenset(_OTHERS).union(
    *({row.rank, *row.size, row.local_rank, row.local_size, row.mark} - {""} for row in LAUNCHERS)
)
"""All variables that this module reads."""


@attrs.frozen
class FoundJob:
    """The job that an environment describes. Unknown values are None.

    Attributes:
        launcher: The name of the launcher.
        rank: The rank of this process.
        size: The number of ranks.
        local_rank: The index of the rank on its host.
        local_size: The number of ranks on the host.
        address: The host of rank 0.
        port: The port on that host.
        source: The variables that rank and size were read from, for messages.
    """

    launcher: str
    rank: int
    size: int
    local_rank: int | None = None
    local_size: int | None = None
    address: str | None = None
    port: int | None = None
    source: str = ""

    def rendezvous(self) -> tuple[str, int]:
        """Return the address and port of rank 0.

        Raises:
            LaunchError: The address or the port is unknown. The message explains how to set it.

        Example:
            >>> job = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "node7"}
            >>> find_job(job | {"MASTER_PORT": "29500"}).rendezvous()
            ('node7', 29500)
        """
        if self.address is not None and self.port is not None:
            return self.address, self.port
        raise LaunchError(
            f"rank {self.rank} of {self.size} ({self.source}) does not know the address and port "
            f"of rank 0: MASTER_ADDR={self.address}, MASTER_PORT={self.port}; set MASTER_ADDR to "
            f"the host of rank 0, and MASTER_PORT to a free port there (with mpirun -x, or with "
            f"mpiexec -genv)"
        )


def find_job(environment: Mapping[str, str]) -> FoundJob | None:
    """Return the job that a launcher's variables describe, or None if no variables are set.

    If a launcher runs inside another launcher, such as mpirun in a SLURM job, the variables of the
    inner launcher are used. A job may have a single rank.

    Args:
        environment: Variables and their values, such as `os.environ`.

    Raises:
        LaunchError: A value is not a number, only the rank or only the size is set, RANK and
            WORLD_SIZE contradict a launcher, or a SLURM allocation has several tasks and srun did
            not start this process.

    Example:
        >>> step = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_STEP_ID": "0",
        ...         "SLURM_JOB_ID": "4711", "SLURM_STEP_NODELIST": "gpu[03-04]"}
        >>> job = find_job(step)
        >>> job.launcher, job.rank, job.size, job.rendezvous()
        ('srun', 5, 8, ('gpu03', 24711))
    """
    variables = _known_variables(environment)
    jobs = [job for row in LAUNCHERS if (job := _job_of(row, variables)) is not None]
    if not jobs:
        _check_not_forgotten(variables)
        return None
    first = jobs[0]
    same = [job for job in jobs if (job.rank, job.size) == (first.rank, first.size)]
    for job in jobs:
        # If a user has set RANK and WORLD_SIZE, a launcher must agree with them. Two launchers may
        # differ: the outer one describes the processes that it started, such as torchrun's agents.
        if first.launcher == "the environment" and job not in same and job.size > 1:
            raise LaunchError(
                f"{first.source}, but {job.source}; unset the environment variables that were left "
                f"over from another job"
            )

    def known(field: str) -> Any:
        return next((value for job in same if (value := getattr(job, field)) is not None), None)

    here = "127.0.0.1" if known("local_size") == first.size else None
    return attrs.evolve(
        first,
        local_rank=known("local_rank"),
        local_size=known("local_size"),
        address=variables.get("MASTER_ADDR") or known("address") or here,
        port=_number("MASTER_PORT", variables, 1, 65_535)
        if "MASTER_PORT" in variables
        else known("port"),
    )


def find_number(variable: str, environment: Mapping[str, str]) -> tuple[int, str] | None:
    """Return the world size or the rank that an environment describes, or None if it has neither.

    Either of WORLD_SIZE and RANK is accepted without the other, because users may set only one of
    them by hand.

    Args:
        variable: "WORLD_SIZE" or "RANK".
        environment: Variables and their values, such as `os.environ`.

    Returns:
        The number, and the variables that it was read from.

    Raises:
        LaunchError: The variables are incomplete or contradict each other, as for `find_job`.

    Example:
        >>> step = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_STEP_ID": "0"}
        >>> find_number("RANK", step)
        (5, 'SLURM_PROCID=5 and SLURM_NTASKS=8 of srun')
        >>> find_number("WORLD_SIZE", {"WORLD_SIZE": "4096"})
        (4096, 'WORLD_SIZE=4096')
    """
    variables = _known_variables(environment)
    by_hand = {"WORLD_SIZE", "RANK"} & variables.keys()
    if by_hand == {variable}:
        number = _number(variable, variables, smallest=int(variable == "WORLD_SIZE"))
        return number, f"{variable}={number}"
    job = find_job(
        {name: variables[name] for name in variables if len(by_hand) == 2 or name not in by_hand}
    )
    if job is None:
        return None
    return job.size if variable == "WORLD_SIZE" else job.rank, job.source


def _known_variables(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the non-empty variables that this module reads, without spaces around the values.

    SLURM_STEP_ID is left out unless srun started the step.
    """
    variables = {name: environment[name].strip() for name in VARIABLES.intersection(environment)}
    variables = {name: text for name, text in variables.items() if text}
    step = variables.get("SLURM_STEP_ID", "")
    if not step.isdecimal() or _number("SLURM_STEP_ID", variables, largest=2**32) >= _LAST_STEP:
        variables.pop("SLURM_STEP_ID", None)
    return variables


def _job_of(launcher: Launcher, variables: Mapping[str, str]) -> FoundJob | None:
    """Return the job that the variables of one launcher describe, or None if they are not set."""
    size_name = next((name for name in launcher.size if name in variables), None)
    if size_name is None or not {launcher.rank, launcher.mark or launcher.rank} <= variables.keys():
        return None
    rank = _number(launcher.rank, variables)
    size = _number(size_name, variables, 1)
    source = f"{launcher.rank}={rank} and {size_name}={size} of {launcher.name}"
    if rank >= size:
        raise LaunchError(f"{source}: a job of {size} ranks has ranks 0 to {size - 1}")
    local_rank, local_size = (
        _number(name, variables) if name in variables else None
        for name in (launcher.local_rank, launcher.local_size)
    )
    address = port = None
    if launcher.name == "srun":
        address = _first_host(variables)
        port = _port_of_step(variables)
    elif (
        launcher.name == "Open MPI" and "PMIX_NAMESPACE" in variables
    ):  # each mpirun has another one
        text = variables["PMIX_NAMESPACE"].encode(errors="replace")
        port = _FIRST_PORT + zlib.crc32(text) % _PORTS
    return FoundJob(launcher.name, rank, size, local_rank, local_size, address, port, source)


def _check_not_forgotten(variables: Mapping[str, str]) -> None:
    """Raise if variables of a launcher are set although no rank was found.

    Raises:
        LaunchError: Such a variable is set. The message explains what to set, unset or start.
    """
    for launcher in LAUNCHERS:
        there = next((name for name in (launcher.rank, *launcher.size) if name in variables), None)
        if there is not None and (not launcher.mark or launcher.mark in variables):
            missing = launcher.size[0] if there == launcher.rank else launcher.rank
            raise LaunchError(
                f"{missing} is missing, but {there}={short_repr(variables[there])} of "
                f"{launcher.name} is set; set both, or unset {there}"
            )
    for name in ("SLURM_NTASKS", "SLURM_JOB_NUM_NODES"):
        if name in variables and _number(name, variables) > 1:
            raise LaunchError(
                f"{name}={variables[name]} is set, but srun did not start this process, which is "
                f"in a SLURM allocation; start it with srun, or unset {name}"
            )
    if "MASTER_ADDR" in variables:  # otherwise each process would create a world of one rank
        raise LaunchError(
            f"RANK and WORLD_SIZE are missing, but "
            f"MASTER_ADDR={short_repr(variables['MASTER_ADDR'])} is set; set all of them, or none"
        )


def _number(
    name: str, variables: Mapping[str, str], smallest: int = 0, largest: int = 2**31
) -> int:
    text = variables[name]
    if not re.fullmatch(r"[0-9]{1,10}", text) or not smallest <= int(text) <= largest:
        raise LaunchError(
            f"{name} must be an integer from {smallest} to {largest}, got {short_repr(text)}"
        )
    return int(text)


def _first_host(variables: Mapping[str, str]) -> str | None:
    """Return the host of rank 0: the first host of a list such as "gpu[03-04,9],login"."""
    if variables.get("SLURM_DISTRIBUTION", "").startswith("arbitrary"):  # rank 0 may be on any host
        return None
    nodes = variables.get("SLURM_STEP_NODELIST") or variables.get("SLURM_JOB_NODELIST") or ""
    first = re.match(r"(?:[^\[\],\s]|\[[^\[\]]*\])+", nodes)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first.group()) or None if first else None


def _port_of_step(variables: Mapping[str, str]) -> int | None:
    """Return a port for a step. Steps of one job may share hosts, so they get different ports."""
    if "SLURM_JOB_ID" not in variables:
        return None
    number = _number("SLURM_JOB_ID", variables) + 7919 * int(variables["SLURM_STEP_ID"])
    return _FIRST_PORT + number % _PORTS
