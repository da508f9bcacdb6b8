"""Controls the devices of gloo groups, and whether their members connect lazily."""

from __future__ import annotations

import contextlib
import inspect
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from hypercomm.process_groups.torch_internals.capabilities import Patch


def address_key(name: str, position: int) -> str:
    """Return the key under which a member of a gloo group publishes its address."""
    return f"{name}//cpu//0/{position}"


class ConnectionFailedError(RuntimeError):
    """A backend could not connect the members of a group, although all of them create it.

    Attributes:
        ranks: The members.
    """

    def __init__(self, error: Exception, ranks: Sequence[int]) -> None:
        super().__init__((str(error).splitlines() or [""])[0])
        self.ranks = ranks


# ---- the devices of groups ---------------------------------------------------------------------

_init = Patch("__init__", inspect.getattr_static)
_here = threading.local()
_Options: Any = getattr(getattr(dist, "ProcessGroupGloo", None), "_Options", None)


@contextlib.contextmanager
def one_device(undo: Callable[[], None]) -> Iterator[None]:
    """Use one device for all gloo groups that this thread creates in a `with` block.

    A device is a listening socket with a thread. By default, torch opens a device for each group,
    which takes about as long as connecting the group.

    Args:
        undo: Destroys these groups. `undo` is called immediately if the block fails. Otherwise a
            late peer of the failed group could connect to the device, and crash gloo.
    """
    devices = _here.devices = []
    try:
        yield
    except BaseException:
        if devices:
            devices.clear()
            with contextlib.suppress(Exception):  # the original error is raised
                undo()
        raise
    finally:
        _here.devices = None


@contextlib.contextmanager
def on_that_device() -> Iterator[None]:
    """Create a gloo group on the device of `one_device`, if this thread is in such a block.

    Use it as a `with` block around the creation of one group.
    """
    devices = getattr(_here, "devices", None)
    is_shared = _Options and not os.environ.get("GLOO_ENABLE_RANK_AS_SEQUENCE_NUMBER")
    if devices is None or not is_shared:
        yield
        return
    _here.shared = devices
    try:
        with _init.applied(dist.ProcessGroupGloo, _create):
            yield
    finally:
        _here.shared = None


def _create(backend: Any, *args: Any, **given: Any) -> None:
    """Replace `ProcessGroupGloo.__init__`, which other threads may also call."""
    original = _init.original(dist.ProcessGroupGloo)
    devices = getattr(_here, "shared", None)
    if devices and "timeout" in given:
        original(backend, *args, _options(devices, given["timeout"]))
        return
    lazily = getattr(_here, "lazily", None)
    if lazily is None or "timeout" not in given or given.get("enable_reconfigure", False):
        original(backend, *args, **given)
    else:
        original(backend, *args, _options(_devices(lazily=lazily), given["timeout"]))
    if devices is not None:
        devices += backend.options._devices


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


# ---- lazily connected groups -------------------------------------------------------------------


class LazyInit:
    """Chooses whether gloo connects two members at their first message or at the creation.

    The choice is a property of the device of a group. torch creates the device according to an
    environment variable, which all threads share. If a thread chooses otherwise, this class
    creates the device.
    """

    _SWITCH = "TORCH_GLOO_LAZY_INIT"

    @property
    def is_set(self) -> bool:
        """Whether the gloo groups that this thread creates now connect lazily."""
        lazily: bool | None = getattr(_here, "lazily", None)
        if lazily is not None:
            return lazily
        return os.environ.get(self._SWITCH, "0").lower() in {"1", "true", "t", "yes", "y", "on"}

    @contextlib.contextmanager
    def set_to(self, lazily: bool | None) -> Iterator[bool]:
        """Set the choice for the groups that this thread creates in a `with` block.

        Args:
            lazily: The choice; None uses the environment variable.

        Yields:
            Whether the group connects lazily.
        """
        wanted = self.is_set if lazily is None else lazily
        if wanted == self.is_set or _Options is None:
            yield wanted
            return
        with _init.applied(dist.ProcessGroupGloo, _create):
            _here.lazily = wanted
            try:
                yield wanted
            finally:
                _here.lazily = None


lazy_init = LazyInit()
"""The choice of the calling thread."""
