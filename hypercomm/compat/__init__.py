"""Implements the interfaces of other packages with grids, for programs that use these packages."""

from hypercomm.lazy import attributes

__getattr__, __dir__, __all__ = attributes(__name__)
