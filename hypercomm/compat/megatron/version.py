"""The megatron-core release whose behaviour the compatibility layer follows.

It is the one that is installed, the newest known one if none is installed, or what `set` says.
Every name and argument of all releases exists in any case. `CHANGES` lists what differs.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

from hypercomm.errors import ConfigurationError
from hypercomm.layout.text import shown

Version: TypeAlias = tuple[int, int, int]

NEWEST: Version = (0, 20, 0)
"""The newest megatron-core whose names and behaviour are known here."""

CHANGES: dict[str, Version] = {
    # A field of a collection that was not set is None. Before: an AttributeError.
    "unset_is_none": (0, 17, 0),
    # Data parallel getters return groups with GTP peers, a RankGenerator has the dim gtp_remat.
    "gtp_remat": (0, 19, 0),
    # An order that does not name gtp_remat has it after cp in the dense layers (Megatron-LM pull
    # request 6868). Before: after tp. Pull request 6886 will fold cp into the GTP peers.
    "cp_before_gtp_remat": (0, 20, 0),
}
"""The behaviours that contradict between releases, with the first release that has the new one."""

_FORM = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?(?:\.?(?:a|b|rc|dev|post|\+).*)?", re.ASCII)
_NUMBER = re.compile(r"^(MAJOR|MINOR|PATCH)\s*=\s*(\d+)", re.MULTILINE)

_chosen: str | None = None


def get() -> str:
    """Return the release that is followed.

    Example:
        >>> with use("0.16.1"):
        ...     get()
        '0.16.1'
    """
    return ".".join(map(str, current()))


def set(version: str | None) -> None:  # noqa: A001 - `version.set(...)` is how it is called
    """Follow another release from now on; states that are initialised keep theirs.

    Args:
        version: Such as "0.16.1" or "0.19"; None for the one that is installed, or the newest. A
            release candidate counts as its release.

    Raises:
        ConfigurationError: It is not a version.
    """
    global _chosen  # noqa: PLW0603 - one setting for the process
    if version is not None:
        _parse(version)
    _chosen = version
    changes.cache_clear()


@contextlib.contextmanager
def use(version: str) -> Iterator[None]:
    """Follow another release within a `with` block, in all threads.

    Example:
        >>> from hypercomm.compat.megatron.process_groups_config import ProcessGroupCollection
        >>> with use("0.16.1"):
        ...     hasattr(ProcessGroupCollection(), "tp")
        False
    """
    before = _chosen
    set(version)
    try:
        yield
    finally:
        set(before)


def current() -> Version:
    """Return the release that is followed, as numbers."""
    return (installed() or NEWEST) if _chosen is None else _parse(_chosen)


@functools.cache
def changes() -> frozenset[str]:
    """Return the `CHANGES` of the release that is followed."""
    release = current()
    return frozenset(change for change, first in CHANGES.items() if release >= first)


def has(change: str) -> bool:
    """Return whether the release that is followed has one of the `CHANGES`."""
    return change in changes()


def installed() -> Version | None:
    """Return the version of the megatron-core that can be imported, without importing it."""
    folder = source_folder()
    if folder is None:
        return None
    try:
        numbers = dict(_NUMBER.findall((folder / "package_info.py").read_text(encoding="utf-8")))
        return int(numbers["MAJOR"]), int(numbers["MINOR"]), int(numbers.get("PATCH", 0))
    except (OSError, ValueError, KeyError):
        return NEWEST


def source_folder() -> Path | None:
    """Return the folder of the megatron-core that can be imported, or None."""
    try:
        spec = importlib.util.find_spec("megatron.core")
    except Exception:  # noqa: BLE001 - a package that cannot be imported is not there
        return None
    places = [] if spec is None else list(spec.submodule_search_locations or [])
    return next((Path(place) for place in places if (Path(place) / "__init__.py").exists()), None)


def _parse(text: str) -> Version:
    found = _FORM.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        raise ConfigurationError(
            f"version must be one of megatron-core, such as '0.16.1' or '0.19', got {shown(text)}"
        )
    major, minor, patch = (int(number or 0) for number in found.groups())
    return major, minor, patch
