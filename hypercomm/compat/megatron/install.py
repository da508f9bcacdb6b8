"""Makes `megatron.core` resolve to the modules of this package, and undoes it."""

from __future__ import annotations

from hypercomm.compat.megatron.state import current
from hypercomm.compat.replacement import Replacement

_OURS = "hypercomm.compat.megatron"
_replacement = Replacement(
    homes={
        "megatron.core.parallel_state": f"{_OURS}.parallel_state",
        "megatron.core.mpu": f"{_OURS}.parallel_state",
        "megatron.core.hyper_comm_grid": f"{_OURS}.hyper_comm_grid",
        "megatron.core.process_groups_config": f"{_OURS}.process_groups_config",
    },
    packages=("megatron", "megatron.core"),
    state="megatron.core.parallel_state",
    is_busy="is_initialized",
    advice="call its destroy_model_parallel()",
    current=current,
    aliases={"megatron.core.mpu": "megatron.core.parallel_state"},
)


def install() -> None:
    """Make `megatron.core`'s parallel_state, mpu, hyper_comm_grid and process_groups_config ours.

    It works with megatron-core installed or not, and is best called before `megatron.core` is
    imported. Where that was imported, every module that holds one of its modules, functions or
    classes under a name of its own gets ours instead; what is inside of classes, dicts, closures
    or default arguments is not looked for. A second call changes nothing.

    Raises:
        InstallError: Something holds what cannot be replaced; lists it, and changes nothing.

    Example:
        >>> install()
        >>> from megatron.core import mpu
        >>> mpu.__name__
        'hypercomm.compat.megatron.parallel_state'
        >>> uninstall()
    """
    _replacement.install()


def uninstall() -> None:
    """Undo `install`: Megatron's own modules are back, also where `install` put ours.

    A module outside of `megatron` that imported ours by a name of Megatron's in between keeps it,
    as it may have wanted ours.

    Raises:
        InstallError: The parallel state is initialised, or a state is in use.
    """
    _replacement.uninstall()
