"""What `hypercomm doctor` finds out: what is installed, and what works of it here."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
from collections.abc import Iterator
from fnmatch import fnmatchcase
from importlib import metadata
from typing import TYPE_CHECKING

import attrs

from hypercomm import __version__
from hypercomm.cli.printing import one_line, quiet
from hypercomm.launch.launchers import VARIABLES as OF_LAUNCHERS

if TYPE_CHECKING:  # it loads torch
    from hypercomm.cli.torch_trial import Backend, SelfCheck, Strategy

_PACKAGES = ("numpy", "attrs", "megatron-core", "deepspeed")

OF_BUILD = ("torch_build", "nccl", "gloo")
"""What only torch can tell, once it is loaded."""

VARIABLES = {
    "launcher": (
        *("GROUP_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_*"),
        *("SLURM_JOB_ID", "SLURM_NODELIST", "SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST"),
        *("SLURM_JOB_NUM_NODES", "SLURM_DISTRIBUTION", "OMPI_COMM_WORLD_*", "PMIX_RANK"),
        *sorted(OF_LAUNCHERS),
    ),
    "gloo": ("GLOO_SOCKET_IFNAME", "TORCH_GLOO_LAZY_INIT"),
    "NCCL": ("NCCL_*", "TORCH_NCCL_*"),
    "torch.distributed": (
        *("TORCH_DIST_*", "TORCH_DISTRIBUTED_*", "TORCH_FR_*"),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE",
    ),
    "CUDA": ("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS"),
    "hypercomm": ("HYPERCOMM_*",),
}
"""Environment variables by who reads them; no other is shown, as it may hold a secret."""


@attrs.define
class Report:
    """All that is found, None where it is unknown; `problems` make the exit code 1."""

    versions: dict[str, str | None]
    environment: dict[str, str]
    problems: list[str] = attrs.field(factory=list)
    gpus: list[str] | None = None
    backends: list[Backend] = attrs.field(factory=list)
    strategies: list[Strategy] = attrs.field(factory=list)
    auto: str | None = None
    nccl_job: str | None = None
    self_checks: list[SelfCheck] = attrs.field(factory=list)
    self_checks_s: float | None = None

    @property
    def ok(self) -> bool:
        """Whether all that this torch is to have works here."""
        return not self.problems


def report() -> Report:
    """Find out what works here; creates groups in a world of one rank, and ends it.

    Raises:
        WorldSizeError: torch.distributed is initialised already.
    """
    found = Report(_versions(), _environment())  # before torch adds to it
    with quiet(), without_logs():
        try:
            from hypercomm.cli import torch_trial
        except Exception as error:  # noqa: BLE001 - whatever it raises is what there is to say
            found.problems = [f"torch cannot be loaded: {one_line(error)}"]
            return found
        found.versions |= torch_trial.versions()
        found.gpus = torch_trial.gpus()
        found.backends = torch_trial.backends()  # before a self-check loads the fake one
        with torch_trial.world() as obstacle:
            found.strategies = torch_trial.strategies(obstacle)
            found.auto = None if obstacle else torch_trial.automatic()
            found.self_checks, found.self_checks_s = torch_trial.self_checks()
        if found.gpus:
            found.nccl_job = torch_trial.nccl_job(found.auto)
    found.problems = _problems(found)
    return found


@contextlib.contextmanager
def without_logs() -> Iterator[None]:
    """Keep what torch logs from the user: the report says it."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # torch reads it when it is loaded
    level = logging.root.manager.disable
    logging.disable()
    try:
        yield
    finally:
        logging.disable(level)


def _versions() -> dict[str, str | None]:
    """Name the versions that can be told without loading torch."""
    return {
        "hypercomm": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": _installed("torch"),
        **dict.fromkeys(OF_BUILD),
        **{name: _installed(name) for name in _PACKAGES},
    }


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if reader_of(name) is not None}


def reader_of(variable: str) -> str | None:
    """Say who reads an environment variable; None where it is none of those that matter."""
    readers = (
        reader
        for reader, patterns in VARIABLES.items()
        if any(fnmatchcase(variable, pattern) for pattern in patterns)
    )
    return next(readers, None)


def _problems(found: Report) -> list[str]:
    """Name what makes the exit code 1; the reasons stand with the strategies and self-checks."""
    if all(strategy.state != "works" for strategy in found.strategies):
        problems = ["no process group could be created"]
    else:
        failed = (strategy.name for strategy in found.strategies if strategy.state == "failed")
        problems = [f"creation={name!r} failed" for name in failed]
    return problems + [
        f"{check.name} is lost" for check in found.self_checks if check.state == "lost"
    ]
