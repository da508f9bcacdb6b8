"""The device and the backend of a rank: those given, else the ones of its host."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from hypercomm.errors import LaunchError
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
        backend: The backend, if given; default: one for the device, and gloo for the CPU.
        device: The device, if given; default: the accelerator of this rank's local number if the
            backend is for accelerators, or without a backend if there are some.
        local_rank: The index of the rank on its host, if known.
        local_size: The number of ranks on its host, if known.

    Raises:
        GroupOptionsError: The backend is unknown, or cannot run here.
        LaunchError: The backend is not for the device, there are fewer devices than ranks, or it
            is unknown which one belongs to this rank.
        RuntimeError: torch knows no such device.

    Example:
        >>> choose("gloo", None, 0, 1)
        ('gloo', device(type='cpu'))
    """
    check_backend(backend)
    if device is not None:
        chosen = torch.device(device)
    else:
        chosen = torch.device(_accelerator() if backend is None else c10d.devices_made_for(backend))
    if chosen.index is None:
        chosen = _device_of_rank(chosen.type, local_rank, local_size)
    if backend is None:
        own = dist.Backend.default_device_backend_map.get(chosen.type, "gloo")
        backend = "gloo" if own == "gloo" else f"cpu:gloo,{chosen.type}:{own}"
    parts = c10d.parts_of(backend)
    if chosen.type not in parts:
        raise LaunchError(
            f"device {str(chosen)!r} does not fit backend {backend!r}, which is for tensors on "
            f"{' and '.join(sorted(parts))}; leave one of them out, or give a backend such as "
            f"'cpu:gloo,cuda:nccl'"
        )
    return backend, chosen


def device_of_world(world: Any) -> torch.device:
    """Return the device of this rank in a live world; a fake one may be for absent devices."""
    kind = c10d.device_type(world)
    if kind == "cpu" or not _count(kind):
        return torch.device("cpu")
    return torch.device(kind, torch.get_device_module(kind).current_device())


def _device_of_rank(kind: str, local_rank: int | None, local_size: int | None) -> torch.device:
    if kind == "cpu":
        return torch.device(kind)
    count = _count(kind)
    if local_rank is None and count > 1:
        raise LaunchError(
            f"this host has {count} devices of type {kind!r}, and it is unknown which one belongs "
            f"to this rank; set LOCAL_RANK, or give join() local_rank= or device="
        )
    ranks = max(local_size or 0, (local_rank or 0) + 1)
    if count != 1 and ranks > count:  # a launcher may show each rank only its own
        raise LaunchError(
            f"{ranks} ranks on this host need a device each, and it has {count} of type {kind!r}; "
            f"use backend 'gloo', or fewer ranks"
        )
    return torch.device(kind, 0 if count == 1 or local_rank is None else local_rank)


def _accelerator() -> str:
    """Return the type of this host's accelerator if torch has a backend for it; else "cpu"."""
    found = torch.accelerator.current_accelerator(check_available=True)
    backend = found and dist.Backend.default_device_backend_map.get(found.type)
    if found is None or backend in {None, "gloo"} or c10d.why_unavailable(str(backend)):
        return "cpu"
    return found.type


def _count(kind: str) -> int:
    try:
        module = torch.get_device_module(kind)
    except RuntimeError:  # this build of torch has no such module
        return 0
    return int(module.device_count()) if module.is_available() else 0
