"""Which private names of torch the installed release has.

hypercomm works without any of them. Each has a flag, which is False where torch lacks it, and one
warning lists what is lost. Callers read flags and names at each call, so that they respect a
patched torch.distributed.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
import re
import threading
from collections.abc import Iterator
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist

from hypercomm.errors import TorchVersionError

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
        TorchVersionError: With the command that installs a newer one.

    Example:
        >>> check_release("2.10.0+cu126")
        >>> check_release("2.9.1")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        hypercomm.errors.TorchVersionError: torch 2.9.1 is installed, and hypercomm needs 2.10 or...
    """
    if release_of(installed) < release_of(OLDEST):
        raise TorchVersionError(
            f"torch {installed} is installed, and hypercomm needs {OLDEST} or newer: "
            f"pip install 'torch>={OLDEST}'; hypercomm.layout, and hypercomm.RankLayout, need none"
        )


check_release(torch.__version__)


# ---- one flag for each private name ------------------------------------------------------------

FLAGS: dict[str, bool] = {}
"""Whether torch has each private name, by its path below `torch`."""

_LOST: list[str] = []


def _has(path: str, without: str, *, has: str = "", takes: str = "") -> bool:
    """Return whether torch has a private name, with these attributes and these parameters.

    Args:
        path: The path of the name below `torch`.
        without: What a user loses without it.
        has: Attributes that are used.
        takes: Parameters that are used.
    """
    try:
        found = attrgetter(path)(torch)
        parameters = inspect.signature(found).parameters.keys() if takes else set()
        works = parameters >= set(takes.split()) and all(hasattr(found, it) for it in has.split())
    except (AttributeError, TypeError, ValueError):
        works = False
    FLAGS[path] = works
    if not works:
        _LOST.append(f"{path} ({without})")
    return works


_C10D = "distributed.distributed_c10d"

HELPER = _has(
    f"{_C10D}._new_process_group_helper",
    "every rank walks every group of the world: creation='enumerate'",
    takes="store group_name backend_options timeout device_id group_desc",
)
TABLES = _has(
    f"{_C10D}._world",
    "every rank walks every group of the world, and a failed creation may leave a group behind",
    has="pg_map pg_names pg_group_ranks pg_to_tag tags_to_pg default_pg",
)
STORE = _has(
    f"{_C10D}._get_default_store",
    "ranks are not compared, missing ranks are not named, and creation='enumerate'",
)
GET_BACKEND = _has(
    "distributed.ProcessGroup._get_backend",
    "groups have torch's default timeout, and WORLD is not split",
)
PLUGINS = _has("distributed.Backend._plugins", "only NCCL takes pg_options")
OPTIONS_TIMEOUT = _has(
    "_C._distributed_c10d.Backend.Options._timeout",
    "the timeout in pg_options is not compared with timeout=",
)
_NO_GLOO = "gloo waits for missing ranks until its timeout, and Ctrl-C does not end that"
GLOO = not hasattr(dist, "ProcessGroupGloo") or _has(  # a build may come without gloo
    f"{_C10D}.ProcessGroupGloo",
    _NO_GLOO,
    has="_Options create_default_device create_device",
)
NAME_GROUP = _has(
    f"{_C10D}._process_group_name",
    "torch names the groups that are split off WORLD, before 2.14 not the same on all ranks",
    takes="ranks use_hashed_name",
)
ABORT = _has(
    f"{_C10D}._abort_process_group",
    "abort() destroys NCCL groups, which waits for running operations",
    takes="group",
)
SET_TIMEOUT = hasattr(dist, "set_timeout") or _has(
    f"{_C10D}._set_pg_timeout",
    "the timeout of a group cannot be changed",
    takes="timeout group",
)

if _LOST:
    logger.warning(
        "torch %s lacks private names, or they have changed: %s",
        torch.__version__,
        "; ".join(_LOST),
    )


@functools.lru_cache(maxsize=16)
def warn_once(text: str) -> None:
    """Log what cannot be done with this torch, each text once."""
    logger.warning("torch %s: %s", torch.__version__, text)


def lose_gloo(reason: str) -> None:
    """Clear the flag of gloo's class, whose first use has failed."""
    global GLOO  # noqa: PLW0603 - only the first use shows it
    GLOO = FLAGS[f"{_C10D}.ProcessGroupGloo"] = False
    warn_once(f"ProcessGroupGloo {reason}: {_NO_GLOO}")


def is_other_world() -> bool:
    """Return whether torch.distributed shows a simulated or fake job."""
    return hasattr(getattr(dist.distributed_c10d, "_world", None), "is_of_another_world")


def has_other_ranks() -> bool:
    """Return whether other ranks of the job can be reached: not where each is simulated alone."""
    return getattr(getattr(dist.distributed_c10d, "_world", None), "has_other_ranks", True)


# ---- replacing an attribute for a while --------------------------------------------------------


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
        """Return the value that `owner` has when it is not replaced; None where it has none."""
        with self._changed:
            if self._users and self._owner is owner:
                return self._original
            return getattr(owner, self._name, None)

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
