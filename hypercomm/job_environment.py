"""The variables that launchers set for the ranks that they start, and the job that they describe.

`hypercomm.join` and `hypercomm check` find their job with `find_job`; `find_number` is for a
process that has not joined its job yet.

Sources: torchrun of torch 2.13, mpirun of Open MPI 4.1 and mpiexec of MPICH 4.0 as they print
them; https://slurm.schedmd.com/srun.html, "OUTPUT ENVIRONMENT VARIABLES".
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from typing import Any

import attrs

from hypercomm.errors import LaunchError
from hypercomm.layout.text import short_repr

_FIRST_PORT, _PORTS = 20_000, 10_000
"""Derived ports are below those that Linux assigns."""

_LAST_STEP = 2**32 - 16
"""SLURM uses step ids from here on for itself: interactive, batch, extern and pending."""


@attrs.frozen
class Launcher:
    """The variables that one launcher sets.

    Attributes:
        name: Its name in messages.
        rank: The variable that holds the rank.
        size: The variables that may hold the number of ranks; the first one that is set counts.
        local_rank: The variable that holds the index of the rank on its host.
        local_size: The variable that holds the number of ranks on the host.
        mark: A variable that distinguishes it from launchers that set the same ones.
    """

    name: str
    rank: str
    size: tuple[str, ...]
    local_rank: str
    local_size: str = ""
    mark: str = ""


_BY_HAND = ("RANK", ("WORLD_SIZE",), "LOCAL_RANK", "LOCAL_WORLD_SIZE")

LAUNCHERS = (
    Launcher("torchrun", *_BY_HAND, mark="TORCHELASTIC_RUN_ID"),
    Launcher("the environment", *_BY_HAND),
    Launcher(
        "Open MPI",
        *("OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",)),
        *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    ),
    # and other launchers that speak PMI: Intel MPI, srun --mpi=pmi2
    Launcher("MPICH", "PMI_RANK", ("PMI_SIZE",), "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
    # last: on several hosts mpirun starts its daemons with srun
    Launcher(
        "srun",
        *("SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS"), "SLURM_LOCALID"),
        mark="SLURM_STEP_ID",
    ),
)
"""The launchers in order of precedence: the first one whose rank and size are set counts."""

_OTHERS = (
    *("MASTER_ADDR", "MASTER_PORT", "PMIX_NAMESPACE", "SLURM_JOB_ID", "SLURM_JOB_NUM_NODES"),
    *("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_DISTRIBUTION"),
)
VARIABLES = frozenset(_OTHERS).union(
    *({row.rank, *row.size, row.local_rank, row.local_size, row.mark} - {""} for row in LAUNCHERS)
)
"""Every variable that is read."""


@attrs.frozen
class FoundJob:
    """The job that an environment describes; None stands for an unknown value.

    Attributes:
        launcher: The name of the launcher.
        rank: The rank of this process.
        size: The number of ranks.
        local_rank: The index of the rank on its host.
        local_size: The number of ranks on the host.
        address: The host of rank 0.
        port: A port there.
        source: Where rank and size come from, for messages.
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
            LaunchError: One of them is unknown; the message explains how to set it.

        Example:
            >>> job = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "node7"}
            >>> find_job(job | {"MASTER_PORT": "29500"}).rendezvous()
            ('node7', 29500)
        """
        if self.address is not None and self.port is not None:
            return self.address, self.port
        raise LaunchError(
            f"unknown address or port of rank 0 (MASTER_ADDR={self.address}, MASTER_PORT="
            f"{self.port}) on rank {self.rank} of {self.size} ({self.source}); set MASTER_ADDR to "
            f"its host and MASTER_PORT to a free port there (mpirun: -x, mpiexec: -genv)"
        )


def find_job(environment: Mapping[str, str]) -> FoundJob | None:
    """Return the job that a launcher's variables describe; None if there are none.

    A launcher that runs inside another one has precedence, such as mpirun in a SLURM job. A job of
    one rank is a job.

    Args:
        environment: Variables and their values, such as `os.environ`.

    Raises:
        LaunchError: A value is not a number, only the rank or only the size is set, RANK and
            WORLD_SIZE contradict a launcher, or this is a SLURM allocation in which srun started
            nothing.

    Example:
        >>> step = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_STEP_ID": "0",
        ...         "SLURM_JOB_ID": "4711", "SLURM_STEP_NODELIST": "gpu[03-04]"}
        >>> job = find_job(step)
        >>> job.launcher, job.rank, job.size, job.rendezvous()
        ('srun', 5, 8, ('gpu03', 24711))
    """
    held = _read(environment)
    jobs = [job for row in LAUNCHERS if (job := _job_of(row, held)) is not None]
    if not jobs:
        _check_not_forgotten(held)
        return None
    first = jobs[0]
    same = [job for job in jobs if (job.rank, job.size) == (first.rank, first.size)]
    for job in jobs:
        # An outer launcher's variables describe its own processes, such as torchrun's agents.
        if first.launcher == "the environment" and job not in same and job.size > 1:
            raise LaunchError(
                f"{first.source}, but {job.source}; unset those that are left from another job"
            )

    def known(field: str) -> Any:
        return next((value for job in same if (value := getattr(job, field)) is not None), None)

    here = "127.0.0.1" if known("local_size") == first.size else None
    return attrs.evolve(
        first,
        local_rank=known("local_rank"),
        local_size=known("local_size"),
        address=held.get("MASTER_ADDR") or known("address") or here,
        port=_number("MASTER_PORT", held, 1, 65_535) if "MASTER_PORT" in held else known("port"),
    )


def find_number(variable: str, environment: Mapping[str, str]) -> tuple[int, str] | None:
    """Return the world size or the rank that an environment describes; None if there is none.

    WORLD_SIZE without RANK counts, and RANK without WORLD_SIZE: they may be set by hand.

    Args:
        variable: "WORLD_SIZE" or "RANK".
        environment: Variables and their values, such as `os.environ`.

    Returns:
        The number, and where it comes from.

    Raises:
        LaunchError: As `find_job`.

    Example:
        >>> step = {"SLURM_PROCID": "5", "SLURM_NTASKS": "8", "SLURM_STEP_ID": "0"}
        >>> find_number("RANK", step)
        (5, 'SLURM_PROCID=5 and SLURM_NTASKS=8 of srun')
        >>> find_number("WORLD_SIZE", {"WORLD_SIZE": "4096"})
        (4096, 'WORLD_SIZE=4096')
    """
    held = _read(environment)
    by_hand = {"WORLD_SIZE", "RANK"} & held.keys()
    if by_hand == {variable}:
        number = _number(variable, held, smallest=int(variable == "WORLD_SIZE"))
        return number, f"{variable}={number}"
    job = find_job({name: held[name] for name in held if len(by_hand) == 2 or name not in by_hand})
    if job is None:
        return None
    return job.size if variable == "WORLD_SIZE" else job.rank, job.source


def _read(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that are read, without spaces around the values and empty ones.

    SLURM_STEP_ID is left out unless srun started the step.
    """
    held = {name: environment[name].strip() for name in VARIABLES.intersection(environment)}
    held = {name: text for name, text in held.items() if text}
    step = held.get("SLURM_STEP_ID", "")
    if not step.isdecimal() or _number("SLURM_STEP_ID", held, largest=2**32) >= _LAST_STEP:
        held.pop("SLURM_STEP_ID", None)
    return held


def _job_of(launcher: Launcher, held: Mapping[str, str]) -> FoundJob | None:
    """Return the job that the variables of one launcher describe; None if they are not set."""
    size_name = next((name for name in launcher.size if name in held), None)
    if size_name is None or not {launcher.rank, launcher.mark or launcher.rank} <= held.keys():
        return None
    rank, size = _number(launcher.rank, held), _number(size_name, held, 1)
    source = f"{launcher.rank}={rank} and {size_name}={size} of {launcher.name}"
    if rank >= size:
        raise LaunchError(f"{source}: ranks of a job of {size} are 0 to {size - 1}")
    local_rank, local_size = (
        _number(name, held) if name in held else None
        for name in (launcher.local_rank, launcher.local_size)
    )
    address = port = None
    if launcher.name == "srun":
        address, port = _first_host(held), _port_of_step(held)
    elif launcher.name == "Open MPI" and "PMIX_NAMESPACE" in held:  # the name of this mpirun
        text = held["PMIX_NAMESPACE"].encode(errors="replace")
        port = _FIRST_PORT + zlib.crc32(text) % _PORTS
    return FoundJob(launcher.name, rank, size, local_rank, local_size, address, port, source)


def _check_not_forgotten(held: Mapping[str, str]) -> None:
    """Raise an error if variables of a launcher are set, but no rank.

    Raises:
        LaunchError: Names the variable, and the command to start the program with.
    """
    for launcher in LAUNCHERS:
        there = next((name for name in (launcher.rank, *launcher.size) if name in held), None)
        if there is not None and (not launcher.mark or launcher.mark in held):
            missing = launcher.size[0] if there == launcher.rank else launcher.rank
            raise LaunchError(
                f"{missing} is missing, but {there}={short_repr(held[there])} of {launcher.name} "
                f"is set; set both, or unset {there}"
            )
    for name in ("SLURM_NTASKS", "SLURM_JOB_NUM_NODES"):
        if name in held and _number(name, held) > 1:
            raise LaunchError(
                f"{name}={held[name]} is set, but srun did not start this process, which is in a "
                f"SLURM allocation; start it with srun, or unset {name}"
            )
    if "MASTER_ADDR" in held:  # else each process would create a world alone
        raise LaunchError(
            f"RANK and WORLD_SIZE are missing, but MASTER_ADDR={short_repr(held['MASTER_ADDR'])} "
            f"is set; set all, or none"
        )


def _number(name: str, held: Mapping[str, str], smallest: int = 0, largest: int = 2**31) -> int:
    text = held[name]
    if not re.fullmatch(r"[0-9]{1,10}", text) or not smallest <= int(text) <= largest:
        raise LaunchError(
            f"{name} must be an integer from {smallest} to {largest}, got {short_repr(text)}"
        )
    return int(text)


def _first_host(held: Mapping[str, str]) -> str | None:
    """Return the host of rank 0: the first one of a list such as "gpu[03-04,9],login"."""
    if held.get("SLURM_DISTRIBUTION", "").startswith("arbitrary"):  # rank 0 may be on any
        return None
    nodes = held.get("SLURM_STEP_NODELIST") or held.get("SLURM_JOB_NODELIST") or ""
    first = re.match(r"(?:[^\[\],\s]|\[[^\[\]]*\])+", nodes)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first.group()) or None if first else None


def _port_of_step(held: Mapping[str, str]) -> int | None:
    """Return a port for a step; steps of one job get different ones, as they may share hosts."""
    if "SLURM_JOB_ID" not in held:
        return None
    number = _number("SLURM_JOB_ID", held) + 7919 * int(held["SLURM_STEP_ID"])
    return _FIRST_PORT + number % _PORTS
