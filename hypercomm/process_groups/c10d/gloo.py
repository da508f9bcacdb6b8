"""How the members of a gloo group find each other: at its creation, or at their first message."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import attrs
import torch.distributed as dist

from hypercomm.process_groups.c10d.gloo_store import (
    ENDLESS,
    GAVE_UP_KEY,
    AttemptGivenUpError,
    Meeting,
    Patience,
)
from hypercomm.process_groups.c10d.private_names import GLOO, private
from hypercomm.process_groups.c10d.time_limits import in_time

_LONGEST_HOST_NAME = 255

_CONNECTING_MARGIN_S = 0.3
"""How long after the timeout a creation ends: who waits for an address says so before."""


def world_address_key(rank: int) -> str:
    """Return the key, within WORLD's own store, under which a rank of a gloo WORLD is found."""
    return f"cpu//0/{rank}"


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


def address_key(name: str, position: int | str) -> str:
    """Return the key under which a member of a group leaves its address in the store.

    Seen in torch 2.6 to 2.15: torch prefixes the group's name and the device, gloo a number.
    """
    return f"{name}//cpu//{_key_in_group(position)}"


def _key_in_group(position: int | str) -> str:
    """Return the same as gloo sees it, which is given the store of the group and the device."""
    return f"0/{position}"


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


@attrs.define
class _Wish:
    """How one gloo group is to be made: on which devices, made when they are needed."""

    devices: list[Any]
    patience: Patience
    meetings: list[Meeting]
    is_heard: bool = False

    def options(self, torchs: Any, named: Mapping[str, Any]) -> Any:
        """Say in options what torch says in arguments, and which devices to use."""
        if not self.devices:
            self.devices.extend(_new_devices())
        options = torchs._Options()
        options._devices = self.devices
        options._threads = 2 * len(self.devices)
        for name, value in named.items():
            setattr(options, "_timeout" if name == "timeout" else name, value)
        return options


def _new_devices() -> list[Any]:
    """Make what torch would: a device for each interface that the user names, or the host's."""
    gloo, names = dist.ProcessGroupGloo, os.environ.get("GLOO_SOCKET_IFNAME", "")
    if len(names) > 1:
        return [gloo.create_device(interface=name) for name in names.split(",")]
    return [gloo.create_default_device()]


class GlooMaking:
    """Makes gloo groups with a store of ours, and lets those of one call share their devices.

    torch's helper hands neither on: so as long as a group is created, the class that it calls is
    one that does. Other threads are not affected. Whether that can be done with this torch is
    tried on a group of one; where it cannot, groups are made as torch does.

    torch gives each gloo group a device of its own: it looks the host up, listens at a socket and
    starts a thread. Groups keep their devices alive, and the last one ends them. Lazily connected
    groups meet later, in threads of gloo, and get neither: on a shared device their collectives
    were seen to hang (torch 2.13).
    """

    def __init__(self) -> None:
        self._shared: ContextVar[list[Any] | None]
        self._shared = ContextVar("shared devices", default=None)
        self._wish: ContextVar[_Wish | None] = ContextVar("wish", default=None)
        self._lock = threading.Lock()
        self._creating = 0
        self._torchs: Any = None
        self._ours: Any = None
        self._verdicts: dict[tuple[Any, int, frozenset[str]], bool] = {}

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
        if lazy_init.is_set() or not self._can_stand_in():
            yield meetings
            return
        shared = self._shared.get()
        wish = _Wish([] if shared is None else shared, patience, meetings)
        token = self._wish.set(wish)
        self._count(1)
        try:
            yield meetings
        finally:
            self._count(-1)
            self._wish.reset(token)
        if not wish.is_heard:
            private.lost(GLOO, "is not what torch makes gloo groups with")

    def knows_torch(self) -> bool:
        """Tell whether gloo groups are made in our way, as far as any have been made."""
        return bool(self._verdicts) and all(self._verdicts.values()) and private.works(GLOO)

    def _can_stand_in(self) -> bool:
        """Make the class that stands in for torch's, if that can be derived from."""
        with self._lock:
            torchs = getattr(dist.distributed_c10d, "ProcessGroupGloo", None)
            if self._creating or (self._ours is not None and self._ours.__base__ is torchs):
                return True
            try:
                self._ours = self._class(torchs)
            except Exception as error:  # noqa: BLE001 - torch's own way remains
                private.lost(GLOO, f"cannot be stood in for ({error!r})")
                return False
        return True

    def _count(self, change: int) -> None:
        c10d: Any = dist.distributed_c10d
        with self._lock:
            if not self._creating:
                self._torchs = c10d.ProcessGroupGloo
                c10d.ProcessGroupGloo = self._ours
            self._creating += change
            if not self._creating:
                c10d.ProcessGroupGloo = self._torchs

    def _class(self, torchs: Any) -> Any:
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
                if not understands(torchs, how, given, named):
                    _refuse_given_up([*given, *named.values()])
                    init(*given, **named)
                else:
                    store, rank, size = given
                    meeting = Meeting(store, size, named["timeout"], how.patience)
                    how.meetings.append(meeting)

                    def make() -> None:
                        init(meeting, rank, size, how.options(torchs, named))

                    if size > 1:
                        _connect(make, meeting)
                    else:
                        make()

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
            alone = Meeting(_store_of_one(), 1, named["timeout"], ENDLESS)
            torchs(alone, 0, 1, how.options(torchs, named))
            alone.get(_key_in_group(0))  # where members find its address
        except Exception as error:  # noqa: BLE001 - whatever it is, torch's own way remains
            if len(given) == 3 and not _works(torchs, named):
                return False
            private.lost(GLOO, f"is called in a way that it does not know ({error!r})")
            self._verdicts[call] = False
        else:
            self._verdicts[call] = True
        return self._verdicts[call]


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
    """Look first, as a `Meeting` does: gloo would wait for members that wait no more."""
    for store in arguments:
        if isinstance(store, dist.Store) and store.check([_key_in_group(GAVE_UP_KEY)]):  # type: ignore[attr-defined]
            raise AttemptGivenUpError("members of the group gave up before this one came")


lazy_init = LazyInit()
"""Of this process."""

making = GlooMaking()
"""Of this process."""
