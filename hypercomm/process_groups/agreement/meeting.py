"""Meeting: whether ranks mean the same, and whether all got through; decided once, and sans I/O.

A place is one key of the job's store, a register: it holds what the first rank that came means,
and, as soon as any rank knows, how the place has ended. Three laws carry it:

- a place ends once: by one compare-and-set, and every rank obeys what stands there;
- nobody leaves without deciding or obeying: errors and Ctrl-C go out through the same door;
- the next place is read, never counted: a late or mistaken rank lands where the others are.

These generators talk to nobody. They yield operations, and are sent the answers.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import Any, TypeVar

import attrs

from hypercomm.errors import CreationError

# ---- what is asked ----------------------------------------------------------------------------


@attrs.frozen
class Exchange:
    """If a key holds `expected` ("": nothing), let it hold `text`; answers what it holds then."""

    key: str
    expected: str
    text: str


@attrs.frozen
class Read:
    """Answers what a key holds; None: nothing."""

    key: str


@attrs.frozen
class Check:
    """Answers whether all of some keys hold something."""

    keys: Sequence[str]


@attrs.frozen
class Publish:
    """Let keys hold texts; no answer is waited for."""

    texts: dict[str, str]


@attrs.frozen
class Delete:
    """Let keys hold nothing."""

    keys: Sequence[str]


@attrs.frozen
class Sleep:
    """Do nothing for some seconds."""

    seconds: float


@attrs.frozen
class Now:
    """Answers the time, in seconds."""


Operation = Exchange | Read | Check | Publish | Delete | Sleep | Now

T = TypeVar("T")
Meeting = Generator[Operation, Any, T]
"""Yields operations, is sent the answers, and returns what came of it."""


# ---- what a place holds -----------------------------------------------------------------------


@attrs.frozen
class Said:
    """What a rank means.

    Attributes:
        rank: The rank.
        host: Its host.
        entries: What it means, in lines that are compared.
    """

    rank: int
    host: str
    entries: tuple[str, ...]


@attrs.frozen
class End:
    """How a place has ended.

    Attributes:
        kind: "agreed", "differs", "missing" or "failed".
        ranks: Those that were missing.
        words: What ranks differ in, or why one failed, or who is late and where.
        about: What ranks differ at: the same where one end is written to several places.
        late: Who is late: of those that were missing, or whom they wait for.
    """

    kind: str
    ranks: tuple[int, ...] = ()
    words: str = ""
    about: str = ""
    late: tuple[int, ...] = ()


AGREED = End("agreed")
_LONGEST_WORDS = 100_000
_KINDS = {"agreed", "differs", "missing", "failed"}


@attrs.frozen
class Register:
    """What a place holds: what the first rank means, and how it has ended."""

    first: Said | None = None
    end: End | None = None

    def text(self) -> str:
        """Return what stands in the store."""
        return json.dumps(attrs.asdict(self), separators=(",", ":"))


def read_register(key: str, text: str) -> Register:
    """Read what `Register.text` wrote.

    Raises:
        CreationError: It did not.
    """
    try:
        found = json.loads(text)
        first, end = found["first"], found["end"]
        said = None if first is None else Said(**{**first, "entries": tuple(first["entries"])})
        ended = None if end is None else End(**end)
        if ended is not None:
            ended = attrs.evolve(ended, ranks=tuple(ended.ranks), late=tuple(ended.late))
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise foreign(key, text) from error
    if said is not None and not (
        _is_rank(said.rank)
        and isinstance(said.host, str)
        and all(isinstance(entry, str) for entry in said.entries)
    ):
        raise foreign(key, text)
    if ended is not None and not (
        ended.kind in _KINDS
        and all(_is_rank(rank) for rank in (*ended.ranks, *ended.late))
        and isinstance(ended.words, str)
        and len(ended.words) <= _LONGEST_WORDS
        and isinstance(ended.about, str)
    ):
        raise foreign(key, text)
    return Register(said, ended)


def _is_rank(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def foreign(key: str, text: str) -> CreationError:
    """Return the error about a key of ours that holds what this library did not write."""
    return CreationError(
        f"the store's key {key!r} holds {text[:80]!r}, which hypercomm did not write; something "
        f"else writes there, or the ranks have different versions of hypercomm"
    )


# ---- one place --------------------------------------------------------------------------------


def enter(key: str, said: Said) -> Meeting[Register]:
    """Publish what this rank means, unless another came first; return what stands."""
    mine = Register(said)
    text = yield Exchange(key, "", written := mine.text())
    return mine if text == written else read_register(key, text)


def decide(key: str, end: End) -> Meeting[End]:
    """Write how a place ends; return how it does: as the first rank has written."""
    register, text = Register(end=end), ""
    while True:
        text = yield Exchange(key, text, register.text())
        stands = read_register(key, text)
        if stands.end is not None:
            return stands.end
        register = attrs.evolve(stands, end=end)


def compare(
    key: str, said: Said, differ: Callable[[Said, Said], str | None], place: str
) -> Meeting[End | None]:
    """Compare what this rank means with what the first rank does; waits for nobody.

    Args:
        key: Where the first rank says what it means.
        said: What this rank means.
        differ: Says how what it means, given second, differs from what the first does.
        place: The place that ends where they differ.

    Returns:
        How that has ended, about `key` if they are the first to differ; None where both mean the
        same.
    """
    register = yield from enter(key, said)
    words = None if register.first is None else differ(register.first, said)
    if words is None:
        return None
    return (yield from decide(place, End("differs", words=words, about=key)))


def end_of(key: str) -> Meeting[End | None]:
    """Return how a place has ended; None where it has not."""
    text = yield Read(key)
    return None if text is None else read_register(key, text).end


def give_up(key: str, rank: int, error: BaseException) -> Meeting[tuple[End, BaseException | None]]:
    """Let a place fail, as something has interrupted this rank there; returns as `arrive`."""
    words = f"rank {rank} left: {type(error).__name__}: {error}"
    end = yield from decide(key, End("failed", words=words))
    if end.kind == "agreed" and isinstance(error, Exception):
        return end, None  # it was this rank's question that failed
    return end, error


# ---- how ranks differ, in words -----------------------------------------------------------------


def as_entry(headline: str, options: Mapping[str, object]) -> str:
    r"""Write what a rank creates, for comparison with what others do.

    >>> as_entry("tp over 2 groups", {"timeout": "0:00:20", "share": "never"})
    'tp over 2 groups\ntimeout: 0:00:20\nshare: never'
    """
    return "\n".join([headline, *(f"{name}: {value}" for name, value in options.items())])


def in_one_line(entry: str) -> str:
    r"""Write an entry as a log has it.

    >>> in_one_line("tp over 2 groups\ntimeout: 0:00:20\nshare: never")
    'tp over 2 groups; timeout: 0:00:20; share: never'
    """
    return "; ".join(entry.split("\n"))


def who(rank: int, host: str) -> str:
    """Name a rank, with its host."""
    return f"rank {rank} (host {host})"


def words_of(fields: Iterable[tuple[str, object, object]], own: str, first: str) -> str:
    """Say which fields differ: the name of each, and what it is on two ranks.

    >>> words_of([("timeout", "0:00:20", "0:00:21")], "rank 0 (host a)", "rank 1 (host b)")
    'timeout: 0:00:20 on rank 0 (host a), 0:00:21 on rank 1 (host b)'
    """
    return "; ".join(
        f"{name}: {mine} on {own}, {theirs} on {first}" for name, mine, theirs in fields
    )


def differ_from(position: int) -> Callable[[Said, Said], str | None]:
    """Return what says how a rank's entries differ from those of the rank that came first.

    Args:
        position: That of the first entry.
    """

    def differ(first: Said, own: Said) -> str | None:
        pairs = zip_longest(own.entries, first.entries)
        for at, (mine, theirs) in enumerate(pairs, start=position):
            if mine != theirs:
                one, other = who(own.rank, own.host), who(first.rank, first.host)
                return f"{_words(at, mine, theirs, one, other)}; {_CURE}"
        return None

    return differ


_CURE = "every rank must make the same calls, in one order"


def _words(at: int, mine: str | None, theirs: str | None, own: str, first: str) -> str:
    here, *options = (mine or "nothing more").split("\n")
    there, *others = (theirs or "nothing more").split("\n")
    where = f"ranks differ in what they create at position {at}"
    if here != there or len(options) != len(others):
        return f"{where}: {own} creates {here}, but {first}, which came first, creates {there}"
    pairs = (
        (*option.partition(": ")[::2], other.partition(": ")[2])
        for option, other in zip(options, others, strict=True)
        if option != other
    )
    return f"{words_of(pairs, own, first)}, which came first; {where}, {here}"


def seen_here(words: str, rank: int) -> str:
    """Say of what is told of a rank that it is here.

    >>> seen_here("timeout: 0:00:20 on rank 0 (host a), 0:00:21 on rank 1 (host b)", 1)
    'timeout: 0:00:20 on rank 0 (host a), 0:00:21 here (rank 1, host b)'
    """
    return re.sub(rf"\bon rank {rank} \(host ([^()]*)\)", rf"here (rank {rank}, host \1)", words)


def seen_elsewhere(words: str) -> str:
    """Take back what `seen_here` says, for other ranks to read.

    >>> seen_elsewhere("0:00:20 on rank 0 (host a), 0:00:21 here (rank 1, host b)")
    '0:00:20 on rank 0 (host a), 0:00:21 on rank 1 (host b)'
    """
    return re.sub(r"\bhere \(rank (\d+), host ([^()]*)\)", r"on rank \1 (host \2)", words)
