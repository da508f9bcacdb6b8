"""Makes import paths of another package resolve to modules of hypercomm."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from hypercomm.errors import StateError


def install(homes: Mapping[str, str], packages: Sequence[str], loaded: str) -> bool:
    """Make import paths resolve to modules of hypercomm, from their next import on.

    Args:
        homes: Maps each import path to the module of hypercomm that the path resolves to.
        packages: The packages that contain these paths, outermost first. Packages that are not
            installed are created as empty modules.
        loaded: The package that must not have been imported yet.

    Returns:
        True, or False if an earlier call has already installed these paths.

    Raises:
        StateError: The package `loaded` has already been imported. Nothing was changed.
    """
    if any(isinstance(finder, _Aliases) and finder.homes == homes for finder in sys.meta_path):
        return False
    if loaded in sys.modules:
        raise StateError(
            f"{loaded} was imported before install(), so its modules cannot be replaced any more; "
            f"call install() before the first import of {loaded}"
        )
    for package in filter(_is_missing, packages):
        module = sys.modules[package] = ModuleType(package)
        module.__path__ = []
        parent, _, name = package.rpartition(".")
        if parent:
            setattr(sys.modules[parent], name, module)
    sys.meta_path.insert(0, _Aliases(homes))
    return True


def _is_missing(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is None
    except Exception:  # noqa: BLE001 - the package is installed, but importing its parent raises
        return False


class _Aliases(MetaPathFinder, Loader):
    """Finds modules of hypercomm under the import paths of another package."""

    def __init__(self, homes: Mapping[str, str]) -> None:
        self.homes = homes

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname not in self.homes:
            return None
        spec = ModuleSpec(fullname, self)
        # Ask all other finders, because an editable install has a finder, too.
        others = (finder for finder in sys.meta_path if finder is not self)
        found = (finder.find_spec(fullname, path, target) for finder in others)
        theirs = next(filter(None, found), None)
        if theirs is not None:  # keeps submodules importable, such as ezpz.tp.layers
            spec.submodule_search_locations = theirs.submodule_search_locations
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(self.homes[spec.name])
        spec.loader_state = module.__spec__
        own = list(getattr(module, "__path__", []))
        if own:  # if a module has no `__path__`, importlib sets one from the spec
            theirs = spec.submodule_search_locations or []
            module.__path__ = list(dict.fromkeys([*own, *theirs]))
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = getattr(module.__spec__, "loader_state", None)
