"""Runs a program as `python` does, after replacing modules of another package by hypercomm's."""

from __future__ import annotations

import builtins
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from traceback import walk_tb
from types import ModuleType, TracebackType

from hypercomm.errors import StateError


def run(install: Callable[[], None], name: str) -> None:
    """Call `install`, and run the program in the command line as the module `__main__`.

    `sys.argv`, `sys.path`, the exit code and the traceback are the same as if `python` ran the
    program directly.

    Args:
        install: The function that replaces the modules.
        name: The name of the module that `python -m` runs, for messages.
    """
    usage = f"usage: python -m {name} (SCRIPT | -m MODULE) [arguments]"
    arguments = sys.argv[1:]
    is_module = arguments[:1] == ["-m"]
    sys.argv = arguments[1:] if is_module else arguments
    if not sys.argv or sys.argv[0].startswith("-"):
        _fail(usage)
    program = sys.argv[0]
    if not is_module:
        if not Path(program).is_file():
            _fail(f"{name}: no script {program!r}")
        if not getattr(sys.flags, "safe_path", False):  # exists since Python 3.11
            sys.path[0] = str(Path(program).resolve().parent)
    try:
        install()
    except StateError as error:
        _fail(f"{name}: {error}; a sitecustomize or a .pth file must have imported it")
    _hide_frames()
    if is_module:
        runpy.run_module(program, run_name="__main__", alter_sys=True)
    else:
        _run_script(Path(program).absolute())


def _run_script(path: Path) -> None:
    """Run a script without `runpy.run_path`, which would change `sys.argv` and `__package__`."""
    main = sys.modules["__main__"] = ModuleType("__main__")
    main.__file__ = str(path)
    main.__dict__["__builtins__"] = builtins
    exec(compile(path.read_bytes(), path, "exec", dont_inherit=True), vars(main))  # noqa: S102


def _fail(problem: str) -> None:
    print(problem, file=sys.stderr)  # noqa: T201
    sys.exit(2)


def _hide_frames() -> None:
    """Omit the frames above the program's first frame from tracebacks."""
    show = sys.excepthook

    def show_program(
        kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        names = [frame.f_code.co_filename for frame, _ in walk_tb(trace)]
        hidden = len(names) - names[::-1].index(__file__) if __file__ in names else 0
        while names[hidden : hidden + 1] == [runpy.run_path.__code__.co_filename]:
            hidden += 1
        for _ in range(hidden):
            trace = trace and trace.tb_next
        show(kind, error.with_traceback(trace), trace)

    sys.excepthook = show_program
