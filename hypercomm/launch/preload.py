"""Imports for the fork server: torch once, for all ranks that will be forked from it.

The stock fork server ignores Ctrl-C only once it has loaded everything, and the numerical
libraries would start threads, which a process that forks should not have.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import signal
from unittest import mock

_SINGLE_THREADED = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")


def _load() -> None:
    interrupt = signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})  # the parent has blocked it
    with mock.patch.dict(os.environ, dict.fromkeys(_SINGLE_THREADED, "1")):
        importlib.import_module("hypercomm.grid")
        importlib.import_module("hypercomm.launch.local_rank")
        with contextlib.suppress(ImportError):
            importlib.import_module("cloudpickle")
    signal.signal(signal.SIGINT, interrupt)


if __name__ != "__main__":  # importing it is its purpose
    _load()
