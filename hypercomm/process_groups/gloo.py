"""How the members of a gloo group find each other: at its creation, or at their first message."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from datetime import timedelta
from typing import Any

import torch.distributed as dist


def address_key(name: str, position: int) -> str:
    """Return the key under which a member of a group leaves its address in the store.

    Seen in torch 2.6 and 2.13: torch prefixes the group's name and the device, gloo a number.
    """
    return f"{name}//cpu//0/{position}"


class AddressReading:
    """Lets gloo read the addresses of all members from the store at once, not one by one.

    Each rank may read as it likes: what gloo writes stays the same. The one reading waits for as
    long as the store does, so a group with a timeout of its own must be read one by one; while one
    is, so are those that other threads create. gloo looks at an environment variable whenever it
    connects a group. It is set to "0" afterwards and never removed: moving the environment is not
    safe while other threads read it. A user's own value stays.
    """

    _SWITCH = "GLOO_ENABLE_STORE_V2_API"

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._creating = {True: 0, False: 0}
        self._is_users = False

    @contextlib.contextmanager
    def at_once(self, allowed: bool) -> Iterator[None]:
        """Read at once while a group is created, if that is allowed for it."""
        self._count(allowed, 1)
        try:
            yield
        finally:
            self._count(allowed, -1)

    def _count(self, allowed: bool, change: int) -> None:
        with self._lock:
            if not any(self._creating.values()):
                self._is_users = os.environ.get(self._SWITCH, "0") != "0"
            self._creating[allowed] += change
            if not self._is_users:
                wanted = self._creating[True] and not self._creating[False]
                os.environ[self._SWITCH] = "1" if wanted else "0"


class LazyInit:
    """Lets gloo connect each pair of members at their first message, rather than at the creation.

    gloo looks at an environment variable whenever it makes a group, and all members must see the
    same. So a creation waits for those of other threads that want it otherwise.
    """

    _SWITCH = "TORCH_GLOO_LAZY_INIT"

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._creating = 0
        self._is_set_to: bool | None = None
        self._users = ""

    def is_set(self) -> bool:
        """Tell whether the groups that are created now connect lazily."""
        return os.environ.get(self._SWITCH, "0").lower() in {"1", "true", "t", "yes", "y", "on"}

    @contextlib.contextmanager
    def set_to(self, lazily: bool | None) -> Iterator[None]:
        """Connect lazily or not while a group is created; None leaves it to the environment."""
        with self._changed:
            self._changed.wait_for(lambda: not self._creating or self._is_set_to == lazily)
            if not self._creating and lazily is not None:
                self._users = os.environ.get(self._SWITCH, "0")
                os.environ[self._SWITCH] = "1" if lazily else "0"
            self._is_set_to = lazily
            self._creating += 1
        try:
            yield
        finally:
            with self._changed:
                self._creating -= 1
                if not self._creating and lazily is not None:
                    os.environ[self._SWITCH] = self._users
                self._changed.notify_all()


class Devices:
    """Lets gloo groups that are created together share what they listen at, and its thread.

    torch gives each gloo group a device of its own: it looks the host up, listens at a socket and
    starts a thread. gloo takes devices, but torch's helper hands none on; so as long as a group is
    created on shared ones, the class that the helper calls is one that does. Groups keep their
    devices alive, and the last one ends them. Lazily connected groups get their own: on a shared
    device their collectives were seen to hang (torch 2.13).
    """

    def __init__(self) -> None:
        self._shared: ContextVar[list[Any] | None]
        self._shared = ContextVar("shared devices", default=None)
        self._lock = threading.Lock()
        self._creating = 0
        self._torchs: Any = None

    @contextlib.contextmanager
    def shared(self) -> Iterator[None]:
        """Give the gloo groups that this thread creates within a `with` block the same devices."""
        token = self._shared.set([])
        try:
            yield
        finally:
            self._shared.reset(token)

    @contextlib.contextmanager
    def used(self) -> Iterator[None]:
        """Create one group on the shared devices, if there are any and it connects at once."""
        shared = self._shared.get()
        if shared is None or lazy_init.is_set():
            yield
            return
        if not shared:
            shared += self._new()
        token = self._used.set(shared)
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)
            self._used.reset(token)

    _used: ContextVar[list[Any] | None] = ContextVar("devices in use", default=None)

    @staticmethod
    def _new() -> list[Any]:
        """Make what torch would: a device for each interface that the user names, or the host's."""
        gloo, names = dist.ProcessGroupGloo, os.environ.get("GLOO_SOCKET_IFNAME", "")
        if len(names) > 1:
            return [gloo.create_device(interface=name) for name in names.split(",")]
        return [gloo.create_default_device()]

    def _count(self, change: int) -> None:
        c10d: Any = dist.distributed_c10d
        with self._lock:
            if not self._creating:
                self._torchs = c10d.ProcessGroupGloo
                c10d.ProcessGroupGloo = self._class(self._torchs)
            self._creating += change
            if not self._creating:
                c10d.ProcessGroupGloo = self._torchs

    def _class(self, torchs: Any) -> Any:
        used = self._used

        class Kind(type(torchs)):  # type: ignore[misc]
            def __instancecheck__(cls, instance: object) -> bool:
                return isinstance(instance, torchs)  # one that another thread made before

        class ProcessGroupGloo(torchs, metaclass=Kind):  # type: ignore[misc]
            def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
                shared = used.get()
                if shared is None:  # another thread creates one meanwhile
                    super().__init__(store, rank, size, timeout=timeout)
                    return
                options = torchs._Options()
                options._devices = shared
                options._threads = 2 * len(shared)
                options._timeout = timeout
                super().__init__(store, rank, size, options)

        return ProcessGroupGloo


reading = AddressReading()
"""Of this process."""

lazy_init = LazyInit()
"""Of this process."""

devices = Devices()
"""Of this process."""
