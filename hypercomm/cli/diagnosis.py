"""What `hypercomm doctor` finds out: what is installed, and what works of it here."""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import platform
import sys
import time
import warnings
from collections.abc import Iterator
from datetime import timedelta
from fnmatch import fnmatchcase
from importlib import metadata
from typing import Any, TypedDict

from hypercomm import __version__
from hypercomm.errors import WorldSizeError

_PATIENCE = timedelta(seconds=60)
"""For a world of one rank, which waits for nobody."""

_PACKAGES = ("numpy", "attrs", "megatron-core", "deepspeed")

OF_BUILD = ("torch_build", "nccl", "gloo")
"""What only torch can tell, once it is loaded."""

VARIABLES = {
    "launcher": (
        *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "NODE_RANK"),
        *("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_*"),
        *("SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID", "SLURM_NODELIST"),
        *("OMPI_COMM_WORLD_*", "PMI_RANK", "PMI_SIZE"),
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


class Backend(TypedDict):
    """A backend that torch knows by name, and why it cannot run here; None where it can."""

    name: str
    reason: str | None


class Strategy(TypedDict):
    """A way of creating groups: "works", "not here" or "failed", its cost or the reason."""

    name: str
    state: str
    says: str
    seconds: float | None


class SelfCheck(TypedDict):
    """A private name of torch: "works", "not due" in this torch, or "lost" with the reason."""

    name: str
    state: str
    reason: str | None
    gives: str
    checked: str
    without: str


class Report(TypedDict):
    """All that is found, None where it is unknown; `problems` make the exit code 1."""

    ok: bool
    problems: list[str]
    versions: dict[str, str | None]
    gpus: list[str] | None
    backends: list[Backend]
    strategies: list[Strategy]
    auto: str | None
    nccl_job: str | None
    self_checks: list[SelfCheck]
    self_checks_s: float | None
    environment: dict[str, str]


def report() -> Report:
    """Find out what works here; creates groups in a world of one rank, and ends it.

    Raises:
        WorldSizeError: torch.distributed is initialised already.
    """
    found = Report(
        ok=False,
        problems=[],
        versions=_versions(),
        gpus=None,
        backends=[],
        strategies=[],
        auto=None,
        nccl_job=None,
        self_checks=[],
        self_checks_s=None,
        environment=_environment(),  # before torch adds to it
    )
    with quiet():
        obstacle = _why_not_loaded()
        if obstacle is None:
            _look_at_torch(found)
    found["problems"] = [obstacle] if obstacle else _problems(found)
    found["ok"] = not found["problems"]
    return found


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep what torch prints, logs and warns of from the user: the report says it.

    Older versions of gloo greet on stdout for every group.
    """
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # torch reads it when it is loaded
    level, stdout, null = logging.root.manager.disable, os.dup(1), os.open(os.devnull, os.O_WRONLY)
    logging.disable()
    sys.stdout.flush()
    os.dup2(null, 1)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        sys.stdout.flush()
        os.dup2(stdout, 1)
        logging.disable(level)
        os.close(stdout)
        os.close(null)


# ---- what there is ----------------------------------------------------------------------------


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


def _why_not_loaded() -> str | None:
    """Load torch and what of ours stands on it; say why that fails."""
    try:
        importlib.import_module("hypercomm.grid")
    except Exception as error:  # noqa: BLE001 - whatever it raises is what there is to say
        return f"torch cannot be loaded: {_said(error)}"
    return None


def _look_at_torch(found: Report) -> None:
    """Fill in all that needs torch."""
    found["versions"] |= _torch_versions()
    found["gpus"] = _gpus()
    found["backends"] = _backends()  # before a self-check loads the fake one
    _look_at_groups(found)
    if found["gpus"]:
        found["nccl_job"] = _nccl_job(found["auto"])


def _torch_versions() -> dict[str, str | None]:
    import torch
    import torch.distributed as dist

    return {
        "torch": torch.version.__version__,
        "torch_build": _build(),
        "nccl": _nccl_version() if dist.is_nccl_available() else None,
        "gloo": "with torch" if dist.is_gloo_available() else None,  # it has no version of its own
    }


def _build() -> str:
    import torch

    if torch.version.hip:
        return f"ROCm {torch.version.hip}"
    return f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU"


def _nccl_version() -> str:
    import torch

    nccl: Any = torch.cuda.nccl  # has no types
    try:
        return ".".join(map(str, nccl.version()))
    except (AttributeError, RuntimeError):
        return "of unknown version"


def _gpus() -> list[str]:
    """Name the GPUs that torch sees, or say why one cannot be used."""
    import torch

    return [_gpu(index) for index in range(torch.cuda.device_count())]


def _gpu(index: int) -> str:
    import torch

    try:
        return str(torch.cuda.get_device_name(index))
    except RuntimeError as error:
        return f"one that cannot be used ({_said(error)})"


def _backends() -> list[Backend]:
    from hypercomm.process_groups import c10d

    return [
        Backend(name=name, reason=c10d.why_unavailable(name) or c10d.why_not_here(name))
        for name in c10d.known_backends()
    ]


# ---- what works -------------------------------------------------------------------------------


def _look_at_groups(found: Report) -> None:
    """Create groups in a world of one rank, and make the self-checks in it."""
    import torch.distributed as dist

    from hypercomm.process_groups.strategies import STRATEGIES, choose

    if dist.is_initialized():
        raise WorldSizeError(
            f"doctor starts a world of its own, and torch.distributed is initialised in this "
            f"process, with {dist.get_world_size()} ranks; run it in a process of its own"
        )
    obstacle = _begin_world()
    try:
        found["strategies"] = [_tried(name, obstacle) for name in STRATEGIES]
        found["auto"] = None if obstacle else choose("auto", None).strategy
        found["self_checks"], found["self_checks_s"] = _self_checks()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _begin_world() -> str | None:
    """Begin a world of this process alone, on gloo; say why there is none."""
    import torch.distributed as dist

    from hypercomm.process_groups import c10d

    reason = c10d.why_unavailable("gloo")
    if reason is not None:
        return f"gloo {reason}"
    torchs: Any = dist  # which names its stores, but not for type checkers
    try:
        dist.init_process_group(
            "gloo", store=torchs.HashStore(), rank=0, world_size=1, timeout=_PATIENCE
        )
    except Exception as error:  # noqa: BLE001 - as above
        return f"torch.distributed cannot be initialised: {_said(error)}"
    return None


def _tried(strategy: str, obstacle: str | None) -> Strategy:
    """Create a group in one way, and communicate over it."""
    import torch
    import torch.distributed as dist

    from hypercomm.grid import HyperCommGrid
    from hypercomm.process_groups.strategies import STRATEGIES, Wanted

    if obstacle is not None:
        return Strategy(name=strategy, state="failed", says=obstacle, seconds=None)
    why_not, cost, _ = STRATEGIES[strategy]
    reason = why_not(Wanted("gloo"))
    if reason is not None:
        return Strategy(name=strategy, state="not here", says=reason, seconds=None)
    creation: Any = strategy  # one of the names that a grid takes
    begin = time.perf_counter()
    try:
        with HyperCommGrid([1], ["dp"], creation=creation) as grid:
            dist.all_reduce(torch.ones(1), group=grid.create_pg("dp"))
    except Exception as error:  # noqa: BLE001 - as above
        return Strategy(name=strategy, state="failed", says=_said(error), seconds=None)
    seconds = time.perf_counter() - begin
    return Strategy(name=strategy, state="works", says=cost, seconds=seconds)


def _self_checks() -> tuple[list[SelfCheck], float]:
    """Return what came of each self-check, and the seconds that all take once torch is loaded."""
    from hypercomm.process_groups.c10d.private_names import PrivateNames, private

    checks = [
        SelfCheck(
            name=str(name),
            state=state,
            reason=reason,
            gives=name.gives,
            checked=name.checked,
            without=name.without,
        )
        for name, state, reason in private.verdicts()
    ]
    # Those of this process were made when they were first needed: made anew, they can be timed.
    begin = time.perf_counter()
    PrivateNames(private.root).verdicts()
    return checks, time.perf_counter() - begin


def _nccl_job(auto: str | None) -> str:
    """Say what an NCCL job would take here."""
    from hypercomm.process_groups import c10d

    obstacle = c10d.why_unavailable("nccl") or c10d.why_not_here("nccl")
    if obstacle is not None:
        return f"there are no NCCL jobs here: nccl {obstacle}"
    split = "in an NCCL job, grids of all ranks take split where WORLD is bound to a device"
    return split if auto is None else f"{split}, else {auto}"


def _problems(found: Report) -> list[str]:
    """Name what makes the exit code 1; the reasons stand with the strategies and self-checks."""
    states = {strategy["name"]: strategy["state"] for strategy in found["strategies"]}
    problems = [f"creation={name!r} failed" for name in states if states[name] == "failed"]
    if "works" not in states.values():
        problems = ["no process group could be created"]
    lost = [check["name"] for check in found["self_checks"] if check["state"] == "lost"]
    return problems + [f"{name} is lost" for name in lost]


def _said(error: BaseException) -> str:
    """Write what an error says in one line."""
    return " ".join(f"{type(error).__name__}: {error}".split())
