"""Other people's names, on top of grids: legacy code changes an import, or nothing at all."""

from hypercomm.lazy import attributes

_MODULES = ("deepspeed", "ezpz", "megatron", "torchtitan")

__getattr__ = attributes(__name__, {name: f"{__name__}.{name}" for name in _MODULES})
