"""Other people's names, on top of grids: legacy code changes an import, or nothing at all."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypercomm import _resolver

if TYPE_CHECKING:
    from hypercomm.compat import deepspeed as deepspeed
    from hypercomm.compat import ezpz as ezpz
    from hypercomm.compat import megatron as megatron

_HOMES = {
    "deepspeed": "hypercomm.compat.deepspeed",
    "ezpz": "hypercomm.compat.ezpz",
    "megatron": "hypercomm.compat.megatron",
}

__getattr__ = _resolver(__name__, _HOMES)
