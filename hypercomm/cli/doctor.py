"""`hypercomm doctor`: show what is installed, and what works on this machine."""

from __future__ import annotations

import contextlib
import os
import platform
from collections import Counter
from datetime import timedelta
from importlib import metadata
from typing import Any

import attrs
import click
from rich.console import Console

from hypercomm.cli import options
from hypercomm.cli.printing import one_line, print_json, print_lines, quiet
from hypercomm.errors import CreationError, LaunchError
from hypercomm.job_environment import VARIABLES, find_job
from hypercomm.layout.text import aligned
from hypercomm.version import __version__

_PACKAGES = ("torch", "numpy", "attrs", "megatron-core", "deepspeed")
_TIMEOUT = timedelta(seconds=60)

_NO_SPLIT = "gloo cannot split; a split needs a WORLD bound to a device"
"""The reason why a group cannot be split off a WORLD that is not bound to a device."""

_FAMILIES = ("CUDA_", "GLOO_", "HYPERCOMM_", "NCCL_", "OMPI_COMM_", "TORCH")
"""Prefixes of the environment variables that are shown. Other variables may contain a secret."""


@attrs.define
class Report:
    """The state of this installation. If there are `problems`, the exit code is 1.

    `backends` and `strategies` map each name to the reason why it does not work here, or to None
    if it works.
    """

    versions: dict[str, str | None]
    environment: dict[str, str]
    launcher: str
    problems: list[str] = attrs.field(factory=list)
    gpus: list[str] | None = None
    backends: dict[str, str | None] = attrs.field(factory=dict)
    strategies: dict[str, str | None] = attrs.field(factory=dict)


@click.command()
@options.as_json
def doctor(*, as_json: bool) -> int:
    """Show what is installed and what works.

    Show versions, backends, the launcher, and which strategies can create groups. Creates groups
    that contain only this process. The exit code is 1 if no group can be created.
    """
    with Console(stderr=True).status("trying torch"):
        found = report()
    is_ok = not found.problems
    if as_json:
        print_json({"ok": is_ok, **attrs.asdict(found)}, indent=2, sort_keys=True)
    else:
        _show(found)
    return 0 if is_ok else 1


def report() -> Report:
    """Return the state of this installation.

    Creates groups in a world of one rank, and destroys that world.
    """
    environment = {name: value for name, value in os.environ.items() if matters(name)}
    found = Report(_versions(), environment, _launcher())
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # torch reads it when loaded
    with quiet():
        try:
            from hypercomm.process_groups import torch_internals as torchdist
        except Exception as error:  # noqa: BLE001 - any error is reported
            found.problems = [f"torch cannot be loaded: {one_line(error)}"]
            return found
        _describe_torch(found)
        for name in torchdist.known_backends():
            found.backends[name] = torchdist.why_unavailable(name)
        found.strategies = {name: _why_not(name) for name in ("local", "split", "enumerate")}
    if None not in found.strategies.values():
        found.problems = ["no process group could be created"]
    return found


def matters(variable: str) -> bool:
    """Return whether the report shows an environment variable."""
    return variable in VARIABLES or variable.startswith(_FAMILIES)


def _versions() -> dict[str, str | None]:
    found: dict[str, str | None] = dict.fromkeys(_PACKAGES)
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return {
        "hypercomm": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        **found,
    }


def _launcher() -> str:
    try:
        job = find_job(os.environ)
    except LaunchError as error:
        return str(error)
    return "none" if job is None else f"{job.launcher}: {job.source}"


def _describe_torch(found: Report) -> None:
    import torch
    import torch.distributed as dist

    build = "CPU"
    if torch.version.hip:
        build = f"ROCm {torch.version.hip}"
    elif torch.version.cuda:
        build = f"CUDA {torch.version.cuda}"
    nccl: Any = torch.cuda.nccl  # an untyped module
    found.versions |= {
        "torch": torch.version.__version__,
        "torch_build": build,
        "nccl": ".".join(map(str, nccl.version())) if dist.is_nccl_available() else None,
    }
    devices = range(torch.cuda.device_count())
    found.gpus = [str(torch.cuda.get_device_name(index)) for index in devices]


def _why_not(creation: Any) -> str | None:
    """Create a group with one strategy, in a world of one gloo rank, and communicate over it.

    Returns:
        The reason why the strategy does not work, or None if it works.
    """
    import torch.distributed as dist

    from hypercomm.grid import HyperCommGrid
    from hypercomm.process_groups import torch_internals as torchdist

    stores: Any = dist  # type checkers do not know the stores of torch.distributed
    try:
        store = stores.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1, timeout=_TIMEOUT)
        with HyperCommGrid([1], ["dp"], creation=creation) as grid:
            dist.barrier(grid.create_pg("dp"))
    except CreationError as error:
        is_unbound = creation == "split" and torchdist.bound_device() is None
        return _NO_SPLIT if is_unbound else " ".join(str(error).split())
    except Exception as error:  # noqa: BLE001 - any error is the reason
        return one_line(error)
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
    return None


def _show(found: Report) -> None:
    gpus = ", ".join(f"{count} x {name}" for name, count in Counter(found.gpus).items())
    facts = {name: version or "not installed" for name, version in found.versions.items()}
    facts |= {"GPUs": gpus or "none found", "launcher": found.launcher}
    facts |= {f"backend {name}": why or "available" for name, why in found.backends.items()}
    facts |= {f"creation={name}": why or "works" for name, why in found.strategies.items()}
    facts |= dict(sorted(found.environment.items()))
    texts = {name: text if text.isprintable() else repr(text) for name, text in facts.items()}
    lines = aligned([(name, text or "(empty)") for name, text in texts.items()])
    lines += [f"problem: {text}" for text in found.problems] or ["hypercomm works with this torch"]
    print_lines([*lines, "include the output of 'hypercomm doctor --json' in a bug report"])
