"""Numbers of things in words: one host, two hosts."""

from __future__ import annotations


def counted(count: int, what: str) -> str:
    """Write a number of things.

    >>> counted(1, "host"), counted(1200, "switch")
    ('1 host', '1,200 switches')
    """
    return f"{count:,} {plural(what, count)}"


def plural(what: str, count: int = 2) -> str:
    """Return the word for several, or for as many as there are.

    >>> plural("host"), plural("leaf"), plural("switch"), plural("switch", 1)
    ('hosts', 'leaves', 'switches', 'switch')
    """
    if count == 1:
        return what
    if what.endswith("leaf"):
        return f"{what[:-1]}ves"
    return what + ("es" if what.endswith(("s", "x", "ch", "sh")) else "s")
