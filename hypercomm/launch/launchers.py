"""Launchers: what each leaves in the environment of the ranks that it starts, and the job it means.

`find_job` reads an environment. What contradicts itself, is half there, or comes of an allocation
in which nothing was launched, is refused: a program that then goes on alone proves nothing.

Printed by the launchers themselves: torchrun of torch 2.13, srun and sbatch of SLURM 22.05, mpirun
of Open MPI 4.1, mpiexec of MPICH 4.0. Read in their sources: Flux (src/shell/task.c of
https://github.com/flux-framework/flux-core) and MVAPICH2 (mpispawn.c). Not documented by who makes
them, so from programs that read them: Cray PALS (https://github.com/saforem2/ezpz) and jsrun.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

import attrs

from hypercomm.errors import LaunchError
from hypercomm.launch import slurm, traps
from hypercomm.launch.variables import are_missing, number, port_of_name
from hypercomm.layout.text import shown


@attrs.frozen
class Launcher:
    """What one launcher leaves in the environment; None where it leaves no such thing.

    Attributes:
        name: What it is called in messages.
        rank: Holds the rank.
        size: Holds the number of ranks; the first one that is set.
        local_rank: Holds the number of the rank among those of its host.
        local_size: Holds the number of ranks on the host.
        mark: Set where it is this launcher, and not another with the same variables.
        around: Launchers that may start it: what they say is of daemons or agents, not of ranks.
        advice: What to do where address and port of rank 0 are missing.
    """

    name: str
    rank: str
    size: tuple[str, ...]
    local_rank: str | None = None
    local_size: str | None = None
    mark: str | None = None
    around: frozenset[str] = frozenset()
    advice: str = "set them to the host of rank 0 and a free port there"

    def variables(self) -> tuple[str, ...]:
        """List all that it leaves.

        Example:
            >>> LAUNCHERS[0].variables()[:3]
            ('TORCHELASTIC_RUN_ID', 'RANK', 'WORLD_SIZE')
        """
        every = (self.mark, self.rank, *self.size, self.local_rank, self.local_size)
        return tuple(dict.fromkeys(name for name in every if name is not None))


_OPEN_MPI, _KUBEFLOW, _SLURM, _PMIX = "Open MPI", "Kubeflow", "srun", "PMIx"
_MPIRUN = "give mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=PORT, of rank 0's host and a port there"
_MPIEXEC = "give mpiexec -genv MASTER_ADDR HOST -genv MASTER_PORT PORT, of rank 0's host"
_MPI = (_OPEN_MPI, "MPICH", "PALS", "MVAPICH2", "Flux", "jsrun")

LAUNCHERS = (
    Launcher(
        "torchrun",
        *("RANK", ("WORLD_SIZE",), "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        mark="TORCHELASTIC_RUN_ID",
        around=frozenset({_KUBEFLOW, "the environment", *_MPI, _PMIX, _SLURM}),
    ),
    Launcher(
        _KUBEFLOW,  # a PyTorchJob
        *("RANK", ("WORLD_SIZE",), "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        mark="PET_NNODES",
        advice="its ranks are pods: start torchrun in each, which reads PET_*",
    ),
    Launcher(
        "the environment",  # deepspeed, or by hand
        *("RANK", ("WORLD_SIZE",), "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ),
    Launcher(
        _OPEN_MPI,
        *("OMPI_COMM_WORLD_RANK", ("OMPI_COMM_WORLD_SIZE",)),
        *("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
        around=frozenset({_SLURM}),
        advice=_MPIRUN,
    ),
    Launcher(
        "MPICH",  # and Intel MPI
        *("PMI_RANK", ("PMI_SIZE",), "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
        around=frozenset({_PMIX, _SLURM}),
        advice=_MPIEXEC,
    ),
    Launcher(
        "PALS",  # Cray's mpiexec
        *("PALS_RANKID", ("PMI_SIZE",), "PALS_LOCAL_RANKID", "PALS_LOCAL_SIZE"),
        mark="PALS_RANKID",
        around=frozenset({_PMIX, _SLURM}),
    ),
    Launcher(
        "MVAPICH2",
        *("MV2_COMM_WORLD_RANK", ("MV2_COMM_WORLD_SIZE",)),
        *("MV2_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_SIZE"),
        around=frozenset({_PMIX, _SLURM}),
    ),
    Launcher(
        "Flux",
        *("FLUX_TASK_RANK", ("FLUX_JOB_SIZE",), "FLUX_TASK_LOCAL_ID"),
        around=frozenset({_PMIX, _SLURM}),
    ),
    Launcher(
        "jsrun",  # of IBM's LSF
        *("JSM_NAMESPACE_RANK", ("JSM_NAMESPACE_SIZE",)),
        *("JSM_NAMESPACE_LOCAL_RANK", "JSM_NAMESPACE_LOCAL_SIZE"),
        around=frozenset({_PMIX, _SLURM}),
    ),
    Launcher(
        _SLURM,
        *("SLURM_PROCID", ("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS", "SLURM_NPROCS")),
        *("SLURM_LOCALID", None),
        mark="SLURM_STEP_ID",
    ),
)
"""The launchers, whose word counts most first: what is inside of another knows the ranks."""

VARIABLES = frozenset(
    (
        *(name for launcher in LAUNCHERS for name in launcher.variables()),
        *("LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "PMIX_RANK", "PMIX_NAMESPACE"),
        *slurm.NAMES,
        *traps.NAMES,
    )
)
"""Every variable that is looked at."""


@attrs.frozen
class FoundJob:
    """The job that an environment tells of.

    Attributes:
        launcher: What says so.
        rank: The rank of this process.
        size: The number of ranks.
        local_rank: Its number among those of its host; None where nothing tells.
        local_size: The ranks on its host; None where nothing tells.
        address: The host of rank 0; None where nothing tells.
        port: A port there; None where nothing tells.
        said: The variables that say so, with their values.
    """

    launcher: Launcher
    rank: int
    size: int
    local_rank: int | None = None
    local_size: int | None = None
    address: str | None = None
    port: int | None = None
    said: str = ""

    def told(self) -> str:
        """Say what tells of it.

        >>> find_job({"RANK": "0", "WORLD_SIZE": "2"}).told()
        'RANK=0 and WORLD_SIZE=2, of the environment'
        """
        return f"{self.said}, of {self.launcher.name}"

    def meeting_place(self) -> tuple[str, int]:
        """Return address and port of rank 0.

        Raises:
            LaunchError: One is missing; says which, and how it is given.

        Example:
            >>> job = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "node7"}
            >>> find_job(job | {"MASTER_PORT": "29500"}).meeting_place()
            ('node7', 29500)
            >>> find_job(job).meeting_place()  # doctest: +ELLIPSIS
            Traceback (most recent call last):
            hypercomm.errors.LaunchError: MASTER_PORT is missing: RANK=0 and WORLD_SIZE=2 say ...
        """
        if self.address is not None and self.port is not None:
            return self.address, self.port
        given = {"MASTER_ADDR": self.address, "MASTER_PORT": self.port}
        missing = [name for name, value in given.items() if value is None]
        raise LaunchError(
            f"{are_missing(missing)}: {self.said} say that this is rank {self.rank} of "
            f"{self.size} ranks; {self.launcher.advice}"
        )


def find_job(environment: Mapping[str, str]) -> FoundJob | None:
    """Return the job that a launcher's variables tell of; None where there are none.

    Inside of another launcher the inner one counts: mpirun in a SLURM step, torchrun in both.
    A job of one rank is a job.

    Args:
        environment: Variables and their values, such as `os.environ`.

    Raises:
        LaunchError: Variables contradict each other, are half there, hold no numbers, or tell of
            an allocation for several ranks in which nothing has started them.

    Example:
        >>> step = {"SLURM_PROCID": "5", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_ID": "0",
        ...         "SLURM_JOB_ID": "4711", "SLURM_STEP_NODELIST": "gpu[03-04]"}
        >>> job = find_job(step)
        >>> job.launcher.name, job.rank, job.size, job.meeting_place()
        ('srun', 5, 8, ('gpu03', 24711))
    """
    held = held_in(environment)
    alike = agreeing(held)
    if not alike:
        traps.check_not_launched(held)
        return None
    return _with_place(alike[0], alike, held)


def none_found(advice: str) -> str:
    """Say that no launcher was found, what was looked at, and what to do.

    >>> none_found("use srun")  # doctest: +ELLIPSIS
    'no launcher was found: none of RANK, WORLD_SIZE, OMPI_COMM_WORLD_RANK, ... is set; use srun'
    """
    looked = dict.fromkeys(name for row in LAUNCHERS for name in (row.rank, *row.size))
    return f"no launcher was found: none of {', '.join(looked)} is set; {advice}"


def held_in(environment: Mapping[str, str]) -> dict[str, str]:
    """Return what an environment holds of the variables that are looked at.

    Raises:
        LaunchError: A value is no text.

    Example:
        >>> held_in({"RANK": " 3 ", "WORLD_SIZE": "", "PATH": "/bin"})
        {'RANK': '3'}
    """
    held = {}
    for name in filter(VARIABLES.__contains__, environment):  # few of the many that there are
        text = environment[name]
        if not isinstance(text, str):
            raise LaunchError(
                f"the environment's {name} must be a string, as in os.environ, got {shown(text)}"
            )
        if text.strip():
            held[name] = text.strip()
    return held


def agreeing(held: Mapping[str, str]) -> list[FoundJob]:
    """List the launchers that tell of this job, the one whose word counts most first.

    Raises:
        LaunchError: As `find_job`, but for the traps.
    """
    first: FoundJob | None = None
    alike: list[FoundJob] = []
    for launcher in LAUNCHERS:
        is_around = first is not None and launcher.name in first.launcher.around
        with contextlib.suppress(*[LaunchError] if is_around else []):
            claim = _claim(launcher, held)
            if claim is None:
                continue
            first = first or claim
            if (claim.rank, claim.size) == (first.rank, first.size):
                alike.append(claim)
            elif claim.size > 1 and not is_around:
                raise LaunchError(
                    f"{first.told()}, contradict {claim.told()}; unset those that are left from "
                    f"another job"
                )
    pmix = held.get("PMIX_RANK")
    if first is None or not pmix or _PMIX in first.launcher.around:
        return alike
    if number("PMIX_RANK", held) != first.rank:
        raise LaunchError(
            f"{first.told()}, contradict PMIX_RANK={pmix}; unset those that are left from another "
            f"job"
        )
    return alike


def _claim(launcher: Launcher, held: Mapping[str, str]) -> FoundJob | None:
    """What the variables of one launcher say; None where they are not set."""
    if launcher.mark is not None and launcher.mark not in held:
        return None
    if launcher.name == _SLURM and not slurm.is_step(held):
        return None
    size = next((name for name in launcher.size if name in held), None)
    if size is None and launcher.rank not in held:
        return None
    missing = [] if launcher.rank in held else [launcher.rank]
    missing += [] if size else [launcher.size[0]]
    if size is None or missing:
        there = launcher.rank if size is None else size
        raise LaunchError(
            f"{are_missing(missing)}, and {there}={held[there]} says that a launcher has started "
            f"this process; set both, or unset {there}"
        )
    rank, ranks = number(launcher.rank, held), number(size, held, 1)
    said = f"{launcher.rank}={rank} and {size}={ranks}"
    if launcher.name == _KUBEFLOW:
        traps.check_pods(held, said)
    if rank >= ranks:
        raise LaunchError(f"{said} contradict each other: the last rank would be {ranks - 1}")
    local_rank, local_size = (
        None if name is None or name not in held else number(name, held, smallest)
        for name, smallest in ((launcher.local_rank, 0), (launcher.local_size, 1))
    )
    if local_rank is not None and local_size is not None and local_rank >= local_size:
        raise LaunchError(
            f"{launcher.local_rank}={local_rank} and {launcher.local_size}={local_size} contradict "
            f"each other: the last rank of the host would be {local_size - 1}"
        )
    return FoundJob(launcher, rank, ranks, local_rank, local_size, said=said)


def _with_place(first: FoundJob, alike: list[FoundJob], held: Mapping[str, str]) -> FoundJob:
    """Add what other launchers know that say the same, and where rank 0 is."""
    local_ranks = [job.local_rank for job in alike]
    if "LOCAL_RANK" in held:
        local_ranks.append(number("LOCAL_RANK", held))
    local_sizes = [job.local_size for job in alike]
    address, port = held.get("MASTER_ADDR"), None
    if "MASTER_PORT" in held:
        port = number("MASTER_PORT", held, 1, 65_535)
    if alike[-1].launcher.name == _SLURM:
        address, port = address or slurm.address(held), port or slurm.port(held)
        local_sizes.append(slurm.local_size(held))
    local_size = next(filter(None, local_sizes), None)
    if port is None and "PMIX_NAMESPACE" in held and first.launcher.name == _OPEN_MPI:
        port = port_of_name(held["PMIX_NAMESPACE"])  # it is the name of this mpirun
    return attrs.evolve(
        first,
        local_rank=next((rank for rank in local_ranks if rank is not None), None),
        local_size=local_size,
        address=address or ("127.0.0.1" if local_size == first.size else None),
        port=port,
    )
