"""What a bound in seconds is where other tests run beside, on as many workers as there are."""

import os
import time

from hypercomm.launch import run_ranks

CROWDED = 3
"""How much longer than alone a process may take among four workers on two cores."""


def late_s(quiet_s):
    """Of what may take so long on a quiet machine, how long it may take on this one."""
    return quiet_s * (CROWDED if "PYTEST_XDIST_WORKER" in os.environ else 1)


def patience_s(nprocs):
    """A timeout in which ranks surely start: a multiple of what they take here and now."""
    run_ranks(int, nprocs)  # starts the fork server
    begin = time.monotonic()
    run_ranks(int, nprocs)
    return round(1 + 5 * (time.monotonic() - begin), 1)


def wait_until(condition, quiet_s=20, say=str):
    """Wait until something is so; what `say` returns is the message if that takes too long."""
    deadline = time.monotonic() + late_s(quiet_s)
    while not condition():
        assert time.monotonic() < deadline, say()
        time.sleep(0.02)
