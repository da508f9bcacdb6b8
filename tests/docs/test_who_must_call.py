"""Test the tables of docs/reference/calls.md, which list the ranks that make each call.

The tests run on four real ranks. In tp=2,dp=2, the tp groups are (0, 1) and (2, 3), and the dp
groups are (0, 2) and (1, 3).
"""

import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from hypercomm import HyperCommGrid, RankLayout, RankMapping, run_ranks, transfer

pytestmark = pytest.mark.full


def results(*calls):
    """Return what each call returned, or the name of its error, on each of four ranks."""

    def on_rank():
        found = []
        for call in calls:
            with HyperCommGrid("tp=2,dp=2") as grid:
                try:
                    found.append(call(grid, dist.get_rank()))
                except RuntimeError as error:
                    found.append(type(error).__name__)
            dist.barrier()
        return found

    found = run_ranks(on_rank, 4, timeout=60, group_timeout=timedelta(seconds=2))
    return [list(one) for one in zip(*found, strict=True)]


# Both ranks of a pipeline edge must use the edge. A rank outside both layouts of a transfer may
# call transfer(), but need not. (The program on the page creates groups on some ranks.)
def test_calls_of_some_ranks():
    mapping = RankMapping("dp=1", RankLayout("dp=1", rank_offset=1))

    def edges(_, rank):
        with HyperCommGrid("pp=4") as grid:
            pp = grid.edges("pp")
            edge = {1: "to_next", 2: "from_previous"}.get(rank)
            return edge and dist.barrier(getattr(pp, edge))

    def moved(_, rank):
        return rank < 3 and transfer(mapping, torch.ones(1, 1), verify=True) is not None

    assert results(edges, moved) == [[None] * 4, [False, True, False, False]]


# Ranks that wait for each other in a circle raise. So do ranks that request groups that other ranks
# do not request.
def test_orders_that_fail():
    def circle(grid, rank):
        return [grid.create_pg(dim) for dim in (("tp", "dp") if rank in (0, 3) else ("dp", "tp"))]

    def then(call):
        def some_have_a_group(grid, rank):
            if rank < 2:
                grid.create_pg("tp")
            call(grid)

        return some_have_a_group

    found = results(
        circle,
        then(HyperCommGrid.verify),
        then(HyperCommGrid.connect),
        then(lambda grid: grid.reshape("tp=4,dp=1")),
    )
    assert found == [["PlanMismatchError"] * 4] * 4


# With `verify`, `enumerate` and `create_pgs`, the ranks of a group wait for all ranks.
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
    def wait(grid, rank):
        if rank < 2:
            call(grid)
        time.sleep(0.5)  # rank 0 serves the store, so it must not end first

    assert results(wait) == [["GroupCreationTimeout"] * 2 + [None] * 2]
