"""Names that all members of a group derive alike, for groups that torch would name itself.

torch salts the name of a group that is split off WORLD. Before 2.14 the salt is the number of
groups that a rank has, which differs between ranks once a split has left some out: they then name
later groups differently, and as `destroy_process_group` ends groups in the order of their names,
NCCL waits for ever (pytorch issue 190396). Names of ours are the same on all members.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch.distributed as dist

from hypercomm.process_groups.c10d.private_names import NAME_GROUP, private

_name: ContextVar[str | None] = ContextVar("name", default=None)
_lock = threading.Lock()


class _Naming:
    """Takes the place of torch's function as long as somebody wants to name a group."""

    def __init__(self) -> None:
        self._users = 0
        self._torchs: Any = None

    def begin(self) -> None:
        with _lock:
            if not self._users:
                c10d: Any = dist.distributed_c10d
                torchs = self._torchs = private.get(NAME_GROUP)

                def _process_group_name(ranks: Any, use_hashed_name: bool) -> str:
                    torchs_name: str = torchs(ranks, use_hashed_name)  # counts the group
                    return _name.get() or torchs_name

                wrapper: Any = _process_group_name
                wrapper.__wrapped__ = torchs
                c10d._process_group_name = wrapper
            self._users += 1

    def end(self) -> None:
        with _lock:
            self._users -= 1
            if not self._users:
                c10d: Any = dist.distributed_c10d
                c10d._process_group_name = self._torchs


_naming = _Naming()


def names_splits() -> bool:
    """Tell whether groups that are split off WORLD get names of ours."""
    return private.works(NAME_GROUP)


@contextlib.contextmanager
def named(name: str | None) -> Iterator[None]:
    """Let the group that this thread splits off WORLD within a `with` block have a name."""
    if name is None or not private.works(NAME_GROUP):
        yield
        return
    token = _name.set(name)
    _naming.begin()
    try:
        yield
    finally:
        _naming.end()
        _name.reset(token)
