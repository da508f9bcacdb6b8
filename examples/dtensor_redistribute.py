"""A DTensor on a mesh of the grid's process groups, redistributed from one placement to another.

    python examples/dtensor_redistribute.py

Multiplies sharded matrices on 8 local ranks, and compares with the product of the full matrices.
"""

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from hypercomm import HyperCommGrid, run_ranks
from hypercomm.testing import registered_groups


def multiply() -> tuple[float, int]:
    """Multiply on the grid tp=2, cp=2, dp=2, where the groups over dp and cp are one mesh dim."""
    with HyperCommGrid([2, 2, 2], ["tp", "cp", "dp"]) as grid:
        grid.create_pg("tp")
        grid.create_pg(["dp", "cp"])
        before = registered_groups()
        mesh = grid.device_mesh(("dp", "cp"), "tp")  # 4 x 2, named dp_cp and tp
        torch.manual_seed(0)
        left, right = torch.randn(16, 12), torch.randn(12, 8)
        rows = distribute_tensor(left, mesh, [Shard(0), Shard(1)])  # rows over dp_cp, k over tp
        columns = distribute_tensor(right, mesh, [Replicate(), Shard(0)])
        product = rows @ columns
        assert isinstance(product, DTensor)  # for type checkers: torch declares a Tensor
        # An all-reduce over tp, and an all-gather over dp_cp.
        product = product.redistribute(mesh, [Replicate(), Replicate()])
        difference = (product.to_local() - left @ right).abs().max().item()
        return difference, len(registered_groups() - before)


if __name__ == "__main__":
    differences, added = zip(*run_ranks(multiply, 8), strict=True)
    print(f"largest difference: {max(differences):.1e}")
    print(f"process groups added: {max(added)}")
