"""The store of a simulated job: a server that its ranks ask, each question a place to stop at."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from datetime import timedelta

import attrs
import torch.distributed as dist

from simulated_job.scheduler import Scheduler

Text = str | bytes


@attrs.define(eq=False)
class Server:
    """What a store holds; it may outlive the job.

    Attributes:
        held: The value of each key.
        gone_s: From when on nobody answers.
    """

    held: dict[str, bytes] = attrs.field(factory=dict)
    gone_s: float = math.inf


class Client:
    """A store as one rank sees it.

    Args:
        server: Where it asks.
        scheduler: Of the job.

    Attributes:
        asked: How often each question was asked.
        sent: How many bytes of keys and values went to the store.
        received: How many bytes of values came from it.
        late_s: How long each answer takes from now on.
        busy_until_s: When what was sent before has arrived: what is sent later waits for it.
        hold_set_s: How long the next `set` stays on its way.
        late_once_s: How long the next answer takes.
        breaks_once: Whether the next question fails.
        wait_s: How long a question waits for a key that nobody has set.
    """

    def __init__(self, server: Server, scheduler: Scheduler) -> None:
        self._server = server
        self._scheduler = scheduler
        self.asked: Counter[str] = Counter()
        self.sent = 0
        self.received = 0
        self.late_s = 0.0
        self.late_once_s = 0.0
        self.breaks_once = False
        self.busy_until_s = 0.0
        self.hold_set_s = 0.0
        self.wait_s = 300.0

    def _ask(self, verb: str, keys: Sequence[str], values: Sequence[Text] = ()) -> None:
        """Count a question, and let others run before it is answered."""
        self.asked[verb] += 1
        self.sent += sum(map(len, [*keys, *values]))
        now_s = self._scheduler.now_s
        what = f"{verb} {keys[0] if keys else ''}" + (f" +{len(keys) - 1}" if keys[1:] else "")
        self._scheduler.arrive(what, max(now_s, self.busy_until_s))
        if self._scheduler.now_s >= self._server.gone_s:
            raise dist.DistNetworkError("the simulated store is gone")
        if self.breaks_once:
            self.breaks_once = False
            raise dist.DistNetworkError("the link to the simulated store broke")

    def _answer(self, values: Sequence[bytes] = ()) -> None:
        """Count an answer, and let it be late, though what was asked for is done."""
        self.received += sum(map(len, values))
        late_s, self.late_once_s = self.late_s + self.late_once_s, 0.0
        if late_s:
            self._scheduler.arrive("answer", self._scheduler.now_s + late_s)
            if self._scheduler.now_s >= self._server.gone_s:
                raise dist.DistNetworkError("the simulated store is gone")

    def _put(self, values: dict[str, bytes]) -> None:
        self._server.held.update(values)
        self._scheduler.notify(self._server)

    # ---- what torch's stores can --------------------------------------------------------------

    def set(self, key: str, value: Text) -> None:
        """Set a key; waits for no answer."""
        self._ask("set", [key], [value])
        self._send({key: _as_bytes(value)})

    def multi_set(self, keys: Sequence[str], values: Sequence[Text]) -> None:
        """Set keys, in one message."""
        self._ask("multi_set", keys, values)
        self._send(dict(zip(keys, map(_as_bytes, values), strict=True)))

    def _send(self, values: dict[str, bytes]) -> None:
        held_s, self.hold_set_s = self.hold_set_s, 0.0
        if held_s:
            self.busy_until_s = self._scheduler.now_s + held_s
            self._scheduler.at(self.busy_until_s, lambda: self._put(values))
        else:
            self._put(values)

    def get(self, key: str) -> bytes:
        """Return what a key holds, once it is set."""
        return self.multi_get([key])[0]

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return what keys hold, once all of them are set."""
        self._ask("get", keys)
        self._await(keys, self.wait_s)
        values = [self._server.held[key] for key in keys]
        self._answer(values)
        return values

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until keys are set."""
        self._ask("wait", keys)
        self._await(keys, self.wait_s if timeout is None else timeout.total_seconds())
        self._answer()

    def _await(self, keys: Sequence[str], limit_s: float) -> None:
        until_s = self._scheduler.now_s + limit_s
        while not all(key in self._server.held for key in keys):
            self._scheduler.wait(self._server, min(until_s, self._server.gone_s))
            if self._scheduler.now_s >= self._server.gone_s:
                raise dist.DistNetworkError("the simulated store is gone")
            if self._scheduler.now_s >= until_s:
                raise dist.DistStoreError(f"wait timeout after {limit_s} s, keys: {keys[0]}")

    def check(self, keys: Sequence[str]) -> bool:
        """Tell whether all of some keys are set."""
        self._ask("check", keys)
        found = all(key in self._server.held for key in keys)
        self._answer()
        return found

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set a key that holds what is expected, and return what it holds then."""
        self._ask("compare_set", [key], [expected, desired])
        held = self._server.held.get(key, b"")
        if held == expected.encode() and (held or not expected):
            self._put({key: desired.encode()})
        answer = self._server.held.get(key, expected.encode())
        self._answer([answer])
        return answer

    def add(self, key: str, amount: int) -> int:
        """Add to the number that a key holds."""
        self._ask("add", [key])
        total = int(self._server.held.get(key, b"0")) + amount
        self._put({key: str(total).encode()})
        self._answer()
        return total

    def append(self, key: str, value: Text) -> None:
        """Add to the end of what a key holds."""
        self._ask("append", [key], [value])
        self._send({key: self._server.held.get(key, b"") + _as_bytes(value)})

    def delete_key(self, key: str) -> bool:
        """Delete a key, and tell whether it was there."""
        self._ask("delete_key", [key])
        found = self._server.held.pop(key, None) is not None
        self._answer()
        return found

    def num_keys(self) -> int:
        """Return how many keys there are."""
        self._ask("num_keys", [])
        return len(self._server.held)

    def has_extended_api(self) -> bool:
        """Tell that several keys can be asked for at once."""
        return True

    def clone(self) -> Client:
        """Return the same store."""
        return self


class Within:
    """A store whose keys begin alike.

    Args:
        store: Where they are.
        prefix: What comes before each key, and a slash.
    """

    def __init__(self, store: Client, prefix: str) -> None:
        self._store = store
        self._prefix = prefix

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}"

    def set(self, key: str, value: Text) -> None:
        """Set a key."""
        self._store.set(self._key(key), value)

    def get(self, key: str) -> bytes:
        """Return what a key holds, once it is set."""
        return self._store.get(self._key(key))

    def multi_get(self, keys: Sequence[str]) -> list[bytes]:
        """Return what keys hold, once all of them are set."""
        return self._store.multi_get([self._key(key) for key in keys])

    def wait(self, keys: Sequence[str], timeout: timedelta | None = None) -> None:
        """Wait until keys are set."""
        self._store.wait([self._key(key) for key in keys], timeout)

    def check(self, keys: Sequence[str]) -> bool:
        """Tell whether all of some keys are set."""
        return self._store.check([self._key(key) for key in keys])

    def compare_set(self, key: str, expected: str, desired: str) -> bytes:
        """Set a key that holds what is expected, and return what it holds then."""
        return self._store.compare_set(self._key(key), expected, desired)

    def multi_set(self, keys: Sequence[str], values: Sequence[Text]) -> None:
        """Set keys."""
        self._store.multi_set([self._key(key) for key in keys], values)

    def delete_key(self, key: str) -> bool:
        """Delete a key."""
        return self._store.delete_key(self._key(key))

    def has_extended_api(self) -> bool:
        """Tell that several keys can be asked for at once."""
        return True

    def clone(self) -> Within:
        """Return the same store."""
        return self


def _as_bytes(value: Text) -> bytes:
    return value.encode() if isinstance(value, str) else bytes(value)
