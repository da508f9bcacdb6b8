"""Operations on a store of torch."""

from __future__ import annotations

from typing import Any

_ABSENT = "absent"


def read_bytes(store: Any, key: str) -> bytes | None:
    """Return the value of a key, or None if it is not set, in one request."""
    found: bytes = store.compare_set(key, _ABSENT, _ABSENT)  # changes nothing
    return None if found == _ABSENT.encode() else found
