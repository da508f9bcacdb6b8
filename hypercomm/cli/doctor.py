"""`hypercomm doctor`: show what is installed, what works of it here, and why the rest does not."""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from datetime import timedelta
from fnmatch import fnmatchcase
from importlib import metadata
from typing import Any

import attrs
import click
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from hypercomm import __version__
from hypercomm.cli import options
from hypercomm.cli.printing import console, one_line, print_json, quiet, table
from hypercomm.errors import WorldSizeError
from hypercomm.launch.launchers import VARIABLES

_PIPED_WIDTH = 100
"""Columns of the tables where there is no terminal."""

_PACKAGES = ("numpy", "attrs", "megatron-core", "deepspeed")
_TIMEOUT = timedelta(seconds=60)

_ENVIRONMENT = (
    *("GROUP_RANK", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_*"),
    *("SLURM_JOB_ID", "SLURM_NODELIST", "SLURM_JOB_NODELIST", "SLURM_STEP_NODELIST"),
    *("SLURM_JOB_NUM_NODES", "SLURM_DISTRIBUTION", "OMPI_COMM_WORLD_*", "PMIX_RANK"),
    *("GLOO_SOCKET_IFNAME", "TORCH_GLOO_LAZY_INIT", "NCCL_*", "TORCH_NCCL_*", "TORCH_DIST_*"),
    *("TORCH_DISTRIBUTED_*", "TORCH_FR_*", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"),
    *("CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_MAX_CONNECTIONS", "HYPERCOMM_*", *sorted(VARIABLES)),
)
"""Environment variables that matter; no other is shown, as it may hold a secret."""


@attrs.frozen
class Strategy:
    """A way of creating groups: "works", "not here" or "failed", its cost or the reason."""

    name: str
    state: str
    says: str
    seconds: float | None = None


@attrs.define
class Report:
    """The state of this installation; None is unknown, and `problems` make the exit code 1."""

    versions: dict[str, str | None]
    environment: dict[str, str]
    problems: list[str] = attrs.field(factory=list)
    gpus: list[str] | None = None
    backends: dict[str, str | None] = attrs.field(factory=dict)
    strategies: list[Strategy] = attrs.field(factory=list)
    auto: str | None = None
    private_names: dict[str, bool] = attrs.field(factory=dict)


@click.command(short_help="Show versions, what works here, and why the rest does not.")
@options.as_json
def doctor(*, as_json: bool) -> int:
    """Show versions, backends, ways of creating groups, private names and environment variables.

    Creates groups of this process alone. The exit code is 1 where torch lacks a private name that
    hypercomm uses, or no group can be created.
    """
    with Console(stderr=True).status("looking at torch"):
        found = report()
    is_ok = not found.problems
    if as_json:
        print_json({"ok": is_ok, **attrs.asdict(found)}, indent=2, sort_keys=True)
    else:
        _show(found)
    return 0 if is_ok else 1


def report() -> Report:
    """Return what works here; creates groups in a world of one rank, and destroys it.

    Raises:
        WorldSizeError: torch.distributed is initialised already.
    """
    variables = {name: value for name, value in os.environ.items() if matters(name)}
    found = Report(_versions(), variables)  # before torch adds to it
    with quiet(), without_logs():
        try:
            from hypercomm.process_groups.torch_internals import capabilities
        except Exception as error:  # noqa: BLE001 - whatever it raises is the problem
            found.problems = [f"torch cannot be loaded: {one_line(error)}"]
            return found
        _look_at_torch(found)
        _try_strategies(found)
        found.private_names = {**capabilities.FLAGS}
    failed = [each.name for each in found.strategies if each.state == "failed"]
    if all(each.state != "works" for each in found.strategies):
        found.problems = ["no process group could be created"]
    else:
        found.problems = [f"creation={name!r} failed" for name in failed]
    lost = [name for name, is_there in found.private_names.items() if not is_there]
    found.problems += [f"torch.{name} is missing or has changed" for name in lost]
    return found


def matters(variable: str) -> bool:
    """Return whether the report shows an environment variable."""
    return any(fnmatchcase(variable, pattern) for pattern in _ENVIRONMENT)


@contextlib.contextmanager
def without_logs() -> Iterator[None]:
    """Suppress the logs of torch, which the report replaces."""
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # torch reads it when it is loaded
    level = logging.root.manager.disable
    logging.disable()
    try:
        yield
    finally:
        logging.disable(level)


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = {
        "hypercomm": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
    }
    for package in ("torch", *_PACKAGES):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = None
    return found


def _look_at_torch(found: Report) -> None:
    import torch
    import torch.distributed as dist

    from hypercomm.process_groups import torch_internals as c10d

    cuda, hip = torch.version.cuda, torch.version.hip
    nccl: Any = torch.cuda.nccl  # has no types
    found.versions |= {
        "torch": torch.version.__version__,
        "torch_build": f"ROCm {hip}" if hip else f"CUDA {cuda}" if cuda else "CPU",
        "nccl": ".".join(map(str, nccl.version())) if dist.is_nccl_available() else None,
    }
    found.gpus = []
    for index in range(torch.cuda.device_count()):
        try:
            found.gpus.append(str(torch.cuda.get_device_name(index)))
        except RuntimeError as error:
            found.gpus.append(f"one that cannot be used ({one_line(error)})")
    for name in c10d.known_backends():
        found.backends[name] = c10d.why_unavailable(name) or c10d.why_not_here(name)


def _try_strategies(found: Report) -> None:
    """Try each way of creating groups in a world of one gloo rank."""
    import torch.distributed as dist

    from hypercomm.process_groups.strategies import STRATEGIES, choose

    if dist.is_initialized():
        raise WorldSizeError(
            f"doctor starts a world of its own, and torch.distributed is initialised in this "
            f"process, with {dist.get_world_size()} ranks; run it in a process of its own"
        )
    stores: Any = dist  # has them, but not for type checkers
    try:
        dist.init_process_group(
            "gloo", store=stores.HashStore(), rank=0, world_size=1, timeout=_TIMEOUT
        )
    except Exception as error:  # noqa: BLE001 - whatever it raises is the reason
        reason = f"torch.distributed cannot be initialised: {one_line(error)}"
        found.strategies = [Strategy(name, "failed", reason) for name in STRATEGIES]
        return
    try:
        found.strategies = [_try(name) for name in STRATEGIES]
        found.auto = choose("auto", None).strategy
    finally:
        dist.destroy_process_group()


def _try(strategy: Any) -> Strategy:
    """Create a group in one way, and communicate over it."""
    import torch
    import torch.distributed as dist

    from hypercomm.grid import HyperCommGrid
    from hypercomm.process_groups.strategies import STRATEGIES, Wanted

    why_not, cost, _ = STRATEGIES[strategy]
    reason = why_not(Wanted("gloo"))
    if reason is not None:
        return Strategy(strategy, "not here", reason)
    begin = time.perf_counter()
    try:
        with HyperCommGrid([1], ["dp"], creation=strategy) as grid:
            dist.all_reduce(torch.ones(1), group=grid.create_pg("dp"))
    except Exception as error:  # noqa: BLE001 - whatever it raises is the reason
        return Strategy(strategy, "failed", one_line(error))
    return Strategy(strategy, "works", cost, time.perf_counter() - begin)


# ---- what is printed --------------------------------------------------------------------------


def _show(found: Report) -> None:
    out = console(_PIPED_WIDTH)
    gpus = ", ".join(f"{count} x {name}" for name, count in Counter(found.gpus).items())
    versions = {name: version or "not installed" for name, version in found.versions.items()}
    out.print(_table(("what", "version"), {**versions, "GPUs": gpus or "none found"}.items()))
    if found.strategies:
        states = ((name, reason or "available") for name, reason in found.backends.items())
        out.print(_table(("backend", "state"), states))
        tried = ((each.name, each.state, _took(each), each.says) for each in found.strategies)
        out.print(_table(("strategy", "result", "time", "cost, or why not"), tried))
        out.print(f"creation='auto' takes {found.auto} in a job of gloo\n", markup=False)
        names = (
            (name, "works" if is_there else "missing")
            for name, is_there in found.private_names.items()
        )
        out.print(_table(("private name of torch", "state"), names))
    if found.environment:
        out.print(_table(("environment", "value"), sorted(found.environment.items())))
    else:
        out.print("no environment variable that matters is set")
    for problem in found.problems:
        out.print(f"[red]problem[/]: {escape(problem)}")
    if not found.problems:
        out.print("hypercomm works with this torch")
    out.print("a bug report needs what 'hypercomm doctor --json' prints", markup=False)


def _took(strategy: Strategy) -> str:
    return "-" if strategy.seconds is None else f"{strategy.seconds * 1e3:.1f} ms"


def _table(titles: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Table:
    made = table(*(Column(title, overflow="fold") for title in titles), show_edge=False)
    for row in rows:
        made.add_row(*(escape(cell or "(empty)") for cell in row))
    return made
