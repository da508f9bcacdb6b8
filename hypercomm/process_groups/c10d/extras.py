"""What else of torch's is private: DTensor's memory, backward threads, symmetric memory."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup

from hypercomm.errors import CreationError
from hypercomm.process_groups.c10d.private_names import (
    BASES,
    CLEAR_CACHE,
    DISPATCHER,
    IS_STASHED,
    MESH_FLATTENED,
    MESH_ORDER,
    OF_THREADS,
    STASH,
    SYMMETRIC,
    UNSTASH,
    private,
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
    private.call(CLEAR_CACHE)


def keeps_mesh_order(mesh: Any) -> bool:
    """Tell whether the groups of a DeviceMesh have its ranks in its order (torch 2.15)."""
    return private.works(MESH_ORDER) and bool(mesh._preserve_rank_order)


def keep_mesh_order(mesh: Any) -> None:
    """Say of a DeviceMesh, before anybody compares it, that its groups have its order."""
    if private.works(MESH_ORDER):
        mesh._preserve_rank_order = True


def flatten_mesh(mesh: Any, dims: Sequence[str], name: str, group: ProcessGroup) -> None:
    """Make a group that exists the one of several dims of a mesh, as `mesh[dims]._flatten(name)`.

    Args:
        mesh: A mesh that is no part of another.
        dims: Some of its dims that are side by side, in its order.
        name: What they are called together.
        group: Their group.

    Raises:
        CreationError: This torch has other meshes than those known.
    """
    from torch.distributed import device_mesh

    if not private.works(MESH_FLATTENED):
        raise CreationError(
            "flatten= is not for this torch, whose DeviceMesh has changed; name dims together, as "
            "in grid.device_mesh(('dp', 'cp')), whose dim is 'dp_cp'"
        )
    meshes: Any = device_mesh
    part = mesh[tuple(dims)]
    of_one = meshes.DeviceMesh.from_group(
        group, mesh.device_type, mesh=part.mesh.flatten(), mesh_dim_names=(name,)
    )
    if hasattr(mesh, "_flatten_mapping"):
        more = {"preserve_rank_order": True} if keeps_mesh_order(mesh) else {}
        flat = meshes.DeviceMesh(
            mesh.device_type,
            _layout=meshes._MeshLayout([part._layout.collapse()]),
            _rank_map=mesh._rank_map,
            mesh_dim_names=(name,),
            _root_mesh=mesh,
            _init_backend=False,
            **more,
        )
        flat._dim_group_names = of_one._dim_group_names
        mesh._flatten_mapping[name] = flat
        return
    known = meshes._mesh_resources
    known.child_to_root_mapping[of_one] = mesh
    known.root_to_flatten_mapping.setdefault(mesh, {})[name] = of_one
    places = tuple(mesh.mesh_dim_names.index(dim) for dim in dims)
    known.flatten_name_to_root_dims.setdefault(mesh, {})[name] = places


def tell_backward(key: str) -> None:
    """Let the threads of the backward passes that this thread starts from now on know a key."""
    if _can_tell_backward():
        private.get(STASH)(key, None)


def stop_telling_backward(key: str) -> None:
    """End what `tell_backward` began, if that was in this thread."""
    if was_told_backward(key):
        private.get(UNSTASH)(key)


def was_told_backward(key: str) -> bool:
    """Tell whether this thread, or the one that started its backward pass, knows a key."""
    return _can_tell_backward() and bool(private.get(IS_STASHED)(key))


def _can_tell_backward() -> bool:
    return all(map(private.works, OF_THREADS))


def symmetric_memory(size: int, group: ProcessGroup) -> tuple[torch.Tensor | None, Any]:
    """Allocate `size` bytes that every rank of a group can read, with the handle of their meeting.

    (None, None) where this torch or this device cannot do it.
    """
    symmetric = private.get(SYMMETRIC) if torch.cuda.is_available() else None
    if symmetric is None:
        return None, None
    try:
        enable = getattr(symmetric, "enable_symm_mem_for_group", None)
        if enable is not None and not hasattr(enable, "__deprecated__"):  # newer ones need it not
            enable(group.group_name)
        buffer = symmetric.empty(size, dtype=torch.uint8, device=torch.device("cuda"))
        return buffer, symmetric.rendezvous(buffer, group)
    except RuntimeError:  # the ranks do not share NVLink
        return None, None


_CALLS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce_coalesced",
    "broadcast": "broadcast",
    "reduce": "reduce",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather_coalesced",
    "all_gather_single": "all_gather_into_tensor",
    "all_gather_single_coalesced": "all_gather_into_tensor_coalesced",
    "allgather_into_tensor_coalesced": "all_gather_into_tensor_coalesced",
    "gather": "gather",
    "gather_single": "gather",
    "scatter": "scatter",
    "reduce_scatter": "reduce_scatter",
    "reduce_scatter_single": "reduce_scatter_tensor",
    "reduce_scatter_single_coalesced": "reduce_scatter_tensor_coalesced",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_tensor_coalesced",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "all_to_all_single": "all_to_all_single",
    "barrier": "barrier",
    "monitored_barrier": "monitored_barrier",
    "send": "send",
    "recv": "recv",
    "recv_anysource": "recv_anysource",
}


def calls_of_groups() -> dict[str, str]:
    """Return the methods of a ProcessGroup that communicate, and torch.distributed's names."""
    found = {method: op for method, op in _CALLS.items() if hasattr(ProcessGroup, method)}
    if private.works(BASES):
        found["_allgather_base"] = "all_gather_into_tensor"
        found["_reduce_scatter_base"] = "reduce_scatter_tensor"
    return found
