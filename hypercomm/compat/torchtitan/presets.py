"""Presets: the grid that torchtitan's `ParallelDims` makes meshes of, with its views.

Source: `torchtitan.distributed.parallel_dims` of torchtitan 0.3.0, `ParallelDims.build_mesh`: the
names of its meshes' dims, and which sizes multiply to which. They are those of
`spmd_backend="partial_dtensor"`; the default there, "spmd_types", builds others. The one dim of its
loss mesh is called "loss_mesh" there, and "loss" here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from hypercomm.errors import LayoutError, WorldSizeError
from hypercomm.grid.arguments import GroupArguments, check_keywords
from hypercomm.grid.grid_set import GridSet, SetArguments
from hypercomm.layout import RankLayout
from hypercomm.layout.checks import as_world_size
from hypercomm.layout.parsing import OPEN, as_size, close_sizes
from hypercomm.layout.text import shown
from hypercomm.process_groups import world

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from typing_extensions import Unpack  # typing has it from Python 3.11 on

    from hypercomm.grid import HyperCommGrid

_GRID = "training"
_MESHES = {
    "dataloading": ("pp", "batch", "cp", "tp"),
    "dense": ("pp", "dp_replicate", "fsdp", "tp"),
    "sparse": ("pp", "dp_replicate", "efsdp", "ep"),
}
"""torchtitan's meshes, which are views of the grid, the last dim varying fastest."""
_LOSS = "loss"


def torchtitan_grids(
    *,
    dp_replicate: int = 1,
    dp_shard: int = OPEN,
    cp: int = 1,
    tp: int = 1,
    pp: int = 1,
    ep: int = 1,
    world_size: int | None = None,
    **arguments: Unpack[SetArguments],
) -> GridSet:
    """Make the grid of one of torchtitan's models, "training", whose views are its meshes.

    The grid has the dims tp, cp, dp_shard, dp_replicate and pp, the first varying fastest. Its view
    "dataloading" has batch (dp_replicate with dp_shard) in place of these, "dense" has fsdp
    (dp_shard with cp), and "sparse" has ep and efsdp (what ep leaves of tp, cp and dp_shard). Dims
    of one name have one process group in all of them. None is created: `torchtitan_meshes` does.

    Args:
        dp_replicate: Ranks that hold the same weights (HSDP's replicas).
        dp_shard: Ranks that share the weights; default: what the other sizes leave of the world.
        cp: Context parallel size.
        tp: Tensor parallel size.
        pp: Pipeline parallel size.
        ep: Expert parallel size, a divisor of dp_shard * cp * tp.
        world_size: Number of ranks of the job; default: as for `HyperCommGrid`.
        arguments: `name`, `backend`, `creation`, `share`, `lazy_init`, `verify` and `overrides`,
            as for `GridSet`.

    Raises:
        LayoutError: A size is not a positive int.
        WorldSizeError: The sizes do not multiply to the world, or `ep` does not divide.

    Example:
        >>> grids = torchtitan_grids(dp_replicate=2, cp=2, tp=2, ep=4, world_size=16)
        >>> grid = grids["training"]
        >>> print(grid.layout, grid.view("sparse").layout, sep="; ")
        tp=2,cp=2,dp_shard=2,dp_replicate=2,pp=1; ep=4,efsdp=2,dp_replicate=2,pp=1
    """
    check_keywords("torchtitan_grids", arguments, [*_NAMES, *SetArguments.__annotations__])
    total = as_world_size(world.world_size(world_size))
    given = {"tp": tp, "cp": cp, "dp_shard": dp_shard, "dp_replicate": dp_replicate, "pp": pp}
    sizes = {dim: as_size(dim, size) for dim, size in given.items()}
    for dim, size in sizes.items():
        if size == OPEN and dim != "dp_shard":
            raise LayoutError(f"only dp_shard may be unspecified (-1), not {dim}; give its size")
    sizes = close_sizes(sizes, total, f"torchtitan's sizes must fit on {total}")
    experts = as_size("ep", ep)
    inner = sizes["tp"] * sizes["cp"] * sizes["dp_shard"]
    if experts == OPEN or inner % experts:
        raise WorldSizeError(
            f"ep={shown(ep)} must divide dp_shard * cp * tp = {sizes['dp_shard']} * "
            f"{sizes['cp']} * {sizes['tp']} = {inner}"
        )
    known = sizes | {
        "batch": sizes["dp_shard"] * sizes["dp_replicate"],
        "fsdp": sizes["dp_shard"] * sizes["cp"],
        "ep": experts,
        "efsdp": inner // experts,
    }
    layout = RankLayout(list(sizes.values()), list(sizes))
    grids = GridSet({_GRID: layout}, requires="tiled", world_size=total, **arguments)
    for name, dims in _MESHES.items():
        order = list(reversed(dims))
        shared = [dim for dim in order if dim in sizes]
        grids[_GRID].register_view(name, [known[dim] for dim in order], order, shared)
    return grids


_NAMES = tuple(torchtitan_grids.__kwdefaults__ or {})


def torchtitan_meshes(grids: GridSet) -> dict[str, DeviceMesh]:
    """Create the process groups of torchtitan's meshes, each once, and return the meshes.

    Every rank of the job must call this. torchtitan creates a dim's group anew for each mesh that
    has it; here meshes share them.

    Args:
        grids: What `torchtitan_grids` has made.

    Returns:
        "dataloading", "dense" and "sparse", with torchtitan's dims, and "loss", of the one dim
        "loss": batch with cp.

    Raises:
        LayoutError: `grids` has no such grid, or it has no such views.
        CreationError, GroupExistsError: As for `HyperCommGrid.create_pgs`.

    Example:
        >>> from hypercomm.testing import fake_world
        >>> with fake_world(16), torchtitan_grids(dp_replicate=2, cp=2, tp=2, ep=4) as grids:
        ...     meshes = torchtitan_meshes(grids)
        ...     print(meshes["sparse"].mesh_dim_names, tuple(meshes["sparse"].shape))
        ...     meshes["dense"]["tp"].get_group() is meshes["dataloading"]["tp"].get_group()
        ('pp', 'dp_replicate', 'efsdp', 'ep') (1, 2, 2, 4)
        True
    """
    from torch.distributed.device_mesh import DeviceMesh

    if not isinstance(grids, GridSet) or _GRID not in grids:
        raise LayoutError(f"grids must be what torchtitan_grids() makes, got {shown(grids)}")
    grid: HyperCommGrid = grids[_GRID]
    if not set(_MESHES) <= set(grid.views):
        raise LayoutError(
            f"grid {_GRID!r} must have the views {tuple(_MESHES)}, as torchtitan_grids() makes it"
        )
    shared = set(grid.dim_names)
    own = [dim for dim in grid.dim_names if any(dim in dims for dims in _MESHES.values())]
    wanted: list[GroupArguments] = [{"dims": dim} for dim in own]
    for view, dims in _MESHES.items():
        wanted += [{"dims": dim, "view": view} for dim in dims if dim not in shared]
    wanted.append({"dims": ["batch", "cp"], "view": "dataloading"})
    grid.create_pgs(wanted)
    meshes = {view: grid.view(view).device_mesh(*dims) for view, dims in _MESHES.items()}
    together = grid.view("dataloading").device_mesh(("batch", "cp"))
    meshes[_LOSS] = DeviceMesh.from_group(
        together.get_group(),
        together.device_type,
        mesh=together.mesh,
        mesh_dim_names=(_LOSS,),
    )
    return meshes
