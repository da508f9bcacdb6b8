"""What real ranks run in the tests of device meshes."""

import torch
from rank_functions import registered
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from hypercomm import HyperCommGrid


def redistribute_on_a_grid():
    """Ranks 1..8 as dp=4 and tp=2: the local parts of a tensor, and the groups that it took."""
    with HyperCommGrid([2, 2, 2], ["tp", "cp", "dp"], rank_offset=1) as grid:
        grid.create_pg("tp")
        grid.create_pg(["cp", "dp"])
        if not grid.is_current_rank_in_grid():
            return [], [], 0
        before = registered()[0]
        mesh = grid.device_mesh(("dp", "cp"), "tp")
        whole = torch.arange(48.0).reshape(8, 6)
        tensor = distribute_tensor(whole, mesh, [Shard(0), Shard(1)])
        sharded = tensor.to_local().tolist()
        swapped = tensor.redistribute(mesh, [Replicate(), Shard(0)]).to_local().tolist()
        return sharded, swapped, len(registered()[0] - before)
