"""Makes `megatron.core` resolve to the modules of this package."""

from __future__ import annotations

import importlib
import re
import warnings

from hypercomm.compat import aliases
from hypercomm.compat.megatron import version

_OURS = "hypercomm.compat.megatron"
_HOMES = {
    "megatron.core.parallel_state": f"{_OURS}.parallel_state",
    "megatron.core.mpu": f"{_OURS}.parallel_state",
    "megatron.core.hyper_comm_grid": f"{_OURS}.hyper_comm_grid",
    "megatron.core.process_groups_config": f"{_OURS}.process_groups_config",
}


def install() -> None:
    """Replace modules of `megatron.core` by the modules of this package.

    The replaced modules are parallel_state, mpu, hyper_comm_grid and process_groups_config. Call
    this function before `megatron.core` is imported. megatron-core need not be installed. A second
    call has no effect.

    If the installed megatron-core is newer than every supported release, a warning lists the names
    that this package does not have.

    Raises:
        StateError: `megatron.core` has already been imported. Nothing was changed.

    Example:
        >>> install()
        >>> from megatron.core import mpu
        >>> mpu.__name__
        'hypercomm.compat.megatron.parallel_state'
    """
    if aliases.install(_HOMES, ("megatron", "megatron.core"), loaded="megatron.core"):
        version.changes.cache_clear()
        _warn_of_newer()


class MegatronNotReplacedWarning(UserWarning):
    """megatron.core was not replaced, so its layers do not find the groups of this package."""


_PUBLIC = re.compile(r"^(?:def|class) ([A-Za-z]\w*)", re.MULTILINE)


def _warn_of_newer() -> None:
    theirs = version.installed()
    folder = version.source_folder()
    if theirs is None or folder is None or theirs[:2] <= version.NEWEST[:2]:
        return
    lacking = [
        f"{file.stem}.{missing}"
        for file in folder.glob("*.py")
        if file.stem in ("parallel_state", "process_groups_config", "hyper_comm_grid")
        for missing in _PUBLIC.findall(file.read_text(encoding="utf-8", errors="replace"))
        if not hasattr(importlib.import_module(f"{_OURS}.{file.stem}"), missing)
    ]
    known, newer = (".".join(map(str, release)) for release in (version.NEWEST[:2], theirs))
    warnings.warn(
        f"megatron-core {newer} is newer than {known}, the newest release that hypercomm supports; "
        f"names that hypercomm does not have: {', '.join(lacking) or 'none'}",
        stacklevel=3,
    )
