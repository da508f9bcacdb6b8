"""Test pipeline edges: their ranks in fake worlds, and their creation on real ranks.

A pipeline edge is a process group of two neighbouring stages, for transfers in one direction.
"""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from example_counts import examples
from hypothesis import given, settings, strategies as st
from numpy_oracle import group_of

from hypercomm import HyperCommGrid
from hypercomm.errors import GridDestroyedError, RankOutsideError
from hypercomm.testing import (
    dim_subsets,
    fake_world,
    layouts,
    ranks_of,
    registered_groups,
)

LIMIT = timedelta(seconds=20)
EDGES = ("to_next", "from_previous", "to_previous", "from_next")


def members(edges):
    """Return the ranks of each edge in the order of EDGES, with None for a missing edge."""
    groups = [getattr(edges, name) for name in EDGES]
    return [group and tuple(dist.get_process_group_ranks(group)) for group in groups]


def expected(ranks, rank, wrap):
    """Return what `members` should return. `ranks` is the pipeline in the order of its stages."""
    at = ranks.index(rank)
    size = len(ranks)

    def pair(stage):
        if 0 <= stage < size - 1:
            return ranks[stage], ranks[stage + 1]
        return (ranks[0], ranks[-1]) if wrap and size > 1 else None

    return [pair(at), pair(at - 1), pair(at - 1), pair(at)]


# ---- fake worlds --------------------------------------------------------------------------------


# For any layout, dims and rank, each edge joins the rank with its neighbour. No two edges are the
# same group.
@settings(max_examples=examples(200))
@given(st.data(), st.booleans(), st.booleans())
def test_edges_join_neighbours(data, wrap, in_one_call):
    layout = data.draw(layouts(listed=True, max_ranks=64))
    dims = data.draw(dim_subsets(layout))
    rank = data.draw(ranks_of(layout))
    ranks = group_of(layout.shape, layout.dim_names, [*layout.ranks], dims, rank)
    with fake_world(layout.last_rank + 1, rank), HyperCommGrid(layout) as grid:
        edges = grid.edges(dims, wrap=wrap)
        if in_one_call:
            edges.create()
        assert members(edges) == expected(ranks, rank, wrap)
        groups = [group for name in EDGES if (group := getattr(edges, name)) is not None]
        assert len({*groups}) == len(groups)
        assert {*groups} == {*grid.pgs.values()} - {None}


# Edges are groups of the grid. They have keys, find() and str() show them, and they are destroyed
# with the grid.
def test_edges_are_groups_of_the_grid():
    with fake_world(8, rank=1):
        grid = HyperCommGrid("tp=1,pp=8")
        edges = grid.edges()
        assert (repr(edges), edges.wrap) == ("edges of pp of tp=1,pp=8", False)
        assert repr(grid.edges(wrap=True)).endswith(" with wrap")
        assert not grid.pgs
        before = registered_groups()
        forward = edges.to_next
        assert edges.to_next is grid.edges("pp").to_next is forward
        assert grid.get_pg("pp", name="edge forward odd") is forward
        assert str(grid.find(forward)) == "pp (edge forward odd)"
        assert "group pp (edge forward odd): 3 groups of 2 ranks" in str(grid)
        grid.destroy_pg("pp", name="edge forward odd")
        assert edges.to_next is not forward
        grid.destroy()
        assert registered_groups() == before
        with pytest.raises(GridDestroyedError):
            _ = edges.to_next


# Edges are never shared. With two stages, the four edges are different groups of the same two
# ranks.
def test_edges_are_not_shared():
    with fake_world(2, rank=1), HyperCommGrid("pp=2", share="identical") as grid:
        pp = grid.create_pg("pp")
        edges = grid.edges(wrap=True)
        assert members(edges) == [(0, 1)] * 4
        assert len({pp, *(getattr(edges, name) for name in EDGES)}) == 5


# Edges can be over dims of the grid or of a view. If a view shares a dim, the view uses the edges
# of the grid over this dim.
def test_edges_of_views():
    with fake_world(8, rank=5), HyperCommGrid("tp=2,dp=2,pp=2") as grid:
        grid.register_view("expert", "ep=4,pp=2", shared_dims=["pp"])
        shared = grid.view("expert").edges()
        assert shared.from_previous is grid.edges("pp", view="expert").from_previous
        assert shared.from_previous is grid.edges("pp").from_previous
        shared.create()
        assert members(grid.edges("ep", view="expert")) == [(5, 6), (4, 5), (4, 5), (5, 6)]
        assert members(grid.edges("dp", "tp")) == [(5, 6), (4, 5), (4, 5), (5, 6)]
        assert members(grid.edges(["dp", "pp"])) == [(5, 7), (3, 5), (3, 5), (5, 7)]


# A rank outside the grid has no edges, but can take part in creating them.
def test_rank_outside_has_no_edges():
    with fake_world(5, rank=4), HyperCommGrid("pp=4", cover="any") as grid:
        edges = grid.edges()
        edges.create()
        assert {*grid.pgs.values()} == {None}
        with pytest.raises(RankOutsideError):
            _ = edges.to_next


# After a reshape to a longer pipeline, a shorter pipeline, or a single stage, the edges match the
# new pipeline.
def test_edges_follow_a_reshape():
    with fake_world(8, rank=2), HyperCommGrid("pp=4,dp=2") as grid:
        edges = grid.edges("pp")
        assert members(edges) == [(2, 3), (1, 2), (1, 2), (2, 3)]
        for shape, size in (("pp=8,dp=1", 8), ("pp=2,dp=4", 2), ("pp=1,dp=8", 1), ("pp=4,dp=2", 4)):
            grid.reshape(shape)
            first = 2 // size * size
            assert members(edges) == expected([*range(first, first + size)], 2, wrap=False)


# ---- real ranks ---------------------------------------------------------------------------------


def exchange(edges, ranks):
    """Send this rank's number over all edges, and return the numbers of the neighbours."""
    at = ranks.index(dist.get_rank())
    after, before = ranks[(at + 1) % len(ranks)], ranks[at - 1]
    sends = [(edges.to_next, after, 1), (edges.to_previous, before, -1)]
    receives = [(edges.from_previous, before), (edges.from_next, after)]
    works = []
    received = {}
    for group, peer, sign in sends:
        if group is not None:
            works.append(dist.isend(torch.tensor([sign * (peer + 10)]), peer, group=group))
    for group, peer in receives:
        received[peer, group] = torch.zeros(1, dtype=torch.int64)
        if group is not None:
            works.append(dist.irecv(received[peer, group], peer, group=group))
    for work in works:
        work.wait()
    mine = dist.get_rank() + 10
    return [each.item() // mine for each in received.values()]


# The first use of an edge waits only for the neighbour, regardless of which side uses the edge
# first. Therefore the middle of the pipeline communicates before the ends have used an edge.
@pytest.mark.ranks(4, timeout=60)
def test_first_use_waits_for_the_neighbour_only():
    rank = dist.get_rank()
    with HyperCommGrid("pp=4") as grid:
        edges = grid.edges()
        message = torch.tensor([rank])
        if rank == 1:
            dist.send(message, 2, group=edges.to_next)
        if rank == 2:
            assert edges.to_previous is not None
            dist.recv(message, 1, group=edges.from_previous)
            assert message.item() == 1
        dist.barrier()
        assert exchange(edges, [0, 1, 2, 3]) == [int(rank > 0), -int(rank < 3)]


# All ranks of a ring first use the edge in the same direction, so each rank waits for the next
# rank. There is no deadlock.
@pytest.mark.parametrize(
    "first", [EDGES[0], *(pytest.param(edge, marks=pytest.mark.full) for edge in EDGES[1:])]
)
@pytest.mark.ranks(5, timeout=90)
def test_ring_does_not_deadlock(first):
    for size in (2, 3, 4, 5):
        with HyperCommGrid([size], ["pp"], cover="any") as grid:
            if dist.get_rank() < size:
                edges = grid.edges(wrap=True)
                assert getattr(edges, first).size() == 2
                assert exchange(edges, [*range(size)]) == [1, -1]


# connect() and verify() find the same groups on all ranks. This holds if each rank has created the
# edges that it used, and if create() was called after two ranks had used the edge between them.
@pytest.mark.parametrize("in_one_call", [pytest.param(False, marks=pytest.mark.full), True])
@pytest.mark.ranks(4, timeout=60)
def test_connect_and_verify_find_the_edges(in_one_call):
    rank = dist.get_rank()
    with HyperCommGrid("pp=4", lazy_init=True) as grid:
        edges = grid.edges(wrap=True)
        before = registered_groups()
        if in_one_call:
            used = {1: "to_next", 2: "from_previous"}
            if rank in used:
                assert getattr(grid.edges(), used[rank]).size() == 2
            edges.create()
            edges.create()
        else:
            members(edges)
        grid.verify(LIMIT)
        rows = grid.connect(timeout=LIMIT)
        pairs = {"even": [(0, 1), (2, 3)], "odd": [(1, 2)], "wrap": [(0, 3)]}
        assert [(row.title, row.ranks) for row in rows] == [
            (f"pp (edge {direction} {kind})", pair)
            for direction in ("backward", "forward")
            for kind, every in pairs.items()
            for pair in every
            if rank in pair
        ]
        assert all(row.seconds > 0 for row in rows)
    assert registered_groups() == before


# With verify=True, the first use of any edge creates all edges, together with all ranks.
@pytest.mark.parametrize("wrap", [pytest.param(False, marks=pytest.mark.full), True])
@pytest.mark.ranks(4, timeout=60)
def test_verify_creates_all_edges(wrap):
    rank = dist.get_rank()
    with HyperCommGrid("pp=4", verify=True) as grid:
        edges = grid.edges(wrap=wrap)
        wanted = [int(wrap or rank > 0), -int(wrap or rank < 3)]
        assert exchange(edges, [0, 1, 2, 3]) == wanted
        assert len(grid.pgs) == (6 if wrap else 4)
        edges.create()


# After a reshape, a rank that keeps all of its edges still takes part in creating the new edges.
@pytest.mark.full
@pytest.mark.ranks(4, timeout=60)
def test_verify_creates_edges_after_a_reshape():
    rank = dist.get_rank()
    with HyperCommGrid("pp=2,dp=2", verify=True) as grid:
        edges = grid.edges()
        assert exchange(edges, [rank // 2 * 2, rank // 2 * 2 + 1]) == [rank % 2, rank % 2 - 1]
        grid.reshape("pp=4,dp=1")
        assert exchange(edges, [0, 1, 2, 3]) == [int(rank > 0), -int(rank < 3)]
        grid.verify(LIMIT)
