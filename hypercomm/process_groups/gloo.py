"""How the members of a gloo group find each other while it is created."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

_SWITCH = "GLOO_ENABLE_STORE_V2_API"


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
                self._is_users = os.environ.get(_SWITCH, "0") != "0"
            self._creating[allowed] += change
            if not self._is_users:
                wanted = self._creating[True] and not self._creating[False]
                os.environ[_SWITCH] = "1" if wanted else "0"


reading = AddressReading()
"""Of this process."""
