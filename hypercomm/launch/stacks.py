"""Where ranks hang: their stacks, those that wait at the same place together."""

from __future__ import annotations

import re
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path

_FRAME = re.compile(r'\s*File "(?P<file>[^"]*)", line \d+ in')

_RUNS = "local_rank.py"
"""The file that runs a rank's function; the frames of a report lie there, too, further in."""

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


def of_main_thread(dump: str) -> list[str]:
    r"""Return the frames of a process's first thread, which faulthandler writes last.

    Example:
        >>> lines = ["Thread 0x2 (most recent call first):", "  one", "", "Thread 0x1:", "  two"]
        >>> of_main_thread("\n".join(lines))
        ['  two']
    """
    frames: list[str] = []
    for line in dump.splitlines():
        if line.startswith("  "):
            frames.append(line)
        else:
            frames.clear()
    return frames


def inwards(stack: Sequence[str]) -> list[str]:
    """Return the frames of the function that a rank runs, and of what that calls.

    Example:
        >>> run, user = '  File "local_rank.py"', '  File "train.py"'
        >>> inwards([run, user, run, run, '  File "<forkserver>"']) == [run, user]
        True
    """
    runs = [_RUNS in line for line in stack]
    if True not in runs:
        return list(stack)
    end = len(runs) - runs[::-1].index(True)
    while end and runs[end - 1]:
        end -= 1
    return list(stack[:end] or stack)  # all of it where the function has not begun


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
