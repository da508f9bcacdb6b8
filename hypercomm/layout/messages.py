"""How a value is shown in a message."""

from __future__ import annotations

_LONGEST = 400
"""Characters of a value that a message shows."""


def shown(value: object) -> str:
    """Write a value as `repr` does, cut where it is long; Python writes no int of 4,301 digits.

    >>> shown("tp"), shown(10**5000)
    ("'tp'", '<int too long to show>')
    """
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return f"<{type(value).__name__} too long to show>"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
