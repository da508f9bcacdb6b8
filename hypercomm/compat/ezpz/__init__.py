"""`ezpz.tp`, tensor parallelism after fairscale's `initialize_model_parallel`, on a grid."""

from __future__ import annotations

from hypercomm.compat import aliases
from hypercomm.compat.ezpz import tp as tp

__all__ = ["install", "tp"]


def install() -> None:
    """Make `ezpz.tp` ours; other modules of ezpz, `ezpz.tp.layers` included, stay its own.

    Call it before `ezpz` is imported. It works with ezpz installed or not, and a second call
    changes nothing.

    Raises:
        InstallError: `ezpz` was imported before; nothing was changed.

    Example:
        >>> install()
        >>> import ezpz.tp
        >>> ezpz.tp.__name__
        'hypercomm.compat.ezpz.tp'
    """
    aliases.install({"ezpz.tp": "hypercomm.compat.ezpz.tp"}, ("ezpz",), loaded="ezpz")
