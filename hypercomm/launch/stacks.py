"""Where ranks hang: their stacks, those that wait at the same place together."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

_FRAME = re.compile(r'\s*File "(?P<file>[^"]*)", line \d+ in')

_RUNS = "/".join((*Path(__file__).parts[-3:-1], "local_rank.py"))
"""The file that runs a rank's function; the frames of a report lie there, too, further in.

Only its end counts: ranks that begin in another folder may find another copy of us there.
"""

_MORE = "\n...\n"
"""Ends what faulthandler writes of a hundred threads and more, of which the first is none."""

_THREAD = re.compile(r"^(?:Current t|T)hread 0x", re.MULTILINE)
"""Begins what faulthandler writes of a thread, the first of which it writes last."""

_OURS = f"{Path(__file__).parents[1]}/"
_LIBRARIES = tuple(
    f"{sysconfig.get_path(name)}/" for name in ("stdlib", "platstdlib", "purelib", "platlib")
)


def grouped(stacks: Mapping[int, Sequence[str]]) -> list[tuple[list[int], str]]:
    """Put ranks together whose innermost frame of the user's is the same, and show the first's.

    Where no frame is the user's, the innermost of ours counts, else the innermost. Frames of
    importlib are left out: a line says that modules are loaded.

    Args:
        stacks: By rank, the lines that faulthandler writes, innermost first.

    Example:
        >>> wait, user = '  File "<torch>", line 7 in wait', '  File "train.py", line 3 in main'
        >>> for ranks, place in grouped({0: [wait, user], 1: [user], 2: []}):
        ...     print(ranks, place)
        [0, 1]   File "<torch>", line 7 in wait
          File "train.py", line 3 in main
        [2]   (it does not answer)
    """
    found: dict[str, tuple[list[int], str]] = {}
    for rank, stack in stacks.items():
        frames = [line for line in stack if "<frozen " not in line]
        loading = ["  (it loads modules)"] if len(frames) < len(stack) else []
        lines = [*loading, *frames] or ["  (it does not answer)"]
        place = found.setdefault(_innermost(frames) or lines[0], ([], "\n".join(lines)))
        place[0].append(rank)
    return list(found.values())


def is_whole(dump: str) -> bool:
    r"""Tell whether faulthandler has written all that it writes of a process.

    Example:
        >>> header = "Thread 0x1 (...):\n"
        >>> is_whole(header), is_whole(f'{header}  File "train.py", line 9 in <module>\n')
        (False, True)
    """
    return dump.endswith((" in <module>\n", "  ...\n", _MORE))


def of_main_thread(dump: str) -> list[str]:
    r"""Return the frames of a process's first thread, which faulthandler writes last; of no other.

    Example:
        >>> first = 'Current thread 0x1 (...):\n  File "train.py", line 9 in <module>\n'
        >>> other = 'Thread 0x2 (...):\n  File "io.py", line 3 in read\n'
        >>> of_main_thread(f"{other}\n{first}"), of_main_thread(other)
        (['  File "train.py", line 9 in <module>'], [])
    """
    if dump.endswith(_MORE):
        return ["  (it has too many threads to say)"]
    if not is_whole(dump):
        return []
    return [line for line in _THREAD.split(dump)[-1].splitlines() if line.startswith("  ")]


def inwards(stack: Sequence[str]) -> list[str]:
    """Return the frames of the function that a rank runs, and of what that calls.

    Where the function has not begun, those are of what the rank waits for in its place.

    Example:
        >>> run, user = f'  File "/{_RUNS}", line 5 in serve', '  File "train.py", line 3 in main'
        >>> inwards([run, user, run, run, '  File "forkserver.py", line 8 in main']) == [run, user]
        True
    """
    runs = [f'/{_RUNS}"' in line for line in stack]
    if True not in runs:
        return list(stack)
    end = len(runs) - runs[::-1].index(True)
    while end and runs[end - 1]:
        end -= 1
    return list(stack[:end] or stack)


def _innermost(frames: Sequence[str]) -> str:
    """Return the frame that says best where a rank is."""
    files = {line: match["file"] for line in frames if (match := _FRAME.match(line))}
    ours = [line for line, file in files.items() if file.startswith(_OURS)]
    theirs = [
        line
        for line, file in files.items()
        if not file.startswith(("<", *_LIBRARIES)) and line not in ours
    ]
    return next(iter([*theirs, *ours, *frames]), "")
