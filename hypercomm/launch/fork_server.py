"""Suppresses the traceback of a rank whose start was interrupted.

The fork server of `run_ranks` imports this module. The parent sends a new process the function to
run. If Ctrl-C interrupts the parent before it has sent everything, the new process ends with an
error of pickle. Nobody needs that traceback, because the parent reports the interruption. All other
errors are printed.
"""

from __future__ import annotations

import pickle
import sys
import types


def _print_unless_unfinished(
    kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
) -> None:
    innermost = trace
    while innermost is not None and innermost.tb_next is not None:
        innermost = innermost.tb_next
    place = None if innermost is None else innermost.tb_frame.f_globals["__name__"]
    if kind in (EOFError, pickle.UnpicklingError) and place == "multiprocessing.spawn":
        return
    sys.__excepthook__(kind, error, trace)


sys.excepthook = _print_unless_unfinished  # until `_serve` of the rank resets the hook
