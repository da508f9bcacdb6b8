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
    Steps,
    Stored,
    as_outcome,
    as_tuple,
    differing,
    read_record,
)
from hypercomm.process_groups.world import World

MOST = 8
"""Missing ranks of one call that are read, named, or followed to the ranks that they wait for."""


@functools.cache
def this_host() -> str:
    """Return the name of the machine that this process runs on."""
    return socket.gethostname()


@attrs.frozen
class Status(Stored):
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
    waits_for: tuple[int, ...] = attrs.field(default=(), converter=as_tuple)
    threads: int = 1
    outcome: Outcome | None = attrs.field(default=None, converter=as_outcome)
    title: str = ""

    @property
    def name(self) -> str:
        """Rank and host in words."""
        return f"{self.title} (host {self.host})"


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
    return Status.parse(key, text) if text else None


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
    for status in [*circle[1:], *circle[:1]]:  # this rank may be the last to see its round end
        record = yield from read_record(status.key)
        if record is None or record.outcome_of(status.round) is not None:
            return []
        if status is not own and (yield from read_status(namespace, status.rank)) != status:
            return []
    return circle


def _way_back(
    namespace: str, path: list[Status], known: dict[int, Status | None]
) -> Steps[list[Status]]:
    for rank in path[-1].waits_for[:MOST]:
        if rank == path[0].rank and len(path) > 1:
            return path
        if rank in known or len(path) == MOST:
            continue
        known[rank] = status = yield from read_status(namespace, rank)
        if status is not None and status.outcome is None:
            found = yield from _way_back(namespace, [*path, status], known)
            if found:
                return found
    return []


SAME_CALLS = "every rank must make the same calls in one order"


def explain_deadlock(circle: Sequence[Status]) -> Outcome:
    """Return the outcome for the rounds of all ranks of a circle."""
    own, *others = circle
    waits = "; ".join(
        f"{status.name} waits in {status.call} for {ahead.title}"
        for status, ahead in zip(circle, [*others, own], strict=True)
    )
    token = min(f"{status.key}#{status.round}" for status in circle)
    different = [one for one in others if one.grid and own.grid and one.grid != own.grid]
    if not different:
        text = f"ranks wait for each other in different calls: {waits}; {SAME_CALLS}"
        return Outcome("differs", text, token=token)
    mine, theirs = json.loads(own.grid), json.loads(different[0].grid)
    fields = [(f"{name}: {mine[name]}", f"{name}: {theirs.get(name)}") for name in mine]
    text = (
        f"{differing(fields, own.name, different[0].name)}; ranks have built different grids; "
        f"every rank must build the same grids in one order, or give each a name=...; {waits}"
    )
    grids = dict.fromkeys(status.grid for status in circle if status.grid)
    return Outcome("differs", text, grids=tuple(grids), token=token)


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
        for _ in range(MOST):
            status = yield from status_of(at)
            ahead = [] if status is None or not explains(status) else status.waits_for
            ahead = [one for one in ahead if one not in seen]
            if not ahead:
                break
            at = ahead[0]
            seen.add(at)
        return at

    causes: dict[int, None] = {}
    for rank in missing[:MOST]:
        causes[(yield from cause_of(rank))] = None
    causes |= dict.fromkeys(missing[MOST:])
    names = []
    for rank in [*causes][:MOST]:
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
            others = ", ".join(map(str, status.waits_for))
            notes.append(f"it waits in {status.call}" + (f" for rank {others}" if others else ""))
    return world.title(rank) + (f" ({'; '.join(notes)})" if notes else "")
