"""Joint creation: batches of several grids, all or none over all ranks that are in one of them.

Each rank creates its part, and then meets the others once. Whoever fails ends that meeting, so that
all ranks take back what they have, and count alike that they failed: a retry gets other names.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from hypercomm.errors import GroupCreationTimeout
from hypercomm.layout import RankLayout
from hypercomm.process_groups import c10d
from hypercomm.process_groups.agreement import Agreement
from hypercomm.process_groups.assembly import Assembly, End, limit_of
from hypercomm.process_groups.c10d.time_limits import answer
from hypercomm.process_groups.owner import GroupOwner

T = TypeVar("T")

_CALL = "GridSet.create_pgs()"

_LONGER_S = 10.0
"""How much longer than a creation a meeting waits: who waits in a creation knows more of why."""


def assembly_of(
    known: dict[tuple[int, ...], Assembly], layouts: Iterable[RankLayout], label: str
) -> Assembly | None:
    """Return the assembly of the ranks of some layouts, the same one for the same ranks.

    None where this rank has nobody to meet: alone, outside, or in a world without a store.
    """
    if not c10d.has_store():
        return None
    ranks = tuple(sorted(set().union(*(layout.ranks for layout in layouts))))
    if len(ranks) < 2 or dist.get_rank() not in ranks:
        return None
    if ranks not in known:
        layout = RankLayout([len(ranks)], ["rank"], ranks=ranks)
        known[ranks] = Assembly(Agreement(layout, label, None), layout)
    return known[ranks]


def create_jointly(
    assembly: Assembly | None,
    owners: Sequence[GroupOwner],
    plan: Sequence[str],
    timeout: timedelta | None,
    create: Callable[[], T],
    take_back: Callable[[], None],
) -> T:
    """Create what several owners are asked for, on all ranks or on none.

    Args:
        assembly: That of all their ranks; None where this rank has nobody to meet.
        owners: Those that are asked.
        plan: What they are asked for, as all ranks must say alike.
        timeout: How long to wait for the others; default: the timeout of WORLD.
        create: Creates this rank's part.
        take_back: Destroys all of it that there is; raises nothing.

    Returns:
        What `create` does.

    Raises:
        PlanMismatchError: Another rank asks for something else, or failed.
        GroupCreationTimeout: A rank did not come in time.
    """
    marks = [owner.progress.mark() for owner in owners]
    rounds = 0 if assembly is None else assembly.rounds
    is_ended = True
    try:
        if assembly is not None:
            _catch_up(assembly)
            for owner in owners:
                _count_failures(owner, assembly.rounds - rounds)
            is_ended = False
        with _listening(assembly, owners):
            created = create()
        if assembly is not None:
            is_ended = True
            _meet(assembly, plan, timeout)
    except BaseException as error:
        if assembly is not None and not is_ended:
            with contextlib.suppress(RuntimeError):  # the store is gone
                _give_up(assembly, error)
        take_back()
        failures = 1 if assembly is None else max(1, assembly.rounds - rounds)
        for owner, mark in zip(owners, marks, strict=True):
            owner.progress.return_to(mark)
            _count_failures(owner, failures)
        raise
    return created


def _count_failures(owner: GroupOwner, failures: int) -> None:
    """Count batches that failed, on this rank or another, so that all name the next alike."""
    for _ in range(failures):
        owner.progress.fail()


def _catch_up(assembly: Assembly) -> None:
    """Go on behind meetings that gave up waiting for this rank, to those that try again."""
    while (end := answer(assembly.next_end)) is not None:
        assembly.rounds += 1
        end.refuse(_CALL)


def _give_up(assembly: Assembly, error: BaseException) -> None:
    """End the meeting that this rank cannot come to, and say why, or who was missing."""
    missing = error.missing if isinstance(error, GroupCreationTimeout) else ()
    words = f"rank {dist.get_rank()} failed in {_CALL}: {type(error).__name__}: {error}"
    assembly.rounds += 1
    assembly.end(End(missing=tuple(missing)) if missing else End(words=words))


@contextlib.contextmanager
def _listening(assembly: Assembly | None, owners: Sequence[GroupOwner]) -> Iterator[None]:
    """Let a wait within a creation end when another rank has failed, in whatever grid."""

    def listen() -> None:
        end = None if assembly is None else assembly.next_end()
        if end is not None:
            end.refuse(_CALL)

    for owner in owners:
        owner.progress.agreement.listeners.append(listen)
    try:
        yield
    finally:
        for owner in owners:
            owner.progress.agreement.listeners.remove(listen)


def _meet(assembly: Assembly, plan: Sequence[str], timeout: timedelta | None) -> None:
    limit_s = limit_of(timeout)
    limit_s += min(limit_s, _LONGER_S)
    answer(lambda: assembly.meet(plan, limit_s, _CALL), limit_s + 1)
    assembly.agreement.retract()
