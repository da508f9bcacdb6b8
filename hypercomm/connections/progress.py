"""A progress bar, where a terminal looks on and rich is installed."""

from __future__ import annotations

import contextlib
import enum
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from typing import Any

from hypercomm.errors import GroupOptionsError, MissingPackageError
from hypercomm.layout.text import shown


class Show(enum.Enum):
    """Whether a bar is shown."""

    NEVER = "never"
    TO_A_TERMINAL = "to a terminal"
    ALWAYS = "always"

    @classmethod
    def read(cls, progress: bool | None) -> Show:
        """Read `progress=`.

        Raises:
            GroupOptionsError: It is none of True, False and None.
            MissingPackageError: It is True, and rich is not installed.
        """
        if progress is None:
            return cls.TO_A_TERMINAL
        if not isinstance(progress, bool):
            raise GroupOptionsError(f"progress must be True, False or None, got {shown(progress)}")
        if progress and importlib.util.find_spec("rich") is None:
            raise MissingPackageError(
                "progress=True needs rich: pip install 'hypercomm[cli]'; progress=None shows a bar "
                "where it is installed"
            )
        return cls.ALWAYS if progress else cls.NEVER


def _nothing() -> None:
    return None


@contextlib.contextmanager
def showing(show: Show, total: int, *, is_first: bool) -> Iterator[Callable[[], None]]:
    """Show a bar for the length of a `with` block, on the first rank; yields what moves it on."""
    is_wanted = show is Show.ALWAYS or (show is Show.TO_A_TERMINAL and sys.stderr.isatty())
    if not (is_wanted and is_first and total and importlib.util.find_spec("rich")):
        yield _nothing
        return
    console: Any = importlib.import_module("rich.console").Console(stderr=True)
    with importlib.import_module("rich.progress").Progress(console=console, transient=True) as bar:
        task = bar.add_task("connecting", total=total)
        yield lambda: bar.advance(task)
