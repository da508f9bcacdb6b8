"""The megatron-core release whose behaviour the compatibility layer follows.

The default is the installed release, or the newest known release if none is installed. `set`
selects another release. The names and arguments of all releases always exist. `CHANGES` lists the
behaviours that differ.
"""

from __future__ import annotations

import functools
import importlib.util
import re
from pathlib import Path
from typing import TypeAlias

from hypercomm.errors import ConfigurationError

Version: TypeAlias = tuple[int, int, int]

OLDEST: Version = (0, 16, 0)
NEWEST: Version = (0, 20, 0)
"""The oldest and the newest megatron-core whose names and behaviour are supported."""

CHANGES: dict[str, Version] = {
    # A collection's field that was not set is None. In 0.16, reading the field raises
    # AttributeError.
    "unset_is_none": (0, 17, 0),
    # Data parallel getters return groups with GTP peers; RankGenerator has the dim gtp_remat.
    "gtp_remat": (0, 19, 0),
    # If an order does not name gtp_remat, it is inserted after cp in the dense layers
    # (Megatron-LM pull request 6868). Earlier releases insert it after tp. Pull request 6886
    # will fold cp into the GTP peers.
    "cp_before_gtp_remat": (0, 20, 0),
}
"""The behaviours that differ between releases, and the first release with the new behaviour."""

_FORM = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?(?:\.?(?:a|b|rc|dev|post|\+).*)?", re.ASCII)
_NUMBER = re.compile(r"^(MAJOR|MINOR|PATCH)\s*=\s*(\d+)", re.MULTILINE)

_chosen: Version | None = None


def get() -> str:
    """Return the release of megatron-core whose behaviour is followed.

    Example:
        >>> set("0.16.1")
        >>> get()
        '0.16.1'
        >>> set(None)
    """
    return ".".join(map(str, current()))


def set(version: str | None) -> None:  # noqa: A001 - `version.set(...)` is how it is called
    """Follow another release from now on. Initialised states keep their release.

    Args:
        version: The release, such as "0.16.1" or "0.19". A release candidate counts as its release.
            None selects the installed release, or the newest known one.

    Raises:
        ConfigurationError: The text is not a version, or the release is not supported.
    """
    global _chosen  # noqa: PLW0603 - one setting for the process
    if version is None:
        _chosen = None
    else:
        found = _FORM.fullmatch(version)
        major, minor, patch = (
            (int(number or 0) for number in found.groups()) if found else (0, 0, 0)
        )
        if not OLDEST[:2] <= (major, minor) <= NEWEST[:2]:
            known = " to ".join(f"{first}.{second}" for first, second, _ in (OLDEST, NEWEST))
            raise ConfigurationError(
                f"version must be a release of megatron-core {known}, such as '0.16.1', got "
                f"{version!r}"
            )
        _chosen = major, minor, patch
    changes.cache_clear()


def current() -> Version:
    """Return the release whose behaviour is followed, as numbers."""
    return _chosen or installed() or NEWEST


@functools.cache
def changes() -> frozenset[str]:
    """Return the names of the `CHANGES` that apply to the followed release."""
    release = current()
    return frozenset(change for change, first in CHANGES.items() if release >= first)


def installed() -> Version | None:
    """Return the version of megatron-core, without an import. Return None if not installed."""
    try:
        spec = importlib.util.find_spec("megatron.core")
    except Exception:  # noqa: BLE001 - a broken package counts as not installed
        return None
    if spec is None or spec.origin is None:
        return None
    try:
        text = Path(spec.origin).with_name("package_info.py").read_text(encoding="utf-8")
        numbers = dict(_NUMBER.findall(text))
        return int(numbers["MAJOR"]), int(numbers["MINOR"]), int(numbers.get("PATCH", 0))
    except (OSError, ValueError, KeyError):
        return NEWEST
