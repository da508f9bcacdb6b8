"""A functional collective over a grid's group, inside torch.compile.

    python examples/compiled_all_reduce.py

Compiles a row-parallel layer in one graph on 4 local ranks, and compares with the unsharded layer.
"""

import torch
import torch.distributed._functional_collectives as collectives
from torch import Tensor

from hypercomm import HyperCommGrid, run_ranks
from hypercomm.testing import registered_groups


def multiply() -> tuple[float, int, int]:
    """Multiply with a matrix whose rows are split over tp. Count the graphs and the groups."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: list[Tensor]) -> torch.fx.GraphModule:
        graphs.append(graph)
        return graph

    with HyperCommGrid([2, 2], ["tp", "dp"]) as grid:
        tp = grid["tp"].group
        before = registered_groups()

        @torch.compile(backend=backend, fullgraph=True)
        def layer(x: Tensor, weight: Tensor) -> Tensor:
            return torch.relu(collectives.all_reduce(x @ weight, "sum", tp))

        torch.manual_seed(0)
        x, weight = torch.randn(4, 16), torch.randn(16, 8)
        place = grid.coords()["tp"]
        got = layer(x.chunk(2, dim=1)[place], weight.chunk(2, dim=0)[place])
        difference = (got - torch.relu(x @ weight)).abs().max().item()
        return difference, len(registered_groups() - before), len(graphs)


if __name__ == "__main__":
    differences, added, graphs = zip(*run_ranks(multiply, 4), strict=True)
    print(f"largest difference: {max(differences):.1e}")
    print(f"process groups added: {max(added)}")
    print(f"graphs: {max(graphs)}")
