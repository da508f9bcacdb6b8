"""Numbers of things in words: one host, two hosts."""

from __future__ import annotations


def counted(count: int, what: str) -> str:
    """Write a number of things.

    >>> counted(1, "host"), counted(1200, "switch")
    ('1 host', '1,200 switches')
    """
    return f"{count:,} {what if count == 1 else plural(what)}"


def plural(what: str) -> str:
    """Return the word for several.

    >>> plural("host"), plural("leaf"), plural("switch")
    ('hosts', 'leaves', 'switches')
    """
    if what.endswith("leaf"):
        return f"{what[:-1]}ves"
    return what + ("es" if what.endswith(("s", "x", "ch", "sh")) else "s")
