"""Makes the getters and setters of `parallel_state`, one of a kind in one line.

What a getter answers is kept with the current state until a global is written, so that it costs
one attribute and one dict lookup. Each spells the lookup out: a call more would double it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from torch.distributed import ProcessGroup

from hypercomm.compat.megatron.state import ParallelState, current
from hypercomm.compat.module_state import UNKNOWN
from hypercomm.errors import StateError
from hypercomm.process_groups.c10d import is_live

Answer = TypeVar("Answer")
Function = TypeVar("Function")
Compute = Callable[[ParallelState], Answer]
Setter = Callable[[int | None], None]

SIZE, RANK = "WORLD_SIZE", "RANK"
"""What can be asked of a group, by the end of the global that overrides it."""

_FACTS: dict[str, tuple[Callable[[ParallelState, str, str | None], int], str]] = {
    SIZE: (ParallelState.size_in, "Return the size of the"),
    RANK: (ParallelState.rank_in, "Return the position of the calling rank in the"),
}
_state = current.get


class GroupGetter(Protocol):
    """A function that returns a group of the calling rank; without the check, None for none."""

    def __call__(self, check_initialized: bool = True) -> ProcessGroup:
        """Return the group."""


class DataParallelGetter(Protocol):
    """A function that returns a fact of a data parallel group."""

    def __call__(
        self, with_context_parallel: bool = False, partial_data_parallel: bool = False
    ) -> int:
        """Return the fact."""


def answered(compute: Compute[Answer]) -> Callable[[], Answer]:
    """Make a getter of a function of the state."""
    known(compute)

    def get() -> Any:
        state = current.alone or _state()
        answer = state.answers[compute]
        return state.answer(compute) if answer is UNKNOWN else answer

    return _described(get, compute.__doc__)


def group_getter(name: str) -> GroupGetter:
    """Make a getter of what a global holds: a group, or a list."""

    def compute(state: ParallelState) -> Any:
        return state.require(name)

    known(compute)

    def get(check_initialized: bool = True) -> Any:
        state = current.alone or _state()
        if not check_initialized:
            return state.read(name)
        answer = state.answers[compute]
        return state.answer(compute) if answer is UNKNOWN else answer

    return _described(get, f"Return the {_words(name)} of the calling rank.")


def fact_getter(
    fact: str, name: str, override: str | None = None, *, offline: bool = False
) -> Callable[[], int]:
    """Make a getter of a group's size or rank.

    Args:
        fact: `SIZE` or `RANK`.
        name: The global that holds the group.
        override: The global whose value wins, less its end.
        offline: Whether the getter answers 0 without torch.distributed, as some of Megatron's do.
    """
    compute = _compute(fact, name, override)

    def get_offline() -> Any:
        state = current.alone or _state()
        if not is_live():
            return _offline(state, fact, override)
        answer = state.answers[compute]
        return state.answer(compute) if answer is UNKNOWN else answer

    get = get_offline if offline else answered(compute)
    return _described(get, f"{_FACTS[fact][1]} {_words(name)}.")


def data_parallel_getter(
    fact: str, plain: str, with_cp: str, partial: str, override: str
) -> DataParallelGetter:
    """Make a getter of a size or rank in a data parallel group, which arguments choose."""
    of_plain, of_cp, of_part = (
        _compute(fact, name, override) for name in (plain, with_cp, partial)
    )

    def refuse(state: ParallelState) -> Any:
        if state.values[override + fact] is None:
            raise partial_without_cp()
        return state.values[override + fact]

    known(refuse)

    def get(with_context_parallel: bool = False, partial_data_parallel: bool = False) -> Any:
        state = current.alone or _state()
        if not is_live():
            return _offline(state, fact, override)
        compute = of_plain
        if with_context_parallel:
            compute = of_part if partial_data_parallel else of_cp
        elif partial_data_parallel:
            compute = refuse
        answer = state.answers[compute]
        return state.answer(compute) if answer is UNKNOWN else answer

    return _described(get, f"{_FACTS[fact][1]} {_words(plain)}.")


def expert_data_parallel_getter(fact: str, plain: str, partial: str) -> Callable[[bool], int]:
    """Make a getter of a size or rank in an expert data parallel group."""
    of_plain, of_part = _compute(fact, plain, None), _compute(fact, partial, None)

    def get(partial_expert_data_parallel: bool = False) -> Any:
        state = current.alone or _state()
        if not is_live():
            return 0
        compute = of_part if partial_expert_data_parallel else of_plain
        answer = state.answers[compute]
        return state.answer(compute) if answer is UNKNOWN else answer

    return _described(get, f"{_FACTS[fact][1]} {_words(plain)}.")


def listed_getter(which: str, name: str, place: Compute[int] = lambda _: 0) -> Callable[[], int]:
    """Make a getter of one of the ranks that a global lists; the list itself may be changed.

    Args:
        which: A word for it.
        name: The global.
        place: Computes its place in the list.
    """
    known(place)

    def get() -> Any:
        state = current.alone or _state()
        ranks = state.values[name]
        if ranks is None:
            raise state.missing(name)
        answer = state.answers[place]
        return ranks[state.answer(place) if answer is UNKNOWN else answer]

    return _described(get, f"Return the {which} of the {_words(name)}.")


def size_setter(name: str) -> Setter:
    """Make a setter whose argument is a world size."""

    def set_world_size(world_size: int | None) -> None:
        _state().write(name, world_size)

    return _described(set_world_size, f"Set {name}, which getters prefer to what a group says.")


def rank_setter(name: str) -> Setter:
    """Make a setter whose argument is a rank."""

    def set_rank(rank: int | None) -> None:
        _state().write(name, rank)

    return _described(set_rank, f"Set {name}, which getters prefer to what a group says.")


def partial_without_cp() -> StateError:
    """Make the error for a part of a group that exists only with context parallel."""
    return StateError("partial_data_parallel=True needs with_context_parallel=True")


def name_functions(module: str, namespace: dict[str, Any]) -> None:
    """Give each made function of a module the name that it has there."""
    for name, value in namespace.items():
        if "<locals>" in getattr(value, "__qualname__", ""):
            value.__name__ = value.__qualname__ = name
            value.__module__ = module


def _compute(fact: str, name: str, override: str | None) -> Compute[int]:
    ask, _ = _FACTS[fact]
    return known(lambda state: ask(state, name, override and override + fact))


def known(compute: Compute[Answer]) -> Compute[Answer]:
    """Let states keep the answers of a function."""
    ParallelState.questions[compute] = UNKNOWN
    return compute


def _offline(state: ParallelState, fact: str, override: str | None) -> int:
    return (override and state.values[override + fact]) or 0


def _words(name: str) -> str:
    return name.strip("_").replace("_", " ").lower()


def _described(function: Function, doc: str | None) -> Function:
    function.__doc__ = doc
    return function
