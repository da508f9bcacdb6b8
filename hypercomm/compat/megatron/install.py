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
    """Replace modules of `megatron.core` by the modules of this package.

    The replaced modules are parallel_state, mpu, hyper_comm_grid and process_groups_config. Call
    this function before `megatron.core` is imported. megatron-core need not be installed. A second
    call has no effect.

    If the installed megatron-core is newer than every supported release, a warning is issued.

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
        theirs = version.installed()
        if theirs is not None and theirs > version.NEWEST:
            warnings.warn(
                f"megatron-core {version.text_of(theirs)} is newer than "
                f"{version.text_of(version.NEWEST)}, the newest release that hypercomm supports, "
                f"so names may be missing",
                stacklevel=2,
            )


class MegatronNotReplacedWarning(UserWarning):
    """megatron.core was not replaced, so its layers do not find the groups of this package."""
