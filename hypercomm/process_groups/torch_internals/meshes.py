"""Reads and changes private attributes of torch's DeviceMesh."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import ProcessGroup


def forget_meshes() -> None:
    """Clear what DTensor remembers of the meshes that it has seen.

    It caches the results of operations with the mesh of their first use, and takes meshes with
    equal ranks and names for the same: once the groups of that mesh are destroyed, its results are
    useless. Each thread has a cache; this clears the one of the calling thread.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import DTensor

    remembered: Any = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding
    remembered.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()


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
    """
    from torch.distributed import device_mesh

    meshes: Any = device_mesh
    part = mesh[tuple(dims)]
    of_one = meshes.DeviceMesh.from_group(
        group, mesh.device_type, mesh=part.mesh.flatten(), mesh_dim_names=(name,)
    )
    more = {"preserve_rank_order": True} if keeps_mesh_order(mesh) else {}
    flat = meshes.DeviceMesh(
        mesh.device_type,
        _layout=_as_one_dim(part._layout),
        _rank_map=mesh._rank_map,
        mesh_dim_names=(name,),
        _root_mesh=mesh,
        _init_backend=False,
        **more,
    )
    flat._dim_group_names = of_one._dim_group_names
    mesh._flatten_mapping[name] = flat


def flattened(mesh: Any) -> dict[str, Any]:
    """Return the flattened dims of a mesh, by name."""
    return dict(mesh._flatten_mapping)


def _as_one_dim(layout: Any) -> Any:
    """Return the layout of a mesh with all of its dims as one, as `DeviceMesh._flatten` does."""
    if hasattr(layout, "collapse"):
        return type(layout)([layout.collapse()])
    joint = layout.coalesce()  # torch 2.10
    return joint.nest() if len(joint) > 1 else joint
