"""Launchers: what each leaves in the environment of the ranks that it starts, and the job it means.

`find_job` reads an environment. What contradicts itself, is half there, or comes of an allocation
in which nothing was launched, is refused: a program that then goes on alone proves nothing.

Sources: the manuals of torchrun, srun(1) and sbatch(1), mpirun(1) of Open MPI 5, and MPICH's Hydra;
what ezpz reads, https://github.com/saforem2/ezpz, for Cray PALS and Flux.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping

import attrs

from hypercomm.errors import LaunchError
from hypercomm.layout.reading.shown import shown

_LAST_STEP = 2**32 - 16
"""SLURM's steps from here on are not the user's: interactive, batch, extern, pending."""

_FIRST_PORT, _PORTS = 20_000, 10_000
"""Where ports that are worked out lie: below those that Linux gives out by itself."""


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


_SLURM, _PMIX = "srun", "PMIx"
_MPIRUN = "give mpirun -x MASTER_ADDR=HOST -x MASTER_PORT=PORT, of rank 0's host and a port there"
_MPIEXEC = "give mpiexec -genv MASTER_ADDR HOST -genv MASTER_PORT PORT, of rank 0's host"
_MPI = ("Open MPI", "MPICH", "PALS", "MVAPICH2", "Flux", "jsrun")

LAUNCHERS = (
    Launcher(
        "torchrun",
        *("RANK", ("WORLD_SIZE",), "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        mark="TORCHELASTIC_RUN_ID",
        around=frozenset({"Kubeflow", "the environment", *_MPI, _PMIX, _SLURM}),
    ),
    Launcher(
        "Kubeflow",  # a PyTorchJob
        *("RANK", ("WORLD_SIZE",), "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
        mark="PET_NNODES",
        advice="its ranks are pods: start torchrun in each, which reads PET_*",
    ),
    Launcher(
        "the environment",  # deepspeed, or by hand
        *("RANK", ("WORLD_SIZE",), "LOCAL_RANK", "LOCAL_WORLD_SIZE"),
    ),
    Launcher(
        "Open MPI",
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
            f"{_are_missing(missing)}: {self.said} say that this is rank {self.rank} of "
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
    held = {name: value.strip() for name, value in environment.items() if value.strip()}
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
                    f"{first.said} contradict {claim.said}; unset those that are left from "
                    f"another job"
                )
    if first is None:
        _check_no_job(held)
        return None
    pmix = held.get("PMIX_RANK")
    if pmix and _PMIX not in first.launcher.around and _number("PMIX_RANK", held) != first.rank:
        raise LaunchError(
            f"{first.said} contradict PMIX_RANK={pmix}; unset those that are left from another job"
        )
    return _with_place(first, alike, held)


def first_host(hosts: str) -> str:
    """Return the first host of a node list as SLURM writes it, where rank 0 of a step runs.

    >>> first_host("gpu[03-04,9],login"), first_host("rack2node7,rack3"), first_host("a[1-2]b[5,7]")
    ('gpu03', 'rack2node7', 'a1b5')
    """
    outside = re.match(r"(?:\[[^\]]*\]|[^,\[])*", hosts.strip())
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", outside.group() if outside else "")


def port_of_step(job: int, step: int) -> int:
    """Return a port for a step of a SLURM job, the same on all its ranks.

    Steps of one job get different ones, as they may have the same hosts.

    >>> port_of_step(4711, 0), port_of_step(4711, 1)
    (24711, 22630)
    """
    return _FIRST_PORT + (job + 7919 * step) % _PORTS


def _claim(launcher: Launcher, held: Mapping[str, str]) -> FoundJob | None:
    """What the variables of one launcher say; None where they are not set."""
    if launcher.mark is not None and launcher.mark not in held:
        return None
    if launcher.name == _SLURM and not _is_step(held):
        return None
    size = next((name for name in launcher.size if name in held), None)
    if size is None and launcher.rank not in held:
        return None
    missing = [] if launcher.rank in held else [launcher.rank]
    missing += [] if size else [launcher.size[0]]
    if size is None or missing:
        there = launcher.rank if size is None else size
        raise LaunchError(
            f"{_are_missing(missing)}, and {there}={held[there]} says that a launcher has started "
            f"this process; set both, or unset {there}"
        )
    rank, ranks = _number(launcher.rank, held), _number(size, held, 1)
    said = f"{launcher.rank}={rank} and {size}={ranks}"
    if rank >= ranks:
        raise LaunchError(f"{said} contradict each other: the last rank would be {ranks - 1}")
    local_rank, local_size = (
        None if name is None or name not in held else _number(name, held)
        for name in (launcher.local_rank, launcher.local_size)
    )
    return FoundJob(launcher, rank, ranks, local_rank, local_size, said=said)


def _with_place(first: FoundJob, alike: list[FoundJob], held: Mapping[str, str]) -> FoundJob:
    """Add what other launchers know that say the same, and where rank 0 is."""
    local_ranks = [job.local_rank for job in alike]
    if "LOCAL_RANK" in held:
        local_ranks.append(_number("LOCAL_RANK", held))
    local_sizes = [job.local_size for job in alike]
    address, port = held.get("MASTER_ADDR"), None
    if "MASTER_PORT" in held:
        port = _number("MASTER_PORT", held, 1, 65_535)
    if alike[-1].launcher.name == _SLURM:
        address, port = address or _slurm_host(held), port or _slurm_port(held)
    return attrs.evolve(
        first,
        local_rank=next((rank for rank in local_ranks if rank is not None), None),
        local_size=next(filter(None, local_sizes), None),
        address=address,
        port=port,
    )


def _check_no_job(held: Mapping[str, str]) -> None:
    """Refuse what no launcher has started, though it is to be one of several ranks."""
    tasks = _number("SLURM_NTASKS", held) if "SLURM_NTASKS" in held else 1
    nodes = _number("SLURM_JOB_NUM_NODES", held) if "SLURM_JOB_NUM_NODES" in held else 1
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


def _is_step(held: Mapping[str, str]) -> bool:
    step = held.get("SLURM_STEP_ID", "")
    return step.isdecimal() and int(step) < _LAST_STEP


def _slurm_host(held: Mapping[str, str]) -> str | None:
    if held.get("SLURM_DISTRIBUTION", "").startswith("arbitrary"):  # rank 0 may be on any
        return None
    lists = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
    hosts = next((held[name] for name in lists if name in held), None)
    return None if hosts is None else first_host(hosts) or None


def _slurm_port(held: Mapping[str, str]) -> int | None:
    job = next((name for name in ("SLURM_JOB_ID", "SLURM_JOBID") if name in held), None)
    if job is None:
        return None
    return port_of_step(_number(job, held), _number("SLURM_STEP_ID", held))


def _number(name: str, held: Mapping[str, str], smallest: int = 0, largest: int = 2**31) -> int:
    text = held[name]
    if not re.fullmatch(r"[0-9]{1,10}", text) or not smallest <= int(text) <= largest:
        span = f"at least {smallest}" if largest == 2**31 else f"{smallest} to {largest}"
        raise LaunchError(
            f"the environment's {name} must be an integer of {span}, got {shown(text)}"
        )
    return int(text)


def _are_missing(names: list[str]) -> str:
    return f"{' and '.join(names)} {'are' if len(names) > 1 else 'is'} missing"
