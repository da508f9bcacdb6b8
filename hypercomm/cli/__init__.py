"""The command line: plan a layout, compare two, check a machine, say what works, and who hangs.

`main` is the one place that turns errors into messages and exit codes: 0 all is well, 1 the check
failed, 2 the call was wrong, 130 interrupted. Of the ranks of a launched job, one says what is
wrong.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Sequence

from hypercomm.errors import HyperCommError, RankFailedError


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
    from hypercomm.cli.speaking import leave_it_to_another

    try:
        result = cli.main(argv, prog_name="hypercomm", standalone_mode=False)
    except click.ClickException as error:
        if not leave_it_to_another(error):
            error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        _say("interrupted; every rank that was started has been ended")
        return 130
    except RankFailedError as error:
        _say(str(error))
        return 1
    except HyperCommError as error:
        if not leave_it_to_another(error):
            _say(str(error))
        return 2
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        _say("this needs torch: pip install torch; plan, diff, draw and place --on FILE do not")
        return 2
    return result if isinstance(result, int) else 0


def _say(message: str) -> None:
    print(f"hypercomm: {message}", file=sys.stderr)
