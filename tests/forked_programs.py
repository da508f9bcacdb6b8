"""Runs programs in a forked process that has torch loaded already, so that they start fast."""

import os
import subprocess
import sys
import tempfile
import types
from pathlib import Path

from killable_ranks import CONTEXT


def run(
    program, *arguments, environment=None, folder=None, seconds=100
) -> subprocess.CompletedProcess[str]:
    """Run a program as `subprocess.run([sys.executable, "-c", program, ...])` does, but faster."""
    with tempfile.TemporaryDirectory() as output:
        out, err = (Path(output, name) for name in ("out", "err"))
        environment = dict(os.environ if environment is None else environment)
        args = (program, arguments, environment, str(folder or os.curdir), str(out), str(err))
        process = CONTEXT.Process(target=_run_as_main, args=args)
        process.start()
        process.join(seconds)
        if process.is_alive():
            process.kill()
            process.join()
        return subprocess.CompletedProcess(
            program, process.exitcode, out.read_text(), err.read_text()
        )


def _run_as_main(program, arguments, environment, folder, *outputs):
    for fd, path in enumerate(outputs, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), fd)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path.insert(0, "")
    sys.argv = ["-c", *arguments]
    main = sys.modules["__main__"] = types.ModuleType("__main__")  # replaces pytest's
    sys.modules.pop("__mp_main__", None)
    try:
        exec(compile(program, "<string>", "exec"), vars(main))
    except Exception:  # noqa: BLE001 - as Python does for the main program
        sys.excepthook(*sys.exc_info())
        sys.exit(1)
