"""Splits groups off WORLD, and lets members create groups without such a split.

If WORLD is bound to a device, torch splits a group on that device off WORLD's communicator, and
every rank of WORLD must take part. If only the members create a group, this module prevents the
split. It uses NCCL's option `lazy_init` if torch has this option (2.15). Otherwise it hides the
device from torch.
"""

from __future__ import annotations

import contextlib
import inspect
import os
from collections.abc import Iterator
from contextvars import ContextVar
from datetime import timedelta
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch.distributed import ProcessGroup

from hypercomm.process_groups.torch_internals.capabilities import (
    NCCL,
    Patch,
    part_on,
    parts_of,
    parts_of_world,
    since,
    single_backends,
    why_unavailable,
)

_NEVER_SPLIT = {"gloo", "fake"}
"""Backends whose groups torch does not split off a bound WORLD."""

_bound = Patch("bound_device_id", inspect.getattr_static)
_hides: ContextVar[bool] = ContextVar("hides", default=False)


def bound_device() -> torch.device | None:
    """Return the device that WORLD is bound to, even while it is hidden, or None."""
    token = _hides.set(False)
    try:
        return getattr(dist.group.WORLD, "bound_device_id", None)
    finally:
        _hides.reset(token)


@contextlib.contextmanager
def _hidden_device() -> Iterator[None]:
    """Hide the device of WORLD from this thread within a `with` block."""
    with _bound.applied(ProcessGroup, _hideable):
        token = _hides.set(True)
        try:
            yield
        finally:
            _hides.reset(token)


def _shown_device(group: ProcessGroup) -> torch.device | None:
    if group is dist.group.WORLD and _hides.get():
        return None
    return _bound.original(ProcessGroup).__get__(group)  # type: ignore[no-any-return]


def _set_device(group: ProcessGroup, device: torch.device | None) -> None:
    _bound.original(ProcessGroup).__set__(group, device)


_hideable = property(_shown_device, _set_device)
"""Replaces the attribute of the class. Only the thread that hides the device sees a difference."""


def split_device() -> torch.device | None:
    """Return the device that WORLD is bound to, if the backend of that device can be split."""
    device = bound_device()
    return device if device is not None and _can_split(device) else None


def connects_as_told(backend: str) -> bool:
    """Return whether a backend has NCCL's option `lazy_init`, as nccl2 has since torch 2.15."""
    options = getattr(getattr(dist, "ProcessGroupNCCL", None), "Options", None)
    if not hasattr(options, "lazy_init"):
        return False
    legacy = {"nccl-legacy"}
    if os.environ.get("TORCH_DIST_USE_NCCL2") == "0":
        legacy.add("nccl")
    return any(single in NCCL - legacy for single in single_backends(backend))


def uses_torchcomms() -> bool:
    """Return whether torch creates groups through TorchComms, which needs only the members."""
    enabled = getattr(dist.distributed_c10d, "_use_torchcomms_enabled", None)  # torch 2.13
    return enabled is not None and bool(enabled())


def is_nccl(backend: str) -> bool:
    """Return whether NCCL is the backend, or a part of it."""
    return any(single in NCCL for single in single_backends(backend))


def lazy_options(backend: str, pg_options: Any, timeout: timedelta | None) -> Any:
    """Return options with which members of an NCCL group connect at their first message.

    If torch has no such option, the result is `pg_options`.
    """
    if not connects_as_told(backend):
        return pg_options
    if pg_options is None:
        nccl: Any = dist
        pg_options = nccl.ProcessGroupNCCL.Options()
        if timeout is not None:
            pg_options._timeout = timeout
    pg_options.lazy_init = True
    return pg_options


@contextlib.contextmanager
def without_split(
    backend: str, pg_options: Any, timeout: timedelta, lazily: bool | None
) -> Iterator[tuple[Any, torch.device | None]]:
    """Make a `with` block in which only the members create a group, without the other ranks.

    Args:
        backend: The backend of the group.
        pg_options: The options of the backend.
        timeout: The timeout of the group.
        lazily: Whether members of an NCCL group connect at their first message. None is the
            default of torch. With None, the members connect at the creation if WORLD is bound to
            a device and torch has no option `lazy_init`.

    Yields:
        The options and the device that the caller passes to torch.
    """
    device = bound_device()
    is_bound = device is not None and parts_of(backend).get(device.type, "gloo") not in _NEVER_SPLIT
    if device is not None and uses_torchcomms():  # TorchComms never splits, and needs the device
        yield pg_options, device if device.type in parts_of(backend) else None
    elif lazily is not False and (is_bound or lazily) and connects_as_told(backend):
        yield lazy_options(backend, pg_options, timeout), device
    elif is_bound:
        with _hidden_device():
            yield pg_options, None if lazily else device
    elif lazily is False and is_nccl(backend):
        yield pg_options, torch.device("cuda", torch.cuda.current_device())
    else:
        yield pg_options, None


# ---- groups that are split off WORLD -----------------------------------------------------------


def why_not_split(backend: str) -> str | None:
    """Return why groups of a backend cannot be split off WORLD, or None if they can."""
    device = split_device()
    if device is None:
        return "WORLD is not bound to a device: init_process_group(device_id=...) binds it"
    for single in single_backends(backend):
        reason = why_unavailable(single)
        if reason is not None:  # torch does not know the devices of a backend that is not loaded
            return f"{single!r} {reason}"
    world = parts_of_world()
    wanted = parts_of(backend)
    bound = world[device.type]
    if wanted.get(device.type) != bound or not wanted.items() <= world.items():
        return f"WORLD is bound to {device} with {bound!r}, and has no {backend!r} to split off"
    if wanted != world and not since("2.13"):
        return f"WORLD is bound to {device} with {bound!r}, and a split keeps all of its backends"
    if len(set(wanted.values())) > 1 and not since("2.14"):
        return "before torch 2.14 a split gives every backend the options of the bound backend"
    whole = [name for part, name in wanted.items() if not _can_split(part)]
    return f"WORLD's {whole[0]!r} cannot be split" if whole else None


def _can_split(device: torch.device | str) -> bool:
    return bool(getattr(part_on(torch.device(device)), "supports_splitting", False))


def keeps_order() -> bool:
    """Return whether a split keeps the order of ranks (torch 2.15)."""
    return since("2.15")


def split_colors(groups: NDArray[np.int64]) -> list[int]:
    """Return the colour with which torch splits each group off WORLD. Each row is one group.

    torch computes the colour in C++, as a hash of the ranks (boost's `hash_combine`).
    """
    colors = np.zeros(len(groups), np.uint64)
    for ranks in groups.astype(np.uint64).T:
        colors ^= (
            ranks + np.uint64(0x9E3779B9) + (colors << np.uint64(6)) + (colors >> np.uint64(2))
        )
    return (np.abs(colors.view(np.int64)) % (2**31 - 1)).tolist()  # type: ignore[no-any-return]


# ---- the names of splits -----------------------------------------------------------------------

_name: ContextVar[str | None] = ContextVar("name", default=None)
_naming = Patch("_process_group_name")


@contextlib.contextmanager
def with_group_name(name: str | None) -> Iterator[None]:
    """Name the group that this thread splits off WORLD within a `with` block.

    torch adds a salt to the name of such a group. Before 2.14 the salt is the number of groups of
    the calling rank. This number differs between ranks after a split that some ranks were not
    members of, and the members of a later group then use different names for it. Because
    `destroy_process_group` ends groups in the order of their names, NCCL may then wait for ever
    (pytorch issue 190396). `name` is the same on all members.
    """
    token = _name.set(name)
    try:
        with _naming.applied(dist.distributed_c10d, _process_group_name):
            yield
    finally:
        _name.reset(token)


def _process_group_name(ranks: Any, use_hashed_name: bool) -> str:
    """Return the name that `with_group_name` has set, or else the name that torch chooses."""
    # Always call torch's function, because it also counts the group.
    torchs_name: str = _naming.original(dist.distributed_c10d)(ranks, use_hashed_name)
    return _name.get() or torchs_name
