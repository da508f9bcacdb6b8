"""The interfaces of other packages, implemented with grids, for programs that use the packages."""

from hypercomm.lazy import attributes

_MODULES = ("deepspeed", "ezpz", "megatron", "torchtitan")

__getattr__ = attributes(__name__, {name: f"{__name__}.{name}" for name in _MODULES})
