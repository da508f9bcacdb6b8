"""What a rank reports while it waits, so that errors name the rank that is missing, and deadlocks.

A rank that waits for long publishes where and for whom. The report stays after a failure until the
rank's next call, so that ranks that time out together find the one that none of them has seen.
"""

from __future__ import annotations

import contextlib
import functools
import json
import socket
from collections.abc import Mapping, Sequence

import attrs

from hypercomm.errors import CreationError
from hypercomm.layout import RankLayout
from hypercomm.layout.text import format_coords
from hypercomm.process_groups.agreement.protocol import (
    Outcome,
    Read,
    Record,
    Steps,
    foreign,
)
from hypercomm.process_groups.world import World

_MOST_ASKED = 8
"""Missing ranks of one call whose status is read at most."""

_MOST_NAMED = 8
_DEEPEST = 8


@functools.cache
def this_host() -> str:
    """Return the name of the machine that this process runs on."""
    return socket.gethostname()


@attrs.frozen
class Status:
    """What a rank that waits for long reports.

    Attributes:
        rank: The rank.
        host: Its host.
        call: The call that it waits in, as users know it.
        grid: The grid of the call, as text that is compared; "" for calls without one.
        key: The record that it waits at.
        round: The round.
        waits_for: The ranks that it waits for.
        threads: How many threads of the process wait for other ranks.
        outcome: How the call failed; None while the rank waits.
        title: How errors name the rank.
    """

    rank: int
    host: str
    call: str
    grid: str
    key: str
    round: int
    waits_for: tuple[int, ...] = ()
    threads: int = 1
    outcome: Outcome | None = None
    title: str = ""

    @property
    def name(self) -> str:
        """Rank and host in words."""
        return f"{self.title or f'rank {self.rank}'} (host {self.host})"

    def text(self) -> str:
        """Return the text that the key of the rank holds."""
        return json.dumps(attrs.asdict(self), separators=(",", ":"))


def status_key(namespace: str, rank: int) -> str:
    """Return the key that holds the status of a rank."""
    return f"{namespace}/rank {rank}"


def read_status(namespace: str, rank: int) -> Steps[Status | None]:
    """Return the status of a rank; None if it has not waited for long, or has gone on since.

    Raises:
        CreationError: The key holds something else.
    """
    key = status_key(namespace, rank)
    text = yield Read(key)
    if not text:
        return None
    try:
        fields = json.loads(text)
        outcome = fields["outcome"]
        if outcome is not None:
            names = ("missing", "absent", "grids")
            outcome = Outcome(**{**outcome, **{name: tuple(outcome[name]) for name in names}})
        status = Status(**{**fields, "waits_for": tuple(fields["waits_for"]), "outcome": outcome})
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise foreign(key, text) from error
    return status


def find_deadlock(
    namespace: str, own: Status, known: dict[int, Status | None]
) -> Steps[list[Status]]:
    """Return ranks that wait for each other in a circle, beginning with this one; [] if none do.

    Only ranks whose one waiting thread is in the circle count: another thread may end the wait.
    What is found is read twice, so that a rank that was about to continue is not in it.

    Args:
        namespace: Of the job.
        own: What this rank reports.
        known: Receives the status of each rank that was read.
    """
    known[own.rank] = own
    circle = yield from _way_back(namespace, [own], known)
    if any(status.threads > 1 for status in circle):
        return []
    for status in circle[1:]:
        text = yield Read(status.key)
        if text is None or Record.parse(status.key, text).outcome_of(status.round) is not None:
            return []
        if (yield from read_status(namespace, status.rank)) != status:
            return []
    return circle


def _way_back(
    namespace: str, path: list[Status], known: dict[int, Status | None]
) -> Steps[list[Status]]:
    for rank in path[-1].waits_for[:_MOST_ASKED]:
        if rank == path[0].rank and len(path) > 1:
            return path
        if rank in known or len(path) == _DEEPEST:
            continue
        known[rank] = status = yield from read_status(namespace, rank)
        if status is not None and status.outcome is None:
            found = yield from _way_back(namespace, [*path, status], known)
            if found:
                return found
    return []


def explain_deadlock(circle: Sequence[Status]) -> Outcome:
    """Return the outcome for the rounds of all ranks of a circle."""
    own, *others = circle
    waits = "; ".join(
        f"{status.name} waits in {status.call} for {ahead.title or f'rank {ahead.rank}'}"
        for status, ahead in zip(circle, [*others, own], strict=True)
    )
    token = min(f"{status.key}#{status.round}" for status in circle)
    different = next(
        (one for one in others if one.grid and own.grid and one.grid != own.grid), None
    )
    if different is None:
        text = f"ranks wait for each other in different calls: {waits}; {SAME_CALLS}"
        return Outcome("differs", text, token=token)
    grids = tuple(dict.fromkeys(status.grid for status in circle if status.grid))
    return Outcome(
        "differs", f"{grid_difference(own, different)}; {waits}", grids=grids, token=token
    )


SAME_CALLS = "every rank must make the same calls in one order"


def grid_difference(own: Status, other: Status) -> str:
    """Return how the grids of two ranks differ."""
    here, there = own.name, other.name
    mine, theirs = json.loads(own.grid), json.loads(other.grid)
    names = [name for name in mine if mine[name] != theirs.get(name)]
    fields = "; ".join(
        f"{name}: {mine[name]} on {here}, {theirs.get(name)} on {there}" for name in names
    )
    return (
        f"{fields}; ranks have built different grids; every rank must build the same grids in one "
        f"order, or give each a name=..."
    )


def name_missing(
    world: World,
    missing: Sequence[int],
    present: Sequence[int],
    layout: RankLayout | None,
    seen: Mapping[int, Status],
) -> Steps[tuple[tuple[int, ...], str]]:
    """Return the ranks that are the cause of a timeout, and their names; raises nothing.

    A missing rank that itself waits elsewhere, or that was seen to wait and has timed out just now,
    is not the cause, but the ranks that it waits for are. The first ones are named with
    coordinates, host and call.

    Args:
        world: The world of the ranks.
        missing: The ranks that have not arrived.
        present: Ranks that have, which are never the cause.
        layout: The layout in whose coordinates ranks are named.
        seen: The last status of each rank that was seen to wait during this call.
    """

    def explains(status: Status) -> bool:
        if status.outcome is None:
            return True
        waited = seen.get(status.rank)
        is_same = waited is not None and (waited.key, waited.round) == (status.key, status.round)
        return is_same and status.outcome.kind in ("missing", "unfinished")

    known: dict[int, Status | None] = {}

    def status_of(rank: int) -> Steps[Status | None]:
        if rank not in known:
            known[rank] = None
            with contextlib.suppress(CreationError, RuntimeError):  # only the text suffers
                known[rank] = yield from read_status(world.namespace, rank)
        return known[rank]

    def cause_of(rank: int) -> Steps[int]:
        at, seen = rank, {rank, *present}
        for _ in range(_DEEPEST):
            status = yield from status_of(at)
            ahead = [] if status is None or not explains(status) else status.waits_for
            ahead = [one for one in ahead if one not in seen]
            if not ahead:
                break
            at = ahead[0]
            seen.add(at)
        return at

    causes: dict[int, None] = {}
    for rank in missing[:_MOST_ASKED]:
        causes[(yield from cause_of(rank))] = None
    causes |= dict.fromkeys(missing[_MOST_ASKED:])
    names = []
    for rank in [*causes][:_MOST_NAMED]:
        status = yield from status_of(rank)
        names.append(_name(world, rank, status, layout))
    more = len(causes) - len(names)
    return tuple(causes), ", ".join(names) + (f" and {more} more" if more else "")


def _name(world: World, rank: int, status: Status | None, layout: RankLayout | None) -> str:
    notes = []
    if layout is not None and rank in layout:
        notes.append(format_coords(layout.coords(rank)))
    if status is not None:
        notes.append(f"host {status.host}")
        if status.outcome is None:
            others = ", ".join(map(str, status.waits_for[:_MOST_NAMED]))
            notes.append(f"it waits in {status.call}" + (f" for rank {others}" if others else ""))
    return world.title(rank) + (f" ({'; '.join(notes)})" if notes else "")
