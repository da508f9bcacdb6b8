"""What hypothesis calls when it is imported: `st.from_type(RankLayout)` then draws layouts.

Layouts are registered once somebody has loaded them: hypothesis alone loads nothing of hypercomm.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_MODULES = {
    "hypercomm.layout.layout": ("RankLayout", "layouts"),
    "hypercomm.layout.mapping": ("RankMapping", "mappings"),
    "hypercomm.grid.grid": ("HyperCommGrid", "grids"),
}
"""By the module that defines it, a class and the strategy that draws it."""


def register() -> None:
    """Register the strategies of classes that are loaded, and those of others when they are."""
    waiting = [name for name in _MODULES if not _register(name)]
    if waiting and not any(isinstance(finder, _Watch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Watch())


def _register(name: str) -> bool:
    kind, strategy = _MODULES[name]
    found = getattr(sys.modules.get(name), kind, None)
    if found is None:
        return False
    from hypothesis import strategies as st

    def draw(_: type) -> Any:
        from hypercomm import testing

        return getattr(testing, strategy)()

    st.register_type_strategy(found, draw)
    return True


class _Watch(MetaPathFinder):
    """Sees these modules being imported, and has them registered behind that."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name not in _MODULES:
            return None
        spec = PathFinder.find_spec(name, path, target)  # below a package, all installs go by path
        if spec is not None and spec.loader is not None:
            spec.loader = _Registering(spec.loader)
        return spec


class _Registering(Loader):
    """A loader that registers what it has loaded."""

    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def __getattr__(self, name: str) -> Any:
        if name == "_loader":  # an object of `copy`, without attributes yet
            raise AttributeError(name)
        return getattr(self._loader, name)  # its source, say, for who looks and does not load

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        if module.__spec__ is not None:
            module.__spec__.loader = module.__loader__ = self._loader
        self._loader.exec_module(module)
        _register(module.__name__)
