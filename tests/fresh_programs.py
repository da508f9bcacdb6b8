"""Programs in a process of their own that has torch loaded: a fork, which is there at once."""

import os
import subprocess
import sys
import tempfile
import types
from pathlib import Path

from mortal_ranks import CONTEXT


def run(program, *arguments, environment=None, folder=None, seconds=100):
    """As `subprocess.run([sys.executable, "-c", program, ...])`, which would load torch anew."""
    with tempfile.TemporaryDirectory() as said:
        out, err = (Path(said, name) for name in ("out", "err"))
        environment = dict(os.environ if environment is None else environment)
        args = (program, arguments, environment, str(folder or os.curdir), str(out), str(err))
        process = CONTEXT.Process(target=_be, args=args)
        process.start()
        process.join(seconds)
        if process.is_alive():
            process.kill()
            process.join()
        told = out.read_text(), err.read_text()
    return subprocess.CompletedProcess(program, process.exitcode, *told)


def _be(program, arguments, environment, folder, *said):
    for fd, path in enumerate(said, 1):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), fd)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(folder)
    sys.path.insert(0, "")
    sys.argv = ["-c", *arguments]
    main = sys.modules["__main__"] = types.ModuleType("__main__")  # it was pytest
    sys.modules.pop("__mp_main__", None)
    exec(compile(program, "<string>", "exec"), vars(main))
