"""Makes the getters and setters of `parallel_state`, one of a kind in one line.

A state keeps what a getter answered until one of its globals is written. Each getter spells out how
it looks there: a call more would cost as much as all the rest.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypercomm.compat.megatron.groups.table import WITH_GTP
from hypercomm.compat.megatron.state.state import (
    QUESTIONS,
    RANK,
    SIZE,
    UNKNOWN,
    ParallelState,
    current,
)

Answer = TypeVar("Answer")
Function = TypeVar("Function")
Setter = Callable[[int | None], None]

_FACTS: dict[str, tuple[Callable[[Any], int], str]] = {
    SIZE: (lambda group: group.size(), "Return the size of the"),
    RANK: (lambda group: group.rank(), "Return the position of the calling rank in the"),
}
_state = current.get


class GroupGetter(Protocol):
    """A function that returns a group of the calling rank; without the check, None for none."""

    def __call__(self, check_initialized: bool = True) -> ProcessGroup:
        """Return the group."""


def of_state(compute: Callable[[ParallelState], Answer]) -> Callable[[], Answer]:
    """Make a getter of a function of the state that depends on nothing else."""
    QUESTIONS[compute] = UNKNOWN

    def get() -> Any:
        state = current.alone or _state()
        answer = state.answers[compute]
        return state.answer(compute) if answer is UNKNOWN else answer

    return _described(get, compute.__doc__)


def group_getter(name: str, *, with_gtp: bool = False) -> GroupGetter:
    """Make a getter of what a global holds: a group, or a list.

    Args:
        name: The global.
        with_gtp: Whether the one with GTP peers answers for it, where the state has it so.
    """

    def compute(state: ParallelState) -> Any:
        return state.require(_chosen(state, name, with_gtp))

    QUESTIONS[compute] = UNKNOWN

    def get(check_initialized: bool = True) -> Any:
        state = current.alone or _state()
        if not check_initialized:
            return state.read(_chosen(state, name, with_gtp))
        answer = state.answers[compute]
        return state.answer(compute) if answer is UNKNOWN else answer

    return _described(get, f"Return the {_words(name)} of the calling rank.")


def fact_getter(
    fact: str,
    name: str,
    override: str | None = None,
    *,
    offline: bool = False,
    with_gtp: bool = False,
    absent: Callable[[ParallelState], int | None] | None = None,
) -> Callable[[], int]:
    """Make a getter of a group's size or rank.

    Args:
        fact: `SIZE` or `RANK`.
        name: The global that holds the group.
        override: The global whose value wins, less its end.
        offline: Whether the getter answers 0 without torch.distributed, as some of Megatron's do.
        with_gtp: As for `group_getter`.
        absent: Answers where there is no group; default: that is an error.
    """
    ask, words = _FACTS[fact]
    given = override and override + fact

    def compute(state: ParallelState) -> Any:
        if given is not None and state.values[given] is not None:
            return state.values[given]
        chosen = _chosen(state, name, with_gtp)
        group = state.values[chosen]
        if group is not None:
            return ask(group)
        if absent is None:
            raise state.missing(chosen)
        return absent(state)

    get = of_state(compute)

    def get_or_0() -> Any:
        state = current.alone or _state()
        if not dist.is_initialized():
            return (given and state.values[given]) or 0
        answer = state.answers[compute]
        return state.answer(compute) if answer is UNKNOWN else answer

    return _described(get_or_0 if offline else get, f"{words} {_words(name)}.")


def listed_getter(
    which: str, name: str, place: Callable[[], int] | None = None
) -> Callable[[], int]:
    """Make a getter of one of the ranks that a global lists.

    Args:
        which: A word for it.
        name: The global.
        place: Returns its place in the list; default: it is the first.
    """

    def get() -> Any:
        state = current.alone or _state()
        ranks = state.values[name]
        if ranks is None:
            raise state.missing(name)
        return ranks[0 if place is None else place()]

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


def _chosen(state: ParallelState, name: str, with_gtp: bool) -> str:
    return name + WITH_GTP if with_gtp and state.answers_gtp else name


def _words(name: str) -> str:
    return name.strip("_").replace("_", " ").lower()


def _described(function: Function, doc: str | None) -> Function:
    function.__doc__ = doc
    return function
