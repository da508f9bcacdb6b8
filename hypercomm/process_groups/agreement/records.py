"""The keys of the store that an agreement uses, and the operations that the protocol yields.

Ranks agree in *rounds* of a *record*, which is one key of the store. Round 7 of the record `R` has
these keys, in a scope of up to 60 ranks:

    R                the number of the round, a digest of the first proposal, and the outcome
    R/7/first        the first proposal; a rank reads it only if its own digest differs
    R/7/arrived/0.0  one bit for each rank that has arrived
    R/7/done/0.0     one bit for each rank that has finished
    R/7/go           written once, when all ranks have arrived, or the round has failed
    R/7/end          written once, when the round has an outcome
    R/7/roll         written when a rank calls the roll
    R/7/alive/0.0    one bit for each rank that has answered the roll call
"""

from __future__ import annotations

import json
from collections.abc import Container, Generator, Iterable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import attrs

from hypercomm.errors import CreationError

if TYPE_CHECKING:
    from typing_extensions import Self  # typing has it from Python 3.11 on

# ---- operations ---------------------------------------------------------------------------------


@attrs.frozen
class Exchange:
    """Set a key to `text` if its value is `expected`, or if it is not set and `expected` is "".

    The reply is the value of the key afterwards.
    """

    key: str
    expected: str
    text: str


@attrs.frozen
class Read:
    """Read a key. The reply is its value, or None if it is not set."""

    key: str


@attrs.frozen
class Add:
    """Add to the number in a key. The reply is the sum."""

    key: str
    amount: int


@attrs.frozen
class Write:
    """Set a key. The store sends no reply."""

    key: str
    text: str


@attrs.frozen
class Delete:
    """Delete keys."""

    keys: Sequence[str]


@attrs.frozen
class Wait:
    """Wait for a key. The reply is its value, or None if it is not set at the time `until`.

    A rank that waits sends one request and blocks. An interrupt raises `InterruptedCallError`.
    """

    key: str
    until: float


@attrs.frozen
class Work:
    """Do the work of this rank. The reply is whether the work is done at the time `until`.

    If the work is not done, the steps yield the operation again to wait longer. An error of the
    work is raised in the steps.
    """

    until: float


@attrs.frozen
class Now:
    """Read the clock. The reply is a `Moment`."""


@attrs.frozen
class Moment:
    """The time in seconds, and whether the process was stopped when the call's deadline passed."""

    seconds: float
    was_stopped: bool = False


Operation = Exchange | Read | Add | Write | Delete | Wait | Work | Now

T = TypeVar("T")
Steps = Generator[Operation, Any, T]
"""A generator that yields operations, is sent the replies, and returns a result."""


class InterruptedCallError(Exception):
    """The calling thread was interrupted while the call waited."""


class MarkedTwiceError(Exception):
    """Another process with the same rank has set the bit of this rank in the same round."""


class StoreLostError(Exception):
    """The store did not perform an operation. The cause is an error of torch."""


# ---- values -------------------------------------------------------------------------------------


class Stored:
    """A value that a key of the store holds, as JSON."""

    def encode(self) -> str:
        """Return the text that the key holds."""
        return _encoder.encode(self)

    @classmethod
    def decode(cls, key: str, text: str) -> Self:
        """Return the value that `encode` returned as `text`.

        Raises:
            CreationError: The text is not a value of this class.
        """
        try:
            found = cls(**json.loads(text))
            is_ours = _has_types(found) and found.encode() == text
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise _not_ours(key, text) from error
        if not is_ours:
            raise _not_ours(key, text)
        return found


def _not_ours(key: str, text: str) -> CreationError:
    return CreationError(
        f"the store's key {key!r} holds {text[:80]!r}, which hypercomm did not write; another "
        f"program uses the key, or the ranks have different versions of hypercomm"
    )


def _has_types(value: object) -> bool:
    """Return whether the fields of a value have the right types, also in nested values."""
    for name, kinds in _TYPES.get(type(value), {}).items():
        found = getattr(value, name)
        for one in found if isinstance(found, tuple) else (found,):
            if type(one) not in kinds or not _has_types(one):
                return False
    return True


def as_tuple(found: Iterable[Any]) -> tuple[Any, ...]:
    """Convert a list that was read from JSON."""
    return tuple(found)


_KINDS = ("agreed", "differs", "failed", "missing", "unfinished", "restarted")


@attrs.frozen
class Outcome(Stored):
    """The outcome of a round.

    Attributes:
        kind: "agreed", "differs", "failed", "missing" (ranks did not arrive), "unfinished" (ranks
            did not finish), or "restarted" (a rank has joined the world again).
        text: The reason, for the error that ranks raise.
        missing: The ranks that caused a timeout.
        absent: All ranks that had not arrived or finished. These are the missing ranks, and the
            ranks that wait for missing ranks in other calls.
        grids: The grids as text, if ranks have built different grids.
        token: Identifies the outcome, so that a rank which finds the outcome twice raises only one
            error.
        data: Data that the failed rank adds to the errors of the other ranks.
    """

    kind: str = attrs.field(validator=attrs.validators.in_(_KINDS))
    text: str = ""
    missing: tuple[int, ...] = attrs.field(default=(), converter=as_tuple)
    absent: tuple[int, ...] = attrs.field(default=(), converter=as_tuple)
    grids: tuple[str, ...] = attrs.field(default=(), converter=as_tuple)
    token: str = ""
    data: str = ""


AGREED = Outcome("agreed")
_MOST_FAILED = 16
"""The number of failed rounds that a record keeps, for ranks that have not seen them."""


@attrs.frozen
class Proposer:
    """The rank that began a round.

    Attributes:
        rank: The rank.
        title: The name of the rank in errors.
        host: The host of the rank.
        digest: The digest of the rank's proposal.
        token: Distinguishes attempts of one rank that are otherwise equal.
    """

    rank: int
    title: str
    host: str
    digest: str
    token: str

    @property
    def name(self) -> str:
        """The rank and its host, for errors."""
        return f"{self.title} (host {self.host})"

    def is_same_rank(self, other: Proposer, *, in_process: bool) -> bool:
        """Return whether one rank made both proposals, and with `in_process`, one process."""
        process, others = (one.token.partition("-")[0] for one in (self, other))
        is_same = (self.rank, self.title) == (other.rank, other.title)
        return is_same and (process == others or not in_process)

    def is_same_call(self, other: Proposer) -> bool:
        """Return whether one process made both proposals, and the proposals are equal.

        If the store replies late, an earlier attempt of this rank may have begun the round.
        """
        return self.is_same_rank(other, in_process=True) and self.digest == other.digest


def as_outcome(found: Any) -> Outcome | None:
    """Convert an outcome that was read from JSON."""
    return Outcome(**found) if isinstance(found, dict) else found


def _as_outcomes(found: Iterable[Any]) -> tuple[Outcome | None, ...]:
    return tuple(map(as_outcome, found))


def _as_proposer(found: Any) -> Proposer:
    return Proposer(**found) if isinstance(found, dict) else found


@attrs.frozen
class Record(Stored):
    """The value of the key of a record.

    Attributes:
        round: The number of the round.
        first: The rank that began the round.
        outcome: The outcome of the round, or None while it is open.
        failed: The outcomes of the failed rounds since the last round in which all ranks agreed.
        agreed_before: The last earlier round in which all ranks agreed, or -1.
    """

    round: int
    first: Proposer = attrs.field(converter=_as_proposer)
    outcome: Outcome | None = attrs.field(default=None, converter=as_outcome)
    failed: tuple[Outcome, ...] = attrs.field(default=(), converter=_as_outcomes)
    agreed_before: int = -1

    @property
    def agreed(self) -> int:
        """The last round in which all ranks agreed, or -1."""
        is_agreed = self.outcome is not None and self.outcome.kind == "agreed"
        return self.round if is_agreed else self.agreed_before

    def next(self, first: Proposer) -> Record:
        """Return the record of the next round."""
        failed: tuple[Outcome, ...] = ()
        if self.outcome is not None and self.outcome.kind != "agreed":
            failed = (*self.failed, self.outcome)
        return Record(
            self.round + 1, first, failed=failed[-_MOST_FAILED:], agreed_before=self.agreed
        )

    def outcome_of(self, number: int) -> Outcome | None:
        """Return the outcome of a round, or None while it is open."""
        if number == self.round:
            return self.outcome
        begin = self.round - len(self.failed)
        if number >= begin:
            return self.failed[number - begin]
        if number == begin - 1 and len(self.failed) < _MOST_FAILED:
            return AGREED
        return Outcome("failed", "the other ranks have made further calls since")

    def failed_since(self, left: int, reported: Container[str]) -> Record | None:
        """Return the record of the first failed round that a rank must report, or None.

        Args:
            left: The last round that the rank has left.
            reported: The tokens of outcomes that the rank must not raise again.
        """
        for number in range(max(left + 1, self.round - len(self.failed)), self.round + 1):
            outcome = self.outcome_of(number)
            if outcome is None or outcome.kind not in ("differs", "failed"):
                continue  # after a timeout, all ranks join the next round
            if outcome.token not in reported:
                return attrs.evolve(self, round=number, outcome=outcome)
        return None


@attrs.frozen
class Status(Stored):
    """The status of a rank that has waited for a long time.

    Attributes:
        rank: The rank.
        title: The name of the rank in errors.
        host: The host of the rank.
        call: The call in which the rank waits, as users know it.
        grid: The grid of the call, as text that ranks compare, or "" for a call without a grid.
        key: The key of the record.
        round: The round.
        waits_for: The ranks for which this rank waits, or the first few of these ranks.
        threads: How many threads of the process wait for other ranks.
        outcome: The outcome of the call if it has failed, or None while the rank waits.
    """

    rank: int
    title: str
    host: str
    call: str
    grid: str
    key: str
    round: int
    waits_for: tuple[int, ...] = attrs.field(default=(), converter=as_tuple)
    threads: int = 1
    outcome: Outcome | None = attrs.field(default=None, converter=as_outcome)

    @property
    def name(self) -> str:
        """The rank and its host, for errors."""
        return f"{self.title} (host {self.host})"

    @property
    def place(self) -> tuple[str, int]:
        """The record and the round in which the rank waits."""
        return self.key, self.round


@attrs.frozen
class Entries(Stored):
    """The entries of the first proposal of a round, which are compared one by one."""

    lines: tuple[str, ...] = attrs.field(converter=as_tuple)


@attrs.frozen
class Claim(Stored):
    """The process that holds a rank of a joined world.

    Attributes:
        host: The host of the process.
        pid: The process id on that host.
        token: Distinguishes the process from all other processes.
    """

    host: str
    pid: int
    token: str


_TYPES: dict[type, dict[str, tuple[type, ...]]] = {
    Outcome: {
        "kind": (str,),
        "text": (str,),
        "missing": (int,),
        "absent": (int,),
        "grids": (str,),
        "token": (str,),
        "data": (str,),
    },
    Proposer: {
        "rank": (int,),
        "title": (str,),
        "host": (str,),
        "digest": (str,),
        "token": (str,),
    },
    Record: {
        "round": (int,),
        "first": (Proposer,),
        "outcome": (Outcome, type(None)),
        "failed": (Outcome,),
        "agreed_before": (int,),
    },
    Status: {
        "rank": (int,),
        "title": (str,),
        "host": (str,),
        "call": (str,),
        "grid": (str,),
        "key": (str,),
        "round": (int,),
        "waits_for": (int,),
        "threads": (int,),
        "outcome": (Outcome, type(None)),
    },
    Entries: {"lines": (str,)},
    Claim: {"host": (str,), "pid": (int,), "token": (str,)},
}
"""Maps each class to the types of its fields. The types of a tuple are the types of its items."""


def _fields_of(value: object) -> dict[str, Any]:
    return {name: getattr(value, name) for name in _TYPES[type(value)]}


_encoder = json.JSONEncoder(separators=(",", ":"), default=_fields_of)

AGREED_TEXT = AGREED.encode()
"""The value of the key `end` after a round in which all ranks agreed."""


# ---- the keys of a round -------------------------------------------------------------------------


@attrs.frozen
class Ticket:
    """A round that this rank takes part in.

    Attributes:
        key: The key of the record.
        record: The record as this rank has read it.
        size: The number of ranks of the scope.
    """

    key: str
    record: Record
    size: int

    @property
    def round(self) -> int:
        """The number of the round."""
        return self.record.round

    @property
    def name(self) -> str:
        """The prefix of keys, and of names of created objects: the record and the round."""
        return f"{self.key}/{self.round}"

    @property
    def before(self) -> Ticket:
        """A ticket of the previous round. Only its keys are valid."""
        return attrs.evolve(self, record=attrs.evolve(self.record, round=self.round - 1))

    @property
    def first(self) -> str:
        """The key of the first proposal."""
        return f"{self.name}/first"

    @property
    def go(self) -> str:
        """The key that is set when all ranks have arrived, or the round has failed."""
        return f"{self.name}/go"

    @property
    def end(self) -> str:
        """The key that is set when the round has an outcome."""
        return f"{self.name}/end"

    @property
    def arrived(self) -> Tree:
        """The ranks that have arrived."""
        return Tree(f"{self.name}/arrived", self.size)

    @property
    def done(self) -> Tree:
        """The ranks that have finished."""
        return Tree(f"{self.name}/done", self.size)

    @property
    def roll(self) -> str:
        """The key that is set when a rank calls the roll."""
        return f"{self.name}/roll"

    @property
    def alive(self) -> Tree:
        """The ranks that have answered the roll call."""
        return Tree(f"{self.name}/alive", self.size)


# ---- the ranks that have arrived ----------------------------------------------------------------

WIDTH = 60
"""The number of ranks per block. Every store can add to integers with this many bits."""


@attrs.frozen
class Tree:
    """Tracks which ranks of a scope have reached a point of a round.

    Each rank has one bit, in blocks of 60 bits. The rank that completes a block also sets the bit
    of this block in the next level. A rank therefore needs about one request to learn whether all
    bits are set, and a search for missing ranks does not read every block.

    Args:
        prefix: The first part of the keys.
        size: The number of ranks. They are numbered by their positions in the scope.
    """

    prefix: str
    size: int

    def _key(self, level: int, block: int) -> str:
        return f"{self.prefix}/{level}.{block}"

    def _children(self) -> list[int]:
        """Return the number of bits in each level: of ranks, of blocks, of blocks of blocks, ..."""
        counts = [self.size]
        while counts[-1] > WIDTH:
            counts.append(-(-counts[-1] // WIDTH))
        return counts

    def mark(self, position: int) -> Steps[tuple[bool, list[str]]]:
        """Set the bit of a rank.

        Returns:
            Whether all bits are set now, and the keys of the blocks that this rank has completed.
            The caller deletes these keys.

        Raises:
            MarkedTwiceError: The bit was set before.
        """
        complete: list[str] = []
        for level, count in enumerate(self._children()):
            block, bit = divmod(position, WIDTH)
            key = self._key(level, block)
            width = min(WIDTH, count - block * WIDTH)
            bits = yield Add(key, 1 << bit)
            if not bits >> bit & 1:  # the bit was set before, so the sum has carried
                raise MarkedTwiceError(key)
            if bits != (1 << width) - 1:
                return False, complete
            complete.append(key)
            position = block
        return True, complete

    def unmarked(self, most: int | None = None) -> Steps[list[int]]:
        """Return the positions whose bits are not set, or the first `most` of them.

        If the key of the root is not set, no bit counts as set. Because the key is also deleted
        once all bits are set, the caller must rule out that case.
        """
        found: list[int] = []
        most = self.size if most is None else most
        yield from self._search(len(self._children()) - 1, 0, found, most)
        return found

    def _search(
        self, level: int, block: int, found: list[int], most: int, *, is_in_set: bool = False
    ) -> Steps[None]:
        """Append the positions of a block, and of the blocks below it, whose bits are not set.

        Args:
            level: The level of the block.
            block: The index of the block within the level.
            found: Receives the positions.
            most: The number of positions at which the search stops.
            is_in_set: Whether the key of the parent block is set.
        """
        text = yield Read(self._key(level, block))
        if text is None and is_in_set and (yield from self._is_complete(level + 1, block)):
            return  # the block was completed after its parent was read
        bits = as_bits(self._key(level, block), text)
        first = block * WIDTH
        for child in range(first, min(first + WIDTH, self._children()[level])):
            if len(found) >= most:
                return
            if bits >> (child - first) & 1:
                continue
            if level == 0:
                found.append(child)
            else:
                is_set = text is not None
                yield from self._search(level - 1, child, found, most, is_in_set=is_set)

    def _is_complete(self, level: int, position: int) -> Steps[bool]:
        block, bit = divmod(position, WIDTH)
        key = self._key(level, block)
        text = yield Read(key)
        return text is None or bool(as_bits(key, text) >> bit & 1)

    def look_around(self, position: int) -> Steps[tuple[list[int], int]]:
        """Read the block of a rank.

        Returns:
            The positions in the block whose bits are not set, and the number of bits that are set
            before the bit of this rank.
        """
        block, bit = divmod(position, WIDTH)
        first = block * WIDTH
        key = self._key(0, block)
        width = min(WIDTH, self.size - first)
        text = yield Read(key)
        # This rank has set its bit. If its block has no key, the block was complete and was
        # deleted.
        bits = (1 << width) - 1 if text is None else as_bits(key, text)
        missing = [first + one for one in range(width) if not bits >> one & 1]
        return missing, (bits & ((1 << bit) - 1)).bit_count()

    def keys_of(self, position: int) -> list[str]:
        """Return the keys that `mark` may set for a rank."""
        keys = []
        for level in range(len(self._children())):
            position //= WIDTH
            keys.append(self._key(level, position))
        return keys

    def all_keys(self) -> list[str]:
        """Return all keys that may be set."""
        return [
            self._key(level, block)
            for level, count in enumerate(self._children())
            for block in range(-(-count // WIDTH))
        ]


def as_bits(key: str, text: str | None) -> int:
    """Return the value of a key as a number, or 0 if the key is not set.

    Raises:
        CreationError: The value is not a number.
    """
    if text is None:
        return 0
    if not (text.isascii() and text.isdecimal() and len(text) < 20):
        raise _not_ours(key, text)
    return int(text)
