"""The grid on real gloo processes: who takes part in what is read off the numbers they sum."""

import inspect
from datetime import timedelta
from itertools import chain, combinations

import pytest
import torch
import torch.distributed as dist
from by_numpy import group_of
from group_facts import all_reduce_of, sum_over
from group_facts import tables as registered

from hypercomm import HyperCommGrid, RankLayout
from hypercomm.errors import PlanMismatchError

KEEPS_ORDER = "sort_ranks" in inspect.signature(dist.new_group).parameters

LAYOUTS = {
    "one dim": ([2], range(2)),
    "two dims": ([3, 2], range(6)),
    "behind others": ([2, 2], range(1, 5)),
    "a dim of size 1": ([2, 1, 3], range(6)),
    "three dims": ([2, 2, 2], range(8)),
    "strides in another order": ([2, 2, 2], [0, 4, 1, 5, 2, 6, 3, 7]),
    "permuted": ([2, 2, 2], [6, 7, 2, 3, 5, 4, 0, 1]),
    "left out": ([2, 3], [0, 1, 4, 5, 6, 7]),
    "both": ([3, 2], [7, 0, 3, 5, 2, 6]),
    "turned round": ([4], [3, 2, 1, 0]),
}
"""Sizes by dim, and who is where, the first dim fastest."""
BY_DEFAULT = {"behind others"}
WAYS = [
    pytest.param(case, creation, marks=[] if case in BY_DEFAULT else pytest.mark.full)
    for case, (_, ranks) in LAYOUTS.items()
    for creation in ("local", "enumerate")
    if creation == "local" or isinstance(ranks, range) or KEEPS_ORDER
]


def check_use(group, members):
    """Check a group's members and their order by torch's words, messages, a sum and two roots."""
    own, count = torch.tensor([dist.get_rank()]), len(members)
    at = members.index(dist.get_rank())
    assert dist.get_process_group_ranks(group) == members
    assert (group.rank(), dist.get_group_rank(group, dist.get_rank())) == (at, at)
    gathered = [torch.empty_like(own) for _ in range(count)]
    dist.all_gather(gathered, own, group=group)
    assert [part.item() for part in gathered] == members
    assert sum_over(group) == sum(10**member for member in members)
    dist.broadcast(from_first := own.clone(), src=members[0], group=group)
    assert from_first.item() == members[0]
    parts = [torch.tensor([part]) for part in range(count)] if at == count - 1 else None
    dist.scatter(scattered := own.clone(), parts, src=members[-1], group=group)
    assert scattered.item() == at


# Whatever the layout, dense or over a list, numpy's reshape says who is in a group, and in which
# order: for every combination of dims, with each way of creating groups that gloo can have, one by
# one and at once, eager and lazy. Ranks outside get None, and are not waited for.
@pytest.mark.parametrize(("case", "creation"), WAYS)
@pytest.mark.ranks(8, timeout=120)
def test_groups_are_numpys(case, creation):
    (shape, ranks), rank = LAYOUTS[case], dist.get_rank()
    names = ["tp", "cp", "dp"][: len(shape)]
    every = list(chain.from_iterable(combinations(names, n) for n in range(1, len(names) + 1)))
    layout = RankLayout(shape, names, ranks=ranks)
    with HyperCommGrid(layout, creation=creation) as grid:
        alone = [grid.create_pg(dims) for dims in every]
        lazily = creation == "local" or None
        requests = [{"dims": dims, "name": "lazy", "lazy_init": lazily} for dims in every]
        at_once = grid.create_pgs(requests)
        for dims, *groups in zip(every, alone, at_once, strict=True):
            members = group_of(shape, names, ranks, dims, rank)
            for group in groups:
                assert (group is None) == (members is None)
                if group is not None:
                    check_use(group, members)


HETEROGENEOUS = [[0, 4, 6], [1, 4, 6], [2, 5, 7], [3, 5, 7]]
"""Pipelines of two first stages that share the later stages, as FlagScale has them."""


# Lists of several sizes are groups in the order of each list; ranks in no list get None.
@pytest.mark.parametrize("creation", ["local", pytest.param("enumerate", marks=pytest.mark.full)])
@pytest.mark.ranks(8, timeout=120)
def test_groups_from_lists(creation):
    lists = [[0, 1, 2], [3, 5], [7]]
    with HyperCommGrid("tp=2,dp=4", creation=creation) as grid:
        group = grid.create_pg("tp+dp", name="pipelines", derive=lists)
        own = next((members for members in lists if dist.get_rank() in members), None)
        assert (group is None) == (own is None)
        if group is not None:
            check_use(group, own)


# Overlapping lists are one key each, all in one call: a rank is in several of these groups, and
# creates only those.
@pytest.mark.ranks(8, timeout=120)
def test_overlapping_lists():
    rank, before = dist.get_rank(), len(registered()[0])
    with HyperCommGrid("tp=2,dp=4") as grid:
        requests = [
            {"dims": grid.dim_names, "name": f"path{index}", "derive": [ranks]}
            for index, ranks in enumerate(HETEROGENEOUS)
        ]
        groups = grid.create_pgs(requests)
        assert [group is not None for group in groups] == [rank in ranks for ranks in HETEROGENEOUS]
        own = [ranks for ranks in HETEROGENEOUS if rank in ranks]
        assert len(registered()[0]) == before + len(own)
        for group, ranks in zip(filter(None, groups), own, strict=True):
            check_use(group, ranks)


# Lists that differ between ranks are an error on all members, at once.
@pytest.mark.ranks(4, timeout=120)
def test_lists_that_differ():
    lists = [[0, 1], [2, 3]] if dist.get_rank() < 2 else [[0, 1], [3, 2]]
    with HyperCommGrid("tp=2,dp=2") as grid:
        request = {"dims": "tp", "name": "pairs", "derive": lists}
        with pytest.raises(PlanMismatchError, match="members"):
            grid.create_pgs([request])
        assert sum_over(grid.create_pg("tp", name="pairs", derive=[[0, 1], [2, 3]])) in {11, 1100}


# Grids beside each other, each rank knowing only its own, do not wait for each other.
@pytest.mark.ranks(5)
def test_grids_beside_each_other():
    first, size = (0, 2) if dist.get_rank() < 2 else (2, 3)
    with HyperCommGrid([size], ["dp"], first) as grid:
        assert sum_over(grid.create_pg("dp")) == (11100 if first else 11)


# Ranks that have created different numbers of groups still agree on a group's name
# (pytorch issue 173608: torch's own members-only creation waits for ever here).
@pytest.mark.ranks(4)
def test_uneven_memberships():
    rank = dist.get_rank()
    if rank in {0, 3}:
        dist.new_group([0, 3], use_local_synchronization=True)
    overlapping = HyperCommGrid([2], ["pair"], rank_offset=2) if rank >= 2 else None
    if overlapping is not None:
        overlapping.create_pg("pair")
    with HyperCommGrid([4], ["dp"], name="late") as grid:
        assert sum_over(grid.create_pg("dp")) == 1111
    if overlapping is not None:
        overlapping.destroy()


# A grid destroys what it created, and leaves WORLD and other people's groups alone and working.
@pytest.mark.parametrize("creation", ["local", pytest.param("enumerate", marks=pytest.mark.full)])
@pytest.mark.ranks(4)
def test_destroys_only_its_own(creation):
    rank, foreign = dist.get_rank(), dist.new_group([0, 1])
    for _ in range(2):  # the first one fills torch's tables with what stays
        before = registered()
        with HyperCommGrid([2, 2], ["tp", "dp"], creation=creation) as grid:
            for dims in ("tp", "dp", ["tp", "dp"]):
                grid.create_pg(dims)
            assert len(registered()[0]) == len(before[0]) + 3
        grid.destroy()
    assert registered() == before
    assert sum_over(dist.group.WORLD) == 1111
    assert rank > 1 or sum_over(foreign) == 11


# A group may be destroyed as soon as it is created: that waits for members that still connect.
# Without that, five of six such runs failed with gloo's "Connection closed by peer".
@pytest.mark.full
@pytest.mark.ranks(4)
def test_destroying_at_once():
    for creation in ["local", "enumerate"] * 30:
        with HyperCommGrid([2, 2], ["tp", "dp"], creation=creation) as grid:
            grid.create_pg("tp")


# A process that was in another job before agrees on names with one that is new: 0 and 1 are a job;
# then 0, which has a past, and 2, which has none, are another.
@pytest.mark.ranks(3)
def test_a_survivor_and_its_new_peer(tmp_path):
    rank = dist.get_rank()
    dist.destroy_process_group()
    for job, number, total in {
        0: [("first", 0, 11), ("second", 0, 101)],
        1: [("first", 1, 11)],
        2: [("second", 1, 101)],
    }[rank]:
        store = dist.FileStore(str(tmp_path / job), 2)
        dist.init_process_group("gloo", store=store, rank=number, world_size=2)
        with HyperCommGrid([2], ["dp"]) as grid:
            group = grid.create_pg("dp", timeout=timedelta(seconds=10))
            assert all_reduce_of(10**rank, group) == total
        dist.destroy_process_group()
