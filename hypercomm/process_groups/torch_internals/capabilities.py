"""The installed release of torch, and the replacement of its attributes for a limited time.

The private names that this folder uses exist in torch 2.10 to 2.15. The function that creates one
group has a fallback, because every creation depends on it.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import re
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist

from hypercomm.errors import MissingPackageError

logger = logging.getLogger(__name__)

OLDEST = "2.10"
"""The oldest torch that hypercomm works with."""


# ---- the release -------------------------------------------------------------------------------


def release_of(version: str) -> tuple[int, ...]:
    """Return the major and minor number of a version; a pre-release counts as its release.

    Example:
        >>> release_of("2.10.0a0+ecf3bae40a.nv25.12"), release_of("2.15")
        ((2, 10), (2, 15))
    """
    return tuple(int(number) for number in re.findall(r"\d+", version)[:2])


@functools.lru_cache(maxsize=16)
def since(release: str) -> bool:
    """Return whether the installed torch is this release or a newer one."""
    return release_of(torch.__version__) >= release_of(release)


def check_release(installed: str) -> None:
    """Raise unless a version of torch is recent enough.

    Raises:
        MissingPackageError: With the command that installs a newer one.

    Example:
        >>> check_release("2.10.0+cu126")
        >>> check_release("2.9.1")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        hypercomm.errors.MissingPackageError: torch 2.9.1 is installed, and hypercomm needs...
    """
    if release_of(installed) < release_of(OLDEST):
        raise MissingPackageError(
            f"torch {installed} is installed, and hypercomm needs {OLDEST} or newer: "
            f"pip install 'torch>={OLDEST}'; hypercomm.layout, and hypercomm.RankLayout, need none"
        )


check_release(torch.__version__)


# ---- the private name with a fallback ----------------------------------------------------------

_c10d: Any = dist.distributed_c10d
_NEEDED = {"store", "group_name", "backend_options", "timeout", "device_id", "group_desc"}

try:
    _taken = inspect.signature(_c10d._new_process_group_helper).parameters.keys()
    HAS_HELPER = _taken >= _NEEDED
except AttributeError:
    HAS_HELPER = False
"""Whether torch has the private function that creates one group under a given name."""

if not HAS_HELPER:
    logger.warning(
        "torch %s lacks the private name _new_process_group_helper, or it has changed: every rank "
        "walks every group of the world (creation='enumerate')",
        torch.__version__,
    )


def is_other_world() -> bool:
    """Return whether torch.distributed shows a simulated or fake job."""
    return hasattr(_c10d._world, "is_of_another_world")


def has_other_ranks() -> bool:
    """Return whether other ranks of the job can be reached: not if each is simulated alone."""
    return bool(getattr(_c10d._world, "has_other_ranks", True))


# ---- replacing an attribute temporarily --------------------------------------------------------


class Patch:
    """Replaces an attribute for as long as a thread needs it.

    Threads that want the same value share the replacement; a thread that wants another one waits.

    Args:
        name: The name of the attribute.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._changed = threading.Condition()
        self._users = 0
        self._owner: Any = None
        self._original: Any = None
        self._ours: Any = None

    def original(self, owner: Any) -> Any:
        """Return the value that `owner` has when it is not replaced; None if it has none."""
        with self._changed:
            is_replaced = self._users and self._owner is owner
            return self._original if is_replaced else getattr(owner, self._name, None)

    @contextlib.contextmanager
    def applied(self, owner: Any, ours: Any) -> Iterator[None]:
        """Replace the attribute of `owner` within a `with` block."""
        with self._changed:
            self._changed.wait_for(lambda: not self._users or self._ours == ours)
            if not self._users:
                self._owner, self._ours = owner, ours
                self._original = getattr(owner, self._name)
                self._set(ours)
            self._users += 1
        try:
            yield
        finally:
            with self._changed:
                self._users -= 1
                if not self._users:
                    self._set(self._original)
                    self._owner = self._original = self._ours = None
                    self._changed.notify_all()

    def _set(self, value: Any) -> None:
        if self._original is not self._ours:
            setattr(self._owner, self._name, value)
