"""The driver: performs the operations of the protocol on the store of a world."""

from __future__ import annotations

from typing import Any, TypeVar

from hypercomm.process_groups.agreement import protocol
from hypercomm.process_groups.torch_internals.store import forget, read_bytes

T = TypeVar("T")


def run(steps: protocol.Steps[T], store: Any) -> T:
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


def perform(operation: protocol.Operation, store: Any) -> Any:
    """Perform one operation on a store, and return the reply."""
    match operation:
        case protocol.Exchange(key, expected, text):
            return store.compare_set(key, expected, text).decode(errors="replace")
        case protocol.Read(key):
            found = read_bytes(store, key)
            return None if found is None else found.decode(errors="replace")
        case protocol.Add(key):
            return store.add(key, 1)
        case protocol.Append(key, text) if store.has_extended_api():
            return store.append(key, text)
        case protocol.Append(key, text):
            old = perform(protocol.Read(key), store) or ""
            while (found := perform(protocol.Exchange(key, old, old + text), store)) != old + text:
                old = found
            return None
        case protocol.Write(key, text):
            return store.set(key, text)
        case protocol.Delete(keys):
            return forget(store, keys)
