"""Reads and changes private attributes of torch's DeviceMesh."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


def forget_meshes() -> None:
    """Clear the caches of DTensor's sharding propagation, which refer to meshes.

    A cached result refers to the mesh of its first use. DTensor reuses the result for every mesh
    with equal ranks and names. Once the groups of the first mesh are destroyed, the result is
    unusable. Each thread has a cache. This function clears the cache of the calling thread.
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import DTensor

    remembered: Any = DTensor._op_dispatcher.sharding_propagator.propagate_op_sharding
    remembered.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()


def keeps_mesh_order(mesh: Any) -> bool:
    """Return whether the groups of a DeviceMesh keep the order of its ranks (torch 2.15)."""
    return bool(getattr(mesh, "_preserve_rank_order", False))


def keep_mesh_order(mesh: Any) -> None:
    """Mark a DeviceMesh as one whose groups keep the order of its ranks, to compare it later."""
    if "_preserve_rank_order" in type(mesh).__annotations__:
        mesh._preserve_rank_order = True


def mesh_of(
    groups: Sequence[ProcessGroup], device_type: str, ranks: torch.Tensor, names: tuple[str, ...]
) -> DeviceMesh:
    """Return a DeviceMesh over existing groups, as `DeviceMesh.from_group` does.

    That method asks the default process group for the rank. A mesh may have the ranks of
    another world, so this function reads the rank from the first group.

    Args:
        groups: The calling rank's group over each dim.
        device_type: The type of the devices.
        ranks: The ranks, in the shape of the mesh.
        names: The name of each dim.
    """
    from torch.distributed import device_mesh

    rank = dist.get_process_group_ranks(groups[0])[groups[0].rank()]
    mesh = device_mesh.DeviceMesh(
        device_type, ranks, mesh_dim_names=names, _init_backend=False, _rank=rank
    )
    mesh._dim_group_names = [group.group_name for group in groups]
    _register_in_mesh(mesh, groups)
    return mesh


def flatten_mesh(mesh: DeviceMesh, dims: Sequence[str], name: str, group: ProcessGroup) -> None:
    """Use an existing group for several dims of a mesh, as `mesh[dims]._flatten(name)` would.

    Args:
        mesh: A mesh that is not part of another mesh.
        dims: Adjacent dims of the mesh, in its order.
        name: The common name of these dims.
        group: The group over these dims.
    """
    mesh._flatten_mapping[name] = part_of_mesh(mesh, dims, name, group)
    _register_in_mesh(mesh, [group])


def part_of_mesh(
    mesh: DeviceMesh, dims: Sequence[str], name: str, group: ProcessGroup
) -> DeviceMesh:
    """Return adjacent dims of a mesh as a mesh of one dim.

    The result equals `mesh[dims]._flatten(name)`. Unlike `_flatten`, this function does not ask
    the default process group for the rank. The arguments are the arguments of `flatten_mesh`.
    """
    ranks = torch.tensor(dist.get_process_group_ranks(group))
    part: Any = mesh_of([group], mesh.device_type, ranks, (name,))
    if keeps_mesh_order(mesh):
        keep_mesh_order(part)
    layout = mesh._get_slice_mesh_layout(tuple(dims))
    part._layout = layout if len(dims) == 1 else _as_one_dim(layout)
    part._root_mesh = mesh
    part._rank_map = mesh._rank_map
    part._flatten_rank_map = mesh._flatten_rank_map
    return part  # type: ignore[no-any-return]


def _register_in_mesh(mesh: Any, groups: Iterable[ProcessGroup]) -> None:
    registry = getattr(mesh, "_pg_registry", {})  # torch 2.11
    registry.update({group.group_name: group for group in groups})


def flattened(mesh: Any) -> dict[str, Any]:
    """Return the flattened dims of a mesh, by name."""
    return dict(mesh._flatten_mapping)


def _as_one_dim(layout: Any) -> Any:
    """Return the layout of a mesh with all dims joined into one, as `DeviceMesh._flatten` does."""
    if hasattr(layout, "collapse"):
        return type(layout)([layout.collapse()])
    joint = layout.coalesce()  # torch 2.10
    return joint.nest() if len(joint) > 1 else joint
