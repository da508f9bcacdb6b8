"""The device that WORLD is bound to, what can be split off there, and groups made without a split.

A group on the device of a bound WORLD is split off WORLD's communicator, for which every rank of
WORLD must come. A rank that creates its own group alone tells torch not to: by the option
`lazy_init` of NCCL, where torch has it (2.15), else by hiding the device from torch meanwhile.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed import ProcessGroup

from hypercomm.process_groups.c10d.backends import (
    NCCL,
    part_on,
    parts_of,
    parts_of_world,
    put_timeout,
    single_backends,
    why_unavailable,
)
from hypercomm.process_groups.c10d.private_names import COLOR, private, signature_of, since

_NEVER_SPLIT = {"gloo", "fake"}
"""Backends that torch creates anew on a bound WORLD, too."""


class Binding:
    """The device that WORLD is bound to, which can be hidden from torch for a while."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._hiding = 0
        self._hidden: tuple[ProcessGroup, torch.device] | None = None

    def device(self) -> torch.device | None:
        """Return the device, hidden or not; None where WORLD is bound to none."""
        with self._lock:
            return self._device(dist.group.WORLD)

    def _device(self, world: ProcessGroup | None) -> torch.device | None:
        if self._hidden is not None and self._hidden[0] is world:
            return self._hidden[1]
        return getattr(world, "bound_device_id", None)

    def can_be_hidden(self) -> bool:
        """Tell whether torch lets the device be set."""
        world: Any = dist.group.WORLD
        with self._lock:
            if self._hiding:
                return True
            try:
                world.bound_device_id = world.bound_device_id
            except (AttributeError, RuntimeError, TypeError):
                return False
        return True

    @contextlib.contextmanager
    def hidden(self) -> Iterator[None]:
        """Hide the device from torch within a `with` block, which other threads may enter, too."""
        world: Any = dist.group.WORLD
        with self._lock:
            device = self._device(world)
            if device is not None:
                self._hiding += 1
                self._hidden = (world, device)
                world.bound_device_id = None
        try:
            yield
        finally:
            with self._lock:
                self._hiding -= device is not None
                if device is not None and not self._hiding:
                    world.bound_device_id = device
                    self._hidden = None


binding = Binding()
"""Of this process."""


def split_device() -> torch.device | None:
    """Return the device that WORLD is bound to, if its backend there can be split."""
    device = binding.device()
    if device is None:
        return None
    return device if getattr(part_on(device), "supports_splitting", False) else None


def device_backend(device: torch.device) -> str:
    """Return the name of the backend that WORLD runs on a device."""
    return parts_of_world()[device.type]


def why_not_alone(backend: str) -> str | None:
    """Say why a group of a backend cannot be created by its members alone; None where it can."""
    device = split_device()
    if device is None:
        return None
    if (reason := _why_unknown(backend)) is not None:
        return reason
    if parts_of(backend).get(device.type, "gloo") in _NEVER_SPLIT:
        return None
    if connects_as_told(backend) or binding.can_be_hidden():
        return None
    return f"WORLD is bound to {device}, and every rank must take part in splitting it"


def connects_as_told(backend: str) -> bool:
    """Tell whether torch's options say when an NCCL group connects: nccl2 and nccl-lazy (2.15)."""
    nccl = getattr(dist, "ProcessGroupNCCL", None)  # not in a build without it
    if nccl is None or not hasattr(nccl.Options, "lazy_init"):
        return False
    legacy = {"nccl-legacy", *({"nccl"} if os.environ.get("TORCH_DIST_USE_NCCL2") == "0" else ())}
    return any(single in NCCL - legacy for single in single_backends(backend))


def is_nccl(backend: str) -> bool:
    """Tell whether NCCL runs a group, or a part of it."""
    return any(single in NCCL for single in single_backends(backend))


def lazy_options(backend: str, pg_options: Any, timeout: timedelta | None) -> Any:
    """Return options by which the members of an NCCL group connect at their first message.

    Options as given where torch has no such switch.
    """
    if not connects_as_told(backend):
        return pg_options
    if pg_options is None:
        nccl: Any = dist
        pg_options = nccl.ProcessGroupNCCL.Options()
        if timeout is not None:
            put_timeout(pg_options, timeout)
    pg_options.lazy_init = True
    return pg_options


def made_alone(
    backend: str, pg_options: Any, timeout: timedelta, lazily: bool | None
) -> AbstractContextManager[tuple[Any, torch.device | None]]:
    """Let the members of a group create it within a `with` block without any other rank.

    Args:
        backend: The group's.
        pg_options: Its options.
        timeout: Its timeout.
        lazily: Whether members of an NCCL group connect at their first message; None: as torch
            does, which on a bound WORLD connects them at once unless it has that for a switch.

    Returns:
        A context manager, which yields the options, and the device to connect on, with which torch
        is to create the group.
    """
    device = binding.device()
    is_bound = device is not None and parts_of(backend).get(device.type, "gloo") not in _NEVER_SPLIT
    if lazily is not False and (is_bound or lazily) and connects_as_told(backend):
        return contextlib.nullcontext((lazy_options(backend, pg_options, timeout), device))
    if is_bound:
        return _made_unbound(pg_options, None if lazily else device)
    at_once = lazily is False and is_nccl(backend)
    return contextlib.nullcontext((pg_options, _current_device() if at_once else None))


@contextlib.contextmanager
def _made_unbound(
    pg_options: Any, device: torch.device | None
) -> Iterator[tuple[Any, torch.device | None]]:
    with binding.hidden():
        yield pg_options, device


def _current_device() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


# ---- what a split makes -----------------------------------------------------------------------


def why_not_split(backend: str) -> str | None:
    """Say why groups of a backend cannot be split off WORLD; None where they can."""
    device = split_device()
    if device is None:
        return "WORLD is not bound to a device: init_process_group(device_id=...) binds it"
    if not hasattr(dist, "split_group"):
        return "this torch lacks torch.distributed.split_group"
    if COLOR.is_due() and not private.works(COLOR):
        return f"{COLOR} {private.why_not(COLOR)}, so that groups may be mistaken for each other"
    if (reason := _why_unknown(backend)) is not None:
        return reason
    bound = device_backend(device)
    world, wanted = parts_of_world(), parts_of(backend)
    if wanted.get(device.type) != bound or not wanted.items() <= world.items():
        return f"WORLD is bound to {device} with {bound!r}, and has no {backend!r} to split off"
    if wanted != world and not takes_backend():
        return f"WORLD is bound to {device} with {bound!r}, and a split keeps all of its backends"
    if len(set(wanted.values())) > 1 and not since("2.14"):
        return "before torch 2.14 a split gives each part of WORLD the options of its bound one"
    whole = [name for part, name in wanted.items() if not _can_split(part)]
    return f"WORLD's {whole[0]!r} cannot be split" if whole else None


def _why_unknown(backend: str) -> str | None:
    """Why torch cannot say on which devices a backend runs: it must be loaded for that."""
    reasons = ((single, why_unavailable(single)) for single in single_backends(backend))
    return next((f"{single!r} {reason}" for single, reason in reasons if reason is not None), None)


def _can_split(device_type: str) -> bool:
    return bool(getattr(part_on(torch.device(device_type)), "supports_splitting", False))


def takes_backend() -> bool:
    """Tell whether a split can keep some of WORLD's backends alone (torch 2.13)."""
    return "backend" in signature_of(dist.split_group)


def split_backend(backend: str) -> str | None:
    """Return what a split must be told to make groups of `backend`; None: all that WORLD has."""
    return None if parts_of(backend) == parts_of_world() else backend


def keeps_order() -> bool:
    """Tell whether a split keeps the order of the ranks that it is given (torch 2.15)."""
    return since("2.15")


def split_colors(groups: NDArray[np.int64]) -> list[int]:
    """Return the colour that torch gives each group, a row of ranks, when it splits WORLD.

    Until torch 2.8 it is a hash that Python makes of the ranks, since then one that C++ makes; that
    adds up ranks as boost's `hash_combine` does.
    """
    if COLOR.is_due():
        return [private.get(COLOR)(ranks) for ranks in groups.tolist()]
    colors = np.zeros(len(groups), np.uint64)
    for ranks in groups.astype(np.uint64).T:
        colors ^= (
            ranks + np.uint64(0x9E3779B9) + (colors << np.uint64(6)) + (colors >> np.uint64(2))
        )
    return (np.abs(colors.view(np.int64)) % (2**31 - 1)).tolist()  # type: ignore[no-any-return]
