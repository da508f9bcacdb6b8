"""Which megatron-core the compatibility layer does as, where its releases contradict each other.

It is the one that is installed, the newest that is known where none is, or what `set` says. Every
name and every argument of all releases is there whatever it is; `CHANGES` lists what differs.
"""

from __future__ import annotations

import ast
import contextlib
import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TypeAlias

from hypercomm.errors import ConfigurationError
from hypercomm.layout.text import shown

Version: TypeAlias = tuple[int, int, int]

NEWEST: Version = (0, 20, 0)
"""The newest megatron-core whose names and semantics are known here."""

CHANGES: dict[str, tuple[Version, str]] = {
    "unset_is_none": (
        (0, 17, 0),
        "a field of a collection that was not set is None; before, an AttributeError",
    ),
    "gtp_remat": (
        (0, 19, 0),
        (
            "data parallel getters answer with GTP peers, get_all_ranks() has six numbers, a "
            "RankGenerator names gtp_remat, and every rank has GTP groups, its optimizers too"
        ),
    ),
}
"""What differs, with the release that it came in."""

_FORM = re.compile(r"(\d+)\.(\d+)(?:\.(\d+))?(?:\.?(?:a|b|rc|dev|post|\+).*)?", re.ASCII)
"""A release, or one before or after it, which counts as the release."""

_chosen: Version | None = None
_installed: Version | None = None


def get() -> str:
    """Return the version of megatron-core that is followed.

    Example:
        >>> with use("0.16.1"):
        ...     get()
        '0.16.1'
    """
    return text_of(current())


def set(version: str | None) -> None:  # noqa: A001 - `version.set(...)` is how it is called
    """Follow another version of megatron-core from now on; states that are initialised keep theirs.

    Args:
        version: Such as "0.16.1" or "0.19"; None for the one that is installed, or the newest.

    Raises:
        ConfigurationError: It is no version.
    """
    _choose(None if version is None else _parse(version))
    forget()


@contextlib.contextmanager
def use(version: str) -> Iterator[None]:
    """Follow another version within a `with` block, in all threads.

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
        _choose(before)


def text_of(version: tuple[int, ...]) -> str:
    """Write a version as text, or the first numbers of one.

    >>> text_of((0, 19, 2)), text_of((0, 20))
    ('0.19.2', '0.20')
    """
    return ".".join(map(str, version))


def current() -> Version:
    """Return the version that is followed, as numbers."""
    global _installed  # noqa: PLW0603 - looked for once
    if _chosen is not None:
        return _chosen
    if _installed is None:
        _installed = installed() or NEWEST
    return _installed


def forget() -> None:
    """Look again for the megatron-core that is installed, when it is next asked for."""
    global _installed  # noqa: PLW0603 - looked for once
    _installed = None


def has(change: str, version: Version | None = None) -> bool:
    """Tell whether a version, by default the one that is followed, has one of the `CHANGES`."""
    return (current() if version is None else version) >= CHANGES[change][0]


def installed() -> Version | None:
    """Return the version of the megatron-core that can be imported, from its sources.

    Of it the package `megatron` is imported, which is empty.
    """
    folder = source_folder()
    if folder is None:
        return None
    try:
        tree = ast.parse((folder / "package_info.py").read_text(encoding="utf-8"))
    except (OSError, SyntaxError, ValueError):
        return NEWEST  # something is installed, and does not say what
    numbers = {
        target.id: node.value.value
        for node in tree.body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name) and isinstance(node.value.value, int)
    }
    if not {"MAJOR", "MINOR"} <= numbers.keys():
        return NEWEST
    return numbers["MAJOR"], numbers["MINOR"], numbers.get("PATCH", 0)


def source_folder() -> Path | None:
    """Return the folder of the megatron-core that can be imported; None where there is none."""
    try:
        spec = importlib.util.find_spec("megatron.core")
    except Exception:  # noqa: BLE001 - a package that cannot be imported is not there
        return None
    places = [] if spec is None else list(spec.submodule_search_locations or [])
    return next((Path(place) for place in places if (Path(place) / "__init__.py").exists()), None)


def _choose(version: Version | None) -> None:
    global _chosen  # noqa: PLW0603 - one setting for the process
    _chosen = version


def _parse(text: str) -> Version:
    found = _FORM.fullmatch(text) if isinstance(text, str) else None
    if found is None:
        raise ConfigurationError(
            f"version must be one of megatron-core, such as '0.16.1' or '0.19', got {shown(text)}"
        )
    major, minor, patch = (int(number or 0) for number in found.groups())
    return major, minor, patch
