"""Controls whether the members of gloo groups connect lazily."""

from __future__ import annotations

import contextlib
import inspect
import os
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hypercomm.process_groups.torch_internals.capabilities import Patch


def address_key(name: str, position: int) -> str:
    """Return the key under which a member of a gloo group publishes its address."""
    return f"{name}//cpu//0/{position}"


_SWITCH = "TORCH_GLOO_LAZY_INIT"
_init = Patch("__init__", inspect.getattr_static)
_here = threading.local()
_Options: Any = getattr(getattr(dist, "ProcessGroupGloo", None), "_Options", None)


def _create(backend: Any, *args: Any, **given: Any) -> None:
    """Replace `ProcessGroupGloo.__init__`, which other threads may also call."""
    original = _init.original(dist.ProcessGroupGloo)
    lazily = getattr(_here, "lazily", None)
    if lazily is None or "timeout" not in given or given.get("enable_reconfigure", False):
        original(backend, *args, **given)
    else:
        original(backend, *args, _options(_devices(lazily=lazily), given["timeout"]))


def _devices(*, lazily: bool) -> list[Any]:
    """Return new devices for the network interfaces that torch would choose."""
    gloo: Any = dist.ProcessGroupGloo
    names = os.environ.get("GLOO_SOCKET_IFNAME")
    if names is None:
        return [gloo.create_default_device(lazy_init=lazily)]
    return [gloo.create_device(interface=name, lazy_init=lazily) for name in names.split(",")]


def _options(devices: list[Any], timeout: timedelta) -> Any:
    options = _Options()
    options._devices = devices
    options._timeout = timeout
    options._threads = 2 * len(devices)  # as torch does
    return options


@contextlib.contextmanager
def lazy_init(lazily: bool | None) -> Iterator[None]:
    """Choose whether the gloo groups that this thread creates in a `with` block connect lazily.

    The choice is a property of the device of a group. torch creates the device according to an
    environment variable, which all threads share. If a thread chooses otherwise, this module
    creates the device.

    Args:
        lazily: True to connect two members at their first message, False to connect all members at
            the creation; None uses the environment variable.
    """
    usual = os.environ.get(_SWITCH, "0").lower() in {"1", "true", "t", "yes", "y", "on"}
    if lazily is None or lazily == usual or _Options is None:
        yield
        return
    with _init.applied(dist.ProcessGroupGloo, _create):
        _here.lazily = lazily
        try:
            yield
        finally:
            _here.lazily = None
