"""Pipeline edges: whom each joins by arithmetic, and how they are created on real ranks."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from by_numpy import group_of
from effort import examples
from hypothesis import given, settings
from hypothesis import strategies as st

from hypercomm import HyperCommGrid
from hypercomm.errors import GridDestroyedError, RankOutsideError, UnknownDimError
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
    """The ranks of each edge, in the order of EDGES; None where there is none."""
    groups = [getattr(edges, name) for name in EDGES]
    return [group and tuple(dist.get_process_group_ranks(group)) for group in groups]


def expected(ranks, rank, wrap):
    """The same by arithmetic, for the ranks of a pipeline; members in its order."""
    at, size = ranks.index(rank), len(ranks)

    def pair(stage):
        if 0 <= stage < size - 1:
            return ranks[stage], ranks[stage + 1]
        return (ranks[0], ranks[-1]) if wrap and size > 1 else None

    return [pair(at), pair(at - 1), pair(at - 1), pair(at)]


# ---- fake worlds --------------------------------------------------------------------------------


# For any layout, also one that lists its ranks, dims and rank, each edge joins the rank with its
# neighbour, and all are distinct.
@settings(max_examples=examples(200))
@given(st.data(), st.booleans(), st.booleans())
def test_membership(data, wrap, at_once):
    layout = data.draw(layouts(listed=True, max_ranks=64))
    dims, rank = data.draw(dim_subsets(layout)), data.draw(ranks_of(layout))
    ranks = group_of(layout.shape, layout.dim_names, [*layout.ranks], dims, rank)
    with fake_world(layout.last_rank + 1, rank), HyperCommGrid(layout) as grid:
        edges = grid.edges(dims, wrap=wrap)
        if at_once:
            edges.create()
        assert members(edges) == expected(ranks, rank, wrap)
        groups = [group for name in EDGES if (group := getattr(edges, name)) is not None]
        assert len({*groups}) == len(groups)
        assert {*groups} == {*grid.pgs.values()} - {None}


# Edges are groups of the grid: under a key, found, shown, and destroyed with it.
def test_they_are_groups_of_the_grid():
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
        assert "group pp (edge forward odd): 3 of 2 ranks" in str(grid)
        grid.destroy_pg("pp", name="edge forward odd")
        assert edges.to_next is not forward
        grid.destroy()
        assert registered_groups() == before
        with pytest.raises(GridDestroyedError):
            _ = edges.to_next


# Groups that may be shared are not: with two stages, four groups join the same two ranks.
def test_they_are_not_shared():
    with fake_world(2, rank=1), HyperCommGrid("pp=2", share="identical") as grid:
        pp, edges = grid.create_pg("pp"), grid.edges(wrap=True)
        assert members(edges) == [(0, 1)] * 4
        assert len({pp, *(getattr(edges, name) for name in EDGES)}) == 5


# Dims are those of the grid or of a view; dims that a view shares have the grid's edges.
def test_views():
    with fake_world(8, rank=5), HyperCommGrid("tp=2,dp=2,pp=2") as grid:
        grid.register_view("expert", "ep=4,pp=2", shared_dims=["pp"])
        shared = grid.view("expert").edges()
        assert shared.from_previous is grid.edges("pp", view="expert").from_previous
        assert shared.from_previous is grid.edges("pp").from_previous
        shared.create()
        assert members(grid.edges("ep", view="expert")) == [(5, 6), (4, 5), (4, 5), (5, 6)]
        assert members(grid.edges("dp", "tp")) == [(5, 6), (4, 5), (4, 5), (5, 6)]
        assert members(grid.edges(["dp", "pp"])) == [(5, 7), (3, 5), (3, 5), (5, 7)]
        with pytest.raises(UnknownDimError, match="'qq'"):
            grid.edges("qq")
        with pytest.raises(UnknownDimError, match=r"'ep'.*'expert'"):
            grid.edges("ep")
        with pytest.raises(UnknownDimError, match="'moe'"):
            grid.edges(view="moe")


# A rank outside of the grid is at no edge, and may create those of the others.
def test_outside():
    with fake_world(5, rank=4), HyperCommGrid("pp=4", cover="any") as grid:
        edges = grid.edges()
        edges.create()
        assert {*grid.pgs.values()} == {None}
        with pytest.raises(RankOutsideError):
            _ = edges.to_next


# Edges stay correct when the pipeline becomes longer, shorter, or no pipeline.
def test_reshape():
    with fake_world(8, rank=2), HyperCommGrid("pp=4,dp=2") as grid:
        edges = grid.edges("pp")
        assert members(edges) == [(2, 3), (1, 2), (1, 2), (2, 3)]
        for shape, size in (("pp=8,dp=1", 8), ("pp=2,dp=4", 2), ("pp=1,dp=8", 1), ("pp=4,dp=2", 4)):
            grid.reshape(shape)
            first = 2 // size * size
            assert members(edges) == expected([*range(first, first + size)], 2, wrap=False)


# ---- real ranks ---------------------------------------------------------------------------------


def exchange(edges, ranks):
    """Send the own rank over all edges, and return what was received from each neighbour."""
    at = ranks.index(dist.get_rank())
    after, before = ranks[(at + 1) % len(ranks)], ranks[at - 1]
    sends = [(edges.to_next, after, 1), (edges.to_previous, before, -1)]
    receives = [(edges.from_previous, before), (edges.from_next, after)]
    works, received = [], {}
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


# The first use of an edge needs the neighbour alone, in whichever direction that looks first: the
# middle of the pipeline communicates before its ends have used anything.
@pytest.mark.ranks(4, timeout=60)
def test_the_first_use_needs_the_neighbour_alone():
    rank = dist.get_rank()
    with HyperCommGrid("pp=4") as grid:
        edges, message = grid.edges(), torch.tensor([rank])
        if rank == 1:
            dist.send(message, 2, group=edges.to_next)
        if rank == 2:
            assert edges.to_previous is not None
            dist.recv(message, 1, group=edges.from_previous)
            assert message.item() == 1
        dist.barrier()
        assert exchange(edges, [0, 1, 2, 3]) == [int(rank > 0), -int(rank < 3)]


# All ranks of a ring begin with the same edge; each waits for the next one, and none forever.
@pytest.mark.parametrize(
    "first", [EDGES[0], *(pytest.param(edge, marks=pytest.mark.full) for edge in EDGES[1:])]
)
@pytest.mark.ranks(5, timeout=90)
def test_rings(first):
    for size in (2, 3, 4, 5):
        with HyperCommGrid([size], ["pp"], cover="any") as grid:
            if dist.get_rank() < size:
                edges = grid.edges(wrap=True)
                assert getattr(edges, first).size() == 2
                assert exchange(edges, [*range(size)]) == [1, -1]


# connect() and verify() find the same groups on all ranks: once each rank has used its edges, and
# once one call has created all.
@pytest.mark.parametrize("at_once", [pytest.param(False, marks=pytest.mark.full), True])
@pytest.mark.ranks(4, timeout=60)
def test_connect(at_once):
    rank = dist.get_rank()
    with HyperCommGrid("pp=4", lazy_init=True) as grid:
        edges, before = grid.edges(wrap=True), registered_groups()
        if at_once:
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


# With verify, the first use is one creation by all ranks of the grid, whichever edge it is.
@pytest.mark.parametrize("wrap", [pytest.param(False, marks=pytest.mark.full), True])
@pytest.mark.ranks(4, timeout=60)
def test_verified(wrap):
    rank = dist.get_rank()
    with HyperCommGrid("pp=4", verify=True) as grid:
        edges = grid.edges(wrap=wrap)
        wanted = [int(wrap or rank > 0), -int(wrap or rank < 3)]
        assert exchange(edges, [0, 1, 2, 3]) == wanted
        assert len(grid.pgs) == (6 if wrap else 4)
        edges.create()


# After a reshape, a rank that has all of its edges takes part in the creation of the new ones.
@pytest.mark.full
@pytest.mark.ranks(4, timeout=60)
def test_verified_after_a_reshape():
    rank = dist.get_rank()
    with HyperCommGrid("pp=2,dp=2", verify=True) as grid:
        edges = grid.edges()
        assert exchange(edges, [rank // 2 * 2, rank // 2 * 2 + 1]) == [rank % 2, rank % 2 - 1]
        grid.reshape("pp=4,dp=1")
        assert exchange(edges, [0, 1, 2, 3]) == [int(rank > 0), -int(rank < 3)]
        grid.verify(LIMIT)


# Once two ranks have used an edge, all ranks can create the others, and all find the same.
@pytest.mark.ranks(4, timeout=60)
def test_create_after_a_use_by_two_ranks():
    with HyperCommGrid("pp=4") as grid:
        edges = grid.edges()
        used = {1: "to_next", 2: "from_previous"}
        if dist.get_rank() in used:
            assert getattr(edges, used[dist.get_rank()]).size() == 2
        edges.create()
        grid.verify(LIMIT)
        grid.reshape("pp=2,dp=2")
