"""How the members of a gloo group find each other: at its creation, or at their first message.

gloo asks the store for the address of each member, and waits in there, where nobody can end the
wait. gloo takes any store: a `GlooStore` waits for it, looks now and then whether there is still
something to wait for, and lets other threads use the store in between.
"""

from __future__ import annotations

import contextlib
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import timedelta
from functools import partial
from itertools import islice
from typing import Any
from weakref import ReferenceType, ref

import attrs
import torch.distributed as dist

from hypercomm.process_groups.torch_internals import capabilities
from hypercomm.process_groups.torch_internals.backends import single_backends
from hypercomm.process_groups.torch_internals.capabilities import Patch
from hypercomm.process_groups.torch_internals.store import answer, in_time, peek

_LONGEST_HOST_NAME = 255

_CONNECTING_MARGIN_S = 0.3
"""How long after the timeout a creation ends: who waits for an address says so before."""


def world_address_key(rank: int) -> str:
    """Return the key, within WORLD's own store, under which a rank of a gloo WORLD is found."""
    return f"cpu//{_key_in_group(rank)}"


def address_key(name: str, position: int | str) -> str:
    """Return the key under which a member of a group leaves its address in the store.

    Seen up to torch 2.15: torch prefixes the group's name and the device, gloo a number.
    """
    return f"{name}//cpu//{_key_in_group(position)}"


def _key_in_group(position: int | str) -> str:
    """Return the same as gloo sees it, which is given the store of the group and the device."""
    return f"0/{position}"


def host_in(address: bytes | None) -> str | None:
    """Read the host's name out of a member's address; None where it has no such form.

    Seen up to torch 2.15: the length of the name in 8 bytes, then the name.
    """
    if address is None or len(address) <= 8:
        return None
    length = int.from_bytes(address[:8], sys.byteorder)
    if not 0 < length <= min(_LONGEST_HOST_NAME, len(address) - 8):
        return None
    name = address[8 : 8 + length].decode(errors="replace")
    return name if name.isprintable() else None


GAVE_UP = b"gave up"
"""Stands in the store in place of the address of a member that waits no more."""

GAVE_UP_KEY = "gave up"
"""Stands beside the addresses, for members that still wait."""

FAILED_KEY = "failed"
"""Stands there, too, where a member failed before it left an address; says why, in words."""

_SHORTEST_S = 0.0002
_LONGEST_S = 0.5
_MOST_LOOKED_FOR = 8
_FEW = 3
_MOST_ASKED = 64
"""The addresses that one question asks for while some are missing."""

_MOST_POLLS = 2000
"""How many ranks of a job may poll in a second, once they have waited for long."""


class MembersMissingError(RuntimeError):
    """Members did not come in time.

    Attributes:
        positions: Their positions in the group.
        others_gave_up: Whether the wait ended because other members waited no more.
    """

    def __init__(
        self, positions: Sequence[int], waited_s: float, *, others_gave_up: bool = False
    ) -> None:
        super().__init__(f"members {list(positions)} did not come within {waited_s:.1f} s")
        self.positions = positions
        self.others_gave_up = others_gave_up


class AttemptGivenUpError(RuntimeError):
    """All came, but some had given up before: whoever tries again meets under another name."""


class MemberFailedError(RuntimeError):
    """A member failed by itself, before the others could connect to it; says which one, and why."""


def refuse_failed(store: Any, place: str) -> None:
    """Raise if a member has left word that it failed.

    Raises:
        MemberFailedError: With that word.
    """
    key = f"{place}/{FAILED_KEY}"
    if store.check([key]):
        raise MemberFailedError(bytes(store.get(key)).decode(errors="replace"))


@attrs.frozen
class Patience:
    """How long ranks are waited for.

    Attributes:
        look: Called, once a wait takes long, with some that are missing, and the seconds that
            passed; raises if they will not come.
        deadline: When every wait ends, by `time.monotonic`, if not earlier.
    """

    look: Callable[[Sequence[int], float], None]
    deadline: float


ENDLESS = Patience(lambda _ranks, _waited_s: None, math.inf)
"""Only the group's own timeout ends a wait."""


def wait_until(
    is_there: Callable[[], bool],
    timeout_s: float,
    look: Callable[[], None],
    longest_s: float = _LONGEST_S,
) -> float | None:
    """Ask again and again, less and less often; between the answers other threads may ask.

    Args:
        is_there: Whether what is waited for has come; one question to the store.
        timeout_s: When to give up.
        look: Called once a wait takes long; raises if there is nothing to wait for.
        longest_s: The longest pause.

    Returns:
        None once it is there; else the seconds that passed.
    """
    begin = time.monotonic()
    pause = _SHORTEST_S
    while not is_there():
        waited = time.monotonic() - begin
        if waited > timeout_s:
            return waited
        if waited > _LONGEST_S / 2:
            look()
        time.sleep(min(pause, timeout_s - waited + _SHORTEST_S))
        pause = min(max(_SHORTEST_S, waited / 4), longest_s)
    return None


class GlooStore(dist.Store):  # type: ignore[name-defined, misc]
    """The store that one gloo group is created with.

    Args:
        store: Where the members leave their addresses.
        size: Number of members.
        timeout: How long to wait for all of them.
        patience: What ends that earlier.

    Raises:
        MembersMissingError, AttemptGivenUpError, MemberFailedError: From what gloo calls, by way of
            gloo.
    """

    def __init__(self, store: Any, size: int, timeout: timedelta, patience: Patience) -> None:
        super().__init__()
        self._store = store
        self._size = size
        self._deadline = min(time.monotonic() + timeout.total_seconds(), patience.deadline)
        self._patience = patience
        self._found: dict[str, bytes] = {}
        self._missed: Sequence[int] | None = None  # at the last look
        self._has_all = False
        self._has_ended = False

    def left_s(self) -> float:
        """Return the seconds for which members are still waited for."""
        return max(0.0, self._deadline - time.monotonic())

    def end(self) -> None:
        """Wait no more: the next look raises."""
        self._has_ended = True

    def listen(self) -> None:
        """Raise if another member has given up while this one connects; before, `get` looks."""
        if not self._has_all:
            return
        place = next(iter(self._found)).rpartition("/")[0]
        gave_up = partial(self._store.check, [f"{place}/{GAVE_UP_KEY}"])
        if answer(gave_up, self.left_s() + _LONGEST_S):
            answer(partial(refuse_failed, self._store, place), _LONGEST_S)
            raise RuntimeError("another member gave up while this one connected")

    def set(self, key: str, value: bytes) -> None:
        """Leave this member's address."""
        self._found[key] = bytes(value)
        self._store.set(key, value)

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:  # noqa: ARG002
        """Wait for the addresses of all members, whichever is asked for."""
        for key in keys:
            self.get(key)

    def get(self, key: str) -> bytes:
        """Return the address of a member."""
        if key not in self._found:
            self._gather(key)
        return self._found[key]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return the addresses of some members."""
        return [self.get(key) for key in keys]

    def has_extended_api(self) -> bool:
        """Tell that `multi_get` works."""
        return True

    def clone(self) -> Any:
        """Return what a group that is split off may use."""
        return self._store.clone()

    def _gather(self, key: str) -> None:
        place, _, position = key.rpartition("/")
        each = [f"{place}/{member}" for member in range(self._size)]
        keys = each if position.isdecimal() and key in each else [key]
        others = [one for one in keys if one not in self._found]
        are_few = len(others) <= _FEW
        waited = wait_until(
            partial(self._peek, others) if are_few else partial(self._are_there, keys, [0]),
            self.left_s(),
            partial(self._look, place, keys, time.monotonic()),
            max(_LONGEST_S, self._ranks_of_job() / _MOST_POLLS),
        )
        if waited is not None and (missing := list(self._missing(keys))):  # else they come now
            raise MembersMissingError(missing, waited)
        has_waited = waited is not None or self._missed is not None  # what was found may be gone
        if has_waited or not are_few:
            self._found.update(zip(keys, self._read(keys), strict=True))
        if GAVE_UP in self._found.values():
            self._patience.look([], 0.0)  # there may be a reason
            refuse_failed(self._store, place)
            if waited is not None and self._missed:  # no time is left to try again
                raise MembersMissingError(self._missed, waited, others_gave_up=True)
            raise AttemptGivenUpError("members of the group gave up before all had come")
        self._has_all = self._has_all or len(keys) == self._size

    def _ranks_of_job(self) -> int:
        return dist.get_world_size() if dist.is_initialized() else self._size

    def _are_there(self, keys: Sequence[str], seen: list[int]) -> bool:
        """Tell whether keys are set; of many, ask for those that follow the ones seen so far."""
        while seen[0] + _MOST_ASKED < len(keys):
            if not self._store.check(keys[seen[0] : seen[0] + _MOST_ASKED]):
                return False
            seen[0] += _MOST_ASKED
        if not self._store.check(keys[seen[0] :]):
            return False
        are_all = not seen[0] or bool(self._store.check(keys))  # none is gone again
        seen[0] = seen[0] if are_all else 0
        return are_all

    def _peek(self, keys: Sequence[str]) -> bool:
        """Read keys that are set, one question each, where `check` and `multi_get` ask three."""
        for key in keys:
            if key not in self._found:
                value = peek(self._store, key)
                if value is None:
                    return False
                self._found[key] = value
        return True

    def _read(self, keys: Sequence[str]) -> list[bytes]:
        if self._store.has_extended_api():
            return list(self._store.multi_get(keys))
        return [self._store.get(key) for key in keys]

    def _look(self, place: str, keys: Sequence[str], begin: float) -> None:
        if self._has_ended:
            raise AttemptGivenUpError("the caller was interrupted")
        missing = list(islice(self._missing(keys), _MOST_LOOKED_FOR))
        self._patience.look(missing, time.monotonic() - begin)
        if self._store.check([f"{place}/{GAVE_UP_KEY}"]):
            self._patience.look(missing, time.monotonic() - begin)  # its reason may be newer
            refuse_failed(self._store, place)
            late = list(self._missing(keys)) or self._missed  # who came just now was late as well
            if self._missed is None or not late:
                raise AttemptGivenUpError("members of the group gave up before this one came")
            waited = time.monotonic() - begin
            raise MembersMissingError(late, waited, others_gave_up=True)
        self._missed = missing or self._missed or []

    def _missing(self, keys: Sequence[str], first: int = 0) -> Iterator[int]:
        """Give the positions of keys that are not set: few questions where few are not."""
        if self._store.check(keys):
            return
        if len(keys) == 1:
            yield first
            return
        half = len(keys) // 2
        yield from self._missing(keys[:half], first)
        yield from self._missing(keys[half:], first + half)


# ---- how torch is made to use it ---------------------------------------------------------------


class LazyInit:
    """Lets gloo connect each pair of members at their first message, rather than at the creation.

    gloo looks at an environment variable whenever it makes a group, and all members must see the
    same. So a creation waits for those of other threads that want it otherwise.
    """

    _SWITCH = "TORCH_GLOO_LAZY_INIT"

    def __init__(self) -> None:
        self._replaced = Patch("is_set")

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
        with self._replaced.applied(self, wanted):
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
        self._replaced = Patch("ProcessGroupGloo")
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
                with self._replaced.applied(c10d, ours):
                    yield wish.kept
            except BaseException:
                self._devices.forget()
                raise
            finally:
                self._wish.reset(token)
        if not wish.is_heard:
            capabilities.lose_gloo("is not what torch makes gloo groups with")

    def knows_torch(self) -> bool:
        """Tell whether gloo groups are made in our way, as far as any have been made."""
        return bool(self._verdicts) and all(self._verdicts.values()) and capabilities.GLOO

    def _class(self, torchs: Any) -> Any:
        """Return the class that stands in for torch's; None where that cannot be derived from."""
        try:
            return self._classes.get(torchs) or self._classes.setdefault(torchs, self._new(torchs))
        except Exception as error:  # noqa: BLE001 - torch's own way remains
            capabilities.lose_gloo(f"cannot be stood in for ({error!r})")
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
        if not capabilities.GLOO:
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
            capabilities.lose_gloo(f"is called in a way that it does not know ({error!r})")
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
