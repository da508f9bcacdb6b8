"""Ranks meet before torch is called: all of them arrive, or all of them raise the same error.

A *scope* is a set of ranks that make calls together, one after the other. Each call is a *round*.
Round 7 of the scope `S`, for ranks whose calls have the digest `d`, has these keys in the store:

    S/7/d/0.0    one bit for each rank that has arrived
    S/7/go       the outcome, which is written once: "agreed d", or why the round failed

A rank sets its bit with one `add`, whose reply tells it who has arrived, and waits for the outcome.
The rank that sets the last bit writes the outcome. Ranks that make different calls set their bits
in different keys, and so never meet.

A rank that waits for long publishes a status: its call, and the ranks for which it waits. It reads
the statuses of these ranks. It ends the round if one of them makes another call in the same round,
or if ranks wait for each other in different rounds. At its deadline it ends the round, and names
the ranks that have not arrived. A rank leaves a round only with the outcome of the round, so all
ranks count the same rounds. A late rank finds the outcome of the round that it has missed, and goes
on to the next one.

All requests to the store are made in helper threads. The calling thread can therefore be
interrupted, and ends in time even if the store does not answer.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from itertools import islice, zip_longest
from typing import Any, TypeVar

import attrs
import torch.distributed as dist

from hypercomm.errors import (
    CreationError,
    GroupCreationTimeout,
    HyperCommError,
    LateRankError,
    OutcomeUnknownError,
    PlanMismatchError,
    WorldRestartedError,
)
from hypercomm.layout.text import format_coords
from hypercomm.process_groups import torch_internals as torchdist
from hypercomm.process_groups.system import LateError, in_time, system
from hypercomm.process_groups.world import Scope, World, digest_of, this_host

T = TypeVar("T")

_SLOW_S = 0.2
"""Wait, in seconds, after which a rank publishes its status and looks for the cause."""

_SLOW_RANKS = 4000
"""The wait in seconds is the world size divided by this number, but at least `_SLOW_S`."""

_FOLLOW_S = 0.3
"""Time after the deadline for which ranks that do not look for the cause wait, in seconds."""

_SPARE_S = 1.2
"""Time after the deadline that the store has to answer, in seconds."""

_AGAIN_S = 0.5
"""Time for which a rank waits once more, in seconds, because it may have been suspended."""

_LAST_S = 0.4
"""Limit for ending the round of a call that was interrupted, in seconds."""

_REFUSAL_S = 1.9
"""Time limit of `refuse`, in seconds."""

_LINGER_S = 0.25
"""Time for which the process that serves the store stays after a failure, in seconds."""

_LONGEST_S = 1e8
"""The longest wait, in seconds, for a call without a timeout."""

_WIDTH = 60
"""Ranks per block, which are the bits of the number that `add` changes."""

_MOST = 8
"""Number of missing ranks that errors name and that a status lists."""

_SEARCHERS = 16
"""Number of ranks that look for the cause in a scope of one block. Otherwise one per block."""

_LEAST_STALE = 16
"""Number of keys that no rank needs any more at which a rank that waits deletes them."""

_MOST_STALE = 64
"""Number of such keys at which a rank that does not wait deletes them."""

SAME_CALLS = "every rank must make the same calls in the same order"

_DIFFERENT_GRIDS = (
    "ranks have built different grids; every rank must build the same grids in the same order, or "
    "give each grid a name=..."
)


@attrs.frozen
class Call:
    """A call as ranks compare it, and as errors describe it.

    Attributes:
        facts: A value whose `repr` is equal on all ranks that make the same call.
        title: Returns the call as users know it.
        entries: Returns the call as text. Errors show the first entry that differs.
    """

    facts: object
    title: Callable[[], str]
    entries: Callable[[], Sequence[str]]

    @classmethod
    def of(cls, title: str, entries: Sequence[str]) -> Call:
        """Return a call that consists of text."""
        return cls(entries, lambda: title, lambda: entries)


# ---- the values of keys -------------------------------------------------------------------------


def _ranks(given: Iterable[int]) -> tuple[int, ...]:
    return tuple(given)


def _texts(given: Iterable[str]) -> tuple[str, ...]:
    return tuple(given)


@attrs.frozen
class Outcome:
    """Why a round has failed.

    Attributes:
        kind: "missing", "late", "differs", "restarted" or "failed".
        text: The reason, for the errors of all ranks.
        missing: The ranks that caused a timeout.
        absent: The ranks that had not arrived.
        data: What the failed rank adds to the errors of the others.
        event: The name of an event that has ended rounds of several scopes, or "".
    """

    kind: str
    text: str
    missing: tuple[int, ...] = attrs.field(default=(), converter=_ranks)
    absent: tuple[int, ...] = attrs.field(default=(), converter=_ranks)
    data: str = ""
    event: str = ""


@attrs.frozen
class Status:
    """For whom a rank waits. A status is over once its round has an outcome.

    Attributes:
        title: The rank, as errors name it.
        host: The host of the rank.
        call: The title of the call.
        entries: The call as text.
        digest: The digest of the call.
        grid: The grid as JSON, or "".
        go: The key that holds the outcome of the round.
        waits_for: The first ranks that have not arrived.
        threads: How many threads of the rank wait.
    """

    title: str
    host: str
    call: str
    entries: tuple[str, ...] = attrs.field(converter=_texts)
    digest: str
    grid: str
    go: str
    waits_for: tuple[int, ...] = attrs.field(converter=_ranks)
    threads: int

    @property
    def name(self) -> str:
        """The rank and its host."""
        return f"{self.title} (host {self.host})"


def _encode(value: Outcome | Status) -> str:
    return json.dumps(attrs.asdict(value))


def _decode(kind: type[T], key: str, text: bytes) -> T:
    """Return the value of a key.

    Raises:
        CreationError: The value cannot be read.
    """
    try:
        return kind(**json.loads(text))
    except (ValueError, TypeError, RecursionError) as error:
        raise _foreign(key, text) from error


def _foreign(key: str, text: bytes) -> CreationError:
    return CreationError(
        f"the store's key {key!r} holds {text[:60]!r}: hypercomm did not write the store's key"
    )


# ---- the tree of arrivals -----------------------------------------------------------------------


def way_up(position: int, size: int) -> Iterator[tuple[str, int, int]]:
    """Yield the blocks of a rank up to the root: name, bit, and the bits of a complete block.

    >>> [(block, bit == 1 << 3) for block, bit, _ in way_up(63, 120)]
    [('0.1', True), ('1.0', False)]
    """
    level = 0
    while True:
        block, bit = divmod(position, _WIDTH)
        yield f"{level}.{block}", 1 << bit, (1 << min(_WIDTH, size - block * _WIDTH)) - 1
        if size <= _WIDTH:
            return
        position, size, level = block, -(-size // _WIDTH), level + 1


def missing_in(read: Callable[[str], int], size: int) -> Iterator[int]:
    """Yield the positions that have not arrived, ascending. Complete blocks are not read.

    Args:
        read: Returns the bits of a block by its name.
        size: The number of positions.
    """
    sizes = [size]
    while sizes[-1] > _WIDTH:
        sizes.append(-(-sizes[-1] // _WIDTH))

    def search(level: int, block: int) -> Iterator[int]:
        bits = read(f"{level}.{block}")
        for position in range(block * _WIDTH, min(sizes[level], (block + 1) * _WIDTH)):
            if not bits >> position % _WIDTH & 1:
                yield from search(level - 1, position) if level else (position,)

    yield from search(len(sizes) - 1, 0)


# ---- one call of one rank -----------------------------------------------------------------------


@attrs.define(eq=False)
class Meeting:
    """One call of the calling rank in a scope. `meet` makes it.

    Attributes:
        scope: The ranks.
        call: The call.
        limit_s: The time within which all ranks must arrive, in seconds.
        store: A client of the world's store that only this call uses.
        began: The time at which the call began.
        round: The number of the round.
    """

    scope: Scope
    call: Call
    limit_s: float
    store: Any
    began: float
    round: int = 0
    _base: str = ""
    _digest: str = ""
    _agreed: str = ""
    _missed: Outcome | None = None
    _has_arrived: bool = False
    _block: str = ""
    _keys_if_agreed: list[str] = attrs.field(factory=list)
    _keys_if_failed: list[str] = attrs.field(factory=list)
    _second: Any = None
    _seen: dict[int, Status] = attrs.field(factory=dict)
    _published: Status | None = None

    @property
    def name(self) -> str:
        """A name for what the call creates: the same on all ranks, and new in each call."""
        return f"{self._base}/{self.round}"

    @property
    def stale(self) -> list[str]:
        """Receives keys that no rank needs any more. A later call deletes them."""
        return self.scope.memory.stale

    @property
    def left_s(self) -> float:
        """Seconds until the deadline."""
        return self.began + min(self.limit_s, _LONGEST_S) - system.now()

    @property
    def _go(self) -> str:
        return f"{self._base}/{self.round}/go"

    def arrive(self) -> None:
        """Wait until all ranks of the scope have arrived.

        Raises:
            PlanMismatchError, GroupCreationTimeout, LateRankError, WorldRestartedError,
                CreationError: The round has failed, on all ranks alike.
            OutcomeUnknownError: The store is gone, and the other ranks may have arrived.
        """
        scope = self.scope
        memory = scope.memory
        if scope.is_alone:
            self._base = f"{memory.namespace}/{scope.path}"
            if memory.namespace is None and scope.world.has_store:
                read = partial(scope.read_key, self.store)
                self._base = ask(scope.world, self.call.title, read, self.limit_s)
            if len(memory.stale) >= _MOST_STALE:
                ask(scope.world, self.call.title, self._delete_stale, self.limit_s)
            if not self._pass_by():
                self.round = memory.next_number(scope.path)
            return
        self._digest = digest_of(self.call.facts)
        self._agreed = f"agreed {self._digest}"
        while True:
            self.round = memory.left.get(scope.path, -1) + 1
            reply = self._wait()
            if reply == self._agreed:
                is_all = len(scope.ranks) == scope.world.size
                memory.note_agreed(scope.path, scope.ranks, self._keys_if_agreed, is_all=is_all)
                return
            memory.note_failed(scope.path, self._keys_if_failed)
            outcome = self._failed(reply)
            if scope.is_fenced or not self._is_late(outcome):
                if scope.world.serves and scope.world.size > 1:
                    system.sleep(_LINGER_S)  # the other ranks read the outcome
                raise self._error_of(outcome)
            self._missed = outcome  # the other ranks may call again, and wait in the next round

    def again(self, call: Call) -> None:
        """Meet the same ranks a second time, within the timeout that begins now."""
        self.call = call
        self.began = system.now()
        self.arrive()

    def refuse(self, error: BaseException) -> None:
        """Fail the next round, because this rank cannot take part. See `refuse`."""
        scope = self.scope
        if scope.is_alone:
            self._pass_by()
            return
        reason = " ".join(str(error).split())[:500]
        text = f"{scope.name} failed: {type(error).__name__}: {reason}"
        outcome = Outcome("failed", text, data=getattr(error, "data", ""))

        def write() -> None:
            self._base = scope.read_key(self.store)
            while True:
                self.round = scope.memory.left.get(scope.path, -1) + 1
                reply = _end(self.store, self._go, _encode(outcome))
                scope.memory.leave(scope.path, self.round)
                if not self._is_late(self._failed(reply)):
                    return

        with contextlib.suppress(RuntimeError):  # the caller raises `error`
            in_time(write, _REFUSAL_S)
            if scope.world.serves:
                system.sleep(_LINGER_S)

    def _pass_by(self) -> bool:
        """Count a round of ranks without this rank, because it may be one of them later.

        Returns:
            Whether this rank is not one of the ranks.
        """
        scope = self.scope
        if scope.world.rank in scope.ranks:
            return False
        self.round = scope.memory.left.get(scope.path, -1) + 1
        scope.memory.leave(scope.path, self.round)
        return True

    # ---- waiting --------------------------------------------------------------------------------

    def _wait(self) -> str:
        """Arrive in this round, and wait for its outcome."""
        memory = self.scope.memory
        replies: list[Any] = []
        done = system.event()
        self._has_arrived = False
        self._keys_if_agreed.clear()
        self._keys_if_failed.clear()
        _active.add(self)
        try:
            system.start(partial(self._ask, replies), done.set)
            if not done.wait(self._slow_s):
                system.start(partial(self._watch, done), lambda: None)
                if not done.wait(max(0.0, self.left_s) + _SPARE_S):
                    done.wait(_AGAIN_S)
        except BaseException as error:
            self._give_up(f"was interrupted ({type(error).__name__})")
            raise
        finally:
            _active.discard(self)
            memory.leave(self.scope.path, self.round)
        reply = replies[0] if replies else LateError(f"not done within {self.limit_s:.1f} s")
        if isinstance(reply, HyperCommError) or not isinstance(reply, (str, RuntimeError)):
            raise reply
        if isinstance(reply, RuntimeError):
            raise _store_failed(
                self.scope.world, self.call.title(), reply, has_arrived=self._has_arrived
            ) from reply
        return reply

    def _ask(self, replies: list[Any]) -> None:
        """Set the bit of this rank, and wait for the outcome. Runs in a helper thread."""
        try:
            self._base = self.scope.read_key(self.store)
            self._clear_status()
            if self._set_bits():
                replies.append(_end(self.store, self._go, self._agreed))
                self._delete_stale(_MOST_STALE)  # the other ranks do not wait for this
            else:
                self._delete_stale(_LEAST_STALE)
                replies.append(self._read_outcome())
        except BaseException as error:  # noqa: BLE001 - raised in the calling thread
            replies.append(error)

    def _read_outcome(self) -> str:
        """Wait for the outcome, and read it.

        A wait may end early, because torch 2.14 ends the waits of a connection when a process group
        that uses it is reconfigured. The key may be gone, because ranks that have met again delete
        the keys of agreed rounds, and a process that replaces this one in a joined world all keys.
        """
        until = system.now() + max(0.0, self.left_s) + 3 * _SPARE_S
        while True:
            with contextlib.suppress(dist.DistStoreError):
                left_s = max(0.001, until - system.now())
                self.store.wait([self._go], timedelta(seconds=left_s))
            text = torchdist.read_bytes(self.store, self._go)
            if text is not None:
                return text.decode(errors="replace")
            if torchdist.read_bytes(self.store, self._block) is None:
                gone = Outcome("restarted", "the call has ended without this process")
                return _encode(gone) if self.scope.is_lobby else self._agreed
            if system.now() >= until:
                raise LateError("the outcome was not written")
            system.sleep(0.001)

    def _delete_stale(self, least: int = 0) -> None:
        """Delete the keys that no rank needs any more, if there are at least so many."""
        for key in self.scope.memory.take_stale(least):
            self.store.delete_key(key)

    def _set_bits(self) -> bool:
        """Set the bit of this rank. Return whether all ranks have arrived."""
        scope = self.scope
        position = scope.ranks.index(scope.world.rank)
        is_first = True
        for block, bit, complete in way_up(position, len(scope.ranks)):
            key = f"{self.name}/{self._digest}/{block}"
            keys = [key]
            if block == "0.0" and not scope.is_fenced:  # a late rank of a fence reads the outcome
                keys.append(self._go)
            self._block = key
            bits = self.store.add(key, bit)
            self._has_arrived = True
            is_first = is_first and bit == 1
            if is_first:  # the first rank of a block deletes its key
                self._keys_if_agreed += keys
            if bits == bit:  # if ranks are missing, the first one that has arrived deletes the key
                self._keys_if_failed += keys
            if not bits & bit:  # another process of this rank has set the bit
                text = f"another process has joined as {scope.name}, or this rank has begun again"
                _end(self.store, self._go, _encode(Outcome("restarted", text)))
                raise WorldRestartedError(text)
            if bits != complete:
                return False
        return True

    @property
    def _slow_s(self) -> float:
        return min(self.limit_s / 4, max(_SLOW_S, self.scope.world.size / _SLOW_RANKS))

    def _give_up(self, why: str) -> None:
        """End the round over another connection, because the first one may be occupied."""
        outcome = _encode(Outcome("failed", f"{self.scope.name} {why}"))

        def end() -> None:
            store = clone(self.store)
            self._base = self.scope.read_key(store)
            _end(store, self._go, outcome)

        with contextlib.suppress(Exception):  # the store may be gone
            in_time(end, _LAST_S)

    # ---- a long wait ----------------------------------------------------------------------------

    def _watch(self, done: Any) -> None:
        """Look for the cause of a long wait, and end the round at the deadline."""
        pause_s = self._slow_s
        searches = True
        try:
            self._second = clone(self.store)
            while not done.is_set() and self.left_s > 0.0:
                own, searches = self._publish(done)
                if searches and self._is_hopeless(own):
                    return
                done.wait(max(0.0, min(pause_s, self.left_s) if searches else self.left_s))
                pause_s *= 2
            if not searches:
                done.wait(_FOLLOW_S)
            if not done.is_set():
                self._end(self._missing())
        except HyperCommError as error:  # a value that hypercomm did not write
            self._give_up(f"failed: {error}")
        except RuntimeError:  # the store is gone, which the first connection reports
            return

    def _end(self, outcome: Outcome | None, *others: Status) -> None:
        """End this round and those in which others wait. None means that all ranks are here."""
        text = self._agreed if outcome is None else _encode(outcome)
        for go in (self._go, *(other.go for other in others)):
            _end(self._second, go, text)

    def _status_key(self, rank: int) -> str:
        return f"{self.scope.memory.namespace}/rank {rank}"

    def _clear_status(self) -> None:
        """Delete the status that an earlier call of this rank has left."""
        if self.scope.memory.has_status:
            self.scope.memory.has_status = False
            self.store.delete_key(self._status_key(self.scope.world.rank))

    def _publish(self, done: Any) -> tuple[Status, bool]:
        """Publish the status of this rank if it has changed.

        Returns:
            The status, and whether this rank is one of the few that look for the cause.
        """
        scope = self.scope
        size = len(scope.ranks)
        at = scope.ranks.index(scope.world.rank)
        first = at - at % _WIDTH
        bits = self._bits(f"0.{at // _WIDTH}")
        ahead = [
            one for one in range(first, min(size, first + _WIDTH)) if not bits >> one - first & 1
        ]
        if not ahead and size > _WIDTH:
            ahead = [*islice(missing_in(self._bits, size), _MOST)]
        waits_for = tuple([scope.ranks[one] for one in ahead[:_MOST]])
        own = self._own_status(waits_for)
        if own != self._published:
            self._published = own
            scope.memory.has_status = True
            key = self._status_key(scope.world.rank)
            self._second.set(key, _encode(own))
            if done.is_set():  # the next call of this rank may already have deleted the status
                self._second.delete_key(key)
        before = (bits & ((1 << at - first) - 1)).bit_count()
        return own, before < (_SEARCHERS if size <= _WIDTH else 1)

    def _own_status(self, waits_for: tuple[int, ...]) -> Status:
        scope = self.scope
        return Status(
            title=scope.world.title(scope.world.rank),
            host=this_host(),
            call=self.call.title(),
            entries=self.call.entries(),
            digest=self._digest,
            grid="" if scope.identity is None else scope.identity.text,
            go=self._go,
            waits_for=waits_for,
            threads=sum(one.scope.memory is scope.memory for one in list(_active)),
        )

    def _bits(self, block: str) -> int:
        """Return the bits of a block."""
        key = f"{self.name}/{self._digest}/{block}"
        text = torchdist.read_bytes(self._second, key) or b"0"
        if not text.isdigit():
            raise _foreign(key, text)
        return int(text)

    def _status_of(self, rank: int) -> Status | None:
        """Return the status of a rank, or None if the rank does not wait.

        A rank that was seen waiting and has timed out since still counts, because ranks that wait
        for each other in a chain have about the same deadline.
        """
        key = self._status_key(rank)
        text = torchdist.read_bytes(self._second, key)
        if text is None:
            return None
        status = _decode(Status, key, text)
        if self.scope.is_lobby and status.go != self._go:
            return None  # an earlier process of this rank may have left it
        outcome = torchdist.read_bytes(self._second, status.go)
        if outcome is None:
            self._seen[rank] = status
            return status
        has_timed_out = b'"missing"' in outcome[:24]
        return status if has_timed_out and self._seen.get(rank) == status else None

    def _is_hopeless(self, own: Status) -> bool:
        """End the round if it cannot succeed. Return whether it has ended."""
        ended = "" if self.scope.is_lobby else self.scope.world.why_ended(self._second)
        if ended:
            self._end(Outcome("restarted", ended))
            return True
        return self._has_difference(own) or self._has_circle([own])

    def _has_difference(self, own: Status) -> bool:
        """End the round if a missing rank makes another call in this round."""
        for rank in own.waits_for:
            other = self._status_of(rank)
            if other is not None and other.go == own.go and other.digest != own.digest:
                what = first_difference(own.entries, other.entries, own.name, other.name)
                self._end(Outcome("differs", f"{what}; {SAME_CALLS}"))
                return True
        return False

    def _has_circle(self, path: list[Status]) -> bool:
        """End the rounds of ranks that wait for each other in different rounds.

        A rank with several waiting threads does not count, because another thread may end the wait.
        """
        if path[-1].threads > 1 or len(path) > _MOST:
            return False
        for rank in path[-1].waits_for:
            status = self._status_of(rank)
            if status is None or status.threads > 1 or any(one.go == status.go for one in path[1:]):
                continue
            if status.go != path[0].go:
                if self._has_circle([*path, status]):
                    return True
            elif len(path) > 1:
                circle = [status, *path[1:]]
                have_left = [self._second.check([one.go]) for one in circle]
                if not any(have_left):
                    event = min(one.go for one in circle)  # equal on all ranks that find the circle
                    outcome = Outcome("differs", explain_circle(circle), event=event)
                    self._end(outcome, *path[1:])
                    return True
        return False

    # ---- the outcome at the deadline ------------------------------------------------------------

    def _missing(self) -> Outcome | None:
        """Return who has not arrived, and what they do instead, or None if all have arrived."""
        scope = self.scope
        absent = [scope.ranks[at] for at in missing_in(self._bits, len(scope.ranks))]
        if not absent:
            return None  # the rank that set the last bit has died before it wrote the outcome
        here = {*scope.ranks} - {*absent}
        if self._missed is not None and here <= {*self._missed.absent}:
            late = ", ".join(scope.world.title(rank) for rank in sorted(here)[:_MOST])
            text = f"timed out on the other ranks before {late} arrived"
            return Outcome("late", f"{text}; repeat the call on all ranks", absent=sorted(here))
        causes = self._causes(absent, here)
        names = [self._describe(rank, behind) for rank, behind in [*causes.items()][:_MOST]]
        more = f" and {len(causes) - _MOST} more" if len(causes) > _MOST else ""
        text = f"timed out: {', '.join(names)}{more} did not join; every rank must make this call"
        return Outcome("missing", text, causes, absent)

    def _causes(self, absent: Sequence[int], here: set[int]) -> dict[int, Status | None]:
        """Return the ranks that caused the timeout, and the status of a rank that waits for each.

        A rank that itself waits in another call is not the cause. The rank at the end of the chain
        of waits is the cause.
        """
        causes: dict[int, Status | None] = {}
        for rank in absent[:_MOST]:
            behind = None
            passed = [rank]
            while len(passed) <= _MOST:
                status = self._status_of(passed[-1])
                ahead = () if status is None else status.waits_for
                ahead = tuple([one for one in ahead if one not in here and one not in passed])
                if not ahead:
                    break
                behind = status
                passed.append(ahead[0])
            causes[passed[-1]] = behind or causes.get(passed[-1])
        return causes | dict.fromkeys(absent[_MOST:])

    def _describe(self, rank: int, behind: Status | None) -> str:
        """Describe a rank that caused a timeout. `behind` is the status of a rank behind it."""
        scope = self.scope
        status = self._status_of(rank)
        notes = []
        if scope.identity is not None and rank in scope.identity.layout:
            notes.append(format_coords(scope.identity.layout.coords(rank)))
        if status is not None:
            others = ", ".join(map(str, status.waits_for))
            notes += [f"host {status.host}", f"it waits in {status.call} for rank {others}"]
        if behind is not None:
            notes.append(f"{behind.name} waits for it in {behind.call}")
        title = scope.world.title(rank)
        return f"{title} ({'; '.join(notes)})" if notes else title

    # ---- errors ---------------------------------------------------------------------------------

    def _failed(self, reply: str) -> Outcome:
        """Return the outcome of a round in which this rank has not agreed."""
        if reply.startswith("agreed "):
            world = self.scope.world
            return Outcome(
                "failed",
                f"the other ranks have continued without {world.title(world.rank)}; end this "
                f"process, or start the job again",
            )
        return _decode(Outcome, self._go, reply.encode())

    def _is_late(self, outcome: Outcome) -> bool:
        """Return whether the round has ended because this rank had not arrived.

        If a circle of waits has ended the round, this rank may have raised the error elsewhere.
        """
        if outcome.event in self.scope.memory.raised:
            return True
        return outcome.kind == "missing" and self.scope.world.rank in outcome.absent

    def _error_of(self, outcome: Outcome) -> CreationError:
        """Return the error for a failed round."""
        world = self.scope.world
        name = world.title(world.rank)
        title = self.call.title()
        if outcome.event:
            self.scope.memory.raised.add(outcome.event)
        elif self._is_late(outcome):
            return LateRankError(f"{title}: the other ranks have continued without {name}")
        if outcome.kind == "missing":
            waited = timedelta(seconds=system.now() - self.began)
            return GroupCreationTimeout(
                f"{title}: {outcome.text}; {name} waited {waited.total_seconds():.1f} s",
                missing=outcome.missing,
                absent=outcome.absent,
                waited=waited,
            )
        kinds: dict[str, type[CreationError]] = {
            "differs": PlanMismatchError,
            "late": LateRankError,
            "restarted": WorldRestartedError,
        }
        error = kinds.get(outcome.kind, CreationError)(f"{title}: {outcome.text}")
        error.data = outcome.data
        return error


def _end(store: Any, go: str, text: str) -> str:
    """Write the outcome of a round, unless it has one. Return the outcome that it has."""
    held: str = store.compare_set(go, "", text).decode(errors="replace")
    store.set(go, held)  # a compare-and-set wakes nobody
    return held


def _store_failed(
    world: World, title: str, error: RuntimeError, *, has_arrived: bool
) -> CreationError:
    """Return the error for a store that is gone or does not answer."""
    reason = (str(error).splitlines() or [""])[0]
    how = "does not answer" if isinstance(error, LateError) else "is gone"
    where = f"{world.store_name} {how} ({reason}); {world.advice_if_store_lost}"
    if has_arrived:
        text = f"the outcome of {title} on the other ranks is unknown: {where}"
        return OutcomeUnknownError(text)
    return CreationError(f"{title} failed: {where}")


# ---- differences between ranks ------------------------------------------------------------------


def first_difference(own: Sequence[str], theirs: Sequence[str], here: str, there: str) -> str:
    """Describe the first entry in which the calls of two ranks differ.

    Args:
        own: The entries of this rank.
        theirs: The entries of the other rank.
        here: The name of this rank.
        there: The name of the other rank.
    """
    pairs = zip_longest(own, theirs, fillvalue="nothing more")
    for position, (mine, other) in enumerate(pairs):
        if mine == other:
            continue
        headline, *options = mine.split("\n")
        other_headline, *others = other.split("\n")
        at = f"ranks differ at position {position} of the call"
        if headline != other_headline or len(options) != len(others):
            return f"{at}: {here} calls {headline}, and {there} calls {other_headline}"
        return f"{differing(zip(options, others, strict=True), here, there)}; {at}, {headline}"
    return f"the call of {here} differs from the call of {there}"


def differing(pairs: Iterable[tuple[str, str]], here: str, there: str) -> str:
    """Describe the options that differ between two ranks.

    >>> differing([("share: a", "share: a"), ("timeout: 1", "timeout: 2")], "rank 0", "rank 1")
    'timeout: 1 on rank 0, 2 on rank 1'
    """
    return "; ".join(
        f"{mine} on {here}, {theirs.partition(': ')[2]} on {there}"
        for mine, theirs in pairs
        if mine != theirs
    )


def explain_circle(circle: Sequence[Status]) -> str:
    """Describe ranks that wait for each other, and their grids if these differ."""
    waits = "; ".join(
        f"{status.name} waits in {status.call} for {ahead.title}"
        for status, ahead in zip(circle, [*circle[1:], circle[0]], strict=True)
    )
    own = circle[0]
    others = [one for one in circle if one.grid not in ("", own.grid)]
    if not others or not own.grid:
        return f"ranks wait for each other in different calls: {waits}; {SAME_CALLS}"
    mine = json.loads(own.grid)
    theirs = json.loads(others[0].grid)
    fields = [(f"{name}: {mine[name]}", f"{name}: {theirs.get(name)}") for name in mine]
    return f"{differing(fields, own.name, others[0].name)}; {_DIFFERENT_GRIDS}; {waits}"


# ---- the connection to the store ----------------------------------------------------------------

_busy: list[Any] = []
"""The store clients, without prefixes, that calls of this process are using."""

_busy_lock = threading.Lock()


def _begin_again() -> None:
    """Forget the threads of the parent process after a fork."""
    global _busy_lock  # noqa: PLW0603 - a thread of the parent process may hold it
    _busy_lock = threading.Lock()
    _busy.clear()


os.register_at_fork(after_in_child=_begin_again)


@contextlib.contextmanager
def client_of(store: Any) -> Iterator[Any]:
    """Yield a client of a store that no other call of this process uses at the same time.

    A request that blocks, such as a wait, occupies its client, and several worlds may have the same
    client. If another call already uses the client, this call gets a new connection. The connection
    is closed after the `with` block, unless a process group that was created with it still uses it.
    """
    own = torchdist.without_prefix(store)
    with _busy_lock:
        is_free = all(one is not own for one in _busy)
        if is_free:
            _busy.append(own)
    try:
        yield store if is_free else clone(store)
    finally:
        if is_free:
            with _busy_lock:
                _busy[:] = [one for one in _busy if one is not own]


def clone(store: Any) -> Any:
    """Return a new connection to a store, or the store itself if it has only one client."""
    try:
        return store.clone()
    except (AttributeError, NotImplementedError):
        return store
    except RuntimeError as error:
        if "pure virtual" in str(error):  # the store is written in Python, and has no clone()
            return store
        raise


# ---- the functions for other modules ------------------------------------------------------------


def ask(world: World, title: Callable[[], str], request: Callable[[], T], limit_s: float) -> T:
    """Make requests to the store of a world in another thread, and return the result.

    Args:
        world: The world.
        title: Returns the call as users know it, for the error.
        request: Makes the requests.
        limit_s: The limit for the requests, in seconds.

    Raises:
        CreationError: The store is gone, or does not answer.
    """
    try:
        return in_time(request, limit_s)
    except HyperCommError:
        raise
    except RuntimeError as error:
        raise _store_failed(world, title(), error, has_arrived=False) from error


@contextlib.contextmanager
def meet(scope: Scope, call: Call, limit_s: float) -> Iterator[Meeting]:
    """Wait until all ranks of a scope have arrived. The `with` block then does the work.

    Only one thread of this rank at a time can be in such a block with the same scope.

    Args:
        scope: The ranks that make the call together.
        call: The call, which must be equal on all ranks.
        limit_s: The time within which all ranks must arrive, in seconds.

    Raises:
        PlanMismatchError: Ranks make different calls, or have built different grids.
        GroupCreationTimeout: Ranks are missing. The error names them.
        LateRankError: The other ranks timed out before this rank arrived.
        WorldRestartedError: A rank of a joined world has begun again.
        CreationError: A rank failed, or the store is gone.
        OutcomeUnknownError: The store is gone, and the other ranks may have arrived.
    """
    began = system.now()
    lock = scope.memory.lock_of(scope.path)
    if not lock.acquire(timeout=min(limit_s, system.longest_s)):
        raise CreationError(
            f"{call.title()} failed: another thread of this rank waits in the same call"
        )
    try:
        with client_of(scope.world.store) as client:
            meeting = Meeting(scope, call, limit_s, client, began)
            meeting.arrive()
            yield meeting
    finally:
        lock.release()


def agree(scope: Scope, title: str, entries: Sequence[str], limit_s: float) -> str:
    """Meet the other ranks, and return a name that is the same on all ranks and new in each call.

    Args:
        scope: The ranks that make the call together.
        title: The call as users know it.
        entries: The call as text, which must be equal on all ranks.
        limit_s: The time within which all ranks must arrive, in seconds.

    Raises:
        CreationError: See `meet`.
    """
    with meet(scope, Call.of(title, entries), limit_s) as meeting:
        return meeting.name


def refuse(scope: Scope, error: BaseException) -> None:
    """Fail the next call of a scope on the other ranks, because this rank cannot take part.

    The other ranks then do not wait for this rank. This function raises nothing, because its caller
    raises `error`.

    Args:
        scope: The ranks.
        error: The error of this rank. The other ranks raise a CreationError with its text.
    """
    lock = scope.memory.lock_of(scope.path)
    if not lock.acquire(timeout=_REFUSAL_S):
        return  # the call of another thread must not fail because of this error
    try:
        with client_of(scope.world.store) as client:
            Meeting(scope, Call.of("refuse()", ()), 0.0, client, system.now()).refuse(error)
    finally:
        lock.release()


@contextlib.contextmanager
def refusing(scope: Scope | None) -> Iterator[None]:
    """Call `refuse` if the `with` block raises an error."""
    try:
        yield
    except BaseException as error:
        if scope is not None:
            refuse(scope, error)
        raise


_active: set[Meeting] = set()
"""The calls in which threads of this process wait."""


def _end_all() -> None:
    """End all calls when the interpreter exits, so that no helper thread is left in a request."""
    meetings = list(_active)
    for meeting in meetings:
        meeting._give_up("has exited")
    if meetings:
        system.sleep(2 * _LINGER_S)


atexit.register(_end_all)
