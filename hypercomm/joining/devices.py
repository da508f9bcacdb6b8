"""Which device, and which backend, a rank has: what is given, else what there is on its host."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from hypercomm.errors import LaunchError
from hypercomm.layout.text import shown
from hypercomm.process_groups import torch_internals as c10d
from hypercomm.process_groups.options import check_backend


def choose(
    backend: str | None,
    device: torch.device | str | int | None,
    local_rank: int | None,
    local_size: int | None,
) -> tuple[str, torch.device]:
    """Return the backend of WORLD and the device of this rank.

    Args:
        backend: As given; default: for the device, and gloo for the host's memory.
        device: As given; default: the one of this rank's local number, where the backend is for
            devices, or there are some.
        local_rank: The number of the rank among those of its host, if it is known.
        local_size: The ranks on its host, if it is known.

    Raises:
        GroupOptionsError: The backend is unknown, or cannot run here.
        LaunchError: The device does not exist, the backend is not for it, or nothing tells which
            is this rank's.

    Example:
        >>> choose("gloo", None, 0, 1)
        ('gloo', device(type='cpu'))
    """
    check_backend(backend)
    if device is not None:
        chosen = _as_device(device, local_rank, local_size)
    else:
        kind = _accelerator() if backend is None else c10d.devices_made_for(backend)
        chosen = device_of_rank(kind, local_rank, local_size)
    if backend is None:
        return _backend_for(chosen.type), chosen
    parts = c10d.parts_of(backend)
    if chosen.type not in parts:
        raise LaunchError(
            f"backend {backend!r} is for tensors on {' and '.join(sorted(parts))}, and device is "
            f"{str(chosen)!r}; leave one of them out, or give backend 'cpu:gloo,cuda:nccl'"
        )
    return backend, chosen


def device_of_rank(kind: str, local_rank: int | None, local_size: int | None) -> torch.device:
    """Return the device of a rank, of some kind; the host's memory is one for all.

    Raises:
        LaunchError: The host has fewer devices than ranks, or nothing tells which one is whose.
    """
    if kind == "cpu":
        return torch.device(kind)
    count = _count(kind)
    if local_rank is None and count > 1:
        raise LaunchError(
            f"each rank needs a device of its own, and nothing tells which of the {count} of this "
            f"host this rank is to have; set LOCAL_RANK, or give join() local_rank= or device="
        )
    ranks = max(local_size or 0, (local_rank or 0) + 1)
    if count != 1 and ranks > count:  # one may be all that this rank is shown
        raise LaunchError(
            f"{ranks} ranks on this host need a device each, and it shows {count} of {kind!r}; "
            f"use backend 'gloo', or fewer ranks"
        )
    return torch.device(kind, 0 if count == 1 or local_rank is None else local_rank)


def use(device: torch.device) -> None:
    """Make a device the current one; the host's memory always is."""
    if device.type != "cpu":
        torch.get_device_module(device.type).set_device(device)


@contextlib.contextmanager
def used_unless_it_fails(device: torch.device) -> Iterator[None]:
    """Make a device the current one, and the one before again where the block raises."""
    module: Any = None if device.type == "cpu" else torch.get_device_module(device.type)
    before = None if module is None else module.current_device()
    use(device)
    try:
        yield
    except BaseException:
        if module is not None:
            module.set_device(before)
        raise


def device_of_world(world: Any) -> torch.device:
    """Return the device of this rank in a world that is live; a fake one may be for others."""
    kind = c10d.device_type(world)
    if kind == "cpu" or not _count(kind):
        return torch.device("cpu")
    return torch.device(kind, torch.get_device_module(kind).current_device())


def _as_device(
    device: torch.device | str | int, local_rank: int | None, local_size: int | None
) -> torch.device:
    """Read a device; of a kind alone it is the one of this rank."""
    if isinstance(device, bool) or not isinstance(device, (torch.device, str, int)):
        raise LaunchError(f"device must be one such as 'cuda:0' or 'cpu', got {shown(device)}")
    try:
        read = torch.device(*((_numbered(), device) if isinstance(device, int) else (device,)))
    except (RuntimeError, TypeError, ValueError) as error:
        raise LaunchError(
            f"device must be one such as 'cuda:0' or 'cpu', got {shown(device)}"
        ) from error
    if read.type == "cpu":
        return torch.device("cpu")
    if read.type not in _default_backends():
        raise LaunchError(
            f"device {shown(device)}: torch has no backend for {read.type!r}; use one of "
            f"{sorted(_default_backends())}"
        )
    if read.type not in c10d.parts_of(_backend_for(read.type)):
        raise LaunchError(
            f"device {shown(device)}: torch.distributed moves no tensors that are on "
            f"{read.type!r}; use 'cpu', and copy what is sent"
        )
    count = _count(read.type)
    if count == 0 or (read.index is not None and read.index >= count):
        here = f"{count} of them" if count else "none"
        raise LaunchError(
            f"device {shown(device)} does not exist: torch sees {here} on this host; use "
            f"{'cpu' if count == 0 else f'{read.type}:{count - 1}'!r}"
        )
    return device_of_rank(read.type, local_rank, local_size) if read.index is None else read


def _default_backends() -> dict[str, str]:
    """Return the backend that torch has for each kind of device."""
    return dict(dist.Backend.default_device_backend_map)


def _numbered() -> str:
    """Return the kind of device that a number alone means: the one that there is, else CUDA's."""
    kind = _accelerator()
    return "cuda" if kind == "cpu" else kind


def _accelerator() -> str:
    """Return the kind of device that this host has, with a backend for it; else "cpu"."""
    for kind, backend in _default_backends().items():
        if kind in {"cpu", "mps"} or c10d.why_unavailable(backend) is not None:
            continue
        if _count(kind):
            return kind
    return "cpu"


def _backend_for(kind: str) -> str:
    own = _default_backends()[kind]
    return "gloo" if own == "gloo" else f"cpu:gloo,{kind}:{own}"


def _count(kind: str) -> int:
    """Return how many devices of a kind there are."""
    try:
        module = torch.get_device_module(kind)
    except RuntimeError:  # this build of torch has no such module
        return 0
    return int(module.device_count()) if module.is_available() else 0
