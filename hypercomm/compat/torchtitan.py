"""Makes torchtitan's meshes from the views of one grid.

Sources, of torchtitan 0.3.0: `ParallelDims.build_mesh` in `torchtitan.distributed.parallel_dims`
for the names of the meshes, and for the names and sizes of their dims; `torchtitan.config` for the
names of the arguments. The only dim of the loss mesh is called "loss_mesh" in torchtitan, and
"loss" here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from hypercomm.compat.layouts import TORCHTITAN_VIEWS, torchtitan_layouts
from hypercomm.grid.grid_set import GridSet
from hypercomm.layout.checks import as_world_size, check_choice
from hypercomm.layout.parsing import UNSPECIFIED
from hypercomm.process_groups.spec import GroupRequest, Share
from hypercomm.process_groups.world import size_of_world

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["torchtitan_grids", "torchtitan_meshes"]

SpmdBackend = Literal["partial_dtensor", "spmd_types"]

_GRID = "training"
_MESHES: dict[str, dict[str, tuple[str | None, tuple[str, ...]]]] = {
    "partial_dtensor": {
        "dataloading": ("dataloading", TORCHTITAN_VIEWS["dataloading"]),
        "loss": ("loss", ("loss",)),
        "dense": ("dense", TORCHTITAN_VIEWS["dense"]),
        "sparse": ("sparse", TORCHTITAN_VIEWS["sparse"]),
    }
}
_MESHES["spmd_types"] = _MESHES["partial_dtensor"] | {
    "dense": (None, ("pp", "dp_replicate", "dp_shard", "cp", "tp")),
    "spmd_dense_for_fwdbwd": ("spmd", ("dp", "cp", "tp")),
    "spmd_sparse_for_fwdbwd": ("sparse", ("dp_replicate", "efsdp", "ep")),
}
"""torchtitan's meshes, by backend and name.

Each value is a pair of a view and the dims of the mesh. If the grid itself has the dims, the view
is None.
"""


def torchtitan_grids(
    *,
    dp_replicate: int = 1,
    dp_shard: int = UNSPECIFIED,
    cp: int = 1,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    world_size: int | None = None,
    **options: Any,
) -> GridSet:
    """Return a set with the grid "training", whose views are the meshes of a torchtitan model.

    The grid has the dims tp, cp, dp_shard, dp_replicate and pp. The dim tp varies fastest. Some
    dims of the views combine dims of the grid:

    * batch in "dataloading" and dp in "spmd" combine dp_replicate and dp_shard;
    * loss in "loss" combines dp_replicate, dp_shard and cp;
    * fsdp in "dense" combines dp_shard and cp;
    * ep and efsdp in "sparse" together combine tp, cp and dp_shard.

    Dims with the same name share one process group in all views. This function creates no groups.
    `torchtitan_meshes` creates them.

    Args:
        dp_replicate: Number of replicas of the sharded model (HSDP).
        dp_shard: Number of ranks that FSDP shards over. Default: the remaining ranks of the world.
        cp: Context parallel size.
        tp: Tensor parallel size.
        pp: Pipeline parallel size.
        ep: Expert parallel size, a divisor of dp_shard * cp * tp.
        world_size: Number of ranks of the job. Default: see `HyperCommGrid`.
        options: The name of the set and the options of its groups, such as `backend=` and `share=`.
            See `GridSet`.

    Raises:
        LayoutError: A size is not a positive int.
        WorldSizeError: The sizes do not multiply to the world, or `ep` does not divide
            dp_shard * cp * tp.

    Example:
        >>> grids = torchtitan_grids(dp_replicate=2, cp=2, tp=2, ep=4, world_size=16)
        >>> grid = grids["training"]
        >>> print(grid.layout, grid.view("sparse").layout, sep="; ")
        tp=2,cp=2,dp_shard=2,dp_replicate=2,pp=1; ep=4,efsdp=2,dp_replicate=2,pp=1
    """
    total = as_world_size(size_of_world(world_size))
    views = torchtitan_layouts(
        dp_replicate=dp_replicate,
        dp_shard=dp_shard,
        cp=cp,
        tp=tp,
        pp=pp,
        ep=ep,
        world_size=total,
    )
    grids = GridSet({_GRID: views.base}, requires="tiled", world_size=total, **options)
    for label, view in views.items():
        grids[_GRID].register_view(label, view.layout.sizes, shared_dims=view.shared_dims)
    return grids


def torchtitan_meshes(
    grids: GridSet, spmd_backend: SpmdBackend = "partial_dtensor"
) -> dict[str, DeviceMesh]:
    """Create the process groups of torchtitan's meshes, and return the meshes.

    Every rank of the job must call this. If several meshes have the same dim, they share the
    group over this dim. torchtitan itself creates a separate group for each of these meshes.

    Args:
        grids: The result of `torchtitan_grids`.
        spmd_backend: The value of torchtitan's setting `spmd_backend`. torchtitan's default is
            "spmd_types".

    Returns:
        The meshes by name: "dataloading", "dense" and "sparse" with torchtitan's dims, and "loss"
        with the only dim "loss". With "spmd_types", there is also "spmd_dense_for_fwdbwd". If ep is
        larger than 1, there is also "spmd_sparse_for_fwdbwd".

    Raises:
        UnknownDimError: `grids` lacks a grid or view that `torchtitan_grids` makes.
        GroupOptionsError: `spmd_backend` is unknown.
        CreationError, GroupExistsError: See `HyperCommGrid.create_pgs`.

    Example:
        >>> from hypercomm.testing import fake_world
        >>> with fake_world(16), torchtitan_grids(dp_replicate=2, cp=2, tp=2, ep=4) as grids:
        ...     meshes = torchtitan_meshes(grids, spmd_backend="spmd_types")
        ...     print(meshes["spmd_dense_for_fwdbwd"].mesh_dim_names)
        ...     meshes["dense"]["tp"].get_group() is meshes["dataloading"]["tp"].get_group()
        ('dp', 'cp', 'tp')
        True
    """
    check_choice("spmd_backend", spmd_backend, tuple(_MESHES))
    grid = grids[_GRID]
    wanted = _MESHES[spmd_backend].copy()
    if grid.views["sparse"].size_of("ep") == 1:
        wanted.pop("spmd_sparse_for_fwdbwd", None)
    requests: dict[str, GroupRequest] = {}
    for view, dims in wanted.values():
        for dim in dims:
            holder = None if dim in grid.dim_names else view
            share: Share | None = "identical" if dim in ("batch", "dp") else None  # same ranks
            requests.setdefault(dim, GroupRequest(dim, view=holder, share=share))
    grid.create_pgs(requests.values())
    return {
        name: (grid if view is None else grid.view(view)).device_mesh(*dims)
        for name, (view, dims) in wanted.items()
    }
