"""Makes import paths of another package resolve to modules of ours, and undoes it.

Modules that are imported later get ours from a finder. Modules that already hold one that is
replaced, or a function or class of one, are given ours in its place.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterator, Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import FunctionType, ModuleType
from typing import Any, NamedTuple

import attrs

from hypercomm.compat.module_state import CurrentState
from hypercomm.errors import InstallError


class _Hold(NamedTuple):
    """A name in a module that stands for something of an old module."""

    holder: ModuleType
    name: str
    value: object
    replacement: object


@attrs.define(eq=False)
class Replacement(MetaPathFinder, Loader):
    """Modules of another package, and ours that stand in for them.

    Args:
        homes: The module of ours for each path that is replaced.
        packages: The packages that the paths are in, the outermost first; they are made up empty
            where the package is not installed.
        state: The path of the module that has a state.
        is_busy: Its function that tells whether the state is initialised.
        advice: What a user does about it.
        current: Which state the functions of ours act on.
        aliases: Paths that are attributes rather than modules, by what they stand for.
    """

    homes: Mapping[str, str]
    packages: Sequence[str]
    state: str
    is_busy: str
    advice: str
    current: CurrentState[Any]
    aliases: Mapping[str, str] = attrs.field(factory=dict)
    _replaced: dict[str, ModuleType] = attrs.field(factory=dict, init=False)
    _holds: list[_Hold] = attrs.field(factory=list, init=False)
    _inventor: _Inventor = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self._inventor = _Inventor(self.packages)

    @property
    def installed(self) -> bool:
        """Whether the paths resolve to ours."""
        return self in sys.meta_path

    def install(self) -> None:
        """Let the paths resolve to ours, also where they were imported before.

        Raises:
            InstallError: Something holds what cannot be replaced; lists it, and changes nothing.
        """
        if self.installed:
            return
        old = {name: sys.modules[name] for name in self.homes if name in sys.modules}
        new = {name: importlib.import_module(self.homes[name]) for name in old}
        holds, obstacles = _look(old, new, list(sys.modules.values()))
        state = old.get(self.state)
        if state is not None and getattr(state, self.is_busy)():
            obstacles.insert(0, f"{state.__name__} is initialised; {self.advice}")
        if obstacles:
            raise InstallError(
                f"{self.packages[-1]} cannot be replaced any more; call install() before it is "
                f"imported. In the way: {'; '.join(obstacles)}"
            )
        sys.meta_path.insert(0, self)
        sys.meta_path.append(self._inventor)
        sys.modules.update(new)
        self._replaced, self._holds = old, holds
        for name, module in old.items():
            _lend_path(new[name], getattr(module, "__path__", None))
            _pass_on_submodules(name, None, new[name])
        for hold in holds:
            setattr(hold.holder, hold.name, hold.replacement)

    def uninstall(self) -> None:
        """Undo `install`.

        Raises:
            InstallError: The state of ours is initialised, or one is in use.
        """
        if not self.installed:
            return
        if self.current.alone is None:
            module = self.homes[self.state].rpartition(".")[2]
            raise InstallError(f"a `with {module}.use(...)` block is open; leave it first")
        ours = {name: importlib.import_module(home) for name, home in self.homes.items()}
        if getattr(ours[self.state], self.is_busy)():
            raise InstallError(f"{self.homes[self.state]} is initialised; {self.advice}")
        sys.meta_path.remove(self)
        sys.meta_path.remove(self._inventor)
        for hold in self._holds:
            if vars(hold.holder).get(hold.name) is hold.replacement:
                setattr(hold.holder, hold.name, hold.value)
        for name in self.homes:
            sys.modules.pop(name, None)
            _lend_path(ours[name], None)
            _pass_on_submodules(name, ours[name], self._replaced.get(name))
        sys.modules.update(self._replaced)
        self._replaced, self._holds = {}, []
        invented = [name for name in self.packages if self._inventor.made(sys.modules.get(name))]
        for name in invented:
            del sys.modules[name]
        if self.packages[-1] in sys.modules:  # what of it was imported in between holds ours
            self._give_back(ours)

    def _give_back(self, ours: Mapping[str, ModuleType]) -> None:
        paths = {name: self.aliases.get(name, name) for name in self.homes}
        found = {name: path for name, path in paths.items() if importlib.util.find_spec(path)}
        theirs = {}
        for name, path in found.items():
            try:
                theirs[name] = importlib.import_module(path)
            except Exception:  # noqa: BLE001 - whatever keeps it from working without us too
                parent, _, child = name.rpartition(".")
                if vars(sys.modules[parent]).get(child) is ours[name]:
                    delattr(sys.modules[parent], child)
                continue
            _pass_on_submodules(name, None, theirs[name])
        root = self.packages[0]
        holders = [module for name, module in sys.modules.items() if name.split(".")[0] == root]
        for hold in _look({name: ours[name] for name in theirs}, theirs, holders)[0]:
            setattr(hold.holder, hold.name, hold.replacement)

    # ---- as a finder, before all others, and as a loader -------------------------------------

    def find_spec(self, fullname: str, path: Sequence[str] | None, *_: object) -> ModuleSpec | None:
        """Find a path that is replaced."""
        if fullname not in self.homes:
            return None
        spec = ModuleSpec(fullname, self)
        for finder in sys.meta_path:
            theirs = None if finder is self else finder.find_spec(fullname, path)
            if theirs is not None:  # its submodules stay where they are
                spec.submodule_search_locations = theirs.submodule_search_locations
                break
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Take the module of ours; the import system writes the found spec into it."""
        module = importlib.import_module(self.homes[spec.name])
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own spec back: it was executed before."""
        spec = module.__spec__
        if spec is not None and spec.name in self.homes:
            module.__spec__ = spec.loader_state
            _lend_path(module, spec.submodule_search_locations)


class _Inventor(MetaPathFinder, Loader):
    """Finds empty packages, after all other finders."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = names

    def find_spec(self, fullname: str, *_: object) -> ModuleSpec | None:
        return ModuleSpec(fullname, self, is_package=True) if fullname in self._names else None

    def create_module(self, spec: ModuleSpec) -> None:
        """Let the import system make an empty one."""

    def exec_module(self, module: ModuleType) -> None:
        """Leave it empty."""

    def made(self, module: ModuleType | None) -> bool:
        return module is not None and getattr(module.__spec__, "loader", None) is self


def _lend_path(module: ModuleType, path: Any) -> None:
    """Let submodules of a module of ours be found where those of the replaced one are."""
    if path is not None:
        module.__path__ = path
    elif "__path__" in vars(module):
        del module.__path__


def _pass_on_submodules(name: str, old: ModuleType | None, new: ModuleType | None) -> None:
    """Move what was imported from within a package from one module of its name to the next."""
    for path, module in list(sys.modules.items()):
        parent, _, child = path.rpartition(".")
        if parent == name:
            if old is not None and vars(old).get(child) is module:
                delattr(old, child)
            if new is not None:
                setattr(new, child, module)


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
            (module.__name__, "hypercomm.compat")
        ):
            yield name, value
