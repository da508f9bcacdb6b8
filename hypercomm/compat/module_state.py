"""One mechanism for the globals of a legacy module: read, written, deleted, switched for a scope.

Legacy code reads and writes `module._SOME_GLOBAL` from outside. Here the values live in an object;
the module has a descriptor for each name, which acts on the current object. What getters answer is
kept until the next write, so that a getter costs two lookups.
"""

from __future__ import annotations

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from types import ModuleType
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from torch.distributed import ProcessGroup

from hypercomm.errors import StateError
from hypercomm.process_groups import c10d
from hypercomm.process_groups.world import process_wide

if TYPE_CHECKING:
    from typing_extensions import Self

UNKNOWN = object()
"""Stands for an answer that was not computed since the last write."""

_STEADY = {type(None), bool, int, str, list, tuple, dict, ProcessGroup}
"""Types of which nothing that answers depend on changes by itself; a mock's size may."""


class ModuleState:
    """The values of one legacy module's globals.

    Args:
        blank: For each global, what makes its value at rest.

    Attributes:
        questions: The functions that compute what getters answer, each with `UNKNOWN`.
        values: The value of each global.
        answers: What getters answered since the last write, by question, else `UNKNOWN`. Its keys
            do not change, so that what `torch.compile` made of one getter outlives another's call.

    Example:
        >>> state = ModuleState({"_SIZE": lambda: None})
        >>> state.write("_SIZE", 4)
        >>> state.read("_SIZE"), state.answer(lambda state: state.values["_SIZE"] * 2)
        (4, 8)
    """

    questions: ClassVar[dict[Callable[[Any], Any], Any]] = {}

    def __init__(self, blank: Mapping[str, Callable[[], Any]]) -> None:
        self._blank = blank
        self.reset()

    def reset(self) -> None:
        """Put every global to its value at rest."""
        self.values: dict[str, Any] = {name: make() for name, make in self._blank.items()}
        self._deleted: set[str] = set()
        self._restless: set[str] = set()
        self._may_settle = False
        self.forget_answers()

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
        self._deleted.discard(name)
        self.values[name] = value
        if type(value) in _STEADY:
            self._restless.discard(name)
        else:
            self._restless.add(name)
        self.forget_answers()

    def delete(self, name: str) -> None:
        """Delete a global, as `del module.name` does; `mock.patch` deletes and sets again."""
        self.read(name)
        self.write(name, self._blank[name]())
        self._deleted.add(name)

    def fill(self, values: Mapping[str, Any]) -> None:
        """Set many globals to what is our own, and let answers be kept from now on."""
        self.values.update(values)
        self._deleted -= values.keys()
        self._restless -= values.keys()
        self._may_settle = True
        self.forget_answers()

    def names(self) -> list[str]:
        """List the globals that were not deleted."""
        return [name for name in self.values if name not in self._deleted]

    @property
    def settled(self) -> bool:
        """Whether answers are kept."""
        return self._may_settle and not self._restless

    def answer(self, question: Callable[[Any], Any]) -> Any:
        """Compute an answer that is not known, and keep it where it will stay right."""
        answers = self.answers
        answer = question(self)
        if self.settled:
            answers[question] = answer
        return answer

    def forget_answers(self) -> None:
        """Let every getter compute its answer anew."""
        # A new dict: a thread that computes an answer right now keeps it in the old one.
        self.answers = self.questions.copy()


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
        process_wide.add(self)

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
        """Give a module one attribute for each name, which reads and writes the current state.

        The module calls this when it has all of its getters.
        """
        self.default.forget_answers()  # it is older than the getters
        members: dict[str, Any] = {name: _Global(name, self.get) for name in names}
        current = self.get
        members["__dir__"] = lambda self: [*ModuleType.__dir__(self), *current().names()]
        module.__class__ = type("LegacyModule", (ModuleType,), members)


class _Global:
    """A module's attribute whose value lives in the current state."""

    def __init__(self, name: str, current: Callable[[], ModuleState]) -> None:
        self._name = name
        self._current = current

    def __get__(self, module: ModuleType, kind: type) -> Any:
        return self._current().read(self._name)

    def __set__(self, module: ModuleType, value: Any) -> None:
        self._current().write(self._name, value)

    def __delete__(self, module: ModuleType) -> None:
        self._current().delete(self._name)
