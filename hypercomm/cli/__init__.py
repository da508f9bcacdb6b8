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

from hypercomm.errors import HyperCommError, LaunchError, RankFailedError

_GRACE_S = 3.0
"""The time that rank 0 has to print an error before another rank exits.

Launchers end all ranks when one exits.
"""


class HostError(LaunchError):
    """An error of this host, which the first rank on it prints: repair the host."""


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
        if not _is_printed_elsewhere(error):
            error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        _say("interrupted; every rank that was started has been ended")
        return 130
    except RankFailedError as error:
        _say(str(error))
        return 1
    except HyperCommError as error:
        if not _is_printed_elsewhere(error):
            _say(str(error))
        return 2
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        _say("this needs torch: pip install torch; plan, diff, draw and place --on FILE do not")
        return 2
    return result if isinstance(result, int) else 0


def _is_printed_elsewhere(error: Exception) -> bool:
    """Return whether another rank of the job prints the same error; wait until it has."""
    from hypercomm.launchers import find_job

    try:
        job = find_job(os.environ)
    except LaunchError:
        return False
    if job is None or job.rank == 0:
        return False
    if isinstance(error, HostError) and not job.local_rank:
        return False
    time.sleep(_GRACE_S)
    return True


def _say(message: str) -> None:
    print(f"hypercomm: {message}", file=sys.stderr)
