"""How the members of a gloo group find each other: at its creation, or at their first message."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any
from weakref import ReferenceType, ref

import attrs
import torch.distributed as dist

from hypercomm.process_groups.c10d.backends import single_backends
from hypercomm.process_groups.c10d.gloo_store import (
    ENDLESS,
    GAVE_UP_KEY,
    AttemptGivenUpError,
    GlooStore,
    Patience,
    refuse_failed,
)
from hypercomm.process_groups.c10d.private_names import GLOO, private
from hypercomm.process_groups.c10d.self_checks import Replaced
from hypercomm.process_groups.c10d.store import in_time

_LONGEST_HOST_NAME = 255

_CONNECTING_MARGIN_S = 0.3
"""How long after the timeout a creation ends: who waits for an address says so before."""


def world_address_key(rank: int) -> str:
    """Return the key, within WORLD's own store, under which a rank of a gloo WORLD is found."""
    return f"cpu//{_key_in_group(rank)}"


def address_key(name: str, position: int | str) -> str:
    """Return the key under which a member of a group leaves its address in the store.

    Seen in torch 2.6 to 2.15: torch prefixes the group's name and the device, gloo a number.
    """
    return f"{name}//cpu//{_key_in_group(position)}"


def _key_in_group(position: int | str) -> str:
    """Return the same as gloo sees it, which is given the store of the group and the device."""
    return f"0/{position}"


def host_in(address: bytes | None) -> str | None:
    """Read the host's name out of a member's address; None where it has no such form.

    Seen in torch 2.6 to 2.15: the length of the name in 8 bytes, then the name.
    """
    if address is None or len(address) <= 8:
        return None
    length = int.from_bytes(address[:8], sys.byteorder)
    if not 0 < length <= min(_LONGEST_HOST_NAME, len(address) - 8):
        return None
    name = address[8 : 8 + length].decode(errors="replace")
    return name if name.isprintable() else None


class LazyInit:
    """Lets gloo connect each pair of members at their first message, rather than at the creation.

    gloo looks at an environment variable whenever it makes a group, and all members must see the
    same. So a creation waits for those of other threads that want it otherwise.
    """

    _SWITCH = "TORCH_GLOO_LAZY_INIT"

    def __init__(self) -> None:
        self._replaced = Replaced("is_set")

    @property
    def is_set(self) -> bool:
        """Whether the groups that are created now connect lazily."""
        return os.environ.get(self._SWITCH, "0").lower() in {"1", "true", "t", "yes", "y", "on"}

    @is_set.setter
    def is_set(self, lazily: bool) -> None:
        os.environ[self._SWITCH] = "1" if lazily else "0"

    @contextlib.contextmanager
    def set_to(self, lazily: bool | None) -> Iterator[bool]:
        """Connect lazily or not while a group is created; None leaves it to the environment.

        Yields:
            Whether the group connects lazily.
        """
        wanted = self._replaced.original(self) if lazily is None else lazily
        with self._replaced.by(self, wanted):
            yield wanted


class Devices:
    """What the gloo groups of this process listen at, as long as one of them lives.

    torch gives each gloo group a device of its own: it looks the host up, listens at a socket and
    starts a thread.
    """

    def __init__(self) -> None:
        self._known: dict[tuple[str | None, ...], list[ReferenceType[Any]]] = {}
        self._lock = threading.Lock()
        os.register_at_fork(after_in_child=self._known.clear)  # its threads are not there

    def get(self) -> list[Any]:
        """Return those that live, or new ones."""
        where = tuple(map(os.environ.get, ("GLOO_SOCKET_IFNAME", "GLOO_DEVICE_TRANSPORT")))
        with self._lock:
            devices = [device() for device in self._known.get(where, ())]
            if not devices or None in devices:
                devices = _new_devices()
                self._known[where] = list(map(ref, devices))
            return devices

    def forget(self) -> None:
        """Give no group what a failed one may still listen at: its late members may connect."""
        with self._lock:
            self._known.clear()


def _new_devices() -> list[Any]:
    """Make what torch would: a device for each interface that the user names, or the host's."""
    gloo, names = dist.ProcessGroupGloo, os.environ.get("GLOO_SOCKET_IFNAME", "")
    if len(names) > 1:
        return [gloo.create_device(interface=name) for name in names.split(",")]
    return [gloo.create_default_device()]


@attrs.define
class _Wish:
    """How one gloo group is to be made, and what must live as long as it."""

    devices: Devices
    patience: Patience
    kept: list[Any] = attrs.field(factory=list)
    is_heard: bool = False

    def options(self, torchs: Any, named: Mapping[str, Any]) -> Any:
        """Say in options what torch says in arguments, and which devices to use."""
        devices = self.devices.get()
        self.kept.append(devices)
        options = torchs._Options()
        options._devices = devices
        options._threads = 2 * len(devices)
        for name, value in named.items():
            setattr(options, "_timeout" if name == "timeout" else name, value)
        return options

    def make(self, init: Any, torchs: Any, given: Sequence[Any], named: Mapping[str, Any]) -> None:
        """Make a group whose members meet, or give up in time.

        Once all addresses are known, gloo waits for five times the timeout for a member that does
        not answer (seen in torch 2.13), and nothing interrupts it, not even Ctrl-C. Of two members
        one connects and the other waits for that: who cannot connect hears so at once, and who
        waits for a member that is gone hears it of the others.
        """
        jobs, rank, size = given
        store = GlooStore(jobs, size, named["timeout"], self.patience)
        self.kept.append(store)
        options = self.options(torchs, named)
        if size == 1:
            init(store, rank, size, options)
            return
        try:
            in_time(
                lambda: init(store, rank, size, options),
                store.left_s() + _CONNECTING_MARGIN_S,
                store.listen,
            )
        except BaseException:
            store.end()
            raise


class GlooMaking:
    """Makes gloo groups with a store of ours, and lets them share their devices.

    torch's helper passes on neither: during a creation the class that it calls is a subclass that
    does. Other threads are not affected. Whether that can be done with this torch is tried on a
    group of one; where it cannot, groups are made as torch does.

    Groups keep their devices alive, and the last one ends them. Lazily connected groups meet later,
    in threads of gloo, and get neither: on a shared device their collectives were seen to hang
    (torch 2.13).
    """

    def __init__(self) -> None:
        self._devices = Devices()
        self._wish: ContextVar[_Wish | None] = ContextVar("wish", default=None)
        self._replaced = Replaced("ProcessGroupGloo")
        self._classes: dict[Any, Any] = {}
        self._verdicts: dict[tuple[Any, int, frozenset[str]], bool] = {}

    @contextlib.contextmanager
    def connecting(
        self, backend: str, lazily: bool | None, patience: Patience | None
    ) -> Iterator[object]:
        """Choose how gloo connects the one group that is created within a `with` block.

        Unless they connect lazily, its members meet in a `GlooStore`.

        Args:
            backend: The group's.
            lazily: Whether each pair of members connects at its first message.
            patience: For how long members are waited for; None: there is no store to meet in.

        Yields:
            What must live as long as the group: torch knows only the half that is C++.
        """
        if patience is None or "gloo" not in single_backends(backend):
            yield None
            return
        c10d: Any = dist.distributed_c10d
        with lazy_init.set_to(lazily) as is_lazy:
            ours = None if is_lazy else self._class(self._replaced.original(c10d))
            if ours is None:
                yield None
                return
            wish = _Wish(self._devices, patience)
            token = self._wish.set(wish)
            try:
                with self._replaced.by(c10d, ours):
                    yield wish.kept
            except BaseException:
                self._devices.forget()
                raise
            finally:
                self._wish.reset(token)
        if not wish.is_heard:
            private.lost(GLOO, "is not what torch makes gloo groups with")

    def knows_torch(self) -> bool:
        """Tell whether gloo groups are made in our way, as far as any have been made."""
        return bool(self._verdicts) and all(self._verdicts.values()) and private.works(GLOO)

    def _class(self, torchs: Any) -> Any:
        """Return the class that stands in for torch's; None where that cannot be derived from."""
        try:
            return self._classes.get(torchs) or self._classes.setdefault(torchs, self._new(torchs))
        except Exception as error:  # noqa: BLE001 - torch's own way remains
            private.lost(GLOO, f"cannot be stood in for ({error!r})")
            return None

    def _new(self, torchs: Any) -> Any:
        wish, understands = self._wish, self._understands

        class Kind(type(torchs)):  # type: ignore[misc]
            def __instancecheck__(cls, instance: object) -> bool:
                return isinstance(instance, torchs)  # one that another thread made before

        class ProcessGroupGloo(torchs, metaclass=Kind):  # type: ignore[misc]
            __wrapped__ = torchs

            def __init__(self, *given: Any, **named: Any) -> None:
                how, init = wish.get(), super().__init__
                if how is None:  # another thread creates a group meanwhile
                    init(*given, **named)
                    return
                how.is_heard = True
                if understands(torchs, how, given, named):
                    how.make(init, torchs, given, named)
                else:
                    _refuse_given_up([*given, *named.values()])
                    init(*given, **named)

        return ProcessGroupGloo

    def _understands(
        self, torchs: Any, how: _Wish, given: Sequence[Any], named: Mapping[str, Any]
    ) -> bool:
        """Try once, on a group of one, whether torch's call can be made in our way.

        Where torch's way fails, too, that says nothing: the group itself will say what is wrong.
        """
        call = (torchs, len(given), frozenset(named))
        if not private.works(GLOO):
            return False
        if call in self._verdicts:
            return self._verdicts[call]
        try:
            _store, _rank, _size = given
            alone = GlooStore(_store_of_one(), 1, named["timeout"], ENDLESS)
            torchs(alone, 0, 1, how.options(torchs, named))
            alone.get(_key_in_group(0))  # where members find its address
        except Exception as error:  # noqa: BLE001 - whatever it is, torch's own way remains
            if len(given) == 3 and not _works(torchs, named):
                return False
            private.lost(GLOO, f"is called in a way that it does not know ({error!r})")
            return self._verdicts.setdefault(call, False)
        return self._verdicts.setdefault(call, True)


def _works(torchs: Any, named: Mapping[str, Any]) -> bool:
    """Tell whether torch's own way of making a group of one works."""
    try:
        torchs(_store_of_one(), 0, 1, **named)
    except Exception:  # noqa: BLE001 - whatever it is
        return False
    return True


def _store_of_one() -> Any:
    return dist.HashStore()  # type: ignore[attr-defined]


def _refuse_given_up(arguments: Sequence[Any]) -> None:
    """Look first, as a `GlooStore` does: gloo would wait for members that wait no more."""
    for store in arguments:
        if isinstance(store, dist.Store) and store.check([_key_in_group(GAVE_UP_KEY)]):  # type: ignore[attr-defined]
            refuse_failed(store, _key_in_group(0).rpartition("/")[0])
            raise AttemptGivenUpError("members of the group gave up before this one came")


lazy_init = LazyInit()
"""Of this process."""

making = GlooMaking()
"""Of this process."""
