"""How the members of a gloo group find each other: at its creation, or at their first message."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from datetime import timedelta
from functools import partial
from typing import Any

import attrs
import torch.distributed as dist

from hypercomm.process_groups.answers import in_time
from hypercomm.process_groups.meeting import Meeting, Patience

_LONGEST_HOST_NAME = 255

_CONNECTING_MARGIN_S = 0.3
"""How long after the timeout a creation ends: who waits for an address says so before."""


def world_address_key(rank: int) -> str:
    """Return the key, within WORLD's own store, under which a rank of a gloo WORLD is found."""
    return f"cpu//0/{rank}"


def host_in(address: bytes | None) -> str | None:
    """Read the host's name out of a member's address; None where it has no such form.

    Seen in torch 2.6 and 2.13: the length of the name in 8 bytes, then the name.
    """
    if address is None or len(address) <= 8:
        return None
    length = int.from_bytes(address[:8], sys.byteorder)
    if not 0 < length <= min(_LONGEST_HOST_NAME, len(address) - 8):
        return None
    name = address[8 : 8 + length].decode(errors="replace")
    return name if name.isprintable() else None


def address_key(name: str, position: int | str) -> str:
    """Return the key under which a member of a group leaves its address in the store.

    Seen in torch 2.6 and 2.13: torch prefixes the group's name and the device, gloo a number.
    """
    return f"{name}//cpu//0/{position}"


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


def _connect(make: Callable[[], None], meeting: Meeting) -> None:
    """Make a group whose members meet, or give up in time.

    Once all addresses are known, gloo waits for five times the timeout for a member that does not
    answer (seen in torch 2.13), and nothing interrupts it, not even Ctrl-C.
    """
    try:
        in_time(make, meeting.left_s() + _CONNECTING_MARGIN_S)
    except BaseException:
        meeting.end()
        raise


@attrs.frozen
class _Making:
    """How one gloo group is made."""

    devices: list[Any] | None
    patience: Patience
    meetings: list[Meeting]


class GlooMaking:
    """Makes gloo groups with a store of ours, and lets those of one call share their devices.

    torch's helper hands neither on: so as long as a group is created, the class that it calls is
    one that does. Other threads are not affected.

    torch gives each gloo group a device of its own: it looks the host up, listens at a socket and
    starts a thread. Groups keep their devices alive, and the last one ends them. Lazily connected
    groups meet later, in threads of gloo, and get neither: on a shared device their collectives
    were seen to hang (torch 2.13).
    """

    def __init__(self) -> None:
        self._shared: ContextVar[list[Any] | None]
        self._shared = ContextVar("shared devices", default=None)
        self._making: ContextVar[_Making | None] = ContextVar("making", default=None)
        self._lock = threading.Lock()
        self._creating = 0
        self._torchs: Any = None
        self._ours: Any = None

    @contextlib.contextmanager
    def shared_devices(self) -> Iterator[None]:
        """Give the groups that this thread creates within a `with` block the same devices."""
        token = self._shared.set([])
        try:
            yield
        finally:
            self._shared.reset(token)

    @contextlib.contextmanager
    def met(self, patience: Patience) -> Iterator[list[Meeting]]:
        """Create one group within a `with` block, whose members meet in a `Meeting`.

        Args:
            patience: For how long members are waited for.

        Yields:
            What must live as long as the group: torch knows only the half that is C++.
        """
        meetings: list[Meeting] = []
        if lazy_init.is_set():
            yield meetings
            return
        devices = self._shared.get()
        if devices is not None and not devices:
            devices += self._new_devices()
        token = self._making.set(_Making(devices, patience, meetings))
        self._count(1)
        try:
            yield meetings
        finally:
            self._count(-1)
            self._making.reset(token)

    @staticmethod
    def _new_devices() -> list[Any]:
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
                if self._ours is None or self._ours.__base__ is not self._torchs:
                    self._ours = self._class(self._torchs)
                c10d.ProcessGroupGloo = self._ours
            self._creating += change
            if not self._creating:
                c10d.ProcessGroupGloo = self._torchs

    def _class(self, torchs: Any) -> Any:
        current = self._making

        class Kind(type(torchs)):  # type: ignore[misc]
            def __instancecheck__(cls, instance: object) -> bool:
                return isinstance(instance, torchs)  # one that another thread made before

        class ProcessGroupGloo(torchs, metaclass=Kind):  # type: ignore[misc]
            def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
                making = current.get()
                if making is None:  # another thread creates one meanwhile
                    super().__init__(store, rank, size, timeout=timeout)
                    return
                meeting = Meeting(store, size, timeout, making.patience)
                making.meetings.append(meeting)
                if making.devices is None:
                    make = partial(super().__init__, meeting, rank, size, timeout=timeout)
                else:
                    options = torchs._Options()
                    options._devices = making.devices
                    options._threads = 2 * len(making.devices)
                    options._timeout = timeout
                    make = partial(super().__init__, meeting, rank, size, options)
                if size > 1:
                    _connect(make, meeting)
                else:
                    make()

        return ProcessGroupGloo


lazy_init = LazyInit()
"""Of this process."""

making = GlooMaking()
"""Of this process."""
