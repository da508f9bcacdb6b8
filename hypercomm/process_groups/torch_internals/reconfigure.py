"""Groups whose members change while the object stays, by torch's reconfigure (torch 2.14).

Such a group is created without members. Each member publishes its handle, reads those of the
others, and connects: at the creation, and again with other members after a loss. gloo publishes
addresses below the name of the group, so that members of several groups could not meet: all groups
that may be reconfigured have one prefix there, and each set of members a number.
"""

from __future__ import annotations

import contextlib
import hashlib
import threading
from collections.abc import Iterator, Sequence
from datetime import timedelta
from typing import Any
from uuid import uuid4

import torch.distributed as dist
from torch.distributed import ProcessGroup

from hypercomm.errors import GroupOptionsError
from hypercomm.process_groups.torch_internals.backends import NCCL, backend_of, single_backends
from hypercomm.process_groups.torch_internals.capabilities import Patch, since
from hypercomm.process_groups.torch_internals.gloo import Wait
from hypercomm.process_groups.torch_internals.split import uses_torchcomms


def why_not_reconfigured(backend: str) -> str | None:
    """Return why groups of a backend cannot get other members; None if they can."""
    if not since("2.14"):
        return "torch has it since 2.14"
    if uses_torchcomms():
        return "torch creates groups through TorchComms here"
    others = [name for name in single_backends(backend) if name not in {"gloo", *NCCL}]
    return f"backend {others[0]!r} cannot do it" if others else None


_torch: Any = dist.distributed_c10d
_PLACE = "hypercomm/reconfigure/"
_prefix = Patch("PrefixStore")
_here = threading.local()


@contextlib.contextmanager
def in_one_place() -> Iterator[None]:
    """Let members of groups that this thread creates in a `with` block meet in one place."""
    with _prefix.applied(_torch, _prefixed):
        _here.is_set = True
        try:
            yield
        finally:
            _here.is_set = False


def _prefixed(prefix: str, store: Any) -> Any:
    is_ours = getattr(_here, "is_set", False)
    return _prefix.original(_torch)(_PLACE if is_ours else prefix, store)


def reconfigure(
    group: ProcessGroup,
    name: str,
    ranks: Sequence[int],
    *,
    rank: int,
    store: Any,
    timeout: timedelta | None,
    wait: Wait | None,
    stale: list[str],
) -> None:
    """Give a group these members; each of them calls this.

    Args:
        group: The group of the calling rank.
        name: A new name for the group with these members, the same on all of them.
        ranks: The members, in the order of their numbers in the group.
        rank: The calling rank.
        store: The store that the members meet in.
        timeout: How long they may take to connect; None is torch's default.
        wait: Waits for the handles of the others; None if there are none.
        stale: Receives the keys that no member needs any more.
    """
    if not _any(group).supports_reconfigure:
        raise GroupOptionsError(
            f"backend {backend_of(group)!r} of this torch does not support enable_reconfigure=True"
        )
    keys = [f"{name}/handle/{member}" for member in ranks]
    own = keys[list(ranks).index(rank)]
    store.set(own, _any(group).get_reconfigure_handle())
    stale.append(own)
    if wait is not None:
        wait(lambda: store.check(keys) or None)
    handles = [store.get(key).decode() for key in keys]
    number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")
    _reconfigure(group, number, handles, timeout)
    _torch._world.pg_group_ranks[group] = {member: at for at, member in enumerate(ranks)}


def isolate(group: ProcessGroup) -> None:
    """Leave the calling rank alone in its group; collectives of the others in it fail."""
    handle = _any(group).get_reconfigure_handle()
    _reconfigure(group, uuid4().int >> 72, [handle], None)


def _reconfigure(
    group: ProcessGroup, number: int, handles: list[str], timeout: timedelta | None
) -> None:
    options = _torch.ReconfigureOptions()
    options.uuid, options.handles = number, handles
    if timeout is not None:
        options.timeout = timeout
    _any(group).reconfigure(options).wait()


def _any(thing: Any) -> Any:
    return thing  # torch before 2.14 has no types for it
