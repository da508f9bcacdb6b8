"""The driver: performs the operations of the protocol on the job's store."""

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
from hypercomm.process_groups.torch_internals import store


def run(steps: Steps[T]) -> T:
    """Run steps of the protocol in this thread, and return their result.

    Raises:
        DistNetworkError: The store is gone.
    """
    reply: Any = None
    while True:
        try:
            operation = steps.send(reply)
        except StopIteration as stop:
            return stop.value  # type: ignore[no-any-return]
        reply = perform(operation)


def perform(operation: Operation) -> Any:
    """Perform one operation on the job's store, and return the reply."""
    match operation:
        case Exchange(key, expected, text):
            return store.exchange(key, expected, text)
        case Read(key):
            return store.read(key)
        case Add(key):
            return store.count_up(key)
        case Append(key, text):
            return store.append(key, text)
        case Write(key, text):
            return store.write(key, text)
        case Delete(keys):
            return store.forget(keys)
