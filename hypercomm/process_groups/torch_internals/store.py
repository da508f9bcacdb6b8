"""Operations on a store of torch."""

from __future__ import annotations

from typing import Any

_ABSENT = "absent"


def read_bytes(store: Any, key: str) -> bytes | None:
    """Return the bytes of a key of a store, in one operation; None if it is not set."""
    found: bytes = store.compare_set(key, _ABSENT, _ABSENT)  # sets nothing
    return None if found == _ABSENT.encode() else found
