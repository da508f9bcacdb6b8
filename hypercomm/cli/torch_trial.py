"""What works of the installed torch, tried out in a world of this process alone."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import attrs
import torch
import torch.distributed as dist

from hypercomm.cli.printing import one_line
from hypercomm.errors import WorldSizeError
from hypercomm.grid import HyperCommGrid
from hypercomm.process_groups import c10d
from hypercomm.process_groups.c10d.private_names import PRIVATE_NAMES, private
from hypercomm.process_groups.c10d.self_checks import PrivateNames
from hypercomm.process_groups.creation.strategies import STRATEGIES, Wanted, choose

_PATIENCE = timedelta(seconds=60)
"""For a world of one rank, which waits for nobody."""


@attrs.frozen
class Backend:
    """A backend that torch knows by name, and why it cannot run here; None where it can."""

    name: str
    reason: str | None


@attrs.frozen
class Strategy:
    """A way of creating groups: "works", "not here" or "failed", its cost or the reason."""

    name: str
    state: str
    says: str
    seconds: float | None = None


@attrs.frozen
class SelfCheck:
    """A private name of torch: "works", "not due" in this torch, or "lost" with the reason."""

    name: str
    state: str
    reason: str | None
    gives: str
    checked: str
    without: str


# ---- what there is ----------------------------------------------------------------------------


def versions() -> dict[str, str | None]:
    """Name the versions that only torch can tell."""
    cuda, hip = torch.version.cuda, torch.version.hip
    return {
        "torch": torch.version.__version__,
        "torch_build": f"ROCm {hip}" if hip else f"CUDA {cuda}" if cuda else "CPU",
        "nccl": _nccl_version() if dist.is_nccl_available() else None,
        "gloo": "with torch" if dist.is_gloo_available() else None,  # it has no version of its own
    }


def _nccl_version() -> str:
    nccl: Any = torch.cuda.nccl  # has no types
    try:
        return ".".join(map(str, nccl.version()))
    except (AttributeError, RuntimeError):
        return "of unknown version"


def gpu(index: int) -> str:
    """Name a GPU that torch sees, or say why it cannot be used."""
    try:
        return str(torch.cuda.get_device_name(index))
    except RuntimeError as error:
        return f"one that cannot be used ({one_line(error)})"


def gpus() -> list[str]:
    """Name the GPUs that torch sees, or say why one cannot be used."""
    return list(map(gpu, range(torch.cuda.device_count())))


def why_not(backend: str) -> str | None:
    """Say why a backend cannot run here; None where it can."""
    return c10d.why_unavailable(backend) or c10d.why_not_here(backend)


def backends() -> list[Backend]:
    """List the backends that torch knows by name."""
    return [Backend(name, why_not(name)) for name in c10d.known_backends()]


def nccl_job(auto: str | None) -> str:
    """Say what an NCCL job would take here, where other jobs take `auto`."""
    obstacle = why_not("nccl")
    if obstacle is not None:
        return f"there are no NCCL jobs here: nccl {obstacle}"
    split = "in an NCCL job, grids of all ranks take split where WORLD is bound to a device"
    return split if auto is None else f"{split}, else {auto}"


# ---- what works -------------------------------------------------------------------------------


@contextlib.contextmanager
def world() -> Iterator[str | None]:
    """Begin a world of one gloo rank, end it after the `with` block; yield why there is none.

    Raises:
        WorldSizeError: torch.distributed is initialised already.
    """
    if dist.is_initialized():
        raise WorldSizeError(
            f"doctor starts a world of its own, and torch.distributed is initialised in this "
            f"process, with {dist.get_world_size()} ranks; run it in a process of its own"
        )
    try:
        yield _begin_world()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def _begin_world() -> str | None:
    reason = c10d.why_unavailable("gloo")
    if reason is not None:
        return f"gloo {reason}"
    torchs: Any = dist  # which names its stores, but not for type checkers
    try:
        dist.init_process_group(
            "gloo", store=torchs.HashStore(), rank=0, world_size=1, timeout=_PATIENCE
        )
    except Exception as error:  # noqa: BLE001 - whatever it raises is what there is to say
        return f"torch.distributed cannot be initialised: {one_line(error)}"
    return None


def strategies(obstacle: str | None) -> list[Strategy]:
    """Try each way of creating groups; `obstacle` says why there is no world for that."""
    return [Strategy(name, "failed", obstacle) if obstacle else _tried(name) for name in STRATEGIES]


def _tried(strategy: Any) -> Strategy:  # one of the names that a grid takes
    """Create a group in one way, and communicate over it."""
    why_not, cost, _ = STRATEGIES[strategy]
    reason = why_not(Wanted("gloo"))
    if reason is not None:
        return Strategy(strategy, "not here", reason)
    begin = time.perf_counter()
    try:
        with HyperCommGrid([1], ["dp"], creation=strategy) as grid:
            dist.all_reduce(torch.ones(1), group=grid.create_pg("dp"))
    except Exception as error:  # noqa: BLE001 - as above
        return Strategy(strategy, "failed", one_line(error))
    return Strategy(strategy, "works", cost, time.perf_counter() - begin)


def automatic() -> str:
    """Name the strategy that a grid takes by itself."""
    return choose("auto", None).strategy


def self_checks() -> tuple[list[SelfCheck], float]:
    """Return what came of each self-check, and the seconds that all take once torch is loaded."""
    checks = [
        SelfCheck(str(name), state, reason, name.gives, name.checked, name.without)
        for name, state, reason in private.verdicts()
    ]
    # Those of this process were made when they were first needed: made anew, they can be timed.
    begin = time.perf_counter()
    PrivateNames(private.root, PRIVATE_NAMES).verdicts()
    return checks, time.perf_counter() - begin
