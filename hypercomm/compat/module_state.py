"""Keeps the globals of a legacy module in states, so that several states can exist.

Programs read, write and delete the globals as attributes of the module. For each global, the module
has a property that reads and writes the value in the current state. A `with use(state):` block
changes the current state.
"""

from __future__ import annotations

import contextlib
import importlib
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import torch.distributed as dist

from hypercomm.errors import StateError

if TYPE_CHECKING:
    from typing_extensions import Self

    from hypercomm.grid import HyperCommGrid


class ModuleState:
    """The values of the globals of a legacy module.

    A subclass must define a method `initialize` that creates groups.

    Attributes:
        empty: Maps each global to a function that returns the empty value of the global.
        values: The value of each global.
        grid: The grid that the state created, or None in an empty state.
        current: The current state of the module.
        strict: Whether a call outside `use` raises while several states are alive.

    Example:
        >>> class Sizes(ModuleState):
        ...     empty = {"_SIZE": lambda: None}
        >>> state = Sizes()
        >>> state.write("_SIZE", 4)
        >>> state.delete("_SIZE")
        >>> state.values
        {}
    """

    empty: ClassVar[Mapping[str, Callable[[], Any]]] = {}
    current: ClassVar[CurrentState[Any]]
    grid: HyperCommGrid | None = None
    strict = False
    initialize: Callable[..., None]

    def __init__(self) -> None:
        self.values: dict[str, Any] = {}
        self.reset()

    @classmethod
    def create(cls, *args: Any, **kwargs: Any) -> Self:
        """Return an initialised state. Every rank must call this, in the same order.

        See `initialize` for the arguments and errors.
        """
        state = cls()
        state.initialize(*args, **kwargs)
        return state

    def reset(self) -> None:
        """Set every global to its empty value."""
        self.values.clear()
        self.values.update({name: make() for name, make in self.empty.items()})

    def check_new(self, names: Iterable[str], destroy: str, read: Callable[[int], Any]) -> Any:
        """Raise unless torch.distributed is initialised and the state is empty.

        Args:
            names: The globals that must be empty.
            destroy: The name of the function that empties these globals.
            read: A function that checks the arguments. It is called with the world size.

        Returns:
            The return value of `read`.

        Raises:
            StateError: torch.distributed is not initialised, or one of the globals is set.
        """
        if not dist.is_initialized():
            raise StateError(
                "torch.distributed is not initialised; call torch.distributed.init_process_group()"
            )
        found = read(dist.get_world_size())
        if taken := list(filter(self.values.get, names)):
            raise StateError(
                f"{self.current.name} is already initialized: {taken[0]} is set; call {destroy}() "
                f"first, or create a second state with {type(self).__name__}.create(), and enter "
                f"use(state)"
            )
        return found

    def destroy(self) -> None:
        """Destroy the state's groups, and empty the state. A second call has no effect."""
        grid = self.grid
        self.grid = None
        self.reset()
        self.current.drop(self)
        if grid is not None:
            grid.destroy()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.destroy()

    def __str__(self) -> str:
        return "an empty state" if self.grid is None else str(self.grid.layout)

    def read(self, name: str) -> Any:
        """Return the value of a global, for `module.name`."""
        try:
            return self.values[name]
        except KeyError:
            raise AttributeError(f"the global {name!r} was deleted") from None

    def write(self, name: str, value: Any) -> None:
        """Set a global, for `module.name = value`."""
        self.values[name] = value

    def delete(self, name: str) -> None:
        """Delete a global, for `del module.name`. `mock.patch` needs this."""
        self.read(name)
        del self.values[name]


State = TypeVar("State", bound=ModuleState)


class CurrentState(Generic[State]):
    """Selects the state that a module's functions act on.

    This is the state of the innermost `use` block, or the default state outside all blocks.

    A block changes the current state only for the thread or asyncio task that entered the block. A
    state is alive from its initialisation until it is destroyed.

    Attributes:
        name: The name of the module.
        default: The state outside all blocks.
        values: The globals of the current state. If no block is open and only the default state is
            alive, this is the dict of the default state, which `torch.compile` can trace.
    """

    def __init__(self, name: str, kind: type[State]) -> None:
        self.name = name
        self._kind = kind
        kind.current = self
        self._scoped: ContextVar[State | None] = ContextVar(name, default=None)
        self._lock = threading.RLock()
        self._begin()

    def _begin(self) -> None:
        self.default = self._kind()
        self.values: dict[str, Any] | _Selected = self.default.values
        self._open = 0
        self._alive: list[State] = []
        self._warned = False

    @contextlib.contextmanager
    def fresh(self) -> Iterator[None]:
        """Replace the default state by an empty state in a `with` block, as in a new process."""
        kept = vars(self).copy()
        token = self._scoped.set(None)
        self._begin()
        try:
            yield
        finally:
            vars(self).update(kept)
            self._scoped.reset(token)

    def get(self) -> State:
        """Return the current state. Warn once if it is the default and other states are alive.

        Raises:
            StateError: The same condition holds, and one of the states is strict.
        """
        if self.values is self.default.values:
            return self.default
        state = self._scoped.get()
        if state is None:
            state = self.default
            if len(self._alive) > 1 and state in self._alive:
                self._ambiguous()
        return state

    def _ambiguous(self) -> None:
        others = "; ".join(str(state) for state in self._alive if state is not self.default)
        problem = (
            f"{self.name} has {len(self._alive)} states alive, and a call outside all "
            f"`with use(state):` blocks acts on the default state ({self.default}), not on: "
            f"{others}; move the call into a block"
        )
        if any(state.strict for state in self._alive):
            raise StateError(problem)
        if not self._warned:
            self._warned = True
            warnings.warn(problem, RuntimeWarning, stacklevel=5)

    @contextlib.contextmanager
    def use(self, state: State) -> Iterator[State]:
        """Make `state` the current state within a `with` block."""
        if not isinstance(state, ModuleState):
            raise StateError(f"use() needs a state, got {state!r}")
        self._count(1)
        token = self._scoped.set(state)
        try:
            yield state
        finally:
            self._count(-1)
            self._scoped.reset(token)  # last, because reset raises if the context has changed

    def keep(self, state: State) -> None:
        """Count a state as alive."""
        self._alive.append(state)
        self._count(0)

    def drop(self, state: State) -> None:
        """Stop counting a state as alive."""
        self._alive = [each for each in self._alive if each is not state]
        self._warned = self._warned and len(self._alive) > 1
        self._count(0)

    def _count(self, change: int) -> None:
        with self._lock:
            self._open += change
            is_alone = all(state is self.default for state in self._alive)
            self.values = self.default.values if is_alone and not self._open else _Selected(self)

    def bind(self, module: ModuleType, names: Iterable[str]) -> None:
        """Give a module attributes that read and write the globals of the current state."""
        members: dict[str, Any] = {name: _global(name, self.get) for name in names}
        # cloudpickle pickles the module together with functions that use it.
        members["__reduce__"] = lambda module: (importlib.import_module, (module.__name__,))
        module.__class__ = type("LegacyModule", (ModuleType,), members)


class _Selected:
    """The globals of the state that is current at the time of each access."""

    def __init__(self, current: CurrentState[Any]) -> None:
        self._current = current

    def __getitem__(self, name: str) -> Any:
        return self._current.get().values[name]


def _global(name: str, current: Callable[[], ModuleState]) -> property:
    """Return a property that reads, writes and deletes a global of the current state."""
    return property(
        lambda _: current().read(name),
        lambda _, value: current().write(name, value),
        lambda _: current().delete(name),
    )
