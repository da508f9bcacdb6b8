"""The agreement protocol, sans-I/O: the whole call of one rank, as one generator.

Three laws hold:

1. A round has one outcome, written by one compare-and-set. Every rank adopts it.
2. A rank leaves a round only after it has read or written its outcome.
3. The next round is read from the record, never counted: ranks that failed or were late join the
   same one.

`Member.call` yields operations and is sent the replies. `driver.Driver` performs them in a job, the
simulated job and the search of all schedules perform them in tests.

Without a fault a rank sends three requests and waits for one key: it joins the round, it sets its
bit among those that have finished, and it waits for the end of the round. If the work connects
ranks, a rank first sets its bit among those that have arrived and waits until all have, so that the
backend never waits for a rank that is missing.

A rank that waits for long reports where and for whom, so that errors name the rank that is missing,
and deadlocks. The report stays after a failure until the next call of the rank, so that ranks that
time out together find the one that none of them has seen.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Container, Iterable, Sequence
from itertools import zip_longest

import attrs

from hypercomm.errors import CreationError, HyperCommError
from hypercomm.layout.text import format_coords
from hypercomm.process_groups.agreement.records import (
    AGREED,
    AGREED_TEXT,
    WIDTH,
    Delete,
    Entries,
    Exchange,
    InterruptedCallError,
    MarkedTwiceError,
    Moment,
    Now,
    Outcome,
    Proposer,
    Read,
    Record,
    Status,
    Steps,
    StoreLostError,
    Ticket,
    Tree,
    Wait,
    Work,
    Write,
)
from hypercomm.process_groups.agreement.scope import MOST, Scope, this_host
from hypercomm.process_groups.torch_internals import ConnectionFailedError

_SLOW_S = 0.2
"""How long a rank waits before it reports that it does, and checks whether it waits in vain."""

_SLOW_RANKS = 4000
"""The delay grows with the world, by a second for so many ranks."""

_FINISHED_S = 0.6
"""Extra wait of ranks that have finished, so that the others name who is missing."""

_FOLLOW_S = 0.3
"""Extra wait of ranks that do not search, so that few ranks read who is missing at once."""

_SEARCHERS = 16
"""How many ranks of a scope of one block search; in a larger scope one of each block does."""

_STUCK_S = 1.0
"""How long a rank that could not connect waits for members to connect or fail."""

_FIRST_S = 1.0
"""How long a rank whose proposal differs waits for the text of the first one."""

SAME_CALLS = "every rank must make the same calls in one order"

_GO = "go"

_CONNECTING = "members connect at the creation"
"""The last entry of a proposal whose work needs the other ranks."""


class EndedCallError(Exception):
    """The call ends on this rank, which leaves its round as it is.

    Args:
        outcome: How the call ends.
        ends_own: Whether this rank ends the round with the outcome if it has begun it.
    """

    def __init__(self, outcome: Outcome, *, ends_own: bool = False) -> None:
        super().__init__(outcome.text)
        self.outcome = outcome
        self.ends_own = ends_own


# ---- one round ----------------------------------------------------------------------------------


def propose(
    key: str,
    first: Proposer,
    size: int,
    *,
    left: int = -1,
    entered: int = -1,
    reported: Container[str] = (),
    refusal: Outcome | None = None,
    is_claimed: bool = False,
) -> Steps[Ticket]:
    """Join the open round of a record, or begin the next one; the caller compares proposals.

    If a round has failed before this rank arrived, return it with its outcome. After a timeout a
    late rank joins the next round, where the others join it.

    Args:
        key: The key of the record.
        first: This rank, which may be the first one.
        size: The number of ranks of the scope.
        left: The last round that this rank has left; -1 for none.
        entered: The last round that this rank has arrived in; -1 for none.
        reported: The tokens of outcomes that this rank has raised already.
        refusal: The outcome of a round that this rank begins and cannot take part in.
        is_claimed: As for `Scope`.
    """
    record = Record(0, first, refusal)
    own = record.encode()
    text = yield Exchange(key, "", own)
    while text != own:
        found = Record.decode(key, text)
        missed = found.failed_since(left)
        if missed is not None and missed.outcome and missed.outcome.token not in reported:
            return Ticket(key, missed, size)
        if found.outcome is None:
            is_own = found.first.is_same_rank(first, in_process=is_claimed)
            is_adopted = found.first.is_same_call(first) and found.round != entered
            if refusal is not None or is_adopted or not (is_own or found.round == entered):
                return Ticket(key, found, size)
            # This rank was in the round, and left it because of an error of the store.
            again = Outcome("failed", f"{first.name} began the call again")
            yield from decide(Ticket(key, found, size), again)
            left = found.round
            text = (yield Read(key)) or ""
            continue
        if refusal is not None and found.round > left and first.rank in found.outcome.absent:
            return Ticket(key, found, size)  # the others do not wait for this rank any more
        record = attrs.evolve(found.next(first), outcome=refusal)
        own = record.encode()
        text = yield Exchange(key, text, own)
        if text == own:
            yield from _delete_before(Ticket(key, found, size))
    return Ticket(key, record, size)


def _delete_before(ended: Ticket) -> Steps[None]:
    """Delete the keys of the round before one that has ended: all ranks have left that."""
    if ended.round == 0:
        return
    before = ended.before
    is_agreed = ended.record.outcome == AGREED
    keys = [] if is_agreed else [before.end]  # the last rank of a round that agreed has deleted it
    if ended.record.failed:  # else its ranks have deleted the others
        trees = (before.arrived, before.done, before.stuck)
        keys += [before.first, before.go, *(key for tree in trees for key in tree.all_keys())]
    if keys:
        yield Delete(keys)


def decide(ticket: Ticket, outcome: Outcome) -> Steps[Outcome]:
    """End a round, unless another rank has; return the outcome that holds, and wake all ranks."""
    record = ticket.record
    while True:
        expected = record.encode()
        wanted = attrs.evolve(record, outcome=outcome).encode()
        text = yield Exchange(ticket.key, expected, wanted)
        if text == wanted:
            break
        if text == expected:
            raise CreationError(f"the store has lost its key {ticket.key!r}; restart the job")
        record = Record.decode(ticket.key, text)
        found = record.outcome_of(ticket.round)
        if found is not None:
            outcome = found
            break
    if record.round == ticket.round:
        yield Write(ticket.end, outcome.encode())
        if outcome.kind != "agreed":
            yield Write(ticket.go, outcome.encode())
    return outcome


def read_record(key: str) -> Steps[Record | None]:
    """Return the record that a key holds; None if there is none."""
    text = yield Read(key)
    return None if text is None else Record.decode(key, text)


def read_outcome(ticket: Ticket) -> Steps[Outcome | None]:
    """Return how a round has ended; None while it is open."""
    record = yield from read_record(ticket.key)
    return None if record is None else record.outcome_of(ticket.round)


# ---- differences --------------------------------------------------------------------------------


def as_entry(headline: str, options: dict[str, object]) -> str:
    r"""Return what a rank proposes as one text, for comparison.

    >>> as_entry("tp over 2 groups", {"timeout": "0:00:20", "share": "never"})
    'tp over 2 groups\ntimeout: 0:00:20\nshare: never'
    """
    return "\n".join([headline, *(f"{name}: {value}" for name, value in options.items())])


def digest_of(lines: Iterable[str]) -> str:
    """Return a short digest that is equal for equal entries."""
    return hashlib.sha256(json.dumps(list(lines)).encode()).hexdigest()[:16]


def first_difference(own: Sequence[str], theirs: Sequence[str], here: str, there: str) -> str:
    """Describe the first entry that the proposals of two ranks differ in.

    Args:
        own: The entries of this rank.
        theirs: The entries of the first rank.
        here: The name of this rank.
        there: The name of the first rank.
    """
    pairs = zip_longest(own, theirs, fillvalue="nothing more")
    for position, (mine, other) in enumerate(pairs):
        if mine == other:
            continue
        headline, *options = mine.split("\n")
        other_headline, *others = other.split("\n")
        if headline != other_headline or len(options) != len(others):
            return (
                f"ranks differ at position {position}: {here} calls {headline}, and {there}, "
                f"which arrived first, calls {other_headline}"
            )
        fields = differing(zip(options, others, strict=True), here, there)
        return f"{fields}; ranks differ at position {position}, {headline}"
    return f"{here} proposes something else than {there}, which arrived first"


def differing(pairs: Iterable[tuple[str, str]], here: str, there: str) -> str:
    """Describe the options of two ranks that differ.

    >>> differing([("share: a", "share: a"), ("timeout: 1", "timeout: 2")], "rank 0", "rank 1")
    'timeout: 1 on rank 0, 2 on rank 1'
    """
    return "; ".join(
        f"{mine} on {here}, {theirs.partition(': ')[2]} on {there}"
        for mine, theirs in pairs
        if mine != theirs
    )


# ---- ranks that wait for each other --------------------------------------------------------------


def status_key(namespace: str, rank: int) -> str:
    """Return the key that holds the status of a rank."""
    return f"{namespace}/rank {rank}"


def read_status(namespace: str, rank: int) -> Steps[Status | None]:
    """Return the status of a rank; None if it has not waited for long, or has continued since.

    Raises:
        CreationError: The key holds something else.
    """
    key = status_key(namespace, rank)
    text = yield Read(key)
    return Status.decode(key, text) if text else None


def find_circle(
    namespace: str, own: Status, known: dict[int, Status | None]
) -> Steps[list[Status]]:
    """Return one waiting rank of each round that waits for the next one; [] without a circle.

    The circle contains the round of this rank. A rank with several waiting threads is in none:
    another thread may end the wait. All is read twice, so that a rank that was about to continue
    is not in it.

    Args:
        namespace: The prefix of all keys.
        own: The status of this rank.
        known: Receives the status of each rank that was read.
    """
    known[own.rank] = own
    circle = yield from _find_way_back(namespace, [own], known)
    if any(status.threads > 1 for status in circle):
        return []
    for status in circle:
        record = yield from read_record(status.key)
        if record is None or record.outcome_of(status.round) is not None:
            return []
        if status is not own and (yield from read_status(namespace, status.rank)) != status:
            return []
    return circle


def _find_way_back(
    namespace: str, path: list[Status], known: dict[int, Status | None]
) -> Steps[list[Status]]:
    for rank in path[-1].waits_for[:MOST]:
        if rank not in known:
            known[rank] = yield from read_status(namespace, rank)
        status = known[rank]
        if status is None or status.outcome is not None or len(path) == MOST:
            continue
        if len(path) > 1 and status.place == path[0].place:
            return [status, *path[1:]]
        if any(status.place == one.place for one in path):
            continue
        found = yield from _find_way_back(namespace, [*path, status], known)
        if found:
            return found
    return []


def explain_circle(circle: Sequence[Status]) -> Outcome:
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


# ---- the call of one rank -----------------------------------------------------------------------


@attrs.define(eq=False)
class Member:
    """The calling rank in one call of a scope.

    Args:
        scope: The ranks that make the call together.
        title: The call, as users know it.
        entries: Returns what this rank proposes, which must be equal on all ranks.
        began: When the call began.
        deadline: When this rank stops to wait.
        is_connecting: Whether the work needs the other ranks, so that all must have arrived.
        threads: Returns how many threads of this process wait for other ranks of the world.

    Attributes:
        ticket: The round; None before this rank has proposed.
        is_working: Whether all ranks that the work needs have arrived, so that this rank works.
        is_finished: Whether this rank has finished its work.
        error: The error of this rank itself, which it raises in place of the outcome.
    """

    scope: Scope
    title: str
    entries: Callable[[], Sequence[str]]
    began: float
    deadline: float
    is_connecting: bool = False
    threads: Callable[[], int] = attrs.field(default=lambda: 1, repr=False)
    ticket: Ticket | None = None
    is_working: bool = False
    is_finished: bool = False
    error: BaseException | None = None
    _is_first: bool = False
    _reports: tuple[int, ...] | None = None
    _peers: dict[int, Status] = attrs.field(factory=dict)

    def call(self) -> Steps[Outcome]:
        """Make the call: join the round, do the work, and return the outcome of all ranks."""
        try:
            yield from self._join()
            if self.is_connecting:
                yield from self._gather(self._round.arrived, self._round.go)
            self.is_working = True
            yield from self._do_work()
            self.is_finished = True
            yield from self._gather(self._round.done, self._round.end)
            outcome = AGREED
        except EndedCallError as ended:
            outcome = ended.outcome
            if ended.ends_own and self._is_first:
                yield from self._decide(outcome)
        except GeneratorExit:
            raise
        except BaseException as error:  # noqa: BLE001 - the other ranks must not wait for it
            outcome = yield from self._fail(error)
        yield from self._report_end(outcome)
        self.leave(outcome)
        return outcome

    def leave(self, outcome: Outcome | None) -> None:
        """Remember that this rank has left the round with an outcome; None: it is unknown."""
        memory, path = self.scope.memory, self.scope.path
        if outcome is not None and outcome.token:
            memory.reported.add(outcome.token)
        if self.ticket is not None:
            memory.leave(path, self.ticket.round)
            if outcome == AGREED:
                memory.agreed[path] = self.ticket.round

    def interrupt(self, reason: str) -> Steps[Outcome]:
        """End the round with an error; also from another thread, if that of this rank is stuck."""
        if self.ticket is None:
            return (yield from self.refuse(reason))
        return (yield from self._decide(Outcome("failed", reason)))

    def give_up(self, steps: Steps[Outcome]) -> Steps[Outcome]:
        """End the round by other steps, and the report that this rank waits, without its worker."""
        outcome = yield from steps
        yield from self._report_end(outcome)
        return outcome

    def time_out(self, moment: Moment) -> Steps[Outcome]:
        """End the round at the deadline; also from another thread, if this rank's own is stuck."""
        scope, entered = self.scope, self.scope.memory.entered.get(self.scope.path)
        if moment.was_stopped and (self.ticket is None or self.ticket.round != entered):
            return self._late(scope.world.rank)  # the others do not wait any more
        if self.ticket is None:  # the others time out themselves; a refusal would end their retry
            return Outcome("failed", f"{scope.name} failed: the store did not answer")
        key = self.ticket.end if self.is_working else self.ticket.go
        tree = self.ticket.done if self.is_working else self.ticket.arrived
        outcome = yield from self._find_missing(tree, key, moment)
        return (yield from self._decide(outcome or AGREED))

    def refuse(self, reason: str, data: str = "") -> Steps[Outcome]:
        """Fail the next round that is open on other ranks, or that they begin; wait for nobody."""
        scope = self.scope
        key = yield from scope.read_key()
        refusal = Outcome("failed", reason, data=data)
        ticket = yield from self._propose(key, self._proposer(""), refusal)
        outcome = ticket.record.outcome
        if outcome is None:
            outcome = yield from decide(ticket, refusal)
        scope.memory.leave(scope.path, ticket.round)
        return outcome

    @property
    def _round(self) -> Ticket:
        if self.ticket is None:
            raise RuntimeError(f"{self.title} has not proposed anything")
        return self.ticket

    def _decide(self, outcome: Outcome) -> Steps[Outcome]:
        return (yield from decide(self._round, outcome))

    def _end(self, outcome: Outcome) -> Steps[None]:
        """End the round, and the call with the outcome that holds."""
        raise EndedCallError((yield from self._decide(outcome)))

    # ---- joining --------------------------------------------------------------------------------

    def _proposer(self, digest: str) -> Proposer:
        world, memory = self.scope.world, self.scope.memory
        token = f"{memory.process}-{memory.next_number('proposals')}"
        return Proposer(world.rank, world.title(world.rank), this_host(), digest, token)

    def _propose(self, key: str, first: Proposer, refusal: Outcome | None = None) -> Steps[Ticket]:
        memory, path = self.scope.memory, self.scope.path
        return (
            yield from propose(
                key,
                first,
                len(self.scope.ranks),
                left=memory.left.get(path, -1),
                entered=memory.entered.get(path, -1),
                reported=memory.reported,
                refusal=refusal,
                is_claimed=self.scope.is_claimed,
            )
        )

    def _join(self) -> Steps[None]:
        """Join the round, and compare the proposal of this rank with the first one."""
        scope, memory = self.scope, self.scope.memory
        key = yield from scope.read_key()
        lines = tuple(self.entries())
        if self.is_connecting:  # ranks that differ in this would wait for each other
            lines = (*lines, _CONNECTING)
        if memory.is_reporting:
            memory.is_reporting = False
            yield Write(status_key(memory.namespace or "", scope.world.rank), "")
        own = self._proposer(digest_of(lines))
        self.ticket = ticket = yield from self._propose(key, own)
        first = ticket.record.first
        self._is_first = first == own
        if ticket.record.outcome is not None:
            raise EndedCallError(ticket.record.outcome)
        if scope.is_fenced and ticket.record.agreed > memory.agreed.get(scope.path, -1):
            raise CreationError(
                f"other ranks have continued without {scope.world.title(scope.world.rank)}; end "
                f"this process, or start the job again"
            )
        moment = yield Now()
        if moment.seconds > self.deadline:
            late = self._late(scope.world.rank)
            if self._is_first:
                yield from self._end(late)
            raise EndedCallError(late)  # this rank may join the others at its next call
        if first.is_same_call(own):
            yield Write(ticket.first, Entries(lines).encode())
        elif first.digest != own.digest:
            yield from self._differ(lines, own, moment)

    def _differ(self, lines: Sequence[str], own: Proposer, moment: Moment) -> Steps[None]:
        """End the round, because the proposal of this rank is not the first one."""
        ticket = self._round
        text = yield Wait(ticket.first, moment.seconds + _FIRST_S)
        theirs = () if text is None else Entries.decode(ticket.first, text).lines
        reason = first_difference(lines, theirs, own.name, ticket.record.first.name)
        yield from self._end(Outcome("differs", f"{reason}; {SAME_CALLS}", token=ticket.name))

    # ---- waiting for the others -----------------------------------------------------------------

    def _gather(self, tree: Tree, key: str) -> Steps[None]:
        """Set the bit of this rank, and wait until all ranks have set theirs.

        Raises:
            EndedCallError: The round has failed.
        """
        scope, ticket = self.scope, self._round
        scope.memory.entered[scope.path] = ticket.round
        is_end = key == ticket.end
        try:
            is_last, complete = yield from tree.mark(scope.position)
        except MarkedTwiceError:
            again = Outcome("restarted", f"{scope.name} has begun again")
            raise EndedCallError((yield from self._decide(again))) from None
        if not is_last:
            stale = [*complete, *scope.memory.take_stale()]
            if stale:
                yield Delete(stale)
            text = yield from self._wait(tree, key)
            if text not in (_GO, AGREED_TEXT):
                outcome = Outcome.decode(key, text)
                if outcome.kind != "agreed":
                    raise EndedCallError(outcome)
        elif is_end:
            outcome = yield from self._decide(AGREED)
            if outcome.kind != "agreed":
                raise EndedCallError(outcome)
            rest = [ticket.first, *([ticket.go] if self.is_connecting else [])]
            if ticket.round > 0:
                rest.append(ticket.before.end)  # all ranks have left that round
            yield Delete([*complete, *rest, *scope.memory.take_stale()])
        else:
            yield Write(key, _GO)
            yield Delete(complete)

    def _wait(self, tree: Tree, key: str) -> Steps[str]:
        """Wait for a key that is written when all bits of a tree are set; return what it holds."""
        slow_s = self.slow_s
        end = self.deadline + (_FINISHED_S if self.is_finished else 0.0)
        moment = yield Now()
        until = moment.seconds + slow_s
        while True:
            text: str | None = yield Wait(key, until)
            if text is not None:
                return text
            moment = yield Now()
            if moment.seconds >= end:
                outcome = yield from self._find_missing(tree, key, moment)
                if outcome is not None:
                    yield from self._end(outcome)
                until = moment.seconds + slow_s  # all are there: the key is about to be set
                continue
            searches = yield from self._check(tree)
            if searches:
                until = min(
                    end, moment.seconds + max(slow_s / 2, (moment.seconds - self.began) / 4)
                )
            else:
                until = end = max(end, self.deadline + _FOLLOW_S)

    @property
    def slow_s(self) -> float:
        """How long this rank waits before it reports that it does, in seconds."""
        size = self.scope.world.size
        return min((self.deadline - self.began) / 4, max(_SLOW_S, size / _SLOW_RANKS))

    def _check(self, tree: Tree) -> Steps[bool]:
        """Report that this rank waits, and end the round if it waits in vain.

        Returns:
            Whether this rank is one of the few that check again.
        """
        scope, ticket, world = self.scope, self._round, self.scope.world
        outcome = yield from read_outcome(ticket)
        if outcome is not None:
            raise EndedCallError(outcome)
        missing, before = yield from tree.look_around(scope.position)
        if not missing and ticket.size > WIDTH:
            missing = yield from tree.unmarked(MOST)
        waits_for = tuple(scope.ranks[position] for position in missing[:MOST])
        own = yield from self._report(waits_for)
        if before >= (_SEARCHERS if ticket.size <= WIDTH else 1):
            return False
        reason = "" if scope.is_claimed else (yield from world.why_ended())
        if reason:
            yield from self._end(Outcome("restarted", reason))
        namespace = scope.memory.namespace or ""
        known: dict[int, Status | None] = {}
        circle = yield from find_circle(namespace, own, known)
        self._peers |= {rank: one for rank, one in known.items() if one and one.outcome is None}
        if circle:
            outcome = explain_circle(circle)
            for status in circle[1:]:
                record = yield from read_record(status.key)
                if record is not None and record.round == status.round:
                    yield from decide(Ticket(status.key, record, 0), outcome)
            yield from self._end(outcome)
        for rank in own.waits_for if own.grid else ():
            peer = yield from read_status(namespace, rank)
            found = None if peer is None else peer.outcome
            if found and own.grid in found.grids and found.token not in scope.memory.reported:
                yield from self._end(found)
        return True

    # ---- the work -------------------------------------------------------------------------------

    def _do_work(self) -> Steps[None]:
        """Do the work of this rank, and stop to wait for it if the round ends meanwhile."""
        moment = yield Now()
        began = moment.seconds
        until = began + self.slow_s
        while not (yield Work(until)):
            moment = yield Now()
            if moment.seconds >= self.deadline:
                raise EndedCallError((yield from self.time_out(moment)))
            yield from self._report(())
            outcome = yield from read_outcome(self._round)
            if outcome is not None:
                raise EndedCallError(outcome)
            until = min(self.deadline, began + 2 * (moment.seconds - began))

    # ---- failures -------------------------------------------------------------------------------

    def _fail(self, error: BaseException) -> Steps[Outcome]:
        """End the round, because of an error of this rank."""
        name = self.scope.name
        if isinstance(error, InterruptedCallError):
            return (yield from self.interrupt(f"{name} was interrupted"))
        if isinstance(error, StoreLostError):
            reason = f"{name} failed: it has lost an operation of the store ({error.__cause__})"
            if self.ticket is not None:  # the store may be back
                return (yield from self._decide(Outcome("failed", reason)))
            with contextlib.suppress(HyperCommError, StoreLostError):
                yield from self.refuse(reason)
            raise error
        if isinstance(error, ConnectionFailedError):
            return (yield from self._decide((yield from self._could_not_connect(error))))
        self.error = error
        outcome = Outcome("failed", failure_of(name, error), data=getattr(error, "data", ""))
        if self.ticket is not None:
            return (yield from self._decide(outcome))
        with contextlib.suppress(HyperCommError, StoreLostError):
            yield from self.refuse(outcome.text, outcome.data)
        return outcome

    def _could_not_connect(self, error: Exception) -> Steps[Outcome]:
        """Return the outcome if a backend could not connect: names the members that are silent."""
        scope, ticket = self.scope, self._round
        yield from ticket.stuck.mark(scope.position)
        moment = yield Now()
        until = moment.seconds + _STUCK_S
        while True:
            outcome = yield from read_outcome(ticket)
            if outcome is not None:
                return outcome
            stuck = yield from ticket.stuck.unmarked()
            unfinished = yield from ticket.done.unmarked()
            silent = [scope.ranks[one] for one in unfinished if one in {*stuck}]
            moment = yield Now()
            if not silent or moment.seconds >= until:
                break
            try:
                yield Wait(ticket.end, moment.seconds + _STUCK_S / 20)
            except InterruptedCallError:
                return Outcome("failed", f"{scope.name} was interrupted")
        if silent:
            silent = (yield from self._silent_of(silent)) or silent
            return (yield from self._missing(silent, "unfinished", "did not connect"))
        return Outcome("failed", f"members could not connect ({error}); call it again on all ranks")

    def _find_missing(self, tree: Tree, key: str, moment: Moment) -> Steps[Outcome | None]:
        """Return the outcome at the deadline; None if all ranks are there, and `key` is set."""
        scope, ticket = self.scope, self._round
        positions = yield from tree.unmarked()
        if key == ticket.go and (yield Read(key)) is not None:
            return None
        if not positions:
            if key == ticket.end:
                return AGREED  # the rank that has set the last bit has died before it wrote so
            yield Write(key, _GO)
            return None
        absent = [scope.ranks[position] for position in positions]
        own = scope.world.rank
        if self.is_working and not self.is_finished and not self.is_connecting:
            text = f"timed out: {scope.name} did not finish its own part"
            return Outcome("unfinished", text, (own,), (own,))
        if key == ticket.go or not self.is_connecting:
            before = (ticket.record.failed or (None,))[-1]
            here = {*scope.ranks} - {*absent} if before else set()
            if before is not None and here and here <= {*before.absent}:
                return self._late(*sorted(here))  # the others wait for none of these any more
            return (yield from self._missing(absent, "missing", "did not join"))
        if moment.was_stopped:
            return self._late(own)
        silent = yield from self._silent_of(absent)
        if not silent and not self.is_finished:  # all of them still wait for each other
            return Outcome("unfinished", "timed out before all ranks had finished; call it again")
        return (yield from self._missing(silent or absent, "unfinished", "did not finish"))

    def _silent_of(self, ranks: Sequence[int]) -> Steps[list[int]]:
        """Return the ranks that do not report that they wait in this round."""
        silent, ticket = [], self._round
        for rank in ranks:
            status = yield from read_status(self.scope.memory.namespace or "", rank)
            if status is None or status.place != (ticket.key, ticket.round):
                silent.append(rank)
        return silent

    @staticmethod
    def _late(*ranks: int) -> Outcome:
        return Outcome("missing", f"timed out: ranks {list(ranks)} arrived late", ranks, ranks)

    def _missing(self, ranks: Sequence[int], kind: str, what: str) -> Steps[Outcome]:
        causes, names = yield from self._name_missing(ranks)
        text = f"timed out: {names or 'members'} {what}; every rank must make this call"
        return Outcome(kind, text, causes, tuple(ranks))

    def _name_missing(self, missing: Sequence[int]) -> Steps[tuple[tuple[int, ...], str]]:
        """Return the ranks that are the cause of a timeout, and their names; raises nothing.

        A missing rank that itself waits elsewhere, or that was seen to wait and has timed out just
        now, is not the cause, but the ranks that it waits for are. The first ones are named with
        coordinates, host and call.
        """
        here = {*self.scope.ranks} - {*missing}
        known: dict[int, Status | None] = {}

        def status_of(rank: int) -> Steps[Status | None]:
            if rank not in known:
                known[rank] = None
                with contextlib.suppress(CreationError, StoreLostError):  # only the text suffers
                    known[rank] = yield from read_status(self.scope.memory.namespace or "", rank)
            return known[rank]

        causes: dict[int, None] = {}
        for rank in missing[:MOST]:
            at, passed = rank, {rank}
            for _ in range(MOST):
                status = yield from status_of(at)
                ahead = status.waits_for if status is not None and self._waits(status) else ()
                others = [one for one in ahead if one not in passed and one not in here]
                if not others:
                    break
                at = others[0]
                passed.add(at)
            causes[at] = None
        causes |= dict.fromkeys(missing[MOST:])
        names = []
        for rank in [*causes][:MOST]:
            status = yield from status_of(rank)
            names.append(self._describe(rank, status))
        more = len(causes) - len(names)
        return tuple(causes), ", ".join(names) + (f" and {more} more" if more else "")

    def _waits(self, status: Status) -> bool:
        """Return whether a rank waits, or was seen to wait until it timed out just now."""
        if status.outcome is None:
            return True
        waited = self._peers.get(status.rank)
        is_same = waited is not None and waited.place == status.place
        return is_same and status.outcome.kind in ("missing", "unfinished")

    def _describe(self, rank: int, status: Status | None) -> str:
        layout, notes = self.scope.layout, []
        if layout is not None and rank in layout:
            notes.append(format_coords(layout.coords(rank)))
        if status is not None:
            notes.append(f"host {status.host}")
            if status.outcome is None:
                others = ", ".join(map(str, status.waits_for))
                ahead = f" for rank {others}" if others else ""
                notes.append(f"it waits in {status.call}{ahead}")
        return self.scope.world.title(rank) + (f" ({'; '.join(notes)})" if notes else "")

    # ---- reports --------------------------------------------------------------------------------

    def _status(self, waits_for: tuple[int, ...], outcome: Outcome | None = None) -> Status:
        scope, ticket = self.scope, self._round
        rank = scope.world.rank
        return Status(
            rank,
            scope.world.title(rank),
            this_host(),
            self.title,
            scope.grid,
            ticket.key,
            ticket.round,
            waits_for,
            self.threads(),
            outcome,
        )

    def _report(self, waits_for: tuple[int, ...]) -> Steps[Status]:
        """Report for which ranks this one waits, unless it has done so; return the report."""
        memory, rank = self.scope.memory, self.scope.world.rank
        own = self._status(waits_for)
        if waits_for != self._reports:
            self._reports = waits_for
            memory.is_reporting = True
            yield Write(status_key(memory.namespace or "", rank), own.encode())
        return own

    def _report_end(self, outcome: Outcome) -> Steps[None]:
        """Replace the report of this rank, if there is one, by how its call has ended."""
        if self.ticket is None or not (self._reports is not None or outcome.grids):
            return
        memory, has_failed = self.scope.memory, outcome.kind != "agreed"
        memory.is_reporting = has_failed
        text = self._status(self._reports or (), outcome).encode() if has_failed else ""
        key = status_key(memory.namespace or "", self.scope.world.rank)
        with contextlib.suppress(StoreLostError):
            yield Write(key, text)


def failure_of(name: str, error: BaseException) -> str:
    """Describe the failure of a rank for the others."""
    text = " ".join(str(error).split())[:500]
    return f"{name} failed: {type(error).__name__}: {text}"
