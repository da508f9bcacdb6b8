"""Describes the installed torch and its backends, and replaces attributes of torch temporarily.

The private names that this folder uses exist in torch 2.10 to 2.15. Only the private function that
creates one group has a fallback, because every creation depends on this function.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import inspect
import logging
import re
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib.metadata import entry_points
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypercomm.errors import MissingPackageError, NotInitializedError

logger = logging.getLogger(__name__)

OLDEST = "2.10"
"""The oldest torch that hypercomm works with."""


# ---- the release -------------------------------------------------------------------------------


def major_minor_of(version: str) -> tuple[int, ...]:
    """Return the major and minor number of a version, also of a pre-release.

    Example:
        >>> major_minor_of("2.10.0a0+ecf3bae40a.nv25.12"), major_minor_of("2.15")
        ((2, 10), (2, 15))
    """
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


@functools.lru_cache(maxsize=16)
def since(release: str) -> bool:
    """Return whether the installed torch is `release` or newer."""
    return major_minor_of(torch.__version__) >= major_minor_of(release)


def check_release(installed: str) -> None:
    """Raise unless a version of torch is `OLDEST` or newer.

    Raises:
        MissingPackageError: The message contains the command that installs a newer torch.

    Example:
        >>> check_release("2.10.0+cu126")
        >>> check_release("2.9.1")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        hypercomm.errors.MissingPackageError: torch 2.9.1 is installed, and hypercomm needs...
    """
    if major_minor_of(installed) < major_minor_of(OLDEST):
        raise MissingPackageError(
            f"torch {installed} is installed, and hypercomm needs {OLDEST} or newer: "
            f"pip install 'torch>={OLDEST}'; hypercomm.layout and hypercomm.RankLayout work "
            f"without torch"
        )


check_release(torch.__version__)


# ---- the private name with a fallback ----------------------------------------------------------

_c10d: Any = dist.distributed_c10d
_NEEDED = {"store", "group_name", "backend_options", "timeout", "device_id", "group_desc"}

try:
    _taken = inspect.signature(_c10d._new_process_group_helper).parameters.keys()
    HAS_HELPER = _taken >= _NEEDED
except AttributeError:
    HAS_HELPER = False
"""Whether torch has the private function that creates one group under a given name."""

if not HAS_HELPER:
    logger.warning(
        "torch %s lacks the private name _new_process_group_helper, or it has changed: every rank "
        "iterates over every group of the world (creation='enumerate')",
        torch.__version__,
    )


def is_patched_world() -> bool:
    """Return whether torch.distributed is patched for a simulated or fake job."""
    return hasattr(_c10d._world, "is_patched")


# ---- replacing an attribute temporarily --------------------------------------------------------


class Patch:
    """Replaces an attribute while a thread needs it.

    Threads that set the same value share the replacement. A thread that sets another value waits.

    Args:
        name: The name of the attribute.
        read: The function that reads the attribute. Pass `inspect.getattr_static` for a property
            of a class.
    """

    def __init__(self, name: str, read: Callable[..., Any] = getattr) -> None:
        self._name = name
        self._read = read
        self._changed = threading.Condition()
        self._users = 0
        self._owner: Any = None
        self._original: Any = None
        self._ours: Any = None

    def original(self, owner: Any) -> Any:
        """Return the original value of the attribute of `owner`, or None if there is none."""
        with self._changed:
            is_replaced = self._users and self._owner is owner
            return self._original if is_replaced else self._read(owner, self._name, None)

    @contextlib.contextmanager
    def applied(self, owner: Any, ours: Any) -> Iterator[None]:
        """Replace the attribute of `owner` within a `with` block."""
        with self._changed:
            if self._users and self._ours != ours:
                self._changed.wait_for(lambda: not self._users or self._ours == ours)
            if not self._users:
                self._owner = owner
                self._ours = ours
                self._original = self._read(owner, self._name)
                if self._original is not ours:
                    setattr(owner, self._name, ours)
            self._users += 1
        try:
            yield
        finally:
            with self._changed:
                self._users -= 1
                if not self._users:
                    if self._original is not ours:
                        setattr(owner, self._name, self._original)
                    self._owner = self._original = self._ours = None
                    self._changed.notify_all()


# ---- backends and their options ------------------------------------------------

NCCL = frozenset({"nccl", "nccl2", "nccl-lazy", "nccl-legacy"})
"""torch's names for NCCL, as of torch 2.15."""


def world_group() -> ProcessGroup:
    """Return WORLD.

    Raises:
        NotInitializedError: torch.distributed is not initialised.
    """
    world = dist.group.WORLD
    if world is None:
        raise NotInitializedError(
            "torch.distributed is not initialised; call hypercomm.join() or "
            "torch.distributed.init_process_group() first"
        )
    return world


def default_backend() -> str:
    """Return the default backend of groups, which is the backend of WORLD."""
    return backend_of(world_group())


def backend_of(group: ProcessGroup) -> str:
    """Return the backend of a group.

    If WORLD was created without a backend, torch returns "undefined". The result is then the
    backend string with all parts, such as "cpu:gloo,cuda:nccl".
    """
    name = str(dist.get_backend(group))
    return dist.get_backend_config(group) if name == dist.Backend.UNDEFINED else name


@functools.lru_cache(maxsize=64)
def pairs_of(backend: str) -> tuple[tuple[str, str], ...]:
    """Return the device and backend of each part of a backend string. For "gloo", device is ""."""
    pairs = (part.rpartition(":") for part in backend.lower().split(","))
    return tuple((device.strip(), single.strip()) for device, _, single in pairs)


@functools.lru_cache(maxsize=64)
def single_backends(backend: str) -> tuple[str, ...]:
    """Return the backends in a backend string, such as "gloo" or "cpu:gloo,cuda:nccl"."""
    return tuple(single for _, single in pairs_of(backend))


def known_backends() -> list[str]:
    """Return the names of the backends that the installed torch knows.

    Since torch 2.14 a package can provide a backend as an entry point. torch loads such a backend
    at its first use.
    """
    names = [str(name) for name in dist.Backend.backend_list if name != "undefined"]
    return [*names, *(name for name in _entry_points() if name not in names)]


def is_known(backend: str) -> bool:
    """Return whether the installed torch knows a single backend by name."""
    # Entry points are read from disk, which takes milliseconds, so they are checked last.
    listed = backend in dist.Backend.backend_list and backend != "undefined"
    return listed or backend in _entry_points()


@functools.lru_cache(maxsize=1)
def _entry_points() -> tuple[str, ...]:
    found = entry_points(group="torch.distributed.backends")
    return tuple(sorted({entry.name.lower() for entry in found}))


def why_unavailable(backend: str) -> str | None:
    """Return why torch cannot run a single backend on this host, or None if it can."""
    if is_patched_world():
        return None  # the backend is planned for another host
    # torch registers "fake" when its module is loaded, but always reports it as available.
    if backend == "fake":
        loaded = "FAKE" in dist.Backend._plugins
        return None if loaded else "is not available outside of hypercomm.testing.fake_world"
    try:
        available = bool(dist.is_backend_available(backend))
    except Exception as error:  # noqa: BLE001 - this runs code of a third party
        return f"cannot be loaded ({error.__cause__ or error})"
    if available and backend in NCCL and not torch.cuda.device_count():
        return "needs a GPU, and torch sees none on this host"
    return None if available else "is not available in this build of torch"


def takes_options(backend: str) -> bool:
    """Return whether torch passes `pg_options` to a single backend."""
    return backend not in {"gloo", "mpi", "ucc", "xccl"}


def world_options(backend: str) -> Any:
    """Return the options of one backend of WORLD, preferably of `backend`, to read their timeout.

    The result is None if torch shows no options, as for a fake backend.
    """
    parts = parts_of_world()
    wanted = single_backends(backend)
    for device in sorted(parts, key=lambda device: parts[device] not in wanted):
        with contextlib.suppress(AttributeError, RuntimeError):
            options: Any = part_on(torch.device(device)).options
            if options._timeout:
                return options
    return None


def has_timeout(pg_options: Any) -> bool:
    """Return whether an object can be options of a backend, which always have a timeout."""
    return hasattr(pg_options, "_timeout")


def given_timeout(pg_options: Any) -> timedelta | None:
    """Return the timeout of backend options, or None if it equals the default of their class."""
    own: timedelta | None = getattr(pg_options, "_timeout", None)
    try:
        return None if own is None or own == type(pg_options)()._timeout else own
    except (TypeError, AttributeError):  # the class needs arguments, so the default is unknown
        return None


def with_timeout(pg_options: Any, timeout: timedelta | None) -> Any:
    """Return a copy of backend options with the timeout of a group.

    torch writes the timeout, the ranks and the name of the group into the options. With a copy, a
    caller can use one object for several groups. A copy of an object of a Python subclass would be
    an object of the C++ class. Such an object is therefore returned unchanged, and serves only one
    group.
    """
    if timeout is None or getattr(pg_options, "_timeout", None) is None:
        return pg_options
    try:
        options = copy.deepcopy(pg_options)
    except TypeError:  # options of a third party may not support copies
        return pg_options
    if type(options) is not type(pg_options):
        return pg_options
    options._timeout = timeout
    return options


def is_fake_options(pg_options: Any) -> bool:
    """Return whether backend options belong to the fake backend."""
    kinds = type(pg_options).__mro__
    return any(kind.__qualname__ == "FakeProcessGroup.Options" for kind in kinds)


def default_timeout(backend: str) -> timedelta:
    """Return the timeout that torch gives a group by default."""
    c10d: Any = dist.distributed_c10d
    nccl: timedelta = c10d.default_pg_nccl_timeout or timedelta(minutes=10)
    default: timedelta = c10d.default_pg_timeout
    return nccl if backend in NCCL else default


def parts_of_world() -> dict[str, str]:
    """Map the name of each device to the backend of WORLD on this device."""
    return dict(pairs_of(dist.get_backend_config()))


def parts_of(backend: str) -> dict[str, str]:
    """Map the name of each device to the backend that groups of `backend` have on it."""
    return dict(pairs_of(backend_config(backend)))


def backend_config(backend: str) -> str:
    """Return torch's backend config for a backend string."""
    return str(dist.distributed_c10d.BackendConfig(dist.Backend(backend)))


def part_on(device: torch.device, group: ProcessGroup | None = None) -> Any:
    """Return the backend object of a group, or of WORLD, on a device."""
    return (group or world_group())._get_backend(device)


def device_type(group: ProcessGroup) -> str:
    """Return the type of the devices that a group is made for, such as "cuda" with nccl."""
    return _made_for(dict(pairs_of(dist.get_backend_config(group))))


def devices_made_for(backend: str) -> str:
    """Return the type of the devices that groups of a backend are made for."""
    return _made_for(parts_of(backend))


def _made_for(parts: dict[str, str]) -> str:
    if len(parts) == 1:
        return next(iter(parts))
    backends = set(parts.values()) - {"fake"}  # the fake backend is for all devices
    defaults: dict[str, str] = dist.Backend.default_device_backend_map
    made_for = [device for device, backend in defaults.items() if backend in backends]
    return next((device for device in made_for if device not in {"cpu", "mps"}), "cpu")


def set_timeout(timeout: timedelta, group: ProcessGroup | None) -> None:
    """Change the timeout of a group, or of WORLD, from now on."""
    if hasattr(dist, "set_timeout"):  # torch 2.14
        dist.set_timeout(timeout, group)
    else:
        dist.distributed_c10d._set_pg_timeout(timeout, group)


# ---- the job ------------------------------------------------------------------------------------


def has_ranks() -> bool:
    """Return whether the ranks share a store. In fake and simulated worlds they do not."""
    world = dist.group.WORLD
    if world is None or is_patched_world():
        return False
    return "fake" not in single_backends(backend_of(world))


def default_store() -> Any:
    """Return the store of WORLD."""
    return dist.distributed_c10d._get_default_store()


def without_prefix(store: Any) -> Any:
    """Return the innermost store of `store`, which adds no prefix to keys."""
    while isinstance(store, _STORE_WITH_PREFIX):
        store = store.underlying_store
    return store


_STORE_WITH_PREFIX: Any = dist.PrefixStore


def store_address() -> tuple[str, int] | None:
    """Return host and port of the store of WORLD, or None if they are not known."""
    store = without_prefix(default_store())
    if isinstance(store, dist.TCPStore):
        return str(store.host), int(store.port)
    return None


_ABSENT = "absent"


def read_bytes(store: Any, key: str) -> bytes | None:
    """Return the value of a key, or None if it is not set, in one request."""
    found: bytes = store.compare_set(key, _ABSENT, _ABSENT)  # changes nothing
    return None if found == _ABSENT.encode() else found
