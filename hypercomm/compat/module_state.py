"""One mechanism for the globals of a legacy module: read, written, deleted, switched for a scope.

Legacy code reads and writes `module._SOME_GLOBAL` from outside. Here the values live in an object;
the module has a descriptor for each name, which acts on the current object.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from types import ModuleType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from hypercomm.errors import StateError
from hypercomm.process_groups import torch_internals as c10d

if TYPE_CHECKING:
    from typing_extensions import Self


class ModuleState:
    """The values of one legacy module's globals.

    Args:
        blank: For each global, what makes its value at rest.

    Attributes:
        values: The value of each global.

    Example:
        >>> state = ModuleState({"_SIZE": lambda: None})
        >>> state.write("_SIZE", 4)
        >>> state.delete("_SIZE")
        >>> state.values["_SIZE"], state.names()
        (None, [])
    """

    def __init__(self, blank: Mapping[str, Callable[[], Any]]) -> None:
        self._blank = blank
        self.reset()

    def reset(self) -> None:
        """Put every global to its value at rest."""
        self._deleted: set[str] = set()
        self.values: dict[str, Any] = {name: make() for name, make in self._blank.items()}
        self.fill(self.values)

    def destroy(self) -> None:
        """Empty the state; one that owns something ends that too. May be called twice."""
        self.reset()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.destroy()

    def read(self, name: str) -> Any:
        """Return the value of a global, as `module.name` does."""
        if name in self._deleted:
            raise AttributeError(f"the global {name!r} was deleted")
        return self.values[name]

    def write(self, name: str, value: Any) -> None:
        """Set a global, as `module.name = value` does; getters follow."""
        self.fill({name: value})

    def delete(self, name: str) -> None:
        """Delete a global, as `del module.name` does; `mock.patch` deletes and sets again."""
        self.read(name)
        self.write(name, self._blank[name]())
        self._deleted.add(name)

    def fill(self, values: Mapping[str, Any]) -> None:
        """Set several globals."""
        self.values.update(values)
        self._deleted -= values.keys()

    def names(self) -> list[str]:
        """List the globals that were not deleted."""
        return [name for name in self.values if name not in self._deleted]


State = TypeVar("State", bound=ModuleState)


class CurrentState(Generic[State]):
    """The state that a module's functions act on: the default one, or that of a scope.

    Each thread and each asyncio task has scopes of its own; a backward pass that is started in a
    scope sees it too, in whichever thread autograd runs it.

    Attributes:
        default: The state outside every scope.
        alone: The default state as long as no scope is open anywhere, else None. What must be fast
            asks it first; `torch.compile` cannot trace the rest of `get`.
    """

    def __init__(self, name: str, kind: Callable[[], State]) -> None:
        self.default = kind()
        self.alone: State | None = self.default
        self._kind = kind
        self._name = name
        self._scoped: ContextVar[State | None] = ContextVar(name, default=None)
        self._open: dict[str, tuple[State, int]] = {}
        self._lock = threading.Lock()
        self._numbers = itertools.count()

    @contextlib.contextmanager
    def fresh(self) -> Iterator[None]:
        """Begin with an empty default state and no scope for a while, as a new process does."""
        kept = self.default, self.alone, self._open
        token = self._scoped.set(None)
        self.default = self.alone = self._kind()
        self._open = {}
        try:
            yield
        finally:
            self.default, self.alone, self._open = kept
            self._scoped.reset(token)

    def get(self) -> State:
        """Return the current state."""
        return self.alone or self._scoped.get() or self._around_backward() or self.default

    @contextlib.contextmanager
    def use(self, state: State) -> Iterator[State]:
        """Make `state` the current one within a `with` block."""
        if not isinstance(state, type(self.default)):
            raise StateError(f"use() takes a {type(self.default).__name__}, got {state!r}")
        key = f"{self._name}/{next(self._numbers)}"
        with self._lock:
            self._open[key] = state, threading.get_ident()
            self.alone = None
        token = self._scoped.set(state)
        c10d.tell_backward(key)
        try:
            yield state
        finally:
            with self._lock:
                del self._open[key]
                self.alone = None if self._open else self.default
            c10d.stop_telling_backward(key)
            self._scoped.reset(token)  # refuses to leave from another context, so it comes last

    def _around_backward(self) -> State | None:
        """Find the innermost scope, of another thread, in which this backward pass was started."""
        for key, (state, thread) in reversed(list(self._open.items())):
            if thread != threading.get_ident() and c10d.was_told_backward(key):
                return state
        return None

    def bind(self, module: ModuleType, names: Iterable[str]) -> None:
        """Give a module one attribute for each name, which reads and writes the current state."""
        members: dict[str, Any] = {name: _global(name, self.get) for name in names}
        members["__dir__"] = lambda module: [*ModuleType.__dir__(module), *self.get().names()]
        module.__class__ = type("LegacyModule", (ModuleType,), members)


def _global(name: str, current: Callable[[], ModuleState]) -> property:
    """A module's attribute whose value lives in the current state."""
    return property(
        lambda _: current().read(name),
        lambda _, value: current().write(name, value),
        lambda _: current().delete(name),
    )


def name_functions(namespace: Mapping[str, Any], module: str, within: str = "") -> None:
    """Give each function that was made within another the name that it has in a namespace.

    Args:
        namespace: That of a module, or of a class.
        module: The module.
        within: The name of the class, and a dot.
    """
    for name, value in namespace.items():
        if "<locals>" in getattr(value, "__qualname__", ""):
            value.__name__, value.__qualname__ = name, within + name
            value.__module__ = module
