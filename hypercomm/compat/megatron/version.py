"""The megatron-core release whose behaviour the compatibility layer follows.

The default is the installed release, or the newest known release if none is installed. `set`
selects another release. `CHANGES` lists the behaviours that differ. Patch releases do not differ.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import sys
from pathlib import Path
from typing import Any, TypeAlias

from hypercomm.errors import ConfigurationError, MissingPackageError

Version: TypeAlias = tuple[int, int]

OLDEST: Version = (0, 16)
NEWEST: Version = (0, 20)
"""The oldest and the newest megatron-core whose names and behaviour are supported."""

CHANGES: dict[str, Version] = {
    # A collection's field that was not set is None. In 0.16, reading the field raises
    # AttributeError.
    "unset_is_none": (0, 17),
    # Data parallel getters return groups with GTP peers; RankGenerator has the dim gtp_remat.
    "gtp_remat": (0, 19),
    # If an order does not name gtp_remat, it is inserted after cp in the dense layers
    # (Megatron-LM pull request 6868). Earlier releases insert it after tp. Pull request 6886
    # will fold cp into the GTP peers.
    "cp_before_gtp_remat": (0, 20),
}
"""The behaviours that differ between releases, and the first release with the new behaviour."""

_chosen: Version | None = None


def get() -> str:
    """Return the release of megatron-core whose behaviour is followed.

    Example:
        >>> set("0.16.1")
        >>> get()
        '0.16'
        >>> set(None)
    """
    return text_of(current())


def set(version: str | None) -> None:  # noqa: A001 - `version.set(...)` is how it is called
    """Follow another release from now on. Initialised states keep their release.

    Args:
        version: The release, such as "0.19" or "0.19.2". A release candidate counts as its release.
            None selects the installed release, or the newest known one.

    Raises:
        ConfigurationError: The text is not a version, or the release is not supported.
    """
    global _chosen  # noqa: PLW0603 - one setting for the process
    chosen = None
    if version is not None:
        found = re.match(r"([0-9]+)\.([0-9]+)(?![0-9])", version)
        chosen = (int(found[1]), int(found[2])) if found else (0, 0)
        if not OLDEST <= chosen <= NEWEST:
            raise ConfigurationError(
                f"version must be a release of megatron-core {text_of(OLDEST)} to "
                f"{text_of(NEWEST)}, such as '0.16.1', got {version!r}"
            )
    _chosen = chosen
    changes.cache_clear()


def text_of(release: Version) -> str:
    """Return a release as text.

    >>> text_of((0, 19))
    '0.19'
    """
    return ".".join(map(str, release))


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
    path = _file("package_info")
    if path is None:
        return None
    try:
        numbers = re.findall(r"^(?:MAJOR|MINOR)\s*=\s*(\d+)", path.read_text("utf-8"), re.MULTILINE)
        major, minor = map(int, numbers)
    except (OSError, ValueError):
        return NEWEST
    return major, minor


_SUFFIX = "_of_megatron"


@functools.cache
def original(name: str) -> Any:
    """Execute a file of the installed `megatron.core`, which `install()` may have replaced.

    Args:
        name: The name of the module in `megatron.core`.

    Raises:
        MissingPackageError: megatron-core is not installed.
    """
    path = _file(name)
    if path is None:
        raise MissingPackageError(
            f"this is a part of megatron.core.{name} that hypercomm does not replace: pip install "
            f"megatron-core"
        )
    called = f"megatron.core.{name}{_SUFFIX}"  # a name in the package, for relative imports
    spec: Any = importlib.util.spec_from_file_location(called, path)
    module = sys.modules[called] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def is_original(function: object) -> bool:
    """Return whether a function is from a module that `original` has executed."""
    return getattr(function, "__module__", "").endswith(_SUFFIX)


def _file(name: str) -> Path | None:
    """Return the path of a module of the installed `megatron.core`, or None if not installed."""
    try:
        spec = importlib.util.find_spec("megatron.core")
    except Exception:  # noqa: BLE001 - a broken package counts as not installed
        return None
    return (
        None if spec is None or spec.origin is None else Path(spec.origin).with_name(f"{name}.py")
    )
