"""Test the tables of docs/reference/calls.md, which list the ranks that make each call.

The tests run on four real ranks. In tp=2,dp=2, the tp groups are (0, 1) and (2, 3), and the dp
groups are (0, 2) and (1, 3).
"""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from page_runner import DOCS

from hypercomm import HyperCommGrid, RankLayout, RankMapping, run_ranks, transfer

LIMIT = timedelta(seconds=2)


def results(call, rank_by_rank=True):
    """Return what a call returned, or the name of its error, on each of four ranks."""

    def on_rank():
        grid = HyperCommGrid("tp=2,dp=2")
        try:
            return call(grid, dist.get_rank())
        except RuntimeError as error:
            time.sleep(0.5)  # rank 0 serves the store, so it must not end first
            return type(error).__name__

    found = run_ranks(on_rank, 4, timeout=60, group_timeout=LIMIT)
    return found if rank_by_rank else set(found)


# With `local`, only the ranks of a group must call. Ranks may create groups in different orders.
def test_local_needs_the_members_only():
    def members(grid, rank):
        return grid.create_pg("tp").size() if rank < 2 else None

    def own_order(grid, rank):
        return [grid[dim].sum(1) for dim in (("tp", "dp") if rank < 2 else ("dp", "tp"))]

    assert results(members) == [2, 2, None, None]
    assert results(own_order) == [[2, 2]] * 4


# Ranks that wait for each other in a circle raise. So do ranks that request groups that other ranks
# do not request.
@pytest.mark.full
def test_orders_that_fail():
    def circle(grid, rank):
        return [grid.create_pg(dim) for dim in (("tp", "dp") if rank in (0, 3) else ("dp", "tp"))]

    def then(call):
        def some_have_a_group(grid, rank):
            if rank < 2:
                grid.create_pg("tp")
            call(grid)

        return some_have_a_group

    mismatch = {"PlanMismatchError"}
    assert results(circle, rank_by_rank=False) == mismatch
    assert results(then(HyperCommGrid.verify), rank_by_rank=False) == mismatch
    assert results(then(HyperCommGrid.connect), rank_by_rank=False) == mismatch
    reshape = then(lambda grid: grid.reshape("tp=4,dp=1"))
    assert results(reshape, rank_by_rank=False) == mismatch


# With `verify`, `enumerate` and `create_pgs`, the ranks of a group wait for all ranks.
@pytest.mark.full
@pytest.mark.parametrize(
    "call",
    [
        lambda _: HyperCommGrid("tp=2,dp=2", verify=True).create_pg("tp"),
        lambda grid: grid.create_pg("tp", creation="enumerate"),
        lambda grid: grid.create_pgs(["tp"]),
    ],
    ids=["verify", "enumerate", "create_pgs"],
)
def test_calls_of_all_ranks(call):
    found = results(lambda grid, rank: call(grid) and None if rank < 2 else None)
    assert found == ["GroupCreationTimeout"] * 2 + [None] * 2


# Both ranks of a pipeline edge must use the edge. A rank outside both layouts of a transfer may
# call transfer(), but need not.
def test_edges_and_transfers():
    mapping = RankMapping("dp=1", RankLayout("dp=1", rank_offset=1))

    def call(_, rank):
        edges = HyperCommGrid("pp=4").edges("pp")
        edge = None
        if rank in (1, 2):
            edge = edges.to_next if rank == 1 else edges.from_previous
        size = edge and edge.size()
        moved = transfer(mapping, torch.ones(1, 1), verify=True) if rank < 3 else None
        return size, moved is not None

    assert results(call) == [(None, False), (2, True), (2, False), (None, False)]


# The page has a row for each strategy, and for each call with special rules.
def test_rows():
    page = (DOCS / "reference" / "calls.md").read_text()
    cells = " ".join(line.split("|")[1] for line in page.splitlines() if line.startswith("| "))
    for name in ("local", "split", "enumerate", "create_pgs", "reshape(target)", "edges(...)"):
        assert f"`{name}`" in cells
