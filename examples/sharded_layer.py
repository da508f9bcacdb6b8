"""A property test of a sharded layer, on real ranks of the grids that hypothesis draws.

    pip install '.[testing]'
    pytest examples/sharded_layer.py        # or: python examples/sharded_layer.py

With `python`, a bug is also planted, found, and shrunk to the smallest grid and batch that show it.
"""

import time

import torch
from hypothesis import strategies as st

from hypercomm import HyperCommGrid
from hypercomm.errors import RankFailedError
from hypercomm.testing import given_ranks, grids

GRIDS = grids(dim_names=["tp", "dp"], dims_required=["tp"], max_ranks=4)
BATCHES = st.integers(1, 8)


class RowParallel(torch.nn.Module):
    """A linear layer whose input features are split over tp. The partial results are summed."""

    def __init__(self, linear: torch.nn.Linear, grid: HyperCommGrid, is_buggy: bool) -> None:
        super().__init__()
        self.tp, self.bias, self.is_buggy = grid["tp"], linear.bias, is_buggy
        self.rows = torch.arange(linear.in_features).tensor_split(self.tp.size)[self.tp.rank]
        self.weight = linear.weight[:, self.rows]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the output of the full layer."""
        y = x[:, self.rows] @ self.weight.T
        return self.tp.sum(y + self.bias) if self.is_buggy else self.tp.sum(y) + self.bias


def check(grid: HyperCommGrid, batch: int, is_buggy: bool = False) -> None:
    """Compare the sharded layer with the full layer."""
    torch.manual_seed(0)
    linear, x = torch.nn.Linear(12, 8).requires_grad_(False), torch.randn(batch, 12)
    torch.testing.assert_close(RowParallel(linear, grid, is_buggy)(x), linear(x))


@given_ranks(GRIDS, BATCHES)
def test_layer(grid: HyperCommGrid, batch: int) -> None:
    """Test that the sharded layer equals the full layer on every grid."""
    check(grid, batch)


@given_ranks(GRIDS, BATCHES)
def find_bug(grid: HyperCommGrid, batch: int) -> None:
    """Find the planted bug: each rank of tp adds the bias before the sum."""
    check(grid, batch, is_buggy=True)


if __name__ == "__main__":
    test_layer()
    start = time.perf_counter()
    try:
        find_bug()
    except RankFailedError as error:
        print(error, *getattr(error, "__notes__", []), sep="\n")
    print(f"seconds to find and shrink it: {time.perf_counter() - start:.1f}")
