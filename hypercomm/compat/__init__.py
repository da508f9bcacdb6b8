"""The names of other packages on top of grids, for programs written for these packages."""

from hypercomm.lazy import attributes

_MODULES = ("deepspeed", "ezpz", "megatron", "torchtitan")

__getattr__ = attributes(__name__, {name: f"{__name__}.{name}" for name in _MODULES})
