"""How the members of a gloo group find each other: at its creation, or at their first message.

gloo reads the address of each member from the store, and nothing can end its wait there. It takes
any store, so a `GlooStore` waits instead: it polls, and ends the wait if the round of the creation
has ended.
"""

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
from hypercomm.process_groups.torch_internals.store import read_bytes

_FEW = 2
"""Up to how many addresses are read one by one: `check` and `multi_get` take two operations."""

Wait = Callable[[Callable[[], "bool | None"]], Any]
"""Polls a function until it returns True; raises if the wait must end."""


def world_address_key(rank: int) -> str:
    """Return the key, within WORLD's own store, of the address of a rank of a gloo WORLD."""
    return f"cpu//0/{rank}"


class ConnectionFailedError(RuntimeError):
    """A backend could not connect the members of a group, although all of them are there.

    Attributes:
        ranks: The members.
    """

    def __init__(self, error: Exception, ranks: Sequence[int]) -> None:
        super().__init__((str(error).splitlines() or [""])[0])
        self.ranks = ranks


class GlooStore(dist.Store):  # type: ignore[name-defined, misc]
    """The store that one gloo group is created with, on top of that of its world.

    Args:
        store: The store of the world.
        size: The number of members.
        wait: Waits for their addresses; None where the group has one member.
        stale: Receives the keys that no member needs any more.
    """

    def __init__(self, store: Any, size: int, wait: Wait | None, stale: list[str]) -> None:
        super().__init__()
        self._store = store
        self._stale = stale
        self._size = size
        self._wait: Wait | None = wait
        self._found: dict[str, bytes] = {}
        self._published: list[str] = []
        self.error: BaseException | None = None
        """The error that ended the wait, which gloo replaces by a RuntimeError."""

    def close(self) -> None:
        """Pass further operations on to the store of the world: the group exists."""
        self._wait = None
        self._found.clear()

    def has_all(self) -> bool:
        """Return whether gloo has the addresses of all members, and connects to them."""
        return len(self._found) >= self._size

    def forget(self) -> None:
        """Have the addresses of this member deleted: the group has ended."""
        self._stale.extend(self._published)
        self._published.clear()

    def set(self, key: str, value: bytes) -> None:
        """Publish the address of this member."""
        self._found[key] = bytes(value)
        self._published.append(key)
        self._store.set(key, value)

    def get(self, key: str) -> bytes:
        """Return the address of a member, once it is there."""
        if key not in self._found:
            if self._wait is None:
                return bytes(self._store.get(key))
            self._gather(key, self._wait)
        return self._found[key]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the addresses of members, once they are there."""
        return [self.get(key) for key in keys]

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:  # noqa: ARG002
        """Wait for the addresses of members."""
        for key in keys:
            self.get(key)

    def check(self, keys: Sequence[str]) -> bool:
        """Return whether all keys are set."""
        return bool(self._store.check(list(keys)))

    def add(self, key: str, amount: int) -> int:
        """Add to the number in a key."""
        return int(self._store.add(key, amount))

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set a key that holds `expected`; return what it holds afterwards."""
        return bytes(self._store.compare_set(key, expected, desired))

    def delete_key(self, key: str) -> bool:
        """Delete a key."""
        return bool(self._store.delete_key(key))

    def has_extended_api(self) -> bool:
        """Return True: `multi_get` works."""
        return True

    def clone(self) -> Any:
        """Return the store for a group that is split off."""
        return self._store.clone()

    def _gather(self, key: str, wait: Wait) -> None:
        """Wait for the addresses of all members, whichever gloo asks for first."""
        place, _, position = key.rpartition("/")
        members = [f"{place}/{member}" for member in range(self._size)]
        keys = members if position.isdecimal() and key in members else [key]
        missing = [one for one in keys if one not in self._found]
        read = self._peek if len(missing) <= _FEW else self._read
        try:
            wait(lambda: read(missing))
        except BaseException as error:
            self.error = error
            raise

    def _peek(self, keys: Sequence[str]) -> bool | None:
        for key in keys:
            if key not in self._found:
                value = read_bytes(self._store, key)
                if value is None:
                    return None
                self._found[key] = value
        return True

    def _read(self, keys: Sequence[str]) -> bool | None:
        if not self._store.check(list(keys)):
            return None
        if self._store.has_extended_api():
            values = self._store.multi_get(list(keys))
        else:
            values = [self._store.get(key) for key in keys]
        self._found.update(zip(keys, map(bytes, values), strict=True))
        return True


# ---- the devices of groups ---------------------------------------------------------------------

_init = Patch("__init__", inspect.getattr_static)
_here = threading.local()
_Options: Any = getattr(getattr(dist, "ProcessGroupGloo", None), "_Options", None)


@contextlib.contextmanager
def one_device(undo: Callable[[], None]) -> Iterator[None]:
    """Let the gloo groups that this thread creates in a `with` block receive on one device.

    A device is a listening socket with a thread. torch opens one for each group, which takes about
    as long as connecting the group.

    Args:
        undo: Destroys these groups. It is called at once if the block fails: as long as the device
            exists, a late peer of the group that failed can connect, and crash gloo.
    """
    devices = _here.devices = []
    try:
        yield
    except BaseException:
        if devices:
            devices.clear()
            with contextlib.suppress(Exception):  # the error at hand matters more
                undo()
        raise
    finally:
        _here.devices = None


@contextlib.contextmanager
def on_that_device() -> Iterator[None]:
    """Create a gloo group on the device of `one_device`, if this thread is in such a block."""
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
    """Replace `ProcessGroupGloo.__init__`, which other threads may call, too."""
    devices, original = getattr(_here, "shared", None), _init.original(dist.ProcessGroupGloo)
    if devices and "timeout" in given:
        original(backend, *args, _options(devices, given["timeout"]))
        return
    lazily, changes = getattr(_here, "lazily", None), given.get("enable_reconfigure", False)
    if lazily is None or "timeout" not in given or changes:
        original(backend, *args, **given)
    else:
        original(backend, *args, _options(_devices(lazily=lazily), given["timeout"]))
    if devices is not None:
        devices += backend.options._devices


def _devices(*, lazily: bool) -> list[Any]:
    """Return new devices on the interfaces that torch would choose."""
    gloo: Any = dist.ProcessGroupGloo
    names = os.environ.get("GLOO_SOCKET_IFNAME")
    if names is None:
        return [gloo.create_default_device(lazy_init=lazily)]
    return [gloo.create_device(interface=name, lazy_init=lazily) for name in names.split(",")]


def _options(devices: list[Any], timeout: timedelta) -> Any:
    options = _Options()
    options._devices, options._timeout = devices, timeout
    options._threads = 2 * len(devices)  # as torch does
    return options


# ---- lazily connected groups -------------------------------------------------------------------


class LazyInit:
    """Lets gloo connect each pair of members at their first message, rather than at the creation.

    This is a property of the device of a group. torch makes the device, as an environment variable
    says, which all threads share; for another value the device is made here.
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
        """Connect lazily or not while a group is created; None leaves it to the environment.

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
"""Of the calling thread."""
