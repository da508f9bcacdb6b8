"""Differences: how what one rank means differs from what another does, in words, that first.

An entry is what a rank creates: a headline, and below it options, one a line. Where two headlines
are alike, the options that differ are told, and no others.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from itertools import zip_longest

from hypercomm.process_groups.agreement.meeting import Said


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
