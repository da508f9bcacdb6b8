"""Makes `megatron.core` resolve to the modules of this package."""

from __future__ import annotations

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
    """Make `megatron.core`'s parallel_state, mpu, hyper_comm_grid and process_groups_config ours.

    Call it before `megatron.core` is imported. It works with megatron-core installed or not, and a
    second call changes nothing. A warning is issued if the installed megatron-core is newer than
    every known release.

    Raises:
        StateError: `megatron.core` was imported before; nothing was changed.

    Example:
        >>> install()
        >>> from megatron.core import mpu
        >>> mpu.__name__
        'hypercomm.compat.megatron.parallel_state'
    """
    if aliases.install(_HOMES, ("megatron", "megatron.core"), loaded="megatron.core"):
        version.changes.cache_clear()
        theirs = version.installed()
        if theirs is not None and theirs[:2] > version.NEWEST[:2]:
            known, newer = (".".join(map(str, each)) for each in (version.NEWEST[:2], theirs))
            warnings.warn(
                f"megatron-core {newer} is newer than the newest that hypercomm knows, {known}, "
                f"and hypercomm lacks the names that it added",
                stacklevel=2,
            )


class MegatronNotReplacedWarning(UserWarning):
    """megatron.core has its own parallel state, in which its layers find no groups."""
