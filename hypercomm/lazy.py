"""Imports modules on first access, so that planning a layout does not load torch.

Except torch, the packages that are named here are optional, and extras install them.
"""

from __future__ import annotations

import ast
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from types import ModuleType
from typing import Any

from hypercomm.errors import MissingPackageError

_EXTRAS = {
    "cloudpickle": "'hypercomm[testing]'",
    "hostlist": "'hypercomm[place]'",
    "hypothesis": "'hypercomm[testing]'",
    "pytest": "'hypercomm[testing]'",
    "resvg_py": "'hypercomm[draw]'",
    "rich": "'hypercomm[cli]'",
    "tomli": "'hypercomm[cli]'",
    "torch": "torch",
    "tree_sitter": "'hypercomm[cli]'",
    "tree_sitter_bash": "'hypercomm[cli]'",
    "yaml": "'hypercomm[place]'",
}
"""The argument of `pip install` for each package that only some programs need."""


def required(package: str, what: str) -> Any:
    """Import a package that an extra installs.

    Args:
        package: The package, or a module of it.
        what: The feature that needs the package, for the error message.

    Raises:
        MissingPackageError: The package is not installed. The message names the extra.
    """
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise _missing(package, what) from error


def attributes(
    module: str, elsewhere: Mapping[str, str] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Return `__getattr__`, `__dir__` and `__all__` of a package with a stub, `__init__.pyi`.

    The stub imports each name from the module that defines it, and its `__all__` lists the public
    names. The package imports a name on first access. `__dir__` also lists what the package itself
    has defined before.

    Args:
        module: The name of the package.
        elsewhere: Maps names that this package lacks to the modules that define them. The
            AttributeError for such a name shows the module.
    """
    package = sys.modules[module]
    path = os.path.join(package.__path__[0], "__init__.pyi")  # noqa: PTH118 - or in a zip file
    stub = ast.parse(package.__spec__.loader.get_data(path))  # type: ignore[union-attr]
    homes: dict[str, str] = {}
    listed: list[str] = []
    for node in stub.body:
        if isinstance(node, ast.ImportFrom):
            homes.update({alias.name: str(node.module) for alias in node.names})
        elif isinstance(node, ast.Assign):
            listed = ast.literal_eval(node.value)

    def get(name: str) -> Any:
        if name not in homes:
            there = (elsewhere or {}).get(name)
            hint = f"; write `from {there} import {name}`" if there else ""
            raise AttributeError(f"module {module!r} has no attribute {name!r}{hint}")
        is_module = homes[name] == module
        try:
            home = importlib.import_module(f"{module}.{name}" if is_module else homes[name])
        except ModuleNotFoundError as error:
            if error.name is None or error.name.partition(".")[0] not in _EXTRAS:
                raise
            raise _missing(error.name, f"{module}.{name}") from error
        value = home if is_module else getattr(home, name)
        setattr(package, name, value)  # the next access does not call this function
        return value

    modules = [name for name, home in homes.items() if home == module]
    own = [
        name
        for name, value in vars(package).items()
        if not (name.startswith("_") or isinstance(value, ModuleType))
    ]
    return get, lambda: sorted({*own, *listed, *modules}), listed


def _missing(package: str, what: str) -> MissingPackageError:
    name = package.partition(".")[0]
    return MissingPackageError(f"{what} needs {name}: pip install {_EXTRAS[name]}")
