"""What ranks that ran earlier have for those that run later."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable
from typing import Any

Address = tuple[int, int, int]
"""The number of a group, the rank that receives, and the tag."""


class Mail:
    """Values of roots and senders, each held until those that it is for have taken it."""

    def __init__(self) -> None:
        self._spread: dict[tuple[int, int], list[Any]] = {}
        self._sent: defaultdict[Address, list[tuple[int, Hashable, Any]]] = defaultdict(list)

    def spread(
        self, call: tuple[int, int], kind: Hashable, value: Callable[[], Any], readers: int
    ) -> None:
        """Keep a value for the members of a group that come later."""
        if readers:
            self._spread[call] = [readers, kind, value()]

    def take(self, call: tuple[int, int], kind: Hashable) -> Any:
        """Return the value of a call, or None: its root has not run yet, or called another."""
        if (found := self._spread.get(call)) is None:
            return None
        found[0] -= 1
        if not found[0]:
            del self._spread[call]
        return found[2] if found[1] == kind else None

    def send(self, to: Address, source: int, kind: Hashable, value: Any) -> None:
        """Keep a value for one rank."""
        self._sent[to].append((source, kind, value))

    def receive(self, at: Address, source: int | None, kind: Hashable) -> tuple[int, Any] | None:
        """Return who sent the first value to a rank, and the value; None if nobody has yet."""
        waiting = self._sent.get(at, [])
        for place, (sender, sent, value) in enumerate(waiting):
            if source in (None, sender):
                del waiting[place]
                return sender, value if sent == kind else None
        return None
