"""Ports that nobody listens on, and that nobody is given until a test's process listens there."""

import contextlib
import itertools
import os
import socket

BEGIN, SHARE, WORKERS = 20_000, 500, 24
"""Below the ports that systems hand out by themselves, from 32768: others' sockets do not come
in between. Each worker has a share of its own, and begins where its process number says."""

_next = itertools.count(os.getpid())


def free_port():
    """Return one that no call in this process has returned so far, nor one in another worker."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    for number in itertools.islice(_next, SHARE):
        port = BEGIN + worker % WORKERS * SHARE + number % SHARE
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise OSError(f"all of {SHARE} ports are in use")
