"""The job's store, in which the ranks leave word for each other."""

from __future__ import annotations

import uuid
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist

from hypercomm.process_groups.c10d.backends import backend_of, single_backends
from hypercomm.process_groups.c10d.private_names import STORE, private
from hypercomm.process_groups.c10d.stand_in_world import is_other_world

_store_words: WeakKeyDictionary[Any, str] = WeakKeyDictionary()
"""The identity of each store, which is asked for once."""


def has_store() -> bool:
    """Tell whether the ranks of this world can meet in a store; those of a fake one cannot."""
    world = dist.group.WORLD
    if world is None or is_other_world():
        return False
    return "fake" not in single_backends(backend_of(world)) and private.works(STORE)


def store() -> Any:
    """Return the store that WORLD was made with."""
    return private.get(STORE)()


def store_identity() -> str:
    """Return a word that all ranks of this job's store share, and that no other store has."""
    if not has_store():
        return ""
    own = store()
    if own not in _store_words:
        _store_words[own] = set_if_absent("hypercomm/store", uuid.uuid4().hex)
    return _store_words[own]


def set_if_absent(key: str, text: str) -> str:
    """Set a key of the store that nobody has set, and return what it holds then."""
    found: bytes = store().compare_set(key, "", text)
    return found.decode(errors="replace")


def read_if_set(key: str) -> str | None:
    """Return what a key of the store holds; None where nobody has set it."""
    found = read_bytes(key)
    return None if found is None else found.decode(errors="replace")


def read_bytes(key: str) -> bytes | None:
    """Do as `read_if_set`, for what is no text."""
    return store().get(key) if is_set([key]) else None


def is_set(keys: Sequence[str]) -> bool:
    """Tell whether all of some keys of the store are set."""
    return bool(store().check(list(keys)))


def set_value(key: str, value: str | bytes) -> None:
    """Set a key in the store; waits for no answer."""
    store().set(key, value)


def set_keys(keys: Sequence[str]) -> None:
    """Set keys in the store, in one message where it can; waits for no answer."""
    if len(keys) > 1 and store().has_extended_api():
        store().multi_set(list(keys), ["1"] * len(keys))
        return
    for key in keys:
        set_value(key, "1")


def forget(key: str) -> None:
    """Delete a key of the store, if it is there."""
    store().delete_key(key)
