"""The job's store, in which the ranks leave word for each other, and how long it may take.

When the link to the store's host is cut without a word, a question hangs for a quarter of an hour,
whatever its timeout says (seen in torch 2.13). So it is asked in a thread, and given up in time.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

from hypercomm.process_groups.torch_internals import capabilities
from hypercomm.process_groups.torch_internals.backends import backend_of, single_backends
from hypercomm.process_groups.torch_internals.capabilities import has_other_ranks

_ABSENT = "absent"


def has_ranks() -> bool:
    """Tell whether there are ranks to meet: those of a fake world are not there."""
    world = dist.group.WORLD
    if world is None or not has_other_ranks():
        return False
    return "fake" not in single_backends(backend_of(world))


def knows_store() -> bool:
    """Tell whether torch tells which store it is."""
    return capabilities.STORE


def store() -> Any:
    """Return the store that WORLD was made with."""
    return dist.distributed_c10d._get_default_store()


def meeting_place() -> tuple[str, int] | None:
    """Return address and port of the store of WORLD; None where it has none, or torch hides it."""
    place = store() if knows_store() else None
    while isinstance(place, dist.PrefixStore):  # type: ignore[attr-defined]
        place = place.underlying_store
    if isinstance(place, dist.TCPStore):  # type: ignore[attr-defined]
        return str(place.host), int(place.port)
    return None


def exchange(key: str, expected: str, text: str) -> str:
    """If a key of the store holds `expected` ("": nothing), set it; return what it holds."""
    found: bytes = store().compare_set(key, expected, text)
    return found.decode(errors="replace")


def read(key: str) -> str | None:
    """Return what a key of the store holds; None where nobody has set it."""
    found = read_bytes(key)
    return None if found is None else found.decode(errors="replace")


def read_bytes(key: str) -> bytes | None:
    """Do as `read`, for what is no text; one question, where to look first would be two."""
    return peek(store(), key)


def peek(place: Any, key: str) -> bytes | None:
    """Do as `read_bytes`, in any store."""
    found: bytes = place.compare_set(key, _ABSENT, _ABSENT)  # sets nothing
    return None if found == _ABSENT.encode() else found


def is_set(keys: Sequence[str]) -> bool:
    """Tell whether all of some keys of the store are set."""
    return bool(store().check(list(keys)))


def set_all(texts: Mapping[str, str | bytes]) -> None:
    """Set keys in the store, in one message where it can; waits for no answer."""
    if len(texts) > 1 and store().has_extended_api():
        store().multi_set(list(texts), list(texts.values()))
        return
    for key, text in texts.items():
        store().set(key, text)


def forget(keys: Iterable[str]) -> None:
    """Delete keys of the store, those that are there."""
    for key in keys:
        store().delete_key(key)


def count_up(key: str) -> int:
    """Add one to the number that a key of the store holds, and return it."""
    return int(store().add(key, 1))


# ---- in time ----------------------------------------------------------------------------------

T = TypeVar("T")

USUAL_S = 60.0
"""How long an answer may take where nothing else says so: a large job asks all at once."""

_LOOKING_S = 0.5
"""How often a wait looks whether it is in vain."""

_in_thread = threading.local()


_Inbox = queue.SimpleQueue[tuple[Callable[[], None], Callable[[], None]]]


class Workers:
    """Threads that wait for something to do: on a busy machine a new one is slow to begin.

    As many stay as were ever busy at once; the child of a fork begins without.
    """

    def __init__(self) -> None:
        self._idle: list[_Inbox] = []
        os.register_at_fork(after_in_child=self._idle.clear)

    def start(self, action: Callable[[], None], done: Callable[[], None]) -> None:
        """Do something that raises nothing, in a thread, and call `done` once that is idle again.

        Whoever waits for it and then starts something else needs no other thread.
        """
        try:
            inbox = self._idle.pop()
        except IndexError:
            inbox = queue.SimpleQueue()
            threading.Thread(
                target=self._work, args=(inbox,), name="hypercomm", daemon=True
            ).start()
        inbox.put((action, done))

    def _work(self, inbox: _Inbox) -> None:
        ask_here()
        while True:
            action, done = inbox.get()
            action()
            self._idle.append(inbox)
            done()
            del action, done  # they hold what was asked


workers = Workers()
"""Of this process."""


def ask_here() -> None:
    """Let the questions of this thread be asked in it: it is one that may wait for ever."""
    _in_thread.is_set = True


class LateError(RuntimeError):
    """Something was not done in time.

    Attributes:
        done: Set once it is, late.
    """

    def __init__(self, message: str, done: threading.Event) -> None:
        super().__init__(message)
        self.done = done


def in_time(action: Callable[[], T], limit_s: float, look: Callable[[], None] | None = None) -> T:
    """Do something in another thread, wait for it for so long, and return what it does.

    A thread that is late goes on, and ends when what it waits for does.

    Args:
        action: What is done.
        limit_s: When to give up.
        look: Called now and then, once that takes long; raises if it is in vain.

    Raises:
        LateError: It was not done in time.
    """
    results: list[T] = []
    errors: list[BaseException] = []
    done = threading.Event()

    def run() -> None:
        try:
            results.append(action())
        except BaseException as error:  # noqa: BLE001 - raised where it is waited for
            errors.append(error)

    workers.start(run, done.set)
    if look is None:
        done.wait(min(limit_s, threading.TIMEOUT_MAX))
    else:
        end = time.monotonic() + limit_s
        while not done.wait(max(0.0, min(_LOOKING_S, end - time.monotonic()))):
            if time.monotonic() >= end:
                break
            look()
    if not done.is_set():
        raise LateError(f"not done within {limit_s:.1f} s", done)
    if errors:
        try:
            raise errors[0]
        finally:
            errors.clear()  # the error holds this frame
    return results[0]


unanswered: list[threading.Event] = []
"""Of the questions that this process has given up: set once they are answered."""


def answer(question: Callable[[], T], limit_s: float = USUAL_S, *, is_needed: bool = True) -> T:
    """Ask the store something, and return the answer; questions within are asked as they are.

    Args:
        question: What is asked.
        limit_s: How long the answer may take.
        is_needed: Whether to ask also while an earlier question, given up, is without an answer:
            torch lets a process ask the store one thing at a time.

    Raises:
        DistNetworkError: No answer came in time; torch raises it, too, when the store is gone.
    """
    if getattr(_in_thread, "is_set", False):
        return question()
    if not is_needed:
        unanswered[:] = [done for done in unanswered if not done.is_set()]
        if unanswered:
            raise dist.DistNetworkError("the store does not answer")
    try:
        return in_time(question, limit_s)
    except LateError as error:
        unanswered.append(error.done)
        raise dist.DistNetworkError("the store does not answer") from error
