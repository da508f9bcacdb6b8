"""The agreement protocol, sans-I/O: whether all ranks propose the same, and all finish it.

Ranks agree in *rounds* of a *record*, one key of the job's store. A record holds its round, what
the first rank proposed, and how the round has ended. Three laws hold:

1. A round has one outcome, written by one compare-and-set. Every rank adopts it.
2. A rank leaves a round only after it has read or written its outcome.
3. The next round is read from the record, never counted: ranks that failed or were late meet again.

The functions are generators. They yield store operations and are sent the replies.

A rank that waits for long reports where and for whom, so that errors name the rank that is missing,
and deadlocks. The report stays after a failure until the rank's next call, so that ranks that time
out together find the one that none of them has seen.
"""

from __future__ import annotations

import contextlib
import functools
import json
import socket
from collections.abc import Container, Generator, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, TypeVar

import attrs

from hypercomm.errors import CreationError
from hypercomm.layout import RankLayout
from hypercomm.layout.text import format_coords
from hypercomm.process_groups.world import World

if TYPE_CHECKING:
    from typing_extensions import Self  # typing has it from Python 3.11 on

# ---- operations ---------------------------------------------------------------------------------


@attrs.frozen
class Exchange:
    """Set a key that holds `expected` ("": nothing); the reply is what it then holds."""

    key: str
    expected: str
    text: str


@attrs.frozen
class Read:
    """The reply is what a key holds; None if it is not set."""

    key: str


@attrs.frozen
class Add:
    """Add one to the number in a key; the reply is the sum."""

    key: str


@attrs.frozen
class Append:
    """Append to the text in a key; there is no reply."""

    key: str
    text: str


@attrs.frozen
class Write:
    """Set a key; there is no reply."""

    key: str
    text: str


@attrs.frozen
class Delete:
    """Delete keys."""

    keys: Sequence[str]


Operation = Exchange | Read | Add | Append | Write | Delete

T = TypeVar("T")
Steps = Generator[Operation, Any, T]
"""Yields store operations, is sent the replies, and returns a result."""


# ---- what a record holds -----------------------------------------------------------------------


V = TypeVar("V", bound="Stored")


class Stored:
    """What a key of the store holds, as JSON."""

    def text(self) -> str:
        """Return the text that the key holds."""
        fields: Any = self
        return json.dumps(attrs.asdict(fields), separators=(",", ":"))

    @classmethod
    def parse(cls, key: str, text: str) -> Self:
        """Read what `text` returned.

        Raises:
            CreationError: The key holds something else.
        """
        try:
            return cls(**json.loads(text))
        except (ValueError, TypeError, RecursionError) as error:
            raise CreationError(
                f"the store's key {key!r} holds {text[:80]!r}, which hypercomm did not write; "
                f"something else writes there, or the ranks have different versions of hypercomm"
            ) from error


def as_tuple(found: Iterable[Any]) -> tuple[Any, ...]:
    """Convert a field that was read as JSON."""
    return tuple(found)


@attrs.frozen
class Proposal:
    """What a rank proposes.

    Attributes:
        rank: The rank.
        host: Its host.
        entries: What it proposes, in lines that are compared.
        refusal: Why the rank cannot take part; "" if it can.
        number: Distinguishes the proposals of one rank, whose other fields may be equal.
        title: How errors name the rank.
    """

    rank: int
    host: str
    entries: tuple[str, ...] = attrs.field(default=(), converter=as_tuple)
    refusal: str = ""
    number: int = 0
    title: str = ""

    @property
    def name(self) -> str:
        """Rank and host in words."""
        return f"{self.title} (host {self.host})"

    def is_by_rank_of(self, other: Proposal) -> bool:
        """Return whether the same rank has made another proposal; numbers differ with the parts."""
        return (self.rank, self.title) == (other.rank, other.title)


_KINDS = ("agreed", "differs", "failed", "missing", "unfinished", "restarted")


@attrs.frozen
class Outcome:
    """How a round has ended.

    Attributes:
        kind: "agreed", "differs", "failed", "missing" (ranks did not arrive), "unfinished", or
            "restarted" (ranks have joined the world again).
        text: The reason, for the error that ranks raise.
        missing: The ranks that caused a timeout.
        absent: The ranks that had not arrived or finished: the missing ones, and ranks that wait
            for them elsewhere.
        grids: The grids that differ, where ranks have built different ones.
        token: Identifies an outcome that is reported in more than one record.
    """

    kind: str = attrs.field(validator=attrs.validators.in_(_KINDS))
    text: str = ""
    missing: tuple[int, ...] = attrs.field(default=(), converter=as_tuple)
    absent: tuple[int, ...] = attrs.field(default=(), converter=as_tuple)
    grids: tuple[str, ...] = attrs.field(default=(), converter=as_tuple)
    token: str = ""


AGREED = Outcome("agreed")
_MOST_FAILED = 16
"""How many rounds that failed a record holds, for ranks that have not seen them."""


def as_outcome(found: Any) -> Outcome | None:
    """Convert a field that was read as JSON."""
    return Outcome(**found) if isinstance(found, dict) else found


def _as_outcomes(found: Iterable[Any]) -> tuple[Outcome, ...]:
    return tuple(one for one in map(as_outcome, found) if one is not None)


def _as_proposal(found: Any) -> Proposal:
    return Proposal(**found) if isinstance(found, dict) else found


@attrs.frozen
class Record(Stored):
    """What the key of a record holds.

    Attributes:
        round: The number of the round.
        first: The proposal of the first rank.
        outcome: How the round has ended; None while it is open.
        failed: How the rounds before have ended, since the last one that ranks agreed in.
        agreed_before: The last round before this one that all ranks agreed in; -1 for none.
    """

    round: int
    first: Proposal = attrs.field(converter=_as_proposal)
    outcome: Outcome | None = attrs.field(default=None, converter=as_outcome)
    failed: tuple[Outcome, ...] = attrs.field(default=(), converter=_as_outcomes)
    agreed_before: int = -1

    @property
    def agreed(self) -> int:
        """The last round that all ranks agreed in; -1 for none."""
        is_agreed = self.outcome is not None and self.outcome.kind == "agreed"
        return self.round if is_agreed else self.agreed_before

    def next(self, first: Proposal) -> Record:
        """Return the record once the next round has begun."""
        failed: tuple[Outcome, ...] = ()
        if self.outcome is not None and self.outcome.kind != "agreed":
            failed = (*self.failed, self.outcome)
        return Record(
            self.round + 1, first, failed=failed[-_MOST_FAILED:], agreed_before=self.agreed
        )

    def outcome_of(self, number: int) -> Outcome | None:
        """Return how a round has ended, as far as this record tells; None while it is open."""
        if number == self.round:
            return self.outcome
        begin = self.round - len(self.failed)
        if number >= begin:
            return self.failed[number - begin]
        if number == begin - 1 and len(self.failed) < _MOST_FAILED:
            return AGREED
        return Outcome("failed", "the other ranks have made further calls since")

    def failed_since(self, seen: int) -> Record | None:
        """Return the first round after `seen` that has failed, but for a timeout."""
        for number in range(max(seen + 1, self.round - len(self.failed)), self.round + 1):
            outcome = self.outcome_of(number)
            if outcome is not None and outcome.kind in ("differs", "failed"):
                return attrs.evolve(self, round=number, outcome=outcome)
        return None


# ---- one round ---------------------------------------------------------------------------------


@attrs.frozen
class Ticket:
    """A round that this rank takes part in.

    Attributes:
        key: The key of the record.
        record: The record as this rank has seen it.
    """

    key: str
    record: Record

    @property
    def round(self) -> int:
        """The number of the round."""
        return self.record.round

    @property
    def arrivals(self) -> str:
        """The key that ranks append to as they arrive ("3,"), finish ("3+,") or fail ("3-,")."""
        return f"{self.key}/{self.round}/ranks"

    @property
    def count(self) -> str:
        """The key that counts the ranks that have finished."""
        return f"{self.key}/{self.round}/done"


def propose(
    key: str, proposal: Proposal, seen: int = -1, reported: Container[str] = ()
) -> Steps[Ticket]:
    """Join the open round of a record, or begin the next one; the caller compares proposals.

    A round that failed before this rank arrived fails here too: it is returned with its outcome.
    After a timeout a late rank goes on to the next round, where the others meet it.

    Args:
        key: The key of the record.
        proposal: What this rank proposes.
        seen: The last round that this rank has left; -1 if there is none.
        reported: The tokens of outcomes that it knows from other records.
    """
    record = Record(0, proposal)
    text = yield Exchange(key, "", record.text())
    while text != record.text():
        found = Record.parse(key, text)
        missed = found.failed_since(seen)
        if missed is not None and missed.outcome and missed.outcome.token not in reported:
            return Ticket(key, missed)
        is_lost = bool(proposal.refusal) and not found.first.refusal  # began, but got no reply
        if found.outcome is None and (not found.first.is_by_rank_of(proposal) or is_lost):
            return Ticket(key, found)
        if found.outcome is None:  # this rank began it, and left it by an error of the store
            reason = found.first.refusal or "the rank began again"
            yield from decide(Ticket(key, found), Outcome("failed", reason))
            text, seen = (yield Read(key)) or "", found.round
            continue
        if found.round > seen and proposal.refusal and proposal.rank in found.outcome.absent:
            return Ticket(key, found)  # the others have given up on this rank: nobody waits for it
        record = found.next(proposal)
        text = yield Exchange(key, text, record.text())
        if text == record.text():
            old = Ticket(key, found)
            yield Delete([old.arrivals, old.count])
    return Ticket(key, record)


def decide(ticket: Ticket, outcome: Outcome) -> Steps[Outcome]:
    """End a round, unless another rank has; return the outcome that holds."""
    record = ticket.record
    while True:
        wanted = attrs.evolve(record, outcome=outcome)
        text = yield Exchange(ticket.key, record.text(), wanted.text())
        if text == wanted.text():
            return outcome
        record = Record.parse(ticket.key, text)
        found = record.outcome_of(ticket.round)
        if found is not None:
            return found


def read_record(key: str) -> Steps[Record | None]:
    """Return the record that a key holds; None if there is none."""
    text = yield Read(key)
    return None if text is None else Record.parse(key, text)


def read_outcome(ticket: Ticket) -> Steps[Outcome | None]:
    """Return how a round has ended; None while it is open."""
    text = yield Read(ticket.key)
    if text is None or text == ticket.record.text():
        return None
    return Record.parse(ticket.key, text).outcome_of(ticket.round)


def finish(ticket: Ticket, rank: int, size: int) -> Steps[Outcome | None]:
    """Report that this rank has finished; the last of `size` ranks ends the round as agreed."""
    yield Append(ticket.arrivals, f"{rank}+,")
    if (yield Add(ticket.count)) < size:
        return None
    return (yield from decide(ticket, AGREED))


def read_arrivals(ticket: Ticket) -> Steps[dict[int, str]]:
    """Return the ranks that have arrived, each with "+" if it has finished, "-" if it failed."""
    text = yield Read(ticket.arrivals)
    found: dict[int, str] = {}
    for token in (text or "").split(","):
        number = token.rstrip("+-")
        if number.isdecimal():
            found[int(number)] = found.get(int(number), "") + token[len(number) :]
    return found


def refuse(key: str, proposal: Proposal, seen: int) -> Steps[int]:
    """Fail the open round of a record, or the next one; return its number without waiting."""
    ticket = yield from propose(key, proposal, seen)
    if ticket.record.outcome is None and ticket.record.first != proposal:
        yield from decide(ticket, Outcome("failed", proposal.refusal))
    return ticket.round


# ---- differences -------------------------------------------------------------------------------


def as_entry(headline: str, options: dict[str, object]) -> str:
    r"""Return what a rank proposes as one text, for comparison.

    >>> as_entry("tp over 2 groups", {"timeout": "0:00:20", "share": "never"})
    'tp over 2 groups\ntimeout: 0:00:20\nshare: never'
    """
    return "\n".join([headline, *(f"{name}: {value}" for name, value in options.items())])


def first_difference(own: Proposal, first: Proposal) -> str | None:
    """Return the first entry that two proposals differ in, in words; None if they are equal."""
    here, there = own.name, first.name
    pairs = zip_longest(own.entries, first.entries, fillvalue="nothing more")
    for position, (mine, theirs) in enumerate(pairs):
        if mine == theirs:
            continue
        (headline, *options), (other, *others) = mine.split("\n"), theirs.split("\n")
        if headline != other or len(options) != len(others):
            return (
                f"ranks differ at position {position}: {here} calls {headline}, and {there}, "
                f"which arrived first, calls {other}"
            )
        fields = differing(zip(options, others, strict=True), here, there)
        return f"{fields}; ranks differ at position {position}, {headline}"
    return None


def differing(pairs: Iterable[tuple[str, str]], here: str, there: str) -> str:
    """Return the options of two ranks that differ, in words.

    >>> differing([("share: a", "share: a"), ("timeout: 1", "timeout: 2")], "rank 0", "rank 1")
    'timeout: 1 on rank 0, 2 on rank 1'
    """
    return "; ".join(
        f"{mine} on {here}, {theirs.partition(': ')[2]} on {there}"
        for mine, theirs in pairs
        if mine != theirs
    )


# ---- what waiting ranks report ------------------------------------------------------------------

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
