"""Launch files of other frameworks: their sizes, layouts and problems.

Names are imported on first access. `__init__.pyi` lists all names.
"""

from hypercomm.lazy import attributes

__getattr__, __dir__, __all__ = attributes(__name__)
