"""Makes the getters and setters of `parallel_state`, each in one line.

A getter reads the current state directly: one further function call would double its time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from torch.distributed import ProcessGroup

from hypercomm.compat.megatron.state import FACTS, RANK, SIZE, Fact, current
from hypercomm.compat.megatron.table import WITH_GTP

Function = TypeVar("Function")
_state = current.get


class GroupGetter(Protocol):
    """A function that returns a group of the calling rank; without the check, None if absent."""

    def __call__(self, check_initialized: bool = True) -> ProcessGroup:
        """Return the group."""


def group_getter(name: str) -> GroupGetter:
    """Return a getter of the value of a global: a group, or a list."""

    def get(check_initialized: bool = True) -> Any:
        state = current.alone or _state()
        held = state.values[name]
        if held is None and check_initialized:
            raise state.missing(name)
        return held

    return _described(get, f"Return the {_words(name)} of the calling rank.")


def data_group_getter(name: str) -> GroupGetter:
    """Return a getter of a data parallel group, with the GTP peers if the state has it so."""
    with_gtp = name + WITH_GTP

    def get(check_initialized: bool = True) -> Any:
        state = current.alone or _state()
        held = state.values[with_gtp if state.answers_gtp else name]
        if held is None and check_initialized:
            raise state.missing(state.chosen(name))
        return held

    return _described(get, f"Return the {_words(name)} of the calling rank, with GTP peers.")


def size_getter(group: str, override: str | None = None, **options: Any) -> Callable[[], int]:
    """Return a getter of the size of a group; options as for `Fact`."""
    return _fact_getter("Return the size of the", Fact(SIZE, group, override, **options))


def rank_getter(group: str, override: str | None = None, **options: Any) -> Callable[[], int]:
    """Return a getter of the calling rank's position in a group; options as for `Fact`."""
    what = "Return the position of the calling rank in the"
    return _fact_getter(what, Fact(RANK, group, override, **options))


def key_of(fact: Fact) -> str:
    """Register a fact, and return the key under which states hold it."""
    key = repr(fact)
    FACTS[key] = fact
    return key


def _fact_getter(what: str, fact: Fact) -> Callable[[], int]:
    key = key_of(fact)

    def get() -> Any:
        state = current.alone or _state()
        known = state.facts[key]
        return fact.ask(state) if known is None else known

    return _described(get, f"{what} {_words(fact.group)}.")


def first_getter(name: str) -> Callable[[], int]:
    """Return a getter of the first rank that a global lists."""

    def get() -> Any:
        return _state().require(name)[0]

    return _described(get, f"Return the first of the {_words(name)}.")


def size_setter(name: str) -> Callable[[int | None], None]:
    """Return a setter of a global, whose argument is a world size."""

    def set_world_size(world_size: int | None) -> None:
        _state().write(name, world_size)

    return _described(set_world_size, f"Set {name}, which getters prefer to the size of the group.")


def rank_setter(name: str) -> Callable[[int | None], None]:
    """Return a setter of a global, whose argument is a rank."""

    def set_rank(rank: int | None) -> None:
        _state().write(name, rank)

    return _described(set_rank, f"Set {name}, which getters prefer to the rank in the group.")


def _words(name: str) -> str:
    return name.strip("_").replace("_", " ").lower()


def _described(function: Function, doc: str) -> Function:
    function.__doc__ = doc
    return function
