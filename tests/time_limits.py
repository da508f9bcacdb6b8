"""Computes time limits that are long enough while other tests run on the same machine."""

import os
import time

from hypercomm.launch import run_ranks

CROWDED = 3
"""A process takes this many times as long when four workers share two cores."""


def scaled_s(quiet_s):
    """Scale a time limit, given for a quiet machine, to the load of this test run."""
    return quiet_s * (CROWDED if "PYTEST_XDIST_WORKER" in os.environ else 1)


def startup_timeout_s(nprocs):
    """Return a timeout, in seconds, that is long enough to start ranks on this machine now."""
    run_ranks(int, nprocs)  # starts the fork server
    begin = time.monotonic()
    run_ranks(int, nprocs)
    return round(1 + 5 * (time.monotonic() - begin), 1)


def wait_until(condition, quiet_s=20, say=str):
    """Wait until `condition()` is true. If this takes too long, fail with the message `say()`."""
    deadline = time.monotonic() + scaled_s(quiet_s)
    while not condition():
        assert time.monotonic() < deadline, say()
        time.sleep(0.02)
