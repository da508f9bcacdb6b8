"""`ezpz.tp`, tensor parallelism after fairscale's `initialize_model_parallel`, on a grid.

`install()` makes the import path `ezpz.tp` resolve to `hypercomm.compat.ezpz.tp`, with ezpz
installed or not.
"""

from __future__ import annotations

from hypercomm.compat.ezpz import tp as tp
from hypercomm.compat.ezpz.state import current
from hypercomm.compat.replacement import Replacement

__all__ = ["install", "tp", "uninstall"]

_replacement = Replacement(
    homes={"ezpz.tp": "hypercomm.compat.ezpz.tp"},
    packages=("ezpz",),
    state="ezpz.tp",
    is_busy="tensor_parallel_is_initialized",
    advice="call its destroy_tensor_parallel()",
    current=current,
)


def install() -> None:
    """Make `ezpz.tp` ours; the other modules of ezpz, `ezpz.tp.layers` included, stay its own.

    It works with ezpz installed or not, and is best called before `ezpz` is imported. Where that
    was imported, every module that holds the module or a function of it under a name of its own
    gets ours instead. A second call changes nothing.

    Raises:
        InstallError: ezpz's own state is initialised; nothing was changed.

    Example:
        >>> install()
        >>> import ezpz.tp
        >>> ezpz.tp.__name__
        'hypercomm.compat.ezpz.tp'
        >>> uninstall()
    """
    _replacement.install()


def uninstall() -> None:
    """Undo `install`: `ezpz.tp` is ezpz's own again, also where `install` put ours.

    Raises:
        InstallError: Our state is initialised, or one is in use.
    """
    _replacement.uninstall()
