"""Makes `megatron.core` resolve to the modules of this package, and undoes it.

Modules that are imported later get ours from a finder. Modules that already hold one of
Megatron's, or a function or class of one, are given ours in their place.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

from hypercomm.errors import InstallError

_HOMES = {
    f"megatron.core.{name}": f"hypercomm.compat.megatron.{home}"
    for name, home in [
        ("parallel_state", "parallel_state"),
        ("mpu", "parallel_state"),
        ("hyper_comm_grid", "hyper_comm_grid"),
        ("process_groups_config", "process_groups_config"),
    ]
}
_PACKAGES = ("megatron", "megatron.core")


class _Hold(NamedTuple):
    """A name in a module that stands for something of an old module."""

    holder: ModuleType
    name: str
    value: object
    replacement: object


class _Finder(MetaPathFinder, Loader):
    """Finds the modules that are replaced, and empty packages where megatron-core is missing."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names
        self.replaced: dict[str, ModuleType] = {}
        """The modules of Megatron's that had been imported."""
        self.holds: list[_Hold] = []
        """What was given ours in their place."""

    def find_spec(self, fullname: str, *_: object) -> ModuleSpec | None:
        if fullname not in self._names:
            return None
        return ModuleSpec(fullname, self, is_package=fullname in _PACKAGES)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        if spec.name in _PACKAGES:
            return None
        module = importlib.import_module(_HOMES[spec.name])
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        spec = module.__spec__
        if spec is None or spec.name in _PACKAGES:
            return
        module.__spec__ = spec.loader_state  # a module of ours keeps its own


_replace = _Finder(tuple(_HOMES))  # before all others
_invent = _Finder(_PACKAGES)  # after all others


def install() -> None:
    """Make `megatron.core`'s parallel_state, mpu, hyper_comm_grid and process_groups_config ours.

    It works with megatron-core installed or not, and is best called before `megatron.core` is
    imported. Where that was imported, every module that holds one of its modules, functions or
    classes under a name of its own gets ours instead; what is inside of classes, dicts, closures
    or default arguments is not looked for. A second call changes nothing.

    Raises:
        InstallError: Something holds what cannot be replaced; lists it, and changes nothing.

    Example:
        >>> install()
        >>> from megatron.core import mpu
        >>> mpu.__name__
        'hypercomm.compat.megatron.parallel_state'
        >>> uninstall()
    """
    if _replace in sys.meta_path:
        return
    old = {name: sys.modules[name] for name in _HOMES if name in sys.modules}
    new = {name: importlib.import_module(_HOMES[name]) for name in old}
    holds, obstacles = _look(old, new, list(sys.modules.values()))
    state = old.get("megatron.core.parallel_state")
    if state is not None and state.is_initialized():
        obstacles.insert(0, f"{state.__name__} is initialised; call its destroy_model_parallel()")
    if obstacles:
        raise InstallError(
            "megatron.core cannot be replaced any more; call install() before it is imported. "
            "In the way: " + "; ".join(obstacles)
        )
    sys.meta_path.insert(0, _replace)
    sys.meta_path.append(_invent)
    sys.modules.update(new)
    _replace.replaced, _replace.holds = old, holds
    for hold in holds:
        setattr(hold.holder, hold.name, hold.replacement)


def uninstall() -> None:
    """Undo `install`: Megatron's own modules are back, also where `install` put ours.

    A module outside of `megatron` that imported ours by a name of Megatron's in between keeps it,
    as it may have wanted ours.

    Raises:
        InstallError: The parallel state is initialised, or a state is in use.
    """
    if _replace not in sys.meta_path:
        return
    from hypercomm.compat.megatron.state import current

    if current.default.configuration is not None:
        raise InstallError("the parallel state is initialised; call destroy_model_parallel() first")
    if current.alone is None:
        raise InstallError("a `with parallel_state.use(...)` block is open; leave it first")
    sys.meta_path.remove(_replace)
    sys.meta_path.remove(_invent)
    for hold in _replace.holds:
        if vars(hold.holder).get(hold.name) is hold.replacement:
            setattr(hold.holder, hold.name, hold.value)
    ours = {name: importlib.import_module(home) for name, home in _HOMES.items()}
    for name in _HOMES:
        sys.modules.pop(name, None)
    sys.modules.update(_replace.replaced)
    _replace.replaced, _replace.holds = {}, []
    invented = [name for name in _PACKAGES if _is_invented(sys.modules.get(name))]
    for name in invented:
        del sys.modules[name]
    if "megatron.core" in sys.modules:  # what of it was imported in between holds ours
        theirs = {
            name: importlib.import_module(name.replace(".mpu", ".parallel_state"))
            for name in _HOMES
        }
        holders = [
            module for name, module in sys.modules.items() if name.partition(".")[0] == "megatron"
        ]
        for hold in _look(ours, theirs, holders)[0]:
            setattr(hold.holder, hold.name, hold.replacement)


def _is_invented(module: ModuleType | None) -> bool:
    return module is not None and getattr(module.__spec__, "loader", None) is _invent


def _look(
    old: Mapping[str, ModuleType], new: Mapping[str, ModuleType], holders: Sequence[object]
) -> tuple[list[_Hold], list[str]]:
    """Find who holds what of the old modules, and what keeps it from being replaced."""
    replacements: dict[int, tuple[object, object]] = {}
    obstacles = []
    for name, module in old.items():
        replacements[id(module)] = module, new[name]
        for attribute, value in _public(module):
            replacements[id(value)] = value, getattr(new[name], attribute, None)
            children: list[type] = type.__subclasses__(value) if isinstance(value, type) else []
            obstacles += [f"{child!r} derives from {attribute}" for child in children]
    holds = []
    for holder in holders:
        if not isinstance(holder, ModuleType) or holder in (*old.values(), *new.values()):
            continue
        for name, value in list(vars(holder).items()):
            _, replacement = replacements.get(id(value), (None, None))
            if replacement is not None:
                holds.append(_Hold(holder, name, value, replacement))
            elif id(value) in replacements:
                obstacles.append(f"{holder.__name__} holds {name}, which hypercomm does not have")
    return holds, obstacles


def _public(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """The functions and classes that a module has, wherever they were made."""
    for name, value in vars(module).items():
        home = getattr(value, "__module__", None) or ""
        if isinstance(value, (FunctionType, type)) and home.startswith(
            (module.__name__, "hypercomm.compat.megatron")
        ):
            yield name, value
