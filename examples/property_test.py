"""A property test on real ranks: a split layer, on whatever layout hypothesis draws.

    pip install 'hypercomm[testing]'
    python examples/property_test.py        # or: pytest examples/property_test.py

starts each layout's own ranks and compares with one process; a planted bug is found and shrunk.
"""

import torch
from hypothesis import find, given, settings
from hypothesis import strategies as st

from hypercomm import HyperCommGrid, RankLayout, run_ranks
from hypercomm.testing import layouts

LAYOUTS = layouts(dim_names=["tp", "dp"], min_dims=2, max_ranks=4, max_offset=0)
BATCHES = st.integers(1, 9)
seen: list[float] = []


def layer(layout: RankLayout, batch: int, is_buggy: bool) -> float:
    """Split the batch over dp and the weight's rows over tp; return the difference to all of it."""
    torch.manual_seed(batch)
    x, weight, bias = torch.randn(batch, 12), torch.randn(12, 8), torch.randn(8)
    with HyperCommGrid(layout) as grid:
        tp, dp = grid["tp"], grid["dp"]
        rows = torch.arange(batch).tensor_split(dp.size)[dp.rank]
        columns = torch.arange(12).tensor_split(tp.size)[tp.rank]
        y = x[rows][:, columns] @ weight[columns]
        y = tp.sum(y + bias) if is_buggy else tp.sum(y) + bias  # each rank of tp adds the bias
        wanted = (x @ weight + bias)[rows]
        return (y - wanted).norm().item()  # 0 where dp leaves no rows


def largest_difference(layout: RankLayout, batch: int, is_buggy: bool = False) -> float:
    """Ask real ranks, as many as the layout has."""
    return max(run_ranks(layer, layout.size, args=(layout, batch, is_buggy)))


@settings(max_examples=20, deadline=None, database=None)
@given(LAYOUTS, BATCHES)
def test_layer(layout: RankLayout, batch: int) -> None:
    """Check the layer on every layout."""
    seen.append(largest_difference(layout, batch))
    assert seen[-1] < 1e-4  # noqa: S101 - it is a test


def find_bug() -> tuple[RankLayout, int]:
    """Return the smallest layout and batch that show the bug."""
    return find(
        st.tuples(LAYOUTS, BATCHES),
        lambda drawn: largest_difference(*drawn, is_buggy=True) > 1e-4,
        settings=settings(deadline=None, database=None),
    )


if __name__ == "__main__":
    test_layer()
    layout, batch = find_bug()
    print(f"{len(seen)} layouts and batches, each on ranks of its own")
    print(f"the bug shrinks to: {layout}")
    print(f"the bug shrinks to a batch of: {batch}")
    print(f"largest difference: {max(seen):.1e}")
