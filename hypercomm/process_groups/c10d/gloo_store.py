"""GlooStore: how the members of one gloo group find each other, and who of them is missing.

gloo asks the store for the address of each member, and waits in there, where nobody can end the
wait. gloo takes any store: this one waits for it, looks now and then whether there is still
something to wait for, and lets other threads use the store in between.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from itertools import islice
from typing import Any

import attrs
import torch.distributed as dist

from hypercomm.process_groups.c10d.store import answer, peek

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
