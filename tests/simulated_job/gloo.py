"""What gloo does, without a network: leave an address, find the others', connect to all or fail."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import attrs

from hypercomm.errors import SimulationError
from simulated_job.scheduler import Scheduler
from simulated_job.substitutes import running

_HOST = b"simulated"


@attrs.define(eq=False)
class Endpoint:
    """Where one rank listens for the members of one group.

    Attributes:
        address: What it leaves in the store.
        is_alive: Tells whether its process is.
        peers: The addresses that it connects to; None before it has all of them.
        is_connected: Whether all of them have connected to it.
        is_closed: Whether it listens no more.
    """

    address: bytes
    is_alive: Callable[[], bool]
    peers: frozenset[bytes] | None = None
    is_connected: bool = False
    is_closed: bool = False


class Network:
    """All endpoints of a simulated job.

    Args:
        scheduler: Of the job.
    """

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._known: dict[bytes, Endpoint] = {}

    def listen(self, is_alive: Callable[[], bool]) -> Endpoint:
        """Open an endpoint, whose address begins as gloo's do: with the host's name."""
        count = len(self._known)
        head = len(_HOST).to_bytes(8, sys.byteorder)
        endpoint = Endpoint(head + _HOST + f":{count}".encode(), is_alive)
        self._known[endpoint.address] = endpoint
        return endpoint

    def close(self, endpoint: Endpoint) -> None:
        """Listen no more: who is connecting fails."""
        endpoint.is_closed = True
        self._scheduler.notify(self)

    def changed(self) -> None:
        """Let those look again that connect: a process has died."""
        self._scheduler.notify(self)

    def connect(self, own: Endpoint, addresses: frozenset[bytes], timeout_s: float) -> None:
        """Connect to all members, each of which does so, too.

        Raises:
            RuntimeError: A member is not there, or went away, or did not come in time.
        """
        own.peers = addresses
        deadline = self._scheduler.now_s + timeout_s
        self._scheduler.notify(self)
        while not self._are_connected(own):
            if self._scheduler.now_s >= deadline:
                raise RuntimeError(f"simulated gloo: connecting timed out after {timeout_s:.1f} s")
            self._scheduler.wait(self, deadline)
        own.is_connected = True

    def _are_connected(self, own: Endpoint) -> bool:
        are = True
        for address in own.peers or ():
            peer = self._known.get(address)
            if peer is None:
                raise RuntimeError(f"simulated gloo: nobody listens at {address!r}")
            if peer.is_closed or not peer.is_alive():
                raise RuntimeError("simulated gloo: Connection closed by peer")
            are = are and peer.peers is not None and own.address in peer.peers
        return are


class Place:
    """Where a rank makes its groups; of the task that runs."""

    def __init__(self) -> None:
        self.find: Callable[[], tuple[Network, Callable[[], bool]]] | None = None


place = Place()
"""Of this process: set while a job is simulated."""


class Options:
    """Stands in for the options of gloo's groups."""

    _devices: list[object]
    _threads: int
    _timeout: timedelta


class Device:
    """Stands in for what gloo's groups listen at."""


class SimulatedGloo:
    """Stands in for `torch.distributed.ProcessGroupGloo`, and is called as that is.

    Args:
        store: Where the members leave their addresses.
        rank: The position of the caller among them.
        size: How many there are.
        options: With the timeout.
        timeout: The timeout, where there are no options.

    Raises:
        RuntimeError: The members did not connect.
    """

    _Options = Options

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        options: Options | None = None,
        *,
        timeout: timedelta | None = None,
    ) -> None:
        if place.find is None or running.now is None:
            raise SimulationError("no job is simulated now")
        self.network, is_alive = place.find()
        self.endpoint = self.network.listen(is_alive)
        given = options._timeout if options is not None else timeout
        limit_s = given.total_seconds() if given is not None else 1800.0
        try:
            store.set(f"0/{rank}", self.endpoint.address)
            if size > 1 and os.environ.get("TORCH_GLOO_LAZY_INIT", "0") != "1":
                others = [f"0/{other}" for other in range(size) if other != rank]
                found = frozenset(bytes(store.get(key)) for key in others)
                self.network.connect(self.endpoint, found, limit_s)
        except BaseException:
            self.network.close(self.endpoint)
            raise

    @staticmethod
    def create_default_device(*_: object, **__: object) -> object:
        """Return what stands in for a device; `lazy_init` in here says that this gloo can that."""
        return Device()

    create_device = create_default_device

    def end(self) -> None:
        """Close what it listens at."""
        self.network.close(self.endpoint)
