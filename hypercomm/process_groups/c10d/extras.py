"""What else of torch's is private: DTensor's memory, backward threads, symmetric memory."""

from __future__ import annotations

import sys
import time
from typing import Any

import torch
from torch.distributed import ProcessGroup

from hypercomm.errors import CreationError
from hypercomm.process_groups.c10d.backends import default_backend, is_live
from hypercomm.process_groups.c10d.private_names import (
    CLEAR_CACHE,
    DISPATCHER,
    FAKE,
    IS_STASHED,
    MESH_ORDER,
    STASH,
    SYMMETRIC,
    UNSTASH,
    private,
    since,
)


def forget_meshes() -> None:
    """Let DTensor forget the meshes that it has seen.

    It remembers what operations give, with the mesh of their first time, and takes meshes with
    equal ranks and names for one: after the groups of that mesh are gone, none works. It remembers
    for each thread apart, so that threads other than the calling one do not forget.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    if private.works(DISPATCHER):
        remembered = private.get(DISPATCHER).sharding_propagator.propagate_op_sharding
        getattr(remembered, "cache", remembered).cache_clear()
    if CLEAR_CACHE.is_due() and private.works(CLEAR_CACHE):
        private.get(CLEAR_CACHE)()


def keeps_mesh_order(mesh: Any) -> bool:
    """Tell whether the groups of a DeviceMesh have its ranks in its order (torch 2.15)."""
    known = MESH_ORDER.is_due() and private.works(MESH_ORDER)
    return known and bool(mesh._preserve_rank_order)


def keep_mesh_order(mesh: Any) -> None:
    """Say of a DeviceMesh, before anybody compares it, that its groups have its order."""
    if MESH_ORDER.is_due() and private.works(MESH_ORDER):
        mesh._preserve_rank_order = True


def tell_backward(key: str) -> None:
    """Let the threads of the backward passes that this thread starts from now on know a key."""
    if _can_tell_backward():
        private.get(STASH)(key, None)


def stop_telling_backward(key: str) -> None:
    """End what `tell_backward` began, if that was in this thread."""
    if _can_tell_backward() and was_told_backward(key):
        private.get(UNSTASH)(key)


def was_told_backward(key: str) -> bool:
    """Tell whether this thread, or the one that started its backward pass, knows a key."""
    return _can_tell_backward() and bool(private.get(IS_STASHED)(key))


def _can_tell_backward() -> bool:
    # An older torch would keep each key for ever.
    return UNSTASH.is_due() and all(map(private.works, (STASH, UNSTASH, IS_STASHED)))


def let_threads_finish() -> None:
    """Let gloo's threads drop their last tensors before their groups go, where that can deadlock.

    Before torch 2.8 a group joins its threads while it holds the interpreter lock, for which a
    thread may be waiting to drop a tensor (pytorch pull request 154976).
    """
    if not since("2.8") and is_live() and default_backend() != "fake":
        time.sleep(0.02)


def symmetric_memory(size: int, group: ProcessGroup) -> tuple[torch.Tensor | None, Any]:
    """Allocate `size` bytes that every rank of a group can read, with the handle of their meeting.

    (None, None) where this torch or this device cannot do it.
    """
    if not torch.cuda.is_available() or not private.works(SYMMETRIC):
        return None, None
    symmetric = private.get(SYMMETRIC)
    try:
        enable = getattr(symmetric, "enable_symm_mem_for_group", None)
        if enable is not None and not hasattr(enable, "__deprecated__"):  # newer ones need it not
            enable(group.group_name)
        buffer = symmetric.empty(size, dtype=torch.uint8, device=torch.device("cuda"))
        return buffer, symmetric.rendezvous(buffer, group)
    except RuntimeError:  # the ranks do not share NVLink
        return None, None


def fake_store() -> Any:
    """Make the store of a fake world; looking it up also registers torch's fake backend.

    Raises:
        CreationError: This torch has no fake worlds.
    """
    if not private.works(FAKE):
        raise CreationError(
            f"torch {torch.__version__} has no fake worlds: {FAKE} {private.why_not(FAKE)}; use "
            f"hypercomm.testing.run_ranks, whose ranks are real, or another release of torch"
        )
    return private.get(FAKE).FakeStore()
