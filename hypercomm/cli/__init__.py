"""The command line: plan, draw, place and compare layouts, check groups, and explain hangs.

`main` is the one place that turns errors into messages and exit codes: 0 for success, 1 if a
check failed, 2 for a wrong call, 130 for Ctrl-C. One rank of a launched job prints the error.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Sequence

from hypercomm.errors import HyperCommError, LaunchError

_GRACE_S = 3.0
"""The time that rank 0 has to print an error before another rank exits.

Launchers end all ranks when one exits.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code.

    Args:
        argv: The arguments; default: those of the process.
    """
    lacking = [name for name in ("click", "rich") if importlib.util.find_spec(name) is None]
    if lacking:
        _say(f"the command line needs {' and '.join(lacking)}: pip install 'hypercomm[cli]'")
        return 2
    import click

    from hypercomm.cli.commands import cli

    try:
        result = cli.main(argv, prog_name="hypercomm", standalone_mode=False)
    except click.ClickException as error:
        if _is_first():
            error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        _say("interrupted; every rank that was started has been ended")
        return 130
    except HyperCommError as error:
        if _is_first():
            _say(str(error))
        return 2
    return result if isinstance(result, int) else 0


def _is_first() -> bool:
    """Return whether this is rank 0, or no rank of a job; else wait until rank 0 has printed."""
    from hypercomm.launchers import find_job

    try:
        job = find_job(os.environ)
    except LaunchError:
        return True
    if job is not None and job.rank:
        time.sleep(_GRACE_S)
    return job is None or not job.rank


def _say(message: str) -> None:
    print(f"hypercomm: {message}", file=sys.stderr)
