"""Makes the getters and setters of `parallel_state`, each in one line.

A getter reads the current state directly: one further function call would double its time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from torch.distributed import ProcessGroup
from torch.distributed import distributed_c10d as torch_c10d

from hypercomm.compat.megatron.state import FACTS, RANK, SIZE, Fact, Kind, current
from hypercomm.compat.megatron.table import WITH_GTP

Function = TypeVar("Function")
_state = current.get


class GroupGetter(Protocol):
    """A function that returns a group of the calling rank; without the check, None if absent."""

    def __call__(self, check_initialized: bool = True) -> ProcessGroup:
        """Return the group."""


class DataFactGetter(Protocol):
    """A function that returns a size or a rank in one of the data parallel groups."""

    def __call__(
        self,
        with_context_parallel: bool = False,
        *,
        with_gtp_remat: bool = True,
        partial_data_parallel: bool = False,
    ) -> int:
        """Return it."""


class ExpertFactGetter(Protocol):
    """A function that returns a size or a rank in one of the expert data parallel groups."""

    def __call__(
        self, *, with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False
    ) -> int:
        """Return it."""


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


def size_getter(group: str, override: str = "", **options: Any) -> Callable[[], int]:
    """Return a getter of the size of a group; options as for `Fact`."""
    return _fact_getter(Fact(SIZE, group, override, **options))


def rank_getter(group: str, override: str = "", **options: Any) -> Callable[[], int]:
    """Return a getter of the calling rank's position in a group; options as for `Fact`."""
    return _fact_getter(Fact(RANK, group, override, **options))


def _fact_getter(fact: Fact) -> Callable[[], int]:
    key = _key_of(fact)

    def get() -> Any:
        state = current.alone or _state()
        known = state.facts[key]
        return fact.ask(state) if known is None else known

    def get_in_job() -> Any:
        state = current.alone or _state()
        known = state.facts[key]
        if known is None or torch_c10d._world._default_pg is None:
            return fact.ask(state)
        return known

    getter = get_in_job if fact.offline else get
    return _described(getter, f"Return the {fact.words} {_words(fact.group)}.")


def data_fact_getter(kind: Kind, dp: str, dp_cp: str, part: str, override: str) -> DataFactGetter:
    """Return a getter of a size or rank that chooses a data parallel group as its caller says.

    Args:
        kind: Which of them.
        dp: The global of the data parallel group.
        dp_cp: That of the group over data and context parallel.
        part: That of its part in one optimizer instance.
        override: As for `Fact`.
    """

    def key_of(group: str, with_gtp: bool) -> str:
        return _key_of(Fact(kind, group, override, with_gtp=with_gtp, offline=True))

    dp_key, dp_cp_key = key_of(dp, True), key_of(dp_cp, True)
    others = {
        (gtp, *which): key_of(group, gtp)
        for gtp in (True, False)
        for which, group in {(False, False): dp, (True, False): dp_cp, (True, True): part}.items()
    }
    # The part of a group without context parallel does not exist.
    no_group = key_of("", False)

    def get(
        with_context_parallel: bool = False,
        *,
        with_gtp_remat: bool = True,
        partial_data_parallel: bool = False,
    ) -> Any:
        if with_gtp_remat and not partial_data_parallel:
            key = dp_cp_key if with_context_parallel else dp_key
        else:
            flags = bool(with_gtp_remat), bool(with_context_parallel), bool(partial_data_parallel)
            key = others.get(flags, no_group)
        state = current.alone or _state()
        known = state.facts[key]
        if known is None or torch_c10d._world._default_pg is None:
            return FACTS[key].ask(state)
        return known

    return _described(
        get, f"Return the {FACTS[dp_key].words} group that `get_data_parallel_group` returns."
    )


def expert_fact_getter(kind: Kind, dp: str, part: str) -> ExpertFactGetter:
    """Return a getter of a size or rank in an expert data parallel group, or its part."""
    keys = {
        (gtp, partial): _key_of(Fact(kind, group, with_gtp=gtp, offline=True))
        for gtp in (True, False)
        for partial, group in ((False, dp), (True, part))
    }
    dp_key = keys[True, False]

    def get(*, with_gtp_remat: bool = True, partial_expert_data_parallel: bool = False) -> Any:
        key = dp_key
        if partial_expert_data_parallel or not with_gtp_remat:
            key = keys[bool(with_gtp_remat), bool(partial_expert_data_parallel)]
        state = current.alone or _state()
        known = state.facts[key]
        if known is None or torch_c10d._world._default_pg is None:
            return FACTS[key].ask(state)
        return known

    words = FACTS[dp_key].words
    return _described(get, f"Return the {words} group of `get_expert_data_parallel_group`.")


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


def _key_of(fact: Fact) -> str:
    key = repr(fact)
    FACTS[key] = fact
    return key


def _words(name: str) -> str:
    return name.strip("_").replace("_", " ").lower()


def _described(function: Function, doc: str) -> Function:
    function.__doc__ = doc
    return function
