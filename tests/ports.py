"""Finds ports on which nothing listens, and that no other test gets."""

import contextlib
import itertools
import os
import socket

BEGIN, SHARE, WORKERS = 20_000, 500, 24
"""The ports are below 32768. Systems assign only higher ports, so no other socket takes them. Each
worker has a separate share, and begins at an offset given by its process id."""

_next = itertools.count(os.getpid())


def free_port():
    """Return a free port that neither this process nor another worker has returned before."""
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0").removeprefix("gw"))
    for number in itertools.islice(_next, SHARE):
        port = BEGIN + worker % WORKERS * SHARE + number % SHARE
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise OSError(f"all of {SHARE} ports are in use")
