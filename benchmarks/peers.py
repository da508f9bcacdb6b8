"""The compared ways to create process groups. Each way creates the same groups of a grid."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

import numpy as np
import torch.distributed as dist

from hypercomm import HyperCommGrid

Shape = Sequence[int]
Names = Sequence[str]
Wanted = Sequence[Sequence[str]]
Peer = Callable[[Shape, Names, Wanted], object]
"""A function that creates groups. Its result is kept alive until the time has been measured."""


def hypercomm(shape: Shape, names: Names, wanted: Wanted) -> object:
    grid = HyperCommGrid(shape, names)
    grid.create_pgs(wanted)
    return grid


def one_by_one(shape: Shape, names: Names, wanted: Wanted) -> None:
    grid = HyperCommGrid(shape, names)
    for dims in wanted:
        grid.create_pg(dims)


def shared(shape: Shape, names: Names, wanted: Wanted) -> None:
    HyperCommGrid(shape, names, share="identical").create_pgs(wanted)


def lazy(shape: Shape, names: Names, wanted: Wanted) -> None:
    HyperCommGrid(shape, names, lazy_init=True).create_pgs(wanted)


def megatron_grid(shape: Shape, names: Names, wanted: Wanted) -> object:
    from megatron.core.hyper_comm_grid import HyperCommGrid as MegatronGrid

    grid = MegatronGrid(list(shape), list(names))
    for dims in wanted:
        grid.create_pg(list(dims))
    return grid


def device_mesh(shape: Shape, names: Names, wanted: Wanted) -> object:
    from torch.distributed.device_mesh import init_device_mesh

    # DeviceMesh has the opposite order of dims: its last dim varies fastest.
    mesh = init_device_mesh("cpu", tuple(shape[::-1]), mesh_dim_names=tuple(names[::-1]))
    for dims in wanted:
        if len(dims) > 1:
            mesh[tuple(name for name in names[::-1] if name in dims)]._flatten("_".join(dims))
    return mesh


def new_group_loop(shape: Shape, names: Names, wanted: Wanted) -> None:
    for groups in enumerated(shape, names, wanted):
        for ranks in groups.tolist():
            dist.new_group(ranks)


def enumerated(shape: Shape, names: Names, wanted: Wanted) -> list[np.ndarray]:
    """Return all groups over each set of dims, computed with numpy. Each row is a group."""
    table = np.arange(np.prod(shape)).reshape(shape[::-1])  # the first dim varies fastest
    tables = []
    for dims in wanted:
        axes = [len(names) - 1 - names.index(name) for name in names[::-1] if name in dims]
        others = [axis for axis in range(len(names)) if axis not in axes]
        size = int(np.prod([table.shape[axis] for axis in axes]))
        tables.append(table.transpose(*others, *axes).reshape(-1, size))
    return tables


REFERENCE = "megatron-core HyperCommGrid"

PEERS: dict[str, Peer] = {
    "hypercomm": hypercomm,
    REFERENCE: megatron_grid,
    "torch DeviceMesh": device_mesh,
    "new_group loop": new_group_loop,
}


def destroy_all() -> None:
    """Destroy every process group except WORLD, whoever created it.

    Garbage is collected now, so that no thread of a group ends during a later measurement.
    """
    for group in list(dist.distributed_c10d._world.pg_map):
        if group is not dist.group.WORLD:
            dist.destroy_process_group(group)
    gc.collect()
