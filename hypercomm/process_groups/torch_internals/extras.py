"""Other private parts of torch: meshes, symmetric memory, names of calls."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup

from hypercomm.errors import CreationError
from hypercomm.process_groups.torch_internals import capabilities


def forget_meshes() -> None:
    """Clear what DTensor remembers of the meshes that it has seen.

    It caches the results of operations with the mesh of their first use, and takes meshes with
    equal ranks and names for the same: once the groups of that mesh are destroyed, its results are
    useless. Each thread has a cache; this clears that of the calling thread.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    try:
        from torch.distributed.tensor import DTensor

        remembered: Any = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding
        getattr(remembered, "cache", remembered).cache_clear()
        torch._C._clear_DTensor_sharding_propagator_cache()
    except (AttributeError, ImportError) as error:
        capabilities.warn_once(
            f"DTensor does not forget the meshes of a destroyed grid ({error}); grids that follow "
            f"each other on the same ranks need other dim names"
        )


def keeps_mesh_order(mesh: Any) -> bool:
    """Return whether the groups of a DeviceMesh have its ranks in its order (torch 2.15)."""
    return bool(getattr(mesh, "_preserve_rank_order", False))


def keep_mesh_order(mesh: Any) -> None:
    """Mark a DeviceMesh, before it is compared, as one whose groups have its order."""
    if "_preserve_rank_order" in type(mesh).__annotations__:
        mesh._preserve_rank_order = True


def flatten_mesh(mesh: Any, dims: Sequence[str], name: str, group: ProcessGroup) -> None:
    """Use an existing group for several dims of a mesh, as `mesh[dims]._flatten(name)` would.

    Args:
        mesh: A mesh that is not part of another.
        dims: Adjacent dims of the mesh, in its order.
        name: Their common name.
        group: Their group.

    Raises:
        CreationError: The DeviceMesh of this torch is not one that hypercomm knows.
    """
    from torch.distributed import device_mesh

    meshes: Any = device_mesh
    part = mesh[tuple(dims)]
    try:
        layout = _as_one_dim(part._layout)
    except AttributeError as error:
        raise CreationError(
            "flatten= is not for this torch, whose DeviceMesh has changed; name dims together, as "
            "in grid.device_mesh(('dp', 'cp')), whose dim is 'dp_cp'"
        ) from error
    of_one = meshes.DeviceMesh.from_group(
        group, mesh.device_type, mesh=part.mesh.flatten(), mesh_dim_names=(name,)
    )
    more = {"preserve_rank_order": True} if keeps_mesh_order(mesh) else {}
    flat = meshes.DeviceMesh(
        mesh.device_type,
        _layout=layout,
        _rank_map=mesh._rank_map,
        mesh_dim_names=(name,),
        _root_mesh=mesh,
        _init_backend=False,
        **more,
    )
    flat._dim_group_names = of_one._dim_group_names
    mesh._flatten_mapping[name] = flat


def _as_one_dim(layout: Any) -> Any:
    """Return the layout of a mesh with all of its dims as one, as `DeviceMesh._flatten` does."""
    if hasattr(layout, "collapse"):
        return type(layout)([layout.collapse()])
    joint = layout.coalesce()  # torch 2.10
    return joint.nest() if len(joint) > 1 else joint


def symmetric_memory(size: int, group: ProcessGroup) -> tuple[torch.Tensor | None, Any]:
    """Allocate `size` bytes that every rank of a group can read, with the handle of the group.

    (None, None) where this torch or this device cannot do it.
    """
    if not torch.cuda.is_available():
        return None, None
    try:
        symmetric: Any = importlib.import_module("torch.distributed._symmetric_memory")
        enable = getattr(symmetric, "enable_symm_mem_for_group", None)
        if enable is not None and not hasattr(enable, "__deprecated__"):  # newer ones need it not
            enable(group.group_name)
        buffer = symmetric.empty(size, dtype=torch.uint8, device=torch.device("cuda"))
        return buffer, symmetric.rendezvous(buffer, group)
    except (AttributeError, ImportError, RuntimeError):  # the ranks do not share NVLink
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
    if not hasattr(ProcessGroup, "all_gather_single"):
        found["_allgather_base"] = "all_gather_into_tensor"
        found["_reduce_scatter_base"] = "reduce_scatter_tensor"
    return found
