"""The driver: performs the operations of the protocol on the store of a world."""

from __future__ import annotations

from typing import Any

from hypercomm.process_groups.agreement.protocol import (
    Add,
    Append,
    Delete,
    Exchange,
    Operation,
    Read,
    Steps,
    T,
    Write,
)
from hypercomm.process_groups.torch_internals import store as on


def run(steps: Steps[T], store: Any) -> T:
    """Run steps of the protocol on a store in this thread, and return their result.

    Raises:
        DistNetworkError: The store is gone.
    """
    reply: Any = None
    while True:
        try:
            operation = steps.send(reply)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]
        reply = perform(operation, store)


def perform(operation: Operation, store: Any) -> Any:
    """Perform one operation on a store, and return the reply."""
    match operation:
        case Exchange(key, expected, text):
            return on.exchange(store, key, expected, text)
        case Read(key):
            return on.read(store, key)
        case Add(key):
            return on.count_up(store, key)
        case Append(key, text):
            return on.append(store, key, text)
        case Write(key, text):
            return on.write(store, key, text)
        case Delete(keys):
            return on.forget(store, keys)
