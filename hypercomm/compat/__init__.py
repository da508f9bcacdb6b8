"""Implements the interfaces of other packages with grids, for programs that use these packages."""

from hypercomm.lazy import attributes

_MODULES = ("deepspeed", "ezpz", "megatron", "torchtitan")

__getattr__ = attributes(__name__, {name: f"{__name__}.{name}" for name in _MODULES})
